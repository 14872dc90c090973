"""Ranges of bytes of files, local ones or those that fsspec knows."""

from __future__ import annotations

import email.utils
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..printable import printable
from .http_ranges import http_options

_ALIGNMENT = 8  # bytes, of each range in its buffer: numbers of any width may lie there
_LOCAL_WINDOW = 2048  # the header and the content of a small tar member, and the header behind
_REMOTE_WINDOW = 1 << 22
# Names of versions of a file in the info of fsspec's file systems, of HTTP's headers e.g.
_VERSION = re.compile(
    r"e-?tag|digest|content-md5|md5-?hash|md5|crc32c|sha\d*|checksum|(xet-)?hash|blob-id|generation|"
    r"version-?id|last-?modified|m-?time|modified|modify|modification-?time|updated|created|ino",
    re.IGNORECASE,
)
_RECENT = 5.0  # seconds; Last-Modified has whole ones
WAITING_THREADS = 16  # of a source whose reads wait for a network
# For reads that do not wait; 0 where Python was built for an older C library.
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def is_remote(path: str) -> bool:
    """Whether a path is a URL, as ``s3://bucket/key``."""
    return "://" in path


# Size, mtime, ctime and inode of a local file; size and versions of a remote one.
Stamp = list[Any]


def stamp_of(path: str) -> Stamp | None:
    """A stamp that changes with the content of a file; None if the server has no versions.

    The time of the last status change is part of it: programs that restore a file's mtime
    (``rsync``, ``cp -p``, ``touch -r``) can't set it.

    Raises:
        OSError: If the file can't be found.
    """
    if is_remote(path):
        return RemoteFile(path).stamp()
    return _local_stamp(os.stat(path))


def _local_stamp(status: os.stat_result) -> Stamp:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and its path there.

    Raises:
        ImportError: If fsspec, or what it needs for the protocol, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url} is read by fsspec: pip install fsspec") from error
    is_http = url.startswith(("http://", "https://"))
    system, path = url_to_fs(url, **(http_options() if is_http else {}))
    return system, str(path)


def fetch(system: Any, paths: Sequence[bytes]) -> list[bytes]:
    """The contents of some files of a file system, read at the same time where it can."""
    names = list(map(os.fsdecode, paths))
    nothing = [None] * len(names)
    contents: list[bytes] = system.cat_ranges(names, nothing, nothing, on_error="raise")
    return contents


def open_stream(path: str) -> BinaryIO:
    """A local file, or one of a URL, to be read from its beginning on."""
    if not is_remote(path):
        return open(path, "rb")
    system, path = filesystem(path)
    stream: BinaryIO = system.open(path, "rb")
    return stream


class LocalFile:
    """A file, open until it is dropped.

    Args:
        path: The path.

    Attributes:
        shown: The path in messages.
    """

    window = _LOCAL_WINDOW

    def __init__(self, path: str):
        self._fd = -1
        self.shown = printable(path)
        self._knows_cached = bool(_NOWAIT)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._stamp = _local_stamp(os.fstat(self._fd))
        self.size: int = self._stamp[0]

    def is_of(self, stamp: Stamp) -> bool:
        """Tells if the file has the size and the time of a stamp, whatever its inode or owner."""
        return self._stamp[:2] == stamp[:2]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._fd >= 0:  # `os` may be gone when Python ends
            close(self._fd)

    def read(self, at: int, count: int) -> bytes:
        """Bytes from an offset on; fewer at the end of the file."""
        return os.pread(self._fd, count, at)

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> list[int]:
        """Fills buffers from offsets; the numbers of bytes that there are."""
        # One call for each range that the page cache has: each call lets another thread take
        # Python's lock, and to get it back takes longer than to copy a picture.
        counts = [self._read_cached(at, buffer) for at, buffer in ranges]
        missing = [k for k, (_, buffer) in enumerate(ranges) if counts[k] < len(buffer)]
        # The disk may fetch them all at once, where a read for each would wait for one by one.
        for k in missing:
            at, buffer = ranges[k]
            rest = len(buffer) - counts[k]
            os.posix_fadvise(self._fd, at + counts[k], rest, os.POSIX_FADV_WILLNEED)
        for k in missing:
            at, buffer = ranges[k]
            while counts[k] < len(buffer):
                count = os.preadv(self._fd, [buffer[counts[k] :]], at + counts[k])
                if not count:
                    break
                counts[k] += count
        return counts

    def _read_cached(self, at: int, buffer: memoryview) -> int:
        """Copies what the page cache has of a range, or its beginning; the number of bytes."""
        if self._knows_cached:
            try:
                return os.preadv(self._fd, [buffer], at, _NOWAIT)
            except BlockingIOError:  # it would wait for the disk
                pass
            except (OSError, NotImplementedError):  # this file system, or kernel, can't say so
                self._knows_cached = False
        return 0


class RemoteFile:
    """A file of one of fsspec's file systems.

    Args:
        url: Its URL.
    """

    window = _REMOTE_WINDOW

    def __init__(self, url: str):
        self.path, self.shown = url, printable(url)
        self._system, self._path = filesystem(url)
        self._info = self._system.info(self._path)
        size = self._info.get("size")
        if size is None:
            raise OSError(f"{url}: the server does not say its size, so no ranges can be read")
        self.size = int(size)

    def stamp(self) -> Stamp | None:
        """Size and version of the file; None if its server has no versions."""
        versions = {
            key: str(value)
            for key, value in self._info.items()
            if value is not None and _VERSION.fullmatch(key.replace("_", "-"))
        }
        if not versions or (set(versions) == {"Last-Modified"} and _is_recent(*versions.values())):
            return None
        return [self.size, *map(list, sorted(versions.items()))]

    def is_of(self, stamp: Stamp) -> bool:
        """Tells if the file has the size and the version of a stamp."""
        return self.stamp() in (stamp, None)

    def read(self, at: int, count: int) -> bytes:
        """Bytes from an offset on; fewer at the end of the file."""
        end = min(at + count, self.size)
        return self._pieces([at], [end])[0] if at < end else b""

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> list[int]:
        """Fills buffers from offsets; returns the number of bytes of each."""
        starts = [at for at, _ in ranges]
        pieces = self._pieces(starts, [at + len(buffer) for at, buffer in ranges])
        for (_, buffer), piece in zip(ranges, pieces, strict=True):
            buffer[:] = piece
        return [len(buffer) for _, buffer in ranges]

    def _pieces(self, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """The bytes of ranges, read at the same time if the file system can.

        Raises:
            OSError: If a range can't be read, or has another length than it should have.
        """
        # Some file systems read to the end of the file if a range is empty.
        wanted = [k for k, (start, end) in enumerate(zip(starts, ends)) if start < end]
        pieces = [b""] * len(starts)
        try:
            found = self._system.cat_ranges(
                [self._path] * len(wanted),
                [starts[k] for k in wanted],
                [ends[k] for k in wanted],
                on_error="raise",
            )
        except OSError:
            raise
        except Exception as error:  # of the file system's own kind, as aiohttp.ClientError
            raise OSError(f"{self.shown} can't be read: {error!r}") from error
        for k, piece in zip(wanted, found, strict=True):
            if len(piece) != ends[k] - starts[k]:
                raise OSError(
                    f"{self.shown}: bytes {starts[k]:,} to {ends[k]:,} were asked for, and "
                    f"{len(piece):,} bytes came: the file was changed, or its server ignores "
                    "ranges. Open the source anew, or download the file"
                )
            pieces[k] = bytes(piece)
        return pieces


def _is_recent(date: str) -> bool:
    """Tells if a file may change again within the second that an HTTP date names."""
    try:
        return abs(time.time() - email.utils.parsedate_to_datetime(date).timestamp()) < _RECENT
    except ValueError:
        return True


ByteFile = LocalFile | RemoteFile


def open_file(path: str) -> ByteFile:
    """Opens a local file, or one of a URL."""
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


class Window:
    """Reads of a file that are mostly ahead of one another: a few bytes at a time.

    Attributes:
        file: The file.
    """

    def __init__(self, file: ByteFile):
        self.file = file
        self._data = b""
        self._start = 0

    def __call__(self, at: int, count: int) -> bytes:
        """Bytes from an offset on; fewer at the end of the file."""
        begin = at - self._start
        if begin < 0 or begin + count > len(self._data):
            self._data = self.file.read(at, max(count, self.file.window))
            self._start, begin = at, 0
        return self._data[begin : begin + count]


def most_open() -> int:
    """The files that a source keeps open: half of what the process may open, and at most 4,096."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(4096, limit // 2)


def within(offsets: Indices, sizes: Indices, limits: Indices) -> NDArray[np.bool_]:
    """Tells which ranges lie within files of ``limits`` bytes, for any 64-bit numbers."""
    inside: NDArray[np.bool_] = (offsets >= 0) & (sizes >= 0) & (sizes <= limits)
    inside &= offsets <= limits - sizes
    return inside


class ByteFiles:
    """Files whose ranges are read by number, from several threads at once.

    A file is opened when it is first read in a process, and closed when the files are dropped, or
    too many are open. A thread that still reads it keeps it open.

    Args:
        paths: Their paths or URLs.
        sizes: Their sizes in bytes.
        stamps: Their stamps, if they are known. Files that changed since then are not read.
    """

    def __init__(
        self, paths: Sequence[str], sizes: Sequence[int], stamps: Sequence[Stamp | None] = ()
    ):
        self.paths = tuple(paths)
        self.sizes = tuple(sizes)
        self._stamps = tuple(stamps) or (None,) * len(self.paths)
        self._limits = np.array(sizes, np.int64)
        # Without a lock, which a fork could leave taken: whoever is late opens a file twice.
        self._open: dict[int, ByteFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def file(self, number: int) -> ByteFile:
        """One of the files.

        Raises:
            OSError: If it can't be opened, or was changed.
        """
        file = self._open.get(number)
        if file is not None:
            return file
        file = open_file(self.paths[number])
        if file.size != self.sizes[number]:
            raise OSError(
                f"{file.shown} has {file.size:,} bytes, and had {self.sizes[number]:,} when the "
                "source was opened: open it anew"
            )
        stamp = self._stamps[number]
        if stamp is not None and not file.is_of(stamp):
            raise OSError(f"{file.shown} was changed after the source was opened: open it anew")
        if len(self._open) >= max(1, most_open()):
            self._open = {}
        self._open[number] = file
        return file

    def read(
        self, files: Indices, offsets: Indices, sizes: Indices, name_of: Callable[[int], str]
    ) -> list[NDArray[np.uint8]]:
        """Ranges, as slices of one fresh buffer, each aligned to 8 bytes.

        Args:
            files: The file of each range.
            offsets: Where it begins.
            sizes: Its bytes.
            name_of: What to call the record of a range, by its place, in errors.

        Raises:
            OSError: If a range is not there whole.
        """
        limits = self._limits[files]
        if not (inside := within(offsets, sizes, limits)).all():
            row = int(np.argmin(inside))
            raise OSError(
                f"{name_of(row)} would be {sizes[row]:,} bytes at byte {offsets[row]:,} of "
                f"{printable(self.paths[files[row]])}, which has {limits[row]:,}: the stored index "
                "is damaged; remove it, or pass another cache_dir="
            )
        ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
        starts = ends - -(-sizes // _ALIGNMENT) * _ALIGNMENT
        # Of this call alone: DALI may read it for long.
        buffer = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        view = memoryview(buffer)
        begins, counts, ats = starts.tolist(), sizes.tolist(), offsets.tolist()
        for number in dict.fromkeys(files.tolist()):
            rows = np.flatnonzero(files == number).tolist()
            ranges = [(ats[r], view[begins[r] : begins[r] + counts[r]]) for r in rows]
            for row, done in zip(rows, self.file(number).read_into(ranges), strict=True):
                if done != counts[row]:
                    raise OSError(
                        f"{name_of(row)} is cut off: {done:,} of {counts[row]:,} bytes at byte "
                        f"{ats[row]:,} of {printable(self.paths[number])}"
                    )
        return [buffer[b : b + count] for b, count in zip(begins, counts)]
