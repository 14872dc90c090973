"""Kinds of values: what a field is by its first value, and the arrays of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pipeline.schema import leaf
from .source import Field

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32"}


def kind_of(value: Any) -> Field:
    """The field of such values; numbers of 64 bits become those of 32, as in JAX."""
    if isinstance(value, (str, Mapping)) or value is None:
        return Field(None)
    try:
        array = leaf(value)
    except TypeError:
        return Field(None)
    dtype = array.dtype
    if array.ndim == 0:
        dtype = np.dtype(_NARROW.get(dtype.name, dtype))
    return Field(dtype, array.ndim)


def as_kind(value: Any, field: Field) -> Any:
    """A value as an array of a field, or as it is where the field passes the graph by.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If it is a number that does not fit.
    """
    if field.dtype is None:
        return value
    array = leaf(value)
    if array.ndim == field.ndim == 0:
        return as_scalars(array, field.dtype)
    if array.dtype != field.dtype or array.ndim != field.ndim:
        raise TypeError(
            f"is {array.dtype} of {array.ndim} dimensions, not {field.dtype} of {field.ndim}"
        )
    return array


def as_scalars(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers in a dtype that may have fewer bits.

    Raises:
        TypeError: If they are of another kind (numbers with a fraction for whole ones).
        ValueError: If a number does not fit; fractions are rounded.
    """
    if values.dtype == dtype:
        return values
    whole = dtype.kind in "iu"
    if values.dtype.kind not in ("iu" if whole else "iuf") or dtype.kind not in "iuf":
        raise TypeError(f"is {values.dtype}, not {dtype}")
    if beyond(values, dtype).any():
        raise ValueError(f"has a number that does not fit into {dtype}")
    return values.astype(dtype)


def beyond(values: np.ndarray, dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Which numbers are beyond a dtype, and would become others, or infinite."""
    if dtype.kind == "f":
        most = np.finfo(dtype).max
        return np.asarray(np.isfinite(values) & ((values > most) | (values < -most)))
    limits = np.iinfo(dtype)
    return np.asarray((values < limits.min) | (values > limits.max))


def narrow(values: NDArray[np.int64]) -> NDArray[Any]:
    """Whole numbers as int32 where all of them fit."""
    cast = values.astype(np.int32)
    return cast if np.array_equal(cast, values) else values
