"""Normalization of images, for DALI graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..arrays.dtypes import BFLOAT16, as_dtype, dali_type
from ..pipeline.output_notes import mark_bfloat16
from ..random.draw import check_images, draw_of_pipeline
from . import cpu_pixels
from .layouts import dtype_and_layout, is_rgb, with_layout

_DTYPES = ("float32", "float16", "bfloat16")
_LAYOUTS = ("HWC", "CHW", "FHWC", "FCHW")


@do_not_convert
@knows_its_names
def normalize(
    images: DataNode,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    *,
    dtype: Any = "float32",
    layout: str = "HWC",
    scale: float | None = None,
) -> DataNode:
    """Computes ``(images * scale - mean) / std``, in the layout and dtype of the model.

    Uses DALI's ``fn.crop_mirror_normalize``, whose own layout is CHW by default, while flax and
    Keras expect HWC::

        images = augment.normalize(
            images, mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375), dtype="bfloat16"
        )

    DALI has no bfloat16: the result stays float32 in the graph, and each batch is rounded to
    bfloat16 on its device, with ties to even. Operators can't take the rounded result.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels].
        mean: Mean of the channels, a scalar or one value for each channel.
        std: Standard deviation of the channels, a scalar or one value for each channel.
        dtype: "float32", "float16" or "bfloat16", or the dtype in NumPy's, JAX's or DALI's form.
        layout: Layout of the result: "HWC" or "CHW"; "FHWC" or "FCHW" for videos, and for images
            that ``fn.stack`` has joined.
        scale: Factor of the images. torchvision's constants are for images from 0 to 1: pass
            scale=1/255 with them, or omit scale if mean and std are in units of the pixels.

    Returns:
        Images of the dtype and layout.

    Raises:
        ValueError: If the layout or a number is invalid, or if scale is omitted and all means and
            deviations are at most 1.
        TypeError: If ``dtype`` is not float32, float16 or bfloat16.
    """
    check_images(images)
    dtype = as_dtype(dtype)
    if dtype.name not in _DTYPES:
        raise TypeError(f"dtype of normalize must be one of {list(_DTYPES)}, not {dtype.name!r}")
    if layout not in _LAYOUTS:
        raise ValueError(f"layout of normalize must be one of {list(_LAYOUTS)}, not {layout!r}")
    means, deviations = _numbers("mean", mean), _numbers("std", std)
    if min(deviations) <= 0:
        raise ValueError(f"std must be positive, not {std!r}")
    if scale is None:
        if max(map(abs, means)) <= 1 and max(deviations) <= 1:
            raise ValueError(
                f"mean={mean!r} and std={std!r} look like constants for images from 0 to 1. Pass "
                "scale=1/255 for uint8 images, or scale=1 if the images are from 0 to 1 already"
            )
        scale = 1.0
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive number, not {scale!r}")
    means, deviations = ([x / scale for x in numbers] for numbers in (means, deviations))
    draw = draw_of_pipeline()
    pixel_dtype, pixel_layout = dtype_and_layout(images, draw)
    is_known = len(means) == len(deviations) == 1 or is_rgb(images, draw)
    fits = is_known and layout == "HWC" and {len(means), len(deviations)} <= {1, 3}
    is_video = layout.startswith("F")  # for which DALI's default layout is DHWC
    result: Any = fn.crop_mirror_normalize(
        with_layout(images, draw) if is_video else images,
        dtype=types.FLOAT if dtype == BFLOAT16 else dali_type(dtype),
        output_layout=layout,
        mean=means,
        std=deviations,
    )
    if fits and cpu_pixels.fits(images, pixel_dtype, pixel_layout):
        cpu_pixels.offer_normalize(result, images, means, deviations, dtype)
    if draw is not None:
        draw._recolored(result, images, keeps_form=False)
    return mark_bfloat16(result) if dtype == BFLOAT16 else result


def _numbers(name: str, value: Any) -> list[float]:
    """Converts a number, or a number for each channel, to a list of floats.

    Raises:
        ValueError: If ``value`` has another form, or a number is not finite.
    """
    try:
        numbers = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        numbers = np.array(np.nan)
    if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be a number, or a number for each channel, not {value!r}")
    return [float(number) for number in numbers]
