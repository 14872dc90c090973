"""Positions: the next batch to deliver, and where the pipelines must stand for it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where the pipelines must stand to deliver a batch next.

    Attributes:
        data: DALI's checkpoint of each pipeline, or None where there is none to be had.
        to_drop: Number of batches to drop after restoring them. In a state it is more than 0
            after a failed batch (DALI's checkpoint of one is incomplete, so that an earlier one is
            kept, of up to eight batches before the first failure) and between epochs (an epoch
            may consume more batches than it delivers).
    """

    data: tuple[bytes, ...] | None = None
    to_drop: int = 0

    def later(self, batches: int) -> Checkpoints:
        """Those for so many batches further on."""
        return dataclasses.replace(self, to_drop=self.to_drop + batches)


@dataclasses.dataclass(frozen=True)
class Position:
    """The next batch to deliver: ``step`` of ``epoch``.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Number of its batches that are behind it, failed ones included.
        checkpoints: Where the pipelines stand; None before they were first built.
        epoch_start: Where they stood at the epoch's start.
        errors: Number of batches that failed so far.
    """

    epoch: int = 0
    step: int = 0
    checkpoints: Checkpoints | None = None
    epoch_start: Checkpoints | None = None
    errors: int = 0


@dataclasses.dataclass(frozen=True)
class FailedBatch:
    """A batch that ``on_error="skip"`` skipped.

    Attributes:
        epoch: Its epoch.
        step: Its number in the epoch.
        message: What DALI says of it.
        files: Those that DALI can't decode, as far as that could be told.
    """

    epoch: int
    step: int
    message: str
    files: tuple[str, ...] = ()
