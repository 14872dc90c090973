"""Reading the records of a Grain dataset, past holes and past those whose reading fails."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import grain
import numpy as np
from grain import experimental
from grain._src.python.dataset.transformations import prefetch

from ...core.feeding.records import ReadError, RecordBatch, RecordPosition
from .packed_records import PackedRecords
from .packing import unpacked

__all__: list[str] = []

# Threads that read files compete for Python's lock: one thread was 1.4 times as fast as two, two
# 1.7 times as fast as four. Two still help where reads wait for a disk.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Stands for a record whose reading raised."""

    error: Exception


class RecordLists(grain.MapDataset):
    """Lists of a MapDataset's records, for ``rows`` places each; holes (None) are left out.

    Grain's own ``batch`` refuses datasets with holes, and if one record raises it loses the others
    of the batch.
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
                    "a MapDataset's batches can't be batched again: pass its records, or write "
                    ".batch(..., batch_fn=pack_records).to_iter_dataset() before the transform"
                )
            if record is not None:
                records.append(record)
        return records or None  # an empty list is a hole, which Grain counts and passes over

    def __str__(self) -> str:
        return f"RecordLists(rows={self._rows})"


@dataclasses.dataclass(frozen=True)
class Position:
    """A position between two batches.

    Attributes:
        parent: The state of the parent.
        records: Number of records behind it.
        skip: Number of entries of the parent's next list that are behind it.
        failed: Numbers of the entries after ``parent`` whose exceptions were raised already.
    """

    parent: Any
    records: int = 0
    skip: int = 0
    failed: tuple[int, ...] = ()


class Reader:
    """Reads the records of one batch after the other.

    Args:
        parent: An iterator over records, or over lists of them, each a batch.
        rows: Number of records in a batch.
        lists: Whether the parent is one of `RecordLists`, which are joined and cut.
        whole: Whether batches of fewer rows are left out.
        pad: Whether they are filled up with their last record.
        longer: Whether batches of padding may follow the last record.

    Attributes:
        start: The position of the first batch.
        position: The position behind the last batch that was read.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        rows: int,
        lists: bool,
        whole: bool,
        pad: bool,
        longer: bool = False,
    ):
        self._parent = parent
        self._rows = rows
        self._lists = lists
        self._whole = whole
        self._pad = pad
        self._longer = longer
        self._first: list[Any] = []  # the first record, if batches of padding may follow
        self._source = _source(parent)
        self.start = Position(parent.get_state())
        self._begin(self.start)

    def next_records(self) -> RecordBatch:
        """The records of the next batch; see `RecordReader`."""
        is_first = self._longer and not self.position.records
        records = self._records()
        if is_first:
            self._first = records[:1]
        if len(records) > self._rows:
            raise ValueError(
                f"the parent gives lists of {len(records)} records, more than the {self._rows} of "
                "a batch: batch the records by that number"
            )
        position, count = self.position, len(records)
        start = position.records - count
        batch = RecordBatch(
            records,
            position,
            lambda row: f"record {start + min(row, count - 1)} of the stream",
        )
        return batch.padded(self._rows) if self._pad else batch

    def may_be_behind(self, step: int, records: int) -> bool:
        """Whether so many batches can hold so many records.

        All but the last are whole, unless the parent gives lists of its own.
        """
        whole = step * self._rows
        if self._longer:
            return 0 <= records <= whole
        fewest = whole if self._whole else whole - self._rows + 1 if self._lists else step
        most = records if self._whole and not self._lists else whole  # lists may be left out
        return max(fewest, 0) <= records <= most

    def padding(self) -> RecordBatch:
        """A batch of padding behind the last record, which repeats the first one.

        A resumed iterator that starts behind the last record pads with the same one.
        """
        position = self.position
        if not self._first:
            self.go_to(self.start)
            try:
                self._first = [self._first_record()]
            finally:
                self.go_to(position)
        return RecordBatch(
            self._first * self._rows,
            position,
            lambda row: "the first record of the stream, as padding",
            np.zeros(self._rows, bool),
        )

    def _first_record(self) -> Any:
        """The first record that can be read, from the start."""
        while True:
            with contextlib.suppress(ReadError):
                entry = self._entry()
                return entry[0] if isinstance(entry, list) else entry

    def seek(self, position: RecordPosition) -> None:
        """Moves to the batch behind a position; see `RecordReader`."""
        self.go_to(position.after or self.start)

    def _begin(self, position: Position) -> None:
        """Starts over at a position, at which the parent is."""
        self.position = position
        self._failed = list(position.failed)
        self._entries = 0  # read after position.parent
        self._gathered: list[Any] = []
        self._list: list[Any] = []
        self._used = 0
        self._before_list = position.parent

    def go_to(self, position: Position) -> None:
        """Moves the parent to a position, and continues there."""
        self._parent.set_state(copy.deepcopy(position.parent))
        self._begin(position)

    def again(self) -> None:
        """Returns to the position; entries that raised are left out."""
        self.go_to(dataclasses.replace(self.position, failed=tuple(self._failed)))

    def _records(self) -> list[Any]:
        """The records of the next batch.

        Raises:
            StopIteration: At the end.
            ReadError: If the reading of a record raised; the records before it are kept.
        """
        count = self.position.records
        try:
            while True:
                records = self._next_batch()
                count += len(records)
                if not self._whole or len(records) >= self._rows:
                    break
                self._gathered = []
        except (StopIteration, ReadError):
            raise
        except BaseException:  # records that were read already must come again
            self.again()
            raise
        entries, used = self._list, self._used
        if used == len(entries):
            self._begin(Position(self._parent.get_state(), count))
        else:  # the rest of the list is the next batch's
            self._begin(Position(self._before_list, count, used))
            self._list, self._used, self._entries = entries, used, used
        return records

    def _next_batch(self) -> list[Any]:
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
        """The next record, or the next list of a batch's records."""
        while True:
            entry = self._next_of_list() if self._lists else self._next_of_parent()
            number = self._entries
            self._entries += 1
            # Entries that raised before a state was saved are left out after it, too.
            if entry is None or number < self.position.skip or number in self._failed:
                continue
            if isinstance(entry, _Failure):
                self._failed.append(number)
                raise ReadError(
                    dataclasses.replace(self.position, failed=tuple(self._failed))
                ) from entry.error
            return entry

    def _next_of_list(self) -> Any:
        if self._used == len(self._list):
            self._before_list = self._parent.get_state()
            self._list, self._used = next(self._parent), 0
        self._used += 1
        return self._list[self._used - 1]

    def _next_of_parent(self) -> Any:
        before = self._where()
        try:
            return unpacked(next(self._parent))
        except StopIteration:
            raise
        except Exception as error:
            if self._where() == before:
                if self._source is None:  # the same read would raise again
                    raise
                # Grain's own reader continues behind the record but counts from before it, so that
                # its states repeat a record and it ends with an IndexError; without threads it
                # doesn't move.
                experimental.set_next_index(self._source, before + 1)
            return _Failure(error)

    def _where(self) -> Any:
        """The parent's position, to see whether it moved."""
        if self._source is not None:
            return experimental.get_next_index(self._source)
        return self._parent.get_state()


def _source(iterator: grain.DatasetIterator) -> grain.DatasetIterator | None:
    """The iterator over a MapDataset that alone feeds an iterator, in its thread; None if none."""
    while not prefetch.is_prefetch_iterator(iterator):
        parents: Any = getattr(iterator, "_parents", ())
        if len(parents) != 1:
            return None
        iterator = parents[0]
    return iterator if isinstance(iterator, prefetch.PrefetchDatasetIterator) else None
