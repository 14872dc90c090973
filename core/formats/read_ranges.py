"""Reads many byte ranges of local files at once.

The library of read_ranges.c reads the ranges if it was built; otherwise, Python code does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..native.library import LIBRARY
from ..order.shuffle import Indices

Data = NDArray[np.uint8]

# Flag for reads that don't wait; 0 if Python was built for an older C library.
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
COUNT = 4  # the column of `ranges` that receives the number of bytes read of each range


def read_in_c(library: str) -> Callable[[NDArray[np.int64], Data], None]:
    """Returns a function like `read_in_python` whose calls run without the GIL.

    Args:
        library: The path of the library of read_ranges.c.

    Raises:
        OSError, AttributeError: If the library can't be loaded, or is of another version.
    """
    function = ctypes.CDLL(library).dalijax_read_ranges
    function.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p

    def read(ranges: NDArray[np.int64], buffer: Data) -> None:
        # After a signal, Python calls the signal's handler before the next call.
        while function(ranges.ctypes.data, len(ranges), buffer.ctypes.data):
            pass

    return read


def read_in_python(ranges: NDArray[np.int64], buffer: Data) -> None:
    """Reads ranges into a buffer, in Python.

    Args:
        ranges: The ``struct range`` of read_ranges.c for each range, int64 [ranges, 5]. The column
            `COUNT` receives the number of bytes read, or a negative errno.
        buffer: The buffer, uint8 [bytes].
    """
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


def _best_reader() -> Callable[[NDArray[np.int64], Data], None]:
    """Returns a function that reads ranges in C if the library can be loaded, else in Python."""
    try:
        return read_in_c(str(LIBRARY))
    except (OSError, AttributeError):  # there was no C compiler when the package was installed
        return read_in_python


_read = _best_reader()


def read_ranges(
    files: Indices, offsets: Indices, sizes: Indices, starts: Indices, buffer: Data
) -> Indices:
    """Reads byte ranges of files into a buffer; returns how many bytes of each range were read.

    Ranges in the page cache are read while the disk fetches other ranges.

    Args:
        files: The file descriptor of each range.
        offsets: The offset of each range in its file.
        sizes: The size of each range in bytes.
        starts: The offset of each range in the buffer.
        buffer: The buffer, a contiguous one-dimensional array of uint8.

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
    _read(ranges, buffer)
    return ranges[:, COUNT]
