"""Positions of iterators (the next batch and its checkpoints), and lists of failed batches."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator

_MOST = 500  # failed batches that are kept from the start, and also from the end


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """DALI's checkpoints, and how many batches to drop after them to reach a batch.

    Batches must be dropped after a failure, because DALI's checkpoint after a failure is
    incomplete, so that a checkpoint up to eight batches before the first failure is used. Batches
    must also be dropped between epochs, because an epoch may consume more batches than it delivers.

    Attributes:
        data: DALI's checkpoint of each pipeline; None before the pipelines are built.
        to_drop: Number of batches to drop after restoring the checkpoints. It is negative if DALI's
            own iterator saved the checkpoints after reading batches that this package would drop.
    """

    data: tuple[bytes, ...] | None = None
    to_drop: int = 0

    def later(self, batches: int) -> Checkpoints:
        """Returns the checkpoints for the batch that comes ``batches`` batches later."""
        return dataclasses.replace(self, to_drop=self.to_drop + batches)


@dataclasses.dataclass(frozen=True)
class ReaderPosition:
    """The position before the next batch to deliver.

    Attributes:
        epoch: Index of the next batch's epoch, from 0.
        step: Number of batches of the epoch before the next batch, including failed batches.
        checkpoints: The checkpoints for the next batch; None before the pipelines were first built.
        epoch_start: The checkpoints for the first batch of the epoch; None as for ``checkpoints``.
        errors: Number of batches that have failed before the position, in all epochs.
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
        epoch: Index of the batch's epoch, from 0.
        step: Index of the batch in its epoch, from 0.
        message: The message of the error.
        files: Names of the files or records that can't be read or decoded, if they are known.
    """

    epoch: int
    step: int
    message: str
    files: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class FailedBatches:
    """Collects failed batches; keeps the first 500, the last 500, and the total number.

    Attributes:
        total: Number of all failed batches, including those that are not kept.
    """

    total: int = 0
    _oldest: list[FailedBatch] = dataclasses.field(default_factory=list)
    _newest: collections.deque[FailedBatch] = dataclasses.field(
        default_factory=functools.partial(collections.deque, maxlen=_MOST)
    )

    def append(self, batch: FailedBatch) -> None:
        """Adds a failed batch."""
        self.total += 1
        (self._oldest if len(self._oldest) < _MOST else self._newest).append(batch)

    def extend(self, batches: Iterable[FailedBatch]) -> None:
        """Adds failed batches."""
        for batch in batches:
            self.append(batch)

    def __iter__(self) -> Iterator[FailedBatch]:
        yield from self._oldest
        yield from self._newest
