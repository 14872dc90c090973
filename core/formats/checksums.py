"""Computes checksums of bytes by NumPy. The helper in C computes equal checksums.

A checksum detects damage, such as flipped bits, zeros, and bytes from another place. It does not
detect forgery. Caches on disk contain checksums, so that their definition is part of the format of
`dalijax.core.remote.disk_cache`.

As in XXH3, a block of 512 words of 64 bits has two sums: of the words, and of the products of the
two halves of each word after an XOR with a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..random.hashing import mix

_WORDS = 512  # words of 64 bits in a block
_BLOCK = 8 * _WORDS
_FACTOR = 0x9E3779B97F4A7C15
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MASK = (1 << 64) - 1
KEYS = mix(np.arange(_WORDS))


def checksums_in_python(arrays: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    """Returns the checksum of each array, as uint64 [arrays].

    Args:
        arrays: One-dimensional arrays of uint8.
    """
    sums = np.empty(len(arrays), np.uint64)
    for row, array in enumerate(arrays):
        padded = np.zeros(-(-array.size // _BLOCK) * _BLOCK, np.uint8)
        padded[: array.size] = array
        words = padded.view("<u8").reshape(-1, _WORDS)
        mixed = words ^ KEYS
        products = ((mixed & _LOW) * (mixed >> _HALF)).sum(1, dtype=np.uint64)
        blocks = mix(products ^ mix(words.sum(1, dtype=np.uint64)))
        total = array.size
        for block in blocks.tolist():
            total = (total * _FACTOR + block) & _MASK
        sums[row] = total
    return sums
