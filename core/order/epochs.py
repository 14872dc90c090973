"""Epoch arithmetic: how many batches an epoch has and which of their samples belong to it.

All functions are pure and need no pipeline. (`dalijax.core.order` describes who decides about
padding.) Of a data set of N samples, shard i of S shards holds samples floor(N*i/S) to
floor(N*(i+1)/S) - 1. The reader with ``shard_id=i`` reads shard i in epoch 0 and continues without
end. With batches of B samples::

    N = 7, S = 2, B = 2          shard 0: 0 1 2      shard 1: 3 4 5 6

    reader 0, not padded         0 1|2 3|4 5|6 0|1 2|...      runs on into its next shard
    reader 0, padded             0 1|2 2|3 4|5 6|0 1|...      whole batches for each shard
                                 epoch 0|epoch 1|epoch 2

A reader with ``stick_to_shard`` reads its shard in every epoch; otherwise it reads shard
``(shard_id + epoch) % S``.
"""

from __future__ import annotations

import dataclasses

from nvidia.dali.plugin.base_iterator import LastBatchPolicy


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def count_rows(rows: int, valid: int, policy: LastBatchPolicy, padded: bool) -> tuple[int, int]:
    """Returns the number of samples and the number of padding rows in a delivered batch.

    Args:
        rows: Number of rows of the batch before PARTIAL cuts it.
        valid: Number of leading rows that are samples of the epoch, without padding.
        policy: The policy for an epoch's last batch.
        padded: Whether the remaining rows repeat the epoch's last sample; otherwise they are
            samples of the next epoch.
    """
    if policy is LastBatchPolicy.PARTIAL:
        return valid, 0
    return (valid, rows - valid) if padded else (rows, 0)


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """Computes the number of batches of every epoch of a reader, and the samples in each batch.

    Attributes:
        num_samples: Samples in the data set (N), at least 1.
        num_shards: Number of shards over all processes (S).
        batch_size: Samples in a batch of one shard (B).
        policy: The policy for an epoch's last batch.
        padded: Whether the reader repeats a shard's last sample until the last batch is full
            (``pad_last_batch``).
        stick: Whether a reader reads the same shard in every epoch (``stick_to_shard``).
        per_shard: Whether shards may deliver different numbers of batches under DROP; otherwise
            all shards deliver as many batches as the smallest shard has.
    """

    num_samples: int
    num_shards: int
    batch_size: int
    policy: LastBatchPolicy = LastBatchPolicy.FILL
    padded: bool = False
    stick: bool = False
    per_shard: bool = False

    def shard_size(self, shard: int) -> int:
        """Returns how many samples of the data set a shard contains."""
        n, s = self.num_samples, self.num_shards
        return n * (shard + 1) // s - n * shard // s

    def shard_of(self, shard_id: int, epoch: int) -> int:
        """Returns the index of the shard that the reader with ``shard_id`` reads in an epoch."""
        return shard_id if self.stick else (shard_id + epoch) % self.num_shards

    def samples_until(self, shard_id: int, epoch: int) -> int:
        """Returns how many samples an unpadded reader reads from epoch 0 to an epoch's end."""
        if self.stick:
            return (epoch + 1) * self.shard_size(shard_id)
        # S epochs read every shard once; the remaining epochs read consecutive shards, which may
        # wrap around.
        rounds, remainder = divmod(epoch + 1, self.num_shards)
        n, s = self.num_samples, self.num_shards
        end = shard_id + remainder
        run = n * min(end, s) // s - n * shard_id // s
        if end > s:
            run += n * (end - s) // s
        return rounds * n + run

    def first_batch(self, epoch: int) -> int:
        """Returns the index of an epoch's first batch, counted over all epochs.

        The index is the number of batches that a pipeline produces before the epoch starts.
        """
        n, s = self.num_samples, self.num_shards
        if self.padded or self.policy is LastBatchPolicy.DROP:
            # The largest shard has ceil(N/S) samples, the smallest floor(N/S).
            samples = _ceil_div(n, s) if self.padded else n // s
            return epoch * _ceil_div(samples, self.batch_size)
        if epoch == 0:
            return 0
        longest = max(self.samples_until(shard, epoch - 1) for shard in range(s))
        return _ceil_div(longest, self.batch_size)

    def consumed(self, epoch: int) -> int:
        """Returns the number of batches that a pipeline produces for an epoch, delivered or not."""
        return self.first_batch(epoch + 1) - self.first_batch(epoch)

    def delivered(self, epoch: int, shard_id: int = 0) -> int:
        """Returns the number of batches that an epoch delivers: the length of an iterator.

        The number depends on the shard in two cases. Under PARTIAL, consumed batches without a
        sample of the epoch are not delivered. Under DROP with ``per_shard``, each shard delivers
        all of its full batches.
        """
        if self.policy is LastBatchPolicy.DROP:
            samples = self.num_samples // self.num_shards
            if self.per_shard:
                samples = self.shard_size(self.shard_of(shard_id, epoch))
            return samples // self.batch_size
        if self.policy is LastBatchPolicy.PARTIAL:
            return _ceil_div(self._valid_from(epoch, 0, shard_id), self.batch_size)
        return self.consumed(epoch)

    def total(self, epochs: int, shard_id: int = 0) -> int:
        """Returns how many batches the first ``epochs`` epochs deliver; see `delivered`."""
        if self.policy is LastBatchPolicy.FILL:
            return self.first_batch(epochs)

        def batches_of_first(count: int) -> int:
            return sum(self.delivered(epoch, shard_id) for epoch in range(count))

        unequal = self.num_samples % self.num_shards > 0
        runs_on = self.policy is LastBatchPolicy.PARTIAL and not self.padded
        if runs_on and self.stick and unequal:  # epochs begin at different offsets: no period
            return batches_of_first(epochs)
        # After this many epochs, a reader has read whole batches only, so that the lengths repeat.
        period = self.num_shards * self.batch_size
        rounds, remainder = divmod(epochs, period)
        return (rounds * batches_of_first(period) if rounds else 0) + batches_of_first(remainder)

    def size(self, epoch: int) -> int:
        """Returns the number of samples of an epoch for each shard, as DALI's iterators count."""
        if self.policy is LastBatchPolicy.DROP:
            return self.num_samples // self.num_shards
        if self.padded:
            return _ceil_div(self.num_samples, self.num_shards)
        return self.consumed(epoch) * self.batch_size

    def next_epoch(self, epoch: int) -> int:
        """Returns the first epoch after ``epoch`` that consumes a batch.

        The last batch of an unpadded reader may contain all samples of the next epoch, which is
        then skipped. Under DROP with fewer samples than shards, no epoch consumes a batch, and
        no epoch is skipped.
        """
        if not self.padded and self.policy is LastBatchPolicy.DROP:
            return epoch + 1
        epoch += 1
        while self.consumed(epoch) == 0:
            epoch += 1
        return epoch

    def valid(self, epoch: int, step: int, shard_id: int) -> int:
        """Returns the number of leading rows of a batch that are samples of its epoch.

        The remaining rows are padding or samples of the next epoch. Under DROP all rows count,
        because an epoch consists of the samples in its delivered batches.

        Args:
            epoch: The epoch.
            step: Index of the batch in the epoch, from 0.
            shard_id: The ``shard_id`` of the batch's reader.

        Returns:
            A count between 0 and ``batch_size``; the mask of the batch is
            ``arange(batch_size) < count``.
        """
        if self.policy is LastBatchPolicy.DROP:
            return self.batch_size
        return min(self.batch_size, self._valid_from(epoch, step, shard_id))

    def num_full(self, epoch: int, shard_id: int) -> int:
        """Returns how many leading batches of an epoch contain only samples of the epoch."""
        if self.policy is LastBatchPolicy.DROP:
            return self.delivered(epoch, shard_id)
        return self._valid_from(epoch, 0, shard_id) // self.batch_size

    def _valid_from(self, epoch: int, step: int, shard_id: int) -> int:
        """Returns how many samples a reader reads from a batch's start to its epoch's end, or 0."""
        if self.padded:
            end = self.shard_size(self.shard_of(shard_id, epoch))
            start = step * self.batch_size
        else:
            end = self.samples_until(shard_id, epoch)
            start = (self.first_batch(epoch) + step) * self.batch_size
        return max(0, end - start)
