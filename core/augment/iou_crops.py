"""Windows that overlap with boxes, as torchvision's RandomIoUCrop chooses them, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .windows import Floats, Range, Sizes

ROUNDS, TRIALS = 32, 40
_COLUMNS = 4 * TRIALS  # numbers of a round: a size and a position (y, x) for each trial
NUMBERS = ROUNDS * (1 + _COLUMNS)  # also a level for each round, first
_PARTS = ((0, 4), (4, 12), (12, TRIALS))  # trials that are computed together; most end early

# Returns uniform numbers of some rows, float32 [some, columns], given the rows and the columns.
Numbers = Callable[[NDArray[np.int64], slice], NDArray[np.float32]]


def choose(
    numbers: Numbers,
    sizes: Sizes,
    corners: Floats,
    records: Any,
    *,
    levels: Sequence[float],
    scale: Range,
    ratio: Range,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chooses windows that contain the centers of boxes, and overlap with one of these boxes.

    Args:
        numbers: Returns uniform numbers.
        sizes: Image sizes, [rows, 2].
        corners: Corners (x0, y0, x1, y1) of the boxes of all rows, [boxes, 4].
        records: The row of each box, in order.
        levels: Least overlaps, of which each round chooses one; 1 or more: the whole image.
        scale: Range of the window's share of each side.
        ratio: Range of width / height of the window.

    Returns:
        Start and end of the windows, (y, x) in whole pixels: two float32 arrays [rows, 2].
    """
    start, end = np.zeros((len(sizes), 2), np.float32), sizes.astype(np.float32)
    if not len(corners):
        return start, end
    counts = np.bincount(records, minlength=len(sizes))
    boxes = np.full((len(sizes), int(np.max(counts)), 4), np.nan)  # (y0, x0, y1, x1)
    boxes[records, np.arange(len(records)) - (np.cumsum(counts) - counts)[records]] = corners[
        :, [1, 0, 3, 2]
    ]
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(axis=2)
    largest = np.where(counts > 0, np.nanmax(np.nan_to_num(areas, nan=-1.0), axis=1), -1.0)
    left = np.flatnonzero(counts > 0)
    table = np.asarray(levels, np.float64)
    drawn = numbers(left, slice(0, ROUNDS)).astype(np.float64)
    level_of = table[(drawn * len(table)).astype(int)]  # of each round
    # An overlap is at most the share of the largest box in the window, so that rounds whose level
    # no window can reach are skipped.
    smallest = np.floor(sizes[left] * float(scale[0])).prod(axis=1)
    possible = smallest[:, np.newaxis] * level_of * (1 - 1e-9) <= largest[left][:, np.newaxis]
    possible |= level_of >= 1
    for number in range(ROUNDS):
        ended = level_of[:, number] >= 1
        left, level_of, possible = left[~ended], level_of[~ended], possible[~ended]
        active = np.flatnonzero(possible[:, number])
        if not len(active):
            continue
        rows, level = left[active], level_of[active, number]
        first = ROUNDS + number * _COLUMNS
        u = numbers(rows, slice(first, first + _COLUMNS)).astype(np.float64)
        found, window = _first_fit(
            u.reshape(-1, TRIALS, 4), sizes[rows], boxes[rows], level, largest[rows], scale, ratio
        )
        start[rows[found]], end[rows[found]] = window[found, :2], window[found, 2:]
        stays = np.ones(len(left), bool)
        stays[active[found]] = False
        left, level_of, possible = left[stays], level_of[stays], possible[stays]
    return start, end


def _first_fit(
    u: Floats,
    sizes: Sizes,
    boxes: Floats,
    level: Floats,
    largest: Floats,
    scale: Range,
    ratio: Range,
) -> tuple[NDArray[np.bool_], Floats]:
    """Tries the windows of a round.

    Args:
        u: Uniform numbers, [rows, `TRIALS`, 4].
        sizes: Image sizes, [rows, 2].
        boxes: Boxes (y0, x0, y1, x1), NaN for none, [rows, boxes, 4].
        level: Least overlaps, [rows].
        largest: Areas of the largest boxes, [rows].
        scale, ratio: As for `choose`.

    Returns:
        Whether a window fits, [rows]; and the first one that does, (y0, x0, y1, x1), [rows, 4].
    """
    size = sizes[:, np.newaxis].astype(np.float64)
    extent = np.floor(size * (scale[0] + (scale[1] - scale[0]) * u[..., :2]))
    first = np.floor((size - extent) * u[..., 2:])
    with np.errstate(divide="ignore", invalid="ignore"):
        shape = extent[..., 1] / extent[..., 0]
    may_fit = (extent > 0).all(axis=2) & (shape >= ratio[0]) & (shape <= ratio[1])
    most = extent.prod(axis=2) * level[:, np.newaxis] * (1 - 1e-9)
    may_fit &= most <= largest[:, np.newaxis]
    found, window = np.zeros(len(u), bool), np.zeros((len(u), 4))
    for begin, stop in _PARTS:
        row, trial = np.nonzero(may_fit[:, begin:stop] & ~found[:, np.newaxis])
        if not len(row):
            continue
        trial += begin
        start, end = first[row, trial], first[row, trial] + extent[row, trial]
        fits = np.flatnonzero(_overlaps(start, end, boxes[row]) >= level[row])
        rows, best = np.unique(row[fits], return_index=True)  # the first trial of each row
        window[rows] = np.concatenate([start, end], axis=1)[fits[best]]
        found[rows] = True
    return found, window


def _overlaps(start: Floats, end: Floats, boxes: Floats) -> Floats:
    """Returns the largest overlap of windows with boxes whose centers they contain; -1: none.

    Args:
        start, end: Corners (y, x) of the windows, [windows, 2].
        boxes: Boxes (y0, x0, y1, x1) for each window, NaN for none, [windows, boxes, 4].
    """
    (a, b), (c, d) = start.T[..., np.newaxis], end.T[..., np.newaxis]
    y0, x0, y1, x1 = np.moveaxis(boxes, -1, 0)
    y, x = (y0 + y1) / 2, (x0 + x1) / 2
    within = (a < y) & (y < c) & (b < x) & (x < d)
    height = np.maximum(np.minimum(c, y1) - np.maximum(a, y0), 0)
    common = height * np.maximum(np.minimum(d, x1) - np.maximum(b, x0), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        overlap = common / ((c - a) * (d - b) + (y1 - y0) * (x1 - x0) - common)
    return np.where(within, overlap, -1.0).max(axis=1)
