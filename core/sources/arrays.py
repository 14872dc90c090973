"""Rows of arrays as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import KINDS, cast_to
from ..order.shuffle import Indices
from .base import BaseSource
from .source import Field, Values
from .values import as_scalars, beyond, kind_of


class Arrays(BaseSource):
    """Rows of arrays, all of one length; those of a ``np.memmap`` are read as they are wanted.

    Numbers of one-dimensional arrays become those of 32 bits; texts pass the graph by.

    Args:
        arrays: Arrays of shape [records, ...] by the field's name.
        identity: What stands for the digest of 64 rows in states.

    Attributes:
        fields: The names and kinds of the rows.

    Raises:
        ValueError: If there is none, or they have no rows or different numbers of them.
        TypeError: If one has a dtype that no pipeline takes.
    """

    gives_new_arrays = True  # nothing to check, see ReuseCheck

    def __init__(self, arrays: Mapping[str, Any], *, identity: str | None = None):
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"Arrays takes a dict of arrays {{'x': array}}, not a {type(arrays).__name__}"
            )
        self._arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        shapes = {name: array.shape for name, array in self._arrays.items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            raise ValueError(
                f"arrays need rows, and all as many of them: their shapes are {shapes}"
            )
        fields: dict[str, Field] = {}
        for name, array in self._arrays.items():
            if array.dtype.kind not in "US" and array.dtype.char not in KINDS:
                raise TypeError(
                    f"{name!r} is an array of {array.dtype}: {cast_to(array.dtype)}, or wrap "
                    "records of objects in dalijax.sources.Records"
                )
            fields[name] = Field(array.dtype.newbyteorder("="), array.ndim - 1)
            if array.dtype.kind in "US":
                fields[name] = Field(None)
            elif array.ndim == 1:
                fields[name] = kind_of(np.zeros((), array.dtype))
                _check_range(name, array, fields[name].dtype)
        super().__init__(fields, identity)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __repr__(self) -> str:
        return f"Arrays({', '.join(self._arrays)}: {len(self):,} rows)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """See `dalijax.sources.Source`."""
        return {name: self._rows(name, indices) for name in names}

    def _rows(self, name: str, indices: Indices) -> Values:
        dtype = self.fields[name].dtype
        rows = np.asarray(self._arrays[name][indices])  # a copy, which nobody writes to
        if dtype is None:
            return rows.tolist()
        if rows.ndim > 1:
            return np.ascontiguousarray(rows, dtype)  # DALI refuses other orders of axes
        try:
            return as_scalars(rows.astype(rows.dtype.newbyteorder("="), copy=False), dtype)
        except ValueError as error:
            bad = indices[beyond(rows, dtype)]
            raise ValueError(f"{name!r} of {self.name(int(bad[0]))} {error}") from None

    def name(self, index: int) -> str:
        """The number of a row."""
        return f"row {index}"


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asanyarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name!r} is no array, its rows are unlike: pad them to one shape, or make them "
            f"records of dalijax.sources.Records. {error}"
        ) from error


def _check_range(name: str, array: np.ndarray, dtype: np.dtype[Any] | None) -> None:
    """Raises ValueError where a number is beyond a dtype of fewer bits; files are not read."""
    if dtype == array.dtype or dtype is None or isinstance(array, np.memmap):
        return
    bad = array[beyond(array, dtype)]
    if len(bad):
        raise ValueError(
            f"{name!r} has {bad[0]}, beyond {dtype}, which JAX makes of {array.dtype}: pass it by "
            "as text (astype(str)), or in two columns"
        )
