"""Reads many byte ranges of local files at once, and computes checksums.

The library of read_ranges.c does both, if it was built; otherwise, Python and NumPy do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from .checksums import KEYS, checksums_in_python

Data = NDArray[np.uint8]
Sums = NDArray[np.uint64]

LIBRARY = pathlib.Path(__file__).with_name("_read_ranges.abi3.so")  # in pyproject.toml, too

# Flag for reads that don't wait; 0 if Python was built for an older C library.
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
COUNT = 4  # the column of `ranges` that receives the number of bytes read of each range


class _Helper(Protocol):
    """An implementation that reads ranges of files and computes checksums."""

    def read(self, ranges: NDArray[np.int64], buffer: Data, sums: Sums | None) -> None:
        """Reads ranges into a buffer, and computes their checksums if ``sums`` is given.

        Args:
            ranges: The ``struct range`` of read_ranges.c for each range, int64 [ranges, 5]. The
                column `COUNT` receives the number of bytes read, or a negative errno.
            buffer: The buffer.
            sums: Receives the checksum of each range that was read completely.
        """

    def checksums(self, arrays: Sequence[Data]) -> Sums:
        """Returns the checksum of each array, as uint64 [arrays]."""
        ...


class InPython:
    """Reads ranges and computes checksums in Python."""

    def read(self, ranges: NDArray[np.int64], buffer: Data, sums: Sums | None) -> None:
        """Reads ranges into a buffer, and computes their checksums; see `_Helper`."""
        _read_in_python(ranges, buffer)
        if sums is not None:
            sums[:] = self.checksums(
                [buffer[start : start + size] for _, _, size, start, _ in ranges.tolist()]
            )

    def checksums(self, arrays: Sequence[Data]) -> Sums:
        """Returns the checksum of each array, as uint64 [arrays]."""
        return checksums_in_python(arrays)


class InC:
    """Reads ranges and computes checksums by the helper in C, whose calls run without the GIL.

    Args:
        library: The path of the helper.

    Raises:
        OSError, AttributeError: If the helper can't be loaded, or is of another version.
    """

    def __init__(self, library: str):
        functions, pointer = ctypes.CDLL(library), ctypes.c_void_p
        self._read = functions.dalijax_read
        self._read.argtypes = pointer, ctypes.c_int64, pointer, pointer, pointer
        self._sum = functions.dalijax_sum
        self._sum.argtypes = ctypes.c_int64, pointer, pointer, pointer, pointer
        self._sum.restype = None

    def read(self, ranges: NDArray[np.int64], buffer: Data, sums: Sums | None) -> None:
        """Reads ranges into a buffer, and computes their checksums; see `_Helper`."""
        to = None if sums is None else sums.ctypes.data
        # After a signal, Python calls the signal's handler before the next call.
        while self._read(ranges.ctypes.data, len(ranges), buffer.ctypes.data, _KEYS, to):
            pass

    def checksums(self, arrays: Sequence[Data]) -> Sums:
        """Returns the checksum of each array, as uint64 [arrays]."""
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        columns = np.array([addresses, [array.size for array in arrays]], np.int64)
        sums = np.empty(len(arrays), np.uint64)
        self._sum(len(arrays), *(array.ctypes.data for array in columns), _KEYS, sums.ctypes.data)
        return sums


_KEYS = KEYS.ctypes.data  # the address of the keys


def _read_in_python(ranges: NDArray[np.int64], buffer: Data) -> None:
    """Reads ranges into a buffer without the helper in C; see `_Helper.read` for the arguments."""
    view = memoryview(buffer)
    rows = [(fd, at, view[start : start + size]) for fd, at, size, start, _ in ranges.tolist()]
    # One call for each range in the page cache: each call releases the GIL, and reacquiring it
    # takes longer than copying an image.
    counts, flags = [0] * len(rows), _NOWAIT
    for k, (fd, at, part) in enumerate(rows if flags else ()):
        try:
            counts[k] = os.preadv(fd, [part], at, flags)
        except BlockingIOError:  # the read would wait for the disk
            pass
        except (OSError, NotImplementedError):  # not supported by the file system or kernel
            break
    missing = [k for k, (_, _, part) in enumerate(rows) if counts[k] < len(part)]
    # Lets the disk fetch all missing ranges at once, instead of waiting for each in turn.
    for k in missing:
        fd, at, part = rows[k]
        with contextlib.suppress(OSError):  # reading reports it
            os.posix_fadvise(fd, at + counts[k], len(part) - counts[k], os.POSIX_FADV_WILLNEED)
    for k in missing:
        fd, at, part = rows[k]
        try:
            while counts[k] < len(part):
                count = os.preadv(fd, [part[counts[k] :]], at + counts[k])
                if not count:
                    break
                counts[k] += count
        except OSError as error:
            counts[k] = -(error.errno or errno.EIO)
    ranges[:, COUNT] = counts


def _best_helper() -> _Helper:
    """Returns the helper in C if it can be loaded, else the helper in Python."""
    try:
        return InC(str(LIBRARY))
    except (OSError, AttributeError):  # there was no C compiler when the package was installed
        return InPython()


_helper = _best_helper()


def checksums(arrays: Sequence[Data]) -> Sums:
    """Returns the checksum of each array, as uint64 [arrays].

    Args:
        arrays: Contiguous one-dimensional arrays of uint8.
    """
    return _helper.checksums(arrays)


def read_ranges(
    files: Indices,
    offsets: Indices,
    sizes: Indices,
    starts: Indices,
    buffer: Data,
    sums: Sums | None = None,
) -> Indices:
    """Reads byte ranges of files into a buffer; returns how many bytes of each range were read.

    Ranges in the page cache are read while the disk fetches other ranges.

    Args:
        files: The file descriptor of each range.
        offsets: The offset of each range in its file.
        sizes: The size of each range in bytes.
        starts: The offset of each range in the buffer.
        buffer: The buffer, a contiguous one-dimensional array of uint8.
        sums: A contiguous array, uint64 [ranges], which receives the checksum of each range that is
            read completely. Elements of other ranges are undefined. None: no checksums are
            computed.

    Returns:
        The number of bytes read of each range, int64 [ranges]. It is less than the size of the
        range at the end of the file, and a negative errno if reading failed.

    Raises:
        ValueError: If a range is outside the buffer.
    """
    inside = (starts >= 0) & (sizes >= 0) & (sizes <= buffer.size) & (starts <= buffer.size - sizes)
    if not inside.all():
        raise ValueError(f"ranges outside the buffer of {buffer.size} bytes")
    ranges = np.zeros((len(starts), COUNT + 1), np.int64)
    for column, values in enumerate((files, offsets, sizes, starts)):
        ranges[:, column] = values
    _helper.read(ranges, buffer, sums)
    return ranges[:, COUNT]
