"""Positions: the next batch to deliver, and the checkpoints that deliver it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of DALI that deliver a batch next.

    Attributes:
        data: DALI's checkpoint of each pipeline; None before there are pipelines.
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
        step: Number of the epoch's batches before it, including failed batches.
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
