"""Identities: digests that are alike where the records are alike, wherever they lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import StateError
from ..order.shuffle import Indices
from ..printable import printable
from .source import Source

_MOST_RECORDS = 64
_MOST_BYTES = 1 << 16  # of each file


def spread(count: int, most: int = _MOST_RECORDS) -> Indices:
    """Evenly spread numbers below a count: at most so many, the first and the last among them."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.int64) * (count - 1) // max(1, chosen - 1)


def identity_of(
    source: Source, *parts: Any, without: Collection[str] = (), reads: bool = True
) -> str:
    """A digest of the number and the kinds of a source's records, and of the bytes of 64.

    Args:
        source: The source.
        *parts: What else the records depend on: names and sizes of files e.g.; bytes, arrays, or
            what JSON takes.
        without: Fields that are not part of the digest, like names with a path.
        reads: False if the parts have a digest of the 64 records already.

    Returns:
        32 hexadecimal digits.

    Raises:
        StateError: If one of the 64 can't be read.
    """
    names = sorted(source.fields.keys() - set(without))
    digest = hashlib.sha256()
    kinds = [(name, str(source.fields[name].dtype), source.fields[name].ndim) for name in names]
    for piece in _pieces((len(source), kinds, *parts)):
        digest.update(piece)
    for index in spread(len(source)).tolist() if reads else ():
        for piece in _pieces(_values(source, index, names)):
            digest.update(piece)
    return digest.hexdigest()[:32]


def stated_identity(source: Source) -> str:
    """The identity that a source says, for a state.

    Raises:
        StateError: If it can't say it, or says no text.
    """
    name = type(source).__name__
    try:
        identity = source.identity()
    except StateError:
        raise
    except Exception as error:  # of a user's source; StopIteration would end the caller's loop
        raise StateError(
            f"{name}.identity() failed, without which there is no state: {error!r}"
        ) from error
    if not isinstance(identity, str) or not identity:
        raise StateError(
            f"{name}.identity() gave {identity!r:.60}: it must be a text that says which records "
            "these are, like a name with a version"
        )
    return identity


def _values(source: Source, index: int, names: Sequence[str]) -> list[Any]:
    """The values of a record; of a path, the head of its file."""
    try:
        values = source.read(np.array([index]), names)
        return [
            _head(bytes(values[name][0])) if source.fields[name].is_path else values[name][0]
            for name in names
        ]
    except Exception as error:  # what a user's source raises, StopIteration too
        raise StateError(
            f"{printable(source.name(index))} can't be read, and states have a digest of it: "
            f"repair it, or pass identity='...' to the source, a name of the data. {error!r}"
        ) from error


def _head(path: bytes) -> bytes:
    # A FIFO would block without the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
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
