"""Crops, flips and erased rectangles, for DALI graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..random.draw import Draw, check_draw, check_images, check_share, draw_of_pipeline
from . import window, window_pixels, windows
from .layouts import dtype_and_layout, with_layout
from .windows import Pair, Range

_PIXELS = ((2,), np.float32)


@do_not_convert
@knows_its_names
def random_resized_crop(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    scale: Range = (0.08, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
    flip: float = 0.0,
    interp_type: Any = types.INTERP_LINEAR,
    antialias: bool = True,
    name: str | None = None,
) -> DataNode:
    """Crops a window of random area and aspect ratio, and resizes it to a fixed size.

    As by torchvision's ``RandomResizedCrop``, up to ten windows of whole pixels are tried. If no
    window lies within the image, the largest centered window with an allowed ratio is used. (DALI's
    ``fn.random_resized_crop`` chooses different windows.) Pixels at the window's edge are
    interpolated with their neighbors outside the window, as in Pillow's ``resize(box=...)``.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels], with
            sizes that ``draw`` can look up.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        scale: Range of the window's share of the image's area.
        ratio: Range of width / height; its logarithm is uniform.
        flip: Probability of a horizontal flip, without an extra operator. Equals `flip` up to
            rounding.
        interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
        antialias: Whether to apply a low-pass filter before scaling down.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images [*size, channels] of the same dtype.

    Raises:
        ValueError: If a size, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    settings = {"flip": flip} if flip else {}
    crop = window.random_area(
        images, size, draw, scale, ratio, flip, name, "augment.random_resized_crop", settings
    )
    return crop.image(images, interp_type=interp_type, antialias=antialias)


@do_not_convert
@knows_its_names
def random_crop(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    padding: int | Sequence[int] = 0,
    fill_value: float | Sequence[float] = 0,
    name: str | None = None,
) -> DataNode:
    """Crops a window of fixed size at a random position: torchvision's ``RandomCrop``.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels], with
            sizes that ``draw`` can look up.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        padding: Pixels added around the image: on all sides, (left and right, top and bottom), or
            (left, top, right, bottom), as in torchvision.
        fill_value: Value of the padding, a scalar or one value for each channel.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images [*size, channels] of the same dtype. An image that is smaller than the crop, even
        with its padding, counts as a bad record.

    Raises:
        ValueError: If the size, the padding or the value is invalid.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    window_pixels.check_fill("fill_value", fill_value, dtype_and_layout(images, draw)[0])
    crop = window.random_place(images, size, draw, padding, 0.0, name, "augment.random_crop", {})
    return crop.image(images, fill=fill_value)


@do_not_convert
@knows_its_names
def center_crop(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw | None = None,
    resize: int | None = None,
    interp_type: Any = types.INTERP_LINEAR,
    antialias: bool = True,
) -> DataNode:
    """Crops the center, for evaluation: torchvision's ``Resize`` and ``CenterCrop``.

    Sizes and positions are rounded as in torchvision. Nothing is random. Without ``draw``, the
    graph computes the windows from the images' sizes, over any reader or source and after any
    operator. With ``draw``, dalijax computes the same windows from the sizes that ``draw`` looks
    up.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels]; with
            ``draw``, of sizes that it can look up.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function, or None.
        resize: Length to which the image's shorter side is resized before cropping, in pixels;
            None: the image is not resized.
        interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
        antialias: Whether to apply a low-pass filter before scaling down.

    Returns:
        Images [*size, channels] of the same dtype. An image that is smaller than the crop counts as
        a bad record.

    Raises:
        ValueError: If a size is invalid; without ``draw`` also if ``size`` exceeds ``resize``.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    pair, shorter = windows.pair(size, "size"), window.shorter_side(resize)
    if draw is None:
        check_images(images)
        return _central(images, pair, shorter, interp_type, antialias)
    check_draw(draw, images)
    crop = window.center_part(images, pair, draw, shorter)
    return crop.image(images, interp_type=interp_type, antialias=antialias)


def _central(
    images: DataNode, size: Pair, shorter: int | None, interp_type: Any, antialias: bool
) -> DataNode:
    """Crops the center with operators of the graph, and returns images [*size, channels].

    Raises:
        ValueError: If ``size`` exceeds ``shorter``.
    """
    if shorter is not None and max(size) > shorter:
        raise ValueError(
            f"center_crop: size={size} exceeds resize={shorter}, so that small images would not "
            "fill the crop. Pass a larger resize, or draw=draw, which makes them bad records"
        )
    sizes, resized, room = window_pixels.center_in_graph(images, size, shorter)
    start, draw = window_pixels.half(room), draw_of_pipeline()
    cropped: Any
    if shorter is None:
        start = fn.cast(start, dtype=types.INT32)
        cropped = fn.slice(images, start=start, shape=list(size), axis_names="HW")
    else:
        extent = types.Constant(np.array(size, np.int64))
        back = fn.cast(sizes, dtype=types.FLOAT64) / fn.cast(resized, dtype=types.FLOAT64)
        corners = [fn.cast(edge * back, dtype=types.FLOAT) for edge in (start, start + extent)]
        form = dtype_and_layout(images, draw)
        style = window_pixels.Style(interp_type, antialias, 0, *form)
        cropped = window_pixels.resized(images, corners, size, style)
    return cropped if draw is None else draw.sized(cropped, size)


@do_not_convert
@knows_its_names
def flip(
    images: DataNode,
    *,
    draw: Draw,
    probability: float = 0.5,
    vertical: bool = False,
    name: str | None = None,
) -> DataNode:
    """Flips images at random: torchvision's ``RandomHorizontalFlip`` and ``RandomVerticalFlip``.

    On a GPU this launches a kernel for each image. Two alternatives need no extra operator:
    ``random_resized_crop(flip=...)``, and ``fn.crop_mirror_normalize(mirror=draw.coin_flip())``.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels].
        draw: The argument ``draw`` of the graph function.
        probability: Probability of a flip.
        vertical: Whether to flip top and bottom instead of left and right.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the probability is not between 0 and 1.
    """
    check_draw(draw, images)
    check_share("probability", probability)
    (flipped,) = draw._compute_outputs(
        lambda u, _: [u < probability],
        [((), np.int32)],
        columns=1,
        settings={"probability": probability},
        name=name,
        kind="augment.flip",
        joins=True,
    )
    if vertical:
        return draw.sized(fn.flip(images, horizontal=0, vertical=flipped), images)
    return draw.sized(fn.flip(images, horizontal=flipped), images)


@do_not_convert
@knows_its_names
def random_erasing(
    images: DataNode,
    *,
    draw: Draw,
    probability: float = 0.5,
    scale: Range = (0.02, 0.33),
    ratio: Range = (0.3, 3.3),
    value: float | Sequence[float] = 0,
    name: str | None = None,
) -> DataNode:
    """Erases a random rectangle: torchvision's ``RandomErasing`` (Zhong et al., 2017).

    As in torchvision, up to ten rectangles of whole pixels are tried. The image is unchanged if no
    rectangle is smaller than the image. torchvision erases after normalization, when 0 is the mean.
    For images from 0 to 255, use ImageNet's mean, ``value=(124, 116, 104)``, instead.
    ``value="random"`` is not supported.

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels], with
            sizes that ``draw`` can look up.
        draw: The argument ``draw`` of the graph function.
        probability: Probability that an image has an erased rectangle.
        scale: Range of the rectangle's share of the image's area.
        ratio: Range of height / width; its logarithm is uniform.
        value: Value of erased pixels, a scalar or one value for each channel.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If a probability or range is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    check_share("probability", probability)
    windows.check_ranges(scale, ratio)
    start, extent = draw._compute_outputs(
        lambda u, sizes: windows.erased(u, sizes, probability, scale, ratio),
        [_PIXELS, _PIXELS],
        columns=windows.COLUMNS + 1,
        images=images,
        settings={"probability": probability, "scale": scale, "ratio": ratio},
        name=name,
        kind="augment.random_erasing",
        joins=True,
    )
    erased = fn.erase(
        with_layout(images, draw), anchor=start, shape=extent, axis_names="HW", fill_value=value
    )
    return draw._recolored(erased, images)
