"""Lists the objects of a cache, and removes unneeded objects."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterable

import numpy as np

from .cache_folder import CacheFolder, file_of, is_object_name, version_of
from .cache_users import names_in_use
from .journals import compact


@dataclasses.dataclass(frozen=True)
class CachedObject:
    """A version of a remote file in a cache.

    Attributes:
        name: The name of the object; see `object_name`.
        num_bytes: The disk space of the object in bytes.
        last_used: When a process last opened or stored the object, in seconds since 1970.
        is_used: Whether a running process uses the object.
        is_old: Whether another version of the same file was used later.
    """

    name: str
    num_bytes: int
    last_used: float
    is_used: bool
    is_old: bool


def cached_objects(folder: CacheFolder) -> list[CachedObject]:
    """Returns the objects of a cache, sorted by name.

    Raises:
        OSError: If the objects can't be listed.
    """
    statuses: dict[str, os.stat_result] = {}
    with os.scandir(folder.objects) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # removed meanwhile
                if is_object_name(entry.name):  # files of the user are left alone
                    statuses[entry.name] = entry.stat(follow_symlinks=False)
    times: dict[str, float] = collections.defaultdict(float)
    for name, status in statuses.items():
        times[file_of(name)] = max(times[file_of(name)], status.st_mtime)
    used = names_in_use(folder)
    return [
        CachedObject(
            name,
            512 * status.st_blocks,
            status.st_mtime,
            name in used,
            status.st_mtime < times[file_of(name)],
        )
        for name, status in sorted(statuses.items())
    ]


def remove_objects(folder: CacheFolder, objects: Iterable[CachedObject]) -> None:
    """Removes objects of a cache, and their entries in the journals of ended processes.

    Raises:
        OSError: If an object or a journal can't be removed, or a journal can't be written.
    """
    for item in objects:
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            os.unlink(folder.object(item.name))
    left = [version_of(item.name) for item in cached_objects(folder)]
    compact(folder.journals, np.array(left, np.uint64))
