"""Checksums of byte ranges, computed by the helper in C if it was built.

A checksum detects damage, such as flipped bits, zeros, and bytes of another place. It does not
detect forgery. Its values are part of the format of caches: see `dalijax.core.remote.disk_cache`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..random.hashing import mix
from .read_ranges import COUNT, LIBRARY, range_table, read_ranges

Data = NDArray[np.uint8]
Sums = NDArray[np.uint64]
_WORDS = 512  # of 64 bits, in a block
_BLOCK = 8 * _WORDS
_FACTOR = 0x9E3779B97F4A7C15
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MASK = (1 << 64) - 1
_KEYS = mix(np.arange(_WORDS))


class _Helper(Protocol):
    """Computes checksums; see `checksums` and `read_with_checksums`."""

    def compute(self, arrays: Sequence[Data]) -> Sums: ...

    def read(
        self, files: Indices, offsets: Indices, sizes: Indices, starts: Indices, buffer: Data
    ) -> tuple[Indices, Sums]: ...


class InPython:
    """Computes checksums by NumPy."""

    def compute(self, arrays: Sequence[Data]) -> Sums:
        """Computes the checksums of arrays."""
        sums = np.empty(len(arrays), np.uint64)
        for row, array in enumerate(arrays):
            padded = np.zeros(-(-array.size // _BLOCK) * _BLOCK, np.uint8)
            padded[: array.size] = array
            words = padded.view("<u8").reshape(-1, _WORDS)
            mixed = words ^ _KEYS
            blocks = (words + (mixed & _LOW) * (mixed >> _HALF)).sum(1, dtype=np.uint64)
            total = array.size
            for block in blocks.tolist():
                total = (total * _FACTOR + block) & _MASK
            sums[row] = total
        return sums

    def read(
        self, files: Indices, offsets: Indices, sizes: Indices, starts: Indices, buffer: Data
    ) -> tuple[Indices, Sums]:
        """Reads ranges of files, and computes their checksums."""
        counts = read_ranges(files, offsets, sizes, starts, buffer)
        ends = (starts + sizes).tolist()
        return counts, self.compute([buffer[a:b] for a, b in zip(starts.tolist(), ends)])


class InC:
    """Computes checksums by the helper in C, whose calls run without the GIL.

    Args:
        library: The path of the helper.

    Raises:
        OSError, AttributeError: If it can't be loaded, or is of another version.
    """

    def __init__(self, library: str):
        functions, pointer = ctypes.CDLL(library), ctypes.c_void_p
        self._compute = functions.dalijax_checksums_of
        self._compute.argtypes = ctypes.c_int64, pointer, pointer, pointer, pointer
        self._compute.restype = None
        self._read = functions.dalijax_read_with_checksums
        self._read.argtypes = pointer, ctypes.c_int64, pointer, pointer, pointer

    def compute(self, arrays: Sequence[Data]) -> Sums:
        """Computes the checksums of arrays."""
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        columns = np.array([addresses, [array.size for array in arrays]], np.int64)
        sums = np.empty(len(arrays), np.uint64)
        pointers = [array.ctypes.data for array in (*columns, _KEYS, sums)]
        self._compute(len(arrays), *pointers)
        return sums

    def read(
        self, files: Indices, offsets: Indices, sizes: Indices, starts: Indices, buffer: Data
    ) -> tuple[Indices, Sums]:
        """Reads ranges of files, and computes their checksums."""
        ranges = range_table(files, offsets, sizes, starts, buffer)
        sums = np.zeros(len(ranges), np.uint64)
        pointers = [array.ctypes.data for array in (buffer, _KEYS, sums)]
        # After a signal, Python calls the signal's handler before the next call.
        while self._read(ranges.ctypes.data, len(ranges), *pointers):
            pass
        return ranges[:, COUNT], sums


def _best_helper() -> _Helper:
    try:
        return InC(str(LIBRARY))
    except (OSError, AttributeError):  # there was no C compiler when the package was installed
        return InPython()


_helper = _best_helper()


def checksums(arrays: Sequence[Data]) -> Sums:
    """Computes the checksum of each of some arrays, uint8 [bytes], contiguous."""
    return _helper.compute(arrays)


def read_with_checksums(
    files: Indices, offsets: Indices, sizes: Indices, starts: Indices, buffer: Data
) -> tuple[Indices, Sums]:
    """Reads byte ranges of files into a buffer, and computes their checksums.

    Args:
        files: The file descriptor of each range.
        offsets: The offset of each range in its file.
        sizes: The size of each range in bytes.
        starts: The offset of each range in the buffer.
        buffer: The buffer, uint8 [bytes], contiguous.

    Returns:
        The number of bytes read of each range; see `read_ranges`. The checksum of each range that
        was read completely; undefined for others.

    Raises:
        ValueError: If a range is outside the buffer.
    """
    return _helper.read(files, offsets, sizes, starts, buffer)
