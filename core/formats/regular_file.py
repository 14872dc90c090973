"""`regular_file`: opens a local file, and rejects FIFOs, sockets and devices."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def regular_file(path: Any) -> Iterator[tuple[int, int]]:
    """Returns a context of an open file: its descriptor, and its size in bytes.

    Args:
        path: The bytes of the path, up to the first zero, with the buffer protocol.

    Raises:
        OSError: If the file can't be opened.
        ValueError: If it isn't a regular file; opening a FIFO could wait forever.
    """
    file = os.open(bytes(path).partition(b"\0")[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it isn't a regular file")
        yield file, status.st_size
    finally:
        os.close(file)
