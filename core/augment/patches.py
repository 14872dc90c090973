"""Patches of images at their own aspect ratio, with a budget of tokens, for DALI graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..order.grids import grids
from ..random.draw import Draw, check_draw, on_device
from .layouts import with_layout


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
    """Cuts images into patches at their own aspect ratio, for NaFlex encoders such as SigLIP 2's.

    An image is resized, with its aspect ratio, to the largest grid of at most ``tokens`` patches.
    Its height and width are rounded up to whole patches, as in SigLIP 2 and in big_vision's
    ``resize_to_sequence``. Small images are enlarged. Nothing is random.

    Args:
        images: The output of ``fn.decoders.image`` for a field, or other images [height, width,
            channels] whose sizes ``draw`` can look up.
        draw: The argument ``draw`` of the graph function.
        patch: Height and width of a patch, in pixels.
        tokens: Number of patches per image, including padding.
        antialias: Whether to apply a low-pass filter before scaling down.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The patches [tokens, patch * patch * channels], row by row, in the dtype of the images; 0
        in the padding. A patch contains its pixels row by row. The positions (y, x) of the
        patches in the grid, int32 [tokens, 2]; a mask, bool [tokens], which is False for
        padding; and the height and width of the grid in patches, int32 [2].

    Raises:
        ValueError: If ``patch`` or ``tokens`` is not a positive whole number.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    patch = whole_number("patch", patch, "a number of pixels, 1 or more", 1)
    tokens = whole_number("tokens", tokens, "a number of patches, 1 or more", 1)

    def plan(_: object, sizes: Any) -> list[NDArray[Any]]:
        grid = grids(sizes, patch, tokens)
        count = grid.prod(axis=1)
        places, rest = np.arange(tokens), np.full(len(grid), -1)
        side = np.full(len(grid), patch)
        mask = places < count[:, np.newaxis]
        positions = np.stack(np.divmod(places, grid[:, 1:]), axis=2) * mask[..., np.newaxis]
        cells = np.stack([grid[:, 0], side, grid[:, 1], rest], axis=1)
        return [grid * patch, cells, np.stack([count, rest], axis=1), positions, mask, grid]

    floats, ints = np.float32, np.int32
    size, cells, rows, *found = draw._compute_outputs(
        plan,
        [
            *(((2,), floats), ((4,), ints), ((2,), ints)),
            *(((tokens, 2), ints), ((tokens,), np.bool_), ((2,), ints)),
        ],
        columns=0,
        images=images,
        settings={"patch": patch, "tokens": tokens},
        name=name,
        kind="augment.patches",
    )
    resized: Any = fn.resize(with_layout(images, draw), size=size, antialias=antialias)
    # [rows, patch, columns, patch * channels]: the last extent is inferred.
    parts: Any = fn.transpose(fn.reshape(resized, shape=cells), perm=[0, 2, 1, 3])
    tokenized: Any = fn.pad(fn.reshape(parts, shape=rows), axes=[0], shape=[tokens])
    positions, mask, grid = (on_device(node, tokenized.device) for node in found)
    return tokenized, positions, mask, grid
