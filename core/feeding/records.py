"""Records of a stream: batches, positions and readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


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
        random: The random state at the restored position; see `StreamEngine.random_state`.
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


# The number in the stream of each row of a step, int64 [rows].
Numbers = Callable[[int], NDArray[np.int64]]


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
