"""Draws masks, boxes, points and the names of classes over images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from ...messages.printable import printable_text
from .contents import Output
from .layouts import CLASSES
from .pixels import class_colors, heat_colors
from .placing import LONGEST, class_numbers, placed, shortened, size_of

with extra("show", "dalijax.show"):
    from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]

_OPACITY = 0.45  # of masks
_LINE, _RADIUS, _FONT_SIZE = 2, 3, 11  # pixels
_MOST_TEXTS = 20  # names of classes in an image
_LEAST_SHARE = 0.01  # of a mask's pixels; smaller classes are drawn without a name


def overlaid(pixels: Pixels, output: Output, row: int) -> Pixels:
    """Returns an image, scaled to the size in which it is shown, with its annotations."""
    size = size_of(output, row)
    if size is None:
        return pixels
    scale = np.array([pixels.shape[1] / size[1], pixels.shape[0] / size[0]])
    for annotation in output.annotations:
        if annotation.kind == "masks":
            if size_of(annotation.output, row) == size:
                pixels = _blended(pixels, annotation.output, row)
            continue
        marks = placed(annotation, row, size)
        colors = [*map(tuple, class_colors(marks.numbers, np.nan, np.nan).tolist())]
        image = Image.fromarray(pixels)
        pen = ImageDraw.Draw(image)
        if annotation.kind == "points":
            for place, color in zip((marks.places * scale).tolist(), colors):
                pen.circle(place, _RADIUS, color, "white")
        else:
            corners = np.rint(marks.places * np.tile(scale, 2)).astype(int)
            corners[:, 2:] = np.maximum(corners[:, 2:] - 1, corners[:, :2])  # inclusive, for Pillow
            for corner, color in zip(corners.tolist(), colors):
                left, top, right, bottom = corner
                pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline="black")
                pen.rectangle(corner, outline=color, width=_LINE)
            if len(marks.texts) <= _MOST_TEXTS:
                for corner, color, text in zip(corners.tolist(), colors, marks.texts):
                    _write(image, corner[:2], text, color)
        pixels = np.asarray(image)
    return pixels


def mask_picture(output: Output, row: int, side: int) -> Pixels | None:
    """Returns a mask of class numbers in colors, with the names of its largest classes.

    Smaller masks are enlarged by a whole factor, to at most ``side`` pixels.

    Returns:
        The RGB image, uint8 [height, width, 3]; None if the mask's file can't be read.
    """
    numbers = class_numbers(output.samples[row])
    if numbers is None:
        return None
    times = side / max(numbers.shape)
    times = int(times) if times >= 1 else times
    numbers = _nearest(numbers, [max(1, round(times * length)) for length in numbers.shape])
    pixels = _mask_colors(output, numbers)
    image = Image.fromarray(pixels)
    if output.classes:
        classes, counts = np.unique(numbers, return_counts=True)
        order = np.argsort(-counts)[:_MOST_TEXTS]
        for number in classes[order][counts[order] >= _LEAST_SHARE * numbers.size].tolist():
            y, x = _inside(numbers == number)
            color = tuple(pixels[y, x].tolist())
            text = shortened(output.class_name(number), LONGEST)
            _write(image, (x, y), text, color, is_centered=True)
    return np.asarray(image)


def _blended(pixels: Pixels, output: Output, row: int) -> Pixels:
    """Returns an image with a mask: class numbers except 0 in colors, or values as a heat map."""
    numbers: Any = class_numbers(output.samples[row])
    numbers = _nearest(numbers, pixels.shape[:2])
    is_shown = (numbers != 0) | (output.layout != CLASSES and numbers.dtype.kind != "b")
    share = _OPACITY * is_shown[..., None]
    return np.rint((1 - share) * pixels + share * _mask_colors(output, numbers)).astype(np.uint8)


def _mask_colors(output: Output, numbers: NDArray[Any]) -> Pixels:
    brightness: Any = output.brightness
    if output.layout == CLASSES:
        return class_colors(numbers, brightness.black, brightness.white)
    if numbers.dtype.kind == "b":
        return class_colors(numbers, 0, np.inf)
    return heat_colors(numbers, brightness)


def _inside(is_class: NDArray[np.bool_]) -> tuple[int, int]:
    """Returns the row and column of a pixel that is far from the left and right of its class."""
    rows = np.nonzero(is_class)[0]
    row = int(rows[len(rows) // 2])
    edges = np.flatnonzero(np.diff(is_class[row].astype(np.int8), prepend=0, append=0))
    start, end = max(edges.reshape(-1, 2).tolist(), key=lambda run: run[1] - run[0])
    return row, (start + end) // 2


def _nearest(numbers: NDArray[Any], shape: Any) -> NDArray[Any]:
    """Returns an array [height, width] resized to a shape, without interpolation."""
    rows, columns = (
        (2 * np.arange(n) + 1) * old // (2 * n) for n, old in zip(shape, numbers.shape)
    )
    return numbers[rows[:, None], columns]


def _write(
    image: Image.Image, place: Any, text: str, color: tuple[int, ...], is_centered: bool = False
) -> None:
    """Writes a text on its color: around a place, or above it if the image has room there."""
    text = printable_text(text)
    font = ImageFont.load_default(_FONT_SIZE)
    _, _, right, bottom = map(int, font.getbbox(text))
    left, top = place[0], place[1] - bottom - 3 if place[1] > bottom + 2 else place[1]
    if is_centered:
        left, top = place[0] - right // 2, place[1] - bottom // 2
    x, y = max(0, min(left, image.width - right - 4)), max(0, min(top, image.height - bottom - 3))
    pen = ImageDraw.Draw(image)
    pen.rectangle([x, y, x + right + 3, y + bottom + 2], color)
    is_bright = np.dot(color, (0.3, 0.59, 0.11)) > 128
    pen.text((x + 2, y + 1), text, "black" if is_bright else "white", font)
