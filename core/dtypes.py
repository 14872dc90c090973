"""Dtypes of NumPy, DALI and JAX: which DALI has, and which JAX would narrow."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from nvidia.dali import types

# What JAX makes of these where jax_enable_x64 is off, without a word.
_NARROWED: dict[Any, str] = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
# By dtype, too: str(dtype) takes 3 to 6 us, for each output of each batch.
_NARROWED |= {np.dtype(name): narrow for name, narrow in _NARROWED.items()}

DALI_TYPES = {
    np.dtype(types.to_numpy_type(one)): one
    for one in (
        *(types.UINT8, types.UINT16, types.UINT32, types.UINT64, types.BOOL, types.FLOAT16),
        *(types.INT8, types.INT16, types.INT32, types.INT64, types.FLOAT, types.FLOAT64),
    )
}
# The characters of the dtypes that DALI has; not all kinds "f" are: float8_e5m2 is one, too.
KINDS = frozenset(char for char in "?bBhHiIlLqQefdg" if np.dtype(char) in DALI_TYPES)
# DALI's types that JAX would narrow: asked of each output of each batch.
WIDE = {one for dtype, one in DALI_TYPES.items() if dtype in _NARROWED}


def dali_type(dtype: np.dtype[Any]) -> types.DALIDataType:
    """DALI's type for a NumPy dtype.

    Raises:
        TypeError: If DALI has none.
    """
    if dtype not in DALI_TYPES:
        raise TypeError(f"DALI has no type for {dtype}: cast it to one of {list(DALI_TYPES)}")
    return DALI_TYPES[dtype]


def cast_to(dtype: np.dtype[Any]) -> str:
    """The cure for values of a dtype that DALI does not have."""
    if dtype.kind == "O":
        return "give it arrays of numbers, text or bytes"
    if dtype.kind == "c":
        return "give it real and imaginary parts, .real and .imag"
    if dtype.kind in "mM":
        return "give it whole numbers, say .astype('int64')"
    if dtype.names:
        return "give it a field of its own for each of " + ", ".join(dtype.names)
    # Those of ml_dtypes (bfloat16, float8 and numbers of a few bits), and long doubles.
    if dtype.isbuiltin == 2 or dtype.kind == "f":
        wide = "int8" if "int" in dtype.name else "float32"
        return f"give it .astype('{wide}'), and cast back behind the iterator"
    return "give it numbers, text or bytes"


def check_width(dtype: Any, name: str, what: str = "output") -> None:
    """Raises TypeError if JAX would silently narrow the dtype of an output, or of ``what``."""
    narrow = _NARROWED.get(dtype)
    if narrow is not None and not jax.config.jax_enable_x64:
        raise TypeError(
            f"{what} {name!r} is {dtype}, which JAX would narrow to {narrow}. Cast it in the "
            f"pipeline, e.g. fn.cast(..., dtype=types.{narrow.upper().replace('FLOAT32', 'FLOAT')})"
            ", or keep it by jax.config.update('jax_enable_x64', True)"
        )


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    """Host values as JAX would narrow them, where that changes none of them.

    Raises:
        TypeError: If it would change one.
    """
    narrow = _NARROWED.get(values.dtype)
    if narrow is None or jax.config.jax_enable_x64:
        return values
    cast = values.astype(narrow)
    if not np.array_equal(cast, values):
        raise TypeError(
            f"{name!r} is {values.dtype}, which JAX would narrow to {narrow}, and not all of "
            "its values fit: make it narrower in the records, or set jax_enable_x64"
        )
    return cast
