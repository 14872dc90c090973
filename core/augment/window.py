"""Windows of images, which their masks, boxes and points follow, for DALI graphs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..random.draw import (
    Draw,
    DrawRows,
    before_branches,
    check_draw,
    check_images,
    check_numbers,
    check_share,
    draw_of_pipeline,
    on_device,
)
from ..random.hashing import column_keys, uniform
from . import geometry, iou_crops, window_pixels, windows
from .cpu_pixels import Part
from .geometry import BoxForm, Column, Geometry
from .layouts import changed_as_images, dtype_and_layout, sizes_in_graph, with_layout
from .window_pixels import Pixels, Style
from .windows import Pair, Range, Sizes

# Computes windows from uniform numbers [rows, columns] and image sizes, each row by itself.
Make = Callable[[NDArray[np.float32], Sizes], Geometry]
_W = TypeVar("_W", bound="Window")
_FLOATS, _INTS, _MATRIX = ((2,), np.float32), ((2,), np.int32), ((2, 3), np.float32)
_SHORTER = {"int64": "int32", "uint64": "uint32", "float64": "float32"}


class Window:
    """A window of an image, and of what belongs to the image: masks, boxes and points.

    `random_window` and the other functions whose names end in ``_window`` create windows. All
    results of a window's methods show the same part of the image in an output of the same size::

        window = augment.random_window(images, 224, draw=draw, flip=0.5)
        images = window.image(images)
        masks = window.mask(masks)
        boxes, labels, count = window.boxes(boxes, labels)

    Boxes and points are fields of the records, parameters of the graph function. They are computed
    on the CPU before the graph runs. All results are on the device of the window's images.

    Coordinates are pixels from the top left corner of the image, and refer to the edges of pixels:
    an image that is W pixels wide is from x = 0 to x = W, and a horizontal flip maps x to W - x.
    (torchvision maps keypoints, but not boxes, to W - 1 - x.)

    Attributes:
        size: Height and width of the window's output, in pixels; None if they differ between
            records, as in `PatchWindow`.
    """

    size: Pair | None

    def __init__(
        self,
        images: DataNode,
        size: Pair | None,
        pixels: Pixels,
        operands: Sequence[Any] = (),
        *,
        draw: Draw | None = None,
        name: str = "",
        make: Callable[[DrawRows], Geometry] | None = None,
        by_center: bool = False,
    ):
        self.size = size
        current = Pipeline.current()  # None if the operators are added to a pipeline later
        self._pipeline = (lambda: None) if current is None else weakref.ref(current)
        self._images, self._pixels, self._operands = images, pixels, operands
        # Without a draw, the graph computes the operands.
        self._draw, self._name, self._by_center = draw, name, by_center
        self._make = make or _unknown
        self._field = None if draw is None else draw._image_field(images)
        self._checks: list[Callable[[DrawRows, Sizes], None]] = []

    @do_not_convert
    @knows_its_names
    def image(
        self,
        images: DataNode,
        *,
        interp_type: Any = types.INTERP_LINEAR,
        antialias: bool = True,
        fill: float | Sequence[float] = 0,
        orientation: str = "equal",
    ) -> DataNode:
        """Returns the window of images.

        Args:
            images: The images of the window, or other images of the same sizes, [height, width,
                channels] or [height, width]; or videos [frames, height, width, channels].
            interp_type: Interpolation, a ``nvidia.dali.types.DALIInterpType``.
            antialias: Whether to apply a low-pass filter before scaling down.
            fill: Value outside of the image, a scalar or one value for each channel.
            orientation: If "equal", a record counts as bad if the decoder turns only one of two
                images by its EXIF orientation. If "any", this is not compared; pass "any" for other
                images over DALI's readers, where it can't be compared.

        Returns:
            Images [*size, channels], of the same dtype. A record of two images with different sizes
            counts as a bad record; over DALI's readers, the run fails.

        Raises:
            TypeError: If the images may have been moved, flipped or resized before, or if they
                can't be interpolated: other dtypes than uint8, int16, uint16 and float32 require
                ``interp_type=types.INTERP_NN``.
            ValueError: If an argument is invalid, or the dtype of the images cannot represent
                ``fill``.
        """
        check_images(images)
        return self._window(images, interp_type, antialias, fill, orientation)

    @do_not_convert
    @knows_its_names
    def mask(self, masks: DataNode, *, fill: float = 255, orientation: str = "equal") -> DataNode:
        """Returns the window of masks, such as class numbers, by nearest neighbor.

        Nearest neighbors are at the centers of output pixels, as in Pillow and in torchvision's
        ``NEAREST_EXACT``, except if two pixels are equally near.

        Args:
            masks: Masks of the images' sizes, [height, width] or [height, width, channels]: a field
                of arrays, or the output of ``fn.decoders.image(..., output_type=types.GRAY)``.
            fill: Value outside of the image; 255 is often the class to ignore. For masks of bool or
                int8, pass another number.
            orientation: As for `image`. For masks that were drawn on the images as they are
                displayed, pass "any". For masks that were drawn on the stored pixels, decode the
                images with ``adjust_orientation=False``.

        Returns:
            Masks [*size] or [*size, channels], of the same dtype. A record whose mask and image
            have different sizes counts as a bad record; over DALI's readers, the run fails.

        Raises:
            TypeError: If the masks may have been moved, flipped or resized before. Windows of
                `affine_window` do not take uint32 and dtypes of 64 bits.
            ValueError: If an argument is invalid, or the dtype of the masks cannot represent
                ``fill``.
        """
        check_images(masks)
        check_numbers("mask(masks, fill=255)", fill=fill)
        return self._window(masks, types.INTERP_NN, False, fill, orientation)

    @do_not_convert
    @knows_its_names
    def boxes(
        self,
        boxes: DataNode,
        *columns: DataNode,
        format: str = "xyxy",
        normalized: bool = False,
        min_size: float = 1.0,
        max_boxes: int = 100,
        truncate: bool = False,
        orientation: str = "equal",
    ) -> tuple[DataNode, ...]:
        """Returns the boxes in the window, with the columns that belong to them.

        Boxes are clipped to the image and to the window. A box that is too small afterwards is
        omitted, with its row in each column. Windows of `affine_window` have the boxes around the
        mapped corners. Windows of `iou_window` have only boxes whose centers they contain.

        Args:
            boxes: A field of boxes, [n, 4] for each record; n may be 0.
            *columns: Fields with a row for each box, [n] or [n, ...], such as labels. They are not
                mapped: for points of each box, use `matrix` in the training step.
            format: The four numbers of a box: "xyxy" (left, top, right, bottom), "xywh" (left, top,
                width, height, as in COCO's files; `sources.Coco` returns "xyxy"), "cxcywh" (center,
                width, height), or "yxyx" (top, left, bottom, right, as in TensorFlow). The right
                and bottom edges are exclusive.
            normalized: Whether the numbers are shares of the image's width and height, and after
                the call of the window's.
            min_size: The least width and height of a box, after clipping, in pixels of the output.
            max_boxes: The number of rows of the results.
            truncate: If True, boxes after the first ``max_boxes`` are omitted; otherwise their
                record counts as a bad record.
            orientation: If "equal", a record counts as bad if its decoder turns the image by its
                EXIF orientation, because its boxes may refer to the stored pixels. If they do,
                decode with ``adjust_orientation=False``. If they refer to the image as it is
                displayed, pass "any".

        Returns:
            The boxes, float32 [max_boxes, 4], in the same format; each column, [max_boxes, ...];
            and the number of boxes, an int32 scalar. The rows after this number are 0 for boxes,
            floats and unsigned integers, -1 for signed integers, and False for booleans. Integers
            and floats of 64 bits become 32 bits; a record counts as a bad record if an integer of a
            box in the window does not fit, or if any box isn't finite, ends before it starts, or
            lies outside of the image.

        Raises:
            TypeError: If an argument is not a field of the records; if the window's images may have
                been moved, flipped or resized before; or over DALI's readers.
            ValueError: If an argument is invalid.
        """
        draw = self._with_draw("boxes", orientation)
        form = _box_form(format, normalized)
        check_numbers("boxes(boxes, min_size=1.0)", min_size=min_size)
        if not 0 <= min_size < np.inf:
            raise ValueError(f"min_size must be a number of pixels, 0 or more, not {min_size}")
        most = whole_number("max_boxes", max_boxes, "a number of boxes, 1 or more", 1)
        fields = _box_fields(draw, boxes, columns)

        def boxes_of(rows: DrawRows) -> list[NDArray[Any]]:
            return geometry.window_boxes(
                self._geometry(rows),
                [field.column(rows) for field in fields],
                form,
                min_size=min_size,
                max_boxes=most,
                truncate=truncate,
                by_center=self._by_center,
                refuse=rows.refuse,
            )

        settings = {
            "fields": [field.name for field in fields],
            "format": format,
            "normalized": normalized,
            "min_size": min_size,
            "truncate": truncate,
            "orientation": orientation,
        }
        outputs = [((most, *field.shape), field.dtype) for field in fields]
        return self._part(draw, "boxes", boxes_of, [*outputs, ((), np.int32)], settings)

    @do_not_convert
    @knows_its_names
    def points(
        self,
        points: DataNode,
        visible: DataNode | None = None,
        *,
        normalized: bool = False,
        max_points: int = 100,
        truncate: bool = False,
        orientation: str = "equal",
    ) -> tuple[DataNode, DataNode, DataNode]:
        """Returns points, such as keypoints, in the window.

        Points outside of the window stay, but are not visible. A flip does not exchange the names
        of points, such as of the left and the right eye: exchange them if ``matrix()[0, 0]`` is
        negative.

        Args:
            points: A field of points (x, y), [n, 2] or [n, ..., 2] for each record; n may be 0.
            visible: A field of integers or booleans, [n] or [n, ...], 0 for points that are not
                visible; None: all points in the image are visible.
            normalized: Whether points are shares of the image's width and height, and after the
                call of the window's. A record counts as bad if all its points except (0, 0) seem to
                have the other unit: they lie in the first pixel, or have a share above 2.
            max_points: The number of rows of the results.
            truncate: If True, rows after the first ``max_points`` are omitted; otherwise their
                record counts as a bad record.
            orientation: As for `boxes`.

        Returns:
            The points, float32 [max_points, 2] or [max_points, ..., 2]; the visibility, int32
            [max_points] or [max_points, ...], 0 for points outside of the window; and the number of
            rows, an int32 scalar. The rows after this number are 0.

        Raises:
            TypeError, ValueError: As for `boxes`.
        """
        draw = self._with_draw("points", orientation)
        most = whole_number("max_points", max_points, "a number of points, 1 or more", 1)
        fields = [_ColumnField.from_node(draw, points, "points")]
        if fields[0].shape[-1:] != (2,):
            raise TypeError(
                f"points must be a field [n, 2] or [n, ..., 2], but {fields[0].name} has rows of "
                f"shape {fields[0].shape}"
            )
        inner = fields[0].shape[:-1]
        if visible is not None:
            flags = _ColumnField.from_node(draw, visible, "visible", np.dtype(np.int32), inner)
            if flags.declared.kind not in "iub":
                raise TypeError(
                    f"visible must be a field of integers or booleans, but {flags.name} is "
                    f"{flags.declared}. Convert it in the records, by source.map"
                )
            fields.append(flags)

        def points_of(rows: DrawRows) -> list[NDArray[Any]]:
            return geometry.window_points(
                self._geometry(rows),
                [field.column(rows) for field in fields],
                normalized=normalized,
                max_points=most,
                truncate=truncate,
                refuse=rows.refuse,
            )

        settings = {
            "fields": [field.name for field in fields],
            "normalized": normalized,
            "truncate": truncate,
            "orientation": orientation,
        }
        outputs = [((most, *inner, 2), np.float32), ((most, *inner), np.int32), ((), np.int32)]
        mapped, is_visible, count = self._part(draw, "points", points_of, outputs, settings)
        return mapped, is_visible, count

    @do_not_convert
    def matrix(self) -> DataNode:
        """Returns the matrix that maps (x, y, 1) of the image to (x, y, 1) of the window's output.

        Returns:
            A matrix [3, 3], float32, in pixels.

        Raises:
            TypeError: If the sizes of the window's images are unknown, as over DALI's readers.
        """
        draw = self._with_draw("matrix", "any")

        def matrix_of(rows: DrawRows) -> list[NDArray[Any]]:
            matrix = self._geometry(rows).matrix
            last = np.broadcast_to([[0.0, 0.0, 1.0]], (len(matrix), 1, 3))
            return [np.concatenate([matrix, last], axis=1)]

        return self._part(draw, "matrix", matrix_of, [((3, 3), np.float32)], {})[0]

    @do_not_convert
    def extent(self) -> DataNode:
        """Returns the part of the output that shows the image; the rest is padding.

        Use it to compute the padding mask of a detector, or boxes relative to the image alone.

        Returns:
            The corners (x0, y0, x1, y1) in pixels of the output, float32 [4]. For
            `affine_window`, the box around the moved image, which also contains padding.

        Raises:
            TypeError: If the sizes of the window's images are unknown, as over DALI's readers.
        """
        draw = self._with_draw("extent", "any")

        def extent_of(rows: DrawRows) -> list[NDArray[Any]]:
            return [geometry.extents(self._geometry(rows))]

        return self._part(draw, "extent", extent_of, [((4,), np.float32)], {})[0]

    @do_not_convert
    def _geometry(self, rows: DrawRows) -> Geometry:
        """Returns the geometry of some rows, which the first call computes."""
        found: Geometry | None = rows.shared.get(self._name)
        if found is None:
            found = self._make(rows)
            for check in self._checks:
                check(rows, found.sizes)
            for operand in found.operands:
                operand.flags.writeable = False  # several draws receive it
            rows.shared[self._name] = found
        return found

    def _part(
        self,
        draw: Draw,
        name: str,
        function: Callable[[DrawRows], list[NDArray[Any]]],
        outputs: Sequence[tuple[Sequence[int], Any]],
        settings: dict[str, Any],
    ) -> tuple[DataNode, ...]:
        """Returns results of NumPy that depend on the window; see `Draw._compute_from_rows`."""
        nodes = draw._compute_from_rows(
            function, outputs, name=name, kind=f"Window.{name}", settings=settings, of=self._name
        )
        # JAX's compiled functions reject arrays on different devices.
        return tuple(on_device(node, self._images.device) for node in nodes)

    def _with_draw(self, method: str, orientation: str) -> Draw:
        """Returns the draw, for a method that needs it.

        If ``orientation`` is "equal", records are refused whose images their decoder turns.

        Raises:
            TypeError: If there is none, or the window's images are not those of the records.
            ValueError: If ``orientation`` is neither "equal" nor "any", or the window belongs to
                another definition of the graph.
        """
        self._check_graph()
        if self._draw is None and draw_of_pipeline() is not None:
            raise _moved(f"Window.{method} needs images of the records")
        if self._draw is None:
            raise TypeError(
                f"Window.{method} needs a graph over a source, or over Grain's records with the "
                "parameter draw. Over DALI's readers, windows have images and masks only"
            )
        if method in ("matrix", "extent"):
            return self._draw
        if self._field is None:
            raise _moved(f"{method} refer to the images of the records")
        image_field = self._field
        text = (
            f"the EXIF orientation turns {image_field.name}, and its {method} may refer to the "
            "stored pixels. If they do, decode with adjust_orientation=False; otherwise pass "
            "orientation='any'"
        )

        def check(rows: DrawRows, _: Sizes) -> None:
            for row in np.flatnonzero(rows.turned(image_field)).tolist():
                rows.refuse(row, ValueError(text))

        if _is_equal(orientation):
            self._checks.append(check)
        return self._draw

    def _window(
        self, images: DataNode, interp_type: Any, antialias: bool, fill: Any, orientation: str
    ) -> DataNode:
        """Returns the window of images or masks; see `image`."""
        self._check_graph()
        is_equal = _is_equal(orientation)
        draw = self._draw or draw_of_pipeline()
        dtype, layout = dtype_and_layout(images, draw)
        window_pixels.check_fill("fill", fill, dtype)
        operands = self._operands
        if before_branches(images).name != before_branches(self._images).name:
            if draw is not None:
                self._check_other(draw, images, is_equal)
            elif is_equal:
                raise TypeError(
                    "the EXIF orientations of two images can't be compared in this graph: pass "
                    "orientation='any' if both fit each other as they are decoded. Graphs over a "
                    "source, and over Grain's records with the parameter draw, compare them"
                )
            else:
                first = window_pixels.checked_in_graph(self._images, images, operands[0])
                operands = [first, *operands[1:]]
        layout += "C" * (layout == "HW")
        part = None if self._draw is None else functools.partial(self._decoded_part, self._draw)
        style = Style(interp_type, antialias, fill, dtype, layout, part)
        window: Any = changed_as_images(
            images, draw, lambda pixels: self._pixels(pixels, operands, self.size, style)
        )
        window = on_device(window, self._images.device)
        return window if draw is None or self.size is None else draw.sized(window, self.size)

    def _decoded_part(self, draw: Draw) -> Part:
        """Returns the part of the images that `_window` needs to resize the window."""

        def part_of(rows: DrawRows) -> Sequence[NDArray[Any]]:
            found = self._geometry(rows)
            start, end, *sizes = found.operands
            return geometry.needed_part(found.sizes, start, end, sizes[0] if sizes else self.size)

        return Part(
            *draw._compute_from_rows(
                part_of, [_INTS, _INTS], name="decoded", kind="", settings={}, of=self._name
            )
        )

    def _check_graph(self) -> None:
        """Raises ValueError if the graph that is being defined is not the window's own."""
        if self._pipeline() is not Pipeline.current():
            raise ValueError(
                "a window may only be used while its own graph function runs. Make the window "
                "inside of that function"
            )

    def _check_other(self, draw: Draw, images: DataNode, is_equal: bool) -> None:
        """Adds a check that other images show the same places as the window's images.

        Raises:
            TypeError: If the images may have been moved, flipped or resized before.
        """
        first, other = self._field, draw._image_field(images)
        if first is None or other is None:
            raise _moved("two images of a window must show the same places")

        def check(rows: DrawRows, sizes: Sizes) -> None:
            one_turns = rows.turned(first) != rows.turned(other)
            for row in np.flatnonzero(is_equal & one_turns).tolist():
                text = (
                    f"the EXIF orientation turns only one of {first.name} and {other.name}. If "
                    "both fit the image as displayed, pass orientation='any'. If both fit the "
                    "stored pixels, decode with adjust_orientation=False"
                )
                rows.refuse(row, ValueError(text))
            other_sizes = rows.sizes_of(other)
            for row in np.flatnonzero((other_sizes != sizes).any(axis=1)).tolist():
                (height, width), (other_height, other_width) = sizes[row], other_sizes[row]
                text = (
                    f"{first.name} has {height} x {width} pixels, but {other.name} has "
                    f"{other_height} x {other_width}. Both must have the same size"
                )
                rows.refuse(row, ValueError(text))

        if first != other:
            self._checks.append(check)


def _unknown(rows: DrawRows) -> Geometry:
    """The geometry of a window that the graph computes; no method asks for it."""
    raise TypeError("the geometry of the window is computed in the graph")


def _is_equal(orientation: str) -> bool:
    """Returns whether orientations must be equal; raises ValueError for an unknown value."""
    if orientation not in ("equal", "any"):
        raise ValueError(f"orientation must be 'equal' or 'any', not {orientation!r}")
    return orientation == "equal"


def _moved(fact: str) -> TypeError:
    return TypeError(
        f"{fact}, but these may have been moved, flipped or resized in the graph. Make the window "
        "of the output of fn.decoders.image or of a field, apply it, and change the results"
    )


class _ColumnField(NamedTuple):
    """A field with a row for each box or point of a record.

    Attributes:
        name: The name of the field.
        shape: The shape of a row.
        dtype: The dtype of the result.
        declared: The dtype of the field.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    declared: np.dtype[Any]

    @staticmethod
    def from_node(
        draw: Draw,
        node: Any,
        argument: str,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
    ) -> _ColumnField:
        """Returns the field of a node of the graph.

        Args:
            draw: The draw.
            node: The node.
            argument: The name of the argument, for errors.
            dtype: The dtype of the result; None: the dtype of the field, with 32 bits at most.
            shape: The shape of a row; None: the shape in the first record.

        Raises:
            TypeError: If the node is not a field, has another number of dimensions, or its first
                record shows no rows.
        """
        name = draw._field_of(node, argument)
        kind = draw._kinds[name]
        if kind.ndim == 0:
            raise TypeError(
                f"{argument}: {name} must have a row for each box or point, not a number"
            )
        if shape is not None and kind.ndim != 1 + len(shape):
            raise TypeError(
                f"{argument} must be a field [{', '.join(map(str, ['n', *shape]))}], but {name} "
                f"has {kind.ndim} dimension{'s' * (kind.ndim != 1)}"
            )
        if shape is None and argument == "points" and kind.ndim == 2:
            shape = (2,)
        elif shape is None:
            shape = np.shape(draw._example(name))[1:] if kind.ndim > 1 else ()
            if len(shape) != kind.ndim - 1:
                raise TypeError(
                    f"{argument}: the first record has an empty {name}, which does not show the "
                    f"shape of its rows. Return arrays [0, ...] of {kind.ndim} dimensions for it"
                )
        dtype = np.dtype(dtype or _SHORTER.get(kind.dtype.name, kind.dtype))
        return _ColumnField(name, shape, dtype, kind.dtype)

    def column(self, rows: DrawRows) -> Column:
        """Returns the field of some rows."""
        return Column(self.name, rows.values(self.name), self.shape, self.dtype, self.declared)


def _box_fields(draw: Draw, boxes: Any, columns: Sequence[Any] = ()) -> list[_ColumnField]:
    """Returns the fields of boxes and their columns.

    Raises:
        TypeError: If one of them is not such a field.
    """
    first = _ColumnField.from_node(draw, boxes, "boxes", np.dtype(np.float32), (4,))
    return [first, *(_ColumnField.from_node(draw, node, "columns") for node in columns)]


# Windows


def drawn(
    window_type: type[_W],
    images: DataNode,
    size: Pair | None,
    draw: Draw,
    make: Make,
    operands: Sequence[tuple[Sequence[int], Any]],
    pixels: Pixels,
    *,
    kind: str,
    settings: dict[str, Any],
    name: str | None,
    columns: int = 0,
    unfit: Callable[[Sizes], Mapping[int, str]] | None = None,
) -> _W:
    """Returns a window that a draw computes, together with the windows of equal settings.

    Args:
        window_type: The class of the window.
        images, size, draw, name: As for the public functions; the size is None if the operands
            contain it.
        make: Computes the geometry.
        operands, pixels, kind, settings: As for `drawn_from_rows`.
        columns: The number of uniform numbers that the geometry needs.
        unfit: Returns an error message for each row whose image has no window.
    """
    name = draw._named(name)
    image_sizes = draw._sizes_of(images)

    def arrays(u: NDArray[np.float32], sizes: Sizes) -> list[NDArray[Any]]:
        found = make(u, sizes)
        return [found.outputs, found.matrix, *found.operands]

    keys = column_keys(name, columns)
    joined = draw._joined(arrays, keys, image_sizes, kind, {**settings, "size": size})

    def from_rows(rows: DrawRows) -> Geometry:
        sizes = rows.sizes_of(image_sizes)
        for row, text in (unfit(sizes) if unfit else {}).items():
            rows.refuse(row, ValueError(text))
        outputs, matrix, *found = joined(rows)
        return Geometry(sizes, outputs, matrix, tuple(found))

    return drawn_from_rows(
        window_type,
        images,
        size,
        draw,
        from_rows,
        operands,
        pixels,
        kind=kind,
        settings=settings,
        name=name,
    )


def drawn_from_rows(
    window_type: type[_W],
    images: DataNode,
    size: Pair | None,
    draw: Draw,
    make: Callable[[DrawRows], Geometry],
    operands: Sequence[tuple[Sequence[int], Any]],
    pixels: Pixels,
    *,
    kind: str,
    settings: dict[str, Any],
    name: str,
    by_center: bool = False,
) -> _W:
    """Returns a window that a draw computes from the rows of a run.

    Args:
        window_type, images, size, draw: As for `drawn`.
        make: Computes the geometry.
        operands: The shape per sample and the dtype of each of the geometry's operands.
        pixels: Computes the pixels.
        kind: The name of the calling function.
        settings: JSON values that the geometry depends on.
        name: The name of the draw, from `Draw._named`.
        by_center: Whether the window has only the boxes whose center it contains.
    """
    window = window_type(images, size, pixels, draw=draw, name=name, make=make, by_center=by_center)
    window._operands = draw._compute_from_rows(
        lambda rows: window._geometry(rows).operands,
        operands,
        name=name,
        kind=kind,
        settings=settings,
    )
    return window


@do_not_convert
@knows_its_names
def random_window(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    scale: Range = (0.08, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Chooses a window of random area and aspect ratio, as `random_resized_crop` does.

    Args:
        images: The output of ``fn.decoders.image`` for a field, or a field of arrays; possibly with
            other colors, by functions of ``dalijax.augment``.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        scale: Range of the window's share of the image's area.
        ratio: Range of width / height; its logarithm is uniform.
        flip: Probability of a horizontal flip.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window, which lies in the image.

    Raises:
        ValueError: If a size, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    settings = {"size": windows.pair(size, "size"), "flip": flip}
    return random_area(
        images, size, draw, scale, ratio, flip, name, "augment.random_window", settings
    )


def random_area(
    images: DataNode,
    size: int | Pair,
    draw: Draw,
    scale: Range,
    ratio: Range,
    flip: float,
    name: str | None,
    kind: str,
    settings: dict[str, Any],
) -> Window:
    """Returns the window of `random_window`, with further settings."""
    check_draw(draw, images)
    pair = windows.pair(size, "size")
    windows.check_ranges(scale, ratio)
    check_share("flip", flip)

    def make(u: NDArray[np.float32], sizes: Sizes) -> Geometry:
        corners = windows.flipped(*windows.resized_crops(u, sizes, scale, ratio), u, flip)
        return geometry.inside(sizes, *corners, pair)

    return drawn(
        Window,
        images,
        pair,
        draw,
        make,
        [_FLOATS, _FLOATS],
        window_pixels.resized,
        kind=kind,
        settings={"scale": scale, "ratio": ratio, **settings},
        name=name,
        columns=windows.COLUMNS + 1,
    )


@do_not_convert
@knows_its_names
def scale_window(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    scale: Range = (0.1, 2.0),
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Resizes the image at random with its aspect ratio, then crops or pads it.

    This is the large-scale jitter of detectors and segmenters, torchvision's ``ScaleJitter``, then
    a random crop. An image that is smaller than the output is at the top left; after a flip, at the
    top right.

    Args:
        images: As for `random_window`.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        scale: Range of the image's size, as a share of the largest size that fits into the output.
        flip: Probability of a horizontal flip of the output.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window.

    Raises:
        ValueError: If a size, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    pair = windows.pair(size, "size")
    _check_range("scale", scale, "(0.1, 2.0)", above=0)
    check_share("flip", flip)
    return drawn(
        Window,
        images,
        pair,
        draw,
        lambda u, sizes: geometry.scaled(u.astype(np.float64), sizes, pair, scale, flip),
        [_FLOATS, _FLOATS, _FLOATS, _INTS],
        window_pixels.placed,
        kind="augment.scale_window",
        settings={"size": pair, "scale": scale, "flip": flip},
        name=name,
        columns=4,
    )


@do_not_convert
@knows_its_names
def crop_window(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    padding: int | Sequence[int] = 0,
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Chooses a window of the output's size at a random position, as `random_crop` does.

    Args:
        images: As for `random_window`.
        size: Height and width of the window and of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        padding: Pixels added around the image: on all sides, (left and right, top and bottom), or
            (left, top, right, bottom), as in torchvision.
        flip: Probability of a horizontal flip of the output.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window. An image that is smaller than the window, even with its padding, counts as a bad
        record.

    Raises:
        ValueError: If the size, the padding or the probability is invalid.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    settings = {"flip": flip}
    return random_place(images, size, draw, padding, flip, name, "augment.crop_window", settings)


def random_place(
    images: DataNode,
    size: int | Pair,
    draw: Draw,
    padding: int | Sequence[int],
    flip: float,
    name: str | None,
    kind: str,
    settings: dict[str, Any],
) -> Window:
    """Returns the window of `crop_window`, with further settings."""
    check_draw(draw, images)
    pair = windows.pair(size, "size")
    padding = windows.plain(padding)
    sides = tuple(padding) if isinstance(padding, Sequence) else (padding,)
    if len(sides) not in (1, 2, 4) or not all(windows.is_whole(p) and p >= 0 for p in sides):
        raise ValueError(f"padding must be 1, 2 or 4 numbers of pixels, not {padding!r}")
    sides = tuple(map(int, sides)) * (4 // len(sides))
    check_share("flip", flip)

    def make(u: NDArray[np.float32], sizes: Sizes) -> Geometry:
        start = windows.crops(u[:, :2], sizes, pair, sides)
        flips = u[:, 2] < flip if flip else np.zeros(len(u), np.bool_)
        found = geometry.cropped(sizes, start, pair, flips)
        return found if flip else dataclasses.replace(found, operands=found.operands[:1])

    def pixels(images: DataNode, operands: Sequence[Any], size: Pair, style: Style) -> DataNode:
        sliced: Any = window_pixels.sliced(with_layout(images, draw), operands[0], size, style.fill)
        return fn.flip(sliced, horizontal=operands[1]) if flip else sliced

    return drawn(
        Window,
        images,
        pair,
        draw,
        make,
        [_INTS, ((), np.int32)] if flip else [_INTS],
        pixels,
        kind=kind,
        settings={"size": pair, "padding": sides, **settings},
        name=name,
        columns=3 if flip else 2,
        unfit=lambda sizes: windows.too_small(sizes, pair, padding=sides),
    )


@do_not_convert
@knows_its_names
def center_window(
    images: DataNode, size: int | Pair, *, draw: Draw | None = None, resize: int | None = None
) -> Window:
    """Selects the center of the image, as `center_crop` does, but pads smaller images.

    Nothing is random. Over DALI's readers, and of images whose sizes are unknown, the graph
    computes the window, which then has images and masks only.

    Args:
        images: As for `random_window`, or without ``draw`` any images [height, width, channels].
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function, or None. Graphs over a source need it
            only for images that are declared by ``draw.sized``.
        resize: Length to which the image's shorter side is resized before, in pixels; None: the
            image is not resized.

    Returns:
        The window. An image that is smaller than the output is padded on all sides.

    Raises:
        ValueError: If a size is invalid.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    pair, shorter = windows.pair(size, "size"), shorter_side(resize)
    draw = _draw_for(images, draw)
    if draw is None:
        sizes, scaled, room = window_pixels.center_in_graph(images, pair, shorter)
        offset = dali_math.max(-room, 0) // 2 - window_pixels.half(dali_math.max(room, 0))
        return Window(
            images,
            pair,
            window_pixels.placed,
            window_pixels.placed_in_graph(sizes, scaled, offset, pair),
        )
    return drawn(
        Window,
        images,
        pair,
        draw,
        lambda _, sizes: geometry.centered(sizes, pair, shorter),
        [_FLOATS, _FLOATS, _FLOATS, _INTS],
        window_pixels.placed,
        kind="augment.center_window",
        settings={"size": pair, "resize": resize},
        name=None,
    )


def center_part(images: DataNode, pair: Pair, draw: Draw, shorter: int | None) -> Window:
    """Returns the window of `center_crop`; smaller images count as bad records."""
    return drawn(
        Window,
        images,
        pair,
        draw,
        lambda _, sizes: geometry.inside(sizes, *windows.central_crops(sizes, pair, shorter), pair),
        [_FLOATS, _FLOATS],
        window_pixels.resized,
        kind="augment.center_crop",
        settings={"size": pair, "resize": shorter},
        name=None,
        unfit=lambda sizes: windows.too_small(sizes, pair, shorter=shorter),
    )


@do_not_convert
@knows_its_names
def fit_window(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw | None = None,
    resize: int | Sequence[int] | None = None,
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Selects the whole image, resized with its aspect ratio, and padded at the bottom or right.

    Use it to evaluate detectors; the inverse of `Window.matrix` maps predictions back. With several
    lengths of the shorter side, it is the training window of DETR and Faster R-CNN, torchvision's
    ``RandomShortestSize``. The height and width of the resized image are rounded down, as in
    torchvision; the matrix contains the scale of each. Over DALI's readers, and for images whose
    sizes are unknown, the graph computes the window, which then has images and masks only.

    Args:
        images, draw: As for `center_window`. Random lengths and flips need ``draw``.
        size: Height and width of the output, in pixels; an int sets both.
        resize: Length to which the image's shorter side is resized, in pixels, or less if the image
            would not fit into the output; None: the largest size that fits. Of several lengths,
            such as ``range(480, 801, 32)``, each is equally likely.
        flip: Probability of a horizontal flip. Flipped images are padded at the right, too.
        name: Name of the draw, if it is random; see `dalijax.Draw`.

    Returns:
        The window, which contains the whole image.

    Raises:
        ValueError: If a size, length or probability is invalid.
        TypeError: If ``draw`` cannot look up the sizes of the images, or is missing but needed.
    """
    pair, lengths = windows.pair(size, "size"), _lengths(resize)
    check_share("flip", flip)
    is_random = flip > 0 or len(lengths) > 1
    if is_random:
        check_draw(draw, images)
    shorter = lengths[0] if lengths else None
    draw = _draw_for(images, draw)
    if draw is None:
        sizes = sizes_in_graph(images)
        scaled = window_pixels.fit_in_graph(sizes, pair, shorter)
        return Window(
            images,
            pair,
            window_pixels.placed,
            window_pixels.placed_in_graph(sizes, scaled, 0 * sizes, pair),
        )

    def make(u: NDArray[np.float32], sizes: Sizes) -> Geometry:
        sides: Any = shorter
        if len(lengths) > 1:
            sides = np.array(lengths)[(u[:, 0].astype(np.float64) * len(lengths)).astype(np.int64)]
        return geometry.fitted(sizes, pair, sides, u[:, 1] < flip if is_random else None)

    return drawn(
        Window,
        images,
        pair,
        draw,
        make,
        [_FLOATS, _FLOATS, _FLOATS, _INTS],
        window_pixels.placed,
        kind="augment.fit_window",
        settings={"size": pair, "resize": lengths, "flip": flip},
        name=name,
        columns=2 if is_random else 0,
    )


@do_not_convert
@knows_its_names
def resize_window(images: DataNode, size: int | Pair, *, draw: Draw | None = None) -> Window:
    """Selects the whole image, resized to the output: torchvision's ``Resize((height, width))``.

    The aspect ratio becomes that of the output; `fit_window` keeps it. Nothing is random. Over
    DALI's readers, and for images whose sizes are unknown, the graph computes the window, which
    then has images and masks only.

    Args:
        images, draw: As for `center_window`.
        size: Height and width of the output, in pixels; an int sets both.

    Returns:
        The window.

    Raises:
        ValueError: If the size is invalid.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    pair = windows.pair(size, "size")
    draw = _draw_for(images, draw)
    if draw is None:
        end: Any = fn.cast(sizes_in_graph(images), dtype=types.FLOAT)
        return Window(images, pair, window_pixels.resized, [0 * end, end])
    return drawn(
        Window,
        images,
        pair,
        draw,
        lambda _, sizes: geometry.inside(sizes, np.zeros_like(sizes), sizes, pair),
        [_FLOATS, _FLOATS],
        window_pixels.resized,
        kind="augment.resize_window",
        settings={"size": pair},
        name=None,
    )


@do_not_convert
@knows_its_names
def iou_window(
    images: DataNode,
    boxes: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    format: str = "xyxy",
    normalized: bool = False,
    options: Sequence[float] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
    scale: Range = (0.3, 1.0),
    ratio: Range = (0.5, 2.0),
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Chooses a window that overlaps with a box: torchvision's ``RandomIoUCrop`` (Liu et al., SSD).

    Each round chooses one of ``options``, a least intersection over union, and tries 40 windows
    that contain the center of a box. A window is used if its overlap with one of these boxes is at
    least the option; an option of 1 or more uses the whole image. After 32 rounds, in which
    torchvision would go on, the whole image is used.

    Args:
        images: As for `random_window`.
        boxes: A field of boxes, [n, 4].
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        format, normalized: The form of the boxes; see `Window.boxes`.
        options: The least overlaps.
        scale: Range of the window's share of the height and of the width of the image.
        ratio: Range of width / height of the window.
        flip: Probability of a horizontal flip.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window, which has the boxes whose centers it contains.

    Raises:
        ValueError: If a size, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images, or ``boxes`` is not a field
            of the records.
    """
    check_draw(draw, images)
    pair = windows.pair(size, "size")
    windows.check_ranges(scale, ratio)
    check_share("flip", flip)
    form = _box_form(format, normalized)
    levels = [float(option) for option in options]
    if not levels or not all(0 <= level < np.inf for level in levels):
        raise ValueError(
            "options must be a list of at least one overlap, 0 or more, such as (0.5, 1.0), not "
            f"{options!r}"
        )
    (field,) = _box_fields(draw, boxes)
    name = draw._named(name)
    image_sizes = draw._sizes_of(images)
    keys = column_keys(name, 1 + iou_crops.NUMBERS)

    def make(rows: DrawRows) -> Geometry:
        sizes = rows.sizes_of(image_sizes)
        refusals = geometry.Refusals(rows.refuse)
        (values,), counts = geometry.joined([field.column(rows)], refusals)
        records = np.repeat(np.arange(len(sizes)), counts)
        corners = geometry.image_boxes(values, form, sizes, records, field.name, refusals)
        start, end = iou_crops.choose(
            lambda some, part: uniform(rows.records[some], keys[1:][part]),
            sizes,
            corners,
            records,
            levels=levels,
            scale=scale,
            ratio=ratio,
        )
        start, end = windows.flipped(start, end, rows.uniform(keys[:1]), flip)
        return geometry.inside(sizes, start, end, pair)

    settings = {
        "size": pair,
        "boxes": field.name,
        "format": format,
        "normalized": normalized,
        "options": levels,
        "scale": scale,
        "ratio": ratio,
        "flip": flip,
    }
    return drawn_from_rows(
        Window,
        images,
        pair,
        draw,
        make,
        [_FLOATS, _FLOATS],
        window_pixels.resized,
        kind="augment.iou_window",
        settings=settings,
        name=name,
        by_center=True,
    )


@do_not_convert
@knows_its_names
def affine_window(
    images: DataNode,
    size: int | Pair,
    *,
    draw: Draw,
    degrees: float | Range = 0.0,
    translate: Range = (0.0, 0.0),
    scale: Range = (1.0, 1.0),
    shear: float | Range = 0.0,
    flip: float = 0.0,
    name: str | None = None,
) -> Window:
    """Rotates, shifts, scales and shears the image at random: torchvision's ``RandomAffine``.

    The image is first resized with its aspect ratio to fit into the output, and centered there.

    Args:
        images: As for `random_window`.
        size: Height and width of the output, in pixels; an int sets both.
        draw: The argument ``draw`` of the graph function.
        degrees: Range (low, high) of the clockwise rotation around the center, or a number d for
            (-d, d).
        translate: Greatest shift along the width and along the height, as shares of the output's.
            Shifts are whole pixels.
        scale: Range of the scale.
        shear: Range (low, high) of the shear parallel to the width, in degrees, or a number s for
            (-s, s).
        flip: Probability of a horizontal flip, before the other changes.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        The window. Its images take one ``fill`` for all channels.

    Raises:
        ValueError: If a size, range or probability is out of bounds.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    pair = windows.pair(size, "size")
    check_share("flip", flip)
    ranges = {
        "degrees": _around_zero("degrees", degrees, np.inf),
        "translate": translate,
        "scale": scale,
        "shear": _around_zero("shear", shear, 90),
    }
    _check_range("scale", scale, "(0.8, 1.2)", above=0)
    for share in _pair_of_numbers("translate", translate, "(0.1, 0.1)"):
        check_share("translate", share)
    return drawn(
        Window,
        images,
        pair,
        draw,
        lambda u, sizes: geometry.affine(u.astype(np.float64), sizes, pair, flip=flip, **ranges),
        [_FLOATS, _MATRIX, _MATRIX],
        window_pixels.warped,
        kind="augment.affine_window",
        settings={"size": pair, **ranges, "flip": flip},
        name=name,
        columns=6,
    )


def _draw_for(images: DataNode, draw: Draw | None) -> Draw | None:
    """Returns the draw of a window that needs no random numbers.

    Args:
        images, draw: As for the public functions.

    Returns:
        The argument; by default the draw of the graph, if the images are those of a field.
    """
    if draw is not None:
        check_draw(draw, images)
        return draw
    check_images(images)
    found = draw_of_pipeline()
    return None if found is None or found._image_field(images) is None else found


def _box_form(format: str, normalized: bool) -> BoxForm:
    """Returns the form of boxes; raises ValueError for an unknown format."""
    if format not in geometry.FORMATS:
        raise ValueError(f"format must be one of {geometry.FORMATS}, not {format!r}")
    return BoxForm(format, bool(normalized))


def shorter_side(resize: int | None) -> int | None:
    """Returns the length of an image's shorter side after resizing, or None; checks it."""
    if resize is None:
        return None
    return whole_number("resize", resize, "a number of pixels, 1 or more, or None", 1)


def _lengths(resize: int | Sequence[int] | None) -> list[int]:
    """Returns the lengths of `fit_window` as a list; raises ValueError for invalid values."""
    if resize is None:
        return []
    resize = windows.plain(resize)
    given = [*resize] if isinstance(resize, Sequence) else [resize]
    if not given or not all(windows.is_whole(length) and length >= 1 for length in given):
        raise ValueError(
            "resize must be a number of pixels, 1 or more, several such as (480, 640), or None, "
            f"not {resize!r}"
        )
    return [*map(int, given)]


def _pair_of_numbers(name: str, value: Any, example: str) -> tuple[float, float]:
    """Returns a pair of numbers; raises TypeError for other values."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_pair or not all(isinstance(x, (int, float, np.number)) for x in value):
        raise TypeError(f"{name} must be a pair of numbers such as {example}, not {value!r}")
    return value[0], value[1]


def _check_range(name: str, value: Any, example: str, above: float) -> None:
    """Raises TypeError or ValueError unless a value is (low, high), in order and above a number."""
    low, high = _pair_of_numbers(name, value, example)
    if not above < low <= high < np.inf:
        raise ValueError(f"{name} must be (low, high) with {above} < low <= high, not {value!r}")


def _around_zero(name: str, value: Any, most: float) -> Range:
    """Returns a range, given as (low, high), or as a number x for (-x, x).

    Raises:
        TypeError: If the value is neither.
        ValueError: If the range is out of order, or reaches ``most``.
    """
    given = value = windows.plain(value)
    if isinstance(value, (int, float, np.number)):
        value = (-abs(value), abs(value))
    low, high = _pair_of_numbers(name, value, "(-10, 10)")
    if not -most < low <= high < most:
        limits = f", between {-most} and {most}" * bool(np.isfinite(most))
        raise ValueError(
            f"{name} must be a finite number or a range (low, high) in order{limits}, not {given!r}"
        )
    return low, high
