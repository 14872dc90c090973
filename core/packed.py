"""Batches of records in a few arrays, which cross between processes without being copied.

A list of records that worker processes hand over is pickled, byte string by byte string, through a
pipe; Grain hands NumPy arrays over in shared memory. So the texts, byte strings and arrays of a
batch are laid one behind the other, and cut again on the other side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_OBJECTS, _BYTES, _TEXT, _NUMBERS, _STACKED, _RAGGED = range(6)
_NUMBER_TYPES = {bool: np.bool_, int: np.int64, float: np.float64}


class PackedColumn(NamedTuple):
    """One value of each record.

    Attributes:
        path: The keys that lead to it; none for records that are no dicts.
        kind: How the values lie in ``data``.
        data: All of them: uint8 of shape [bytes], arrays of shape [records, ...], ragged ones
            flat, or a tuple of the values themselves.
        shapes: Of each value in ``data``, int64 of shape [records, dimensions]; None where
            data says it.
    """

    path: tuple[Any, ...]
    kind: int
    data: Any
    shapes: np.ndarray | None

    def values(self) -> list[Any]:
        """The values, which share the memory of ``data``; byte strings are memoryviews."""
        if self.kind == _NUMBERS:
            return list(self.data.tolist())
        if self.kind == _OBJECTS:
            return list(self.data)
        # An array of NumPy itself, of which views are cheap; it keeps the shared memory alive.
        data = np.asarray(self.data)
        if self.shapes is None:
            return list(data)
        ends = list(itertools.accumulate(self.shapes.prod(axis=1).tolist(), initial=0))
        bounds = itertools.pairwise(ends)
        if self.kind == _RAGGED:
            cut = (data[a:b] for a, b in bounds)
            return [one.reshape(shape) for one, shape in zip(cut, self.shapes.tolist())]
        view = memoryview(data).toreadonly()
        if self.kind == _TEXT:
            return [str(view[a:b], "utf-8", "surrogatepass") for a, b in bounds]
        return [view[a:b] for a, b in bounds]


class PackedRecords(NamedTuple):
    """The records of a batch in a few arrays; made by `pack_records`.

    Attributes:
        size: Number of records.
        columns: Their values.
    """

    size: int
    columns: tuple[PackedColumn, ...]

    def records(self) -> list[Any]:
        """The records: equal to those that were packed.

        Byte strings come as memoryviews, and arrays as views, of the memory that was handed
        over; arrays of no dimension as NumPy's scalars.
        """
        columns = [one.values() for one in self.columns]
        paths = [one.path for one in self.columns]
        if paths == [()]:
            return columns[0]
        made: list[Any] = [{} for _ in range(self.size)]
        for path, values in zip(paths, columns):
            *parents, key = path
            for record, value in zip(made, values):
                for parent in parents:
                    record = record.setdefault(parent, {})
                record[key] = value
        return made


def pack_records(records: Sequence[Any]) -> PackedRecords:
    """Packs the records of a batch: ``ds.batch(B, batch_fn=pack_records)``.

    It keeps every value: what it can't lay out in an array stays as it is, as do records that
    are unlike each other.

    Args:
        records: Bytes, text, numbers, arrays, or (nested) dicts of these.
    """
    records = list(records)
    flat = [dict(_values(record)) for record in records]
    if not all(one.keys() == flat[0].keys() for one in flat):
        flat = [{(): record} for record in records]
    columns = ([one[path] for one in flat] for path in (flat[0] if flat else ()))
    return PackedRecords(
        len(records),
        tuple(PackedColumn(path, *_packed(own)) for path, own in zip(flat[0], columns))
        if flat
        else (),
    )


def _values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) is dict and value:
        for key, own in value.items():
            yield from _values(own, (*path, key))
    else:
        yield path, value


def _packed(values: list[Any]) -> tuple[int, Any, np.ndarray | None]:
    """Kind, data and shapes of a column."""
    first = values[0]
    kind = type(first)
    alike = all(type(value) is kind for value in values)
    if alike and kind in (bytes, str):
        if kind is str:
            values = [value.encode("utf-8", "surrogatepass") for value in values]
        data = np.frombuffer(b"".join(values), np.uint8)
        shapes = np.array([[len(value)] for value in values], np.int64)
        return (_BYTES if kind is bytes else _TEXT), data, shapes
    if alike and kind in _NUMBER_TYPES:
        try:
            return _NUMBERS, np.array(values, _NUMBER_TYPES[kind]), None
        except OverflowError:
            pass
    if alike and (kind is np.ndarray or issubclass(kind, np.generic)):
        dtypes = {value.dtype for value in values}
        found = {value.shape for value in values}
        if len(dtypes) == 1 and first.dtype.kind in "biufc":
            if len(found) == 1:
                return _STACKED, np.stack(values).astype(first.dtype, copy=False), None
            if {len(shape) for shape in found} == {first.ndim}:
                flat = np.concatenate([value.reshape(-1) for value in values])
                told = np.array([value.shape for value in values], np.int64)
                return _RAGGED, flat.astype(first.dtype, copy=False), told
    return _OBJECTS, tuple(values), None
