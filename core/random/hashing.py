"""Hashes of integers, and uniform random numbers of records: of (seed, epoch, record, name).

Only integer operations determine the bits, so that results are equal on all CPUs and NumPy
versions. The hash is the step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014). Its values are part of the state format: a test pins some of them.
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
    """Hashes each 64-bit integer of an array, bijectively."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + _INCREMENT
        x = (x ^ x >> np.uint64(30)) * _FIRST
        x = (x ^ x >> np.uint64(27)) * _SECOND
        return np.asarray(x ^ x >> np.uint64(31))


def fold(*parts: Any) -> Bits:
    """Hashes several integers together; the order matters, and arrays are broadcast.

    (A sum of hashes would make epoch 3 of record 7 equal to epoch 7 of record 3.)

    Args:
        *parts: Integers of at most 64 bits (negative numbers as two's complement), or arrays.
    """
    state = np.zeros((), np.uint64)
    for part in parts:
        if isinstance(part, int):
            part = np.uint64(part & _MASK)
        state = mix(state ^ np.asarray(part).astype(np.uint64))
    return state


def name_key(name: str) -> int:
    """Hashes a name to a 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def column_keys(name: str, count: int) -> Bits:
    """Returns the keys of the columns of a draw, shape [count]."""
    return fold(name_key(name), np.arange(count, dtype=np.uint64))


def uniform(records: Bits, keys: Bits) -> NDArray[np.float32]:
    """Returns uniform random numbers in [0, 1) with 24 random bits.

    Args:
        records: Hash of each record's seed, epoch and index (see `fold`), shape [rows].
        keys: Keys of the columns, shape [columns].

    Returns:
        A float32 array of shape [rows, columns].
    """
    bits = mix(records[:, None] ^ keys)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
