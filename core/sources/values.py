"""Infers the kinds of fields from values, and converts values to the kind of a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import KINDS, as_scalars, cast_to, narrow_dtype
from ..formats.field import Field


def leaf(value: Any) -> np.ndarray:
    """Converts a value of a record to an array; bytes and text (as UTF-8) become uint8 [length].

    Raises:
        TypeError: If DALI has no type for the value.
    """
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 0:
        value = value.item()  # how bytes with trailing NULs pass through NumPy
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not (isinstance(value, memoryview) and value.c_contiguous and value.readonly):
            value = bytes(value)  # the caller may modify the memory later
        return np.frombuffer(value, np.uint8) if len(value) else np.zeros(0, np.uint8)
    array = np.asarray(value)
    if array.dtype.char not in KINDS:
        batched = array.ndim and array.dtype.kind in "SUO"
        raise TypeError(
            f"{value!r:.60} (dtype {array.dtype}) is not supported by DALI: "
            f"{cast_to(array.dtype)}, or do not use it in the graph"
            + ". If it is a batch of files or texts, do not batch before DALI"
            * bool(batched)
        )
    if not (array.flags.c_contiguous and array.dtype.isnative):  # DALI requires both
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return array


def kind_of(value: Any) -> Field:
    """Returns the kind of a field, inferred from a value; 64-bit scalars get 32 bits, as in JAX."""
    if isinstance(value, (str, Mapping)) or value is None:
        return Field(None)
    try:
        array = leaf(value)
    except TypeError:
        return Field(None)
    dtype = array.dtype
    if array.ndim == 0:
        dtype = narrow_dtype(dtype)
    return Field(dtype, array.ndim)


def as_kind(value: Any, field: Field) -> Any:
    """Converts a value to an array of the kind of a field.

    Values that bypass the graph (``Field(None)``) are returned unchanged.

    Raises:
        TypeError: If the value is of another kind.
        ValueError: If the value is a number that does not fit into the dtype.
    """
    if field.dtype is None:
        return value
    try:
        array = leaf(value)
    except TypeError as error:
        raise TypeError(f"can't be converted: {error}") from None
    if array.ndim == field.ndim == 0:
        return as_scalars(array, field.dtype)
    if array.dtype != field.dtype or array.ndim != field.ndim:
        raise TypeError(
            f"is {array.dtype} with {array.ndim} dimensions, not {field.dtype} with {field.ndim}"
        )
    return array
