"""DALI's tensors as NumPy and JAX arrays, without a copy where the executor allows it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from nvidia.dali import types
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

TensorList = TensorListCPU | TensorListGPU

# What JAX makes of these where jax_enable_x64 is off, without a word.
_NARROWED: dict[Any, str] = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
# By dtype, too: str(dtype) takes 3 to 6 us, for each output of each batch.
_NARROWED |= {np.dtype(name): narrow for name, narrow in _NARROWED.items()}

_DALI_TYPES = {
    np.dtype(types.to_numpy_type(one)): one
    for one in (
        *(types.UINT8, types.UINT16, types.UINT32, types.UINT64, types.BOOL, types.FLOAT16),
        *(types.INT8, types.INT16, types.INT32, types.INT64, types.FLOAT, types.FLOAT64),
    )
}
_WIDE = {one for dtype, one in _DALI_TYPES.items() if dtype in _NARROWED}


def dali_type(dtype: np.dtype[Any]) -> types.DALIDataType:
    """DALI's type for a NumPy dtype.

    Raises:
        TypeError: If DALI has none.
    """
    if dtype not in _DALI_TYPES:
        raise TypeError(f"DALI has no type for {dtype}: cast it to one of {list(_DALI_TYPES)}")
    return _DALI_TYPES[dtype]


def check_uniform(tensors: TensorList, name: str) -> None:
    """Raises ValueError where the samples of an output differ in shape."""
    if tensors.is_dense_tensor():
        return
    shapes = tensors.shape()
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(
            f"output {name!r} is ragged: its samples have shapes {tuple(shapes[0])} and "
            f"{tuple(other)}, which no array can hold. Give them one shape in the pipeline, "
            "e.g. by fn.resize or fn.crop for images, or by fn.pad for sequences"
            + " (and decode files, by fn.decoders.image say)"
            * (len(other) == 1)
        )


def check_width(dtype: Any, name: str, what: str = "output") -> None:
    """Raises TypeError where JAX would narrow the dtype of an output, or so, silently."""
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


def host_view(
    tensors: TensorListCPU, name: str, copy: bool = False, device_axis: bool = False
) -> np.ndarray:
    """A pipeline's CPU output as one NumPy array of shape [batch, ...].

    Args:
        tensors: The output, uniform in shape.
        name: Its name, for errors.
        copy: True where the executor reuses the buffer once it is released; else the
            array is a read-only view that keeps the buffer alive.
        device_axis: True for the shape [1, batch, ...].

    Raises:
        ValueError: If the samples differ in shape.
    """
    check_uniform(tensors, name)
    view = np.asarray(tensors.as_tensor())
    if copy:
        view = view.copy()
    # Views may alias the caller's own memory (external_source with no_copy) or each other.
    view.flags.writeable = False
    return view[None] if device_axis else view


def writable(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with copies for the NumPy arrays that are read-only views of DALI's buffers.

    Nothing tells whether another output, a constant of the graph or a file in memory shares a
    buffer, so that writing into it might change them.
    """
    return {
        name: array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
        for name, array in batch.items()
    }


def gpu_array(
    tensors: TensorListGPU, name: str, copy: bool = False, device_axis: bool = False
) -> jax.Array:
    """A pipeline's GPU output as a jax.Array of shape [batch, ...] on the same GPU.

    Args:
        tensors: The output, uniform in shape.
        name: Its name, for errors.
        copy: True where the executor reuses the buffer once it is released. JAX copies
            asynchronously, so this waits until the copy is done (DALI issue 5617).
        device_axis: True for the shape [1, batch, ...].

    Raises:
        ValueError: If the samples differ in shape.
        TypeError: If JAX would narrow the dtype.
    """
    check_uniform(tensors, name)
    if device_axis:
        tensor = tensors.as_reshaped_tensor([1, len(tensors), *tensors[0].shape()])
    else:
        tensor = tensors.as_tensor()
    if tensors.dtype in _WIDE:
        check_width(np.dtype(types.to_numpy_type(tensors.dtype)), name)
    array = jax.dlpack.from_dlpack(tensor)
    return array.copy().block_until_ready() if copy else array
