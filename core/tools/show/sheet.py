"""The contact sheet: one picture with the samples of batches."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...printable import printable_lines
from .contents import Contents, Output, is_drawn
from .drawing import pixels_of, waveforms_of
from .layouts import SOUNDS, VIDEOS

_CELL = 128  # pixels, of a picture's longest side
_GAP, _LINE = 10, 14
_COLUMNS = 8
_MOST_LINES = 3  # of a caption
_BACK, _TEXT, _QUIET, _MARK = "white", "#1c1f23", "#5c6570", "#2b6cb0"
_PADDING, _BAD = "#c026a0", "#b3261e"


def sheet(batches: Sequence[Contents], failures: Sequence[str], samples: int) -> Image.Image:
    """The sheet of batches: the samples of each output in rows, with their labels.

    Args:
        batches: What each of them has.
        failures: What failed.
        samples: The most samples of an output that are drawn.
    """
    strips = [_text(text, _BAD) for text in failures]
    for contents in batches:
        strips.append(_text(contents.title, _TEXT, 15))
        drawn = [output for output in contents.outputs if is_drawn(output)]
        for output in drawn or contents.outputs:
            strips.append(_text(_about(output), _QUIET))
            strips.append(_samples(contents, output, samples))
    width = max([strip.width for strip in strips], default=0) + 2 * _GAP
    picture = Image.new("RGB", (width, sum(s.height + _GAP for s in strips) + _GAP), _BACK)
    y = _GAP
    for strip in strips:
        picture.paste(strip, (_GAP, y))
        y += strip.height + _GAP
    return picture


def _about(output: Output) -> str:
    figures = output.figures
    text = f"{output.name}   {output.dtype} {list(output.shape)}"
    if figures is None:
        return text
    bad = f"   {figures.nans} NaNs" if figures.nans else ""
    return f"{text}   {figures.least:.4g} to {figures.most:.4g}, mean {figures.mean:.4g}{bad}"


def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _text(text: str, color: str, size: int = 12) -> Image.Image:
    lines = [
        part
        for line in printable_lines(text).splitlines()
        for part in textwrap.wrap(line, 140) or [""]
    ]
    height = size + 4
    strip = Image.new("RGB", (8 * (_CELL + _GAP), height * len(lines)), _BACK)
    for k, line in enumerate(lines):
        ImageDraw.Draw(strip).text((0, k * height), line, color, _font(size))
    return strip


def _samples(contents: Contents, output: Output, samples: int) -> Image.Image:
    count = min(samples, len(output.samples))
    cells = [_cell(contents, output, row) for row in range(count)]
    columns = contents.columns or (2 if output.layout in VIDEOS else _COLUMNS)
    columns = min(columns, max(1, count))
    width, height = max(c.width for c in cells) + _GAP, max(c.height for c in cells) + _GAP
    rows = -(-count // columns)
    strip = Image.new("RGB", (columns * width, rows * height), _BACK)
    for k, cell in enumerate(cells):
        strip.paste(cell, (k % columns * width, k // columns * height))
    return strip


def _cell(contents: Contents, output: Output, row: int) -> Image.Image:
    """A sample: its pictures in a row, and its labels below."""
    pictures, caption = [], [output.caption(row)]
    if is_drawn(output):
        pictures = [Image.fromarray(_fitting(one)) for one in pixels_of(output, row, _CELL)]
        caption = contents.caption(row)
    if output.layout in SOUNDS:
        pictures = [_sound(wave, one) for wave, one in zip(waveforms_of(output, row), pictures)]
    width = max(_CELL, sum(one.width + 3 for one in pictures) - 3)
    tall = max([one.height for one in pictures], default=0)
    lines = [part for line in caption for part in textwrap.wrap(line, width // 6)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], lines[_MOST_LINES - 1][: width // 6 - 3] + "..."]
    if contents.is_padding(row):
        lines.append("(padding)")
        for one in pictures:
            _hatch(one)
    cell = Image.new("RGB", (width, tall + 3 + _LINE * len(lines)), _BACK)
    x = 0
    for one in pictures:
        cell.paste(one, (x, 0))
        x += one.width + 3
    pen = ImageDraw.Draw(cell)
    for k, line in enumerate(lines):
        pen.text((0, tall + 2 + k * _LINE), line, _TEXT, _font(11))
    return cell


def _hatch(picture: Image.Image) -> None:
    """Marks a picture as padding."""
    pen = ImageDraw.Draw(picture)
    for x in range(-picture.height, picture.width, 11):
        pen.line([(x, picture.height), (x + picture.height, 0)], _PADDING, 2)


def _fitting(pixels: np.ndarray) -> np.ndarray:
    """A picture that is not too small to see: its pixels are repeated a whole number of times."""
    times = max(1, _CELL // max(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)


def _sound(waveform: np.ndarray, spectrogram: Image.Image) -> Image.Image:
    """A waveform above its spectrogram."""
    columns = len(waveform)
    cell = Image.new("RGB", (columns, 150), _BACK)
    pen = ImageDraw.Draw(cell)
    for x, (low, high) in enumerate(waveform):
        pen.line([(x, 25 - 24 * high), (x, 25 - 24 * low)], _MARK)
    cell.paste(spectrogram.resize((columns, 97)), (0, 53))
    return cell
