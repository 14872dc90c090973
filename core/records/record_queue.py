"""Batches of records on their way into pipelines."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..pipeline.lifetime import calls


class ReadError(Exception):
    """A record whose reading raised; ``__cause__`` is what. The next read goes on behind it.

    Args:
        after: As `RecordBatch.after`, behind the record.
    """

    def __init__(self, after: Any):
        super().__init__("the reading of a record raised")
        self.after = after


@dataclasses.dataclass(frozen=True)
class RecordPosition:
    """A position in a stream of batches of records.

    Attributes:
        step: Number of batches behind it.
        after: `RecordBatch.after` of the last of them; None at the start.
        checkpoints: DALI's checkpoint of each pipeline; None where they stand as at the start,
            or as the step alone says.
    """

    step: int = 0
    after: Any = None
    checkpoints: tuple[bytes, ...] | None = None


@dataclasses.dataclass(frozen=True)
class RecordBatch:
    """The records of one batch.

    Attributes:
        records: One for each row.
        after: What the reader wants to know of the position behind them.
        name: Gives what the record of a row is called in errors, e.g. its index and key.
        valid: Which rows are no padding; None for all.
    """

    records: Sequence[Any]
    after: Any
    name: Callable[[int], str]
    valid: np.ndarray | None = None

    def padded(self, rows: int) -> RecordBatch:
        """The batch with its last record repeated up to so many rows."""
        missing = rows - len(self.records)
        if missing <= 0:
            return self
        return dataclasses.replace(
            self,
            records=[*self.records, *[self.records[-1]] * missing],
            valid=np.arange(rows) < len(self.records),
        )

    def without(self, bad: Sequence[int], spare: Any) -> RecordBatch:
        """The batch with other records, not valid, in place of bad ones.

        Args:
            bad: Rows.
            spare: The record to take where every row is bad; else it is the nearest good one.
        """
        records = list(self.records)
        valid = np.ones(len(records), bool) if self.valid is None else self.valid.copy()
        good = [i for i in range(len(records)) if i not in set(bad)]
        for i in bad:
            records[i] = records[min(good, key=lambda k: abs(k - i))] if good else spare
            valid[i] = False
        return dataclasses.replace(self, records=records, valid=valid)


class RecordReader(Protocol):
    """What gives the records of a stream, batch after batch."""

    def next_records(self) -> RecordBatch:
        """The next batch, for all pipelines of this process together.

        Raises:
            StopIteration: At the end.
            ReadError: If the reading of a record raised, which the next call leaves out.
            Exception: If nothing was read; the next call tries again.
        """
        ...

    def seek(self, position: RecordPosition) -> None:
        """Goes to the batch behind a position."""
        ...


class RecordQueue:
    """The batches that were read and are not taken; each pipeline reads along it.

    Args:
        next_records: Gives the next batch; see `RecordReader`.
        pipelines: Number of pipelines.
        rows: Rows of each pipeline's batch.
        batches: What it starts with.

    Attributes:
        batches: The batches.
    """

    def __init__(
        self,
        next_records: Callable[[], RecordBatch],
        pipelines: int,
        rows: int,
        batches: Sequence[RecordBatch] = (),
    ):
        self.batches = collections.deque(batches)
        # Kept until the consumer comes to it: all pipelines must meet it, and it is raised once.
        self.error: ReadError | None = None
        self._next_records = next_records
        self._rows = rows
        self._read = [0] * pipelines  # batches of the queue that each pipeline has read

    @property
    def unread(self) -> bool:
        """Whether a pipeline has read nothing yet."""
        return 0 in self._read

    def at(self, place: int) -> RecordBatch:
        """The batch at a place in the queue.

        Raises:
            StopIteration: If the stream ends before it.
            ReadError: If the reading of a record before it raised.
        """
        while len(self.batches) <= place:
            if self.error is not None:
                raise self.error
            try:
                with calls.suspended():
                    self.batches.append(self._next_records())
            except ReadError as error:
                self.error = error
                raise
        return self.batches[place]

    def read(self, pipeline: int) -> Sequence[Any]:
        """The records that one pipeline takes next; raises as `at`."""
        records = self.at(self._read[pipeline]).records
        self._read[pipeline] += 1
        if len(self._read) > 1 and len(records) > self._rows:
            records = records[pipeline * self._rows : (pipeline + 1) * self._rows]
        return records

    def pop(self) -> None:
        """Drops the first batch, which every pipeline has read."""
        self.batches.popleft()
        self._read = [read - 1 for read in self._read]

    def rewind(self) -> None:
        """Has all pipelines start over at the first batch."""
        self._read = [0] * len(self._read)

    def clear(self) -> None:
        """Drops all batches."""
        self.batches.clear()
        self.error = None
        self.rewind()


def no_more() -> RecordBatch:
    """The ``next_records`` of a queue that has an end."""
    raise StopIteration
