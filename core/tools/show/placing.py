"""Places boxes, points and masks in the pixels of their images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from .contents import MOST_NUMBERS, Annotation, Contents, Output
from .layouts import pictures_of

with extra("show", "dalijax.show"):
    from PIL import Image

LONGEST = 24  # characters of the name of a class
_TOLERANCE = 0.5  # pixels by which a box may exceed its image, because of rounding
_CLASS_MODES = ("1", "L", "P", "I", "I;16")  # of Pillow: pixels that are numbers

Floats = NDArray[np.float64]


class Placed(NamedTuple):
    """The boxes or points of a sample, in the pixels of its image.

    Attributes:
        places: Boxes [n, 4] as (left, top, right, bottom), within the image, or points [n, 2].
        numbers: The number of each color, [n]: a class, or the index of the box or point.
        texts: The class of each box; empty without labels.
        note: The number of boxes or points, what isn't drawn, and the classes.
    """

    places: Floats
    numbers: NDArray[np.int64]
    texts: Sequence[str]
    note: str


def rows_of(annotation: Annotation, row: int) -> tuple[Floats, NDArray[np.int64], int]:
    """Returns the boxes [n, 4] or points [n, 2] of a sample, except padding and hidden points.

    Returns:
        The numbers of each box or point; its row in the sample; and the number of hidden points.
    """
    sample = np.asarray(annotation.output.samples[row], np.float64)
    columns = 4 if annotation.kind == "boxes" else 2
    values = sample.reshape(-1, sample.shape[-1])
    inner = sample.shape[1] if sample.ndim == 3 else 1  # points of each object
    number = np.arange(len(values)) // inner
    is_padding = ((values[:, :columns] == 0) | (values[:, :columns] == -1)).all(1)
    if annotation.count is not None:
        is_padding = number >= annotation.count.samples[row].item()
    is_visible = values[:, 2] != 0 if sample.shape[-1] == 3 else np.ones(len(values), np.bool_)
    if annotation.visible is not None:
        is_visible = annotation.visible.samples[row].ravel() != 0
    hidden = int((~is_padding & ~is_visible).sum())
    chosen = ~is_padding & is_visible
    return values[chosen, :columns], number[chosen], hidden


def placed(annotation: Annotation, row: int, size: tuple[int, int]) -> Placed:
    """Places the boxes or points of a sample in its image, whose height and width are ``size``.

    Boxes are clipped. Boxes and points outside of the image, and empty boxes, are omitted.
    """
    values, numbers, hidden = rows_of(annotation, row)
    limits = np.array([size[1], size[0]])
    is_boxes = annotation.kind == "boxes"
    if is_boxes:
        places = annotation.form.corners(values, np.tile(size, (len(values), 1)))
        limits = np.tile(limits, 2)
    else:
        places = values * limits if annotation.form.normalized else values
    is_finite = np.isfinite(places).all(1)
    places = np.where(is_finite[:, None], places, 0)
    inside = places.clip(0, limits)
    is_empty = is_finite & is_boxes & (places[:, -2:] <= places[:, :2]).any(1)
    is_outside = (inside[:, -2:] <= inside[:, :2]).any(1) if is_boxes else (inside != places).any(1)
    is_outside &= is_finite & ~is_empty
    drawn = is_finite & ~is_empty & ~is_outside
    is_clipped = drawn & (np.abs(inside - places) > _TOLERANCE).any(1)
    texts: list[str] = []
    if annotation.labels is not None:
        numbers = annotation.labels.samples[row].ravel()[numbers].astype(np.int64)
        texts = [annotation.labels.class_name(number) for number in numbers[drawn].tolist()]
        texts = [shortened(text, LONGEST) for text in texts]
    parts = [
        f"{np.count_nonzero(flags):,} {state}"
        for flags, state in (
            (is_clipped, "clipped"),
            (is_outside, "outside of the image"),
            (is_empty, "empty"),
            (~is_finite, "not finite"),
            (np.ones(hidden), "not visible"),
        )
        if flags.any()
    ]
    classes = ", ".join(texts[:MOST_NUMBERS]) + " ..." * (len(texts) > MOST_NUMBERS)
    note = ", ".join([f"{drawn.sum():,} drawn", *parts])
    note += f" ({classes})" if texts else ""
    return Placed(inside[drawn], numbers[drawn], texts, note)


def class_numbers(sample: Any) -> NDArray[Any] | None:
    """Returns the numbers of a mask, [height, width], from an array or a file, such as a PNG.

    Masks of objects, [n, height, width], become the numbers of the objects, from 1. If objects
    overlap, the last object is used.

    Returns:
        The numbers; None if the file can't be read, or has several channels.
    """
    if not isinstance(sample, np.ndarray) or sample.ndim == 1:
        image = opened(sample)
        return np.asarray(image) if image is not None and image.mode in _CLASS_MODES else None
    if sample.ndim == 3 and sample.shape[-1] != 1 and len(sample) != 1:
        numbers = np.zeros(sample.shape[1:], np.int32)
        for number, mask in enumerate(sample, 1):
            numbers[mask != 0] = number
        return numbers
    return sample if sample.ndim == 2 else sample.squeeze(0 if len(sample) == 1 else 2)


def size_of(output: Output, row: int) -> tuple[int, int] | None:
    """Returns the height and width of an image or mask; None if its file can't be read."""
    sample = output.samples[row]
    if output.layout in ("HWC", "CHW", "HW"):
        height, width = pictures_of(sample, output.layout).shape[1:3]
        return height, width
    if isinstance(sample, np.ndarray) and sample.ndim > 1:
        has_channel = sample.ndim == 3 and sample.shape[-1] == 1 < len(sample)
        height, width = sample.shape[:2] if has_channel else sample.shape[-2:]
        return height, width
    image = opened(sample)
    return None if image is None else (image.height, image.width)


def opened(sample: Any) -> Image.Image | None:
    """Returns the image of a file, bytes or a uint8 array; None if Pillow can't read it."""
    data = sample.tobytes() if isinstance(sample, np.ndarray) else bytes(sample)
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    # Pillow's errors about files that it can't read, or whose pixels would exceed the memory.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return image


def shortened(text: str, longest: int) -> str:
    """Returns a text of at most ``longest`` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def captions(contents: Contents, row: int) -> list[str]:
    """Returns the lines below the images of a sample: its annotations, texts and numbers."""
    lines = []
    for image in [o for o in contents.outputs if o.annotations and row < len(o.samples)]:
        if (size := size_of(image, row)) is None:
            continue
        for annotation in image.annotations:
            if annotation.kind != "masks":
                lines.append(f"{annotation.output.name}: {placed(annotation, row, size).note}")
            elif size_of(annotation.output, row) != size:
                lines.append(f"{annotation.output.name}: not drawn, because its size differs")
    return lines + contents.caption(row)
