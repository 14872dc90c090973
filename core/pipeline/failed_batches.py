"""The list of the batches that failed, in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ..state.position import FailedBatch

_MOST = 500  # of the first ones, and of the last ones


@dataclasses.dataclass(eq=False)
class FailedBatches:
    """The first and the last batches that failed, and the number of all of them.

    Attributes:
        total: The number of all batches that failed.
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
