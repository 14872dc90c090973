"""`FailedBatches`: a memory-bounded list of failed batches."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ..state.position import FailedBatch

_MOST = 500  # number of first batches, and of last batches, in the list


@dataclasses.dataclass(eq=False)
class FailedBatches:
    """The first and the last failed batches, and the total number.

    Attributes:
        total: Number of all failed batches.
    """

    total: int = 0
    _first: list[FailedBatch] = dataclasses.field(default_factory=list)
    _last: collections.deque[FailedBatch] = dataclasses.field(
        default_factory=functools.partial(collections.deque, maxlen=_MOST)
    )

    def append(self, batch: FailedBatch) -> None:
        """Adds a batch."""
        self.total += 1
        (self._first if len(self._first) < _MOST else self._last).append(batch)

    def extend(self, batches: Iterable[FailedBatch]) -> None:
        """Adds batches."""
        for batch in batches:
            self.append(batch)

    def __iter__(self) -> Iterator[FailedBatch]:
        yield from self._first
        yield from self._last
