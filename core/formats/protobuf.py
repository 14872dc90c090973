"""The wire format of protobuf, which DALI uses for graphs and checkpoints.

DALI does not expose its messages in Python, and does not depend on google.protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field of a protobuf message (protobuf.dev, 'Encoding').

    Raises:
        ValueError: If the bytes are not a protobuf message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while shift < 70:  # varints have at most 10 bytes
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        raise ValueError(f"not a protobuf message: a number of 11 bytes before byte {at}")

    def take(count: int) -> bytes:
        nonlocal at
        piece = data[at : at + count]
        if len(piece) < count:
            raise IndexError
        at += count
        return piece

    try:
        while at < len(data):
            key = varint()
            kind = key & 7
            if kind == 0:
                yield key >> 3, varint()
            elif kind in (1, 5):
                yield key >> 3, take(8 if kind == 1 else 4)
            elif kind == 2:
                yield key >> 3, take(varint())
            else:
                raise ValueError(f"not a protobuf message: wire type {kind} at byte {at}")
    except IndexError:
        raise ValueError("not a protobuf message: it ends inside a field") from None


def message(numbered: Iterable[tuple[int, int | bytes]]) -> bytes:
    """Encodes numbered fields, each a varint or bytes, as a protobuf message."""

    def varint(value: int) -> bytes:
        digits = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
        return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])

    data = b""
    for number, value in numbered:
        if isinstance(value, bytes):
            data += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            data += varint(number << 3) + varint(value)
    return data
