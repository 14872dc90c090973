"""Reads the tracks of video files: their codecs, and how players rotate their frames.

The formats are MP4 with its relatives (MOV, 3GP, M4A), Matroska with WebM, AVI and IVF. Damaged
files have no tracks here, because the decoder reports them.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

Read = Callable[[int, int], bytes]  # returns bytes of a file, given their offset and number
_Element = tuple[bytes, int, int]  # kind, and the offsets of the start and the end of the content

_MOST = 10_000  # elements of a list; a damaged file may seem to have billions
_MOST_BYTES = 1 << 12  # of an element that is read; headers of tracks are shorter

_MP4_BEGINS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML = b"\x1aE\xdf\xa3"
_SEGMENT, _TRACKS, _TRACK = b"\x18S\x80g", b"\x16T\xaek", b"\xae"
_TYPE, _DEFAULT, _CODEC, _PRIVATE = b"\x83", b"\x88", b"\x86", b"c\xa2"
_VIDEO, _PROJECTION, _PROJECTION_TYPE = b"\xe0", b"vp", b"vq"
_ANGLES = (b"vs", b"vt", b"vu")  # yaw, pitch and roll
_IDENTITY = (1.0, 0.0, 0.0, 1.0)

# How players transform frames: the new axes are (a x + c y, b x + d y) of the matrix (a, b, c, d).
Matrix = tuple[float, float, float, float]


class Track(NamedTuple):
    """A track of a video file.

    Attributes:
        kind: "video" or "sound".
        codec: The file's name of the codec in lower case, such as "avc1", "v_vp9" or "mp4v.20".
            Sounds in AVI have numbers, such as "..0055".
        rotation: The rotation of the frames for display, such as "rotated by 90 degrees clockwise";
            "" if there is none.
        enabled: Whether players show the track by default.
    """

    kind: str
    codec: str
    rotation: str = ""
    enabled: bool = True


def read_tracks(read: Read, size: int) -> tuple[str, list[Track]]:
    """Returns the name of a file's format, and its tracks of videos and sounds.

    Args:
        read: Reads the file.
        size: Size of the file in bytes.

    Returns:
        The name, or "" for other formats; and the tracks. Damaged files have no tracks.
    """
    head = read(0, 12)
    parser: Callable[[Read, int], Iterator[Track]]
    if head[4:8] in _MP4_BEGINS:
        name, parser = "MP4", _mp4
    elif head.startswith(_EBML):
        name, parser = "Matroska", _matroska
    elif head[:4] == b"RIFF" and head[8:] == b"AVI ":
        name, parser = "AVI", _avi
    elif head.startswith(b"DKIF"):
        return "IVF", [Track("video", _text(head[8:]))]
    else:
        return "", []
    try:
        return name, list(parser(read, size))
    except (EOFError, IndexError, KeyError, ValueError, struct.error):
        return name, []


def _text(codec: bytes) -> str:
    return codec.rstrip(b"\0").decode("latin-1").strip().lower()


def _content(read: Read, element: _Element) -> bytes:
    _, start, end = element
    return read(start, min(end - start, _MOST_BYTES))


def _first_of_kind(elements: Iterator[_Element], kind: bytes) -> _Element:
    """Returns the first element of a kind; raises EOFError if it is missing."""
    for element in elements:
        if element[0] == kind:
            return element
    raise EOFError


# MP4


def _boxes(read: Read, start: int, end: int) -> Iterator[_Element]:
    """Yields the boxes between two offsets of an MP4."""
    for _ in range(_MOST):
        if start + 8 > end:
            return
        head = read(start, 16)
        size, kind = struct.unpack_from(">I4s", head)
        content = start + 8
        if size == 1:
            size, content = struct.unpack_from(">Q", head, 8)[0], start + 16
        following = end if size == 0 else start + size
        if following < content:
            return
        yield kind, content, min(following, end)
        start = following


def _box(read: Read, parent: _Element, *kinds: bytes) -> _Element:
    """Returns the first box in nested boxes, given their kinds from the outermost to the box."""
    for kind in kinds:
        parent = _first_of_kind(_boxes(read, *parent[1:]), kind)
    return parent


def _mp4(read: Read, size: int) -> Iterator[Track]:
    movie = _first_of_kind(_boxes(read, 0, size), b"moov")
    header = _content(read, _box(read, movie, b"mvhd"))
    of_movie = _matrix(header, 48 if header[0] == 1 else 36)  # version 1 has 64-bit times
    for box in _boxes(read, *movie[1:]):
        if box[0] != b"trak":
            continue
        try:
            header = _content(read, _box(read, box, b"tkhd"))
            matrix = _product(_matrix(header, 52 if header[0] == 1 else 40), of_movie)
            kind = _content(read, _box(read, box, b"mdia", b"hdlr"))[8:12]
            table = _content(read, _box(read, box, b"mdia", b"minf", b"stbl", b"stsd"))
        except EOFError:  # a track without samples
            continue
        codec = _sample_codec(table[8:])
        if kind == b"vide":
            yield Track("video", codec, _turn(matrix), bool(header[3] & 1))
        elif kind == b"soun":
            yield Track("sound", codec)


def _matrix(header: bytes, at: int) -> Matrix:
    """Returns the part of a 3x3 matrix that rotates and mirrors."""
    a, b, _, c, d = struct.unpack_from(">5i", header, at)
    return a, b, c, d


def _product(first: Matrix, second: Matrix) -> Matrix:
    a, b, c, d = first
    e, f, g, h = second
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


def _turn(matrix: Matrix) -> str:
    """Returns how a matrix turns frames; "" if it does not, or has no inverse."""
    a, b, c, d = matrix
    determinant = a * d - b * c
    angle = round(math.degrees(math.atan2(b, a))) % 360
    if determinant < 0:
        return "mirrored"
    return f"rotated by {angle} degrees clockwise" if determinant and angle else ""


def _sample_codec(entry: bytes) -> str:
    """Returns the codec of a sample description, such as "avc1" or "mp4v.20".

    The formats "mp4v" and "mp4a" have several codecs, with numbers in a descriptor.
    """
    codec = _text(entry[4:8])
    entry = entry[: int.from_bytes(entry[:4], "big")]
    at = entry.find(b"esds") + 8  # the kind of the box, a version and flags
    if not codec.startswith("mp4") or at < 8:
        return codec
    at = _descriptor(entry, at)  # of the stream: a number, and flags of optional parts
    flags = entry[at + 2]
    at += 3 + (2 if flags & 0x80 else 0) + (2 if flags & 0x20 else 0)
    at += 1 + entry[at] if flags & 0x40 else 0
    return f"{codec}.{entry[_descriptor(entry, at)]:02x}"


def _descriptor(entry: bytes, at: int) -> int:
    """Returns the offset of the content of an MPEG-4 descriptor, after its tag and length."""
    at += 1
    while entry[at] & 0x80:
        at += 1
    return at + 1


# Matroska


def _elements(read: Read, start: int, end: int) -> Iterator[_Element]:
    """Yields the elements between two offsets of a Matroska file."""
    for _ in range(_MOST):
        if start >= end:
            return
        head = read(start, 12)
        length = 9 - head[0].bit_length()  # bytes of the kind
        first = head[length]
        count = 9 - first.bit_length()  # bytes of the size
        if not (first and length <= 4) or len(head) < length + count:
            raise EOFError
        size = int.from_bytes(head[length : length + count], "big") - (1 << 7 * count)
        content = start + length + count
        is_open = size == (1 << 7 * count) - 1  # the size is unknown
        following = end if is_open else content + size
        yield head[:length], content, min(following, end)
        start = following


def _matroska(read: Read, size: int) -> Iterator[Track]:
    segment = _first_of_kind(_elements(read, 0, size), _SEGMENT)
    tracks = _first_of_kind(_elements(read, *segment[1:]), _TRACKS)
    for track in _elements(read, *tracks[1:]):
        if track[0] != _TRACK:
            continue
        parts = {part[0]: part for part in _elements(read, *track[1:])}
        values = {
            kind: _content(read, parts[kind])
            for kind in (_TYPE, _CODEC, _PRIVATE, _DEFAULT)
            if kind in parts
        }
        codec = _text(values.get(_CODEC, b""))
        if codec in ("v_ms/vfw/fourcc", "a_ms/acm"):  # with a header of AVI
            codec = _avi_codec(codec[0] == "v", values[_PRIVATE])
        elif codec == "v_quicktime":
            codec = _text(values[_PRIVATE][4:8])
        kind = int.from_bytes(values[_TYPE], "big")
        if kind == 1:
            enabled = values.get(_DEFAULT, b"\1") != b"\0"
            yield Track("video", codec, _turn(_projection(read, parts)), enabled)
        elif kind == 2:
            yield Track("sound", codec)


def _projection(read: Read, parts: dict[bytes, _Element]) -> Matrix:
    """Returns the matrix of a video track's projection, which has angles in degrees."""
    try:
        video = _elements(read, *parts[_VIDEO][1:])
        projection = list(_elements(read, *_first_of_kind(video, _PROJECTION)[1:]))
    except (EOFError, KeyError):
        return _IDENTITY
    values = {kind: _content(read, (kind, start, end)) for kind, start, end in projection}
    yaw, pitch, roll = (_float(values.get(kind, b"")) for kind in _ANGLES)
    if pitch or abs(yaw) not in (0, 180) or any(values.get(_PROJECTION_TYPE, b"")):
        return _IDENTITY  # of a panorama
    cos, sin = math.cos(math.radians(roll)), -math.sin(math.radians(roll))  # counterclockwise
    mirrors = -1 if yaw else 1
    return mirrors * cos, mirrors * sin, -sin, cos


def _float(data: bytes) -> float:
    form = {4: ">f", 8: ">d"}.get(len(data))
    return float(struct.unpack(form, data)[0]) if form else 0.0


# AVI


def _chunks(read: Read, start: int, end: int) -> Iterator[_Element]:
    """Yields the chunks between two offsets of an AVI; the kind of a list is its type."""
    for _ in range(_MOST):
        if start + 8 > end:
            return
        kind, size, type_of_list = struct.unpack("<4sI4s", read(start, 12).ljust(12, b"\0"))
        following = start + 8 + size + size % 2
        if kind == b"LIST":
            yield type_of_list, start + 12, min(following, end)
        else:
            yield kind, start + 8, min(following, end)
        start = following


def _avi(read: Read, size: int) -> Iterator[Track]:
    header = _first_of_kind(_chunks(read, 12, size), b"hdrl")
    for stream in _chunks(read, *header[1:]):
        if stream[0] != b"strl":
            continue
        begin, form = itertools.islice(_chunks(read, *stream[1:]), 2)  # strh, strf
        kind = _content(read, begin)[:4]
        if kind in (b"vids", b"auds"):
            is_video = kind == b"vids"
            codec = _avi_codec(is_video, _content(read, form))
            yield Track("video" if is_video else "sound", codec)


def _avi_codec(is_video: bool, form: bytes) -> str:
    """Returns the codec in a stream's format: its four characters, or ".." and a sound's number."""
    if is_video:
        return _text(form[16:20]) or "raw"
    return f"..{int.from_bytes(form[:2], 'little'):04x}"
