"""The rows of batches whose rows have several records: pure functions of the records' lengths.

A `Table` says which records the rows of an epoch contain. It depends only on the seed, the epoch
and the lengths, so that every process computes the same table, and states need not contain it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..random.hashing import fold, mix
from .shuffle import Indices

WINDOW = 1024  # records that are packed together
_ENOUGH = 1.02  # rows, of the fewest that are possible: fewer are not searched for
_STEP = 64  # the share of the rows that are added after a trial
_MOST_TRIALS = 4


@dataclasses.dataclass(frozen=True)
class Table:
    """Groups of the records of an epoch: its rows, or its batches.

    Attributes:
        positions: The positions of the records in the order of the epoch, group by group, int64.
        starts: The place in ``positions`` of each group's first record, and the number of records,
            int64 [groups + 1].
    """

    positions: Indices
    starts: Indices

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.starts) - 1


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The number of records in each row of a pipeline's batch. Blank rows follow the other rows.

    If all rows are blank, the pipeline still processes a record, because DALI has no empty batches.

    Attributes:
        counts: The number of records in each row, int64 [rows].
        most: The largest number of records in a row.
        capacity: What a row holds: tokens, or 1 if a row is one record with several images.
    """

    counts: Indices
    most: int
    capacity: int

    @property
    def is_blank(self) -> bool:
        """Whether all rows are blank."""
        return not self.counts.any()

    @property
    def num_records(self) -> int:
        """The number of records that the pipeline processes."""
        return max(1, int(self.counts.sum()))

    def tails(self, amounts: NDArray[Any], capacity: int) -> NDArray[Any]:
        """Returns what follows each record, so that records and tails fill all rows exactly.

        Args:
            amounts: What each record takes of its row, such as tokens, int64 [records].
            capacity: What a row holds.
        """
        tails = np.zeros_like(amounts)
        if self.is_blank:
            return tails + len(self.counts) * capacity - amounts
        full = self.counts[self.counts > 0]
        last = np.cumsum(full) - 1
        tails[last] = capacity - np.add.reduceat(amounts, last - full + 1)
        tails[-1] += (len(self.counts) - len(full)) * capacity
        return tails

    def by_row(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns values of the records as an array [rows, most, ...].

        Missing values are 0, False or None.

        Args:
            values: A value for each record, [records, ...].
        """
        shape = len(self.counts), self.most, *values.shape[1:]
        rows = np.full(shape, None) if values.dtype == object else np.zeros(shape, values.dtype)
        if not self.is_blank:
            rows[self.places] = values
        return rows

    @property
    def places(self) -> tuple[Indices, Indices]:
        """The row of each record, and its number in the row; for arrays [rows, most, ...]."""
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        firsts = np.cumsum(self.counts) - self.counts
        return rows, np.arange(len(rows)) - np.repeat(firsts, self.counts)


def first_fit_decreasing(lengths: NDArray[np.int32], capacity: int, most: int) -> Indices:
    """Packs items into rows, in several windows at once: the longest first, into the first row.

    Args:
        lengths: The length of each item, at most ``capacity``, int32 [windows, items]; 0 for none.
        capacity: The length of a row.
        most: The largest number of items in a row.

    Returns:
        The number of each item's row in its window, int64 [windows, items].
    """
    return _longest_first(lengths, lambda decreasing: _first_fit(decreasing, capacity, most))


def _longest_first(
    lengths: NDArray[np.int32], pack: Callable[[NDArray[np.int32]], Indices]
) -> Indices:
    """Returns the rows of items, given a function that packs items of decreasing lengths."""
    order = np.argsort(-lengths, axis=1, kind="stable")
    rows = np.empty(lengths.shape, np.int64)
    np.put_along_axis(rows, order, pack(np.take_along_axis(lengths, order, axis=1)), axis=1)
    return rows


def _first_fit(lengths: NDArray[np.int32], capacity: int, most: int) -> Indices:
    """Packs items of decreasing lengths, each into the first row that has room."""
    windows, width = lengths.shape
    sizes = np.unique(lengths)[::-1].tolist()
    if len(sizes) * (windows + 32) < 8 * width:  # faster: fewer calls, but more arithmetic
        return _first_fit_by_length(lengths, sizes, capacity, most)
    window = np.arange(windows)
    num_rows = 1
    free = np.full((windows, num_rows), capacity, np.int32)
    left = np.full((windows, num_rows), most, np.int32)
    chosen = np.zeros((windows, width), np.int64)
    for k in range(width):
        length = lengths[:, k]
        fits = (free >= length[:, np.newaxis]) & (left > 0)
        row = fits.argmax(axis=1)
        if not fits[window, row].all():
            free = np.pad(free, ((0, 0), (0, num_rows)), constant_values=capacity)
            left = np.pad(left, ((0, 0), (0, num_rows)), constant_values=most)
            row = np.where(fits[window, row], row, num_rows)
            num_rows *= 2
        free[window, row] -= length
        left[window, row] -= length > 0
        chosen[:, k] = row
    return chosen


def _first_fit_by_length(
    lengths: NDArray[np.int32], sizes: list[int], capacity: int, most: int
) -> Indices:
    """Packs as `_first_fit` does, all items of one of the decreasing ``sizes`` at once."""
    windows, width = lengths.shape
    # Of the rows with fewer than ``most`` items, all but the last lack room for a later item, and
    # any two have items for more than one row.
    fewest = max(2 * (capacity - sizes[0]), capacity)  # tokens of two such rows
    num_rows = width // most + 2 * int(np.max(lengths.sum(axis=1, dtype=np.int64))) // fewest + 1
    free = np.full((windows, num_rows), capacity, np.int32)
    left = np.full((windows, num_rows), most, np.int32)
    places = []
    for size in sizes:
        counts = (lengths == size).sum(axis=1, dtype=np.int32, keepdims=True)
        # Equal items fill one row after another.
        room = np.minimum(free // size, left) if size else np.full_like(left, width)
        taken = np.minimum(room.cumsum(axis=1, dtype=np.int32), counts)
        taken[:, 1:] -= taken[:, :-1]
        free -= taken * size
        left -= taken
        (filled,) = np.nonzero(taken.reshape(-1))
        places.append(np.repeat(filled, taken.reshape(-1)[filled]))
    window, rows = np.divmod(np.concatenate(places), num_rows)
    return rows[np.argsort(window, kind="stable")].reshape(lengths.shape)


def _emptiest_row(
    lengths: NDArray[np.int32], capacity: int, most: int, num_rows: NDArray[np.int64]
) -> tuple[Indices, NDArray[np.bool_]]:
    """Packs items of decreasing lengths into given numbers of rows, each into the emptiest row.

    If ``most`` limits the rows, long and short items must share rows. First fit decreasing leaves
    the short items to the last rows instead.

    Args:
        lengths: Decreasing lengths, int32 [windows, items].
        capacity, most: As for `first_fit_decreasing`.
        num_rows: The number of rows of each window.

    Returns:
        The number of each item's row, int64 [windows, items]; and whether all items of a window
        fit, bool [windows].
    """
    chosen = np.zeros(lengths.shape, np.int64)
    # A row holds at most capacity // n items of the lengths n and more.
    together = np.minimum(capacity // np.maximum(lengths, 1), most)
    needed = -(-np.arange(1, 1 + lengths.shape[1]) // together) * (lengths > 0)
    fits = needed.max(axis=1) <= num_rows
    for window in np.flatnonzero(fits).tolist():
        count, rows = int(num_rows[window]), []
        emptiest = list(range(count))  # a heap of used * count + row
        left = [most] * count
        for length in lengths[window].tolist():
            row = emptiest[0] % count if emptiest else 0
            if not emptiest or emptiest[0] // count + length > capacity:
                fits[window] = False
                break
            left[row] -= length > 0
            if left[row]:
                heapq.heapreplace(emptiest, emptiest[0] + length * count)
            else:
                heapq.heappop(emptiest)
            rows.append(row)
        chosen[window, : len(rows)] = rows
    return chosen, fits


def packed_rows(lengths: NDArray[np.int32], capacity: int, most: int) -> Indices:
    """Packs items into rows, in several windows at once.

    By first fit decreasing, or by `_emptiest_row` if this takes fewer rows.

    Args:
        lengths, capacity, most: As for `first_fit_decreasing`.

    Returns:
        The number of each item's row in its window, int64 [windows, items].
    """
    return _longest_first(lengths, lambda decreasing: _fewest_rows(decreasing, capacity, most))


def _fewest_rows(lengths: NDArray[np.int32], capacity: int, most: int) -> Indices:
    """Packs items of decreasing lengths; see `packed_rows`."""
    rows = _first_fit(lengths, capacity, most)
    counts = np.where(lengths > 0, rows, -1).max(axis=1) + 1
    total, items = lengths.sum(axis=1, dtype=np.int64), (lengths > 0).sum(axis=1)
    num_rows = np.maximum(-(-total // capacity), -(-items // most))
    for _ in range(_MOST_TRIALS):
        (wasteful,) = np.nonzero(num_rows * _ENOUGH < counts)
        if not len(wasteful):
            break
        found, fits = _emptiest_row(lengths[wasteful], capacity, most, num_rows[wasteful])
        rows[wasteful[fits]] = found[fits]
        counts[wasteful[fits]] = num_rows[wasteful[fits]]
        num_rows[wasteful[~fits]] += 1 + num_rows[wasteful[~fits]] // _STEP
    return rows


def packed_table(
    lengths: NDArray[np.int32], capacity: int, most: int, epoch: int, seed: int, shuffle: bool
) -> Table:
    """Returns the rows of an epoch, packed by `packed_rows` in windows of 1,024 records.

    Args:
        lengths: The length of the record at each position of the epoch, at most ``capacity``; 0 for
            records that no row contains.
        capacity: The length of a row.
        most: The largest number of records in a row.
        epoch, seed: They determine the order of the rows in a window if ``shuffle`` is True;
            otherwise, rows follow each other by their first record.
        shuffle: See ``epoch``.
    """
    (positions,) = np.nonzero(lengths)
    packed = lengths[positions]
    if not len(packed):
        return Table(positions, np.zeros(1, np.int64))
    num_windows = -(-len(packed) // WINDOW)
    padded = np.zeros(num_windows * WINDOW, np.int32)
    padded[: len(packed)] = packed
    rows = packed_rows(padded.reshape(num_windows, WINDOW), capacity, most)
    rows = rows.reshape(-1)[: len(packed)]
    windows = np.arange(len(packed)) // WINDOW
    if shuffle:  # the first rows have the longest records
        keys = mix(fold(seed, epoch, windows, rows))
    else:
        row_ids = windows * WINDOW + rows
        _, firsts, inverse = np.unique(row_ids, return_index=True, return_inverse=True)
        keys = firsts[inverse]
    order = np.lexsort((rows, keys, windows))  # stable, so that records keep their order in a row
    changes = (np.diff(rows[order]) != 0) | (np.diff(windows[order]) != 0)
    starts = np.flatnonzero(np.concatenate([[True], changes, [True]]))
    return Table(positions[order], starts)


def places_of_tokens(
    layout: RowLayout,
    grids: NDArray[np.int32],
    texts: NDArray[np.int32],
    valid: NDArray[np.bool_],
    capacity: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns the place of each token in its image, and the number of the image in its row.

    Args:
        layout: The number of images in each row.
        grids: Height and width of each image in patches, int32 [images, 2].
        texts: The tokens of text after the patches of each image, int32 [images].
        valid: False for images whose tokens count as padding, bool [images].
        capacity: The tokens of a row.

    Returns:
        For each token: (y, x) of a patch, (-1, number) of text, or 0, int32 [rows, capacity, 2];
        and the image's number in the row, from 1, or 0 for padding, int32 [rows, capacity].
    """
    shape = len(layout.counts), capacity
    if layout.is_blank:
        return np.zeros((*shape, 2), np.int32), np.zeros(shape, np.int32)
    # An image is a sequence of lines: the rows of its grid, its text, and what follows it.
    heights, widths = grids[:, 0], grids[:, 1]
    amounts = heights * widths + texts
    tails = layout.tails(amounts, capacity)
    counts = heights + 2
    ends = np.cumsum(counts)
    image = np.repeat(np.arange(len(grids)), counts)
    lengths = widths[image]
    lengths[ends - 2], lengths[ends - 1] = texts, tails
    starts = np.cumsum(lengths) - lengths
    y = np.arange(len(image)) - (ends - counts)[image]
    y[ends - 2] = 0xFFFFFFFF  # -1
    # As int64, a place is x << 32 | y, so that single calls of NumPy fill and count both numbers.
    places = np.repeat(y - (starts << 32), lengths)
    places += np.arange(0, len(places) << 32, 1 << 32)
    _, numbers = layout.places
    ids = np.zeros((len(grids), 2), np.int32)
    ids[:, 0] = (numbers + 1) * valid
    segment_ids = np.repeat(ids.reshape(-1), np.stack([amounts, tails], axis=1).reshape(-1))
    places[segment_ids == 0] = 0
    return places.view(np.int32).reshape(*shape, 2), segment_ids.reshape(shape)
