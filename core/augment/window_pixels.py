"""Operators of DALI that compute the pixels of windows; and windows that the graph computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from ..arrays.dtypes import dali_type
from .layouts import sizes_in_graph
from .windows import Pair

RESIZED = tuple(map(np.dtype, ("uint8", "int16", "uint16", "float32")))  # dtypes of fn.resize


class Style(NamedTuple):
    """How the pixels of a window are computed.

    Attributes:
        interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
        antialias: Whether to apply a low-pass filter before scaling down.
        fill: Value outside of the image.
        dtype: The dtype of the images, if it is known and ``fn.resize`` does not take it.
    """

    interp_type: Any
    antialias: bool
    fill: Any
    dtype: np.dtype[Any] | None = None


# Computes the pixels of a window: from images, operands, the size of the output, and a style.
Pixels = Callable[[DataNode, Sequence[Any], Pair, Style], DataNode]


def resized(images: DataNode, operands: Sequence[Any], size: Any, style: Style) -> DataNode:
    """Resizes windows that lie in their images; the operands are their corners."""
    as_bytes = style.dtype is not None and style.interp_type == types.INTERP_NN
    if as_bytes:  # as channels
        images = fn.reinterpret(images, dtype=types.UINT8)
    result: Any = fn.resize(
        images,
        size=size if isinstance(size, DataNode) else list(size),
        roi_start=operands[0],
        roi_end=operands[1],
        interp_type=style.interp_type,
        antialias=style.antialias,
    )
    if as_bytes and style.dtype is not None:
        result = fn.reinterpret(result, dtype=dali_type(style.dtype))
    return result


def placed(images: DataNode, operands: Sequence[Any], size: Pair, style: Style) -> DataNode:
    """Resizes the visible parts of images, and pads them; see `geometry.placed`."""
    first, last, extent, place = operands
    visible = resized(images, (first, last), extent, style)
    return sliced(visible, place, size, style.fill)


def sliced(images: DataNode, start: Any, size: Pair, fill: Any) -> DataNode:
    """Returns parts of images with a layout, padded outside of the images."""
    parts: DataNode = fn.slice(
        images,
        start=start,
        shape=list(size),
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=fill,
    )
    return parts


def warped(images: DataNode, operands: Sequence[Any], size: Pair, style: Style) -> DataNode:
    """Maps images by matrices; see `geometry.affine`.

    Antialiasing needs a resize before, since ``fn.warp_affine`` has none.
    """
    if not isinstance(style.fill, (int, float, np.number)):
        raise ValueError(f"fill must be a number for windows of affine_window, not {style.fill!r}")
    extent, from_resized, from_image = operands
    matrix = from_image
    if style.antialias:
        smaller: Any = fn.resize(images, size=extent, interp_type=style.interp_type, antialias=True)
        images, matrix = smaller, from_resized
    result: DataNode = fn.warp_affine(
        images,
        matrix=matrix,
        size=list(size),
        fill_value=float(style.fill),
        interp_type=style.interp_type,
        inverse_map=False,
    )
    return result


# Windows that the graph computes


def center_in_graph(images: DataNode, size: Pair, shorter: int | None) -> tuple[Any, Any, Any]:
    """Returns the sizes of images, their sizes after resizing, and how much these exceed a window.

    All are DataNodes, int64 [2]. The sizes equal the results of `windows.resized`.
    """
    sizes = sizes_in_graph(images)
    scaled = sizes
    if shorter is not None:
        scaled = sizes * shorter // dali_math.min(sizes[0], sizes[1])
    return sizes, scaled, scaled - types.Constant(np.array(size, np.int64))


def half(room: Any) -> Any:
    """Returns half of a DataNode of integers, 0 or more, rounded to even as `numpy.rint` does."""
    floor = room // 2
    return floor + room % 2 * (floor % 2)


def fit_in_graph(sizes: Any, size: Pair) -> Any:
    """Returns the sizes of images that are resized to fit into an output; see `geometry.fitted`."""
    exact = fn.cast(sizes, dtype=types.FLOAT64)
    factors = types.Constant(np.array(size, np.float64)) / exact
    scaled = dali_math.floor(exact * dali_math.min(factors[0], factors[1]) + 0.5)
    limit = types.Constant(np.array(size, np.int64))
    return dali_math.clamp(fn.cast(scaled, dtype=types.INT64), 1, limit)


def placed_in_graph(sizes: Any, scaled: Any, offset: Any, size: Pair) -> list[Any]:
    """Returns the operands of `geometry.placed` as DataNodes."""
    low = dali_math.max(offset, 0)
    high = dali_math.min(offset + scaled, types.Constant(np.array(size, np.int64)))
    back = fn.cast(sizes, dtype=types.FLOAT64) / fn.cast(scaled, dtype=types.FLOAT64)
    corners = [(edge - offset) * back for edge in (low, high)]
    floats = [fn.cast(value, dtype=types.FLOAT) for value in (*corners, high - low)]
    return [*floats, fn.cast(-low, dtype=types.INT32)]


def checked_in_graph(images: DataNode, other: DataNode, operand: Any) -> Any:
    """Returns an operand of a window, after a check that other images have equal sizes.

    DALI has no operator that raises an error: a slice outside of its input does.
    """
    if other.name == images.name:
        return operand
    difference = dali_math.abs(sizes_in_graph(images) - sizes_in_graph(other))
    start = fn.cast(difference[0] + difference[1], dtype=types.INT32)
    zero: Any = fn.slice(types.Constant(np.zeros(1, np.float32)), start=start, shape=[1], axes=[0])
    return operand + zero
