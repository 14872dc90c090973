"""Reads the members of a tar by walking its headers (POSIX.1-2001, GNU and old tars)."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import file_kinds

_log = logging.getLogger("dalijax")

BLOCK = 512  # bytes; all offsets are multiples of it
_ZEROS = bytes(BLOCK)
_MANY = 1 << 16  # bytes of zeros read at once
_REGULAR = (b"0", b"\0", b"7")
_LINKS = {b"1": "hard", b"2": "symbolic"}
_NO_CONTENT = (*_LINKS, b"3", b"4", b"5", b"6")  # links, devices, folders, FIFOs


class Member(NamedTuple):
    """A regular file of a tar, or a link.

    Attributes:
        name: The name, with its directory.
        start: Offset of the first header, including the headers of long names.
        offset: Offset of the content.
        size: Size of the content in bytes, 0 for links.
        archive: Number of the archive in the file, from 0; archives may be concatenated.
        link: "hard" or "symbolic"; "" for a regular file.
    """

    name: bytes
    start: int
    offset: int
    size: int
    archive: int = 0
    link: str = ""


def members(
    take: Callable[[int, int], bytes],
    end: int,
    path: str,
    start: int = 0,
) -> Iterator[Member]:
    """Yields the regular files and the links of a tar in their order.

    Tars may be concatenated: members after an end mark belong to the next archive.

    Args:
        take: ``take(offset, count)`` returns bytes of the tar; fewer at the end of the tar.
        end: Size of the tar in bytes.
        path: Name of the tar in errors.
        start: Offset of the first header.

    Raises:
        ValueError: If a header is damaged, a member is cut off, or a member is a sparse file.
    """
    at = begin = start
    archive = 0
    # Name and size of the next member, if an extended header gives them.
    name: bytes | None = None
    length: int | None = None
    global_records: dict[bytes, bytes] = {}
    last = b""
    while at < end:
        header = take(at, BLOCK)
        if header == _ZEROS:
            next_at = _end_of_zeros(take, at, end)
            if name is not None or length is not None:
                raise ValueError(f"{path}: the extended header at byte {begin:,} has no member")
            if next_at < end and not _is_header(take(next_at, BLOCK)):
                _log.warning(
                    "%s: %s bytes after the end mark are ignored: they are not a tar",
                    path,
                    f"{end - next_at:,}",
                )
                next_at = end
            if next_at == end:
                return
            if next_at - at > BLOCK:  # one block of zeros is not an end mark
                archive += 1
                global_records = {}
            at = begin = next_at
            continue
        kind = header[156:157]
        size = _checked_size(header, at, end, path, last)
        content, at = at + BLOCK, at + BLOCK + -(-size // BLOCK) * BLOCK
        if kind in (b"L", b"x", b"g", b"K"):
            _check_end(content + size, end, path, "the header of a long name", content)
            if kind == b"L":
                name = take(content, size).rstrip(b"\0")
            elif kind != b"K":
                records = _pax_records(take(content, size), path, content)
                if kind == b"g":
                    global_records.update(records)
                    continue
                name = records.get(b"path", name)
                length = int(records[b"size"]) if b"size" in records else length
                if any(key.startswith(b"GNU.sparse.") for key in records):
                    raise ValueError(
                        f"{path}: the member at byte {begin:,} is a sparse file. Pack it again "
                        "without --sparse"
                    )
            continue
        name = _name(header) if name is None else name
        name = name or global_records.get(b"path", b"")
        if length is not None:
            size, at = length, content + -(-length // BLOCK) * BLOCK
        if kind in _NO_CONTENT or (kind == b"\0" and name.endswith(b"/")):
            at = content
            if kind in _LINKS:
                yield Member(name, begin, content, 0, archive, _LINKS[kind])
        else:
            last = name
            if kind == b"S":
                raise ValueError(
                    f"{path}: member {_shown(last)} is a sparse file. Pack it again without "
                    "--sparse"
                )
            if content + size > end:
                _check_end(content + size, end, path, f"member {_shown(last)}", content)
            if kind in _REGULAR:
                yield Member(name, begin, content, size, archive)
        begin, name, length = at, None, None
    if name is not None or length is not None:
        raise ValueError(
            f"{path} is cut off: the extended header at byte {begin:,}, after {_shown(last)}, has "
            "no member"
        )
    if at > end:
        raise ValueError(f"{path} is cut off after {_shown(last)}, before byte {at:,}")
    _log.warning("%s has no end mark: it may be cut off after %s", path, _shown(last))


def _end_of_zeros(take: Callable[[int, int], bytes], at: int, end: int) -> int:
    """Returns the offset of the first non-zero block at or after an offset, or the end."""
    while at < end:
        data = take(at, min(_MANY, end - at))
        remainder = data.lstrip(b"\0")
        if remainder:
            return at + (len(data) - len(remainder)) // BLOCK * BLOCK
        at += len(data)
    return end


def _is_header(block: bytes) -> bool:
    """Returns whether a block after an end mark is the header of another archive.

    A damaged header counts, so that reading it raises an error.
    """
    try:
        _checked_size(block, 0, len(block), "", b"")
    except ValueError:
        return block[257:262] == b"ustar"
    return True


def _shown(name: bytes) -> str:
    """Returns a member's name for errors; "its start" for b"", i.e. before the first member."""
    return repr(name.decode(errors="replace")) if name else "its start"


def _check_end(stop: int, end: int, path: str, item: str, content: int) -> None:
    """Raises ValueError if the content of an item is cut off.

    Args:
        stop: The end offset of the content.
        end: The size of the tar.
        path: The name of the tar.
        item: The item, such as "member 'x.jpg'".
        content: The offset of the content.
    """
    if stop > end:
        raise ValueError(
            f"{path}: {item} at byte {content:,} is cut off: it needs {stop - content:,} bytes, "
            f"but only {max(0, end - content):,} are left"
        )


def _checked_size(header: bytes, at: int, end: int, path: str, last: bytes) -> int:
    """Returns the size of a member in bytes from its header, after verifying the checksum.

    Args:
        header: The header, 512 bytes.
        at: Offset of the header in the tar.
        end: The size of the tar.
        path: The name of the tar in errors.
        last: The name of the previous member, b"" for none.

    Raises:
        ValueError: If the header is damaged or cut off.
    """
    try:
        if len(header) < BLOCK:
            raise ValueError
        expected = _number(header[148:156])
        # The low half of Adler-32 is the sum of the bytes modulo 65,521, much faster than sum().
        adler = zlib.adler32(header[156:], zlib.adler32(b"        ", zlib.adler32(header[:148])))
        if (expected + 1) % 65521 != adler & 0xFFFF and expected != _signed_sum(header):
            raise ValueError
        size = _number(header[124:136])
        if size < 0:
            raise ValueError
        return size
    except ValueError:
        kind = "" if at or file_kinds.is_tar(header) else file_kinds.described(header)
        if kind:
            raise ValueError(f"{path} is not a tar: {kind}") from None
        if len(header) < BLOCK:
            raise ValueError(
                f"{path}: the header at byte {at:,}, after {_shown(last)}, is cut off: only "
                f"{end - at} bytes are left"
            ) from None
        problem = (
            f"has no tar header at byte {at:,}, after {_shown(last)}" if at else "is not a tar"
        )
        raise ValueError(f"{path} {problem}") from None


def _signed_sum(header: bytes) -> int:
    """Returns the checksum of a header as old programs computed it, with signed bytes."""
    return 256 + sum(b - (b & 128) * 2 for b in header[:148] + header[156:])


def _number(digits: bytes) -> int:
    """Returns a number of a header, stored in octal digits, or in base 256 if it is large.

    Raises:
        ValueError: If the bytes are not a number.
    """
    if digits[0] & 0x80:
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    return int(digits.strip(b"\0 ") or b"0", 8)


def _name(header: bytes) -> bytes:
    """Returns the member's name in a header, with the prefix that POSIX tars store separately."""
    name = header[:100].split(b"\0", 1)[0]
    if header[345] and header[257:263] == b"ustar\0":
        return header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def _pax_records(content: bytes, path: str, at: int) -> dict[bytes, bytes]:
    """Returns the values in an extended header, by key.

    Args:
        content: The content of the extended header: records of ``length key=value`` and a newline.
        path: The name of the tar in errors.
        at: The offset of the content, for errors.

    Raises:
        ValueError: If a record is damaged.
    """
    records = {}
    start = 0
    try:
        while start < len(content):
            space = content.index(b" ", start)
            stop = start + int(content[start:space])
            key, equals, value = content[space + 1 : stop - 1].partition(b"=")
            if stop <= space or content[stop - 1 : stop] != b"\n" or not equals:
                raise ValueError
            if key == b"size" and not value.isdigit():
                raise ValueError
            records[key] = value
            start = stop
    except ValueError:
        raise ValueError(f"{path}: the extended header at byte {at:,} is damaged") from None
    return records
