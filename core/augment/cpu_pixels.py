"""Resizes and normalizes uint8 images on the CPU by resize.c, in DALI's threads.

It takes less time than ``fn.resize`` and ``fn.crop_mirror_normalize``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.data_node import DataNode

from ..arguments import arguments_of
from ..arrays.dtypes import BFLOAT16, dali_type
from ..native.library import VARIABLE
from ..native.operators import called, checked_library, in_pipeline
from ..pipeline.alternatives import offer
from ..random.draw import draw_of_pipeline, operator_kind

IMPLEMENTATION = "dalijax 1"  # in states: count up if resize.c computes other pixels
_RESIZE, _TABLE, _BOTH = "dalijax_resize_1", "dalijax_table_2", "dalijax_resize_table_1"
# Dtypes and numbers of dimensions of the inputs of _RESIZE.
_INPUTS = [
    *((types.UINT8, 3), (types.UINT8, 3), (types.FLOAT, 1), (types.FLOAT, 1)),
    (types.INT32, 1),
]
# An attribute of pipelines: functions that return the inputs of _RESIZE, by the results' names.
_RESIZED = "_dalijax_resized"
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of images that contains all pixels which a window needs.

    Attributes:
        start: The first row and column, int32 [2].
        shape: Height and width, int32 [2].
    """

    start: DataNode
    shape: DataNode


def offer_resize(
    result: DataNode,
    images: DataNode,
    corners: Sequence[DataNode],
    size: Any,
    part: Callable[[], Part] | None,
) -> None:
    """Offers to resize images by a triangular filter, as ``fn.resize(antialias=True)`` does.

    Args:
        result: The result of ``fn.resize``.
        images: Images, uint8 [height, width, channels].
        corners: The first and the last corner (y, x) of each window, float32 [2], in pixels; an end
            before the start flips. Empty: whole images.
        size: Height and width of the output, or a DataNode of both.
        part: Returns the part of the images that the windows need; None if it is unknown.
    """
    library = _library()
    if library is None:
        offer(result, None, IMPLEMENTATION)
        return
    decoder: Any = images.source
    arguments = _decoder_arguments(decoder)

    def inputs_of(users: Mapping[str, int]) -> list[Any]:
        shape: Any
        if isinstance(size, DataNode):
            zero = types.Constant(np.zeros(1, np.int32), device="cpu")
            shape = fn.cat(fn.cast(size, dtype=types.INT32), zero, axis=0)
        else:
            shape = [*size, 0]
        # An array of the output's size, without elements.
        empty: Any = fn.zeros(shape=shape, dtype=types.UINT8)
        inputs = [images, empty, *corners]
        is_only_use = users[images.name] == 1
        if is_only_use and arguments is not None and corners and part is not None:
            needed = part()
            inputs[0] = fn.decoders.image_slice(
                decoder.inputs[0],
                start=needed.start,
                shape=needed.shape,
                axis_names="HW",
                **arguments,
            )
            inputs.append(needed.start)
        return inputs

    def replacement(users: Mapping[str, int]) -> DataNode:
        inputs = inputs_of(users)
        resized = _called(library, _RESIZE, inputs, _INPUTS[: len(inputs)], types.UINT8)
        return _with_name(resized, result.name, types.UINT8)

    offer(result, replacement, IMPLEMENTATION)
    vars(Pipeline.current()).setdefault(_RESIZED, {})[result.name] = inputs_of


def _decoder_arguments(operator: Any) -> dict[str, Any] | None:
    """Returns the arguments of ``fn.decoders.image``; None for other operators.

    Returns None, too, if some are known only as texts, which can't be passed on: those of the call
    of an object of ``nvidia.dali.ops``.
    """
    if operator_kind(operator) != "decoders__Image":
        return None
    arguments = {
        k: v
        for k, v in arguments_of(operator).items()
        if not k.startswith("_") and k not in ("device", "preserve_name")
    }
    return None if any(isinstance(value, str) for value in arguments.values()) else arguments


def offer_normalize(
    result: DataNode,
    images: DataNode,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: np.dtype[Any],
) -> None:
    """Offers to normalize images by a table, with the values of ``fn.crop_mirror_normalize``.

    Args:
        result: The result of ``fn.crop_mirror_normalize``, HWC; of dtype float32 for bfloat16.
        images: Images, uint8 [height, width, channels].
        mean, std: A number, or a number for each channel.
        dtype: float32, float16 or bfloat16. The offered images of bfloat16 have its bits as uint16.
    """
    library = _library()
    if library is None:
        return

    inputs_of_resize = vars(Pipeline.current()).get(_RESIZED, {}).get(images.name)

    def replacement(users: Mapping[str, int]) -> DataNode:
        exact = np.dtype(np.float32) if dtype == BFLOAT16 else dtype
        values = _table(tuple(mean), tuple(std), exact)
        if dtype == BFLOAT16:
            values = values.astype(BFLOAT16).view(np.uint16)
        bits = np.dtype(np.uint32 if values.itemsize == 4 else np.uint16)
        # The table holds DALI's values; with the factors, the function rarely has to look them up.
        factors = np.array(mean, np.float32), np.float32(1) / np.array(std, np.float32)
        columns = np.stack(np.broadcast_arrays(*factors), axis=1)
        table = np.hstack([values.view(bits), columns.view(bits)])
        function, inputs = _TABLE, [images]
        if inputs_of_resize is not None and users[images.name] == 1:
            function, inputs = _BOTH, inputs_of_resize(users)
        forms = [*_INPUTS[: len(inputs)], (dali_type(bits), 2)]
        inputs = [*inputs, types.Constant(table, device="cpu")]
        kind = dali_type(values.dtype)
        normalized = _called(library, function, inputs, forms, kind)
        return _with_name(normalized, result.name, kind)

    offer(result, replacement)


def _with_name(images: DataNode, name: str, dtype: Any) -> DataNode:
    """Returns images with a dtype and the layout HWC, as an output with a name, without a copy."""
    images = fn.reinterpret(images, dtype=dtype, src_dims=[-1, 0, 1, 2], layout="FHWC")
    # Without the first axis, DALI knows the layout before the graph runs, and then rejects
    # fn.reshape to a shape that another operator computes.
    return fn.squeeze(images, axes=[0], name=name)


def _called(
    library: ctypes.CDLL,
    function: str,
    inputs: Sequence[Any],
    forms: Sequence[tuple[Any, int]],
    kind: Any,
) -> DataNode:
    """Returns the result of a function of resize.c, [height, width, channels] of a dtype."""
    shapes = (_TABLE if function == _TABLE else _RESIZE) + "_shapes"
    return called(library, function, shapes, inputs, forms, [(kind, 3)])[0]


def fits(images: DataNode, dtype: np.dtype[Any] | None, layout: str) -> bool:
    """Returns whether the functions fit images of a dtype and layout, in the current graph.

    Only graphs over records use them, because DALI can't serialize pipelines that do.
    """
    is_bytes = images.device == "cpu" and dtype == np.uint8 and layout == "HWC"
    return is_bytes and draw_of_pipeline() is not None


def _library() -> ctypes.CDLL | None:
    """Returns the library in C; None if it can't be used, or should not.

    Raises:
        ValueError: If the environment variable has an unknown value.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "dali"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {choice!r}. Unset it, or set it to dali"
        )
    if choice:
        return None
    library = checked_library()
    if isinstance(library, str):
        _warn(library)
        return None
    if not ctypes.c_int32.in_dll(library, "dalijax_resize_is_fast").value:
        _log.info("DALI resizes images on the CPU, because resize.c is slow on this processor")
        return None
    return library


@functools.cache
def _warn(reason: str) -> None:
    """Warns once that DALI resizes images."""
    _log.warning("DALI resizes images on the CPU: %s. To hide this, set %s=dali", reason, VARIABLE)


@functools.lru_cache(maxsize=64)
def _table(mean: tuple[float, ...], std: tuple[float, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns DALI's normalization of each level, [channels, 256]."""
    levels = np.arange(256, dtype=np.uint8)[np.newaxis, :, np.newaxis]
    ramp = np.repeat(levels, max(len(mean), len(std)), axis=2)

    def define() -> DataNode:
        images = fn.reinterpret(types.Constant(ramp, device="cpu"), layout="HWC")
        normal: DataNode = fn.crop_mirror_normalize(
            images, dtype=dali_type(dtype), output_layout="HWC", mean=[*mean], std=[*std]
        )
        return normal

    return np.ascontiguousarray(in_pipeline(define)[0].T)
