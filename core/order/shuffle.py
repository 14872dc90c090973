"""The shuffled order of an epoch: a permutation that depends only on the seed and the epoch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..random.hashing import fold, mix

Indices = NDArray[np.int64]

# Feistel networks are not uniform for few positions (p = 0.0000 for 5 positions and 8 rounds), but
# sorting hashes is. For more records than this limit, sorting would cost memory and delay the
# epoch's first batch.
MOST_SORTED = 1 << 16
_ROUNDS = 8


def shuffled(positions: Any, count: int, seed: int, epoch: int) -> Indices:
    """Returns the numbers of the records at given positions of a shuffled epoch, as int64.

    Args:
        positions: A sequence of positions in the epoch, from 0 to ``count - 1``.
        count: Number of records in the epoch.
        seed: The seed of all epochs.
        epoch: The epoch.
    """
    positions = np.asarray(positions, np.int64)
    if count <= MOST_SORTED:
        return _by_sorting(count, seed, epoch)[positions]
    return _feistel(positions, count, seed, epoch)


@functools.lru_cache(8)
def _by_sorting(count: int, seed: int, epoch: int) -> Indices:
    """Returns the numbers of an epoch's records in shuffled order, by sorting their hashes."""
    hashes = mix(fold(seed, epoch, count) ^ mix(np.arange(count, dtype=np.uint64)))
    order = np.argsort(hashes, kind="stable")
    order.setflags(write=False)
    return order


@functools.lru_cache(64)  # hashing the keys takes as long as permuting a batch
def _keys(count: int, seed: int, epoch: int) -> tuple[Any, ...]:
    """Returns the key of each round of `_feistel`."""
    return tuple(fold(seed, epoch, count, turn) for turn in range(_ROUNDS))


def _feistel(positions: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Returns the record number at each position, by a permutation of 0 to ``count - 1``.

    The permutation is a Feistel network over pairs (left, right) with left < a and right < b. a * b
    is ``count`` or slightly more. Results that are not less than ``count`` are mapped again until
    they are (cycle walking), so that the map remains a permutation.
    """
    a = math.isqrt(count - 1) + 1
    b = -(-count // a)
    lefts, rights = np.uint64(a), np.uint64(b)
    values = positions.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        left, right = np.divmod(values[todo], rights)
        for turn, key in enumerate(_keys(count, seed, epoch)):
            if turn % 2:
                right = (right + mix(left ^ key) % rights) % rights
            else:
                left = (left + mix(right ^ key) % lefts) % lefts
        values[todo] = mapped = left * rights + right
        todo = todo[mapped >= np.uint64(count)]
    return values.astype(np.int64)
