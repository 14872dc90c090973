"""Files of fsspec's file systems: other protocols than those of obstore, and chained URLs."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages.printable import printable
from .http_ranges import http_options, of_version
from .locations import fsspec_options
from .versions import RECENT

# Names of a file's versions in the info of fsspec's file systems, e.g. from HTTP headers.
_VERSION = re.compile(
    r"e-?tag|digest|content-md5|md5-?hash|md5|crc32c|sha\d*|checksum|(xet-)?hash|blob-id|generation|"
    r"version-?id|last-?modified|m-?time|modified|modify|modification-?time|updated|created|ino",
    re.IGNORECASE,
)


def filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in that file system.

    Args:
        url: The URL.
        options: The user's storage options.

    Raises:
        ImportError: If fsspec, or a package that it needs for the protocol, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(
            f"fsspec is required to read {printable(url)}: pip install fsspec, or for http, s3, gs "
            'and az pip install "dalijax[remote]"'
        ) from error
    arguments = fsspec_options(url, options)
    if url.startswith(("http://", "https://")):
        arguments = {**http_options(), **arguments}
    system, path = url_to_fs(url, **arguments)
    return system, str(path)


class FsspecFile:
    """A remote file, in one of fsspec's file systems.

    Args:
        url: The URL.
        options: The user's storage options.
    """

    def __init__(self, url: str, options: Mapping[str, Any]):
        self.url, self.shown = url, printable(url)
        self.system, self.path = filesystem(url, options)
        self.info: Mapping[str, Any] = self.system.info(self.path)
        size = self.info.get("size")
        if size is None:
            raise OSError(
                f"{self.shown}: the server does not report its size, so ranges can't be read"
            )
        self.size = int(size)

    def stamp(self) -> list[Any] | None:
        """Returns size and versions of the file; None if the server reports no version."""
        versions = {
            key: str(value)
            for key, value in self.info.items()
            if value is not None and _VERSION.fullmatch(key.replace("_", "-"))
        }
        if not versions or (set(versions) == {"Last-Modified"} and _is_recent(*versions.values())):
            return None
        return [self.size, *map(list, sorted(versions.items()))]


def _is_recent(date: str) -> bool:
    """Returns whether a file may change again within the second of an HTTP date."""
    try:
        age = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return True
    return abs(age) < RECENT


def read(
    files: Sequence[FsspecFile], starts: Sequence[int], ends: Sequence[int]
) -> list[memoryview]:
    """Reads ranges, with one call for all files of a file system.

    fsspec's HTTP file system is called for each file, because its responses are compared with the
    version of one file.

    Args:
        files: The file of each range.
        starts: The first byte of each range.
        ends: The byte after the last byte of each range.

    Raises:
        OSError: If a range can't be read, or has the wrong length.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, file in enumerate(files):
        is_http = file.url.startswith(("http://", "https://"))
        # fsspec has an instance of a file system for each thread.
        arguments = repr((file.system.storage_args, file.system.storage_options))
        key = type(file.system), arguments, file.path if is_http else ""
        groups.setdefault(key, []).append(row)
    pieces = [memoryview(b"")] * len(files)
    for rows in groups.values():
        file = files[rows[0]]
        try:
            with of_version(file.info):
                contents = file.system.cat_ranges(
                    [files[row].path for row in rows],
                    [starts[row] for row in rows],
                    [ends[row] for row in rows],
                    on_error="return",
                )
        except Exception as error:
            contents = [error] * len(rows)
        for row, content in zip(rows, contents, strict=True):
            pieces[row] = _checked(files[row], starts[row], ends[row], content)
    return pieces


def _checked(file: FsspecFile, start: int, end: int, content: Any) -> memoryview:
    """Returns the bytes of a range.

    Raises:
        OSError: If the content is an error or has the wrong length.
    """
    if isinstance(content, OSError):
        raise content
    if isinstance(content, Exception):  # the file system's own type, e.g. aiohttp.ClientError
        raise OSError(f"{file.shown} can't be read: {content!r}") from content
    if isinstance(content, BaseException):
        raise content
    if len(content) != end - start:
        raise OSError(
            f"{file.shown}: requested bytes {start:,} to {end:,}, but received {len(content):,} "
            "bytes. The file was changed, or the server ignores ranges. Reopen the source, or "
            "download the file"
        )
    return memoryview(content)
