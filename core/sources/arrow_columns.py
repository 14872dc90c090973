"""Reads bytes and numbers of Arrow tables and HuggingFace data sets without copies."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.field import Field
from ..order.shuffle import Indices

# Names of Arrow's types, so that pyarrow need not be imported. Types of bytes are mapped to the
# format of their offsets in the `struct` module.
_BYTES = {"binary": "i", "large_binary": "q"}
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_NUMBERS = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(*_FLOATS, "bool"),
}
_SCALARS: Mapping[str, Any] = {"b": np.bool_, "f": np.float32}  # other numbers are int32
_OFFSET_LISTS, _FIXED_LISTS = ("list<", "large_list<"), "fixed_size_list<"
_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")
_MOST_OPEN = 1 << 16  # chunks of a column that are kept opened; each takes about 1 kB


def is_plain_dataset(records: Any) -> bool:
    """Returns whether an object has an Arrow table with the values of its records.

    It is `Table`, or a HuggingFace data set without a format or transform.
    """
    if isinstance(records, Table):
        return True
    dataset = getattr(sys.modules.get("datasets"), "Dataset", None)
    if dataset is None or type(records) is not dataset:
        return False
    columns = records.format
    return columns["type"] is None and set(columns["columns"]) == set(records.column_names)


class Table:
    """The rows of a table of pyarrow as dicts.

    Has the members of a HuggingFace data set that this module uses.

    Args:
        table: The ``pyarrow.Table``.

    Attributes:
        data: The table.
        features: No features, which would decode values.
    """

    _indices = None  # the rows are neither shuffled nor selected
    features: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, table: Any):
        self.data = table

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: self.data.column(name)[number].as_py() for name in self.column_names}

    @property
    def column_names(self) -> list[str]:
        """Returns the names of the columns."""
        names: list[str] = self.data.column_names
        return names

    def select_columns(self, names: Sequence[str]) -> Table:
        """Returns the rows with some of the columns."""
        return Table(self.data.select(names))


def by_rows(records: Any) -> Any:
    """Returns `Table` for a table or a record batch of pyarrow, and other objects unchanged."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None or not isinstance(records, (pyarrow.Table, pyarrow.RecordBatch)):
        return records
    is_table = isinstance(records, pyarrow.Table)
    return Table(records if is_table else pyarrow.Table.from_batches([records]))


def with_encoded_images(dataset: Any, keys: Sequence[Any]) -> Any:
    """Returns a data set that leaves images and sounds encoded if their encoding is wanted.

    Args:
        dataset: A plain data set of HuggingFace, or `Table`.
        keys: Keys of the wanted values. "image/bytes" wants a part of the column "image", and
            "images/" the values of a list.
    """
    features = dict(dataset.features)
    for name, feature in features.items():
        parts = any(isinstance(key, str) and key.startswith(f"{name}/") for key in keys)
        if parts and name not in keys:
            features[name] = _encoded(feature)
    if features == dict(dataset.features):
        return dataset
    # cast_column() would copy lists, although it does not change how they are stored.
    info = dataset.info.copy()
    info.features = type(dataset.features)(features)
    # The fingerprint is only used by caches of map() etc.; computing it could read all data.
    return type(dataset)(dataset.data, info, dataset.split, dataset._indices, "encoded")


def _encoded(feature: Any) -> Any:
    """Returns a feature of HuggingFace that leaves its images and sounds encoded."""
    if isinstance(feature, dict):
        return {name: _encoded(part) for name, part in feature.items()}
    if isinstance(feature, list):  # older versions of the library
        return [_encoded(part) for part in feature]
    if getattr(feature, "decode", False):
        return dataclasses.replace(feature, decode=False)
    values = getattr(feature, "feature", None)  # of a list
    return feature if values is None else dataclasses.replace(feature, feature=_encoded(values))


def _type_at(kind: Any, path: Sequence[Any]) -> Any:
    """Returns the Arrow type of a value within structs and lists; None if there is no such value.

    Args:
        kind: The type that contains the value.
        path: The names of fields of structs, and the indices of values of lists.
    """
    for name in path:
        text, part = str(kind), str(name)
        if text.startswith((*_OFFSET_LISTS, _FIXED_LISTS)) and part.isdecimal():
            kind = kind.value_type
        else:
            index = kind.get_field_index(part) if text.startswith("struct<") else -1
            kind = kind.field(index).type if index >= 0 else None
    return kind


def column_kind(dataset: Any, path: Sequence[Any]) -> tuple[Field, tuple[int | None, ...]] | None:
    """Returns the kind of bytes, numbers or lists of numbers in a column of an Arrow table.

    Args:
        dataset: A plain data set of HuggingFace, or `Table`.
        path: The name of the column, followed by the names of nested fields and indices of lists.

    Returns:
        The kind, and the sizes of a list's dimensions after the first, None for sizes that vary.
        None for other types.
    """
    if path[0] not in dataset.column_names:
        return None
    kind, sizes = _type_at(dataset.data.column(path[0]).type, path[1:]), list[int | None]()
    shape = getattr(kind, "shape", ())  # of HuggingFace's types of arrays
    kind = getattr(kind, "storage_type", kind)
    while str(kind).startswith(_LISTS):
        sizes.append(getattr(kind, "list_size", None))
        kind = kind.value_type
    text = str(kind)
    if text in _BYTES and not sizes:
        return Field(np.dtype(np.uint8), 1), ()
    if text not in _NUMBERS:
        return None
    dtype = np.dtype(_FLOATS.get(text, text))
    if not sizes:  # as for Python's numbers, which the rows contain
        return Field(np.dtype(_SCALARS.get(dtype.kind, np.int32))), ()
    return Field(dtype, len(sizes)), tuple(shape if len(shape) == len(sizes) else sizes)[1:]


class ArrowColumn:
    """A column of an Arrow table, or a value in its structs and lists.

    Args:
        column: The column, a ``pyarrow.ChunkedArray``.
        path: The names of nested fields and the indices of values of lists, e.g. ("0", "bytes"); ()
            for the column itself.
    """

    def __init__(self, column: Any, path: Sequence[str] = ()):
        self._chunks = column.chunks
        self._starts = np.cumsum([0, *map(len, self._chunks)], dtype=np.int64)
        self._path = path
        self._open: dict[int, Any] = {}  # by the number of the chunk
        self._kind = str(_type_at(column.type, path))

    def suits(self, field: Field) -> bool:
        """Returns whether `read` returns values of the kind of a field."""
        if field.dtype == np.uint8 and field.ndim == 1:
            return self._kind in _BYTES
        return field.dtype is not None and field.ndim == 0 and self._kind in _NUMBERS

    def read(self, rows: Indices) -> tuple[list[Any], list[int]]:
        """Returns the values in some rows: bytes as uint8 views [length], or numbers as scalars.

        Returns:
            The value of each row, and the positions in ``rows`` of missing values, which are None.
        """
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        values: list[Any] = []
        missing: list[int] = []
        is_bytes = self._kind in _BYTES
        for position, (chunk, row) in enumerate(
            zip(chunks.tolist(), (rows - self._starts[chunks]).tolist())
        ):
            data, starts, ends, is_null = self._open.get(chunk) or self._opened(chunk)
            if is_null is not None and is_null[row]:
                missing.append(position)
                values.append(None)
            else:
                values.append(data[starts[row] : ends[row]] if is_bytes else data[row])
        return values, missing

    def value(self, row: int) -> Any:
        """Returns the Python object in a row of the column, with all nested fields."""
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._chunks[chunk][row - int(self._starts[chunk])].as_py()

    def _opened(self, chunk: int) -> tuple[NDArray[Any], Any, Any, NDArray[np.bool_] | None]:
        """Returns the values of a chunk, without copies of bytes, and keeps the values.

        Returns:
            Four values. First, the concatenated bytes, as a uint8 array, or the numbers. Second and
            third, the start and the end of each value in the bytes; None for numbers. Fourth, a
            bool array that is True for missing values; None if no value is missing.
        """
        array, indices, is_null = self._nested(self._chunks[chunk])
        starts: Any = None
        ends: Any = None
        data: NDArray[Any]
        if is_null is not None and is_null.all():
            data = np.empty(0)
        elif self._kind in _BYTES:
            _, offsets, content = array.buffers()
            form: Any = _BYTES[self._kind]
            starts = memoryview(offsets).cast("b").cast(form)[array.offset :]
            ends = starts[1:]
            data = np.frombuffer(content or b"", np.uint8)
            if indices is not None:
                starts, ends = (np.asarray(column)[indices].data for column in (starts[:-1], ends))
        else:
            zero = False if self._kind == "bool" else 0
            filled = array.fill_null(zero) if array.null_count else array
            data = np.asarray(filled.to_numpy(zero_copy_only=False))
            data = data if indices is None else data[indices]
        if len(self._open) >= _MOST_OPEN:
            self._open.clear()
        opened = self._open[chunk] = data, starts, ends, is_null
        return opened

    def _nested(self, array: Any) -> tuple[Any, Indices | None, NDArray[np.bool_] | None]:
        """Follows the path from an array of the column to the array with the values.

        Returns:
            Three values. First, the array. Second, the index in it of each row's value; None if
            they are equal to the rows. Third, a bool array that is True for missing values; None if
            no value is missing.
        """
        indices: Indices | None = None
        is_null: NDArray[np.bool_] | None = None
        for name in (*self._path, None):
            if array.null_count:
                missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
                missing = missing if indices is None else missing[indices]
                is_null = missing if is_null is None else is_null | missing
            if name is None:
                break
            if str(array.type).startswith("struct<"):
                array = array.field(name)
                continue
            if str(array.type).startswith(_FIXED_LISTS):
                size = array.type.list_size
                starts = (array.offset + np.arange(len(array))) * size
                ends = starts + size
            else:
                offsets = np.asarray(array.offsets).astype(np.int64)
                starts, ends = offsets[:-1], offsets[1:]
            if indices is not None:
                starts, ends = starts[indices], ends[indices]
            missing = starts + int(name) >= ends
            is_null = missing if is_null is None else is_null | missing
            array, indices = array.values, np.where(is_null, 0, starts + int(name))
            if is_null.all():  # the array may be empty
                break
        return array, indices, is_null


class DatasetColumns:
    """The columns of a plain data set of HuggingFace, or of `Table`, read from its Arrow table.

    Args:
        dataset: The data set.
        paths: For each field, its column, followed by the names of nested fields.
        kinds: The kinds of the fields.

    Attributes:
        names: The fields that can be read from the table.
    """

    def __init__(
        self, dataset: Any, paths: Mapping[str, tuple[Any, ...]], kinds: Mapping[str, Field]
    ):
        self._arguments = dataset, paths, kinds
        self._columns: dict[str, ArrowColumn] = {}
        self._mapping: ArrowColumn | None = None
        try:
            mapping = dataset._indices  # the rows of a shuffled or selected data set
        except AttributeError:  # another version of the library
            paths = {}
        else:
            if mapping is not None:
                self._mapping = ArrowColumn(mapping.column(0))
        for name, (key, *parts) in paths.items():
            column = ArrowColumn(dataset.data.column(key), parts)
            if column.suits(kinds[name]):
                self._columns[name] = column
        self.names = frozenset(self._columns)

    def __reduce__(self) -> Any:
        # A data set pickles the paths of its files, not their content.
        return DatasetColumns, self._arguments

    def rows(self, indices: Indices) -> Indices:
        """Returns the row of each record in the table.

        Rows differ from the indices of the records if the data set was shuffled or filtered.
        """
        if self._mapping is None:
            return indices
        return np.array(self._mapping.read(indices)[0], np.int64)

    def read(self, name: str, rows: Indices) -> tuple[list[Any], list[int]]:
        """Returns the values of a field in some rows; see `ArrowColumn.read`."""
        return self._columns[name].read(rows)

    def value(self, name: str, row: int) -> Any:
        """Returns the Python object in a row of a field's column, with all nested fields."""
        return self._columns[name].value(row)
