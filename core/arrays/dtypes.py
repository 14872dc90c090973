"""Dtypes of NumPy, DALI and JAX: which of them DALI supports, and which JAX would narrow."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from nvidia.dali import types

from ..threads.workers import Workers

# Dtypes that JAX silently narrows without jax_enable_x64.
_NARROWED: dict[Any, str] = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
# By dtype as well, because str(dtype) takes 3 to 6 us for each output of each batch.
_NARROWED |= {np.dtype(name): narrow for name, narrow in _NARROWED.items()}

DALI_TYPES = {
    np.dtype(types.to_numpy_type(dali_type_)): dali_type_
    for dali_type_ in (
        *(types.UINT8, types.UINT16, types.UINT32, types.UINT64, types.BOOL, types.FLOAT16),
        *(types.INT8, types.INT16, types.INT32, types.INT64, types.FLOAT, types.FLOAT64),
    )
}
# Type characters that DALI supports. Not every dtype of kind "f" is supported: e.g. float8_e5m2.
KINDS = frozenset(char for char in "?bBhHiIlLqQefdg" if np.dtype(char) in DALI_TYPES)
# DALI's types that JAX would narrow: looked up for each output of each batch.
WIDE = {dali_type_ for dtype, dali_type_ in DALI_TYPES.items() if dtype in _NARROWED}
BFLOAT16 = np.dtype(jnp.bfloat16)
_BITS = np.dtype(np.uint16)  # of bfloat16 numbers


def as_dtype(value: Any, name: str = "dtype") -> np.dtype[Any]:
    """Converts a user's dtype to a NumPy dtype.

    Args:
        value: A dtype or scalar type of NumPy or JAX, a name such as "bfloat16", or a type of
            nvidia.dali.types.
        name: The argument's name, for errors.

    Raises:
        TypeError: If ``value`` is not a dtype.
    """
    try:
        if isinstance(value, types.DALIDataType):
            return np.dtype(types.to_numpy_type(value))
        if value is None or isinstance(value, (tuple, list, dict)):  # NumPy takes them for dtypes
            raise TypeError
        return np.dtype(value)
    except (TypeError, KeyError, ValueError):
        raise TypeError(
            f"{name} must be a dtype of NumPy, JAX or DALI, such as 'float32', np.float32, "
            f"jnp.bfloat16 or nvidia.dali.types.FLOAT, not {value!r:.80}"
        ) from None


def dali_type(dtype: Any, name: str = "dtype") -> types.DALIDataType:
    """Returns DALI's type for a dtype.

    Args:
        dtype: The dtype, in any form that `as_dtype` accepts.
        name: The argument's name, for errors.

    Raises:
        TypeError: If ``dtype`` is not a dtype, or DALI does not support it.
    """
    dtype = as_dtype(dtype, name)
    if dtype not in DALI_TYPES:
        raise TypeError(
            f"{name} is {dtype}, which DALI does not support. Cast it to one of "
            f"{[str(supported) for supported in DALI_TYPES]}"
        )
    return DALI_TYPES[dtype]


def is_number(dtype: Any) -> bool:
    """Returns whether arrays of a dtype contain numbers, bools or keys, not text or objects."""
    if not isinstance(dtype, np.dtype):  # an extended dtype of JAX, such as that of keys
        return True
    return dtype.kind in "biufc" or dtype.isbuiltin == 2  # of ml_dtypes, such as bfloat16


def as_bfloat16(array: Any) -> Any:
    """Returns float32 or float16 numbers rounded to bfloat16, on the array's device.

    Ties are rounded to even, as by ``array.astype(jnp.bfloat16)``.

    Args:
        array: The numbers, or as uint16 the bits of bfloat16 numbers. A NumPy array, for which the
            result is a read-only NumPy array, or a jax.Array on a single device.
    """
    if isinstance(array, np.ndarray):
        with np.errstate(all="ignore"):  # NaNs, and numbers beyond the largest bfloat16
            rounded = array.view(BFLOAT16) if array.dtype == _BITS else array.astype(BFLOAT16)
        rounded.flags.writeable = False  # as the outputs of other dtypes
        return rounded
    return _to_bfloat16(array.shape, array.dtype, array.sharding)(array)


@functools.lru_cache(maxsize=128)
def _to_bfloat16(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """Returns a compiled function that converts arrays of a shape, dtype and sharding to bfloat16.

    Compiles the function in another thread, because the mesh of `jax.set_mesh` applies to all
    computations of the current thread. The mesh may have several devices, or lack the array's
    device.
    """

    def compiled() -> Any:
        spec = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        if dtype == _BITS:
            return jax.jit(lambda array: array.view(jnp.bfloat16)).lower(spec).compile()
        return jax.jit(lambda array: array.astype(jnp.bfloat16)).lower(spec).compile()

    workers = Workers(1, "dalijax-compile")
    try:
        return workers.call(compiled).get(workers)
    finally:
        workers.end()


def cast_to(dtype: np.dtype[Any]) -> str:
    """Returns advice on converting values of a dtype that DALI does not support, for messages."""
    if dtype.kind == "O":
        return "convert it to arrays of numbers, text or bytes"
    if dtype.kind == "c":
        return "split it into real and imaginary parts, .real and .imag"
    if dtype.kind in "mM":
        return "convert it to integers, e.g. by .astype('int64')"
    if dtype.names:
        return "split it into a field for each of " + ", ".join(dtype.names)
    # Dtypes of ml_dtypes (bfloat16, float8, numbers with few bits), and long doubles.
    if dtype.isbuiltin == 2 or dtype.kind == "f":
        wide = "int8" if "int" in dtype.name else "float32"
        back = "cast it back after the iterator"
        if dtype == BFLOAT16:
            back = "cast outputs to bfloat16 by dalijax.fn.cast at the end of the graph"
        return f"convert it by .astype('{wide}'), and {back}"
    return "convert it to numbers, text or bytes"


def check_width(dtype: Any, name: str, kind: str = "output") -> None:
    """Raises TypeError if JAX would silently narrow a dtype of 64 bits.

    Args:
        dtype: The dtype, or its name.
        name: The name of the array that has the dtype, for the message.
        kind: The kind of the array, "output" or "input", for the message.
    """
    narrow = _NARROWED.get(dtype)
    if narrow is not None and not jax.config.jax_enable_x64:
        raise TypeError(
            f"{kind} {name!r} is {dtype}, which JAX would narrow to {narrow}. Cast it in the "
            f"pipeline, e.g. fn.cast(..., dtype=types.{narrow.upper().replace('FLOAT32', 'FLOAT')})"
            ", or call jax.config.update('jax_enable_x64', True)"
        )


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    """Returns host values with the dtype to which JAX would narrow them.

    Args:
        values: The values.
        name: Their name, for the message.

    Raises:
        TypeError: If a value would change.
    """
    narrow = _NARROWED.get(values.dtype)
    if narrow is None or jax.config.jax_enable_x64:
        return values
    cast = values.astype(narrow)
    if not np.array_equal(cast, values):
        raise TypeError(
            f"{name!r} is {values.dtype}, which JAX would narrow to {narrow}, but not all of its "
            "values fit. Use a narrower dtype in the records, or set jax_enable_x64"
        )
    return cast


def narrow_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that JAX uses for a dtype without jax_enable_x64, such as int32 for int64.

    The result is in native byte order.
    """
    native = dtype.newbyteorder("=")
    return np.dtype(_NARROWED.get(native, native))


def as_scalars(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns numbers converted to a dtype that may have fewer bits, which may round floats.

    Raises:
        TypeError: If floats would become integers, or if a dtype is neither integer nor float and
            the dtypes differ.
        ValueError: If a number is out of the range of the dtype, or an integer would be rounded.
    """
    if values.dtype == dtype:
        return values
    is_integer = dtype.kind in "iu"
    if values.dtype.kind not in ("iu" if is_integer else "iuf") or dtype.kind not in "iuf":
        example = f" ({values.flat[0]})" if values.size else ""
        raise TypeError(f"is {values.dtype}, not {dtype}{example}")
    unfit = out_of_range(values, dtype)
    if values.dtype.kind in "iu" and not is_integer:
        with np.errstate(over="ignore"):
            rounded = values.astype(dtype)
        # A long double represents every integer of 64 bits.
        unfit = unfit | (rounded.astype(np.longdouble) != values.astype(np.longdouble))
    if unfit.any():
        raise ValueError(f"has the number {values[unfit][0]}, which does not fit into {dtype}")
    return values.astype(dtype)


def out_of_range(values: np.ndarray, dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Returns a bool array that is True for numbers out of the range of an integer or float dtype.

    Infinities and NaNs are in the range of a float dtype.
    """
    if dtype.kind == "f":
        most = np.finfo(dtype).max
        return np.asarray(np.isfinite(values) & ((values > most) | (values < -most)))
    limits = np.iinfo(dtype)
    return np.asarray((values < limits.min) | (values > limits.max))


def narrow(values: NDArray[np.int64]) -> NDArray[Any]:
    """Returns integers as int32 if all of them fit, otherwise unchanged."""
    cast = values.astype(np.int32)
    return cast if np.array_equal(cast, values) else values
