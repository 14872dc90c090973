"""Files to which one process appends while other processes read them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable

_ATTEMPTS = 100
_NAME = re.compile(r"[0-9a-f]{16}")  # of the files that `new_file` creates


class OpenFile:
    """An open file, which is closed when this object is freed.

    Args:
        fd: The file descriptor.
    """

    fd = -1

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # a subclass may have failed to open it
            close(self.fd)  # `close` is a default argument, because `os` may be gone at exit


class OwnedFile(OpenFile):
    """An open file, which is locked until this object is freed."""

    def append(self, data: bytes) -> None:
        """Appends data by a single call of ``write``.

        Raises:
            OSError: If the data, or a part of the data, can't be written.
        """
        if os.write(self.fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def locked(path: str, create: bool = False) -> OwnedFile | None:
    """Opens, locks and returns a file; returns None if another process has locked or removed it.

    Args:
        path: The path.
        create: Whether to create the file. If the file system has no locks, the new file is
            returned without a lock.

    Raises:
        OSError: If the file can't be opened, or an existing file can't be locked.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    file = OwnedFile(os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o666))
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        if not create:
            raise
    return file if os.fstat(file.fd).st_nlink else None


def owned_names(folder: str) -> list[str]:
    """Returns the names of the files in a folder that `new_file` may have created.

    Links and special files are omitted: opening a FIFO may wait forever.

    Raises:
        OSError: If the folder can't be listed.
    """
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def new_file(folder: str) -> OwnedFile:
    """Creates a file with a random name, locks it, and returns it.

    Raises:
        OSError: If the file can't be created.
    """
    for _ in range(_ATTEMPTS):  # another process may lock a file first, to see whether it is used
        if (file := locked(os.path.join(folder, secrets.token_hex(8)), create=True)) is not None:
            return file
    raise FileExistsError(errno.EEXIST, "other processes lock each new file", folder)
