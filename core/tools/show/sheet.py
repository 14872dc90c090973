"""Draws a contact sheet: the images of batches in one PNG, for examples and documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...messages.printable import printable_lines
from .contents import Contents, Output, is_drawn
from .drawing import pixels_of
from .layouts import VIDEOS

_CELL = 128  # pixels, of an image's longest side
_STRIP, _STRIPS = 96, 1400  # pixels: height of the images in a strip, width of a row of strips
_GAP, _LINE, _FONT_SIZE = 10, 15, 12
_COLUMNS = 8
_MOST_LINES = 3  # of a caption


def sheet(batches: Sequence[Contents], failures: Sequence[str], samples: int) -> Image.Image:
    """Returns an image with the images, frames and spectrograms of batches, and their labels.

    Args:
        batches: The contents of the batches.
        failures: Messages about batches that failed.
        samples: The maximum number of samples of an output.
    """
    rows = [[_cell([], [text], 8 * _CELL)] for text in failures]
    for contents in batches:
        rows.append([_cell([], [contents.title], 8 * _CELL)])
        strip = contents.strip
        if strip:
            strips = [_strip(contents, row) for row in range(min(samples, len(strip[0].samples)))]
            step = max(1, _STRIPS // max(image.width for image in strips))
            rows += [strips[start : start + step] for start in range(0, len(strips), step)]
        for output in contents.outputs:
            if output in strip or not is_drawn(output):
                continue
            about = f"{output.name}   {output.dtype} {list(output.shape)}"
            rows.append([_cell([], [about], 8 * _CELL)])
            count = min(samples, len(output.samples))
            cells = [_sample(contents, output, row) for row in range(count)]
            step = 1 if output.layout in VIDEOS else _COLUMNS
            rows += [cells[start : start + step] for start in range(0, count, step)]
    return _stacked([_stacked(row, axis=1) for row in rows], axis=0)


def _stacked(images: Sequence[Image.Image], axis: int) -> Image.Image:
    """Returns an image with images below one another (axis 0), or side by side (axis 1)."""
    sizes = np.array([image.size[::-1] for image in images]).reshape(-1, 2) + _GAP
    size = sizes.max(0, initial=_GAP)
    size[axis] = sizes[:, axis].sum()
    stacked = Image.new("RGB", (int(size[1]), int(size[0])), "white")
    for image, end in zip(images, sizes[:, axis].cumsum().tolist()):
        corner = [_GAP // 2, _GAP // 2]
        corner[1 - axis] += end - image.size[1 - axis] - _GAP
        stacked.paste(image, (corner[0], corner[1]))
    return stacked


def _sample(contents: Contents, output: Output, row: int) -> Image.Image:
    """Returns an image of a sample: its images in a row, and its labels below."""
    images = [Image.fromarray(_enlarged(pixels, _CELL)) for pixels in pixels_of(output, row, _CELL)]
    return _cell(images, [*contents.caption(row), *_padding(contents, row)])


def _of_equal_height(output: Output, row: int) -> list[Image.Image]:
    """Returns the images of a sample, scaled to the height of a strip."""
    images = []
    for pixels in pixels_of(output, row, 2 * _STRIP):
        image = Image.fromarray(_enlarged(pixels, _STRIP))
        image.thumbnail((2 * _STRIP, _STRIP), Image.Resampling.LANCZOS)
        images.append(image)
    return images


def _padding(contents: Contents, row: int) -> list[str]:
    return ["(padding)"] if contents.is_padding(row) else []


def _strip(contents: Contents, row: int) -> Image.Image:
    """Returns an image of all images and windows of a sample in a row, and its labels below."""
    panels = [
        _cell(_of_equal_height(output, row), [output.name], _STRIP // 2)
        for output in contents.strip
    ]
    caption = "   ".join([*_padding(contents, row), *contents.caption(row, with_numbers=True)])
    return _cell([_stacked(panels, axis=1)], [caption])


def _cell(images: Sequence[Image.Image], caption: Sequence[str], width: int = _CELL) -> Image.Image:
    """Returns an image with images side by side, and a caption below."""
    width = max(width, sum(image.width + 3 for image in images) - 3)
    height = max([image.height + 3 for image in images], default=0)
    font = ImageFont.load_default(_FONT_SIZE)
    text = [line for part in caption for line in printable_lines(part).splitlines()]
    lines = [part for line in text for part in _wrapped(line, width, font)]
    if images and len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], "..."]
    cell = Image.new("RGB", (width, height + _LINE * max(1, len(lines))), "white")
    x = 0
    for image in images:
        cell.paste(image, (x, 0))
        x += image.width + 3
    ImageDraw.Draw(cell).text((0, height), "\n".join(lines), "black", font, spacing=2)
    return cell


def _wrapped(text: str, width: int, font: Any) -> list[str]:
    """Returns the lines of a text, each at most ``width`` pixels wide."""
    for most in range(width // 3, 1, -1):
        lines = textwrap.wrap(text, most)
        if all(font.getlength(line) <= width for line in lines):
            return lines
    return textwrap.wrap(text, 1)


def _enlarged(pixels: np.ndarray, side: int) -> np.ndarray:
    """Returns a small image enlarged by a whole factor, to at most ``side`` pixels."""
    times = max(1, side // max(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)
