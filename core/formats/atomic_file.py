"""Writes files atomically: readers see either the old content or all of the new content."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO

_PREFIX = ".dalijax-part-"


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file that replaces ``path`` if the block ends without an exception.

    While it is written, the new file has an unguessable name in the directory of ``path``. Its
    permissions follow the umask. Processes that have an existing file open or mapped keep seeing
    its old content. A symbolic link at ``path`` is replaced, not followed. Unfinished files that
    killed processes left in the directory are removed if the file system has locks.

    Args:
        path: The file to write.

    Yields:
        The new file, open for reading and writing bytes.

    Raises:
        OSError: If the file can't be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    _remove_leftovers(folder)
    file = _new_part(folder)
    try:
        # The file stays locked until it is renamed, so that no other process removes it.
        with file:
            yield file
            file.flush()
            os.replace(file.name, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def write_output(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that the user has named, and follows symbolic links.

    A regular file is replaced atomically. Pipes and devices such as /dev/stdout are written
    directly.

    Raises:
        OSError: If the file can't be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    # `atomic_file` would replace a symbolic link of the user.
    with atomic_file(os.path.realpath(path)) as file:
        file.write(content)


def _new_part(folder: str) -> BinaryIO:
    """Creates and locks an unfinished file; `tempfile` would not follow the umask."""
    while True:
        file = open(os.path.join(folder, _PREFIX + secrets.token_hex(8)), "x+b")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed the file before it was locked


def _remove_leftovers(folder: str) -> None:
    """Removes unfinished files of killed writers from a directory: files that are not locked."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
