"""Heights and widths of encoded pictures, from their headers alone, and whether these are whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

_HEAD = 1024  # bytes of a file that are read at once
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_GIF = b"GIF8"
# What files of other kinds begin with that DALI may decode: JPEG 2000, PNM, BigTIFF.
_UNKNOWN = (b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51", *(b"P%d" % n for n in range(1, 7)))
_UNKNOWN += (b"II+\0", b"MM\0+")
_SEGMENT = struct.Struct(">BBH")  # the beginning of a JPEG's: 255, the marker, its length
# JPEG's markers without a segment, none of them in a header.
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_COMPONENTS = (1, 3, 4)  # of a JPEG
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # of a PNG
_BITS = 0x102  # a TIFF's tag, without which DALI refuses it
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # in the range of the frame headers' markers, but none
_WHOLE = {1: "B", 3: "H", 4: "I"}  # TIFF's whole numbers

Size = tuple[int, int]
# The bytes at an offset, so many; EOFError where they are not there.
_Take = Callable[[int, int], bytes]


def picture_size(data: Any) -> Size | None:
    """Height and width of a picture as DALI's decoders give it.

    JPEG, PNG, WebP, BMP and TIFF. An EXIF orientation that turns the picture swaps them.

    Args:
        data: The bytes of the picture; anything with the buffer protocol.

    Returns:
        None if the format is another one, or the header is damaged or cut off. A PNG's goes on to
        its last chunk, and a WebP's to its EXIF data.
    """
    return _of_bytes(data)[0]


def path_size(path: Any) -> Size | None:
    """`picture_size` of a file, of which little more than the header is read.

    Args:
        path: The bytes of its path; anything with the buffer protocol.

    Returns:
        None, too, if it can't be read: reading the whole file says why.
    """
    try:
        return _of_file(path)[0]
    except OSError:
        return None


def look_at(data: Any) -> tuple[Size | None, str]:
    """`picture_size`, and why no decoder of DALI's can take a file for a picture; "" where one may.

    DALI 2.4 ends the process where one of 32 pictures or more has such a header: the error is
    raised while other threads still read theirs.

    Args:
        data: The bytes of the file; anything with the buffer protocol.
    """
    found = _of_bytes(data)
    return found[0], _fault(*found)


def look_at_file(path: Any) -> tuple[Size | None, str]:
    """`look_at` of a file; one that can't be read passes: reading all of it says why."""
    try:
        found = _of_file(path)
    except OSError:
        return None, ""
    return found[0], _fault(*found)


def _fault(pixels: Size | None, start: bytes, size: int) -> str:
    if not size:
        return "it is empty, and no picture"
    if start.startswith(_GIF):
        return "it is a GIF, which DALI's decoders don't take"
    if start.startswith(_UNKNOWN):
        return ""
    if not any(start.startswith(magic) for magic, _ in _FORMATS):
        return f"it is no picture that DALI's decoders take: it begins with {start[:12]!r}"
    return "" if pixels else f"its header is damaged or cut off, and it has {size} bytes"


def _of_bytes(data: Any) -> tuple[Size | None, bytes, int]:
    """The size of a file's picture, the file's first bytes, and their number."""
    view = memoryview(data).cast("B")
    head = bytes(view[:_HEAD])  # whose slices are made in less time than those of a view
    return _size(head, lambda at, count: bytes(view[at : at + count])), head, len(view)


def _of_file(path: Any) -> tuple[Size | None, bytes, int]:
    """`_of_bytes` of the file of a path, which ends at its first zero, as it does for DALI."""
    with open(bytes(path).partition(b"\0")[0], "rb", buffering=0) as file:
        head, number = file.read(_HEAD), file.fileno()
        size = _size(head, lambda at, count: os.pread(number, count, at))
        return size, head, os.fstat(number).st_size


def _size(head: bytes, read: _Take) -> Size | None:
    """The size of a picture, of which ``read`` gives bytes behind the head, or fewer at the end."""

    def take(at: int, count: int) -> bytes:
        piece = head[at : at + count]
        if len(piece) < count and len(piece := read(at, count)) < count:
            raise EOFError
        return piece

    try:
        start = take(0, 12)
        for magic, of in _FORMATS:
            if start.startswith(magic):
                size = of(take)
                return size if size is not None and 0 < min(size) <= max(size) < 1 << 31 else None
    except (EOFError, struct.error):  # cut off
        pass
    return None


def _turned(height: int, width: int, orientation: int) -> Size:
    return (width, height) if orientation in _TURNED else (height, width)


def _jpeg(take: _Take) -> Size | None:
    """Walks the segments up to the pixels; the frame header is behind the EXIF data."""
    at, orientation = 2, 1
    size: Size | None = None
    while True:
        fill, marker, length = _SEGMENT.unpack(take(at, 4))
        if fill != 0xFF:
            return None
        if marker == 0xFF:  # any number of them may fill up
            at += 1
            continue
        if marker in _NO_LENGTH:
            return None
        at += 2
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            height, width, components = struct.unpack(">HHB", take(at + 3, 5))
            size = size or (height, width) if components in _COMPONENTS else None
        if marker == 0xDA and size is not None:  # the scan
            return _turned(*size, orientation)
        if marker in (0xD9, 0xDA) or length < 2:
            return None
        if marker == 0xE1 and length >= 16 and take(at + 2, 6) == b"Exif\0\0":
            orientation = _orientation(take, at + 8)
        at += length


def _png(take: _Take) -> Size | None:
    """The orientation may be in any chunk; DALI's parser, too, goes through them to the last."""
    length, kind, width, height, depth, colour = struct.unpack(">I4sIIBB", take(8, 18))
    if (length, kind) != (13, b"IHDR") or depth not in _DEPTHS.get(colour, ()):
        return None
    at, orientation = 8, 1
    while True:
        length, kind = struct.unpack(">I4s", take(at, 8))
        if kind == b"IEND":
            return _turned(height, width, orientation)
        if kind == b"eXIf":
            orientation = _orientation(take, at + 8)
        at += 12 + length


def _webp(take: _Take) -> Size | None:
    if take(8, 4) != b"WEBP":
        return None
    form = take(12, 4)
    if form == b"VP8L" and take(20, 1) == b"\x2f":
        (bits,) = struct.unpack("<I", take(21, 4))
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if form == b"VP8 " and take(23, 3) == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", take(26, 4))
        return height & 0x3FFF, width & 0x3FFF
    if form != b"VP8X":
        return None
    # The canvas, in 24 bits each less one; EXIF data is behind the pixels.
    width, height = (int.from_bytes(take(at, 3), "little") + 1 for at in (24, 27))
    at, orientation = 30, 1
    while take(20, 1)[0] & 8:
        kind, length = struct.unpack("<4sI", take(at, 8))
        if kind == b"EXIF":
            take(at + 8 + length - 1, 1)
            orientation = _orientation(take, at + 8)
            break
        at += 8 + length + length % 2
    return _turned(height, width, orientation)


def _bmp(take: _Take) -> Size | None:
    length = struct.unpack("<I", take(14, 4))[0]
    old = length == 12
    if length < 40 and not old:
        return None
    take(0, 26 if old else 54)
    width, height = struct.unpack(*("<HH", take(18, 4)) if old else ("<ii", take(18, 8)))
    return abs(height), width  # below 0 where the top row comes first


def _tiff(take: _Take) -> Size | None:
    tags = _tags(take, 0)
    if _BITS not in tags:
        return None
    return _turned(tags.get(0x101, 0), tags.get(0x100, 0), tags.get(0x112, 1))


def _orientation(take: _Take, start: int) -> int:
    """The orientation of EXIF data: a TIFF header and directory; 1 where it is damaged."""
    try:
        return _tags(take, start).get(0x112, 1)
    except EOFError:
        return 1


def _tags(take: _Take, start: int) -> dict[int, int]:
    """The whole numbers of a TIFF's first directory."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(take(start, 4))
    tags: dict[int, int] = {}
    if order is not None:
        (directory,) = struct.unpack(order + "I", take(start + 4, 4))
        (count,) = struct.unpack(order + "H", take(start + directory, 2))
        for entry in range(count):
            tag, kind, _, value = struct.unpack(
                order + "HHI4s", take(start + directory + 2 + 12 * entry, 12)
            )
            if kind in _WHOLE:
                tags[tag] = struct.unpack_from(order + _WHOLE[kind], value)[0]
    return tags


_FORMATS: tuple[tuple[bytes, Callable[[_Take], Size | None]], ...] = (
    (b"\xff\xd8", _jpeg),
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"RIFF", _webp),
    (b"BM", _bmp),
    (b"II*\0", _tiff),
    (b"MM\0*", _tiff),
)
