"""Which samples each batch has: pure arithmetic over an endless stream of samples.

Sample ``t`` of the stream is position ``t % N`` of epoch ``t // N``. A batch has the next samples
of the stream; what becomes of the epoch's last one is as with a reader of one shard that makes
global batches (`dalijax.core.order.epochs`)::

    N = 7, batches of 2     unpadded    0 1|2 3|4 5|6 7|8 9|...     runs on into the next epoch
                            padded      0 1|2 3|4 5|6 6|7 8|...

A position is (epoch, start, sample) and says nothing of the batch size, which may be another one
when a state is restored; nor of shards, which slice the rows of each batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

MOST_SAMPLES = 1 << 53  # of a stream: what every reader of JSON keeps exactly


@dataclasses.dataclass(frozen=True)
class SamplePosition:
    """The next sample to deliver.

    Attributes:
        epoch: The consumer's epoch, from 0.
        start: The sample of the stream that this epoch's first batch begins with.
        sample: The sample of the stream that the next batch begins with; at an epoch's end one
            that is behind it.
    """

    epoch: int = 0
    start: int = 0
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a batch.

    Attributes:
        samples: The sample of the stream in each row.
        valid: Whether it belongs to the consumer's epoch and is no padding.
    """

    samples: NDArray[np.int64]
    valid: NDArray[np.bool_]


def pads_by_default(policy: LastBatchPolicy, mask: str | None) -> bool:
    """Whether the last batch is padded where nobody says it.

    Rows of the next epoch are not delivered again, so that they must not be cut off, dropped or
    masked. FILL without a mask delivers every row as a sample, and runs on as DALI does.

    Args:
        policy: What becomes of an epoch's last batch.
        mask: The name of the mask; None: there is none.
    """
    return mask is not None or policy is not LastBatchPolicy.FILL


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """The batches of a stream.

    Attributes:
        num_samples: Samples of an epoch (N), at least 1.
        batch_size: Rows of a global batch, at least 1.
        policy: What becomes of an epoch's last batch.
        padded: Whether the last batch repeats the epoch's last sample, rather than running on.

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
                f"{self.num_samples} samples of an epoch, and the rest is dropped. Use a smaller "
                "batch, or keep the rest"
            )

    def end(self, here: SamplePosition) -> int:
        """The sample behind the last one of the consumer's epoch."""
        if self.policy is LastBatchPolicy.DROP:  # whole batches from where the epoch began
            return here.start + self.num_samples
        return (here.epoch + 1) * self.num_samples

    def has(self, here: SamplePosition) -> bool:
        """Whether a stream of these epochs, in batches of any sizes, comes to a position."""
        end = self.end(here)
        if self.padded and here.start != here.epoch * self.num_samples:
            return False
        if self.policy is LastBatchPolicy.DROP:  # epochs begin behind what was dropped
            return here.epoch * self.num_samples <= here.start <= here.sample <= end
        return here.epoch * self.num_samples <= here.start < end and here.start <= here.sample

    def remaining(self, here: SamplePosition) -> int:
        """Number of batches that the epoch still delivers."""
        rest = max(0, self.end(here) - here.sample)
        if self.policy is LastBatchPolicy.DROP:
            return rest // self.batch_size
        return -(-rest // self.batch_size)

    def step(self, here: SamplePosition) -> int:
        """Number of batches of the present size that lie behind in the epoch, the last begun."""
        return -(-(here.sample - here.start) // self.batch_size)

    def length(self, here: SamplePosition) -> int:
        """Number of batches of the epoch: those delivered, and those to come."""
        return self.step(here) + self.remaining(here)

    def mixes_epochs(self, here: SamplePosition) -> bool:
        """Whether the batch before a position had records of two epochs, all delivered."""
        fills = self.policy is LastBatchPolicy.FILL and not self.padded
        return fills and here.sample > self.end(here)

    def rows(self, here: SamplePosition, first: int = 0, last: int | None = None) -> Rows:
        """Rows of the next batch, of which there must be one.

        Args:
            here: The position.
            first: The first of the rows.
            last: The row behind the last; None: up to the batch's end. Under PARTIAL the rows
                behind the epoch's end are left out.
        """
        last = self.batch_size if last is None else last
        end = self.end(here)
        if self.policy is LastBatchPolicy.PARTIAL:
            last = min(last, end - here.sample)
        samples = here.sample + np.arange(first, max(first, last), dtype=np.int64)
        valid = samples < end
        return Rows(np.minimum(samples, end - 1) if self.padded else samples, valid)

    def skip(self, here: SamplePosition, batches: int) -> SamplePosition:
        """The position behind so many of the epoch's batches, which must be there."""
        return dataclasses.replace(here, sample=here.sample + batches * self.batch_size)

    def run_from(self, here: SamplePosition) -> SamplePosition:
        """The first position from one on that has a batch."""
        while self.remaining(here) == 0:
            here = self.next_epoch(here)
        return here

    def next_epoch(self, here: SamplePosition) -> SamplePosition:
        """The start of the epoch behind the one that a position is in, at whose end it is.

        Epochs without a batch, which an unpadded stream has already read, are left out.
        """
        epoch, end = here.epoch + 1, self.end(here)
        if self.padded:
            return SamplePosition(epoch, end, end)
        sample = here.sample
        if self.policy is not LastBatchPolicy.DROP:
            epoch = max(epoch, sample // self.num_samples)
        elif sample < end:  # the batch that is dropped
            sample += self.batch_size
        return SamplePosition(epoch, sample, sample)

    def seek(self, epoch: int, step: int = 0, first: int = 0) -> SamplePosition:
        """The position of a batch, counted from the stream's beginning in batches of this size.

        Args:
            epoch: The epoch.
            step: The batch in it.
            first: The epoch that the stream begins with.

        Raises:
            ValueError: If the epoch has no such batch; its number of batches is that of the end. An
                epoch whose samples an earlier one's last batch has read has no position at all.
        """
        n, b, before = self.num_samples, self.batch_size, epoch - first
        if self.padded:
            start = before * n
        elif self.policy is LastBatchPolicy.DROP:
            start = before * -(-n // b) * b
        else:
            start = -(-before * n // b) * b
        start += first * n
        if start >= MOST_SAMPLES:
            raise ValueError(f"epoch {epoch} begins at sample {start}, too far for a state")
        begin = SamplePosition(epoch, start, start)
        length = self.remaining(begin)
        if before < 0 or length == 0 or not 0 <= step <= length:
            raise ValueError(f"there is no batch {step} in epoch {epoch}, which has {length}")
        return self.skip(begin, step)

    def locate(self, batch: int) -> tuple[int, int]:
        """The epoch and the step of a batch that is counted from 0 over all epochs.

        Batches have the present size, and the stream is read from its beginning.
        """
        n, b = self.num_samples, self.batch_size
        if self.policy is LastBatchPolicy.DROP:
            return divmod(batch, n // b)
        if self.padded:
            return divmod(batch, -(-n // b))
        epoch = batch * b // n  # the epoch of the batch's first sample
        return epoch, batch - -(-epoch * n // b)
