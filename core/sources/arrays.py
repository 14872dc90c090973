"""`Arrays`: rows of arrays as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import knows_its_names
from ..arrays.dtypes import KINDS, as_scalars, cast_to, narrow_dtype, out_of_range
from ..formats.field import Field, array_field
from ..messages.replacements import suggest_table
from ..order.shuffle import Indices
from .base import BaseSource
from .field_names import check_options
from .source import Values
from .values import UnfitValueError, check_unmasked, fitted


class Arrays(BaseSource):
    """Rows of arrays of equal length; rows of a ``np.memmap`` are read on demand.

    64-bit numbers of one-dimensional arrays are converted to 32 bits; text bypasses the graph.

    Args:
        arrays: Arrays [records, ...] by field name.
        kinds: Kinds of fields that differ from their arrays, e.g. in `Field.layout`.
        identity: A string that replaces the digest of 64 rows in states.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        ValueError: If there is no array, or the arrays are empty or have different lengths.
        TypeError: If ``arrays`` is not a dict, DALI does not support the dtype of an array, or a
            kind does not fit its array.
    """

    _gives_new_arrays = True  # read() copies, so that ReuseCheck is not needed

    @knows_its_names
    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        kinds: Mapping[str, Field] | None = None,
        identity: str | None = None,
    ):
        if not isinstance(arrays, Mapping):
            call = suggest_table(arrays)
            raise TypeError(
                f"Arrays requires a dict of arrays {{'x': array}}, not a {type(arrays).__name__}"
                + (f". Use dalijax.{call}" if call else "")
            )
        self._arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        shapes = {name: array.shape for name, array in self._arrays.items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            raise ValueError(
                f"arrays must be non-empty and have equally many rows. Their shapes are {shapes}"
            )
        if kinds:
            check_options({"kinds": kinds}, self._arrays)
        fields: dict[str, Field] = {}
        for name, array in self._arrays.items():
            if array.dtype.kind not in "US" and array.dtype.char not in KINDS:
                raise TypeError(
                    f"{name!r} is an array of {array.dtype}: {cast_to(array.dtype)}, or wrap "
                    "records of objects in dalijax.sources.Records"
                )
            fields[name] = _field(array)
            if kinds and name in kinds:
                fields[name] = kinds[name]
                _check_kind(name, array, kinds[name])
            if array.ndim == 1:
                _check_range(name, array, fields[name].dtype)
        super().__init__(fields, identity)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __repr__(self) -> str:
        return f"Arrays({', '.join(self._arrays)}: {len(self):,} rows)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        return {name: self._rows(name, indices) for name in names}

    def _rows(self, name: str, indices: Indices) -> Values:
        """Returns some rows of an array, converted to the kind of the field."""
        dtype = self.fields[name].dtype
        rows = np.asarray(self._arrays[name][indices])  # a copy, because of integer indexing
        if dtype is None:
            return rows.tolist()
        if rows.ndim > 1:
            return np.ascontiguousarray(rows, dtype)  # DALI requires C order
        try:
            return as_scalars(rows.astype(rows.dtype.newbyteorder("="), copy=False), dtype)
        except ValueError as error:
            bad = indices[out_of_range(rows, dtype)]
            raise ValueError(f"{name!r} of {self.name(int(bad[0]))} {error}") from None

    def name(self, index: int) -> str:
        """Returns the name of a row for errors, such as "row 3"."""
        return f"row {index}"


def _as_array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        try:
            check_unmasked([value])
        except UnfitValueError as error:
            raise ValueError(f"{name!r} can't be converted: {error}") from None
    try:
        return np.asanyarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name!r} is not an array, because its rows differ in shape. Pad them to one shape, "
            f"or pass them as records of dalijax.sources.Records. {error}"
        ) from error


def _field(array: np.ndarray) -> Field:
    """Returns the kind of the field that contains the rows of an array."""
    if array.dtype.kind in "US":
        return Field(None)
    if array.ndim == 1:
        return Field(narrow_dtype(array.dtype))
    return array_field(array.dtype.newbyteorder("="), array.shape[1:])


def _check_kind(name: str, array: np.ndarray, field: Field) -> None:
    """Raises TypeError if the rows of an array can't be converted to the kind of a field."""
    try:
        if array.dtype.kind in "US" and field.dtype is not None:
            raise TypeError("is text, which bypasses the graph")
        if field.dtype is not None:
            row = np.zeros(array.shape[1:], array.dtype.newbyteorder("="))
            fitted(row, row, field, casts=row.ndim == 0)
    except (TypeError, UnfitValueError) as error:
        raise TypeError(f"{name!r} {error}. Convert the array, or pass another kind") from None


def _check_range(name: str, array: np.ndarray, dtype: np.dtype[Any] | None) -> None:
    """Raises ValueError if a number doesn't fit into a narrower dtype.

    A ``np.memmap`` is not checked, because that would read its whole file.
    """
    if dtype == array.dtype or dtype is None or isinstance(array, np.memmap):
        return
    bad = array[out_of_range(array, dtype)]
    if len(bad):
        raise ValueError(
            f"{name!r} contains {bad[0]}, which exceeds {dtype}, to which JAX converts "
            f"{array.dtype}. Pass it as text (astype(str)), which bypasses the graph, or in two "
            "columns"
        )
