"""Identities of sources: digests that are equal for equal records, wherever they are stored."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..errors import StateError
from ..formats.spread import spread
from ..messages.printable import printable_repr, printable_text
from ..messages.redacted_errors import redacted_error
from ..random.hashing import fold
from ..state.envelope import digest
from .source import (
    Source,
    announce,
    mixture_of,
    range_bytes,
    read_ahead_of,
    read_records,
    record_count,
)

_MOST_RECORDS = 64
_MOST_REPEATED = 4
_MOST_BYTES = 1 << 16  # of each file, which enter the digest


def identity_of(
    source: Source,
    *parts: Any,
    without: Collection[str] = (),
    reads: bool = True,
    skips: bool = False,
) -> str:
    """Returns a digest of a source's number of records, kinds of fields, and 64 records.

    Args:
        source: The source.
        *parts: Further values that determine the records, e.g. names and sizes of files, as bytes,
            arrays or JSON values.
        without: The fields that are excluded from the digest, such as names with a path.
        reads: Whether to read the 64 records; False if ``parts`` include a digest of them.
        skips: Whether to leave out records that can't be read.

    Returns:
        32 hexadecimal digits.

    Raises:
        StateError: If one of the 64 records can't be read, unless ``skips`` is True.
    """
    names = sorted(source.fields.keys() - set(without))
    kinds = [(name, str(source.fields[name].dtype), source.fields[name].ndim) for name in names]
    values = [len(source), kinds, *parts]
    indices = spread(len(source), _MOST_RECORDS if reads else 0)
    leases = []
    if 0 < range_bytes(source, indices, names) <= read_ahead_of(source):
        leases = announce(source, indices, names, indices, collections.deque())
    for index in indices.tolist():
        try:
            values += _values(source, index, names)
        except StateError:
            if not skips:
                raise
            values.append("unreadable")
    del leases  # until here, they kept the bytes of remote records, which were requested together
    return digest(*map(bytes_of, values), length=32)


def compared_identity(source: Source) -> str:
    """Returns a digest that is equal for equal records, to compare the sources of processes.

    It exists for every source: if a record can't be read, or the source has no identity, it is a
    digest of the records that can be read.
    """
    try:
        return digest(*map(str.encode, identity_lines(source)), length=16)
    except StateError:
        return identity_of(source, "some records can't be read", skips=True)[:16]


def identity_lines(source: Source) -> list[str]:
    """Returns texts that identify all records of a source, also of the later parts of a mixture.

    Raises:
        StateError: If the identity can't be computed.
    """
    mixture = mixture_state_of(source)
    return [stated_identity(source), *([] if mixture is None else mixture.lines)]


def mixture_state_of(source: Source) -> Any:
    """Returns the `MixtureState` of a mixture, for a state; None for other sources.

    Raises:
        StateError: If the identity of a source can't be computed.
    """
    mixture = mixture_of(source)
    if mixture is None:
        return None
    planned_state = getattr(source, "mixture_state", None)  # of a `PlannedSource`
    return mixture._state if planned_state is None else planned_state(mixture._state)


def stated_identity(source: Source) -> str:
    """Returns the identity of a source, for a state.

    Raises:
        StateError: If the source raises an error, or its identity is not a non-empty string.
    """
    name = type(source).__name__
    try:
        identity = source.identity()
    except StateError:
        raise
    except Exception as error:  # of a user's source; StopIteration would end the caller's loop
        raise StateError(
            f"{name}.identity() failed, but states require it: {error!r}"
        ) from redacted_error(error)
    if not isinstance(identity, str) or not identity:
        raise StateError(
            f"{name}.identity() returned {printable_repr(identity, 60)}. It must return a string "
            "that identifies the records, such as a name with a version"
        )
    return identity


def changing_record(source: Source) -> str:
    """Returns a description of a record that changes when it is read again, or "".

    Reads four records twice, unless the package itself reads the records from files or arrays. Such
    a change shows that ``__getitem__`` or ``read`` depends on random numbers, time or earlier
    calls, so that batches can't be restored.
    """
    if getattr(source, "_gives_new_arrays", False):
        return ""
    names = sorted(source.fields)
    for index in spread(record_count(source), _MOST_REPEATED).tolist():
        try:
            first, second = ([*map(bytes_of, _values(source, index, names))] for _ in range(2))
        except StateError:  # the batch of an unreadable record raises its error
            continue
        for name, value, again in zip(names, first, second):
            if value != again:
                return f"{name!r} of {printable_text(source.name(index))}"
    return ""


def _values(source: Source, index: int, names: Sequence[str]) -> list[Any]:
    """Returns the values of a record; for a path, the size and the first 64 kB of its file.

    Raises:
        StateError: If the record can't be read.
    """
    try:
        indices = np.array([index])
        values, errors = read_records(source, indices, names, fold(0, 0, indices))
        if errors:
            raise errors[0]
        return [
            _head(bytes(values[name][0])) if source.fields[name].is_path else values[name][0]
            for name in names
        ]
    except Exception as error:  # any error of a user's source, including StopIteration
        raise StateError(
            f"{printable_text(source.name(index))} can't be read, but states contain a digest of "
            f"it. Repair it, or pass identity='...', a name of the data, to the source. {error!r}"
        ) from redacted_error(error)


def _head(path: bytes) -> bytes:
    # Without O_NONBLOCK, opening a FIFO would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        return b"%d " % os.fstat(file.fileno()).st_size + (file.read(_MOST_BYTES) or b"")


def bytes_of(value: Any) -> bytes:
    """Returns bytes that represent a value of a record; they are equal for equal values."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if isinstance(value, bytes):
        return value
    return json.dumps(value, sort_keys=True, default=_jsonable).encode()


def _jsonable(value: Any) -> Any:
    """Returns a JSON value for a value that JSON lacks.

    For other types than those of NumPy, bytes and sets, returns the name of the type, since a repr
    may contain an address.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return [value.dtype.str, value.shape, value.tolist()]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(item, sort_keys=True, default=_jsonable) for item in value)
    return type(value).__name__
