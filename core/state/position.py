"""Positions: the next batch to deliver, and where the pipelines must stand for it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """DALI's checkpoints from which a batch can be delivered next.

    Attributes:
        data: DALI's checkpoint of each pipeline; None if there is none.
        to_drop: Number of batches to drop after restoring them. In a state it is more than 0
            after a failed batch (DALI's checkpoint behind one is incomplete: an earlier one is
            kept, up to eight batches before the first failure) and between epochs (an epoch
            may consume more batches than it delivers).
    """

    data: tuple[bytes, ...] | None = None
    to_drop: int = 0

    def later(self, batches: int) -> Checkpoints:
        """The checkpoints for a batch that comes so many batches later."""
        return dataclasses.replace(self, to_drop=self.to_drop + batches)


@dataclasses.dataclass(frozen=True)
class Position:
    """The next batch to deliver: ``step`` of ``epoch``.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Number of the epoch's batches before it, failed ones included.
        checkpoints: The checkpoints for it; None before the pipelines were first built.
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
    """A batch that ``on_error="skip"`` skipped, or of which ``"mask"`` masks records.

    Attributes:
        epoch: Its epoch.
        step: Its number in the epoch.
        message: What the error says.
        files: Files or records that can't be read or decoded, as far as they are known.
    """

    epoch: int
    step: int
    message: str
    files: tuple[str, ...] = ()
