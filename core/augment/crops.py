"""Crops, flips and erased regions of images, in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..random.draw import Draw, check_draw, check_share
from . import windows
from .windows import Pair, Range

_PIXELS = ((2,), np.float32)


@do_not_convert
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
    """A window of random area and ratio, resized: torchvision's ``RandomResizedCrop``.

    As there, up to ten windows are tried, of whole pixels, and where none lies within the image it
    is the largest in the centre with a ratio within the range. (``fn.random_resized_crop`` of DALI
    has other windows.) Pixels at the window's edge are interpolated with their neighbours in the
    image, as by Pillow's ``resize(box=...)``.

    Args:
        images: Images [height, width, channels] whose sizes ``draw`` knows.
        size: Height and width of the output, in pixels; an int: both.
        draw: The graph's ``draw``.
        scale: Share of the image's area, from and to.
        ratio: Width over height, from and to; its logarithm is uniform.
        flip: Share of the windows whose left and right change places, as behind `flip` up to
            rounding; this costs nothing more.
        interp_type: Interpolation, of ``nvidia.dali.types``.
        antialias: Whether a filter goes before scaling down.
        name: The draw's name.

    Returns:
        Images [*size, channels] of the same dtype.

    Raises:
        ValueError: For a size, a range or a share that can't be.
        TypeError: If nothing says the sizes of the images.
    """
    check_draw(draw)
    size = windows.pair(size, "size")
    windows.check_ranges(scale, ratio)
    check_share("flip", flip)
    start, end = draw.compute_outputs(
        lambda u, sizes: windows.flipped(*windows.resized_crops(u, sizes, scale, ratio), u, flip),
        [_PIXELS, _PIXELS],
        columns=windows.COLUMNS + 1,
        images=images,
        settings={"scale": scale, "ratio": ratio, **({"flip": flip} if flip else {})},
        name=name,
    )
    return draw.sized(_resized(images, size, start, end, interp_type, antialias), size)


@do_not_convert
def random_crop(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    padding: int | Sequence[int] = 0,
    fill_value: float | Sequence[float] = 0,
    name: str | None = None,
) -> DataNode:
    """A window of one size at a random place: torchvision's ``RandomCrop``.

    Args:
        images: Images [height, width, channels] whose sizes ``draw`` knows.
        size: Height and width of the output, in pixels; an int: both.
        draw: The graph's ``draw``.
        padding: Pixels around the image: on all sides, (left and right, top and bottom), or
            (left, top, right, bottom), as in torchvision.
        fill_value: Their value, for all channels or each.
        name: The draw's name.

    Returns:
        Images [*size, channels] of the same dtype. An image that is smaller, with its padding, is a
        bad record.

    Raises:
        ValueError: For a size or padding that can't be.
        TypeError: If nothing says the sizes of the images.
    """
    check_draw(draw)
    size = windows.pair(size, "size")
    sides = tuple(padding) if isinstance(padding, Sequence) else (padding,)
    if len(sides) not in (1, 2, 4) or any(not isinstance(p, int) or p < 0 for p in sides):
        raise ValueError(f"padding must be one, two or four numbers of pixels, not {padding!r}")
    sides *= 4 // len(sides)
    (start,) = draw.compute_outputs(
        lambda u, sizes: (windows.crops(u, sizes, size, sides),),
        [((2,), np.int32)],
        columns=2,
        images=images,
        unfit=lambda sizes: windows.too_small(sizes, size, padding=sides),
        settings={"size": size, "padding": sides},
        name=name,
    )
    cropped = fn.slice(
        images,
        start=start,
        shape=list(size),
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=fill_value,
    )
    return draw.sized(cropped, size)


@do_not_convert
def center_crop(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    resize: int | None = None,
    interp_type: Any = types.INTERP_LINEAR,
    antialias: bool = True,
) -> DataNode:
    """The window in the centre, for evaluation: torchvision's ``Resize`` and ``CenterCrop``.

    Its sizes and its place are rounded as there. Nothing is random: ``draw`` knows the images'
    sizes.

    Args:
        images: Images [height, width, channels] whose sizes ``draw`` knows.
        size: Height and width of the output, in pixels; an int: both.
        draw: The graph's ``draw``.
        resize: Length that the image's shorter side gets before, in pixels; None: it keeps its.
        interp_type: Interpolation, of ``nvidia.dali.types``.
        antialias: Whether a filter goes before scaling down.

    Returns:
        Images [*size, channels] of the same dtype. An image that is smaller is a bad record.

    Raises:
        ValueError: For a size that can't be.
        TypeError: If nothing says the sizes of the images.
    """
    check_draw(draw)
    size = windows.pair(size, "size")
    if resize is not None:
        windows.pair(resize, "resize")
    start, end = draw.compute_outputs(
        lambda _, sizes: windows.central_crops(sizes, size, resize),
        [_PIXELS, _PIXELS],
        columns=0,
        images=images,
        settings={"size": size, "resize": resize},
        unfit=lambda sizes: windows.too_small(sizes, size, shorter=resize),
    )
    return draw.sized(_resized(images, size, start, end, interp_type, antialias), size)


def _resized(
    images: DataNode, size: Pair, start: DataNode, end: DataNode, interp_type: Any, antialias: bool
) -> DataNode:
    resized: Any = fn.resize(
        images,
        size=list(size),
        roi_start=start,
        roi_end=end,
        interp_type=interp_type,
        antialias=antialias,
    )
    return resized


@do_not_convert
def flip(
    images: DataNode,
    *,
    draw: Draw,
    probability: float = 0.5,
    vertical: bool = False,
    name: str | None = None,
) -> DataNode:
    """Flips images at random: torchvision's ``RandomHorizontalFlip`` and ``RandomVerticalFlip``.

    On a GPU this starts a kernel for each image. Behind `random_resized_crop` take its ``flip``
    instead, and where ``fn.crop_mirror_normalize`` follows, its ``mirror=draw.coin_flip()``:
    neither needs an operator of its own.

    Args:
        images: Images [height, width, channels].
        draw: The graph's ``draw``.
        probability: Share of the images that are flipped.
        vertical: Whether top and bottom change places, and not left and right.
        name: The draw's name.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: For a probability that is none.
    """
    check_draw(draw)
    flipped = draw.coin_flip(probability, name=name)
    if vertical:
        return draw.sized(fn.flip(images, horizontal=0, vertical=flipped), images)
    return draw.sized(fn.flip(images, horizontal=flipped), images)


@do_not_convert
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

    As there, up to ten rectangles are tried, of whole pixels, and where none is smaller than the
    image nothing is erased. torchvision erases after normalization, where 0 is the mean: with
    images of 0 to 255 that is ``value=(124, 116, 104)``, ImageNet's mean. There is no
    ``value="random"``.

    Args:
        images: Images [height, width, channels] whose sizes ``draw`` knows.
        draw: The graph's ``draw``.
        probability: Share of the images with an erased rectangle.
        scale: Share of the image's area, from and to.
        ratio: Height over width, from and to; its logarithm is uniform.
        value: The value of erased pixels, for all channels or each.
        name: The draw's name.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: For a probability or range that can't be.
        TypeError: If nothing says the sizes of the images.
    """
    check_draw(draw)
    check_share("probability", probability)
    windows.check_ranges(scale, ratio)
    start, extent = draw.compute_outputs(
        lambda u, sizes: windows.erased(u, sizes, probability, scale, ratio),
        [_PIXELS, _PIXELS],
        columns=windows.COLUMNS + 1,
        images=images,
        settings={"probability": probability, "scale": scale, "ratio": ratio},
        name=name,
    )
    erased = fn.erase(images, anchor=start, shape=extent, axis_names="HW", fill_value=value)
    return draw.sized(erased, images)
