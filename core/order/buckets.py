"""Batches of images of one size: pure functions of the sizes of the images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..random.hashing import fold, mix
from .packing import Table


def nearest_buckets(
    sizes: NDArray[np.int32], buckets: Sequence[tuple[int, int]]
) -> NDArray[np.int32]:
    """Returns the index of each image's bucket, int32 [images].

    The logarithm of a bucket's aspect ratio is the nearest to that of the image; the first is used
    if two are equally near. Of several buckets with this ratio, the index is that of the largest
    that the image fills without being enlarged, otherwise of the smallest.

    Args:
        sizes: Heights and widths of the images, [images, 2].
        buckets: The height and width of each bucket.
    """
    shapes: dict[tuple[int, int], list[int]] = {}  # buckets by their reduced aspect ratio
    for k, (height, width) in enumerate(buckets):
        divisor = math.gcd(height, width)
        shapes.setdefault((height // divisor, width // divisor), []).append(k)
    heights, widths = sizes.astype(np.float64).T
    least = np.full(len(sizes), np.inf)
    chosen = np.zeros(len(sizes), np.int32)
    for (height, width), members in shapes.items():
        # The exponential of the logarithms' distance. Divisions give equal results on all CPUs.
        first, second = heights * width, widths * height
        distance = np.maximum(first, second) / np.minimum(first, second)
        is_nearer = distance < least
        least = np.where(is_nearer, distance, least)
        members = sorted(members, key=lambda k: buckets[k])
        number = np.zeros(len(sizes), np.int64)
        for k in members[1:]:  # of one ratio, so that each is larger than the one before
            number += (heights >= buckets[k][0]) & (widths >= buckets[k][1])
        chosen = np.where(is_nearer, np.array(members, np.int32)[number], chosen)
    return chosen


def bucket_table(
    buckets: NDArray[np.int32], batch_size: int, drops: bool, epoch: int, seed: int, shuffle: bool
) -> Table:
    """Returns the batches of an epoch. A batch has images of one bucket.

    Args:
        buckets: The bucket of the record at each position of the epoch; -1 for records that no
            batch contains.
        batch_size: The number of records of a batch. The last batch of a bucket may have fewer.
        drops: Whether to leave out batches with fewer records.
        epoch, seed: They determine the order of the batches if ``shuffle`` is True; otherwise,
            batches follow each other by their first record.
        shuffle: See ``epoch``.
    """
    positions = np.argsort(buckets, kind="stable")
    positions = positions[buckets[positions] >= 0]
    counts = np.bincount(buckets[positions])
    # The number of each record in its bucket.
    numbers = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
    if drops:
        is_kept = numbers < np.repeat(counts - counts % batch_size, counts)
        positions, numbers = positions[is_kept], numbers[is_kept]
    (firsts,) = np.nonzero(numbers % batch_size == 0)
    lengths = np.diff(firsts, append=len(positions))
    batches = np.arange(len(firsts))
    keys = mix(fold(seed, epoch, len(firsts), batches)) if shuffle else positions[firsts]
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths[order])])
    places = np.arange(len(positions)) + np.repeat(firsts[order] - starts[:-1], lengths[order])
    return Table(positions[places], starts)
