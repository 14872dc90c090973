"""Batches of records in one piece of memory, which processes can share.

Grain's worker processes pickle byte strings one by one through a pipe, but hand NumPy arrays over
in shared memory. So the texts, byte strings, numbers and arrays of a batch are laid one behind the
other, and cut again on the other side.
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
_ALIGNED = 64  # bytes
_SMALL = 1 << 16  # bytes; up to here a pipe is cheaper than a file of shared memory


class _Laid(NamedTuple):
    """The place of an array."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def of(self, data: np.ndarray) -> np.ndarray:
        size = math.prod(self.shape) * self.dtype.itemsize
        return data[self.start : self.start + size].view(self.dtype).reshape(self.shape)


class PackedColumn(NamedTuple):
    """One value of each record.

    Attributes:
        path: The keys that lead to it; none for records that are no dicts.
        kind: How the values are laid.
        laid: The place of the values, one behind the other or stacked; or a tuple of the values
            themselves.
        shapes: The place of their shapes, int64 [records, dimensions]; None if they are equal.
    """

    path: tuple[Any, ...]
    kind: int
    laid: Any
    shapes: _Laid | None

    def values(self, data: np.ndarray) -> list[Any]:
        """The values, which share the memory of ``data``; byte strings are memoryviews."""
        if self.kind == _OBJECTS:
            return list(self.laid)
        array = self.laid.of(data)
        if self.kind == _NUMBERS:
            return list(array.tolist())
        if self.shapes is None:
            return list(array)
        shapes = self.shapes.of(data)
        ends = list(itertools.accumulate(shapes.prod(axis=1).tolist(), initial=0))
        bounds = itertools.pairwise(ends)
        if self.kind == _RAGGED:
            return [array[a:b].reshape(shape) for (a, b), shape in zip(bounds, shapes.tolist())]
        view = memoryview(array).toreadonly()
        if self.kind == _TEXT:
            return [str(view[a:b], "utf-8", "surrogatepass") for a, b in bounds]
        return [view[a:b] for a, b in bounds]


class PackedRecords(NamedTuple):
    """The records of a batch in one piece; see `dalijax.adapters.grain.pack_records`.

    Attributes:
        size: Number of records.
        columns: The place of each value.
        data: uint8 of shape [bytes]; a bytes object if it is small.
    """

    size: int
    columns: tuple[PackedColumn, ...]
    data: Any

    def records(self) -> list[Any]:
        """The records, equal to the packed ones.

        Byte strings come as memoryviews, arrays as views of ``data``.
        """
        few = isinstance(self.data, bytes)
        # An array of NumPy itself, of which views are cheap; it keeps shared memory alive.
        data = np.frombuffer(self.data, np.uint8) if few else np.asarray(self.data)
        columns = [one.values(data) for one in self.columns]
        paths = [one.path for one in self.columns]
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
    """Packs the records of a batch.

    Values that don't fit into an array stay as they are, and so do records with different keys.

    Args:
        records: Bytes, text, numbers, arrays, or (nested) dicts of these.
    """
    flat = [dict(_values(record)) for record in records]
    if not all(one.keys() == flat[0].keys() for one in flat):
        flat = [{(): record} for record in records]
    layout = _Layout()
    columns = [
        PackedColumn(path, *_column([one[path] for one in flat], layout))
        for path in (flat[0] if flat else ())
    ]
    return PackedRecords(len(flat), tuple(columns), layout.data())


def _values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) is dict and value:
        for key, item in value.items():
            yield from _values(item, (*path, key))
    else:
        yield path, value


class _Layout:
    """Gives arrays and byte strings their places."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes | memoryview]] = []
        self._size = 0

    def array(self, values: np.ndarray) -> _Laid:
        """A place for an array."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self.strings([raw.data])._replace(dtype=values.dtype, shape=values.shape)

    def strings(self, values: Sequence[bytes | memoryview]) -> _Laid:
        """A place for byte strings, one behind the other."""
        start = self._size
        for value in values:
            self._parts.append((self._size, value))
            self._size += len(value)
        laid = _Laid(start, np.dtype(np.uint8), (self._size - start,))
        self._size += -self._size % _ALIGNED
        return laid

    def data(self) -> Any:
        """All of it, as an array, or as bytes if it is small."""
        data = np.empty(self._size, np.uint8)
        view = memoryview(data)
        for start, part in self._parts:
            view[start : start + len(part)] = part
        return data.tobytes() if data.size < _SMALL else data


def _column(values: list[Any], layout: _Layout) -> tuple[int, Any, _Laid | None]:
    """Kind, place and shapes of a column; values that can't be laid stay as they are."""
    kind = type(values[0])
    if all(type(value) is kind for value in values):
        if kind in (bytes, str):
            return _strings(values, kind, layout)
        if kind in _NUMBER_TYPES:
            with contextlib.suppress(OverflowError):
                return _NUMBERS, layout.array(np.array(values, _NUMBER_TYPES[kind])), None
        elif issubclass(kind, np.generic) or kind is np.ndarray:
            alike = len({(value.dtype, value.ndim) for value in values}) == 1
            if alike and values[0].dtype.kind in "biufc":
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
