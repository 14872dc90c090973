"""Reads the records of a TFRecord file by walking their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import file_kinds

HEADER, FOOTER = 12, 4  # bytes of a length and its checksum; bytes of the content's checksum


def records(take: Callable[[int, int], bytes], end: int, path: str) -> Iterator[tuple[int, int]]:
    """Yields offset and size in bytes of the content of each record.

    Verifies the checksums of the lengths, but not those of the contents, which are not read.

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


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C of bytes, masked as in TFRecord files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return mask_crc(crc ^ 0xFFFFFFFF)


def mask_crc(crc: int) -> int:
    """Returns a CRC-32C, masked as in TFRecord files."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(value: int) -> int:
    """Returns an entry of the table with which `masked_crc` processes a byte at a time."""
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_entry(byte) for byte in range(256)]
