"""Hashes of integers, and random numbers that depend only on (seed, epoch, record, name).

Only integer operations determine the bits, so that results are equal on all CPUs and NumPy
versions. The hash is the step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014). Resumed runs need equal hashes, so a test pins some of the hash's values.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(x: Any) -> Bits:
    """Returns the hash of each 64-bit integer of an array, as uint64, without collisions."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + _INCREMENT
        x = (x ^ x >> np.uint64(30)) * _FIRST
        x = (x ^ x >> np.uint64(27)) * _SECOND
        return np.asarray(x ^ x >> np.uint64(31))


def fold(*parts: Any) -> Bits:
    """Returns the common hash of several integers, which depends on their order, as uint64.

    (A sum of hashes would be equal for epoch 3 of record 7 and epoch 7 of record 3.)

    Args:
        *parts: Integers of at most 64 bits (negative numbers as two's complement), or arrays of
            integers, which are broadcast.
    """
    state = np.zeros((), np.uint64)
    for part in parts:
        if isinstance(part, int):
            part = np.uint64(part & _MASK)
        state = mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def name_key(name: str) -> int:
    """Returns the hash of a name, an integer of 64 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def column_keys(name: str, count: int) -> Bits:
    """Returns a key for each of the ``count`` numbers that a draw needs per record, uint64."""
    return fold(name_key(name), np.arange(count, dtype=np.uint64))


def uniform(records: Bits, keys: Bits) -> NDArray[np.float32]:
    """Returns uniform random numbers in [0, 1) with 24 random bits.

    Args:
        records: Hash of each record's seed, epoch and index (see `fold`), shape [rows].
        keys: Keys of the columns, shape [columns] (see `column_keys`).

    Returns:
        A float32 array of shape [rows, columns].
    """
    bits = mix(records[:, None] ^ keys)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
