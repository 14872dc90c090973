"""Writes files atomically: readers see either the old content or all of the new content."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

_PREFIX = ".dalijax-part-"
_ABANDONED = 86_400.0  # seconds since the last write; only used on file systems without locks
_ATTEMPTS = 100


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], replace: bool = True) -> Iterator[BinaryIO]:
    """Opens a new file that replaces ``path`` if the block ends without an exception.

    While it is written, the new file has an unguessable name in the directory of ``path``. Its
    permissions follow the umask. Processes that have an existing file open or mapped keep seeing
    its old content. A symbolic link at ``path`` is replaced, not followed. Unfinished files that
    killed processes left in the directory are removed.

    Args:
        path: The file to write.
        replace: Whether to replace an existing file.

    Yields:
        The new file, open for reading and writing bytes.

    Raises:
        FileExistsError: If the file exists and ``replace`` is False.
        OSError: If the file can't be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    _remove_leftovers(folder)
    descriptor, part = _new_part(folder)
    try:
        # The file stays locked until it is renamed, so that no other process removes it.
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            target = os.path.join(folder, name)
            if replace or not _linked(part, target):
                os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
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


def _new_part(folder: str) -> tuple[int, str]:
    """Creates an unfinished file in a directory and locks it; returns its descriptor and path.

    The file is not locked if the file system has no locks.
    """
    for _ in range(_ATTEMPTS):
        part = os.path.join(folder, _PREFIX + secrets.token_hex(8))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is about to remove it
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(part)
            continue
        except OSError:  # a file system without locks
            pass
        if os.fstat(descriptor).st_nlink:
            return descriptor, part
        os.close(descriptor)  # another process removed it before it was locked
    raise FileExistsError(errno.EEXIST, "other processes remove each new file", folder)


def _linked(part: str, target: str) -> bool:
    """Renames ``part`` to ``target`` unless ``target`` exists; returns whether it was renamed.

    The file is not renamed if the file system has no hard links.

    Raises:
        FileExistsError: If the target exists.
    """
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        return False
    os.unlink(part)
    return True


def _remove_leftovers(folder: str) -> None:
    """Removes the unfinished files of killed writers from a directory."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _remove_abandoned(entry.path)


def _remove_abandoned(part: str) -> None:
    """Removes an unfinished file unless another process is writing it.

    Files are locked while they are written. On file systems without locks, a file is removed if it
    was not changed for a day.
    """
    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - os.fstat(descriptor).st_mtime < _ABANDONED:
                return
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.unlink(part)
    finally:
        os.close(descriptor)
