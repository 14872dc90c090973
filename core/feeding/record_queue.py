"""Batches of records on their way into pipelines."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..pipeline.calls import calls


class ReadError(Exception):
    """The reading of a record raised ``__cause__``; the next read goes on behind it.

    Args:
        after: As `RecordBatch.after`, behind the record.
    """

    def __init__(self, after: Any):
        super().__init__("the reading of a record raised")
        self.after = after


@dataclasses.dataclass(frozen=True)
class Restored:
    """The parts of a restored state that hold until the next one is restored.

    Attributes:
        random: The random state at the restored position; see `RecordEngine.random_state`.
        operators: A line for each operator of the state's graph.
        seed: The seed of the pipelines; None for their own.
        draw_seed: The seed of ``draw``; None for the pipelines'.
        note: The part of the state that only the adapter reads.
    """

    random: str = ""
    operators: tuple[str, ...] = ()
    seed: int | None = None
    draw_seed: int | None = None
    note: Any = None


@dataclasses.dataclass(frozen=True)
class RecordPosition:
    """A position in a stream of batches of records, with everything that a state restores.

    Attributes:
        step: Number of batches before it.
        after: `RecordBatch.after` of the last of them; None at the start.
        checkpoints: DALI's checkpoint of each pipeline; None for the start, and for positions that
            the step or ``restored`` describes.
        restored: The parts of the state that was restored last.
    """

    step: int = 0
    after: Any = None
    checkpoints: tuple[bytes, ...] | None = None
    restored: Restored = Restored()


@dataclasses.dataclass(frozen=True)
class RecordBatch:
    """The records of one batch.

    Attributes:
        records: One for each row.
        after: The reader's own description of the position behind them.
        name: Gives the name of a row's record for errors, e.g. its index and key.
        valid: Which rows are no padding; None for all.
        refused: Why records can't be augmented, by row; graphs note it as they run.
    """

    records: Sequence[Any]
    after: Any
    name: Callable[[int], str]
    valid: np.ndarray | None = None
    refused: dict[int, Exception] = dataclasses.field(default_factory=dict)

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
        return dataclasses.replace(self, records=records, valid=valid, refused={})


# The number in the stream of each row of a step, int64 [rows].
Numbers = Callable[[int], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class PipelineRows:
    """The rows of a batch that one pipeline takes.

    Attributes:
        records: The record of each.
        numbers: The number in the stream of each, int64 [rows]; None where it is not known.
        refuse: Called with a row whose record can't be augmented, and why.
    """

    records: Sequence[Any]
    numbers: NDArray[np.int64] | None
    refuse: Callable[[int, Exception], None]


class RecordReader(Protocol):
    """A reader of the records of a stream, batch after batch."""

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
        numbers: Gives the numbers of the rows of a step; None where they are unknown.
        batches: The batches that it starts with.

    Attributes:
        batches: The batches.
        step: The number of the first of them.
    """

    def __init__(
        self,
        next_records: Callable[[], RecordBatch],
        pipelines: int,
        rows: int,
        numbers: Numbers | None,
        batches: Sequence[RecordBatch] = (),
    ):
        self.batches = collections.deque(batches)
        self.step = 0
        # Kept until the consumer comes to it: all pipelines must meet it, and it is raised once.
        self.error: ReadError | None = None
        self._next_records = next_records
        self._rows = rows
        self._numbers = numbers
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

    def read(self, pipeline: int) -> PipelineRows:
        """The rows that one pipeline takes next; raises as `at`."""
        place = self._read[pipeline]
        batch = self.at(place)
        self._read[pipeline] += 1
        first, last = 0, len(batch.records)
        if len(self._read) > 1 and last > self._rows:
            first, last = pipeline * self._rows, (pipeline + 1) * self._rows
        numbers = self._numbers and self._numbers(self.step + place)[first:last]

        def refuse(row: int, error: Exception) -> None:
            batch.refused.setdefault(first + row, error)

        return PipelineRows(batch.records[first:last], numbers, refuse)

    def pop(self) -> None:
        """Drops the first batch, which every pipeline has read."""
        self.batches.popleft()
        self.step += 1
        self._read = [read - 1 for read in self._read]

    def rewind(self) -> None:
        """Lets all pipelines start over at the first batch."""
        self._read = [0] * len(self._read)

    def clear(self, step: int) -> None:
        """Drops all batches; the next one is that of a step."""
        self.batches.clear()
        self.step = step
        self.error = None
        self.rewind()


def no_more() -> RecordBatch:
    """The ``next_records`` of a queue that has an end."""
    raise StopIteration
