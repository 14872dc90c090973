"""`RecordReader`: the protocol of streams of records, with their batches and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class ReadError(Exception):
    """Raised if reading a record failed with ``__cause__``; the next read skips the record.

    Args:
        after: The reader's description of the position after the record; see `RecordBatch`.
    """

    def __init__(self, after: Any):
        super().__init__("the reading of a record raised")
        self.after = after


@dataclasses.dataclass(frozen=True)
class Restored:
    """The parts of a restored state that stay valid until another state is restored.

    Attributes:
        random: The random state at the restored position; see `StreamEngine.random_state`.
        operators: A line for each operator of the state's graph.
        seed: The seed of the pipelines; None for the configured seed.
        draw_seed: The seed of ``draw``; None for the seed of the pipelines.
        note: A value that the adapter has stored in the state for itself.
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
        step: The number of batches before the position.
        after: The reader's own description of the position, such as a state of Grain's iterator;
            None at the start.
        checkpoints: DALI's checkpoint of each pipeline; None if the step or ``restored`` is enough
            to build the pipelines at the position.
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
        records: The record in each row.
        after: The reader's own description of the position after the batch.
        name: Returns the name of a row's record for errors, such as its index and key.
        valid: False for rows of padding, bool [rows]; None if all rows are valid.
    """

    records: Sequence[Any]
    after: Any
    name: Callable[[int], str]
    valid: np.ndarray | None = None

    def padded(self, rows: int) -> RecordBatch:
        """Returns the batch, padded with its last record to ``rows`` rows; see `core.order`."""
        missing = rows - len(self.records)
        if missing <= 0:
            return self
        return dataclasses.replace(
            self,
            records=[*self.records, *[self.records[-1]] * missing],
            valid=np.arange(rows) < len(self.records),
        )


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The index in the stream of each row of this process, for ``draw``.

    Row r of step s has the index ``first[r] + s * per_step``.

    Attributes:
        first: The indices of the rows of step 0, int64 [rows].
        per_step: Number of records of a step in all processes.
    """

    first: NDArray[np.int64]
    per_step: int


class RecordReader(Protocol):
    """Reads the records of a stream in batches."""

    def next_records(self) -> RecordBatch:
        """Returns the next batch, for all pipelines of this process.

        Raises:
            StopIteration: At the end.
            ReadError: If the reading of a record raised; the next call skips the record.
            Exception: If no record was read; the next call tries again.
        """
        ...

    def seek(self, position: RecordPosition) -> None:
        """Moves to a position; the next batch is the batch after the position."""
        ...
