"""take, skip, repeat and enumerate as arithmetic: maps each element to a batch of the stream.

All functions are pure. A *chain* is the sequence of steps applied to a source; ``total`` is the
source's number of batches, INFINITE or UNKNOWN. Names and rules are as in tf.data.Dataset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

INFINITE = -1
UNKNOWN = -2


@dataclasses.dataclass(frozen=True)
class Take:
    """Takes the first ``count`` elements; all if it is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, given ``total`` before it."""
        if total == UNKNOWN or self.count < 0:
            return total
        return self.count if total == INFINITE else min(self.count, total)


@dataclasses.dataclass(frozen=True)
class Skip:
    """Skips the first ``count`` elements; all if it is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, given ``total`` before it."""
        if total < 0:
            return total
        return 0 if self.count < 0 else max(0, total - self.count)


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Repeats the elements ``count`` times; endlessly if it is negative."""

    count: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, given ``total`` before it."""
        if self.count == 0 or total == 0:
            return 0
        if self.count < 0:
            return INFINITE
        return total if total < 0 else total * self.count


@dataclasses.dataclass(frozen=True)
class Enumerate:
    """Pairs each element with a number, counting from ``start``."""

    start: int

    def length(self, total: int) -> int:
        """Returns the number of elements after this step, given ``total`` before it."""
        return total


Step = Take | Skip | Repeat | Enumerate


def length(chain: Sequence[Step], total: int) -> int:
    """Returns the number of elements, INFINITE or UNKNOWN."""
    for step in chain:
        total = step.length(total)
    return total


def element(chain: Sequence[Step], total: int, index: int) -> tuple[int, tuple[int, ...]] | None:
    """Maps an element to a batch of the source.

    Args:
        chain: The steps.
        total: Number of batches; UNKNOWN counts as INFINITE.
        index: Index of the element, from 0.

    Returns:
        The index of the batch, and the element's numbers by enumerate, starting with the last
        step's; None after the last element.
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
