"""Identities: digests that are alike where the records are alike, wherever they lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from .order import Indices
from .source import Source

_MOST_RECORDS = 64
_MOST_BYTES = 1 << 16  # of each file


def spread(count: int, most: int = _MOST_RECORDS) -> Indices:
    """Evenly spread numbers below a count: at most so many, the first and the last among them."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.int64) * (count - 1) // max(1, chosen - 1)


def identity_of(source: Source, *parts: Any) -> str:
    """A digest of the number and the kinds of a source's records, and of the bytes of 64.

    Args:
        source: The source.
        *parts: What else the records depend on: names and sizes of files e.g.; bytes, arrays, or
            what JSON takes.

    Returns:
        32 hexadecimal digits.
    """
    names = sorted(source.fields)
    digest = hashlib.sha256()
    kinds = [(name, str(source.fields[name].dtype), source.fields[name].ndim) for name in names]
    for piece in _pieces((len(source), kinds, *parts)):
        digest.update(piece)
    for index in spread(len(source)).tolist():
        values = source.read(np.array([index]), names)
        for name in names:
            value = values[name][0]
            if source.fields[name].is_path:
                value = _head(bytes(value))
            for piece in _pieces([value]):
                digest.update(piece)
    return digest.hexdigest()[:32]


def _head(path: bytes) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return b"%d " % os.fstat(file.fileno()).st_size + (file.read(_MOST_BYTES) or b"")


def _pieces(values: Iterable[Any]) -> Iterable[bytes]:
    """The bytes of values, each behind its length."""
    for value in values:
        if isinstance(value, (np.ndarray, np.generic)):
            piece = f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
        elif isinstance(value, bytes):
            piece = value
        else:
            piece = json.dumps(value, sort_keys=True, default=_type_name).encode()
        yield b"%d " % len(piece)
        yield piece


def _type_name(value: Any) -> str:
    """What stands for a value that JSON has no text for: its repr may be an address."""
    return type(value).__name__
