"""The contact sheet: the images of batches in one PNG, for examples and pages of documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...messages.printable import printable_lines
from .contents import Contents, Output, is_drawn
from .drawing import pixels_of
from .layouts import VIDEOS

_CELL = 128  # pixels, of an image's longest side
_GAP, _LINE = 10, 14
_COLUMNS, _VIDEO_COLUMNS = 8, 2
_MOST_LINES = 3  # of a caption


def sheet(batches: Sequence[Contents], failures: Sequence[str], samples: int) -> Image.Image:
    """Draws the images, frames and spectrograms of batches, with their labels.

    Args:
        batches: The contents of the batches.
        failures: Messages about batches that failed.
        samples: The maximum number of samples of an output.
    """
    rows = [[_cell([], [text], 8 * _CELL)] for text in failures]
    for contents in batches:
        rows.append([_cell([], [contents.title], 8 * _CELL)])
        for output in filter(is_drawn, contents.outputs):
            about = f"{output.name}   {output.dtype} {list(output.shape)}"
            rows.append([_cell([], [about], 8 * _CELL)])
            count = min(samples, len(output.samples))
            cells = [_sample(contents, output, row) for row in range(count)]
            step = _VIDEO_COLUMNS if output.layout in VIDEOS else _COLUMNS
            rows += [cells[start : start + step] for start in range(0, count, step)]
    return _stacked([_stacked(row, axis=1) for row in rows], axis=0)


def _stacked(images: Sequence[Image.Image], axis: int) -> Image.Image:
    """Places images below one another (axis 0), or side by side."""
    sizes = np.array([image.size[::-1] for image in images]).reshape(-1, 2) + _GAP
    size = sizes.max(0, initial=_GAP)
    size[axis] = sizes[:, axis].sum()
    stacked = Image.new("RGB", (int(size[1]), int(size[0])), "white")
    for image, end in zip(images, sizes[:, axis].cumsum().tolist()):
        place = [_GAP // 2, _GAP // 2]
        place[1 - axis] += end - image.size[1 - axis] - _GAP
        stacked.paste(image, (place[0], place[1]))
    return stacked


def _sample(contents: Contents, output: Output, row: int) -> Image.Image:
    """Draws a sample: its images in a row, and its labels below."""
    pixels = [_enlarged(image) for image in pixels_of(output, row, _CELL)]
    padding = ["(padding)"] if contents.is_padding(row) else []
    return _cell([Image.fromarray(image) for image in pixels], contents.caption(row) + padding)


def _cell(images: Sequence[Image.Image], caption: Sequence[str], width: int = _CELL) -> Image.Image:
    width = max(width, sum(image.width + 3 for image in images) - 3)
    height = max([image.height + 3 for image in images], default=0)
    text = [line for part in caption for line in printable_lines(part).splitlines()]
    lines = [part for line in text for part in textwrap.wrap(line, width // 6)]
    if images and len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], "..."]
    cell = Image.new("RGB", (width, height + _LINE * max(1, len(lines))), "white")
    x = 0
    for image in images:
        cell.paste(image, (x, 0))
        x += image.width + 3
    font = ImageFont.load_default(11)
    ImageDraw.Draw(cell).text((0, height), "\n".join(lines), "black", font, spacing=2)
    return cell


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    """Repeats the pixels of a small image a whole number of times."""
    times = max(1, _CELL // max(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)
