"""Locates the values of a tf.train.Example's features, without TensorFlow.

Images and other long values, which are most of a record, are not read.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from . import protobuf
from .buffered_reader import BufferedReader

# The key of field 1 with the wire type of bytes; largest number of bytes of a key and a size.
_ITEM, _ITEM_HEAD = 10, 11
BYTES, FLOATS, INTS = 1, 2, 3  # kinds of a Feature; equal to the field numbers in its message


@dataclasses.dataclass
class Feature:
    """The locations of the values of a record's feature in a file.

    Attributes:
        kind: BYTES, FLOATS or INTS; 0 if the feature has no value.
        ranges: Offset and size of each byte string; for packed numbers, of each packed list.
        loose: For numbers that are not packed, the offset of each float, or the unsigned value of
            each varint.
        count: The number of values if an index contains it, else None.
    """

    kind: int
    ranges: list[tuple[int, int]]
    loose: list[int]
    count: int | None = None


def features(
    take: BufferedReader, at: int, end: int, names: Collection[bytes] | None
) -> dict[bytes, Feature]:
    """Returns the located features of an Example, or of a SequenceExample's context, by name.

    Args:
        take: Reads the file.
        at: Offset of the message.
        end: End offset of the message.
        names: Names of the features; None: all.

    Raises:
        ValueError: If the message is not an Example.
    """
    return dict(located_features(take, at, end, names))


def located_features(
    take: BufferedReader, at: int, end: int, names: Collection[bytes] | None
) -> Iterator[tuple[bytes, Feature]]:
    """Yields the name and the location of each feature, in the order of the file; see `features`.

    If a name is yielded repeatedly, its last feature counts.
    """
    for number, kind, start, stop in protobuf.located_fields(take, at, end):
        if number != 1 or kind != 2:
            continue
        for entry, kind, begin, close in protobuf.located_fields(take, start, stop):
            if entry != 1 or kind != 2:
                continue
            name, value = b"", None
            for part, _, a, b in protobuf.located_fields(take, begin, close):
                if part == 1:
                    name = take(a, b - a)
                elif part == 2:
                    value = a, b
            if names is None or name in names:
                yield name, _feature(take, *value) if value else Feature(0, [], [])


def _feature(take: BufferedReader, at: int, end: int) -> Feature:
    """Returns the kind and the locations of the values of a Feature message.

    Args:
        take: Reads the file.
        at: Offset of the message.
        end: End offset of the message.
    """
    feature = Feature(0, [], [])
    for number, _, start, stop in protobuf.located_fields(take, at, end):
        feature.kind = number
        if number == BYTES:
            start = _add_items(feature.ranges, take, start, stop)
        for item, kind, a, b in protobuf.located_fields(take, start, stop):
            if item != 1:
                continue
            if kind == 2:
                feature.ranges.append((a, b - a))
            else:
                feature.loose.append(a)
    return feature


def _add_items(ranges: list[tuple[int, int]], take: BufferedReader, at: int, end: int) -> int:
    """Locates the byte strings of a BytesList, which may be thousands of images.

    Does the same as `protobuf.located_fields`, several times as fast.

    Args:
        ranges: Receives the offset and the size of each byte string.
        take: Reads the file.
        at: Offset of the message.
        end: End offset of the message.

    Returns:
        The offset of the first field that is not a byte string, or ``end``.
    """
    data, start, last = b"", at, -1
    while at < end:
        begin = at - start
        if begin > last:
            data, start = take.buffered(at, _ITEM_HEAD)
            begin, last = at - start, len(data) - _ITEM_HEAD
            if begin >= len(data):  # the file has become shorter
                break
        if data[begin] != _ITEM:
            break
        size, begin = protobuf.varint(data, begin + 1)
        first = start + begin
        if first + size > end:
            break
        ranges.append((first, size))
        at = first + size
    return at


def numbers(take: BufferedReader, feature: Feature) -> list[float]:
    """Returns the numbers of a short list of floats, or of signed integers of 64 bits."""
    values: list[float] = []
    if feature.kind == FLOATS:
        for at, size in feature.ranges:
            values += struct.unpack(f"<{size // 4}f", take(at, size // 4 * 4))
        return values + [struct.unpack("<f", take(at, 4))[0] for at in feature.loose]
    wires = list(feature.loose)
    for at, size in feature.ranges:
        data, begin = take(at, size), 0
        while begin < size:
            value, begin = protobuf.varint(data, begin)
            wires.append(value)
    # Two's complement. As in protobuf, only the lowest 64 bits of a damaged number are used.
    return [((wire + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63) for wire in wires]


def floats(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns packed floats as an aligned array, float32 [numbers]."""
    return np.require(data[: len(data) // 4 * 4].view("<f4"), requirements="A")


def integers(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns packed varints, integers of 64 bits in two's complement, as int64 [numbers].

    Raises:
        ValueError: If the last varint is incomplete, or a varint has more than ten bytes.
    """
    if not (data > 127).any():  # each number has one byte
        return data.astype(np.int64)
    ends = np.flatnonzero(data < 128)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a list of integers is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    places = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
    if places.max() > 9:
        raise ValueError("an integer has more than ten bytes")
    digits = (data & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(digits, starts).view(np.int64)
