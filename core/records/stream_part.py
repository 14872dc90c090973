"""This process's part of a stream of records that several processes read together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..errors import ProcessError
from ..pipeline.processes import Agreement
from ..state.agreement import Values
from .record_queue import RecordBatch, RecordPosition, RecordReader


@dataclasses.dataclass(frozen=True)
class StreamPart:
    """The part of a process.

    Attributes:
        values: What must be equal in all processes, by names for errors.
        batches: Number of batches that this process has by itself; None if it is not known.
        agreed: Whether the number is the same in all processes because of ``values``.
        pads: Whether processes with fewer batches add batches of padding; else all stop after the
            smallest number.
        padding: Makes a batch of padding after the last record.
    """

    values: Values
    batches: int | None = None
    agreed: bool = False
    pads: bool = False
    padding: Callable[[], RecordBatch] | None = None


class PartReader:
    """Reads as many batches in every process; see `RecordReader`.

    Args:
        reader: Reads the batches of this process.
        part: This process's part.

    Attributes:
        agreement: Exchanges the numbers of batches; None in a single process.
        step: Number of the next batch.
        total: Number of batches in every process; None until it is known, or if it is not limited.
    """

    def __init__(self, reader: RecordReader, part: StreamPart):
        self.agreement: Agreement | None = None
        self.step = 0
        self.total: int | None = None
        self._reader = reader
        self._part = part

    def agree(self) -> None:
        """Learns the total from all processes, once.

        Raises:
            ProcessError: If a process has no batch, while others have some; or as `Agreement`.
        """
        part, agreement = self._part, self.agreement
        if agreement is None or self.total is not None or part.batches is None or part.agreed:
            return
        counts = agreement.settle(part.values, "the number of batches", part.batches)
        known = {process: count or 0 for process, count in counts.items()}
        empty = [process for process, count in known.items() if not count]
        if empty and any(known.values()):
            needs = "a record to pad with" if part.pads else "a whole batch"
            raise ProcessError(
                f"processes {empty} have no batch of records, and each needs {needs}: give every "
                "process some records, or use fewer processes"
            )
        self.total = (max if part.pads else min)(known.values())

    def next_records(self) -> RecordBatch:
        """The next batch of this process, or a batch of padding."""
        if self.total is not None and self.step >= self.total:
            raise StopIteration
        try:
            batch = self._reader.next_records()
        except StopIteration:
            batch = self._after_end()
        self.step += 1
        return batch

    def _after_end(self) -> RecordBatch:
        """A batch of padding, if other processes have more batches.

        Raises:
            StopIteration: If they have not.
            ProcessError: If batches can't be padded.
        """
        self.agree()
        if self.total is None or self.step >= self.total:
            raise StopIteration
        if not self._part.pads or self._part.padding is None:
            raise ProcessError(
                f"this process has {self.step} batches, and {self.total} were expected of every "
                "process: its dataset gives fewer records than its length says, as filter() does. "
                "Filter the records before they are sliced, use pad='mask', or repeat() them"
            )
        return self._part.padding()

    def seek(self, position: RecordPosition) -> None:
        """Moves to the batch after a position."""
        self._reader.seek(position)
        self.step = position.step


def describe(**values: Any) -> Values:
    """The values of a part, as text or numbers."""
    return {
        name.replace("_", " "): value if isinstance(value, int) else str(value)
        for name, value in values.items()
    }
