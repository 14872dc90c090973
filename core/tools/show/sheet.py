"""Draws a contact sheet: the images of batches in one PNG, for examples and documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...messages.printable import printable_lines
from .contents import Contents, Output
from .drawing import enlarged, pixels_of
from .placing import captions, size_of

_CELL = 128  # pixels, of an image's longest side; with annotations twice as long
_STRIP = 96  # pixels: height of the images if a sample has several
_WIDTH = 1400  # pixels, of a row
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
    rows = [[_cell([], [text], _WIDTH)] for text in failures]
    for contents in batches:
        about = [f"{o.name} {o.dtype} {list(o.shape)}" for o in contents.drawn]
        heading = [contents.title, *contents.notes, "   ".join(about)]
        rows.append([_cell([], heading, _WIDTH)])
        records = [_record(contents, row) for row in range(min(samples, contents.count))]
        widest = max([image.width + _GAP for image in records], default=1)
        step = max(1, min(_COLUMNS, (_WIDTH + _COLUMNS * _GAP) // widest))
        rows += [records[start : start + step] for start in range(0, len(records), step)]
    image = _stacked([_stacked(row, axis=1) for row in rows], axis=0)
    columns = np.flatnonzero((np.asarray(image) != 255).any((0, 2)))  # not white
    return image.crop((0, 0, max([0, *columns.tolist()]) + _GAP, image.height))


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


def _record(contents: Contents, row: int) -> Image.Image:
    """Returns an image of a sample: its images in a row, and its labels below."""
    drawn = [output for output in contents.drawn if row < len(output.samples)]
    scale = 2 if any(output.annotations for output in drawn) else 1
    lines = ["(padding)"] if contents.is_padding(row) else []
    if len(drawn) < 2:
        images = [image for output in drawn for image in _images(output, row, scale * _CELL)]
        return _cell(images, [*captions(contents, row), *lines], scale * _CELL)
    height = scale * _STRIP
    panels = [
        _cell(_images(output, row, 2 * height, height), [output.name], height // 2)
        for output in drawn
    ]
    return _cell([_stacked(panels, axis=1)], ["   ".join([*lines, *captions(contents, row)])])


def _images(output: Output, row: int, side: int, height: int | None = None) -> list[Image.Image]:
    """Returns the images of a sample, whose sides and heights are limited."""
    if height is not None and output.annotations and (size := size_of(output, row)) is not None:
        side = min(side, round(height * max(1, size[1] / size[0])))  # so that text is not scaled
    images = []
    for pixels in pixels_of(output, row, side):
        image = Image.fromarray(enlarged(pixels, height or side))
        if height is not None:
            image.thumbnail((2 * height, height), Image.Resampling.LANCZOS)
        images.append(image)
    return images


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
