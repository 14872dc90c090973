"""Inference of fields from values, and conversion of values to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import KINDS, cast_to
from .source import Field

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32"}


def leaf(value: Any) -> np.ndarray:
    """Converts a value of a record to an array; bytes and text (as UTF-8) become uint8 [length].

    Raises:
        TypeError: If DALI has no type for it.
    """
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 0:
        value = value.item()  # how bytes with trailing NULs pass through NumPy
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not (isinstance(value, memoryview) and value.c_contiguous and value.readonly):
            value = bytes(value)  # the caller may write on
        return np.frombuffer(value, np.uint8) if len(value) else np.zeros(0, np.uint8)
    array = np.asarray(value)
    if array.dtype.char not in KINDS:
        raise TypeError(
            f"{value!r:.60} (dtype {array.dtype}) is nothing that a pipeline takes: "
            f"{cast_to(array.dtype)}, or leave the key to pass it by"
        )
    if not (array.flags.c_contiguous and array.dtype.isnative):  # DALI takes no other
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return array


def kind_of(value: Any) -> Field:
    """Infers the field of a value; numbers of 64 bits are narrowed to 32, as in JAX."""
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
    """Converts a value to an array of a field; values that bypass the graph are unchanged.

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
            f"is {array.dtype} with {array.ndim} dimensions, not {field.dtype} with {field.ndim}"
        )
    return array


def as_scalars(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Converts numbers to a dtype that may have fewer bits; fractions are rounded.

    Raises:
        TypeError: If they are of another kind, e.g. fractions for an integer dtype.
        ValueError: If a number does not fit.
    """
    if values.dtype == dtype:
        return values
    is_integer = dtype.kind in "iu"
    if values.dtype.kind not in ("iu" if is_integer else "iuf") or dtype.kind not in "iuf":
        raise TypeError(f"is {values.dtype}, not {dtype}")
    if beyond(values, dtype).any():
        raise ValueError(f"has a number that does not fit into {dtype}")
    return values.astype(dtype)


def beyond(values: np.ndarray, dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Returns which numbers are out of the range of a dtype."""
    if dtype.kind == "f":
        most = np.finfo(dtype).max
        return np.asarray(np.isfinite(values) & ((values > most) | (values < -most)))
    limits = np.iinfo(dtype)
    return np.asarray((values < limits.min) | (values > limits.max))


def narrow(values: NDArray[np.int64]) -> NDArray[Any]:
    """Converts integers to int32 if all of them fit."""
    cast = values.astype(np.int32)
    return cast if np.array_equal(cast, values) else values
