"""Reads the records of a Grain dataset; skips holes (None) and records whose reading raises."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import grain
import numpy as np
from grain import experimental
from grain._src.python.dataset.transformations import prefetch

from ...core.feeding.record_reader import ReadError, RecordBatch, RecordPosition
from .packed_records import PackedRecords
from .packing import unpacked

__all__: list[str] = []

# Reading threads contend for the GIL: one thread was 1.4 times as fast as two threads, and two were
# 1.7 times as fast as four. Two threads still help if reads wait for a disk.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Takes the place of a record whose reading raised an exception."""

    error: Exception


class RecordLists(grain.MapDataset):
    """A dataset of lists of up to ``rows`` consecutive records of a MapDataset.

    Holes (None) are left out, and a record whose reading raises is replaced by a `_Failure`.
    (Grain's own ``batch`` rejects datasets with holes, and loses the other records of a batch if
    the reading of a record raises.)
    """

    def __init__(self, parent: grain.MapDataset, rows: int):
        super().__init__(parent)
        self._rows = rows

    def __len__(self) -> int:
        return -(-len(self._parent) // self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, index = divmod(index, len(self))
        records, size = [], len(self._parent)
        for at in range(index * self._rows, min(size, (index + 1) * self._rows)):
            try:
                record = self._parent[epoch * size + at]
            except Exception as error:
                record = _Failure(error)
            if isinstance(record, PackedRecords):
                raise TypeError(
                    "a MapDataset's batches can't be batched again. Pass its records, or write "
                    ".batch(..., batch_fn=pack_records).to_iter_dataset() before the transform"
                )
            if record is not None:
                records.append(record)
        return records or None  # Grain skips None, but counts it in its position

    def __str__(self) -> str:
        return f"RecordLists(rows={self._rows})"


@dataclasses.dataclass(frozen=True)
class ParentPosition:
    """A position of a `Reader` between two batches.

    An *entry* is an element of the parent or, if the parent yields `RecordLists`, an element of one
    of these lists: a record, a list of the records of a batch, or a failure.

    Attributes:
        parent: The state of the parent iterator; reading continues after it.
        records: Number of records in the batches before the position.
        skip: Number of entries of the parent's next list that belong to earlier batches.
        failed: Indices, counted from ``parent``, of entries to skip because their errors were
            already raised.
    """

    parent: Any
    records: int = 0
    skip: int = 0
    failed: tuple[int, ...] = ()


class Reader:
    """Reads the records of successive batches.

    Args:
        parent: An iterator over records, or over lists of the records of a batch.
        rows: Number of records in a batch.
        lists: Whether the parent iterates over `RecordLists`, whose lists are joined and split into
            batches.
        only_full: Whether to drop incomplete batches.
        pad: Whether to pad incomplete batches with their last record.
        longer: Whether batches of padding follow the last record until all other processes have
            delivered their records.

    Attributes:
        start: The position of the first batch.
        position: The position after the last batch that was read.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        rows: int,
        lists: bool,
        only_full: bool,
        pad: bool,
        longer: bool = False,
    ):
        self._parent = parent
        self._rows = rows
        self._lists = lists
        self._only_full = only_full
        self._pad = pad
        self._longer = longer
        self._padding_records: list[Any] = []  # the first record, if batches of padding may follow
        self._source = _source(parent)
        self.start = ParentPosition(parent.get_state())
        self._begin(self.start)

    def next_records(self) -> RecordBatch:
        """Returns the records of the next batch; see `RecordReader`."""
        is_first = self._longer and not self.position.records
        records = self._records()
        if is_first:
            self._padding_records = records[:1]
        if len(records) > self._rows:
            raise ValueError(
                f"the dataset before DALITransform yields lists of {len(records)} records, but a "
                f"batch has {self._rows} records. Write .batch({self._rows}, "
                "batch_fn=pack_records) before the transform"
            )
        position, count = self.position, len(records)
        start = position.records - count
        batch = RecordBatch(
            records,
            position,
            lambda row: f"record {start + min(row, count - 1)} of the stream",
        )
        return batch.padded(self._rows) if self._pad else batch

    def padding(self) -> RecordBatch:
        """Returns a batch of padding for steps after the last record.

        The batch repeats the first readable record of the stream. An iterator that resumes at the
        end has not read the last record, but can read the first record again.
        """
        position = self.position
        if not self._padding_records:
            self.go_to(self.start)
            try:
                self._padding_records = [self._first_record()]
            finally:
                self.go_to(position)
        return RecordBatch(
            self._padding_records * self._rows,
            position,
            lambda row: "the first record of the stream, as padding",
            np.zeros(self._rows, bool),
        )

    def _first_record(self) -> Any:
        """Returns the first record at or after the current position that can be read."""
        while True:
            with contextlib.suppress(ReadError):
                entry = self._entry()
                return entry[0] if isinstance(entry, list) else entry

    def seek(self, position: RecordPosition) -> None:
        """Moves to the batch after a position; see `RecordReader`."""
        self.go_to(position.after or self.start)

    def _begin(self, position: ParentPosition) -> None:
        """Sets the position, and forgets the entries that were read after it.

        The parent must be at the position already.
        """
        self.position = position
        self._failed = list(position.failed)
        self._entries = 0  # number of entries that were read after position.parent
        self._gathered: list[Any] = []
        self._list: list[Any] = []
        self._used = 0
        self._before_list = position.parent

    def go_to(self, position: ParentPosition) -> None:
        """Moves to a position, where the next batch begins."""
        self._parent.set_state(copy.deepcopy(position.parent))
        self._begin(position)

    def retry(self) -> None:
        """Moves back to the end of the last batch; skips entries whose errors were raised."""
        self.go_to(dataclasses.replace(self.position, failed=tuple(self._failed)))

    def _records(self) -> list[Any]:
        """Returns the records of the next batch.

        Raises:
            StopIteration: At the end of the stream.
            ReadError: If reading a record failed. The next call returns the records before and
                after the failed record.
        """
        count = self.position.records
        try:
            while True:
                records = self._next_batch()
                count += len(records)
                if not self._only_full or len(records) >= self._rows:
                    break
                self._gathered = []
        except (StopIteration, ReadError):
            raise
        except BaseException:  # the records read so far must be read again
            self.retry()
            raise
        entries, used = self._list, self._used
        if used == len(entries):
            self._begin(ParentPosition(self._parent.get_state(), count))
        else:  # the remaining records of the list belong to the next batch
            self._begin(ParentPosition(self._before_list, count, used))
            self._list, self._used, self._entries = entries, used, used
        return records

    def _next_batch(self) -> list[Any]:
        """Returns records up to a full batch or the end, or a list of records from the parent.

        Raises:
            StopIteration: If there are no further records.
            ReadError: If reading a record failed.
        """
        while len(self._gathered) < self._rows:
            try:
                entry = self._entry()
            except StopIteration:
                if not self._gathered:
                    raise
                break
            if isinstance(entry, list) and not self._gathered:
                return entry
            self._gathered.append(entry)
        return self._gathered

    def _entry(self) -> Any:
        """Returns the next entry that is not skipped: a record, or a list of a batch's records.

        Raises:
            StopIteration: At the end of the stream.
            ReadError: If the entry is a failure.
        """
        while True:
            entry = self._next_of_list() if self._lists else self._next_of_parent()
            number = self._entries
            self._entries += 1
            # Entries whose errors were raised before a state was saved are also skipped after the
            # state is restored.
            if entry is None or number < self.position.skip or number in self._failed:
                continue
            if isinstance(entry, _Failure):
                self._failed.append(number)
                raise ReadError(
                    dataclasses.replace(self.position, failed=tuple(self._failed))
                ) from entry.error
            return entry

    def _next_of_list(self) -> Any:
        """Returns the next entry of the parent's current list; after its end, of the next list."""
        if self._used == len(self._list):
            self._before_list = self._parent.get_state()
            self._list, self._used = next(self._parent), 0
        self._used += 1
        return self._list[self._used - 1]

    def _next_of_parent(self) -> Any:
        """Returns the parent's next element, or a `_Failure` after which reading can continue."""
        before = self._parent_position()
        try:
            return unpacked(next(self._parent))
        except StopIteration:
            raise
        except Exception as error:
            if self._parent_position() == before:
                if self._source is None:  # reading again would raise again
                    raise
                # With threads, Grain's prefetching iterator has moved past the record, but its
                # index has not: its states would repeat a record, and it would end with an
                # IndexError. Without threads, it has not moved. Setting the index corrects both.
                experimental.set_next_index(self._source, before + 1)
            return _Failure(error)

    def _parent_position(self) -> Any:
        """Returns the index or the state of the parent, to detect whether the parent moved."""
        if self._source is not None:
            return experimental.get_next_index(self._source)
        return self._parent.get_state()


def _source(iterator: grain.DatasetIterator) -> grain.DatasetIterator | None:
    """Returns Grain's iterator over the MapDataset that provides an iterator's elements.

    Returns None if the elements come from several iterators, or through worker processes or
    threads of other iterators.
    """
    while not prefetch.is_prefetch_iterator(iterator):
        # Private in Grain: the parents of an iterator.
        parents: Any = getattr(iterator, "_parents", ())
        if len(parents) != 1:
            return None
        iterator = parents[0]
    return iterator if isinstance(iterator, prefetch.PrefetchDatasetIterator) else None
