"""Reads byte ranges of local files, and of remote files by obstore or fsspec."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages.log_once import warn_once
from ..messages.printable import printable
from ..messages.redaction import redacted_url
from ..order.shuffle import Indices
from ..remote.cache_folder import object_name
from ..remote.disk_cache import DiskCache
from ..remote.fsspec_client import FsspecFile
from ..remote.fsspec_client import read as read_fsspec
from ..remote.locations import Location, server_settings
from ..remote.owned_files import OpenFile
from ..remote.range_cache import Lease, RangeCache
from ..remote.request_threads import request_threads
from ..remote.retries import RemoteError
from ..remote.storage import Storage
from ..remote.versions import Version, has_version, plain
from ..threads.per_process import PerProcess
from ..threads.workers import Result, call_each
from .buffers import new_buffer
from .read_ranges import read_ranges

_LOCAL_BUFFER = 2048  # holds the header and content of a small tar member, and the next header
_REMOTE_BUFFER = 1 << 22
_ALIGNMENT = 8  # bytes; ranges of local files begin at multiples of it in memory
_SHARE = 16  # a call reads from at most 1/16 of the files at once that `ByteFiles` keeps open
WAITING_THREADS = 16  # number of threads that wait for responses of servers


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL such as ``s3://bucket/key``."""
    return "://" in path


# Identifies the content of a file: [size, mtime, ctime, inode] of a local file, with times in
# nanoseconds; [size, [name, value], ...] of a remote file, e.g. [9, ["ETag", '"abc"']]. The stamp
# has only the size if the server reports no version.
Stamp = list[Any]


def local_stamp(status: os.stat_result) -> Stamp:
    """Returns the `Stamp` of a local file, given its status."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class LocalFile(OpenFile):
    """A local file that stays open until the object is freed.

    Args:
        path: The path.

    Attributes:
        path: The path.
        fd: The file descriptor.
        shown: The path, escaped for messages.
        size: The size in bytes when the file was opened.
        buffer_size: Number of bytes that a `BufferedReader` reads at once.
    """

    buffer_size = _LOCAL_BUFFER

    def __init__(self, path: str):
        # Without O_NONBLOCK, opening a FIFO in a cache would wait forever.
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        self.shown = printable(path)
        self.path = path
        self._stamp = local_stamp(os.fstat(self.fd))
        self.size: int = self._stamp[0]

    def stamp(self) -> Stamp:
        """Returns the `Stamp` of the file when it was opened."""
        return self._stamp

    def is_of(self, stamp: Stamp) -> bool:
        """Returns whether the file has the size and mtime of a stamp; ignores ctime and inode."""
        return self._stamp[:2] == stamp[:2]

    def read(self, at: int, count: int) -> bytes:
        """Returns ``count`` bytes from the offset ``at``; fewer at the end of the file."""
        return os.pread(self.fd, count, at)


class RemoteFile:
    """A remote file that fsspec reads.

    Args:
        url: The URL.
        storage: Access to remote files.
    """

    buffer_size = _REMOTE_BUFFER

    def __init__(self, url: str, storage: Storage):
        self.path, self.shown = url, printable(url)
        self.file = FsspecFile(url, storage.options)
        self.size = self.file.size

    def stamp(self) -> Stamp:
        """Returns the `Stamp` of the file when it was opened."""
        return self.file.stamp()

    def is_of(self, stamp: Stamp) -> bool:
        """Returns whether the file has the size and the version of a stamp.

        Returns True if the server reports no version.
        """
        own = plain(self.stamp())
        return len(own) == 1 or own == plain(stamp)

    def read(self, at: int, count: int) -> bytes:
        """Returns ``count`` bytes from the offset ``at``; fewer at the end of the file."""
        return bytes(self.request(at, count).get()[0]) if count and at < self.size else b""

    def request(self, at: int, count: int) -> Result[list[memoryview]]:
        """Requests ``count`` bytes from the offset ``at``, without waiting for the bytes.

        Returns:
            The future result, a list with one memoryview of the bytes.
        """
        end = min(at + count, self.size)
        return request_threads().call(read_fsspec, [self.file], [at], [end])


class ObjectFile:
    """One version of a remote file, which obstore reads.

    Args:
        url: The URL.
        storage: Access to remote files.
        location: The URL as obstore's bucket or host, and path.
        version: The version. Reads raise an error if the server has another version.
    """

    buffer_size = _REMOTE_BUFFER

    def __init__(self, url: str, storage: Storage, location: Location, version: Version):
        self.path = url
        self._storage, self._location, self._version = storage, location, version
        self.size = version.size

    @property
    def shown(self) -> str:
        """The URL, escaped for messages."""
        return printable(self.path)

    def stamp(self) -> Stamp:
        """Returns the `Stamp` of the version."""
        return self._version.stamp(time.time())

    def is_of(self, stamp: Stamp) -> bool:
        """Returns whether the file has the size and the version of a stamp."""
        return not Version.from_stamp(stamp).difference(self._version)

    def read(self, at: int, count: int) -> bytes:
        """Returns ``count`` bytes from the offset ``at``; fewer at the end of the file."""
        return bytes(self.request(at, count).get()[0]) if count and at < self.size else b""

    def request(self, at: int, count: int) -> Result[list[memoryview]]:
        """Requests ``count`` bytes from the offset ``at``, without waiting for the bytes.

        Returns:
            The future result, a list with one memoryview of the bytes.
        """
        end = min(at + count, self.size)
        return self._storage.request(self._location, self.path, at, end, self._version)


ByteFile = LocalFile | RemoteFile | ObjectFile


def open_files(paths: Sequence[str], storage: Storage) -> list[ByteFile]:
    """Opens local files and URLs; returns the open files in the order of ``paths``.

    Requests to servers are sent concurrently.

    Raises:
        OSError: If a file can't be opened.
    """
    locations = [storage.location(path) if is_remote(path) else None for path in paths]
    objects = [
        (location, path) for location, path in zip(locations, paths, strict=True) if location
    ]
    versions = iter(storage.versions(*zip(*objects)) if objects else ())
    fsspec_urls = [
        path for path, location in zip(paths, locations) if is_remote(path) and not location
    ]
    remote = iter(
        call_each(
            lambda url: RemoteFile(url, storage), fsspec_urls, WAITING_THREADS, "dalijax-open"
        )
        if fsspec_urls
        else ()
    )
    return [
        ObjectFile(path, storage, location, next(versions))
        if location is not None
        else next(remote)
        if is_remote(path)
        else LocalFile(path)
        for path, location in zip(paths, locations, strict=True)
    ]


def stamps_of(paths: Sequence[str], storage: Storage) -> list[Stamp]:
    """Returns the stamp of each file, which changes with the file's content.

    If a server reports no version of a file, its stamp changes only with its size. The stamp of a
    local file includes the ctime, because programs that preserve the mtime (``rsync``, ``cp -p``,
    ``touch -r``) can't set the ctime.

    Raises:
        OSError: If a file can't be found.
    """
    if any(map(is_remote, paths)):
        return [file.stamp() for file in open_files(paths, storage)]
    return [local_stamp(os.stat(path)) for path in paths]


def most_open() -> int:
    """Returns how many files may be kept open: half of the process's limit, at most 4,096."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(4096, limit // 2)


def within(offsets: Indices, sizes: Indices, limits: Indices) -> NDArray[np.bool_]:
    """Returns whether each range lies within its file, as bool [ranges].

    Does not overflow for huge numbers. All arguments are int64 [ranges].

    Args:
        offsets: Offset of each range in bytes.
        sizes: Size of each range in bytes.
        limits: Size of the file of each range in bytes.
    """
    inside: NDArray[np.bool_] = (offsets >= 0) & (sizes >= 0) & (sizes <= limits)
    inside &= offsets <= limits - sizes
    return inside


def _with_few_files(rows: Indices, files: Indices, most: int) -> list[Indices]:
    """Splits ranges into consecutive parts, each of which reads only a few files.

    Args:
        rows: Indices of the ranges; ranges of the same file should be adjacent.
        files: The file of each range in ``rows``.
        most: Largest number of files of a part.

    Returns:
        The indices of the ranges of each part.
    """
    if not len(rows):
        return []
    changes = np.cumsum(files[1:] != files[:-1]) // most
    return np.split(rows, np.flatnonzero(np.diff(changes, prepend=0)) + 1)


class ByteFiles:
    """Files whose byte ranges several threads may read at the same time.

    Methods take the index of a file in ``paths`` as its number. A file is opened at its first read
    in a process, and closed when this object is freed or too many files are open. A thread that is
    still reading a file keeps it open.

    Args:
        paths: Paths or URLs.
        sizes: File sizes in bytes.
        stamps: The stamp of each file, if known. A file that has changed since then is rejected.
        has_content: Returns whether a file, given its number, has the indexed content. It is called
            if only the ctime or the inode of a file differs from its stamp: its owner may have
            changed, or a program may have replaced the file and preserved its mtime. None: such a
            file is accepted.
        storage: Access to remote files.

    Attributes:
        paths: The paths or URLs.
        sizes: The sizes.
        limits: The sizes as an array, int64 [files].
    """

    def __init__(
        self,
        paths: Sequence[str],
        sizes: Sequence[int],
        stamps: Sequence[Stamp] = (),
        has_content: Callable[[int], bool] | None = None,
        storage: Storage | None = None,
    ):
        self.paths = tuple(paths)
        self.sizes = tuple(sizes)
        self._stamps = list(stamps) or [[size] for size in self.sizes]
        self._has_content = has_content
        self.limits = np.array(sizes, np.int64)
        self._are_remote = np.array([*map(is_remote, self.paths)], bool)
        self._storage = storage or Storage()
        self._locations = [
            self._storage.location(path) if remote else None
            for path, remote in zip(self.paths, self._are_remote.tolist(), strict=True)
        ]
        self._ranges = RangeCache(
            self.paths,
            self._locations,
            [
                Version.from_stamp(stamp if location else stamp[:1])
                for stamp, location in zip(self._stamps, self._locations, strict=True)
            ],
            self._storage.client,
        )
        self._cache = self._new_cache() if stamps and self._are_remote.any() else None
        # No lock: in a race, a file is opened twice. A forked child shares the local files, because
        # each read has an offset.
        self._open: dict[int, ByteFile] = {}
        # A file system of fsspec does not work in a forked child, and its destructor would close
        # connections of the parent.
        self._open_urls = PerProcess[dict[int, RemoteFile]](dict, keeps=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def _new_cache(self) -> PerProcess[DiskCache] | None:
        """Returns the local cache of remote files; None if the user did not pass ``cache=``."""
        if self._storage.cache is None:
            return None
        options = self._storage.options
        kinds = {location.kind: location for location in self._locations if location is not None}
        servers: dict[str, Any] = {
            kind: server_settings(location, options, os.environ) for kind, location in kinds.items()
        }
        names = [
            object_name(path, stamp, {**options, "server": servers[location.kind]})
            if location is not None and has_version(stamp)
            else None
            for path, stamp, location in zip(self.paths, self._stamps, self._locations, strict=True)
        ]
        unnamed = self._are_remote & [name is None for name in names]
        if unnamed.any():
            warn_once(
                f"{unnamed.sum():,} files that have neither an ETag nor an older date, or that "
                "fsspec reads, are not cached, such as "
                f"{printable(self.paths[int(np.argmax(unnamed))])}"
            )
        return PerProcess(functools.partial(DiskCache, self._storage.cache, names))

    def name(self, number: int) -> str:
        """Returns the path or URL of a file without secrets, given its number."""
        return redacted_url(self.paths[number])

    def version(self) -> str | None:
        """Returns a digest of the stamps of all files; None if a server reports no version."""
        if not all(map(has_version, self._stamps)):
            return None
        return hashlib.sha256(repr(self._stamps).encode()).hexdigest()

    def file(self, number: int) -> ByteFile:
        """Returns a file, given its number, and opens it if it is not open.

        Raises:
            OSError: If the file can't be opened, or has changed.
        """
        file = self._opened(number)
        if file is not None:
            return file
        path, location, stamp = self.paths[number], self._locations[number], self._stamps[number]
        if location is not None:  # each read checks the version, so that no request is needed here
            return ObjectFile(path, self._storage, location, Version.from_stamp(stamp))
        (file,) = open_files([path], self._storage)
        # A RemoteError is not attributed to a record.
        error = RemoteError if self._are_remote[number] else OSError
        if file.size != self.sizes[number]:
            raise error(
                f"{file.shown} has {file.size:,} bytes, but had {self.sizes[number]:,} when the "
                "source was opened. Reopen the source"
            )
        is_known = len(stamp) > 1
        if is_known and not (file.is_of(stamp) and self._is_same(number, file, stamp)):
            raise error(f"{file.shown} was changed after the source was opened. Reopen the source")
        self._keep_open(number, file)
        return file

    def _opened(self, number: int) -> ByteFile | None:
        """Returns a file if it is open already, else None.

        Args:
            number: The number of the file, or ``~number`` for the local cache's copy of a remote
                file.
        """
        return self._open.get(number) or self._open_urls.get().get(number)

    def _keep_open(self, number: int, file: ByteFile) -> None:
        """Keeps a file open; first closes other local files if too many are open."""
        if isinstance(file, RemoteFile):
            self._open_urls.get()[number] = file
            return
        # Other threads may drop or add files. An OrderedDict would crash CPython 3.13, since
        # closing a dropped file lets other threads change it.
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):
            while len(self._open) >= max(1, most_open()):
                del self._open[next(iter(self._open))]  # the file that was opened first
        self._open[number] = file

    def _opened_urls(self, numbers: Sequence[int]) -> list[FsspecFile]:
        """Opens files, given their numbers; returns the files that fsspec reads."""
        closed = [number for number in dict.fromkeys(numbers) if self._opened(number) is None]
        if len(closed) > 1:
            call_each(self.file, closed, WAITING_THREADS, "dalijax-open")
        files = [self.file(number) for number in numbers]
        return [file.file for file in files if isinstance(file, RemoteFile)]

    def num_bytes(self, files: Indices, offsets: Indices, sizes: Indices) -> int:
        """Returns how many bytes `announce` requests, plus the bytes that are in the local cache.

        Counts requests as if no range were in memory. `announce` describes the arguments.
        """
        rows, stored = self._announced(files, offsets, sizes)
        return int(sizes[stored].sum()) + self._ranges.num_bytes(
            files[rows], offsets[rows], sizes[rows]
        )

    def _announced(
        self, files: Indices, offsets: Indices, sizes: Indices
    ) -> tuple[NDArray[np.bool_], Indices]:
        """Returns which ranges to request, and which ranges are in the local cache.

        Returns:
            Whether to request each range, bool [ranges]; and the indices of the ranges in the local
            cache of remote files, int64 [cached ranges].
        """
        stored = self._stored(files, offsets, sizes)
        are_requested = self._are_remote[files] & within(offsets, sizes, self.limits[files])
        are_requested[stored] = False
        return are_requested, stored

    def _stored(self, files: Indices, offsets: Indices, sizes: Indices) -> Indices:
        """Returns the indices of the ranges of remote files that are in the local cache, int64."""
        if self._cache is None:
            return np.empty(0, np.int64)
        return self._cache.get().find(files, offsets, sizes)

    def announce(
        self,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        """Requests ranges of remote files that will be read soon.

        Args:
            files: Index of the file of each range.
            offsets: Offset of each range in bytes.
            sizes: Size of each range in bytes.
            turns: When each range is needed; ranges with smaller numbers are needed earlier.
            freed: Receives the number of bytes of each request that is freed.

        Returns:
            A list with a lease, which keeps the requested ranges in memory while it exists, and the
            turns of these ranges. The list is empty if no range has to be requested.
        """
        rows, _ = self._announced(files, offsets, sizes)
        if not rows.any():
            return []
        lease = self._ranges.lease(
            files[rows], offsets[rows], sizes[rows], self._opened_urls, turns[rows], freed
        )
        return [(lease, turns[rows])]

    def _is_same(self, number: int, file: ByteFile, stamp: Stamp) -> bool:
        """Returns whether a file has the indexed content.

        Args:
            number: The number of the file.
            file: The open file, whose size and mtime are those of its stamp.
            stamp: The stamp of the file when it was indexed.
        """
        now = file.stamp()
        if self._has_content is not None and has_version(now) and now != plain(stamp):
            if not self._has_content(number):
                return False
            self._stamps[number] = now
        return True

    def read(
        self,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        name_of: Callable[[int], str],
        stores: bool = True,
    ) -> list[NDArray[np.uint8]]:
        """Returns the bytes of ranges.

        Ranges of local files are read into one new buffer, aligned to 8 bytes. DALI may read the
        buffer long afterwards, so each call has its own buffer. Ranges of remote files are
        read-only views of received bytes at any address, because alignment would need a copy.

        Args:
            files: Index of the file of each range.
            offsets: Offset of each range in bytes.
            sizes: Size of each range in bytes.
            name_of: Returns the name of a range's record for errors, given the index of the range.
            stores: Whether to store ranges of remote files in the local cache, if there is one.

        Returns:
            The bytes of each range, as a uint8 array.

        Raises:
            OSError: If a range is incomplete or outside its file.
        """
        limits = self.limits[files]
        if not (inside := within(offsets, sizes, limits)).all():
            row = int(np.argmin(inside))
            raise OSError(
                f"the stored index is damaged: {name_of(row)} would be {sizes[row]:,} bytes at "
                f"byte {offsets[row]:,} of {printable(self.paths[files[row]])}, which has only "
                f"{limits[row]:,} bytes. Remove the index, or pass another cache_dir="
            )
        are_requested = self._are_remote[files]
        local = np.flatnonzero(~are_requested)
        cached = self._stored(files, offsets, sizes)
        are_requested[cached] = False
        leases: list[tuple[Indices, Lease]] = []

        def request(rows: Indices) -> None:
            if len(rows):
                lease = self._ranges.lease(
                    files[rows], offsets[rows], sizes[rows], self._opened_urls
                )
                leases.append((rows, lease))

        request(np.flatnonzero(are_requested))  # before local files are read
        local_sizes = np.where(are_requested, 0, sizes)
        padded = -(-local_sizes // _ALIGNMENT) * _ALIGNMENT
        starts = np.cumsum(padded) - padded
        buffer = new_buffer(int(padded.sum()))
        for rows in _with_few_files(local, files[local], max(1, most_open() // _SHARE)):
            counts = self._read_local(rows, files, offsets, sizes, starts, buffer)
            if (incomplete := counts != sizes[rows]).any():
                row, count = (int(values[incomplete][0]) for values in (rows, counts))
                path = self.paths[files[row]]
                where = f"at byte {offsets[row]:,}"
                if count < 0:
                    name = f"{name_of(row)}, {sizes[row]:,} bytes {where}"
                    raise OSError(-count, f"{os.strerror(-count)}, reading {name}", path)
                raise OSError(
                    f"{name_of(row)} is cut off: only {count:,} of its {sizes[row]:,} bytes "
                    f"can be read {where} of {printable(path)}"
                )
        if self._cache is not None and len(cached):
            cache = self._cache.get()
            request(self._read_cached(cache, cached, files, offsets, sizes, starts, buffer))
        ends = starts + local_sizes
        arrays = [buffer[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
        for rows, lease in leases:
            received = lease.arrays()
            for row, array in zip(rows.tolist(), received, strict=True):
                arrays[row] = array
            if stores and self._cache is not None and (cache := self._cache.get()).stores:
                cache.store(files[rows], offsets[rows], received)
        return arrays

    def _read_local(
        self,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        starts: Indices,
        buffer: NDArray[np.uint8],
    ) -> Indices:
        """Reads ranges of local files into a buffer; returns how many bytes of each were read.

        Args:
            rows: Indices of the ranges to read. All other arrays have an element for each range of
                a call of `read`.
            files: The file of each range.
            offsets: The offset of each range in its file.
            sizes: The size of each range in bytes.
            starts: The offset of each range in the buffer.
            buffer: The buffer, uint8 [bytes].

        Returns:
            For each range in ``rows``, the number of bytes read, or a negative errno; see
            `read_ranges`.
        """
        numbers = files[rows].tolist()
        opened = {number: self.file(number) for number in dict.fromkeys(numbers)}  # keeps them open
        fds = {number: file.fd for number, file in opened.items() if isinstance(file, LocalFile)}
        row_fds = np.array([fds[number] for number in numbers])
        return read_ranges(row_fds, offsets[rows], sizes[rows], starts[rows], buffer)

    def _read_cached(
        self,
        cache: DiskCache,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        starts: Indices,
        buffer: NDArray[np.uint8],
    ) -> Indices:
        """Reads ranges of remote files from the local cache into a buffer; see `_read_local`.

        Returns:
            The indices of the ranges that are damaged in the cache, or missing.
        """
        damaged = []
        for part in _with_few_files(rows, files[rows], max(1, most_open() // _SHARE)):
            numbers = files[part].tolist()
            opened = {number: self._copy(cache, number) for number in dict.fromkeys(numbers)}
            fds = {number: -1 if file is None else file.fd for number, file in opened.items()}
            row_fds = np.array([fds[number] for number in numbers])
            counts = read_ranges(row_fds, offsets[part], sizes[part], starts[part], buffer)
            ends = starts[part] + sizes[part]
            arrays = [buffer[a:b] for a, b in zip(starts[part].tolist(), ends.tolist())]
            are_right = cache.are_right(files[part], offsets[part], arrays, counts)
            damaged.append(part[~are_right])
            for number in set(files[part[~are_right]].tolist()):
                self._open.pop(~number, None)  # another process may have replaced the copy
        return np.concatenate(damaged)

    def _copy(self, cache: DiskCache, number: int) -> LocalFile | None:
        """Returns the local cache's copy of a remote file, open; None if it can't be opened."""
        file = self._opened(~number)
        if file is None:
            with contextlib.suppress(OSError):
                file = LocalFile(cache.path(number))
                self._keep_open(~number, file)
        return file if isinstance(file, LocalFile) else None
