"""Writes tf.train.Example messages and TFRecord records, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import example
from .protobuf import message, varint_bytes
from .tfrecord_headers import masked_crc


def example_message(features: Mapping[str, Sequence[bytes] | NDArray[Any]]) -> bytes:
    """Returns a serialized tf.train.Example.

    Features are sorted by name, so that equal features give equal messages.

    Args:
        features: Maps the name of each feature to byte strings, or to an array of floats, integers
            or booleans. Arrays are flattened, and floats are stored with 32 bits.
    """
    entries = [
        (1, message([(1, name.encode()), (2, _feature(features[name]))]))
        for name in sorted(features)
    ]
    return message([(1, message(entries))])


def _feature(values: Sequence[bytes] | NDArray[Any]) -> bytes:
    """Returns a serialized tf.train.Feature; see `example_message`."""
    if not isinstance(values, np.ndarray):
        return message([(example.BYTES, message((1, value) for value in values))])
    if values.dtype.kind == "f":
        return message([(example.FLOATS, message([(1, values.astype("<f4").tobytes())]))])
    return message([(example.INTS, message([(1, _packed(values.ravel()))]))])


def _packed(values: NDArray[Any]) -> bytes:
    """Returns integers as packed varints of 64 bits in two's complement."""
    if not len(values) or (values.min() >= 0 and values.max() < 128):
        return values.astype(np.uint8).tobytes()
    mask = (1 << 64) - 1
    return b"".join(varint_bytes(value & mask) for value in values.tolist())


def record_parts(data: bytes) -> Iterator[bytes]:
    """Yields the parts of a TFRecord record, whose concatenation is the record.

    They are the length and the checksum of the length, the data, and the checksum of the data.
    """
    size = len(data).to_bytes(8, "little")
    yield size + masked_crc(size).to_bytes(4, "little")
    yield data
    yield masked_crc(data).to_bytes(4, "little")
