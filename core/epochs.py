"""Epoch arithmetic: how many batches an epoch has and which of their samples belong to it.

Nothing here touches a pipeline; every function is pure. A *stream* is the endless sequence
of samples that the pipeline of one shard reads. With N samples, S shards and batch size B,
shard i holds the samples [floor(N*i/S), floor(N*(i+1)/S))::

    N = 7, S = 2, B = 2          shard 0: 0 1 2      shard 1: 3 4 5 6

    stream 0, not padded         0 1|2 3|4 5|6 0|1 2|...      runs on into its next shard
    stream 0, padded             0 1|2 2|3 4|5 6|0 1|...      whole batches for each shard
                                 epoch 0|epoch 1|epoch 2

A stream reads shard ``stream`` in every epoch where the reader sticks to its shard, and
shard ``(stream + epoch) % S`` where it does not.
"""

from __future__ import annotations

import dataclasses

from nvidia.dali.plugin.base_iterator import LastBatchPolicy


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """The batches of every epoch of a reader.

    Attributes:
        num_samples: Samples in the data set (N), at least 1.
        num_shards: Shards that it is split into (S), over all processes.
        batch_size: Samples in a batch of one shard (B).
        policy: What happens to an epoch's last batch.
        padded: Whether the reader repeats a shard's last sample up to whole batches
            (``pad_last_batch``).
        stick: Whether a stream reads the same shard in every epoch (``stick_to_shard``).
        alone: Whether DROP looks at each stream's own shard, whose number of batches may then
            differ from the others'; else all deliver as many as the smallest shard has.

    Raises:
        ValueError: If one of the counts is less than 1.
    """

    num_samples: int
    num_shards: int
    batch_size: int
    policy: LastBatchPolicy = LastBatchPolicy.FILL
    padded: bool = False
    stick: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        for field in ("num_samples", "num_shards", "batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")

    def shard_size(self, shard: int) -> int:
        """Number of samples of one shard."""
        n, s = self.num_samples, self.num_shards
        return n * (shard + 1) // s - n * shard // s

    def shard_of(self, stream: int, epoch: int) -> int:
        """The shard that a stream reads in an epoch."""
        return stream if self.stick else (stream + epoch) % self.num_shards

    def stream_end(self, stream: int, epoch: int) -> int:
        """Number of samples of a stream up to and with an epoch, padding not counted."""
        if self.stick:
            return (epoch + 1) * self.shard_size(stream)
        # S epochs read every shard once; what is left is a run of shards that may wrap.
        rounds, rest = divmod(epoch + 1, self.num_shards)
        n, s = self.num_samples, self.num_shards
        end = stream + rest
        run = n * min(end, s) // s - n * stream // s
        if end > s:
            run += n * (end - s) // s
        return rounds * n + run

    def first_batch(self, epoch: int) -> int:
        """Number of batches that a pipeline has produced before an epoch starts."""
        if self.padded or self.policy is LastBatchPolicy.DROP:
            return epoch * self._batches_per_epoch()
        if epoch == 0:
            return 0
        longest = max(self.stream_end(s, epoch - 1) for s in range(self.num_shards))
        return _ceil_div(longest, self.batch_size)

    def _batches_per_epoch(self) -> int:
        """Batches that each epoch consumes where that number is constant."""
        n, s, b = self.num_samples, self.num_shards, self.batch_size
        # The largest shard has ceil(N/S) samples, the smallest floor(N/S).
        return _ceil_div(_ceil_div(n, s) if self.padded else n // s, b)

    def consumed(self, epoch: int) -> int:
        """Number of batches that a pipeline produces for an epoch, delivered or not."""
        return self.first_batch(epoch + 1) - self.first_batch(epoch)

    def delivered(self, epoch: int, stream: int = 0) -> int:
        """Number of batches that an epoch delivers: the length of an iterator.

        Only under PARTIAL does it depend on the stream: batches without a sample of the
        epoch are consumed there, but not delivered; and under DROP where each is alone.
        """
        if self.policy is LastBatchPolicy.DROP and self.alone:
            return self.shard_size(self.shard_of(stream, epoch)) // self.batch_size
        if self.policy is LastBatchPolicy.DROP:
            return self.num_samples // self.num_shards // self.batch_size
        if self.policy is LastBatchPolicy.PARTIAL:
            return _ceil_div(self._valid_from(epoch, 0, stream), self.batch_size)
        return self.consumed(epoch)

    def total(self, epochs: int, stream: int = 0) -> int:
        """Number of batches that the first epochs deliver together; see `delivered`."""
        if self.policy is LastBatchPolicy.FILL:
            return self.first_batch(epochs)
        drifts = self.stick and self.num_samples % self.num_shards > 0
        drifts = drifts and not self.padded and self.policy is LastBatchPolicy.PARTIAL
        # After so many epochs all shards were read, into whole batches.
        period = epochs + 1 if drifts else self.num_shards * self.batch_size
        rounds, rest = divmod(epochs, period)

        def of_first(count: int) -> int:
            return sum(self.delivered(epoch, stream) for epoch in range(count))

        return (rounds * of_first(period) if rounds else 0) + of_first(rest)

    def size(self, epoch: int) -> int:
        """Number of samples of an epoch in each shard, as DALI's iterators count them."""
        if self.policy is LastBatchPolicy.DROP:
            return self.num_samples // self.num_shards
        if self.padded:
            return _ceil_div(self.num_samples, self.num_shards)
        return self.consumed(epoch) * self.batch_size

    def next_epoch(self, epoch: int) -> int:
        """The first epoch after ``epoch`` that consumes a batch.

        A reader that is not padded may have read a whole later epoch ahead; such an epoch
        is skipped. DROP over fewer samples than shards consumes nothing at all: its epochs
        are empty and none is skipped.
        """
        if not self.padded and self.policy is LastBatchPolicy.DROP:
            return epoch + 1
        epoch += 1
        while self.consumed(epoch) == 0:
            epoch += 1
        return epoch

    def gap(self, epoch: int) -> int:
        """Number of batches between the last one before an epoch that is delivered, and it."""
        start, before = self.first_batch(epoch), epoch - 1
        while before >= 0 and self.first_batch(before) == start:
            before -= 1
        if before < 0:
            return 0
        least = min(self.delivered(before, stream) for stream in range(self.num_shards))
        return start - self.first_batch(before) - least

    def valid(self, epoch: int, step: int, stream: int) -> int:
        """Number of samples at the head of a batch that belong to its epoch.

        The samples behind them are padding or belong to the next epoch. A DROP batch is
        whole by definition: its epoch is the samples of its batches.

        Args:
            epoch: The epoch.
            step: Index of the batch in it, from 0.
            stream: The stream that the batch comes from.

        Returns:
            A count between 0 and ``batch_size``; the mask of the batch is
            ``arange(batch_size) < count``.
        """
        if self.policy is LastBatchPolicy.DROP:
            return self.batch_size
        return max(0, min(self.batch_size, self._valid_from(epoch, step, stream)))

    def _valid_from(self, epoch: int, step: int, stream: int) -> int:
        """Samples of an epoch from the start of one of its batches on (0 or less: none)."""
        if self.padded:
            end = self.shard_size(self.shard_of(stream, epoch))
            start = step * self.batch_size
        else:
            end = self.stream_end(stream, epoch)
            start = (self.first_batch(epoch) + step) * self.batch_size
        return max(0, end - start)
