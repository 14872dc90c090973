"""`CacheFolder`: a folder that stores ranges of remote files; `Space`: its disk space.

An object of the cache is a local file with the stored ranges of a version of a remote file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..environment.extras import extra
from ..messages.log_once import warn_once
from ..messages.printable import printable
from .owned_files import owned_names
from .ranges import byte_count

_MARK = "dalijax-cache-"  # an empty file marks a cache; its name ends with the version
MARK = f"{_MARK}2"
_RESERVE = 1 << 30  # with cache_bytes=, 1 GiB of the disk, or 1/50 if that is less, stays free
_SHARE = 8  # all processes together may take 1/8 of the free space before it is measured again
_STEP = 1 << 20  # bytes that a process may always store before it measures the space again
_RECENT = 60.0  # seconds until the space is measured again
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OBJECT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
# Storage options, and headers, that do not change which object a URL names. A secret may differ in
# each run, and must not be recognizable in a name.
_INSIGNIFICANT = re.compile(
    r"timeout|retry_timeout|anon|requester_pays|(client|tenant)_id|"
    r".*(auth|cookie|credential|key|password|sas|secret|signature|token).*",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class CacheFolder:
    """A folder that stores ranges of remote files.

    Its folder ``objects`` has a sparse file for each version of each remote file, ``journals`` the
    checksums of the stored ranges, and ``users`` a file for each running process with the names of
    the objects that the process reads.

    Attributes:
        path: The absolute path.
        most_bytes: The largest disk space of all objects in bytes; None: the objects may fill the
            disk except for a tenth.
    """

    path: str
    most_bytes: int | None = None

    @property
    def objects(self) -> str:
        """Returns the path of the folder of the objects."""
        return os.path.join(self.path, "objects")

    @property
    def journals(self) -> str:
        """Returns the path of the folder of the journals."""
        return os.path.join(self.path, "journals")

    @property
    def users(self) -> str:
        """Returns the path of the folder with a file for each running process."""
        return os.path.join(self.path, "users")

    def object(self, name: str) -> str:
        """Returns the path of an object, given its name."""
        return os.path.join(self.objects, name)


def open_cache(folder: Any, most_bytes: int | float | str | None) -> CacheFolder | None:
    """Returns the cache in a folder, which is created if necessary; None if ``folder`` is None.

    If the disk is full, a warning is logged.

    Args:
        folder: The user's ``cache=``.
        most_bytes: The user's ``cache_bytes=``.

    Raises:
        ValueError: If the folder has other files, a cache of another version, links instead of
            folders, or another owner. Also if ``most_bytes`` is invalid, or there is no folder.
        OSError: If the folder can't be created.
        ImportError: If xxhash is not installed.
    """
    if folder is None:
        if most_bytes is not None:
            raise ValueError("cache_bytes= requires the folder of a cache: cache='/nvme/cache'")
        return None
    with extra("remote", "xxhash, which cache= needs,"):
        import xxhash  # noqa: F401
    text = os.fsdecode(folder)
    if "://" in text or not text:
        raise ValueError(f"cache must be a folder of a local disk, not {printable(text)!r}")
    most = None if most_bytes is None else byte_count(most_bytes, "cache_bytes")
    cache = CacheFolder(_absolute(text), most)
    try:
        _create(cache)
    except OSError as error:
        if error.errno not in _FULL:
            raise type(error)(
                error.errno,
                f"{error.strerror}. cache= requires a folder that can be written",
                cache.path,
            ) from None
        warn_once(f"the disk of {printable(cache.path)} is full, so that nothing is cached there")
    return cache


def _create(cache: CacheFolder) -> None:
    """Creates the folders of a cache, unless they exist; see `open_cache`."""
    os.makedirs(cache.path, 0o700, exist_ok=True)
    _check_owners(cache)
    names = os.listdir(cache.path)
    mark = os.path.join(cache.path, MARK)
    # Another process may have created the cache meanwhile.
    if MARK not in names and names and not os.path.exists(mark):
        shown = printable(cache.path)
        if any(name.startswith(_MARK) for name in names):
            raise ValueError(
                f"{shown} is a cache of another version of dalijax. Remove it, or pass another "
                "cache="
            )
        raise ValueError(
            f"{shown} has other files, so that nothing is cached there. Pass a new or empty folder "
            "as cache="
        )
    if MARK not in names:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    for folder in (cache.objects, cache.journals, cache.users):
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.makedirs(folder, exist_ok=True)


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _check_owners(cache: CacheFolder) -> None:
    """Checks that a cache has no links to other folders, and that no other user owns it.

    Root may use the folders of all users, as in a container with a mounted folder.

    Raises:
        ValueError: If there is a link, or another user owns a folder.
    """
    for folder in (cache.path, cache.objects, cache.journals, cache.users):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode):
                raise ValueError(
                    f"{printable(folder)} is not a folder, but a link or a file. Remove it, or "
                    "pass another cache="
                )
            if os.geteuid() and status.st_uid not in (os.geteuid(), 0):
                raise ValueError(
                    f"{printable(folder)} belongs to user {status.st_uid}, who could change your "
                    "data. Pass your own folder as cache="
                )


def existing_cache(folder: str) -> CacheFolder:
    """Returns the existing cache in a folder.

    Raises:
        ValueError: If the folder is not a cache of this version, or has links or another owner.
    """
    cache = CacheFolder(_absolute(folder))
    if not os.path.exists(os.path.join(cache.path, MARK)):
        raise ValueError(
            f"{printable(cache.path)} is not a cache. Pass the folder of a source's cache="
        )
    _check_owners(cache)
    return cache


def object_name(url: str, stamp: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns the name of the object of a version of a remote file.

    The name is "DIGEST-DIGEST": a digest of the URL, and a digest of the URL and the stamp, with 16
    hexadecimal digits each.

    Args:
        url: The URL.
        stamp: The stamp of the version.
        options: The user's storage options, and other settings that name the server of the URL.
    """
    parts = [url, repr(_significant(options))]
    return f"{_digest(parts)}-{_digest([*parts, repr(stamp)])}"


def _significant(options: Any) -> Any:
    """Returns the storage options that determine which object a URL names, without secrets."""
    if isinstance(options, Mapping):
        return sorted(
            (str(name), significant)
            for name, value in options.items()
            if not _INSIGNIFICANT.fullmatch(str(name))
            and (significant := _significant(value)) not in ([], "None")
        )
    if isinstance(options, (list, tuple)):
        return [_significant(value) for value in options]
    is_plain = options is None or isinstance(options, (bool, int, float, str, bytes))
    return repr(options) if is_plain else type(options).__qualname__


def is_object_name(name: str) -> bool:
    """Returns whether the name of a file has the form of an `object_name`."""
    return _OBJECT.fullmatch(name) is not None


def file_of(name: str) -> str:
    """Returns the part of an `object_name` that is equal for all versions of a remote file."""
    return name.partition("-")[0]


def version_of(name: str) -> int:
    """Returns the integer that journals store for an object: the second part of `object_name`."""
    return int(name.partition("-")[2], 16)


def _digest(parts: Sequence[str]) -> str:
    text = "\0".join(parts).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def space_of(folder: str) -> int:
    """Returns the disk space that the files of a folder take, in bytes.

    Raises:
        OSError: If the folder can't be listed.
    """
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


class Space:
    """Measures the disk space that a cache may still take.

    Other processes store ranges, too. So the space is measured again after a minute, or when all
    processes that use the folder together may have taken an eighth of the free space.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: CacheFolder):
        self._cache = cache
        self._room = 0  # the free bytes at the last measurement
        self._most = 0  # bytes that may be stored before the next measurement
        self._taken = 0  # bytes that were stored since the last measurement
        self._end = 0.0  # the time.monotonic() of the next measurement

    def room(self, size: int) -> int:
        """Returns the number of bytes that may be stored now; measures the space if necessary.

        Args:
            size: The number of bytes to store.

        Raises:
            OSError: If the disk can't be examined.
        """
        now = time.monotonic()
        if now >= self._end or self._taken + size > self._most:
            self._room, self._taken, self._end = self._measured(), 0, now + _RECENT
            num_users = max(1, len(owned_names(self._cache.users)))
            self._most = max(self._room // (_SHARE * num_users), _STEP)
        return self._room - self._taken

    def take(self, size: int) -> None:
        """Subtracts the size of stored ranges, in bytes, from the space."""
        self._taken += size

    def _measured(self) -> int:
        """Measures and returns the number of bytes that the cache may still take."""
        disk = os.statvfs(self._cache.path)
        total, free = disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail
        if self._cache.most_bytes is None:
            return max(0, free - total // 10)
        left = self._cache.most_bytes - space_of(self._cache.objects)
        return max(0, min(left, free - min(total // 50, _RESERVE)))


def is_full(error: OSError) -> bool:
    """Returns whether an error means that a disk or a quota has no more space."""
    return error.errno in _FULL
