"""The geometry of windows: where pixels, boxes and points of images lie in outputs.

Pure functions of NumPy arrays, for all rows of a run at once, in double precision. Coordinates are
pixels from the top left corner, and refer to the edges of pixels: the first pixel is from 0 to 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import windows
from .windows import Floats, Pair, Range, Sizes

FORMATS = ("xyxy", "xywh", "cxcywh", "yxyx")
TINY = 1e-9  # pixels; smaller differences are rounding errors


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Windows of some images.

    Attributes:
        sizes: Heights and widths of the images, int32 [rows, 2].
        outputs: Heights and widths of the outputs, [rows, 2].
        matrix: Maps (x, y, 1) of the image to (x, y) of the output, float64 [rows, 2, 3].
        operands: Values for the operators that compute the pixels, arrays [rows, ...].
    """

    sizes: Sizes
    outputs: NDArray[Any]
    matrix: Floats
    operands: tuple[NDArray[Any], ...]


def inside(sizes: Sizes, start: Any, end: Any, size: Any) -> Geometry:
    """Returns windows that lie in their images.

    Args:
        sizes: Image sizes, [rows, 2].
        start, end: Corners (y, x) of the windows in the images, [rows, 2]. If an axis of the output
            is flipped, the start is greater than the end.
        size: Height and width of all outputs, or of each, [rows, 2].

    Returns:
        The windows. Their operands are the corners, float32 [rows, 2].
    """
    corners = tuple(np.asarray(corner, np.float32) for corner in (start, end))
    return _between(sizes, start, end, size, corners)


def needed_part(
    sizes: Sizes, start: NDArray[Any], end: NDArray[Any], size: Any
) -> list[NDArray[np.int32]]:
    """Returns the parts of images that contain all pixels which resized windows depend on.

    Args:
        sizes, start, end: As for `inside`.
        size: Height and width of all resized windows, or of each, [rows, 2].

    Returns:
        The first row and column of each part, and its height and width; int32 [rows, 2].
    """
    low, high = np.minimum(start, end), np.maximum(start, end)
    reach = np.maximum((high - low) / np.asarray(size, np.float64), 1) + 1  # of a triangular filter
    first = np.clip(np.floor(low - reach), 0, sizes - 1)
    last = np.clip(np.ceil(high + reach), first + 1, sizes)
    return [first.astype(np.int32), (last - first).astype(np.int32)]


def placed(
    sizes: Sizes, resized: Floats, offset: Floats, size: Pair, flips: NDArray[np.bool_] | None
) -> Geometry:
    """Returns windows of images that are resized and placed on a canvas.

    Args:
        sizes: Image sizes, [rows, 2].
        resized: Sizes of the resized images, whole numbers, [rows, 2].
        offset: Places (y, x) of the images' top left corners on the canvas, whole numbers,
            [rows, 2].
        size: Height and width of the canvas, the output.
        flips: Whether to flip each canvas horizontally, [rows]; None for no flips.

    Returns:
        The windows. Their operands are the corners (y, x) of the visible part of the image, its
        size on the canvas, float32 [rows, 2], and minus its place on the canvas, int32 [rows, 2].
    """
    back = sizes / resized
    start, end = -offset * back, (np.array(size) - offset) * back
    low, high = np.maximum(offset, 0), np.minimum(offset + resized, size)
    first, last = (low - offset) * back, (high - offset) * back
    place = low
    if flips is not None:
        start, end = windows.mirrored(start, end, flips)
        first, last = windows.mirrored(first, last, flips)
        place, _ = windows.mirrored(low, np.array(size) - high, flips)
    operands = *(a.astype(np.float32) for a in (first, last, high - low)), -place.astype(np.int32)
    return _between(sizes, start, end, size, operands)


def _between(
    sizes: Sizes, start: Any, end: Any, size: Any, operands: tuple[NDArray[Any], ...]
) -> Geometry:
    """Returns windows between corners; see `inside` and `Geometry`."""
    start, end = (np.asarray(corner, np.float64)[:, ::-1] for corner in (start, end))
    outputs = np.broadcast_to(size, (len(start), 2))
    step = outputs[:, ::-1] / (end - start)
    matrix = np.zeros((len(start), 2, 3))
    matrix[:, [0, 1], [0, 1]] = step
    matrix[:, :, 2] = -start * step
    return Geometry(sizes, outputs, matrix, operands)


def scaled(u: Floats, sizes: Sizes, size: Pair, scale: Range, flip: float) -> Geometry:
    """Chooses large-scale jitter: a random scale, then a random crop, or padding at the end.

    Args:
        u: Uniform numbers, [rows, 4].
        sizes: Image sizes, [rows, 2].
        size: Height and width of the output.
        scale: Range of the image's size, as a share of the largest size that fits into the output.
        flip: Probability of a horizontal flip.
    """
    factor = scale[0] + u[:, :1] * (scale[1] - scale[0])
    resized = np.maximum(np.floor(sizes * _fit(sizes, size) * factor + TINY), 1.0)
    room = np.maximum(resized - size, 0.0)
    return placed(sizes, resized, -np.floor(u[:, 1:3] * (room + 1)), size, u[:, 3] < flip)


def fitted(sizes: Sizes, size: Pair, shorter: Any = None, flips: Any = None) -> Geometry:
    """Returns windows of whole images, resized with their aspect ratio, and padded at the end.

    Args:
        sizes: Image sizes, [rows, 2].
        size: Height and width of the output.
        shorter: Length of the image's shorter side after resizing, in pixels, a number or an array
            [rows]; smaller if the image would not fit. None: the largest that fits.
        flips: Whether to flip each image horizontally, [rows]; None for no flips.
    """
    factor = _fit(sizes, size)
    if shorter is not None:
        lengths = np.broadcast_to(shorter, len(sizes)).astype(np.float64)[:, np.newaxis]
        factor = np.minimum(factor, lengths / sizes.min(axis=1, keepdims=True))
    resized = np.clip(np.floor(sizes * factor + TINY), 1.0, size)  # down, as in torchvision
    offset = np.zeros_like(resized)
    if flips is not None:  # place images at the right, because the flip moves them to the left
        offset[:, 1] = np.where(flips, size[1] - resized[:, 1], 0.0)
    return placed(sizes, resized, offset, size, flips)


def centered(sizes: Sizes, size: Pair, shorter: int | None) -> Geometry:
    """Returns central windows, padded on all sides if the image is smaller.

    Args:
        sizes: Image sizes, [rows, 2].
        size: Height and width of the output.
        shorter: Length of the image's shorter side after resizing, in pixels; None: not resized.
    """
    resized = windows.resized(sizes, shorter)
    room = resized - size
    # As in torchvision, which rounds down if it pads, and to even if it crops.
    offset = np.where(room < 0, -room // 2, -np.rint(room / 2))
    return placed(sizes, resized, offset, size, None)


def cropped(sizes: Sizes, start: NDArray[np.int32], size: Pair, flips: Any) -> Geometry:
    """Returns windows of the output's size, whose corners (y, x) may lie outside of the image.

    Returns:
        The windows. Their operands are the corners, and whether to flip each output, int32 [rows].
    """
    corners = windows.mirrored(start, start + size, flips)
    return _between(sizes, *corners, size, (start, flips.astype(np.int32)))


def affine(
    u: Floats,
    sizes: Sizes,
    size: Pair,
    *,
    degrees: Range,
    translate: Pair | Range,
    scale: Range,
    shear: Range,
    flip: float,
) -> Geometry:
    """Chooses rotations, translations, scales and shears around the center, as torchvision does.

    The image is first resized with its aspect ratio to fit into the output, and centered.

    Args:
        u: Uniform numbers, [rows, 6].
        sizes: Image sizes, [rows, 2].
        size: Height and width of the output.
        degrees: Range of the clockwise rotation.
        translate: Greatest shift along the width and the height, as shares of the output's.
        scale: Range of the scale.
        shear: Range of the shear along the width, in degrees.
        flip: Probability of a horizontal flip, before the other changes.

    Returns:
        The windows. Their operands are the sizes of the resized images, float32 [rows, 2], the
        matrices from the resized images to the outputs, and those from the images to the outputs,
        float32 [rows, 2, 3].
    """
    low, high = np.transpose([degrees, shear, scale])
    angle, slant, factor = (low + u[:, :3] * (high - low)).T
    shift = np.rint((2 * u[:, 3:5] - 1) * translate * size[::-1])
    angle, slant = np.deg2rad(angle), np.deg2rad(slant)
    # torchvision.transforms.v2.functional: rotation, shear along x, scale.
    linear = np.empty((len(u), 2, 2))
    linear[:, 0, 0], linear[:, 1, 0] = np.cos(angle), np.sin(angle)
    linear[:, 0, 1] = -np.cos(angle) * np.tan(slant) - np.sin(angle)
    linear[:, 1, 1] = -np.sin(angle) * np.tan(slant) + np.cos(angle)
    linear *= factor[:, np.newaxis, np.newaxis]
    linear[:, :, 0] *= np.where(u[:, 5] < flip, -1, 1)[:, np.newaxis]
    resized = np.clip(np.floor(sizes * _fit(sizes, size) + 0.5), 1.0, size)[:, ::-1]
    offset = np.array(size[::-1]) / 2 + shift
    resized_offset = offset - (linear @ (resized / 2)[:, :, np.newaxis])[:, :, 0]
    from_resized = np.concatenate([linear, resized_offset[:, :, np.newaxis]], axis=2)
    matrix = from_resized.copy()
    matrix[:, :, :2] *= (resized / sizes[:, ::-1])[:, np.newaxis]
    operands = tuple(a.astype(np.float32) for a in (resized[:, ::-1], from_resized, matrix))
    return Geometry(sizes, np.broadcast_to(size, (len(u), 2)), matrix, operands)


def _fit(sizes: Sizes, size: Pair) -> Floats:
    """Returns the largest factors by which images fit into an output, [rows, 1]."""
    factors: Floats = (np.array(size) / sizes).min(axis=1, keepdims=True)
    return factors


# Rows of records


class Refusals:
    """The errors of records, by their number.

    Args:
        refuse: Called with the number of a record and its error.
    """

    def __init__(self, refuse: Callable[[int, Exception], None]):
        self._refuse = refuse
        self.records: set[int] = set()

    def add(self, records: Any, text: Callable[[int], str]) -> None:
        """Refuses some records, with a text for each."""
        for record in sorted({*records.tolist()}):
            self.records.add(record)
            self._refuse(record, ValueError(text(record)))


class Column(NamedTuple):
    """A field of some records, with a row for each box or point.

    Attributes:
        name: The name of the field.
        values: An array [n, *shape] of each record, n may differ.
        shape: The shape of a row.
        dtype: The dtype of the result.
        declared: The dtype of the field.
    """

    name: str
    values: Sequence[Any] | NDArray[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    declared: np.dtype[Any]

    def no_rows(self) -> NDArray[Any]:
        """Returns an array without rows."""
        return np.zeros((0, *self.shape), self.declared)


def joined(columns: Sequence[Column], refusals: Refusals) -> tuple[list[NDArray[Any]], Any]:
    """Concatenates the rows of several fields of records.

    Records whose fields have other shapes or dtypes, or different numbers of rows, are refused, and
    have no rows.

    Returns:
        The rows of each column, [total, *shape], and the number of rows of each record, [records].
    """
    arrays = [_arrays(column, refusals) for column in columns]
    counts = np.array([[*map(len, values)] for values in arrays], np.int64)
    for column, lengths in zip(columns[1:], counts[1:]):
        _refuse_counts(column, lengths, columns[0], counts[0], refusals)
    for record in refusals.records:
        counts[:, record] = 0
        for column, column_arrays in zip(columns, arrays):
            column_arrays[record] = column.no_rows()
    return [np.concatenate(values) for values in arrays], counts[0]


def _arrays(column: Column, refusals: Refusals) -> list[NDArray[Any]]:
    """Returns the values of a column as arrays; an empty list becomes an array without rows.

    Records whose array is not of the column's shape and declared dtype are refused, and have no
    rows.
    """
    arrays, texts = [np.asarray(value) for value in column.values], {}
    form = ", ".join(["n", *map(str, column.shape)])
    for record, array in enumerate(arrays):
        shape, dtype = array.shape, array.dtype
        has_shape = bool(shape) and shape[1:] == column.shape
        if has_shape and dtype == column.declared:
            continue
        arrays[record] = column.no_rows()
        is_numbers = dtype.kind in "biuf"
        if not is_numbers or not (has_shape or shape == (0,)):
            texts[record] = f"{column.name} must be numbers [{form}], not {dtype} {list(shape)}"
        elif array.size:
            texts[record] = (
                f"{column.name} is {dtype}, but its field is declared as {column.declared}. "
                "Convert the values, or declare their own kind: Field(dtype, ndim)"
            )
    refusals.add(np.array([*texts], np.int64), texts.__getitem__)
    return arrays


def _refuse_counts(
    column: Column, lengths: Any, first: Column, counts: Any, refusals: Refusals
) -> None:
    """Refuses records whose column has another number of rows than the first column."""
    refusals.add(
        np.flatnonzero(lengths != counts),
        lambda k: f"{column.name} has {lengths[k]} rows, but {first.name} has {counts[k]}",
    )


def checked(rows: NDArray[Any], column: Column, records: Any, refusals: Refusals) -> NDArray[Any]:
    """Returns rows in the dtype of the result; records whose integers do not fit are refused.

    Args:
        rows: The rows of all records.
        column: The column.
        records: The record of each row.
        refusals: Receives the records.
    """
    if column.dtype.kind in "iu" and not np.can_cast(rows.dtype, column.dtype):
        limits = np.iinfo(column.dtype)
        too_large = (rows < limits.min) | (rows > limits.max)
        refusals.add(
            records[too_large.any(axis=tuple(range(1, too_large.ndim)))],
            lambda _: f"{column.name} has an integer that does not fit into {column.dtype}",
        )
    with np.errstate(invalid="ignore"):
        return rows.astype(column.dtype)


def padded(rows: NDArray[Any], records: Any, places: Any, count: int, length: int) -> NDArray[Any]:
    """Returns rows by record, padded: an array [count, length, ...].

    The padding of signed integers is -1, and otherwise 0 or False.

    Args:
        rows: The rows, [n, ...].
        records, places: The record of each row, and its index in the record.
        count: The number of records.
        length: The number of rows of each record in the result.
    """
    fill = -1 if rows.dtype.kind == "i" else 0
    result = np.full((count, length, *rows.shape[1:]), fill, rows.dtype)
    result[records, places] = rows
    return result


def places_of(records: Any, count: int) -> tuple[Any, Any]:
    """Returns the number of rows of each record, and the index of each row in its record.

    Args:
        records: The record of each row, in order.
        count: The number of records.
    """
    counts = np.bincount(records, minlength=count)
    return counts, np.arange(len(records)) - (np.cumsum(counts) - counts)[records]


# Boxes


class BoxForm(NamedTuple):
    """The form of boxes.

    Attributes:
        format: The meaning of the four numbers, one of `FORMATS`.
        normalized: Whether the numbers are shares of the image's width and height.
    """

    format: str = "xyxy"
    normalized: bool = False

    def corners(self, boxes: Floats, sizes: Any) -> Floats:
        """Returns boxes [n, 4] as corners (x0, y0, x1, y1) in pixels.

        Args:
            boxes: The boxes.
            sizes: The height and width of each box's image, [n, 2].
        """
        if self.format == "yxyx":
            boxes = boxes[:, [1, 0, 3, 2]]
        first, second = boxes[:, :2], boxes[:, 2:]
        if self.format == "xywh":
            second = first + second
        elif self.format == "cxcywh":
            first, second = first - second / 2, first + second / 2
        corners = np.concatenate([first, second], axis=1)
        return corners * np.tile(sizes[:, ::-1], 2) if self.normalized else corners

    def from_corners(self, corners: Floats, sizes: Any) -> Floats:
        """Returns corners (x0, y0, x1, y1) in pixels of an image as boxes of this form.

        Args:
            corners: The corners, [n, 4].
            sizes: The height and width of each box's image, [n, 2].
        """
        if self.normalized:
            corners = corners / np.tile(sizes[:, ::-1], 2)
        first, second = corners[:, :2], corners[:, 2:]
        if self.format == "yxyx":
            return corners[:, [1, 0, 3, 2]]
        if self.format == "xywh":
            second = second - first
        elif self.format == "cxcywh":
            first, second = (first + second) / 2, second - first
        return np.concatenate([first, second], axis=1)


def image_boxes(
    boxes: NDArray[Any], form: BoxForm, sizes: Sizes, records: Any, name: str, refusals: Refusals
) -> Floats:
    """Returns the corners (x0, y0, x1, y1) of boxes, in pixels of the image, float64 [n, 4].

    Records are refused if a box isn't finite, ends before it starts, or lies outside of its image,
    as boxes of another form do.

    Args:
        boxes: The boxes, [n, 4].
        form: Their form.
        sizes: Image sizes, [records, 2].
        records: The record of each box.
        name: The name of the field.
        refusals: Receives the records.
    """
    # NumPy reduces rows of few numbers faster if columns are contiguous.
    size = np.asfortranarray(sizes[records])
    corners = form.corners(boxes.astype(np.float64, order="F"), size)
    first, last, width = corners[:, :2], corners[:, 2:], size[:, ::-1]
    if not len(corners):
        return corners
    with np.errstate(invalid="ignore"):
        strange = ~np.isfinite(corners).all(axis=1) | (first > last + TINY).any(axis=1)
        strange |= ((last <= 0) | (first >= width)).any(axis=1) & (last > first).all(axis=1)
        if form.normalized:  # numbers above 2 are pixels
            strange |= (last > 2 * width).any(axis=1)
        else:  # boxes within the first pixel are shares
            strange |= ((last <= 1) & (last > first) & (width > 1)).all(axis=1)
    if strange.any():
        example = {int(records[k]): k for k in np.flatnonzero(strange)[::-1]}
        refusals.add(
            records[strange],
            lambda record: (
                f"the box {boxes[example[record]].tolist()} of {name} does not lie in "
                f"the image of {sizes[record, 0]} x {sizes[record, 1]} pixels, if it has "
                f"format={form.format!r} and normalized={form.normalized}. Pass the format of the "
                "boxes, or correct them"
            ),
        )
        corners[strange] = 0.0
    return corners


def window_boxes(
    geometry: Geometry,
    columns: Sequence[Column],
    form: BoxForm,
    *,
    min_size: float,
    max_boxes: int,
    truncate: bool,
    by_center: bool,
    refuse: Callable[[int, Exception], None],
) -> list[NDArray[Any]]:
    """Returns the boxes of windows and their columns, padded, and the numbers of boxes.

    Args:
        geometry: The windows.
        columns: The boxes, and the columns that belong to them.
        form: The form of the boxes, before and after.
        min_size: The least height and width of a box in the output, in pixels.
        max_boxes: The number of boxes of each record in the result.
        truncate: Whether to omit boxes after ``max_boxes``; otherwise their record is refused.
        by_center: Whether boxes are omitted if their center isn't in the window.
        refuse: Called with the row of a record and its error.
    """
    count, refusals = len(geometry.sizes), Refusals(refuse)
    (boxes, *tables), counts = joined(columns, refusals)
    records = np.repeat(np.arange(count), counts)
    corners = image_boxes(boxes, form, geometry.sizes, records, columns[0].name, refusals)
    edges = np.tile(geometry.sizes[records, ::-1], 2)
    matrix, outputs = geometry.matrix.take(records, axis=0), geometry.outputs.take(records, axis=0)
    visible = np.clip(corners, 0, edges)
    first, last = _around(matrix, visible, outputs)
    stays = ((last - first >= min_size - TINY) & (last > first)).all(axis=1)
    if by_center:
        centers = _apply(matrix, (corners[:, :2] + corners[:, 2:]) / 2)
        stays &= ((centers > 0) & (centers < outputs[:, ::-1])).all(axis=1)
    chosen = np.flatnonzero(stays)
    tables = [
        checked(rows[chosen], column, records[chosen], refusals)
        for rows, column in zip(tables, columns[1:])
    ]
    result = np.concatenate([first[chosen], last[chosen]], axis=1)
    result = form.from_corners(result, outputs[chosen])
    tables = [result.astype(np.float32), *tables]
    return _limited(
        tables, records[chosen], count, max_boxes, truncate, columns[0].name, "boxes", refusals
    )


def extents(geometry: Geometry) -> NDArray[np.float32]:
    """Returns boxes (x0, y0, x1, y1) around the visible part of each image, float32 [rows, 4]."""
    images = np.concatenate([0 * geometry.sizes, geometry.sizes[:, ::-1]], axis=1)
    corners = np.concatenate(_around(geometry.matrix, images, geometry.outputs), axis=1)
    rounded = np.rint(corners)  # sizes of resized images are whole numbers
    return np.where(np.abs(corners - rounded) < TINY, rounded, corners).astype(np.float32)


def _around(matrix: Floats, boxes: Any, outputs: Any) -> tuple[Floats, Floats]:
    """Returns the first and last corners of the boxes that contain mapped boxes, in the output.

    Args:
        matrix: The matrix of each box; see `Geometry`.
        boxes: Boxes (x0, y0, x1, y1) in the image, [n, 4].
        outputs: Height and width of each output, [n, 2].
    """
    limits = outputs[:, ::-1]
    center = _apply(matrix, (boxes[:, :2] + boxes[:, 2:]) / 2)
    half = _linear(np.abs(matrix), (boxes[:, 2:] - boxes[:, :2]) / 2)
    return np.clip(center - half, 0, limits), np.clip(center + half, 0, limits)


def _apply(matrix: Floats, points: Floats) -> Floats:
    """Returns points (x, y), [n, 2], mapped by matrices [n, 2, 3]."""
    return _linear(matrix, points) + matrix[:, :, 2]


def _linear(matrix: Floats, points: Floats) -> Floats:
    """Returns points, [n, 2], mapped by matrices [n, 2, 3] without their translations."""
    return matrix[:, :, 0] * points[:, :1] + matrix[:, :, 1] * points[:, 1:]


def _limited(
    tables: Sequence[NDArray[Any]],
    records: Any,
    count: int,
    most: int,
    truncate: bool,
    name: str,
    kind: str,
    refusals: Refusals,
) -> list[NDArray[Any]]:
    """Returns tables of rows, padded by record to ``most`` rows, and the numbers of rows."""
    counts, places = places_of(records, count)
    if not truncate:
        refusals.add(
            np.flatnonzero(counts > most),
            lambda k: (
                f"{name} has {counts[k]} {kind} in the window, more than max_{kind}={most}. "
                f"Pass a larger max_{kind}, or truncate=True"
            ),
        )
    fits = places < most
    if not fits.all():
        records, places, tables = records[fits], places[fits], [table[fits] for table in tables]
    arrays = [padded(table, records, places, count, most) for table in tables]
    return [*arrays, np.minimum(counts, most).astype(np.int32)]


# Points


def window_points(
    geometry: Geometry,
    columns: Sequence[Column],
    *,
    normalized: bool,
    max_points: int,
    truncate: bool,
    refuse: Callable[[int, Exception], None],
) -> list[NDArray[Any]]:
    """Returns the points of windows, whether each is visible, and the numbers of rows.

    Args:
        geometry: The windows.
        columns: The points (x, y), rows of shape [..., 2], and possibly their visibility.
        normalized: Whether points are shares of the image's and the output's width and height.
        max_points: The number of rows of each record in the result.
        truncate: Whether to omit rows after ``max_points``; otherwise their record is refused.
        refuse: Called with the row of a record and its error.
    """
    count, refusals = len(geometry.sizes), Refusals(refuse)
    (rows, *flags), counts = joined(columns, refusals)
    records = np.repeat(np.arange(count), counts)
    inner = rows.shape[1:-1]
    point_records = np.repeat(records, int(np.prod(inner)))
    points = rows.reshape(-1, 2).astype(np.float64)
    is_finite = np.isfinite(points).all(axis=1)
    refusals.add(
        point_records[~is_finite],
        lambda _: f"{columns[0].name} has a coordinate that is not a finite number",
    )
    points[~is_finite] = 0.0
    refusals.add(
        _other_units(points, geometry.sizes, point_records, normalized),
        lambda _: (
            f"the points of {columns[0].name} look like {'pixels' if normalized else 'shares'}, "
            f"but normalized={normalized}. Pass normalized={not normalized}, or correct them"
        ),
    )
    if normalized:
        points *= geometry.sizes[point_records][:, ::-1]
    moved = _apply(geometry.matrix[point_records], points)
    outputs = geometry.outputs[point_records][:, ::-1]
    with np.errstate(invalid="ignore"):
        is_visible = ((moved >= 0) & (moved < outputs)).all(axis=1)
        is_visible &= ((points >= 0) & (points < geometry.sizes[point_records][:, ::-1])).all(
            axis=1
        )
    if normalized:
        moved /= outputs
    visible = is_visible.reshape(-1, *inner).astype(np.int32)
    if flags:
        visible *= checked(flags[0], columns[1], records, refusals)
    tables = [moved.reshape(rows.shape).astype(np.float32), visible]
    result = _limited(
        tables, records, count, max_points, truncate, columns[0].name, "points", refusals
    )
    result[1] = np.maximum(result[1], 0)  # padding is not visible
    return result


def _other_units(points: Floats, sizes: Sizes, records: Any, normalized: bool) -> NDArray[np.int64]:
    """Returns the records whose points are shares instead of pixels, or pixels instead of shares.

    These are records whose points, except for those at (0, 0), all lie in the first pixel, some
    between its edges; or, for shares, all have a coordinate above 2.

    Args:
        points: The points (x, y), [n, 2].
        sizes: Image sizes, [records, 2].
        records: The record of each point.
        normalized: Whether the points should be shares.
    """
    is_set, strange = points.any(axis=1), np.zeros(len(sizes), np.bool_)
    fits = (points <= 2).all(axis=1) if normalized else ((points < 0) | (points > 1)).any(axis=1)
    strange[records[is_set]] = True
    strange[records[is_set & fits]] = False
    if not normalized and strange.any():
        are_between = np.zeros_like(strange)
        are_between[records[(points % 1 != 0).any(axis=1)]] = True
        strange &= are_between & (sizes > 1).all(axis=1)
    return np.flatnonzero(strange)
