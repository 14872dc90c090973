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
        examples: Number of their samples that are no padding, in this process.
        padding: Number of their samples that are.
        errors: Number of batches that failed since the iterator's start, a resumed run's
            earlier ones included.
        wait_seconds: Seconds that ``next()`` took, all together: the caller's waiting.
        epoch: Epoch of the last batch.
        step: Number of the last batch in it, from 0.
    """

    batches: int = 0
    examples: int = 0
    padding: int = 0
    errors: int = 0
    wait_seconds: float = 0.0
    epoch: int = 0
    step: int = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds of a block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - start

    def delivered(self, epoch: int, step: int, valid: int, rows: int, errors: int) -> None:
        """Counts a batch of so many rows, of which so many are no padding."""
        self.batches += 1
        self.examples += valid
        self.padding += rows - valid
        self.errors, self.epoch, self.step = errors, epoch, step

    def since(self, earlier: InputStats) -> InputStats:
        """What was counted since a copy of it was made; epoch, step and errors stay totals."""
        return dataclasses.replace(
            self,
            batches=self.batches - earlier.batches,
            examples=self.examples - earlier.examples,
            padding=self.padding - earlier.padding,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
        )
