"""Reads files by fsspec: chained URLs, and protocols that obstore does not support."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..messages.printable import printable
from ..threads.workers import call_each
from .locations import fsspec_options, kind_of, stall_seconds
from .redirects import redirect_trace, secret_headers
from .retries import RemoteError, changed, patience, patiently, repeated, wrong_length
from .versions import unsettled_pair

_CHECK_SECONDS = 60.0  # between requests of the version of a file
_CHECKS = 16  # concurrent requests of versions
# Names of entries of fsspec's info of a file that change with its content, e.g. HTTP headers.
_VERSION = re.compile(
    r"e-?tag|digest|content-md5|md5-?hash|md5|crc32c|sha\d*|checksum|(xet-)?hash|blob-id|generation|"
    r"version-?id|last-?modified|m-?time|modified|modify|modification-?time|updated|created|ino",
    re.IGNORECASE,
)
# Names of times and inodes. These values of a file in an archive may stay equal when the archive is
# replaced.
_TIME = re.compile(
    r"last-?modified|m-?time|modified|modify|modification-?time|updated|created|ino", re.IGNORECASE
)
_ARCHIVES = ("tar://", "zip://", "libarchive://")  # the path of the archive may be a storage option


def filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in that file system.

    Args:
        url: The URL.
        options: The user's storage options.

    Raises:
        ImportError: If fsspec, or a package that it needs for the protocol, is not installed.
        RemoteError: If the archive of a chained URL can't be opened.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(
            f"fsspec is required to read {printable(url)}: pip install fsspec"
        ) from error
    arguments = _arguments(url, options)
    system, path = patiently(lambda: url_to_fs(url, **arguments), url, options, opens=True)
    return system, str(path)


def _arguments(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of fsspec's file system for a URL.

    Args:
        url: The URL.
        options: The user's storage options. Those of a chained HTTP server are in ``"https"``.
    """
    arguments = fsspec_options(options)
    if kind_of(url) == "http":
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=None, sock_connect=10, sock_read=stall_seconds(options))
        return _without_redirects({**arguments, "client_kwargs": {"timeout": limits}})
    chained = {
        name: _without_redirects(arguments[name])
        for name in ("http", "https")
        if isinstance(arguments.get(name), Mapping)
    }
    return {**arguments, **chained}


def _without_redirects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of fsspec's HTTP file system that protect secret headers; see `redirects`.

    Args:
        arguments: The user's arguments.
    """
    names = secret_headers(arguments)
    if not names:
        return dict(arguments)
    client = dict(arguments.get("client_kwargs") or {})
    client["trace_configs"] = [*(client.get("trace_configs") or ()), redirect_trace(names)]
    return {**arguments, "client_kwargs": client}


class FsspecFile:
    """A remote file that fsspec reads. Its size and version are requested when it is opened.

    Args:
        url: The URL.
        options: The user's storage options.

    Raises:
        RemoteError: If the file can't be read, or the server does not report its size.
    """

    def __init__(self, url: str, options: Mapping[str, Any]):
        self.url, self.shown = url, printable(url)
        self.system, self.path = filesystem(url, options)
        self.options = options
        self.info = patiently(lambda: self.system.info(self.path), url, options, opens=True)
        size = self.info.get("size")
        if size is None:
            raise RemoteError(
                f"{self.shown}: the server does not report its size, so ranges can't be read"
            )
        self.size = int(size)
        self._checked = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether `check` is due, once a minute."""
        return time.monotonic() - self._checked >= _CHECK_SECONDS

    def check(self) -> Exception | None:
        """Requests the version of the file, and compares it with the opened version.

        Returns:
            None if the versions are equal; otherwise a `ChangedError`, or the error of the request.
        """
        try:
            self.system.invalidate_cache(self.path)  # else fsspec may answer from a stored listing
            info = self.system.info(self.path)
        except Exception as error:
            return error
        self._checked = time.monotonic()
        before, now = (_versions(values) for values in (self.info, info))
        if before == now and self.info["size"] == info.get("size"):
            return None
        return changed(self.shown, f"{before or self.size} -> {now or info.get('size')}")

    def stamp(self) -> list[Any]:
        """Returns the stamp of the file, which identifies its version.

        The stamp is [size, [name, value], ...], with fsspec's names of the values. Values that may
        stay equal when the file changes have the name of an `unsettled_pair`.
        """
        versions = _versions(self.info)
        are_times = all(_TIME.fullmatch(name.replace("_", "-")) for name in versions)
        is_nested = "::" in self.url or self.url.startswith(_ARCHIVES)
        if is_nested and versions and are_times:
            return [self.size, unsettled_pair(repr(sorted(versions.items())))]
        return [self.size, *map(list, sorted(versions.items()))]


def _versions(info: Mapping[str, Any]) -> dict[str, str]:
    """Returns the entries of fsspec's info of a file that change with the file's content."""
    return {
        key: str(value)
        for key, value in info.items()
        if value is not None and _VERSION.fullmatch(key.replace("_", "-"))
    }


def read(
    files: Sequence[FsspecFile],
    starts: Sequence[int],
    ends: Sequence[int],
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[memoryview]:
    """Reads ranges, and returns the bytes of each range. Failed reads are repeated.

    Each file system is called once for all its files. The versions of the files are requested after
    the reads, once a minute.

    Args:
        files: The file of each range.
        starts: The first byte of each range.
        ends: The byte after the last byte of each range.
        is_wanted: Returns whether the ranges are still needed.

    Raises:
        RemoteError: If a range can't be read, or has the wrong length.
        Unneeded: If the ranges are no longer needed.
    """

    def attempt(rows: list[int]) -> list[memoryview | Exception]:
        """Reads the ranges with the given numbers; returns the bytes or the error of each range."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row in rows:
            file = files[row]
            # fsspec has an instance of a file system for each thread.
            arguments = repr((file.system.storage_args, file.system.storage_options))
            groups.setdefault((type(file.system), arguments), []).append(row)
        pieces: dict[int, memoryview | Exception] = {}
        for group in groups.values():
            contents = read_together(
                files[group[0]].system,
                [files[row].path for row in group],
                [starts[row] for row in group],
                [ends[row] for row in group],
            )
            for row, content in zip(group, contents, strict=True):
                pieces[row] = _checked(content, starts[row], ends[row])
        due = [file for file in {files[row] for row in rows} if file.is_due()]
        errors = dict(zip(due, call_each(FsspecFile.check, due, _CHECKS, "dalijax-check")))
        return [errors.get(files[row]) or pieces[row] for row in rows]

    urls, options = [file.url for file in files], files[0].options  # files share a `Storage`
    return repeated(attempt, urls, patience(options), is_wanted, options)


def read_files(
    urls: Sequence[str],
    options: Mapping[str, Any],
    opens: bool = False,
    most_bytes: int | None = None,
) -> list[Any]:
    """Returns the contents of files as bytes; calls each file system once for all its files.

    Args:
        urls: The URL of each file.
        options: The user's storage options.
        opens: Whether a source is being opened. Retries then end earlier; see `patience`.
        most_bytes: The number of bytes to read of a larger file; None: all.

    Raises:
        RemoteError: If a file can't be read.
    """

    def attempt(rows: list[int]) -> list[Any]:
        """Reads the files with the given numbers; returns the content or error of each file."""
        groups: dict[int, tuple[Any, list[int], list[str]]] = {}
        for row in rows:
            system, path = filesystem(urls[row], options)
            _, group, paths = groups.setdefault(id(system), (system, [], []))
            group.append(row)
            paths.append(path)
        contents: dict[int, Any] = {}
        for system, group, paths in groups.values():
            starts, ends = [None] * len(group), [most_bytes] * len(group)
            contents.update(zip(group, read_together(system, paths, starts, ends)))
        return [contents[row] for row in rows]

    return repeated(attempt, urls, patience(options, opens), options=options)


def read_together(
    system: Any, paths: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]
) -> list[Any]:
    """Returns the bytes or the error of each range, from one call of a file system.

    Args:
        system: fsspec's file system.
        paths: The file of each range.
        starts: The first byte of each range; None: 0.
        ends: The byte after the last byte of each range; None: the size of the file.
    """
    # The file system of the HuggingFace Hub would read 5 MB more in each request.
    options = {"cache_type": "none"} if system.protocol == "hf" else {}
    try:
        contents = system.cat_ranges(
            list(paths), list(starts), list(ends), on_error="return", **options
        )
    except Exception as error:
        return [error] * len(paths)
    return list(contents)


def _checked(content: Any, start: int, end: int) -> memoryview | Exception:
    """Returns the bytes of a range, or an error if the request failed or the length is wrong."""
    if isinstance(content, Exception):
        return content
    if len(content) != end - start:
        return wrong_length(start, end, len(content))
    return memoryview(content)
