"""What an input pipeline did: counters that cost nothing until somebody asks for them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class InputStats:
    """Counters of one iterator since it was watched first.

    Attributes:
        batches: Number of batches that were delivered, failed ones included.
        examples: Number of their samples that are no padding, in this process. Those of the next
            epoch, which fill the last batch of an unpadded reader, are examples, too.
        padding: Number of their samples that repeat another, to fill a padded reader's last batch.
        errors: Number of batches that failed since the iterator's start, a resumed run's
            earlier ones included.
        wait_seconds: Seconds that ``next()`` took, all together: the caller's waiting.
        wait_counts: How many calls of ``next()`` took less than 2**k nanoseconds, and not less than
            half of it, for each k.
        epoch: Epoch of the last batch.
        step: Number of the last batch in it, from 0.
    """

    batches: int = 0
    examples: int = 0
    padding: int = 0
    errors: int = 0
    wait_seconds: float = 0.0
    wait_counts: list[int] = dataclasses.field(default_factory=lambda: [0] * 65)
    epoch: int = 0
    step: int = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds of a block as waiting."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            duration = time.perf_counter_ns() - start
            self.wait_seconds += 1e-9 * duration
            self.wait_counts[duration.bit_length()] += 1

    def delivered(self, epoch: int, step: int, examples: int, padding: int, errors: int) -> None:
        """Counts a batch of so many examples, beside so much padding."""
        self.batches += 1
        self.examples += examples
        self.padding += padding
        self.errors, self.epoch, self.step = errors, epoch, step

    def copy(self) -> InputStats:
        """The counters as they are now."""
        return dataclasses.replace(self, wait_counts=self.wait_counts.copy())

    def since(self, earlier: InputStats) -> InputStats:
        """What was counted since a copy of it was made; epoch, step and errors stay totals."""
        return dataclasses.replace(
            self,
            batches=self.batches - earlier.batches,
            examples=self.examples - earlier.examples,
            padding=self.padding - earlier.padding,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            wait_counts=[new - old for new, old in zip(self.wait_counts, earlier.wait_counts)],
        )
