"""Operators of DALI that compute the pixels of windows; and windows that the graph computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from ..arrays.dtypes import dali_type
from . import cpu_pixels
from .geometry import TINY
from .layouts import sizes_in_graph
from .windows import Pair

# DALI's operators do not take all dtypes: fn.resize takes these,
_RESIZED = ("uint8", "int16", "uint16", "float32")
# and fn.warp_affine those that these become, without a change of a number.
_WARPED = {
    **{name: name for name in ("bool", "uint8", "int32", "float32")},  # bool as uint8
    **dict.fromkeys(("int8", "int16", "uint16"), "int32"),
    "float16": "float32",
}
# Images that a GPU resizes at once. With DALI's 32, it takes four times as many kernel calls.
_MINIBATCH = 128
_LARGEST = 1 << 24  # fn.slice and fn.warp_affine take the fill as float32


class Style(NamedTuple):
    """How the pixels of a window are computed.

    Attributes:
        interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
        antialias: Whether to apply a low-pass filter before scaling down.
        fill: Value outside of the image.
        dtype: The dtype of the images; None if it is unknown.
        layout: The layout of the images; "" if it is unknown.
        part: Returns the part of the images that the window needs; None if it is unknown.
    """

    interp_type: Any
    antialias: bool
    fill: Any
    dtype: np.dtype[Any] | None = None
    layout: str = ""
    part: Callable[[], cpu_pixels.Part] | None = None


# Computes the pixels of a window: from images, operands, the size of the output, and a style. The
# size is None if the operands contain it.
Pixels = Callable[[DataNode, Sequence[Any], Any, Style], DataNode]


def check_fill(name: str, fill: Any, dtype: np.dtype[Any] | None) -> None:
    """Checks the value outside of images.

    Args:
        name: The argument's name.
        fill: A number, or one for each channel.
        dtype: The dtype of the images; None if it is unknown.

    Raises:
        TypeError: If ``fill`` is neither.
        ValueError: If the dtype cannot represent a number.
    """
    values = fill.tolist() if isinstance(fill, np.ndarray) else fill
    numbers = values if isinstance(values, (tuple, list)) and values else [values]
    if not all(isinstance(number, (bool, int, float, np.number)) for number in numbers):
        raise TypeError(f"{name} must be a number, or a number for each channel, not {fill!r}")
    if dtype is None:
        return
    if dtype.kind == "f":
        high = float(np.finfo(dtype).max)
        fits, text = [not high < abs(number) < np.inf for number in numbers], "number"
        low = -high
    else:
        limits = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        low, high = max(limits[0], -_LARGEST), min(limits[1], _LARGEST)
        fits = [low <= number <= high and number == int(number) for number in numbers]
        text = "whole number"
    if not all(fits):
        raise ValueError(
            f"{name}={fill!r} does not fit into {dtype}, the dtype of the images or masks. Pass a "
            f"{text} from {low} to {high}"
        )


def _check_style(style: Style) -> None:
    """Checks that images can be interpolated.

    Raises:
        TypeError: If ``fn.resize`` does not take their dtype.
    """
    if style.dtype is None or style.dtype.name in _RESIZED or style.interp_type == types.INTERP_NN:
        return
    raise TypeError(
        f"{style.dtype} images can't be interpolated. Pass interp_type=types.INTERP_NN for the "
        f"nearest pixels, or cast the images to one of {list(_RESIZED)} in the records, by "
        "source.map"
    )


def _check_layout(style: Style, images: str) -> None:
    """Raises TypeError if the layout of images is known, and isn't [..., height, width, channels].

    Args:
        style: The style.
        images: A description of images that need this layout.
    """
    if style.layout and not style.layout.endswith("HWC"):
        raise TypeError(
            f"the images have the layout {style.layout}, but {images} must have the layout HWC. "
            "Call augment.normalize after the window, or with layout='HWC'; or transpose the "
            "arrays in the records, by source.map"
        )


def resized(images: DataNode, operands: Sequence[Any], size: Any, style: Style) -> DataNode:
    """Resizes windows that lie in their images; the operands are their corners."""
    _check_style(style)
    as_bytes = style.dtype is not None and style.dtype.name not in ("bool", *_RESIZED)
    if as_bytes:  # as channels
        _check_layout(style, f"{style.dtype} images")
        images = fn.reinterpret(images, dtype=types.UINT8)
    result: Any = fn.resize(
        images,
        size=size if isinstance(size, DataNode) else list(size),
        roi_start=operands[0],
        roi_end=operands[1],
        interp_type=style.interp_type,
        antialias=style.antialias,
        minibatch_size=_MINIBATCH,
    )
    if as_bytes and style.dtype is not None:
        result = fn.reinterpret(result, dtype=dali_type(style.dtype))
    is_linear = style.interp_type == types.INTERP_LINEAR and style.antialias
    if is_linear and cpu_pixels.fits(images, style.dtype, style.layout):
        corners = [operand for operand in operands[:2] if operand is not None]
        cpu_pixels.offer_resize(result, images, corners, size, style.part)
    return result


def resized_to_operand(
    images: DataNode, operands: Sequence[Any], _: None, style: Style
) -> DataNode:
    """Resizes windows as `resized` does, to the size that is the third operand."""
    return resized(images, operands[:2], operands[2], style)


def whole_to_operand(images: DataNode, operands: Sequence[Any], _: None, style: Style) -> DataNode:
    """Resizes whole images to the size that is the third operand."""
    return resized(images, (None, None), operands[2], style)


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

    Raises:
        TypeError: If ``fn.warp_affine`` does not take the images.
        ValueError: If ``fill`` has a number for each channel.
    """
    if not isinstance(style.fill, (int, float, np.number)):
        raise ValueError(f"fill must be a number for windows of affine_window, not {style.fill!r}")
    _check_style(style)
    _check_layout(style, "images of affine_window")
    dtype = style.dtype
    if dtype is not None and dtype.name not in _WARPED:
        raise TypeError(
            f"affine_window takes no {dtype} images or masks. Cast them to one of {[*_WARPED]} in "
            "the records, by source.map"
        )
    extent, from_resized, matrix = operands
    if style.antialias and style.interp_type != types.INTERP_NN:
        smaller: Any = fn.resize(images, size=extent, interp_type=style.interp_type, antialias=True)
        images, matrix = smaller, from_resized
    is_cast = dtype is not None and _WARPED[dtype.name] != dtype.name
    if dtype is not None and is_cast:
        images = fn.cast(images, dtype=dali_type(np.dtype(_WARPED[dtype.name])))
    result: DataNode = fn.warp_affine(
        images,
        matrix=matrix,
        size=list(size),
        fill_value=float(style.fill),
        interp_type=style.interp_type,
        inverse_map=False,
    )
    if dtype is not None and is_cast:
        result = fn.cast(result, dtype=dali_type(dtype))
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


def fit_in_graph(sizes: Any, size: Pair, shorter: int | None) -> Any:
    """Returns the sizes of images that are resized to fit into an output; see `geometry.fitted`."""
    exact = fn.cast(sizes, dtype=types.FLOAT64)
    factors = types.Constant(np.array(size, np.float64)) / exact
    factor = dali_math.min(factors[0], factors[1])
    if shorter is not None:
        length = types.Constant(np.float64(shorter), dtype=types.FLOAT64)
        factor = dali_math.min(factor, length / dali_math.min(exact[0], exact[1]))
    scaled = dali_math.floor(exact * factor + types.Constant(TINY, dtype=types.FLOAT64))
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

    DALI has no operator that raises an error: a reshape to another number of elements does. Its
    error has the shape 1 x 1 x 1 x 1 x 1, by which `core.pipeline.advice` recognizes it.
    """
    difference = dali_math.abs(sizes_in_graph(images) - sizes_in_graph(other))
    length = fn.stack(fn.cast(difference[0] + difference[1] + 1, dtype=types.INT32))
    zero: Any = fn.reshape(types.Constant(np.zeros((1,) * 5, np.float32)), shape=length)
    return operand + zero
