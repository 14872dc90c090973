"""`Pack`: the argument of graph functions that packs images and their values into rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..order.packing import RowLayout
from ..random.draw import Draw, DrawRows, check_images, on_device
from ..sources.multi_image import MultiImage
from ..sources.packed import Packed
from ..sources.rows import PACK
from ..state.operators import operators_before
from . import window_pixels
from .layouts import changed_as_images, check_orientation, dtype_and_layout
from .patches import check_channels, cut_up, shapes_of_grids
from .window_pixels import Style

_ONE = (1,), np.int32
# Shapes and dtypes of what the graph needs about each image.
_COMMON = {"start": _ONE, "slots": _ONE}
_OF_PATCHES = {
    "size": ((2,), np.float32),
    "cells": ((4,), np.int32),
    "tokens": ((2,), np.int32),
    "patches": _ONE,
    "text": _ONE,
    "words": _ONE,
    "span": _ONE,
}
_OF_RECORDS = {"row_start": _ONE, "row": _ONE}


class Pack:
    """Packs images and their values into rows; the argument ``pack`` of a graph function.

    It exists if the source is a `sources.Packed` or a `sources.MultiImage`. Each output of the
    graph must be a result of one of these methods; other outputs raise ValueError. Operators after
    them may change values, but no shape.

    Args:
        draw: The draw of the graph.
        source: The source.
    """

    def __init__(self, draw: Draw, source: Packed | MultiImage):
        self._draw, self._source = draw, source
        self._nodes: dict[str, DataNode] = {}
        self._operators: list[Any] = []  # of the results of the methods

    @do_not_convert
    def check(self, outputs: Mapping[Any, Any]) -> None:
        """Raises ValueError unless all outputs of a graph are computed from results of methods.

        Args:
            outputs: The outputs by key or number.
        """
        packed = {*map(id, self._operators)}
        for name, node in outputs.items():
            # note_outputs() refuses lists and dicts in outputs, by their names.
            if packed.isdisjoint(map(id, operators_before(jax.tree.leaves(node)))):
                methods = "pack.patches(images), pack.tokens(text) or pack.per_image(x)"
                if not isinstance(self._source, Packed):
                    methods = "pack.per_image(x) or pack.per_row(x)"
                raise ValueError(
                    f"output {name!r} of the graph is not packed into rows: return the result of "
                    f"{methods}"
                )

    @do_not_convert
    @knows_its_names
    def patches(
        self,
        images: DataNode,
        *,
        interp_type: Any = types.INTERP_LINEAR,
        antialias: bool = True,
    ) -> DataNode:
        """Cuts images into patches, and packs them into rows.

        An image is resized to the grid that the source has planned for its record, which keeps the
        aspect ratio of the whole image. To crop before, keep the aspect ratio.

        Args:
            images: Images or masks [height, width, channels], or a field of masks [height, width].
            interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``. For masks, pass
                ``types.INTERP_NN``.
            antialias: Whether to apply a low-pass filter before scaling down.

        Returns:
            In the batch [rows, length, patch * patch * channels], in the dtype of the images; 0 at
            text, padding and records that can't be decoded. A patch contains its pixels row by row.

        Raises:
            ValueError: If the source has no field of images, or the decoder ignores the EXIF
                orientation, which the planned sizes follow.
            TypeError: If the channels are not the last dimension of the images.
        """
        check_channels(images, self._draw)
        if not isinstance(self._source, Packed) or self._source.field is None:
            raise ValueError(
                f"the images of {self._source!r} are not cut into patches: pass field='data' to "
                "sources.Packed. For patches of each image, pack.per_image(augment.patches(...)[0])"
            )
        check_orientation(images)
        dtype, layout = dtype_and_layout(images, self._draw)
        style = Style(interp_type, antialias, 0, dtype, layout + "C" * (layout == "HW"))
        size = self._node("size")
        resized = changed_as_images(
            images,
            self._draw,
            lambda pixels: window_pixels.resized(pixels, (None, None), size, style),
        )
        cells, tokens = self._node("cells"), self._node("tokens")
        is_bool = dtype == np.bool_  # which fn.slice does not take
        kind = np.dtype(np.uint8) if is_bool else dtype
        patches = cut_up(resized, kind, self._source.patch, cells, tokens)
        packed: Any = self._filled(patches, "start", "span")
        return fn.reinterpret(packed, dtype=types.BOOL) if is_bool else packed

    @do_not_convert
    def per_image(self, x: DataNode) -> DataNode:
        """Packs a value of each image.

        Args:
            x: Values of one shape, and of any dtype but bool.

        Returns:
            In the batch [rows, images, ...]; 0 where a row has fewer images.
        """
        check_images(x)
        return self._filled(fn.expand_dims(x, axes=[0]), "start", "slots")

    @do_not_convert
    def per_row(self, x: DataNode) -> DataNode:
        """Packs a value of each record of a `sources.MultiImage`, such as its label.

        Args:
            x: Values as for `per_image`, equal for the images of a record.

        Returns:
            In the batch [rows, ...]; 0 in rows without a record.

        Raises:
            TypeError: If a row has several records.
        """
        check_images(x)
        if isinstance(self._source, Packed):
            raise TypeError(f"the rows of {self._source!r} have several records: use per_image()")
        first: Any = self._filled(fn.expand_dims(x, axes=[0]), "row_start", "row")
        return first

    @do_not_convert
    def tokens(self, x: DataNode) -> DataNode:
        """Packs the text of each image, whose tokens follow the patches of the image.

        Args:
            x: The field ``text`` of the source, or as many values per image, [tokens]. Records
                with another number of values are bad records.

        Returns:
            In the batch [rows, length]; 0 at patches and padding.

        Raises:
            ValueError: If the source has no ``text``.
        """
        check_images(x)
        if not isinstance(self._source, Packed) or self._source.text is None:
            raise ValueError(f"{self._source!r} has no text: pass text='...' to sources.Packed")
        x = fn.slice(
            x,
            start=[0],
            shape=self._node("text"),
            axes=[0],
            out_of_bounds_policy="trim_to_shape",
        )
        x = fn.reinterpret(x, shape=self._node("words"))  # fails for a text of another length
        zeros: Any = fn.full(0, shape=self._node("patches"))
        before = fn.cast_like(on_device(zeros, x.device), x)
        return self._result(fn.pad(fn.cat(before, x, axis=0), axes=[0], shape=self._node("span")))

    def _filled(self, x: DataNode, start: str, extent: str) -> DataNode:
        """Returns values that are padded to the end of what their image takes of its row.

        If all rows of the pipeline are blank, returns only padding, so that later operators change
        blank rows alike on any number of devices.
        """
        return self._result(
            fn.slice(
                x,
                start=self._node(start),
                shape=self._node(extent),
                axes=[0],
                out_of_bounds_policy="pad",
            )
        )

    def _result(self, node: Any) -> DataNode:
        """Returns a result of a method, and notes its operator."""
        self._operators.append(node.source)
        packed: DataNode = node
        return packed

    def _node(self, name: str) -> DataNode:
        if not self._nodes:
            is_packed = isinstance(self._source, Packed)
            forms = _COMMON | (_OF_PATCHES if is_packed else _OF_RECORDS)

            @do_not_convert
            def planned(rows: DrawRows) -> list[NDArray[Any]]:
                found = self._planned(rows)
                return [found[name] for name in forms]

            nodes = self._draw._compute_from_rows(
                planned,
                [*forms.values()],
                name="rows",
                kind="Pack",
                settings={"patch": self._source.patch} if isinstance(self._source, Packed) else {},
                of=PACK,  # so that draws without a name keep their numbers
            )
            self._nodes = dict(zip(forms, nodes))
        return self._nodes[name]

    @do_not_convert
    def _planned(self, rows: DrawRows) -> dict[str, NDArray[Any]]:
        """Returns what the graph needs about each image, by name."""
        source, records = self._source, rows.own_records
        ones = np.ones(len(records), np.int64)
        slots = _extents(rows, ones, source.most)
        # Starting after the end of a value leaves only padding, without the values of stand-ins.
        is_missing = np.zeros(len(records), np.bool_) | rows.replaced
        for part, layout in _parts(rows):
            delivered = source.mask_of_records(layout, ~is_missing[part])
            is_missing[part] = layout.is_blank | ~delivered
        if not isinstance(source, Packed):
            is_first = ones.copy()
            for part, layout in _parts(rows):
                is_first[part] = layout.is_blank or layout.places[1] == 0
            return {
                "start": is_missing | ~source.has_images(records),
                "slots": slots,
                "row_start": is_missing | (is_first == 0),
                "row": _extents(rows, is_first, 1),
            }
        grid = source.grids[records].astype(np.int64)
        count = grid[:, 0] * grid[:, 1]
        lengths = np.maximum(source.lengths[records], count).astype(np.int64)
        size, cells, tokens = shapes_of_grids(grid, source.patch)
        return {
            "start": np.where(is_missing, np.maximum(lengths, 1), 0),
            "slots": slots,
            "size": size,
            "cells": cells,
            "tokens": tokens,
            "patches": count,
            "text": np.where(is_missing, 0, np.iinfo(np.int32).max),
            "words": np.where(is_missing, 0, lengths - count),
            "span": _extents(rows, lengths, source.length),
        }


def _parts(rows: DrawRows) -> Iterator[tuple[slice, RowLayout]]:
    """Yields the images of each pipeline, and the layout of its rows."""
    ends = itertools.accumulate(layout.num_records for layout in rows.layouts)
    for layout, end in zip(rows.layouts, ends):
        yield slice(end - layout.num_records, end), layout


def _extents(rows: DrawRows, amounts: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Returns what each image takes of its row with what follows it.

    Args:
        rows: The rows.
        amounts: What each image takes by itself.
        capacity: What a row holds.
    """
    extents = amounts.copy()
    for part, layout in _parts(rows):
        extents[part] += layout.tails(amounts[part], capacity)
    return extents
