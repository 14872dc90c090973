"""Orders that read groups of records, such as row groups of Parquet, one window after another."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable

import numpy as np

from ..random.hashing import fold
from .shuffle import Indices, shuffled


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of adjacent records that are read as a whole.

    Attributes:
        starts: The first record of each group, and the number of all records, int64 [groups + 1].
            Groups may be empty.
        sizes: The size of each group in bytes, int64 [groups].
        window: The number of bytes of the groups whose records are shuffled together.
        parts: The number of parts of an epoch that are read side by side; see `order`.
        batch_size: The number of records of a batch, a multiple of ``parts``.
    """

    starts: Indices
    sizes: Indices
    window: int
    parts: int = 1
    batch_size: int = 1

    def __str__(self) -> str:
        """Returns a text that is equal for groups with the same order."""
        parts = f" in {self.parts} parts of {self.batch_size} records" * (self.parts > 1)
        digest = hashlib.sha256(self.starts.tobytes() + self.sizes.tobytes()).hexdigest()
        return f"windows of {self.window:,} bytes{parts} of the row groups {digest[:12]}"

    def of(self, records: Indices) -> Indices:
        """Returns the group of each record."""
        return np.searchsorted(self.starts, records, side="right") - 1

    def selected(self, records: Indices) -> Groups:
        """Returns the groups of some of the records, given their increasing numbers."""
        return dataclasses.replace(self, starts=np.searchsorted(records, self.starts))

    def order(self, seed: int) -> Callable[[Indices, int], Indices]:
        """Returns the shuffled order of the epochs as a function of positions and an epoch.

        Each epoch shuffles the groups and divides them into windows. The records of a window are
        shuffled. The epoch is then divided into ``parts`` of almost equal length, and each batch
        takes the same number of records from each part, in the order of its rows. So processes
        that make different rows read different groups. This holds for batches of ``batch_size``
        in a stream without padding; other batches have the same order of records.

        The order is a permutation of the records that depends only on the seed, the epoch and the
        attributes.

        Args:
            seed: The seed of all epochs.
        """
        counts = np.diff(self.starts)

        @functools.lru_cache(2)  # a batch may span two epochs
        def tables(epoch: int) -> tuple[Indices, Indices, Indices]:
            """Returns the groups in order, and the positions where groups and windows begin."""
            groups = shuffled(np.arange(len(counts)), len(counts), seed, epoch)
            begins = np.cumsum(counts[groups]) - counts[groups]
            windows = (np.cumsum(self.sizes[groups]) - self.sizes[groups]) // self.window
            return groups, begins, begins[np.flatnonzero(np.diff(windows, prepend=-1))]

        def order(positions: Indices, epoch: int) -> Indices:
            groups, begins, bounds = tables(epoch)
            positions = self._in_parts(positions, epoch)
            windows = np.searchsorted(bounds, positions, side="right") - 1
            places = np.empty_like(positions)
            for window in np.unique(windows).tolist():
                chosen = windows == window
                first, last = np.append(bounds, self.starts[-1])[window : window + 2].tolist()
                inner_seed = int(fold(seed, window))
                inner = shuffled(positions[chosen] - first, last - first, inner_seed, epoch)
                places[chosen] = first + inner
            numbers = np.searchsorted(begins, places, side="right") - 1
            return self.starts[groups[numbers]] + places - begins[numbers]

        return order

    def _in_parts(self, positions: Indices, epoch: int) -> Indices:
        """Returns the positions of records in an epoch whose parts are read one after another."""
        count, size = int(self.starts[-1]), self.batch_size // self.parts
        first = epoch * count % self.batch_size  # the row of the epoch's first record in its batch
        parts = np.arange(self.parts)

        def before(rows: Indices, part: Indices) -> Indices:
            """Returns the number of records of a part before some rows, from a batch's first."""
            batches, rest = np.divmod(rows, self.batch_size)
            return batches * size + np.clip(rest - part * size, 0, size)

        begins = before(np.array(first), parts)
        counts = before(np.array(first + count), parts) - begins
        rows = positions + first
        part = rows % self.batch_size // size
        return (np.cumsum(counts) - counts)[part] + before(rows, part) - begins[part]
