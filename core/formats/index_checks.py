"""Validates indexes of records, since a file in the cache may be damaged or forged.

An index of records contains ``start`` (the offset of each record in its file), and for each field
either ``NAME.value``, or ``NAME.offset`` and ``NAME.size``. An index of TFRecords also contains
``damaged``: whether the checksum of each record is wrong. An index of tars contains
``NAME.damaged`` for numbers: whether the member of each sample is not an integer. If a field is one
of several values of a TFRecord's feature, ``NAME.count`` is the number of values of each record.

Its ``about`` contains the ``names`` and ``sizes`` of the files; ``first``, the number of records
before each file, and in total; and ``columns``, a digest of the values and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .byte_files import within
from .index import Index

# Ranges of larger indexes are not checked here. `ByteFiles.read` checks the ranges that it reads.
MOST_ROWS = 1 << 22
# Allowed kinds of dtypes, by the last part of the name of an array.
_KINDS = {
    "offset": "i",
    "size": "i",
    "start": "i",
    "value": "iuf",
    "damaged": "b",
    "count": "i",
}


def is_valid(index: Index, columns: Collection[str], about: Mapping[str, type]) -> bool:
    """Returns whether an index has the expected content, and its ranges lie within the files.

    The ranges are only checked if the index has at most `MOST_ROWS` records.

    Args:
        index: The index. ``index.about["stamps"]`` must be the stamps of the files.
        columns: Names of the expected arrays.
        about: Types of additional entries in ``index.about``; the items of a list are strings.
    """
    try:
        return about_is_valid(index, about) and _arrays_are_valid(index, columns)
    except (ValueError, TypeError, LookupError, OverflowError):
        return False


def about_is_valid(index: Index, types: Mapping[str, type]) -> bool:
    """Returns whether ``index.about`` has the expected content.

    Args:
        index: The index.
        types: Types of additional entries; the items of a list are strings.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: If an entry is missing, or has another
            type.
    """
    about = index.about
    first, sizes, stamps = about["first"], about["sizes"], about["stamps"]
    numbers = [*first, *sizes]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        return False
    if [stamp[0] for stamp in stamps] != sizes or first[0] or first != sorted(first):
        return False
    if len(first) != len(stamps) + 1 or len(about["names"]) != len(stamps):
        return False
    lists = [about["names"], *(about[name] for name, kind in types.items() if kind is list)]
    texts = all(isinstance(text, str) for values in lists for text in values)
    kinds = all(type(about[name]) is kind for name, kind in types.items())
    return (
        texts and kinds and isinstance(about["columns"], str) and isinstance(about["samples"], str)
    )


def _arrays_are_valid(index: Index, columns: Collection[str]) -> bool:
    """Returns whether the arrays have the expected names, dtypes and lengths, and valid ranges.

    Args:
        index: The index.
        columns: Names of the expected arrays.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: If the arrays are damaged.
    """
    arrays, first = index.arrays, index.about["first"]
    if set(columns) != set(arrays):
        return False
    for name, array in arrays.items():
        if array.shape != (first[-1],) or array.dtype.kind not in _KINDS[name.rpartition(".")[2]]:
            return False
    if first[-1] > MOST_ROWS:
        return True
    limits = np.repeat(np.array(index.about["sizes"], np.int64), np.diff(first))
    ranges = [(arrays["start"], np.zeros(1, np.int64))]
    ranges += [
        (array, arrays[name.removesuffix("offset") + "size"])
        for name, array in arrays.items()
        if name.endswith(".offset")
    ]
    return all(bool(within(offsets, sizes, limits).all()) for offsets, sizes in ranges)


def column_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Returns a digest of the values and sizes of all records, independent of their offsets."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        if name.endswith((".value", ".size")):
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
