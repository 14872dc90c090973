"""Reads the records of a TFRecord file by walking their headers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import file_kinds
from .buffered_reader import BufferedReader
from .byte_files import LocalFile

HEADER, FOOTER = 12, 4  # bytes of a length and its checksum; bytes of the content's checksum
# Bytes of a record that are verified at once. Larger remote records are read twice.
_LOCAL_PART, _REMOTE_PART = 1 << 20, 1 << 26

# Returns whether the record with an offset and a size has the right checksum; see `is_intact`.
Intact = Callable[[BufferedReader, int, int], bool]


def records(take: Callable[[int, int], bytes], end: int, path: str) -> Iterator[tuple[int, int]]:
    """Yields offset and size in bytes of the content of each record.

    Verifies the checksums of the lengths. `is_intact` verifies that of a content.

    Args:
        take: ``take(offset, count)`` returns bytes of the file; fewer at the end of the file.
        end: Size of the file in bytes.
        path: Name of the file in errors.

    Raises:
        ValueError: If a length is damaged, or a record is cut off.
    """
    at = number = 0
    while at < end:
        head = take(at, HEADER)
        size = int.from_bytes(head[:8], "little")
        stop = at + HEADER + size + FOOTER
        if len(head) == HEADER and not _is_head(head):
            kind = "" if number else file_kinds.described(take(0, file_kinds.HEAD))
            if kind:
                raise ValueError(f"{path} is not a TFRecord file: {kind}")
            raise ValueError(f"{path}: the length of record {number} is damaged")
        if len(head) < HEADER or stop > end:
            raise ValueError(
                f"{path}: record {number} at byte {at:,} is cut off: only {end - at:,} of "
                f"{stop - at if len(head) == HEADER else HEADER:,} bytes are left"
            )
        yield at + HEADER, size
        at = stop
        number += 1


def _is_head(head: bytes) -> bool:
    """Returns whether the header of a record contains the correct checksum of its length."""
    return masked_crc(head[:8]) == int.from_bytes(head[8:], "little")


def masked_crc(data: bytes | NDArray[np.uint8]) -> int:
    """Returns the CRC-32C of bytes, masked as in TFRecord files."""
    return _masked(_crc32c().value(data))


def _masked(crc: int) -> int:
    """Returns a CRC-32C, masked as in TFRecord files."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_intact(take: BufferedReader, at: int, size: int) -> bool:
    """Reads the content of a record; returns whether it has the checksum that follows it.

    Args:
        take: Reads the file.
        at: Offset of the content.
        size: Size of the content in bytes.
    """
    read: Callable[[int, int], bytes] = take  # the record stays in the buffer, to be parsed
    part = _REMOTE_PART
    if isinstance(take.file, LocalFile):
        read, part = take.file.read, _LOCAL_PART
    if size <= part:
        return has_checksum(np.frombuffer(read(at, size + FOOTER), np.uint8))
    crc, stop = 0, at + size
    for start in range(at, stop, part):
        crc = _crc32c().extend(crc, read(start, min(part, stop - start)))
    footer = read(stop, FOOTER)
    take.forget()
    return _masked(crc) == int.from_bytes(footer, "little")


def is_intact_or_large(take: BufferedReader, at: int, size: int) -> bool:
    """Returns the result of `is_intact`, but True for a remote record larger than a buffer.

    Such a record is not read, since an index needs only its headers.
    """
    is_large = not isinstance(take.file, LocalFile) and size > take.file.buffer_size
    return is_large or is_intact(take, at, size)


def has_checksum(record: NDArray[np.uint8]) -> bool:
    """Returns whether the content of a record has the checksum in the four bytes after it.

    Args:
        record: The content and the checksum, contiguous.
    """
    content, footer = record[:-FOOTER], record[-FOOTER:]
    return masked_crc(content) == int.from_bytes(footer.tobytes(), "little")


@functools.cache
def _crc32c() -> Any:
    """Returns the package that computes checksums, which ``import dalijax`` must not need."""
    import google_crc32c

    return google_crc32c
