"""`PartReader`: reads a stream in several processes, each with its part of every batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..errors import ProcessError
from ..pipeline.processes import Agreement
from ..state.agreement import Batches, Values
from .record_reader import RecordBatch, RecordPosition, RecordReader


@dataclasses.dataclass(frozen=True)
class StreamPart:
    """Describes this process's part of a stream that several processes read together.

    Attributes:
        values: Values that must be equal in all processes, by the names for error messages.
        batches: The number of batches of this process; None if it isn't known without reading.
        agreed: Whether equal ``values`` imply equal numbers of batches in all processes.
        pads: Whether processes with fewer batches add batches of padding. Otherwise all stop
            after the smallest number of batches.
        padding: Returns a batch of padding, for steps after the last record.
    """

    values: Values
    batches: int | None = None
    agreed: bool = False
    pads: bool = False
    padding: Callable[[], RecordBatch] | None = None


class PartReader:
    """Reads equally many batches in every process, by dropping or padding; see `RecordReader`.

    If the number of batches isn't known before the end, the processes repeatedly exchange how many
    batches they have read. A process delivers a batch once every process has the batch or can pad.

    Args:
        reader: Reads the batches of this process.
        part: This process's part.
        agreement: Exchanges the numbers of batches.

    Attributes:
        step: The number of the next batch.
        total: The number of batches in every process; None if it is unknown or unlimited.
    """

    def __init__(self, reader: RecordReader, part: StreamPart, agreement: Agreement):
        self.step = 0
        self.total: int | None = None
        self._reader = reader
        self._part = part
        self._agreement = agreement
        self._end: int | None = None  # the number of batches of this process, once it is known
        self._certain = 0  # the number of batches that every process surely delivers

    def moved(self) -> None:
        """Makes the processes exchange their numbers of batches again, after a move."""
        self._certain, self.total = 0, None

    def must_agree(self, step: int) -> bool:
        """Returns whether the processes must exchange numbers before the batch of a step."""
        return not self._part.agreed and self.total is None and step >= self._certain

    def is_behind_end(self, step: int) -> bool:
        """Returns whether a step is after the last batch of all processes."""
        return self.total is not None and step >= self.total

    def _batches(self, read: Callable[[], int]) -> Batches:
        """Returns how many batches this process has, and whether that is final; may read some."""
        if self._part.batches is not None:
            return Batches(self._part.batches, True)
        count = read()
        return Batches(count, False) if self._end is None else Batches(min(count, self._end), True)

    def agree(self, step: int, read: Callable[[], int]) -> None:
        """Exchanges the numbers of batches between the processes.

        Args:
            step: The number of the next batch to deliver.
            read: Reads some batches ahead, and returns the step after the last batch read. It is
                called if the number of batches isn't known without reading.

        Raises:
            ProcessError: If a process has no batch but others have some, or if the processes
                differ or don't answer; see `Agreement`.
            ReadError: If reading raised before the next batch.
        """
        part, local = self._part, self._batches(read)
        values = {"position": f"step {step}"}
        answers = self._agreement.agree(values, "the number of batches", local)
        every = {process: batches or local for process, batches in answers.items()}
        counts = {process: batches.certain for process, batches in every.items()}
        empty = [p for p, batches in every.items() if batches == Batches(0, True)]
        if empty and any(counts.values()):
            needs = "a record to pad with" if part.pads else "a whole batch"
            raise ProcessError(
                f"processes {empty} have no batch of records, but each process needs {needs}. "
                "Distribute the records to every process, or use fewer processes"
            )
        ends = [count for process, count in counts.items() if every[process].ended]
        if part.pads:
            unended = [count for process, count in counts.items() if not every[process].ended]
            self._certain = min(unended, default=0)
            self.total = None if unended else max(ends)
        else:
            self._certain = min(counts.values())
            self.total = self._certain if self._certain in ends else None

    def next_records(self) -> RecordBatch:
        """Returns the next batch of this process, or a batch of padding after its last batch.

        Raises:
            StopIteration: At the end of the stream; see `RecordReader` for other errors.
        """
        if self.is_behind_end(self.step):
            raise StopIteration
        if self._end is None:
            try:
                batch = self._reader.next_records()
            except StopIteration:
                self._end = self.step
                batch = self._after_end()
        else:
            batch = self._after_end()
        self.step += 1
        return batch

    def _after_end(self) -> RecordBatch:
        """Returns a batch of padding; other processes determine how many batches are delivered.

        Raises:
            StopIteration: If this process does not pad.
        """
        if self._part.padding is None:
            raise StopIteration
        return self._part.padding()

    def check_end(self, step: int) -> None:
        """Raises a ProcessError if this process lacks a batch that others deliver."""
        if self.total is not None and step < self.total:
            raise ProcessError(
                f"this process has {step} batches, but {self.total} were expected in every "
                "process: its dataset yields fewer records than its length, e.g. because of a "
                "map() that returns None. Filter the records by filter(), use pad='mask', or "
                "repeat() them"
            )

    def seek(self, position: RecordPosition) -> None:
        """Moves to a position; the next batch is the batch after the position."""
        self._reader.seek(position)
        self.start_at(position.step)

    def start_at(self, step: int) -> None:
        """Sets the step of the batch that the reader returns next."""
        self.step, self._end = step, None
