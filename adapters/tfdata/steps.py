"""Arithmetic of take, skip, repeat and enumerate: finds the batch that belongs to an element.

All functions are pure. A *chain* is a sequence of steps that is applied to a stream of batches. The
argument ``total`` is the number of batches of the stream, or INFINITE or UNKNOWN. Names and rules
are as in tf.data.Dataset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

INFINITE = -1
UNKNOWN = -2


@dataclasses.dataclass(frozen=True)
class Take:
    """A step that keeps the first ``count`` elements; all elements if ``count`` is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, from their number ``total`` before it."""
        if total == UNKNOWN or self.count < 0:
            return total
        return self.count if total == INFINITE else min(self.count, total)


@dataclasses.dataclass(frozen=True)
class Skip:
    """A step that skips the first ``count`` elements; all elements if ``count`` is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, from their number ``total`` before it."""
        if total < 0:
            return total
        return 0 if self.count < 0 else max(0, total - self.count)


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A step that repeats the elements ``count`` times; endlessly if ``count`` is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, from their number ``total`` before it."""
        if self.count == 0 or total == 0:
            return 0
        if self.count < 0:
            return INFINITE
        return total if total < 0 else total * self.count


@dataclasses.dataclass(frozen=True)
class Enumerate:
    """A step that pairs each element with a number, counting from ``start``."""

    start: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, from their number ``total`` before it."""
        return total


Step = Take | Skip | Repeat | Enumerate


def length(chain: Sequence[Step], total: int) -> int:
    """Returns the number of elements after a chain of steps, or INFINITE or UNKNOWN."""
    for step in chain:
        total = step.length(total)
    return total


def element(chain: Sequence[Step], total: int, index: int) -> tuple[int, tuple[int, ...]] | None:
    """Returns the index of the batch in an element, and the numbers that enumerate adds.

    Args:
        chain: The steps.
        total: Number of batches of the stream; UNKNOWN counts as INFINITE.
        index: Index of the element, from 0.

    Returns:
        The index of the batch in the stream, and a tuple with the number from each enumerate step,
        the last step first. None if the element does not exist.
    """
    numbers: list[int] = []
    for at in reversed(range(len(chain))):
        step = chain[at]
        if isinstance(step, Take):
            if 0 <= step.count <= index:
                return None
        elif isinstance(step, Skip):
            if step.count < 0:
                return None
            index += step.count
        elif isinstance(step, Enumerate):
            numbers.append(step.start + index)
        else:
            inner_length = length(chain[:at], INFINITE if total == UNKNOWN else total)
            if inner_length == 0:
                return None
            rounds, index = divmod(index, inner_length) if inner_length > 0 else (0, index)
            if 0 <= step.count <= rounds:
                return None
    if 0 <= total <= index:
        return None
    return index, tuple(numbers)
