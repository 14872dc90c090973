"""Headers of encoded images: EXIF orientation, and types that DALI's decoders can't handle.

nvImageCodec, DALI's decoding library, parses the headers. These functions read what its Python API
omits, in the same way as its parser does. They also reject images that the parser accepts but the
decoders decode to wrong pixels or crash on.
"""

from __future__ import annotations

import functools
import re
import struct
import zlib
from collections.abc import Callable, Iterator

from . import jpeg2000_headers
from .header_values import Unsupported, unpack

TURNED = (5, 6, 7, 8)  # EXIF orientations that swap height and width

_EXIF = b"Exif\0\0"
_ORIENTATION = 0x112
_INVALID = 9  # an orientation that means the same as 1
# Sizes in bytes of the EXIF tags that nvImageCodec reads. Texts have their own length.
_TEXTS = (0x10E, 0x10F, 0x110, 0x131, 0x132, 0x8298)
_RATIONALS = {0x11A: 8, 0x11B: 8, 0x13E: 16, 0x13F: 48, 0x211: 24, 0x214: 48}

_NO_SEGMENT = frozenset((0x01, *range(0xD0, 0xD9)))  # JPEG markers without a length
_NO_FRAME = frozenset((0xC4, 0xC8, 0xCC))  # tables, whose markers lie within the range of frames
# JPEG markers of frame headers, which have the size and the channels.
_FRAMES = frozenset(range(0xC0, 0xD0)) - _NO_FRAME
# JPEG markers of tables, application data and comments, but not of EXIF data.
_SKIPPED = _NO_FRAME | {0xDB, 0xDD, 0xE0, *range(0xE2, 0xF0), 0xFE}
_JPEG_LS = 0xF7
_SEGMENT = struct.Struct(">BBH").unpack_from  # 0xFF, the marker and the length

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_SAMPLES, _PLANAR, _COLOR_MAP, _SAMPLE_FORMAT = 277, 284, 320, 339
_PALETTE = 3  # a TIFF's photometric interpretation, and a PNG's color type
_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, 50000)
_COMPRESSION_NAMES = {
    **{number: "JPEG 2000" for number in (33003, 33004, 33005, 34712)},
    34887: "LERC",
    34892: "lossy JPEG",
    34925: "LZMA",
    34933: "PNG",
    34934: "JPEG XR",
    50001: "WebP",
    **{number: "JPEG XL" for number in (50002, 52546)},
}
_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}  # TIFF's unsigned integers
_SAMPLE_KINDS = {2: "int", 3: "float", 5: "complex int", 6: "complex"}
_REQUIRED = {_WIDTH: "ImageWidth", _HEIGHT: "ImageLength", _SAMPLES: "SamplesPerPixel"}

_TOKEN = rb"(?:\s+(?:#[^\n]*\n\s*)*)(\d+)"
_PNM = re.compile(rb"P[56]" + 3 * _TOKEN)


def codec_of(data: memoryview) -> str:
    """Returns nvImageCodec's name for the codec of an image; "" if it is unknown."""
    start = bytes(data[:12])
    for magic, codec in _MAGIC:
        if start.startswith(magic):
            return codec
    return "webp" if start[:4] == b"RIFF" and start[8:] == b"WEBP" else ""


def foreign_kind(data: memoryview) -> str:
    """Returns the name of a common file format that DALI doesn't decode; "" for other formats."""
    start = bytes(data[:12])
    if start[4:8] == b"ftyp":
        return "HEIC" if start[8:11] in (b"hei", b"mif", b"msf") else _FTYP.get(start[8:], "MP4")
    return next((name for magic, name in _FOREIGN if start.startswith(magic)), "")


def orientation_of(data: memoryview, codec: str) -> int:
    """Returns the EXIF orientation of an image, as nvImageCodec's parser reads it.

    Args:
        data: The encoded image.
        codec: Its codec.

    Raises:
        Unsupported: If DALI's decoders would crash, or decode the image to wrong pixels.
        EOFError, IndexError, struct.error: If the header is damaged or cut off.
    """
    return _ORIENTATIONS[codec](data)


def kind_of(data: memoryview, codec: str) -> str:
    """Returns the type of an image that nvImageCodec's parser rejected, for errors.

    Returns "" if the image is damaged, or of a type that the parser accepts.

    Args:
        data: The encoded image.
        codec: Its codec.
    """
    try:
        return _KINDS[codec](data)
    except (EOFError, IndexError, struct.error):
        return ""


def has_colored_palette(data: memoryview, codec: str) -> bool:
    """Returns whether an image's pixels are indices of a palette that isn't a scale of grays.

    Args:
        data: An image that nvImageCodec's parser accepts.
        codec: Its codec.
    """
    return codec in _PALETTES and _PALETTES[codec](data)


def _is_colored(palette: bytes, bits: int) -> bool:
    """Returns whether a palette, as RGB, isn't a scale of grays for pixels of some bits."""
    count = len(palette) // 3
    return palette not in (_grays(count, 1), _grays(count, 255 // (2**bits - 1)))


@functools.cache
def _grays(count: int, step: int) -> bytes:
    """Returns a palette of grays, as RGB, with the levels 0, step, 2 * step, ..."""
    return bytes(min(step * index, 255) for index in range(count) for _ in range(3))


def _exif_orientation(exif: memoryview) -> tuple[int, bool]:
    """Returns the orientation in EXIF data, and whether the data is complete.

    Reads the data as OpenCV's EXIF reader does, a copy of which is in nvImageCodec. The reader
    stops at incomplete data, and some of its callers use the orientation before that place.

    Returns:
        The orientation, or 0 if there is none; and whether the data is complete.
    """
    order = "<" if bytes(exif[:2]) == b"II" else ">"
    orientation = 0
    try:
        if unpack(order + "H", exif, 2) != 42:
            return 0, False
        start = unpack(order + "I", exif, 4)
        for entry in range(start + 2, start + 2 + 12 * unpack(order + "H", exif, start), 12):
            tag = unpack(order + "H", exif, entry)
            if tag == _ORIENTATION:
                value = unpack(order + "H", exif, entry + 8)
                orientation = orientation or value or _INVALID  # 0 is an orientation, too
            elif tag in _TEXTS:
                size = unpack(order + "I", exif, entry + 4)
                at = unpack(order + "I", exif, entry + 8) if size > 4 else 8
                if at + size > len(exif):
                    return orientation, False
            elif tag in _RATIONALS and (
                unpack(order + "I", exif, entry + 8) + _RATIONALS[tag] > len(exif)
            ):
                return orientation, False
    except (EOFError, struct.error):
        return orientation, False
    return orientation, True


def _jpeg_segments(data: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yields the marker, the offset of the data and the length of each segment up to the pixels.

    Segments of `_SKIPPED` are left out. The length includes the two bytes before the data that
    contain it.
    """
    at = 2
    while True:
        first, marker, length = _SEGMENT(data, at)
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in _NO_SEGMENT or (first < 0xFF and marker != 0xDA):
            raise EOFError
        if marker not in _SKIPPED:
            yield marker, at + 4, length
        if marker == 0xDA:
            return
        at += 2 + length


def jpeg_orientation(data: memoryview) -> tuple[int, int]:
    """Returns the EXIF orientation of a JPEG, and the end offset of its header.

    Returns 0 as the orientation of a JPEG without EXIF data. Raises the errors of `orientation_of`.

    The header ends with the segment before the pixels. nvImageCodec's parser reads no further.
    """
    orientations: list[tuple[int, bool]] = []
    end = 0
    for marker, at, length in _jpeg_segments(data):
        end = at + max(length, 2) - 2  # the bytes of the length belong to the header
        if marker in _FRAMES and data[at] > 16:  # bits
            raise EOFError
        if marker == 0xE1 and data[at : at + 6] == _EXIF:
            if length < 8:  # nvImageCodec's parser subtracts 8 from it
                raise EOFError
            orientations.append(_exif_orientation(data[at + 6 : at + length - 2]))
    # The parser takes the last complete EXIF segment with an orientation. The fallback decoder, for
    # pixels that libjpeg rejects, takes the first segment with an orientation, complete or not. If
    # only the fallback rotates the image, it writes past the end of its memory.
    if not orientations:
        return 0, end
    last = next((value for value, complete in reversed(orientations) if complete and value), 0)
    first = next((value for value, _ in orientations if value), 0)
    if len({_valid(value) for value in (orientations[0][0], first, last)}) > 1:
        if not all(complete for _, complete in orientations):
            raise EOFError
        raise Unsupported("JPEG with two EXIF orientations")
    return last, end


def _jpeg_kind(data: memoryview) -> str:
    for marker, at, _ in _jpeg_segments(data):
        if marker == _JPEG_LS:
            return "JPEG-LS"
        if marker in _FRAMES and data[at + 5] not in (1, 3, 4):
            return f"JPEG with {data[at + 5]} channels"
    return ""


def _valid(orientation: int) -> int:
    """Returns an EXIF orientation; 1, the default, for invalid numbers."""
    return orientation if 1 <= orientation <= 8 else 1


def _png_chunks(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind, e.g. b"IHDR", and the offset and length of the data of each PNG chunk."""
    at, kind = 8, b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, length
        at += 12 + length


def _png(data: memoryview) -> int:
    """Returns the EXIF orientation of a PNG, 0 if it has none; see `orientation_of`."""
    last, values = 0, set()
    for kind, at, length in _png_chunks(data):
        if kind == b"eXIf":
            if at + length > len(data):
                raise EOFError
            orientation, complete = _exif_orientation(data[at : at + length])
            checksum = zlib.crc32(data[at - 4 : at + length])
            last = orientation if complete and orientation else last
            # The decoder also uses incomplete EXIF data, but only with a correct checksum. If only
            # the decoder rotates the image, it writes past the end of its memory.
            values.add(_valid(orientation if complete else 0))
            values.add(_valid(orientation) if checksum == unpack(">I", data, at + length) else 1)
    if len(values) > 1:
        raise Unsupported("PNG with damaged or several EXIF data")
    return last


def _png_palette(data: memoryview) -> bool:
    if data[25] != _PALETTE:  # the color type in the header
        return False
    palettes = ((at, length) for kind, at, length in _png_chunks(data) if kind == b"PLTE")
    at, length = next(palettes, (0, 0))
    return _is_colored(bytes(data[at : at + length]), data[24])


def _png_kind(data: memoryview) -> str:
    return "PNG with Apple's CgBI chunk" if bytes(data[12:16]) == b"CgBI" else ""


def _webp_chunks(data: memoryview, padding: bool) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind, e.g. b"EXIF", and the offset and length of the data of each WebP chunk.

    Args:
        data: The encoded image.
        padding: Whether to skip the padding after chunks of odd length, as the format requires.
            nvImageCodec's parser does not skip it.
    """
    at = 12
    while True:
        kind, length = struct.unpack_from("<4sI", data, at)
        yield kind, at + 8, length
        at += 8 + length + (length % 2 if padding else 0)


def _webp_exif(data: memoryview, padding: bool) -> memoryview:
    """Returns the EXIF data of a WebP; empty if its header does not declare EXIF data.

    Args:
        data: The encoded image.
        padding: See `_webp_chunks`.
    """
    if bytes(data[12:16]) == b"VP8X" and data[20] & 8:
        for kind, at, length in _webp_chunks(data, padding):
            if kind == b"EXIF":
                if at + length > len(data):
                    raise EOFError
                return data[at : at + length]
    return data[:0]


def _webp(data: memoryview) -> int:
    """Returns the EXIF orientation of a WebP, 0 if it has none; see `orientation_of`."""
    try:
        exif = _webp_exif(data, padding=False)
    except (EOFError, struct.error):
        if kind := _webp_kind(data):
            raise Unsupported(kind) from None
        raise
    if (orientation := _exif_orientation(exif)[0]) > 1:
        # The decoder doesn't rotate an image with a truncated chunk.
        file = data[: 8 + unpack("<I", data, 4)]
        end = 12
        for _, at, length in _webp_chunks(file, padding=True):
            end = at + length + length % 2
            if end >= len(file):
                break
        if end > len(data):
            raise EOFError
    return orientation


def _webp_kind(data: memoryview) -> str:
    odd = "WebP with EXIF data after a chunk of odd length"
    return odd if _webp_exif(data, padding=True) else ""


def _tiff_tags(data: memoryview) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the first value of each tag of unsigned integers in a TIFF, and each tag's type.

    Both are dicts by tag.
    """
    order = "<" if data[0] == 0x49 else ">"
    big = data[2] + data[3] == 43
    count_form, form, offset_form = ("Q", "HHQ8s", "Q") if big else ("H", "HHI4s", "I")
    start = unpack(order + offset_form, data, 8 if big else 4)
    count = unpack(order + count_form, data, start)
    start += struct.calcsize(count_form)
    size = struct.calcsize(order + form)
    if start + count * size > len(data):
        raise EOFError
    tags: dict[int, int] = {}
    types: dict[int, int] = {}
    for tag, kind, number, value in struct.iter_unpack(
        order + form, data[start : start + count * size]
    ):
        types[tag] = kind
        # Decoding to types.ANY_DATA would read past the end of the file.
        if tag == _COLOR_MAP and unpack(order + offset_form, value, 0) + 2 * number > len(data):
            raise EOFError
        if kind in _TYPES and number:
            item = order + _TYPES[kind]
            if number * struct.calcsize(item) <= len(value):
                tags[tag] = struct.unpack_from(item, value)[0]
            elif tag in (_BITS, _SAMPLE_FORMAT):
                tags[tag] = unpack(item, data, unpack(order + offset_form, value, 0))
    if len(types) < count:  # the parser and the decoder use different copies of a repeated tag
        raise EOFError
    return tags, types


def _tiff(data: memoryview) -> int:
    """Returns the orientation tag of a TIFF, 1 if it has none; see `orientation_of`."""
    tags, types = _tiff_tags(data)
    compression = tags.get(_COMPRESSION, 1)
    bits, samples = tags.get(_BITS, 1), tags.get(_SAMPLES, 1)
    if compression not in _COMPRESSIONS:  # decoded to black images
        name = _COMPRESSION_NAMES.get(compression, f"method {compression}")
        raise Unsupported(f"TIFF compressed with {name}")
    if tags.get(_PHOTOMETRIC) == _PALETTE:
        if samples != 1 or bits > 8 or _COLOR_MAP not in types:
            raise Unsupported(f"{bits}-bit palette TIFF with {samples} channels")
    elif samples == 2:
        raise Unsupported("gray TIFF with alpha")
    if samples > 1 and tags.get(_PLANAR) == 2 and (samples, bits) != (3, 8):
        raise Unsupported(f"planar {bits}-bit TIFF with {samples} channels")
    return tags.get(_ORIENTATION, 1)


def _tiff_palette(data: memoryview) -> bool:
    return _tiff_tags(data)[0].get(_PHOTOMETRIC) == _PALETTE


def _tiff_kind(data: memoryview) -> str:
    tags, types = _tiff_tags(data)
    bits, kind = tags.get(_BITS, 1), _SAMPLE_KINDS.get(tags.get(_SAMPLE_FORMAT, 1), "")
    if _BITS not in types:
        return "1-bit TIFF"  # the default of the standard
    if kind or bits > 16:
        return f"{bits}-bit {kind} TIFF".replace("  ", " ")
    if missing := [name for tag, name in _REQUIRED.items() if tag not in types]:
        return f"TIFF without {' and '.join(missing)}"
    return "TIFF with tags of unusual types"


def _bmp_palette(data: memoryview) -> bool:
    header = unpack("<I", data, 14)
    bits_at, size = (24, 3) if header == 12 else (28, 4)  # bytes of a color, blue first
    bits = unpack("<H", data, bits_at)
    if not 0 < bits <= 8:
        return False
    colors = bytes(data[14 + header : unpack("<I", data, 10)])  # up to the pixels
    rgb = (colors[at : at + 3][::-1] for at in range(0, len(colors) - 2, size))
    return _is_colored(b"".join(rgb), bits)


def _bmp_kind(data: memoryview) -> str:
    header = unpack("<I", data, 14)
    bits = unpack("<H", data, 24 if header == 12 else 28)
    compression = 0 if header == 12 else unpack("<I", data, 30)
    if header != 12 and header < 40:
        return ""
    return f"{bits}-bit BMP" + (f" of compression {compression}" if compression else "")


def _pnm(data: memoryview) -> int:
    kind = bytes(data[:2])
    if kind in (b"P2", b"P3"):
        raise Unsupported(f"PNM with text ({kind.decode()})")
    header = _PNM.match(data) if kind in (b"P5", b"P6") else None
    # The decoder ignores the maximum, and reads one byte of two-byte samples.
    if header and int(header[3]) not in (255, 65535):
        raise Unsupported(f"PNM with a maximum of {header[3].decode()}")
    return 1


def _pnm_kind(data: memoryview) -> str:
    return "PNM with text (P1)" if bytes(data[:2]) == b"P1" else ""


_MAGIC = (
    (b"\xff\xd8", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    *((magic, "tiff") for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "jpeg2k"),
    (b"\xff\x4f\xff\x51", "jpeg2k"),
    (b"BM", "bmp"),
    *((b"P%d" % number, "pnm") for number in range(1, 7)),
)
_FOREIGN = (
    *((b"GIF8", "GIF"), (b"\0\0\1\0", "ICO"), (b"DDS ", "DDS"), (b"8BPS", "PSD")),
    *((b"qoif", "QOI"), (b"P7\n", "PAM"), (b"PF\n", "PFM"), (b"Pf\n", "PFM")),
    *((b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"v/1\1", "OpenEXR")),
    *((b"#?RADIANCE", "Radiance HDR"), (b"%PDF", "PDF"), (b"%!PS", "PostScript")),
    (b"II\xbc\1", "JPEG XR"),
)
_FTYP = {b"avif": "AVIF", b"avis": "AVIF"}
_ORIENTATIONS: dict[str, Callable[[memoryview], int]] = {
    "jpeg": lambda data: jpeg_orientation(data)[0],
    "png": _png,
    "webp": _webp,
    "tiff": _tiff,
    "jpeg2k": jpeg2000_headers.check,
    "bmp": lambda data: 1,
    "pnm": _pnm,
}
_PALETTES: dict[str, Callable[[memoryview], bool]] = {
    "png": _png_palette,
    "tiff": _tiff_palette,
    "bmp": _bmp_palette,
}
_KINDS: dict[str, Callable[[memoryview], str]] = {
    "jpeg": _jpeg_kind,
    "png": _png_kind,
    "webp": _webp_kind,
    "tiff": _tiff_kind,
    "jpeg2k": jpeg2000_headers.kind_of,
    "bmp": _bmp_kind,
    "pnm": _pnm_kind,
}
