"""Patches of images at their own aspect ratio, with a budget of tokens, for DALI graphs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..arrays.dtypes import dali_type
from ..order.grids import grids
from ..random.draw import Draw, check_draw, check_images, check_share, on_device
from . import geometry, window_pixels, windows
from .geometry import Geometry
from .layouts import dtype_and_layout
from .window import Window, drawn
from .windows import Range, Sizes

_WHOLE = (1.0, 1.0)  # ranges of scale and ratio that select the whole image


def check_channels(images: DataNode, draw: Draw | None) -> None:
    """Raises TypeError unless images can be cut into patches: their channels come last."""
    check_images(images)
    layout = dtype_and_layout(images, draw)[1]
    if layout not in ("", "HWC", "HW"):
        raise TypeError(
            f"patches are cut from images of the layout HWC, not {layout}. Call augment.normalize "
            "with layout='HWC', or transpose the arrays in the records, by source.map"
        )


def cut_up(
    images: DataNode, dtype: np.dtype[Any] | None, patch: int, cells: DataNode, rows: DataNode
) -> Any:
    """Returns patches [patches, patch * patch * channels] of images of whole patches.

    Args:
        images: The images.
        dtype: The dtype of the images; None if it is unknown.
        patch: Height and width of a patch, in pixels.
        cells: The shape [rows, patch, columns, -1] of each image.
        rows: The shape [patches, -1] of each result.
    """
    word, kind = None, None
    if dtype is not None:
        # A row of a patch has whole words. DALI transposes 8 bytes as fast as one.
        word = dali_type(np.dtype(f"uint{8 * math.gcd(8, patch * dtype.itemsize)}"))
        kind = dali_type(dtype)
    parts: Any = fn.reinterpret(images, shape=cells, dtype=word)
    # [rows, columns, patch, patch * channels]
    parts = fn.transpose(parts, perm=[0, 2, 1, 3])
    return fn.reinterpret(parts, shape=rows, dtype=kind)


def shapes_of_grids(
    grid: NDArray[np.int64], patch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns what `cut_up` needs about images of some grids.

    Args:
        grid: Heights and widths of the images, in patches, [rows, 2].
        patch: Height and width of a patch, in pixels.

    Returns:
        The size in pixels, the shape [rows, patch, columns, -1], and the shape [patches, -1].
    """
    cells, rows = np.full((len(grid), 4), -1), np.full((len(grid), 2), -1)
    cells[:, 0], cells[:, 1], cells[:, 2] = grid[:, 0], patch, grid[:, 1]
    rows[:, 0] = grid[:, 0] * grid[:, 1]
    return grid * patch, cells, rows


class PatchWindow(Window):
    """A window whose output is cut into patches; `patch_window` creates it.

    The output keeps the aspect ratio of the window, so that its ``size`` differs between records.
    Boxes and points refer to this output, and `extent` contains its size in pixels::

        window = augment.patch_window(images, draw=draw, scale=(0.3, 1), flip=0.5)
        patches, positions, is_patch, grid = window.patches(images)
        masks, *_ = window.patches(masks, interp_type=types.INTERP_NN)
        boxes, labels, count = window.boxes(boxes, labels)

    `image` and `mask` return the output before it is cut. To return it from the graph, pad it by
    ``fn.pad``.
    """

    _patch: int
    _tokens: int

    @do_not_convert
    @knows_its_names
    def patches(
        self,
        images: DataNode,
        *,
        interp_type: Any = types.INTERP_LINEAR,
        antialias: bool = True,
        orientation: str = "equal",
    ) -> tuple[DataNode, DataNode, DataNode, DataNode]:
        """Cuts the window of images into patches.

        Args:
            images: The images of the window, or other images or masks of the same sizes, [height,
                width, channels] or [height, width].
            interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``. For masks, pass
                ``types.INTERP_NN``.
            antialias: Whether to apply a low-pass filter before scaling down.
            orientation: As for `image`, and for masks as for `mask`.

        Returns:
            The patches [tokens, patch * patch * channels], row by row, in the dtype of the images;
            0 in the padding. A patch contains its pixels row by row. The positions (y, x) of the
            patches in the grid, int32 [tokens, 2]; a mask, bool [tokens], which is False for
            padding; and the height and width of the grid in patches, int32 [2].

        Raises:
            TypeError, ValueError: As for `image`; also for videos and for the layout CHW.
        """
        check_channels(images, self._draw)
        _, _, _, cells, rows, *found = self._operands
        resized: Any = self._window(images, interp_type, antialias, 0, orientation)
        dtype, _ = dtype_and_layout(images, self._draw)
        cut: Any = cut_up(resized, dtype, self._patch, cells, rows)
        cut = fn.pad(cut, axes=[0], shape=[self._tokens])
        positions, mask, grid = (on_device(node, cut.device) for node in found)
        return cut, positions, mask, grid


@do_not_convert
@knows_its_names
def patch_window(
    images: DataNode,
    *,
    draw: Draw,
    patch: int = 16,
    tokens: int = 256,
    scale: Range = _WHOLE,
    ratio: Range = _WHOLE,
    flip: float = 0.0,
    name: str | None = None,
) -> PatchWindow:
    """Selects a window that is cut into patches at its own aspect ratio, for NaFlex encoders.

    The window is the whole image, or a random part of it, as in timm's
    ``RandomResizedCropToSequence``. It is resized, with its aspect ratio, to the largest grid of at
    most ``tokens`` patches. Its height and width are rounded up to whole patches, as in SigLIP 2
    and in big_vision's ``resize_to_sequence``. Small windows are enlarged.

    Args:
        images: As for `random_window`.
        draw: The argument ``draw`` of the graph function.
        patch: Height and width of a patch, in pixels.
        tokens: Number of patches per image, including padding.
        scale: Range of the window's share of the image's area.
        ratio: Range of the window's width / height, relative to the image's own; its logarithm is
            uniform. The default keeps the aspect ratio of the image.
        flip: Probability of a horizontal flip.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window, which lies in the image.

    Raises:
        ValueError: If a number, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    windows.check_ranges(scale, ratio)
    check_share("flip", flip)
    settings = {"scale": scale, "ratio": ratio, "flip": flip}
    return _patch_window(
        images, draw, patch, tokens, scale, ratio, flip, name, "augment.patch_window", settings
    )


@do_not_convert
@knows_its_names
def patches(
    images: DataNode,
    *,
    draw: Draw,
    patch: int = 16,
    tokens: int = 256,
    antialias: bool = True,
    name: str | None = None,
) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """Cuts whole images into patches at their own aspect ratio, as `patch_window` does.

    Nothing is random. Normalize images before they are cut, so that the padding is 0. The NaFlex
    encoder of big_vision takes ``(patches, mask, positions[..., 0], positions[..., 1])``, with the
    mask as int32.

    Args:
        images: The output of ``fn.decoders.image`` for a field, or other images [height, width,
            channels] whose sizes ``draw`` can look up.
        draw, patch, tokens, name: As for `patch_window`.
        antialias: Whether to apply a low-pass filter before scaling down.

    Returns:
        The patches [tokens, patch * patch * channels], the positions (y, x) of the patches, a mask,
        and the size of the grid; see `PatchWindow.patches`.

    Raises:
        ValueError: If ``patch`` or ``tokens`` is not a positive whole number.
        TypeError: If ``draw`` cannot look up the sizes of the images, or the images are videos or
            have the layout CHW.
    """
    window = _patch_window(
        images, draw, patch, tokens, _WHOLE, _WHOLE, 0.0, name, "augment.patches", {}
    )
    return window.patches(images, antialias=antialias)


def _patch_window(
    images: DataNode,
    draw: Draw,
    patch: int,
    tokens: int,
    scale: Range,
    ratio: Range,
    flip: float,
    name: str | None,
    kind: str,
    settings: dict[str, Any],
) -> PatchWindow:
    """Returns the window of `patch_window`, with further settings."""
    check_draw(draw, images)
    patch = whole_number("patch", patch, "a number of pixels, 1 or more", 1)
    tokens = whole_number("tokens", tokens, "a number of patches, 1 or more", 1)
    is_random = flip > 0 or (*scale, *ratio) != (*_WHOLE, *_WHOLE)

    def make(u: NDArray[np.float32], sizes: Sizes) -> Geometry:
        start, end = np.zeros(sizes.shape, np.float32), sizes.astype(np.float32)
        if is_random:
            start, end = windows.resized_crops(u, sizes, scale, ratio, relative=True)
        grid = grids(end - start, patch, tokens)
        if is_random:
            start, end = windows.flipped(start, end, u, flip)
        found = geometry.inside(sizes, start, end, grid * patch)
        return dataclasses.replace(found, operands=(*found.operands, *_tables(grid, patch, tokens)))

    floats, ints = np.float32, np.int32
    window = drawn(
        PatchWindow,
        images,
        None,
        draw,
        make,
        [
            *[((2,), floats)] * 3,
            *(((4,), ints), ((2,), ints), ((tokens, 2), ints), ((tokens,), np.bool_), ((2,), ints)),
        ],
        window_pixels.resized_to_operand if is_random else window_pixels.whole_to_operand,
        kind=kind,
        settings={"patch": patch, "tokens": tokens, **settings},
        name=name,
        columns=windows.COLUMNS + 1 if is_random else 0,
    )
    window._patch, window._tokens = patch, tokens
    return window


def _tables(grid: NDArray[np.int64], patch: int, tokens: int) -> list[NDArray[Any]]:
    """Returns what the graph needs about outputs of some grids, in the order of its operands.

    Args:
        grid: Heights and widths of the outputs, in patches, [rows, 2].
        patch: Height and width of a patch, in pixels.
        tokens: Number of patches, including padding.

    Returns:
        The results of `shapes_of_grids`, the positions of the patches, their mask, and the grid.
    """
    places = np.arange(tokens)
    mask = places < grid.prod(axis=1, keepdims=True)
    positions = np.stack(np.divmod(places, grid[:, 1:]), axis=2) * mask[..., np.newaxis]
    return [*shapes_of_grids(grid, patch), positions, mask, grid]
