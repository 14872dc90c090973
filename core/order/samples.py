"""Assignment of samples to batches: pure arithmetic over an endless stream of samples.

Sample ``t`` of the stream is position ``t % N`` of epoch ``t // N``. Each batch takes the next
samples of the stream. An epoch's last batch is handled as for a DALI reader with one shard and
global batches (`dalijax.core.order.epochs`; for padding in general see `dalijax.core.order`)::

    N = 7, batches of 2     unpadded    0 1|2 3|4 5|6 7|8 9|...     runs on into the next epoch
                            padded      0 1|2 3|4 5|6 6|7 8|...

A position is (epoch, start, sample). It depends neither on the batch size, which may differ after
restoring a state, nor on shards, which slice the rows of each batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

MOST_SAMPLES = 1 << 53  # of a stream: integers up to this are exact in every JSON parser


@dataclasses.dataclass(frozen=True)
class SamplePosition:
    """The next sample to deliver.

    Attributes:
        epoch: The consumer's epoch, from 0.
        start: Index in the stream of the first sample of the epoch's first batch.
        sample: Index in the stream of the first sample of the next batch; at the end of an epoch,
            beyond the epoch's samples.
    """

    epoch: int = 0
    start: int = 0
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """A range of rows of a batch.

    Attributes:
        samples: Index in the stream of each row's sample.
        valid: Whether each row belongs to the consumer's epoch and is not padding.
    """

    samples: NDArray[np.int64]
    valid: NDArray[np.bool_]


def pads_by_default(policy: LastBatchPolicy, mask: str | None) -> bool:
    """Returns whether the last batch is padded by default.

    An unpadded stream does not deliver rows of the next epoch again, so these must not be cut off,
    dropped or masked. FILL without a mask delivers every row, and runs on as DALI does.

    Args:
        policy: The policy for an epoch's last batch.
        mask: The name of the mask; None: no mask.
    """
    return mask is not None or policy is not LastBatchPolicy.FILL


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """The batches of a stream.

    Attributes:
        num_samples: Samples of an epoch (N), at least 1.
        batch_size: Rows of a global batch, at least 1.
        policy: The policy for an epoch's last batch.
        padded: Whether the last batch repeats the epoch's last sample instead of running on.

    Raises:
        ValueError: If no epoch has a batch.
    """

    num_samples: int
    batch_size: int
    policy: LastBatchPolicy = LastBatchPolicy.FILL
    padded: bool = False

    def __post_init__(self) -> None:
        if self.policy is LastBatchPolicy.DROP and self.num_samples < self.batch_size:
            raise ValueError(
                f"no epoch has a batch: batch_size {self.batch_size} is more than the "
                f"{self.num_samples} samples of an epoch, and incomplete batches are dropped. "
                "Use a smaller batch_size, or a last_batch_policy that keeps incomplete batches"
            )

    def end(self, position: SamplePosition) -> int:
        """Returns the end (exclusive) of the samples of the consumer's epoch in the stream."""
        if self.policy is LastBatchPolicy.DROP:  # the epoch may begin after its nominal start
            return position.start + self.num_samples
        return (position.epoch + 1) * self.num_samples

    def has(self, position: SamplePosition) -> bool:
        """Returns whether a stream of these epochs, with any batch sizes, can reach a position."""
        end = self.end(position)
        if self.padded and position.start != position.epoch * self.num_samples:
            return False
        if not position.epoch * self.num_samples <= position.start <= position.sample:
            return False
        if self.policy is LastBatchPolicy.DROP:  # epochs begin after the dropped samples
            return position.sample <= end
        return position.start < end

    def remaining(self, position: SamplePosition) -> int:
        """Returns the number of batches that the epoch still delivers."""
        remaining = max(0, self.end(position) - position.sample)
        if self.policy is LastBatchPolicy.DROP:
            return remaining // self.batch_size
        return -(-remaining // self.batch_size)

    def step(self, position: SamplePosition) -> int:
        """Returns the number of batches from the epoch's start to the position, rounded up."""
        return -(-(position.sample - position.start) // self.batch_size)

    def length(self, position: SamplePosition) -> int:
        """Returns the number of batches of the epoch: delivered and remaining."""
        return self.step(position) + self.remaining(position)

    def mixes_epochs(self, position: SamplePosition) -> bool:
        """Returns whether the batch before a position contained records of two epochs."""
        fills = self.policy is LastBatchPolicy.FILL and not self.padded
        return fills and position.sample > self.end(position)

    def rows(self, position: SamplePosition, first: int = 0, last: int | None = None) -> SampleRows:
        """Returns the rows of the next batch, which must exist.

        Args:
            position: The position of the batch.
            first: The first row.
            last: End (exclusive) of the rows; None: the end of the batch. Under PARTIAL, rows
                after the epoch's end are omitted.
        """
        last = self.batch_size if last is None else last
        end = self.end(position)
        if self.policy is LastBatchPolicy.PARTIAL:
            last = min(last, end - position.sample)
        samples = position.sample + np.arange(first, max(first, last), dtype=np.int64)
        valid = samples < end
        return SampleRows(np.minimum(samples, end - 1) if self.padded else samples, valid)

    def skip(self, position: SamplePosition, batches: int) -> SamplePosition:
        """Returns the position after some of the epoch's batches, which must exist."""
        return dataclasses.replace(position, sample=position.sample + batches * self.batch_size)

    def run_from(self, position: SamplePosition) -> SamplePosition:
        """Returns the first position, at or after the given position, that has a batch."""
        while self.remaining(position) == 0:
            position = self.next_epoch(position)
        return position

    def next_epoch(self, position: SamplePosition) -> SamplePosition:
        """Returns the start of the epoch after a finished epoch.

        Epochs without a batch, which an unpadded stream has already read, are skipped.
        """
        epoch, end = position.epoch + 1, self.end(position)
        if self.padded:
            return SamplePosition(epoch, end, end)
        sample = position.sample
        if self.policy is not LastBatchPolicy.DROP:
            epoch = max(epoch, sample // self.num_samples)
        elif sample < end:  # skips the dropped batch
            sample += self.batch_size
        return SamplePosition(epoch, sample, sample)

    def seek(self, epoch: int, step: int = 0, first: int = 0) -> SamplePosition:
        """Returns the position of a batch, counted from the stream's start in batches of this size.

        Args:
            epoch: The epoch.
            step: Index of the batch in the epoch; the epoch's length is its end.
            first: The epoch that the stream begins with.

        Raises:
            ValueError: If the epoch has no such batch. An epoch whose samples were all read by the
                last batch of an earlier epoch has no positions.
        """
        n, b, preceding = self.num_samples, self.batch_size, epoch - first
        if self.padded:
            start = preceding * n
        elif self.policy is LastBatchPolicy.DROP:
            start = preceding * -(-n // b) * b
        else:
            start = -(-preceding * n // b) * b
        start += first * n
        if start >= MOST_SAMPLES:
            raise ValueError(f"epoch {epoch} begins at sample {start}, too far for a state")
        begin = SamplePosition(epoch, start, start)
        length = self.remaining(begin)
        if preceding < 0 or length == 0 or not 0 <= step <= length:
            raise ValueError(f"there is no batch {step} in epoch {epoch}, which has {length}")
        return self.skip(begin, step)

    def locate(self, batch: int) -> tuple[int, int]:
        """Returns epoch and step of a batch that is counted from 0 over all epochs.

        Assumes batches of the current size from the start of the stream.
        """
        n, b = self.num_samples, self.batch_size
        if self.policy is LastBatchPolicy.DROP:
            return divmod(batch, n // b)
        if self.padded:
            return divmod(batch, -(-n // b))
        epoch = batch * b // n  # the epoch of the batch's first sample
        return epoch, batch - -(-epoch * n // b)
