"""Layouts and channels of images, for operators of DALI that depend on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from ..arguments import arguments_of, turns_images
from ..random.draw import Draw, before_branches, operator_kind
from ..state.operators import operator_inputs

# Private in DALI: the split and merge operators that `if` uses with enable_conditionals=True.
conditional: Any = fn._conditional  # type: ignore[attr-defined]
# DALI's names of operators whose output has a layout, which is HWC if the input is an image without
# a layout.
_SET = {
    *("Brightness", "BrightnessContrast", "ColorTwist", "Contrast", "Crop", "CropMirrorNormalize"),
    *("Equalize", "Flip", "RandomResizedCrop", "Resize", "Rotate", "Saturation", "WarpAffine"),
}
_DECODED = re.compile("(experimental__)?(decoders__Image|decoders__Video|readers__Video)")
_DECODED_IMAGES = re.compile("(experimental__)?decoders__Image|ImageDecoder")
# DALI's names of operators whose output has the layout of any input, or of the first input.
_KEEP_ANY = {"ArithmeticGenericOp", "_conditional__Merge"}
_KEEP = {"Cast", "Erase", "GaussianBlur", "Pad", "Slice", "_conditional__Split"} | _KEEP_ANY
# Parts of DALI's names of operators that may turn images.
_MAY_TURN = re.compile("Rotate|Warp|Remap|Transpose|Func")
# DALI's names of operators whose output has the channels and, without the argument dtype, the dtype
# of the first input.
_KEEP_RGB = {
    *("ColorTwist", "Erase", "Flip", "GaussianBlur", "Resize", "WarpAffine"),
    "_conditional__Split",
}


def with_layout(images: DataNode, draw: Draw | None) -> DataNode:
    """Returns images with a layout. Images without a layout get HWC, and videos FHWC.

    DALI knows the layout when a batch runs. If it is unknown when the graph is defined, operators
    are added that copy the images if they have no layout.

    Args:
        images: Images [height, width, channels] or videos [frames, height, width, channels].
        draw: The `Draw` of the graph, which knows the layouts of its fields, or None.
    """
    result: DataNode = images
    layouts = None if draw is None else draw._layouts_of(images)
    if layouts is not None and not layouts[0]:
        result = fn.reinterpret(images, layout=layouts[1])
    elif not _has_layout(images, draw):
        has_layout = fn.get_property(images, key="layout").shape()[0] > 0
        with_own, without = conditional.split(images, predicate=has_layout)
        copies = fn.flip(without, horizontal=0, vertical=0)  # sets a missing layout
        result = conditional.merge(with_own, copies, predicate=has_layout)
    return result


def changed_as_images(
    images: DataNode, draw: Draw | None, change: Callable[[DataNode], Any]
) -> Any:
    """Returns the result of a change of images or masks.

    Fields of bool are changed as uint8, and fields [height, width] with a dimension of channels,
    because DALI's operators do not take others.

    Args:
        images, draw: As for `with_layout`; also masks.
        change: The change.
    """
    field = None if draw is None else draw._array_field(images)
    if field is None:
        return change(images)
    pixels: Any = images
    if field.ndim == 2:
        new = "C" if field.dali_layout else None
        pixels = fn.expand_dims(pixels, axes=[2], new_axis_names=new)
    if field.dtype == np.bool_:
        pixels = fn.reinterpret(pixels, dtype=types.UINT8)
    result = change(pixels)
    if field.dtype == np.bool_:
        result = fn.reinterpret(result, dtype=types.BOOL)
    return fn.squeeze(result, axes=[2]) if field.ndim == 2 else result


def check_orientation(images: DataNode) -> None:
    """Raises ValueError if images ignore the EXIF orientation, which planned sizes follow.

    Operators that may turn images, among them functions of Python, may follow it by themselves.
    """
    nodes: list[Any] = [images]
    visited = set()
    while nodes:
        operator = getattr(nodes.pop(), "source", None)
        if operator is None or id(operator) in visited:
            continue
        visited.add(id(operator))
        kind = operator_kind(operator)
        if _DECODED_IMAGES.match(kind):
            if not turns_images(arguments_of(operator)):
                raise ValueError(
                    "the batches are planned for images with their EXIF orientation, but the "
                    "decoder has adjust_orientation=False. Omit it"
                )
        elif not _MAY_TURN.search(kind):
            nodes += operator_inputs(operator)


def as_rgb(images: DataNode, draw: Draw, dtype: Any = None) -> DataNode:
    """Returns images with a layout; samples that are not RGB images fail.

    DALI's operators on colors would end the process for images with 1 or 2 channels.

    Args:
        images, draw: As for `with_layout`.
        dtype: DALI's type of the images; None for any type.

    Raises:
        ValueError: If the last dimension is known not to be the channels.
    """
    _, layout = dtype_and_layout(images, draw)
    if layout and not layout.endswith("C"):
        raise ValueError(
            f"images must be RGB images, HWC, or videos, FHWC, not {layout}. Transpose them, e.g. "
            "fn.transpose(images, perm=[1, 2, 0]), or correct the layout of their sources.Field"
        )
    are_rgb = is_rgb(images, draw)
    images = with_layout(images, draw)
    if are_rgb:
        return images
    sizes: Any = images.shape()[:-1]  # int64
    shape = fn.cat(sizes, types.Constant([3], dtype=types.INT64), axis=0)
    # Fails if the shape does not fit the bytes of the sample.
    rgb: DataNode = fn.reinterpret(images, shape=shape, dtype=dtype)
    return rgb


def dtype_and_layout(images: DataNode, draw: Draw | None) -> tuple[np.dtype[Any] | None, str]:
    """Returns the dtype and the layout of images; None and "" if they are unknown.

    Args:
        images, draw: As for `with_layout`.
    """
    images = _before_recoloring(images, draw)
    field = None if draw is None else draw._array_field(images)
    if field is not None:
        return field.dtype, field.image_layout
    kind = operator_kind(images.source)
    arguments = arguments_of(images.source)
    dtype: np.dtype[Any] | None = None
    layout = ""
    if _DECODED_IMAGES.match(kind):
        dtype, layout = np.dtype(np.uint8), "HWC"
    elif kind == "CropMirrorNormalize":
        dtype, layout = np.dtype(np.float32), arguments.get("output_layout", "CHW")
    elif kind in _KEEP_RGB:
        dtype, layout = dtype_and_layout(operator_inputs(images.source)[0], draw)
    if "dtype" in arguments:
        dtype = np.dtype(types.to_numpy_type(types.DALIDataType(int(arguments["dtype"]))))
    return dtype, layout


def sizes_in_graph(images: DataNode) -> Any:
    """Returns the height and the width of each image or video as a DataNode, int64 [2]."""
    shape: Any = images.shape()
    if is_rgb(images):
        return shape[0:2]
    first = dali_math.max(shape.shape()[0] - 3, 0)  # 1 for videos
    return shape[first : first + 2]


def _before_recoloring(images: DataNode, draw: Draw | None) -> DataNode:
    """Returns the images before the changes of colors that kept layout, channels and dtype."""
    result: DataNode = before_branches(images) if draw is None else draw._before_recoloring(images)
    return result


def _has_layout(node: DataNode, draw: Draw | None) -> bool:
    """Returns whether the samples of a node have a layout; False if that is unknown."""
    if _before_recoloring(node, draw) is not before_branches(node):
        return True  # with_layout added a missing layout
    layouts = None if draw is None else draw._layouts_of(node)
    if layouts is not None:
        return bool(layouts[0])
    kind = operator_kind(node.source)
    if kind in _SET or _DECODED.match(kind):
        return True
    if kind not in _KEEP:
        return False
    inputs = operator_inputs(node.source)[: None if kind in _KEEP_ANY else 1]
    return any(_has_layout(image, draw) for image in inputs)


def is_rgb(node: DataNode, draw: Draw | None = None) -> bool:
    """Returns whether the samples of a node are RGB images, uint8; False if that is unknown."""
    nodes, visited = [node], set()
    while nodes:
        operator = _before_recoloring(nodes.pop(), draw).source
        if id(operator) in visited:  # the two results of a split are merged again
            continue
        visited.add(id(operator))
        kind = operator_kind(operator)
        arguments = arguments_of(operator)
        colors = arguments.get("output_type", types.RGB) in (types.RGB, types.BGR, types.YCbCr)
        if "dtype" in arguments or not colors:
            return False
        if kind == "_conditional__Merge":
            nodes += operator_inputs(operator)[:2]  # the third is the predicate
        elif kind in _KEEP_RGB:
            nodes.append(operator_inputs(operator)[0])
        elif not (kind.startswith("decoders__Image") or kind == "ColorSpaceConversion"):
            return False
    return True
