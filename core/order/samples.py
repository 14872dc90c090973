"""Assignment of samples to batches: pure arithmetic over an endless stream of samples.

Sample ``t`` of the stream is position ``t % N`` of epoch ``t // N``. Each batch takes the next
samples of the stream. An epoch's last batch is handled as for a DALI reader with one shard and
global batches (`dalijax.core.order.epochs`; for padding in general see `dalijax.core.order`)::

    N = 7, batches of 2     unpadded    0 1|2 3|4 5|6 7|8 9|...     runs on into the next epoch
                            padded      0 1|2 3|4 5|6 6|7 8|...

A position is (epoch, start, sample). It depends neither on the batch size, which may differ after
restoring a state, nor on shards, which slice the rows of each batch. `BucketPlan` alone depends on
the batch size.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from .packing import RowLayout, Table

_MOST_EMPTY = 100  # epochs without a batch, one after another
_MOST_TABLES = 3  # of epochs; a table of a million records has 10 MB
MOST_SAMPLES = 1 << 53  # in a stream: larger integers are not exact in every JSON parser


@dataclasses.dataclass(frozen=True)
class SamplePosition:
    """The position of the next batch in a stream of samples.

    Attributes:
        epoch: Number of the epoch that the consumer is in, from 0.
        start: Index in the stream of the first sample of the epoch's first batch.
        sample: Index in the stream of the first sample of the next batch; at the end of an epoch,
            the end of the epoch's samples or a later index.
    """

    epoch: int = 0
    start: int = 0
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """A range of rows of a batch.

    Attributes:
        samples: The index in the stream of each row's sample.
        valid: True for each row that is a sample of the consumer's epoch, and not padding.
        first: The number of the first of these samples among the samples of the global batch.
        layout: If rows contain several samples: the number of samples in each row. ``samples`` and
            ``valid`` then have an element for each sample.
    """

    samples: NDArray[np.int64]
    valid: NDArray[np.bool_]
    first: int = 0
    layout: RowLayout | None = None


def pads_by_default(policy: LastBatchPolicy, mask: str | None) -> bool:
    """Returns whether the last batch is padded by default.

    Without padding, the last batch is filled with samples of the next epoch, which are not
    delivered again. These must not be cut off, dropped or masked. FILL without a mask delivers
    every row, so that it does not pad, as in DALI.

    Args:
        policy: The policy for an epoch's last batch.
        mask: The name of the mask; None: no mask.
    """
    return mask is not None or policy is not LastBatchPolicy.FILL


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """Computes the batches of a stream of samples.

    Attributes:
        num_samples: Samples of an epoch (N), at least 1.
        batch_size: Rows of a global batch, at least 1.
        policy: The policy for an epoch's last batch.
        padded: Whether the last batch repeats the epoch's last sample; otherwise it contains
            samples of the next epoch.

    Raises:
        ValueError: If no epoch has a batch, because DROP drops batches with too few samples.
    """

    num_samples: int
    batch_size: int
    policy: LastBatchPolicy = LastBatchPolicy.FILL
    padded: bool = False
    keeps_batch_size: ClassVar[bool] = False  # whether positions depend on the batch size

    def __post_init__(self) -> None:
        if self.policy is LastBatchPolicy.DROP and self.num_samples < self.batch_size:
            raise ValueError(
                f"no epoch has a batch: batch_size {self.batch_size} is more than the "
                f"{self.num_samples} samples of an epoch, and incomplete batches are dropped. "
                "Use a smaller batch_size, or a last_batch_policy that keeps incomplete batches"
            )

    def end(self, position: SamplePosition) -> int:
        """Returns the end (exclusive) in the stream of the samples of a position's epoch."""
        if self.policy is LastBatchPolicy.DROP:  # the epoch may begin after its nominal start
            return position.start + self.num_samples
        return (position.epoch + 1) * self.num_samples

    def remaining(self, position: SamplePosition) -> int:
        """Returns the number of batches that the epoch delivers from a position to its end."""
        remaining = max(0, self.end(position) - position.sample)
        if self.policy is LastBatchPolicy.DROP:
            return remaining // self.batch_size
        return -(-remaining // self.batch_size)

    def step(self, position: SamplePosition) -> int:
        """Returns the number of batches from the epoch's start to a position, rounded up."""
        return -(-(position.sample - position.start) // self.batch_size)

    def length(self, position: SamplePosition) -> int:
        """Returns the number of batches of a position's epoch: before and after the position."""
        return self.step(position) + self.remaining(position)

    def mixes_epochs(self, position: SamplePosition) -> bool:
        """Returns whether the batch before a position contained samples of two epochs."""
        fills = self.policy is LastBatchPolicy.FILL and not self.padded
        return fills and position.sample > self.end(position)

    def rows(self, position: SamplePosition, first: int = 0, last: int | None = None) -> SampleRows:
        """Returns a range of rows of the batch at a position; the batch must exist.

        Args:
            position: The position of the batch.
            first: Index of the first row in the batch.
            last: End (exclusive) of the rows; None: the end of the batch. Under PARTIAL, rows
                after the epoch's end are omitted.
        """
        last = self.batch_size if last is None else last
        end = self.end(position)
        if self.policy is LastBatchPolicy.PARTIAL:
            last = min(last, end - position.sample)
        samples = position.sample + np.arange(first, max(first, last), dtype=np.int64)
        valid = samples < end
        return SampleRows(np.minimum(samples, end - 1) if self.padded else samples, valid, first)

    def prepare(self, epoch: int) -> None:
        """Computes what the batches of an epoch need; called in a thread, ahead of the epoch."""

    def skip(self, position: SamplePosition, batches: int) -> SamplePosition:
        """Returns the position after ``batches`` further batches of the epoch, which must exist."""
        return dataclasses.replace(position, sample=position.sample + batches * self.batch_size)

    def run_from(self, position: SamplePosition) -> SamplePosition:
        """Returns the first position, at or after the given position, that has a batch."""
        while self.remaining(position) == 0:
            position = self.next_epoch(position)
        return position

    def samples_before(self, position: SamplePosition) -> int:
        """Returns the number of samples of the stream that batches before a position depend on."""
        # The last batch of a padded epoch ends after the start of the next epoch.
        return min(position.sample, self.run_from(position).sample)

    def next_epoch(self, position: SamplePosition) -> SamplePosition:
        """Returns the start of the epoch after the epoch that ends at a position.

        If the last batch of an unpadded stream contained all samples of an epoch, that epoch is
        skipped.
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
        """Returns the position of a batch, in a stream whose batches all have ``batch_size`` rows.

        Args:
            epoch: The epoch.
            step: Index of the batch in the epoch; the length of the epoch stands for its end.
            first: The epoch that the stream begins with.

        Raises:
            ValueError: If the epoch has no such batch, or begins after too many samples for a
                state. If the last batch of an earlier epoch contained all samples of the epoch, the
                epoch has no batch.
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

        All batches of the stream are assumed to have ``batch_size`` rows.
        """
        n, b = self.num_samples, self.batch_size
        if self.policy is LastBatchPolicy.DROP:
            return divmod(batch, n // b)
        if self.padded:
            return divmod(batch, -(-n // b))
        epoch = batch * b // n  # the epoch of the batch's first sample
        return epoch, batch - -(-epoch * n // b)


class Tables:
    """The `Table` of each epoch, of which the latest are kept.

    Args:
        make: Computes the table of an epoch.
        num_groups: The number of groups of an epoch if it is the same for all epochs, else None.
    """

    def __init__(self, make: Callable[[int], Table], num_groups: int | None = None):
        self._make, self._num_groups = make, num_groups
        self._tables: dict[int, Table] = {}
        self._counts: dict[int, int] = {}  # of groups
        self._lock = threading.Lock()  # computing a table twice would take twice the time

    def __call__(self, epoch: int) -> Table:
        """Returns the table of an epoch."""
        found = self._tables.get(epoch)
        if found is not None:  # without the lock: another thread may compute the next epoch
            return found
        with self._lock:
            table = self._tables.get(epoch)
            if table is None:
                table = self._tables[epoch] = self._make(epoch)
                self._counts[epoch] = table.num_groups
                if len(self._tables) > _MOST_TABLES:
                    del self._tables[next(iter(self._tables))]
            return table

    def num_groups(self, epoch: int) -> int:
        """Returns the number of groups of an epoch."""
        count = self._counts.get(epoch) if self._num_groups is None else self._num_groups
        return self(epoch).num_groups if count is None else count


@dataclasses.dataclass(frozen=True)
class TablePlan(SamplePlan):
    """Base class of plans whose batches are the groups of a `Table`, or consist of them.

    Group g of epoch e has the number ``e * num_samples + g`` in positions, because an epoch has at
    most as many groups as records. The samples in `SampleRows` are records.

    Attributes:
        tables: The tables of the epochs.
    """

    tables: Tables = dataclasses.field(kw_only=True)

    def end(self, position: SamplePosition) -> int:
        """Returns the end (exclusive) of the groups of a position's epoch; see `SamplePlan`."""
        return position.epoch * self.num_samples + self.tables.num_groups(position.epoch)

    def next_epoch(self, position: SamplePosition) -> SamplePosition:
        """Returns the start of the epoch after a position's epoch."""
        start = (position.epoch + 1) * self.num_samples
        return SamplePosition(position.epoch + 1, start, start)

    def samples_before(self, position: SamplePosition) -> int:
        """Returns the number of samples of all epochs that have begun; see `SamplePlan`."""
        has_begun = position.sample > position.epoch * self.num_samples
        return (position.epoch + has_begun) * self.num_samples

    def batches(self, epoch: int) -> int:
        """Returns the number of batches of an epoch, which may have none."""
        start = epoch * self.num_samples
        return self.remaining(SamplePosition(epoch, start, start))

    def prepare(self, epoch: int) -> None:
        """Computes the table of an epoch."""
        self.tables(epoch)

    def run_from(self, position: SamplePosition) -> SamplePosition:
        """Returns the first position, at or after the given position, that has a batch.

        Raises:
            ValueError: If many successive epochs have no batch.
        """
        for _ in range(_MOST_EMPTY):
            if self.remaining(position):
                return position
            position = self.next_epoch(position)
        raise ValueError(
            f"the {_MOST_EMPTY} epochs up to epoch {position.epoch - 1} have no batch: batch_size "
            f"{self.batch_size} is more than their records fill. Use a smaller batch_size, or keep "
            "incomplete batches"
        )

    def locate(self, batch: int) -> tuple[int, int]:
        """Returns epoch and step of a batch; computes the tables of the epochs before it."""
        epoch = 0
        while True:
            count = self.batches(epoch)
            if batch < count:
                return epoch, batch
            epoch, batch = epoch + 1, batch - count


@dataclasses.dataclass(frozen=True)
class RowPlan(TablePlan):
    """Computes the batches of a stream whose rows contain several records.

    The groups of the tables are rows. The last batch of an epoch ends with blank rows.

    Attributes:
        most: The largest number of records in a row.
        capacity: What a row holds, such as tokens.
    """

    most: int = dataclasses.field(kw_only=True)
    capacity: int = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if self.policy is LastBatchPolicy.PARTIAL:
            raise ValueError(
                "last_batch_policy='partial' can't be used with rows of several records. Use "
                "'fill' (Grain: pad='mask'), whose last batch ends with blank rows, or "
                "drop_remainder=True"
            )
        count = self.tables.num_groups(0)
        if self.policy is LastBatchPolicy.DROP and count < self.batch_size:
            raise ValueError(
                f"no epoch has a batch: batch_size {self.batch_size} is more than the {count} rows "
                "of an epoch, and incomplete batches are dropped. Use a smaller batch_size, or "
                "keep incomplete batches"
            )

    def rows(self, position: SamplePosition, first: int = 0, last: int | None = None) -> SampleRows:
        """Returns the records in a range of rows of the batch at a position; see `SamplePlan`.

        If all rows of the range are blank, returns a record of the batch that is not valid.
        """
        last = self.batch_size if last is None else last
        table, base = self.tables(position.epoch), position.epoch * self.num_samples
        row = position.sample - base
        bounds = table.starts[np.minimum(np.arange(row + first, row + last + 1), table.num_groups)]
        begin, end = int(bounds[0]), int(bounds[-1])
        if is_blank := begin == end:
            begin -= 1
        return SampleRows(
            base + table.positions[begin:end],
            np.full(end - begin, not is_blank),
            begin - int(table.starts[row]),
            RowLayout(bounds[1:] - bounds[:-1], self.most, self.capacity),
        )


@dataclasses.dataclass(frozen=True)
class BucketPlan(TablePlan):
    """Computes the batches of a stream whose batches are the groups of the tables.

    Positions count batches. Under FILL, an incomplete batch ends with repetitions of its last
    record. Under DROP, the tables have no incomplete batches.
    """

    keeps_batch_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.tables.num_groups(0):
            raise ValueError(
                f"no epoch has a batch: no bucket has batch_size={self.batch_size} images, and "
                "incomplete batches are dropped. Use a smaller batch_size, or keep incomplete "
                "batches"
            )

    def remaining(self, position: SamplePosition) -> int:
        """Returns the number of batches from a position to the end of its epoch."""
        return max(0, self.end(position) - position.sample)

    def step(self, position: SamplePosition) -> int:
        """Returns the number of batches from the epoch's start to a position."""
        return position.sample - position.start

    def skip(self, position: SamplePosition, batches: int) -> SamplePosition:
        """Returns the position after ``batches`` further batches of the epoch, which must exist."""
        return dataclasses.replace(position, sample=position.sample + batches)

    def rows(self, position: SamplePosition, first: int = 0, last: int | None = None) -> SampleRows:
        """Returns the records in a range of rows of the batch at a position; see `SamplePlan`."""
        last = self.batch_size if last is None else last
        table, base = self.tables(position.epoch), position.epoch * self.num_samples
        begin, end = table.starts[position.sample - base :][:2].tolist()
        if self.policy is LastBatchPolicy.PARTIAL:
            last = min(last, end - begin)
        places = begin + np.arange(first, max(first, last), dtype=np.int64)
        samples = base + table.positions[np.minimum(places, end - 1)]
        return SampleRows(samples, places < end, first)
