"""`Bucket`: the argument of graph functions that crops images to the sizes of their buckets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..random.draw import Draw, DrawRows, check_images, check_share
from ..random.hashing import column_keys
from ..sources.buckets import BUCKET, Buckets
from . import geometry, window_pixels, windows
from .geometry import Geometry
from .layouts import check_orientation
from .window import Window, drawn_from_rows


class Bucket:
    """Crops images to the sizes of their buckets; the argument ``bucket`` of a graph function.

    It exists if the source is a `sources.Buckets`.

    Args:
        draw: The draw of the graph.
        source: The source.
    """

    def __init__(self, draw: Draw, source: Buckets):
        self._draw, self._source = draw, source
        self._size: DataNode | None = None

    @do_not_convert
    @knows_its_names
    def crop(
        self,
        images: DataNode,
        *,
        random: bool = True,
        flip: float = 0.0,
        interp_type: Any = types.INTERP_LINEAR,
        antialias: bool = True,
        name: str | None = None,
    ) -> DataNode:
        """Resizes images so that they cover their bucket, and crops them to its size.

        Args:
            images, random, flip, name: As for `window`.
            interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
            antialias: Whether to apply a low-pass filter before scaling down.

        Returns:
            Images [height, width, channels] of the same dtype; all images of a batch have the
            height and width of one bucket.

        Raises:
            TypeError, ValueError: As for `window`.
        """
        window = self.window(images, random=random, flip=flip, name=name)
        return window.image(images, interp_type=interp_type, antialias=antialias)

    @do_not_convert
    @knows_its_names
    def window(
        self, images: DataNode, *, random: bool = True, flip: float = 0.0, name: str | None = None
    ) -> Window:
        """Selects the part of images that `crop` shows, for masks, boxes and points.

        The image is resized with its aspect ratio, up to rounding to whole pixels.

        Args:
            images: The output of ``fn.decoders.image`` for a field, or a field of arrays; possibly
                with other colors, by functions of ``dalijax.augment``.
            random: Whether the place is random; otherwise, it is the center.
            flip: Probability of a horizontal flip.
            name: Name of the draw; see `dalijax.Draw`.

        Returns:
            The window, which lies in the image.

        Raises:
            ValueError: If ``flip`` is not a probability, or the decoder ignores the EXIF
                orientation, which the planned sizes follow.
            TypeError: If ``images`` may have been moved, flipped or resized before.
        """
        draw = self._draw
        check_images(images)
        check_share("flip", flip)
        check_orientation(images)
        name = draw._named(name)
        image_sizes = draw._sizes_of(images)
        keys = column_keys(name, 3)

        def make(rows: DrawRows) -> Geometry:
            sizes, outputs = rows.sizes_of(image_sizes), self._sizes(rows)
            u = rows.uniform(keys)
            start, end = windows.covering_crops(u if random else None, sizes, outputs)
            found = geometry.inside(sizes, *windows.flipped(start, end, u, flip), outputs)
            operands = (*found.operands, outputs.astype(np.float32))
            return dataclasses.replace(found, operands=operands)

        return drawn_from_rows(
            Window,
            images,
            None,
            draw,
            make,
            [((2,), np.float32)] * 3,
            window_pixels.resized_to_operand,
            kind="bucket.window",
            settings={"random": bool(random), "flip": flip},
            name=name,
        )

    @do_not_convert
    def size(self) -> DataNode:
        """Returns the height and width of the bucket, int32 [2]."""
        if self._size is None:
            (self._size,) = self._draw._compute_from_rows(
                lambda rows: [self._sizes(rows)],
                [((2,), np.int32)],
                name=self._draw._named(BUCKET),
                kind="bucket.size",
                settings={},
            )
        return self._size

    @do_not_convert
    def conditioning(self, window: Window) -> DataNode:
        """Returns the six numbers that SDXL is conditioned on, its ``add_time_ids``.

        Args:
            window: A window of this bucket.

        Returns:
            The height and width of the original image, the pixels that the crop has removed at the
            top and at the left of the resized and possibly flipped image, and the height and width
            of the bucket, int32 [6].
        """

        def numbers(rows: DrawRows) -> list[NDArray[Any]]:
            found = window._geometry(rows)
            origin = found.matrix[:, :, 2]
            opposite = origin + found.matrix[:, [0, 1], [0, 1]] * found.sizes[:, ::-1]
            removed = np.rint(-np.minimum(origin, opposite))[:, ::-1]
            return [np.concatenate([found.sizes, removed, found.outputs], axis=1).astype(np.int32)]

        return window._part(self._draw, "conditioning", numbers, [((6,), np.int32)], {})[0]

    @do_not_convert
    def _sizes(self, rows: DrawRows) -> NDArray[np.int32]:
        """Returns the height and width of the bucket of each row's own record."""
        source = self._source
        # A bad record needs a size, too.
        buckets = np.maximum(source.bucket_of[rows.own_records], 0)
        return np.array(source.buckets, np.int32)[buckets]
