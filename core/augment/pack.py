"""`Pack`: the argument of graph functions that packs images and their values into rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..random.draw import Draw, DrawRows, check_images, check_orientation, on_device
from ..sources.packed import Packed
from .layouts import with_layout
from .patches import check_channels, cut_up

PACK = "pack"  # the parameter of a graph function that receives the Pack
_INT, _FLOAT = np.int32, np.float32


class Pack:
    """Packs images and their values into rows; the argument ``pack`` of a graph function.

    It exists if the source is a `sources.Packed`. Each output of the graph must be a result of one
    of these methods. An operator after them may change values, but no shape.

    Args:
        draw: The draw of the graph.
        source: The source.
    """

    def __init__(self, draw: Draw, source: Packed):
        self._draw, self._source = draw, source
        self._nodes: dict[str, DataNode] = {}

    @do_not_convert
    @knows_its_names
    def patches(self, images: DataNode, *, antialias: bool = True) -> DataNode:
        """Cuts images into patches, and packs them into rows.

        An image is resized to the grid that the source has planned for its record, which keeps the
        aspect ratio of the whole image. To crop before, keep the aspect ratio.

        Args:
            images: Images [height, width, channels].
            antialias: Whether to apply a low-pass filter before scaling down.

        Returns:
            In the batch [rows, length, patch * patch * channels], in the dtype of the images; 0 at
            other tokens. A patch contains its pixels row by row.

        Raises:
            ValueError: If the source has no field of images, or the decoder ignores the EXIF
                orientation, which the planned sizes follow.
            TypeError: If the channels are not the last dimension of the images.
        """
        check_channels(images, self._draw)
        if self._source.field is None:
            raise ValueError(f"{self._source!r} has no images: pass field='data'")
        check_orientation(self._draw, images)
        images = with_layout(images, self._draw)
        resized: Any = fn.resize(images, size=self._node("size"), antialias=antialias)
        return self._filled(cut_up(resized, self._node("cells"), self._node("tokens")), "span")

    @do_not_convert
    def per_image(self, x: DataNode) -> DataNode:
        """Packs a value of each image.

        Args:
            x: Values of one shape.

        Returns:
            In the batch [rows, images, ...]; 0 where a row has fewer images.
        """
        check_images(x)
        return self._filled(fn.expand_dims(x, axes=[0]), "slots")

    @do_not_convert
    def tokens(self, x: DataNode) -> DataNode:
        """Packs the text of each image, whose tokens follow the patches of the image.

        Args:
            x: The field ``text`` of the source, or as many values per image, [tokens].

        Returns:
            In the batch [rows, length]; 0 at patches and padding.

        Raises:
            ValueError: If the source has no ``text``.
        """
        check_images(x)
        if self._source.text is None:
            raise ValueError(f"{self._source!r} has no text: pass text='...', a field of token ids")
        x = fn.slice(
            x,
            start=[0],
            shape=self._node("text"),
            axes=[0],
            out_of_bounds_policy="trim_to_shape",
        )
        zeros: Any = fn.full(0, shape=self._node("patches"))
        before = fn.cast_like(on_device(zeros, x.device), x)
        # Unlike _filled, this does not cut off a text that is longer than planned.
        filled: DataNode = fn.pad(fn.cat(before, x, axis=0), axes=[0], shape=self._node("span"))
        return filled

    def _filled(self, x: DataNode, extent: str) -> DataNode:
        """Returns values that are padded to the end of what their image takes of its row.

        If all rows of the pipeline are blank, returns only padding, so that later operators change
        blank rows alike on any number of devices.
        """
        filled: DataNode = fn.slice(
            x,
            start=self._node("start"),
            shape=self._node(extent),
            axes=[0],
            out_of_bounds_policy="pad",
        )
        return filled

    def _node(self, name: str) -> DataNode:
        if not self._nodes:
            forms = {
                "size": ((2,), _FLOAT),
                "cells": ((4,), _INT),
                "tokens": ((2,), _INT),
                "patches": ((1,), _INT),
                "text": ((1,), _INT),
                "start": ((1,), _INT),
                "span": ((1,), _INT),
                "slots": ((1,), _INT),
            }
            nodes = self._draw._compute_from_rows(
                self._planned,
                [*forms.values()],
                name=self._draw._named(PACK),
                kind="Pack",
                settings={"patch": self._source.patch},
            )
            self._nodes = dict(zip(forms, nodes))
        return self._nodes[name]

    @do_not_convert
    def _planned(self, rows: DrawRows) -> list[NDArray[Any]]:
        """Returns what the graph needs about each image, in the order of `_node`."""
        source, records = self._source, rows.own_records
        assert records is not None
        grid = source.grids[records].astype(np.int64)
        count = grid.prod(axis=1)
        lengths = np.maximum(source.lengths[records], count).astype(np.int64)
        span, slots = lengths.copy(), np.ones_like(lengths)
        # The text of a stand-in may be longer than that of the record whose place it takes.
        text = np.where(rows.replaced, lengths - count, np.iinfo(_INT).max)
        start = np.zeros_like(lengths)
        first = 0
        for layout in rows.layouts:
            part = slice(first, first + max(1, int(layout.counts.sum())))
            span[part] += layout.tails(lengths[part], source.length)
            slots[part] += layout.tails(slots[part], source.most)
            if layout.is_blank:
                text[part], start[part] = 0, lengths[part]
            first = part.stop
        inferred = np.full_like(count, -1)
        side = np.full_like(count, source.patch)
        cells = np.stack([grid[:, 0], side, grid[:, 1], inferred], axis=1)
        tokens = np.stack([count, inferred], axis=1)
        return [grid * source.patch, cells, tokens, count, text, start, span, slots]
