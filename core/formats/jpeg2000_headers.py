"""Headers of JPEG 2000 images.

OpenJPEG decodes them. DALI 2.4 may crash if OpenJPEG rejects the main header of an image, and
nvImageCodec's parser accepts most damaged headers. These functions reject what OpenJPEG rejects.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .header_values import Unsupported, unpack

_CODING_STYLE, _QUANTIZATION, _TILE, _END = 0xFF52, 0xFF5C, 0xFF90, 0xFFD9


def check(data: memoryview) -> int:
    """Checks the headers of a JPEG 2000; returns 1, the orientation of all JPEG 2000 images.

    Args:
        data: The encoded image.

    Raises:
        Unsupported: If DALI's decoders would crash, or decode the image to wrong pixels.
        EOFError, IndexError, struct.error: If the header is damaged or cut off.
    """
    stream = _codestream(data)
    components = _components(stream)
    _check_tiles(stream, _check_main_header(stream, len(components)))
    if len(set(components)) > 1:
        raise Unsupported("JPEG 2000 with channels of different bit depths")
    if (bits := components[0] % 128 + 1) > 16:
        raise Unsupported(f"{bits}-bit JPEG 2000")
    if len(components) == 2:
        raise Unsupported("gray JPEG 2000 with alpha")
    return 1


def kind_of(data: memoryview) -> str:
    """Returns the type of a JPEG 2000 that nvImageCodec's parser rejected, for errors."""
    return f"JPEG 2000 with {len(_components(_codestream(data)))} channels and another color space"


def _codestream(data: memoryview) -> memoryview:
    """Returns the codestream of a JPEG 2000 image, without the boxes of a file.

    Raises:
        EOFError, struct.error: If a box is damaged or cut off.
    """
    if data[0] == 0xFF:
        return data
    at = 0
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + length if length else len(data)
        if end > len(data) or end < at + 8:
            raise EOFError
        if kind == b"jp2c":
            return data[at + 8 : end]
        at = end


def _components(stream: memoryview) -> list[int]:
    """Returns the depth byte of each component (channel): bits - 1, plus 128 if signed."""
    *_, tile_width, tile_height, _, _, count = struct.unpack_from(">8IH", stream, 8)
    sizes = stream[42 : 42 + 3 * count]
    # nvImageCodec's parser divides by these numbers.
    if (
        not count
        or len(sizes) < 3 * count
        or not (tile_width and tile_height and all(sizes[1::3]) and all(sizes[2::3]))
    ):
        raise EOFError
    return list(sizes[::3])


def _check_main_header(stream: memoryview, channels: int) -> int:
    """Checks the main header of a codestream; returns its end offset.

    Args:
        stream: The codestream.
        channels: The number of components.

    Raises:
        Unsupported, EOFError: See `check`.
    """
    at = 2
    markers: set[int] = set()
    while (marker := unpack(">H", stream, at)) != _TILE:
        length = unpack(">H", stream, at + 2)
        segment = stream[at + 4 : at + 2 + length]
        if length < 2 or len(segment) < length - 2 or (marker == 0xFF51) != (at == 2):
            raise EOFError
        if marker in _OTHER_MARKERS:
            raise Unsupported(f"JPEG 2000 with {_OTHER_MARKERS[marker]}")
        if marker not in _MARKERS or not _MARKERS[marker](segment, channels):
            raise EOFError
        markers.add(marker)
        at += 2 + length
    if not markers.issuperset((_CODING_STYLE, _QUANTIZATION)):
        raise EOFError
    return at


def _check_tiles(stream: memoryview, at: int) -> None:
    """Raises EOFError if a tile is damaged or truncated.

    Args:
        stream: The codestream.
        at: The offset of the first tile.
    """
    while at < len(stream) and (marker := unpack(">H", stream, at)) != _END:
        length = unpack(">I", stream, at + 6) or len(stream) - at
        if marker != _TILE or length < 14:
            raise EOFError
        at += length
    if at > len(stream):
        raise EOFError


def _is_style(segment: memoryview, channels: int) -> bool:
    """Returns whether the segment of a default coding style (COD) is valid."""
    flags, _, layers, transform = struct.unpack_from(">BBHB", segment)
    return flags < 8 and layers > 0 and transform < 2 and _is_block_style(segment[5:], flags)


def _is_block_style(style: memoryview, flags: int) -> bool:
    """Returns whether the part of a coding style that components may override is valid."""
    levels, width, height, modes, transform = struct.unpack_from("5B", style)
    precincts = style[5:]
    return (
        (levels <= 32 and width <= 8 and height <= 8 and width + height <= 8)
        and (modes < 128 and transform < 2)
        and len(precincts) == (levels + 1 if flags & 1 else 0)
        and all(size & 15 and size >> 4 for size in precincts[1:])
    )


def _is_quantization(segment: memoryview, channels: int) -> bool:
    kind, steps = segment[0] & 31, len(segment) - 1
    return kind == 0 or (steps == 2 if kind == 1 else steps % 2 == 0)


def _component(segment: memoryview, channels: int) -> tuple[int, memoryview]:
    """Returns the index of the component that a segment describes, and the remaining bytes."""
    size = 1 if channels <= 256 else 2
    return unpack(">B" if size == 1 else ">H", segment, 0), segment[size:]


def _is_component_style(segment: memoryview, channels: int) -> bool:
    component, style = _component(segment, channels)
    return component < channels and _is_block_style(style[1:], style[0])


def _is_component_quantization(segment: memoryview, channels: int) -> bool:
    component, style = _component(segment, channels)
    return component < channels and _is_quantization(style, channels)


def _is_region(segment: memoryview, channels: int) -> bool:
    component, style = _component(segment, channels)
    return component < channels and len(style) == 2


def _is_order(segment: memoryview, channels: int) -> bool:
    return len(segment) > 0 and len(segment) % (7 if channels <= 256 else 9) == 0


# Markers of main headers that OpenJPEG reads, each with the check of its segment.
_MARKERS: dict[int, Callable[[memoryview, int], bool]] = {
    0xFF50: lambda segment, channels: len(segment) >= 4,  # capabilities
    0xFF51: lambda segment, channels: len(segment) == 36 + 3 * channels,  # size
    _CODING_STYLE: _is_style,
    0xFF53: _is_component_style,
    0xFF55: lambda segment, channels: len(segment) >= 2,  # lengths of tiles
    0xFF57: lambda segment, channels: len(segment) >= 1,  # lengths of packets
    _QUANTIZATION: _is_quantization,
    0xFF5D: _is_component_quantization,
    0xFF5E: _is_region,
    0xFF5F: _is_order,
    0xFF63: lambda segment, channels: len(segment) == 4 * channels,  # positions of components
    0xFF64: lambda segment, channels: True,  # a comment
}
_OTHER_MARKERS = {
    0xFF60: "packed packet headers",
    **{marker: "extensions of its part 2" for marker in (0xFF74, 0xFF75, 0xFF77, 0xFF78)},
}
