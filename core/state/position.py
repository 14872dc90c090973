"""Positions: the next batch to deliver, its checkpoints, and the batches that failed before."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator

_MOST = 500  # number of first batches, and of last batches, in a list of failed batches


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """DALI's checkpoints from which pipelines produce a batch, after some batches to drop.

    Attributes:
        data: DALI's checkpoint of each pipeline; None before the pipelines are built.
        to_drop: Number of batches to drop after restoring the checkpoints. In a state, it is
            positive after a failed batch, because DALI's checkpoint after a failure is incomplete
            (a checkpoint up to eight batches before the first failure is used), and between
            epochs, because an epoch may consume more batches than it delivers.
    """

    data: tuple[bytes, ...] | None = None
    to_drop: int = 0

    def later(self, batches: int) -> Checkpoints:
        """Returns the checkpoints for a batch that comes a number of batches later."""
        return dataclasses.replace(self, to_drop=self.to_drop + batches)


@dataclasses.dataclass(frozen=True)
class Position:
    """The next batch to deliver: ``step`` of ``epoch``.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Number of the epoch's batches before the batch, including failed batches.
        checkpoints: The checkpoints for the batch; None before the pipelines were first built.
        epoch_start: The checkpoints for the epoch's first batch.
        errors: Number of batches that failed so far.
    """

    epoch: int = 0
    step: int = 0
    checkpoints: Checkpoints | None = None
    epoch_start: Checkpoints | None = None
    errors: int = 0


@dataclasses.dataclass(frozen=True)
class FailedBatch:
    """A batch that ``on_error="skip"`` skipped, or whose bad records ``"mask"`` masked.

    Attributes:
        epoch: The epoch of the batch.
        step: The number of the batch in the epoch.
        message: The message of the error.
        files: Files or records that can't be read or decoded, if their names are known.
    """

    epoch: int
    step: int
    message: str
    files: tuple[str, ...] = ()


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
