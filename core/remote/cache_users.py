"""Registers the objects of a cache that running processes read, so that they are not removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from .cache_folder import CacheFolder
from .owned_files import OwnedFile, locked, new_file, owned_names


def register(folder: CacheFolder, names: Sequence[str]) -> OwnedFile | None:
    """Registers objects as used by this process until the returned file is freed.

    Sets the mtimes of the objects to the present time, as the time of their last use.

    Args:
        folder: The cache.
        names: Names of the objects.

    Returns:
        A locked file with the names; None if the cache can't be written to.
    """
    try:
        _remove_ended(folder)
        file = new_file(folder.users)
        file.append("".join(f"{name}\n" for name in names).encode())
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):  # no range was stored, or another user owns the object
            os.utime(folder.object(name))
    return file


def names_in_use(folder: CacheFolder) -> set[str]:
    """Returns the names of the objects that running processes use.

    Raises:
        OSError: If the folder of the users can't be listed.
    """
    _remove_ended(folder)
    names: set[str] = set()
    for user in owned_names(folder.users):
        with contextlib.suppress(OSError), open(os.path.join(folder.users, user), "rb") as file:
            names.update(map(os.fsdecode, file.read().split()))
    return names


def _remove_ended(folder: CacheFolder) -> None:
    """Removes the files in which processes that have ended registered their objects."""
    for user in owned_names(folder.users):
        path = os.path.join(folder.users, user)
        with contextlib.suppress(OSError):
            file = locked(path)  # locked until it is removed
            if file is not None:
                os.unlink(path)
