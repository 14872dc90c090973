"""Packs the records of a batch into one contiguous array, which processes can share.

Grain's worker processes pickle byte strings one by one through a pipe, but return NumPy arrays in
shared memory. Therefore, the worker concatenates the texts, byte strings, numbers and arrays of a
batch into one array, and the receiving process splits the array again.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_OBJECTS, _BYTES, _TEXT, _NUMBERS, _STACKED, _RAGGED = range(6)
_NUMBER_TYPES = {bool: np.bool_, int: np.int64, float: np.float64}
_ALIGNED = 64  # alignment of arrays in bytes
_SMALL = 1 << 16  # bytes; up to this size, a pipe is cheaper than shared memory


class _Laid(NamedTuple):
    """The location of an array within the data of a batch.

    Attributes:
        start: Index of the array's first byte.
        dtype: Dtype of the array.
        shape: Shape of the array.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def view(self, data: np.ndarray) -> np.ndarray:
        """Returns the array as a view of ``data``, the data of the batch (uint8, one dimension)."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return data[self.start : self.start + size].view(self.dtype).reshape(self.shape)


class PackedColumn(NamedTuple):
    """The values of one field in all records of a batch.

    Attributes:
        path: The keys of the field in nested dicts; empty for records that are not dicts.
        kind: Encoding of the values, one of the constants `_OBJECTS` to `_RAGGED`.
        laid: Location of the concatenated or stacked values. For `_OBJECTS`, a tuple of the values
            themselves.
        shapes: Location of the shapes of byte strings, texts and ragged arrays, int64 [records,
            dimensions]; None for the other encodings.
    """

    path: tuple[Any, ...]
    kind: int
    laid: Any
    shapes: _Laid | None

    def values(self, data: np.ndarray) -> list[Any]:
        """Returns the value of each record.

        Arrays are views of ``data``, the data of the batch. Byte strings are read-only memoryviews
        of ``data``.
        """
        if self.kind == _OBJECTS:
            return list(self.laid)
        array = self.laid.view(data)
        if self.kind == _NUMBERS:
            return list(array.tolist())
        if self.shapes is None:
            return list(array)
        shapes = self.shapes.view(data)
        ends = list(itertools.accumulate(shapes.prod(axis=1).tolist(), initial=0))
        bounds = itertools.pairwise(ends)
        if self.kind == _RAGGED:
            return [array[a:b].reshape(shape) for (a, b), shape in zip(bounds, shapes.tolist())]
        view = memoryview(array).toreadonly()
        if self.kind == _TEXT:
            return [str(view[a:b], "utf-8", "surrogatepass") for a, b in bounds]
        return [view[a:b] for a, b in bounds]


class PackedRecords(NamedTuple):
    """The records of a batch in one array; see `dalijax.adapters.grain.pack_records`.

    Attributes:
        size: Number of records.
        columns: The values of each field, as locations in ``data``.
        data: The concatenated values, as a uint8 array of one dimension. Less than 64 KiB are a
            bytes object.
    """

    size: int
    columns: tuple[PackedColumn, ...]
    data: Any

    def records(self) -> list[Any]:
        """Returns the records as they were before packing.

        Byte strings are returned as read-only memoryviews of ``data``, arrays as views of ``data``.
        """
        is_small = isinstance(self.data, bytes)
        # As a plain NumPy array, views are cheap. The array keeps shared memory alive.
        data = np.frombuffer(self.data, np.uint8) if is_small else np.asarray(self.data)
        columns = [column.values(data) for column in self.columns]
        paths = [column.path for column in self.columns]
        if paths == [()]:
            return columns[0]
        records: list[Any] = [{} for _ in range(self.size)]
        for path, values in zip(paths, columns):
            *parents, key = path
            for record, value in zip(records, values):
                for parent in parents:
                    record = record.setdefault(parent, {})
                record[key] = value
        return records


def packed(records: Sequence[Any]) -> PackedRecords:
    """Returns the records of a batch in packed form.

    Stored as Python objects instead are fields of other types, fields that mix types, dtypes or
    numbers of dimensions, integers that do not fit into int64, and records with different keys.

    Args:
        records: Bytes, text, numbers, arrays, or (nested) dicts of these.
    """
    flat = [dict(_values(record)) for record in records]
    if not all(record.keys() == flat[0].keys() for record in flat):
        flat = [{(): record} for record in records]
    layout = _Layout()
    columns = [
        PackedColumn(path, *_column([record[path] for record in flat], layout))
        for path in (flat[0] if flat else ())
    ]
    return PackedRecords(len(flat), tuple(columns), layout.data())


def _values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields pairs of a path (the keys in nested dicts) and the value at the path in a record."""
    if type(value) is dict and value:
        for key, item in value.items():
            yield from _values(item, (*path, key))
    else:
        yield path, value


class _Layout:
    """Concatenates arrays and byte strings, and assigns a location to each."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes | memoryview]] = []
        self._size = 0

    def array(self, values: np.ndarray) -> _Laid:
        """Appends an array, and returns its location."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self.strings([raw.data])._replace(dtype=values.dtype, shape=values.shape)

    def strings(self, values: Sequence[bytes | memoryview]) -> _Laid:
        """Appends byte strings, and returns the location of their concatenation."""
        start = self._size
        for value in values:
            self._parts.append((self._size, value))
            self._size += len(value)
        laid = _Laid(start, np.dtype(np.uint8), (self._size - start,))
        self._size += -self._size % _ALIGNED
        return laid

    def data(self) -> Any:
        """Returns the concatenated data as a uint8 array, or as bytes if it is small."""
        data = np.empty(self._size, np.uint8)
        view = memoryview(data)
        for start, part in self._parts:
            view[start : start + len(part)] = part
        return data.tobytes() if data.size < _SMALL else data


def _column(values: list[Any], layout: _Layout) -> tuple[int, Any, _Laid | None]:
    """Adds the values of a field to a layout; returns kind, laid and shapes of a `PackedColumn`.

    Unsupported values are not added, but returned as a tuple instead of a location.
    """
    kind = type(values[0])
    if all(type(value) is kind for value in values):
        if kind in (bytes, str):
            return _strings(values, kind, layout)
        if kind in _NUMBER_TYPES:
            with contextlib.suppress(OverflowError):
                return _NUMBERS, layout.array(np.array(values, _NUMBER_TYPES[kind])), None
        elif issubclass(kind, np.generic) or kind is np.ndarray:
            same_type = len({(value.dtype, value.ndim) for value in values}) == 1
            if same_type and values[0].dtype.kind in "biufc":
                return _arrays(values, layout)
    return _OBJECTS, tuple(values), None


def _strings(values: list[Any], kind: type, layout: _Layout) -> tuple[int, Any, _Laid]:
    if kind is str:
        values = [value.encode("utf-8", "surrogatepass") for value in values]
    shapes = np.array([[len(value)] for value in values], np.int64)
    return _BYTES if kind is bytes else _TEXT, layout.strings(values), layout.array(shapes)


def _arrays(values: list[Any], layout: _Layout) -> tuple[int, Any, _Laid | None]:
    first = values[0]
    same_shape = len({value.shape for value in values}) == 1
    if same_shape and (first.ndim or isinstance(first, np.generic)):
        stacked = np.stack(values).astype(first.dtype, copy=False)
        return _STACKED, layout.array(stacked), None
    shapes = np.array([value.shape for value in values], np.int64).reshape(len(values), first.ndim)
    joined = np.concatenate([value.reshape(-1) for value in values])
    laid = layout.array(joined.astype(first.dtype, copy=False))
    return _RAGGED, laid, layout.array(shapes)
