"""Reads and writes the wire format of protobuf.

DALI's graphs and checkpoints, and records of TensorFlow, are protobuf messages.
DALI does not offer its messages in Python, and does not depend on google.protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

VARINT, BYTES = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of a fixed size
_LONGEST_HEAD = 20  # bytes of two varints
_TOO_LONG = "not a protobuf message: a field ends after its message"


def located_fields(
    take: Callable[[int, int], bytes], at: int, end: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields the locations of a message's fields (protobuf.dev, 'Encoding') without their values.

    Args:
        take: ``take(offset, count)`` returns bytes of the file that contains the message.
        at: Offset of the message.
        end: End offset of the message.

    Yields:
        The number and the wire type of a field, and the start and end offset of its value. For a
        varint, the value itself takes the place of the start offset.

    Raises:
        ValueError: If the bytes are not a protobuf message.
    """
    while at < end:
        number, kind, first, after = _field(take(at, min(_LONGEST_HEAD, end - at)), 0)
        first, at = first if kind == VARINT else at + first, at + after
        if at > end:
            raise ValueError(_TOO_LONG)
        yield number, kind, first, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message in memory.

    The value of a varint is an int; other values are bytes.

    Raises:
        ValueError: If the bytes are not a protobuf message.
    """
    at, end = 0, len(data)
    while at < end:
        number, kind, first, at = _field(data, at)
        if at > end:
            raise ValueError(_TOO_LONG)
        yield number, first if kind == VARINT else data[first:at]


def _field(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Returns the number, the wire type and the location of the field at an offset of a message.

    Returns:
        The number and the wire type of the field, and the start and end offset of its value. For a
        varint, the value itself takes the place of the start offset.

    Raises:
        ValueError: If the bytes are not a protobuf message.
    """
    key, first = varint(data, at)
    kind = key & 7
    if kind == BYTES:
        length, first = varint(data, first)
        return key >> 3, kind, first, first + length
    if kind == VARINT:
        return key >> 3, kind, *varint(data, first)
    if kind in _FIXED:
        return key >> 3, kind, first, first + _FIXED[kind]
    raise ValueError(f"not a protobuf message: it has the wire type {kind}")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the unsigned integer in a varint of at most ten bytes, and the varint's end offset.

    Args:
        data: The bytes.
        at: The offset of the varint.

    Raises:
        ValueError: If the varint is cut off, or has more than ten bytes.
    """
    # Most numbers have one or two bytes. Graphs and data sets of images have millions of them.
    if at + 1 < len(data):
        first, second = data[at], data[at + 1]
        if first < 128:
            return first, at + 1
        if second < 128:
            return first & 127 | second << 7, at + 2
    value = shift = 0
    for place in range(at, min(at + 10, len(data))):
        byte = data[place]
        if byte < 128:
            return value | byte << shift, place + 1
        value |= (byte & 127) << shift
        shift += 7
    raise ValueError("not a protobuf message: a number ends after its message")


def varint_bytes(value: int) -> bytes:
    """Returns a non-negative integer, encoded as a varint."""
    digits = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def message(numbered: Iterable[tuple[int, int | bytes]]) -> bytes:
    """Returns a serialized protobuf message.

    Args:
        numbered: The number and the value of each field. An int is stored as a varint.
    """
    parts: list[bytes] = []
    for number, value in numbered:
        if isinstance(value, bytes):
            parts += varint_bytes(number << 3 | BYTES), varint_bytes(len(value)), value
        else:
            parts += varint_bytes(number << 3), varint_bytes(value)
    return b"".join(parts)
