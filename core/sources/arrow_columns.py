"""Reads bytes and numbers of Arrow tables, such as HuggingFace data sets, without copies."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.field import Field
from ..order.shuffle import Indices

# Names of Arrow's types, so that pyarrow need not be imported. Types of bytes are mapped to the
# format of their offsets in the `struct` module.
_BYTES = {"binary": "i", "large_binary": "q"}
_NUMBERS = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("halffloat", "float", "double", "bool"),
}
_MOST_OPEN = 1 << 16  # chunks of a column that are kept opened; each takes about 1 kB


def is_plain_dataset(records: Any) -> bool:
    """Returns whether an object is a HuggingFace data set without a format or transform.

    Its records then contain the values of its Arrow table.
    """
    dataset = getattr(sys.modules.get("datasets"), "Dataset", None)
    if dataset is None or type(records) is not dataset:
        return False
    columns = records.format
    return columns["type"] is None and set(columns["columns"]) == set(records.column_names)


def with_encoded_images(dataset: Any, keys: Sequence[Any]) -> Any:
    """Returns a data set that leaves images and sounds encoded if their encoding is wanted.

    Args:
        dataset: A plain data set of HuggingFace.
        keys: Keys of the wanted values. "image/bytes" wants a part of the column "image".
    """
    for name, feature in dataset.features.items():
        parts = any(isinstance(key, str) and key.startswith(f"{name}/") for key in keys)
        if parts and name not in keys and getattr(feature, "decode", False):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


class ArrowColumn:
    """A column of an Arrow table, or a field of its structs.

    Args:
        column: The column, a ``pyarrow.ChunkedArray``.
        path: The names of nested fields, e.g. ("bytes",); () for the column itself.
    """

    def __init__(self, column: Any, path: Sequence[str] = ()):
        self._chunks = column.chunks
        self._starts = np.cumsum([0, *map(len, self._chunks)], dtype=np.int64)
        self._path = path
        self._open: dict[int, Any] = {}  # by the number of the chunk
        kind = column.type
        for name in path:
            kind = kind.field(name).type if kind.num_fields else None
        self._kind = str(kind)

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
        for place, (chunk, row) in enumerate(
            zip(chunks.tolist(), (rows - self._starts[chunks]).tolist())
        ):
            data, ends, is_null = self._open.get(chunk) or self._opened(chunk)
            if is_null is not None and is_null[row]:
                missing.append(place)
                values.append(None)
            else:
                values.append(data[ends[row] : ends[row + 1]] if is_bytes else data[row])
        return values, missing

    def value(self, row: int) -> Any:
        """Returns the Python object in a row of the column, with all nested fields."""
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._chunks[chunk][row - int(self._starts[chunk])].as_py()

    def _opened(self, chunk: int) -> tuple[NDArray[Any], Any, NDArray[np.bool_] | None]:
        """Returns the values of a chunk, without copies of bytes, and keeps the values.

        Returns:
            Three values. First, the concatenated bytes, as a uint8 array, or the numbers. Second,
            the offset of each value in the bytes and the end of the last value; None for numbers.
            Third, a bool array that is True for missing values; None if no value is missing.
        """
        array = self._chunks[chunk]
        is_null: NDArray[np.bool_] | None = None
        for name in (*self._path, None):
            if array.null_count:
                is_missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
                is_null = is_missing if is_null is None else is_null | is_missing
            if name is not None:
                array = array.field(name)
        ends: Any = None
        if self._kind in _BYTES:
            _, offsets, content = array.buffers()
            form: Any = _BYTES[self._kind]
            ends = memoryview(offsets).cast("b").cast(form)[array.offset :]
            data = np.frombuffer(content or b"", np.uint8)
        else:
            zero = False if self._kind == "bool" else 0
            filled = array.fill_null(zero) if array.null_count else array
            data = np.asarray(filled.to_numpy(zero_copy_only=False))
        if len(self._open) >= _MOST_OPEN:
            self._open.clear()
        opened = self._open[chunk] = data, ends, is_null
        return opened


class DatasetColumns:
    """The columns of a plain data set of HuggingFace, read from its Arrow table.

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
