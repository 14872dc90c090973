"""Byte ranges of files, local or supported by fsspec."""

from __future__ import annotations

import collections
import contextlib
import email.utils
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable
from ..order.shuffle import Indices
from .buffers import new_buffer
from .http_ranges import http_options, of_version
from .read_ranges import read_ranges

_ALIGNMENT = 8  # bytes, of each range in its buffer, so that it can be viewed as any dtype
_LOCAL_WINDOW = 2048  # holds the header and content of a small tar member, and the next header
_REMOTE_WINDOW = 1 << 22
# Names of a file's versions in the info of fsspec's file systems, e.g. from HTTP headers.
_VERSION = re.compile(
    r"e-?tag|digest|content-md5|md5-?hash|md5|crc32c|sha\d*|checksum|(xet-)?hash|blob-id|generation|"
    r"version-?id|last-?modified|m-?time|modified|modify|modification-?time|updated|created|ino",
    re.IGNORECASE,
)
_SHARE = 16  # a call keeps open at most this share of the files that `ByteFiles` keeps open
_RECENT = 5.0  # seconds; Last-Modified has a resolution of 1 s
WAITING_THREADS = 16  # reading threads of a source that waits for a network


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL such as ``s3://bucket/key``."""
    return "://" in path


# Size, mtime, ctime and inode of a local file; size and versions of a remote file.
Stamp = list[Any]


def stamp_of(path: str) -> Stamp | None:
    """Returns a stamp that changes with the content of a file; None if the server has no versions.

    The stamp includes the time of the last status change, because programs that preserve a file's
    mtime (``rsync``, ``cp -p``, ``touch -r``) can't set it.

    Raises:
        OSError: If the file can't be found.
    """
    if is_remote(path):
        return RemoteFile(path).stamp()
    return _local_stamp(os.stat(path))


def _local_stamp(status: os.stat_result) -> Stamp:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def filesystem(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in that file system.

    Raises:
        ImportError: If fsspec, or a package that it needs for the protocol, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"fsspec is required to read {url}: pip install fsspec") from error
    is_http = url.startswith(("http://", "https://"))
    system, path = url_to_fs(url, **(http_options() if is_http else {}))
    return system, str(path)


def fetch(system: Any, paths: Sequence[bytes]) -> list[bytes]:
    """Reads whole files of a file system, concurrently if it supports that."""
    names = list(map(os.fsdecode, paths))
    no_bounds = [None] * len(names)
    contents: list[bytes] = system.cat_ranges(names, no_bounds, no_bounds, on_error="raise")
    return contents


def open_stream(path: str) -> BinaryIO:
    """Opens a local file or a URL for sequential reading."""
    if not is_remote(path):
        return open(path, "rb")
    system, path = filesystem(path)
    stream: BinaryIO = system.open(path, "rb")
    return stream


class LocalFile:
    """A local file that stays open until the object is freed.

    Args:
        path: The path.

    Attributes:
        fd: The file descriptor.
        shown: The path, escaped for messages.
    """

    window = _LOCAL_WINDOW

    def __init__(self, path: str):
        self.fd = -1
        self.shown = printable(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._stamp = _local_stamp(os.fstat(self.fd))
        self.size: int = self._stamp[0]

    def stamp(self) -> Stamp:
        """Returns size, mtime, ctime and inode of the file when it was opened."""
        return self._stamp

    def is_of(self, stamp: Stamp) -> bool:
        """Returns whether the file has the size and mtime of a stamp, whatever its inode."""
        return self._stamp[:2] == stamp[:2]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # `close` is a default argument, because `os` may be gone at exit
            close(self.fd)

    def read(self, at: int, count: int) -> bytes:
        """Reads bytes from an offset; fewer at the end of the file."""
        return os.pread(self.fd, count, at)


class RemoteFile:
    """A remote file, in one of fsspec's file systems.

    Args:
        url: The URL.
    """

    window = _REMOTE_WINDOW

    def __init__(self, url: str):
        self.path, self.shown = url, printable(url)
        self._system, self._path = filesystem(url)
        self._info = self._system.info(self._path)
        size = self._info.get("size")
        if size is None:
            raise OSError(f"{url}: the server does not report its size, so ranges can't be read")
        self.size = int(size)

    def stamp(self) -> Stamp | None:
        """Returns size and versions of the file; None if the server reports no version."""
        versions = {
            key: str(value)
            for key, value in self._info.items()
            if value is not None and _VERSION.fullmatch(key.replace("_", "-"))
        }
        if not versions or (set(versions) == {"Last-Modified"} and _is_recent(*versions.values())):
            return None
        return [self.size, *map(list, sorted(versions.items()))]

    def is_of(self, stamp: Stamp) -> bool:
        """Returns whether the file has the size and the versions of a stamp."""
        return self.stamp() in (stamp, None)

    def read(self, at: int, count: int) -> bytes:
        """Reads bytes from an offset; fewer at the end of the file."""
        end = min(at + count, self.size)
        return self._pieces([at], [end])[0] if at < end else b""

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Reads from each offset into its buffer.

        Raises:
            OSError: If a range can't be read, or has the wrong length.
        """
        starts = [at for at, _ in ranges]
        pieces = self._pieces(starts, [at + len(buffer) for at, buffer in ranges])
        for (_, buffer), piece in zip(ranges, pieces, strict=True):
            buffer[:] = piece

    def _pieces(self, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Reads ranges, concurrently if the file system supports that.

        Raises:
            OSError: If a range can't be read, or has the wrong length.
        """
        # Empty ranges are not requested: some file systems would read to the end of the file.
        nonempty = [k for k, (start, end) in enumerate(zip(starts, ends)) if start < end]
        pieces = [b""] * len(starts)
        try:
            with of_version(self._info):
                contents = self._system.cat_ranges(
                    [self._path] * len(nonempty),
                    [starts[k] for k in nonempty],
                    [ends[k] for k in nonempty],
                    on_error="raise",
                )
        except OSError:
            raise
        except Exception as error:  # the file system's own type, e.g. aiohttp.ClientError
            raise OSError(f"{self.shown} can't be read: {error!r}") from error
        for k, piece in zip(nonempty, contents, strict=True):
            if len(piece) != ends[k] - starts[k]:
                raise OSError(
                    f"{self.shown}: requested bytes {starts[k]:,} to {ends[k]:,}, but received "
                    f"{len(piece):,} bytes. The file was changed, or the server ignores ranges. "
                    "Reopen the source, or download the file"
                )
            pieces[k] = bytes(piece)
        return pieces


def _is_recent(date: str) -> bool:
    """Returns whether a file may change again within the second of an HTTP date."""
    try:
        return abs(time.time() - email.utils.parsedate_to_datetime(date).timestamp()) < _RECENT
    except ValueError:
        return True


ByteFile = LocalFile | RemoteFile


def open_file(path: str) -> ByteFile:
    """Opens a local file or a URL."""
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


class Window:
    """Buffered small reads of a file at mostly increasing offsets.

    Attributes:
        file: The file.
    """

    def __init__(self, file: ByteFile):
        self.file = file
        self._data = b""
        self._start = 0

    def __call__(self, at: int, count: int) -> bytes:
        """Reads bytes from an offset; fewer at the end of the file."""
        begin = at - self._start
        if begin < 0 or begin + count > len(self._data):
            self._data = self.file.read(at, max(count, self.file.window))
            self._start, begin = at, 0
        return self._data[begin : begin + count]


def most_open() -> int:
    """Maximum number of files to keep open: half the process's limit, at most 4,096."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(4096, limit // 2)


def within(offsets: Indices, sizes: Indices, limits: Indices) -> NDArray[np.bool_]:
    """Returns which ranges lie within files of ``limits`` bytes, without integer overflow."""
    inside: NDArray[np.bool_] = (offsets >= 0) & (sizes >= 0) & (sizes <= limits)
    inside &= offsets <= limits - sizes
    return inside


def _with_few_files(rows: Indices, files: Indices, most: int) -> list[Indices]:
    """Splits rows, so that each part has at most ``most`` files, given the file of each row."""
    if not len(rows):
        return []
    changes = np.cumsum(files[1:] != files[:-1]) // most
    return np.split(rows, np.flatnonzero(np.diff(changes, prepend=0)) + 1)


class ByteFiles:
    """Numbered files whose ranges are read by several threads.

    A file is opened at its first read in a process, and closed when this object is freed or too
    many files are open. A thread that is still reading a file keeps it open.

    Args:
        paths: Paths or URLs.
        sizes: File sizes in bytes.
        stamps: File stamps, if known. A file that changed since then is rejected.
        has_content: Returns whether a numbered file has the indexed content. It is called if only
            the ctime or the inode of a file differ from its stamp: its owner may have changed, or
            a program may have replaced the file and preserved its mtime. None: it is accepted.
    """

    def __init__(
        self,
        paths: Sequence[str],
        sizes: Sequence[int],
        stamps: Sequence[Stamp | None] = (),
        has_content: Callable[[int], bool] | None = None,
    ):
        self.paths = tuple(paths)
        self.sizes = tuple(sizes)
        self._stamps = list(stamps) or [None] * len(self.paths)
        self._has_content = has_content
        self._limits = np.array(sizes, np.int64)
        self._are_remote = np.array([*map(is_remote, self.paths)], bool)
        # No lock, because a fork could copy it locked. In a race, a file is opened twice.
        self._open = collections.OrderedDict[int, ByteFile]()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": collections.OrderedDict()}

    def file(self, number: int) -> ByteFile:
        """Returns one of the files, open.

        Raises:
            OSError: If it can't be opened, or has changed.
        """
        file = self._open.get(number)
        if file is not None:
            return file
        file = open_file(self.paths[number])
        if file.size != self.sizes[number]:
            raise OSError(
                f"{file.shown} has {file.size:,} bytes, but had {self.sizes[number]:,} when the "
                "source was opened. Reopen the source"
            )
        stamp = self._stamps[number]
        if stamp is not None and not (file.is_of(stamp) and self._is_same(number, file, stamp)):
            raise OSError(
                f"{file.shown} was changed after the source was opened. Reopen the source"
            )
        with contextlib.suppress(KeyError):  # another thread has dropped the last file
            while len(self._open) >= max(1, most_open()):
                self._open.popitem(last=False)  # the file that was opened first
        self._open[number] = file
        return file

    def _is_same(self, number: int, file: ByteFile, stamp: Stamp) -> bool:
        """Returns whether a file with the size and mtime of its stamp has the indexed content."""
        now = file.stamp()
        if self._has_content is not None and now not in (stamp, None):
            if not self._has_content(number):
                return False
            self._stamps[number] = now
        return True

    def read(
        self, files: Indices, offsets: Indices, sizes: Indices, name_of: Callable[[int], str]
    ) -> list[NDArray[np.uint8]]:
        """Reads ranges into one new buffer; returns slices of it, aligned to 8 bytes.

        DALI may read the buffer long afterwards, so calls don't share one.

        Args:
            files: Index of the file of each range.
            offsets: Offset of each range in bytes.
            sizes: Size of each range in bytes.
            name_of: Returns the name of a range's record for errors, given the index of the range.

        Raises:
            OSError: If a range is incomplete or outside its file.
        """
        limits = self._limits[files]
        if not (inside := within(offsets, sizes, limits)).all():
            row = int(np.argmin(inside))
            raise OSError(
                f"the stored index is damaged: {name_of(row)} would be {sizes[row]:,} bytes at "
                f"byte {offsets[row]:,} of {printable(self.paths[files[row]])}, which has only "
                f"{limits[row]:,} bytes. Remove the index, or pass another cache_dir="
            )
        padded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        starts = np.cumsum(padded) - padded
        buffer = new_buffer(int(padded.sum()))
        are_remote = self._are_remote[files]
        if are_remote.any():
            self._read_remote(np.flatnonzero(are_remote), files, offsets, sizes, starts, buffer)
        local = np.flatnonzero(~are_remote)
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
        ends = starts + sizes
        return [buffer[start:end] for start, end in zip(starts.tolist(), ends.tolist())]

    def _read_local(
        self,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        starts: Indices,
        buffer: NDArray[np.uint8],
    ) -> Indices:
        """Reads ranges of local files into a buffer; returns their counts, see `read_ranges`."""
        numbers = files[rows].tolist()
        opened = {number: self.file(number) for number in dict.fromkeys(numbers)}  # keeps them open
        fds = {number: file.fd for number, file in opened.items() if isinstance(file, LocalFile)}
        row_fds = np.array([fds[number] for number in numbers])
        return read_ranges(row_fds, offsets[rows], sizes[rows], starts[rows], buffer)

    def _read_remote(
        self,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        starts: Indices,
        buffer: NDArray[np.uint8],
    ) -> None:
        """Reads ranges of remote files into a buffer.

        Raises:
            OSError: If a range can't be read, or has the wrong length.
        """
        view = memoryview(buffer)
        for number in dict.fromkeys(files[rows].tolist()):
            if isinstance(file := self.file(number), RemoteFile):
                own = rows[files[rows] == number]
                places = zip(offsets[own].tolist(), starts[own].tolist(), sizes[own].tolist())
                file.read_into([(at, view[start : start + size]) for at, start, size in places])
