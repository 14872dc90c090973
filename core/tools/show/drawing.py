"""Converts samples to the images that the page shows."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from .audio import envelope, spectrogram_picture
from .contents import Output
from .layouts import CLASSES, PATCHES, SOUNDS, STEPS, channels_of, patch_shape, pictures_of
from .overlay import mask_picture, overlaid
from .pixels import chosen_frames, faded, to_rgb
from .placing import opened
from .step_plots import step_plot

with extra("show", "dalijax.show"):
    from PIL import Image

Pixels = NDArray[np.uint8]

_FRAMES = 8  # frames drawn of a video
_SIDE = 320  # pixels; larger images are scaled down, to keep a page at a few megabytes
_COLUMNS = 240  # columns of a waveform
_PLOT = 2  # width of a plot relative to its height


def pixels_of(output: Output, row: int, side: int = _SIDE) -> list[Pixels]:
    """Returns the images of a sample: an image, frames, spectrograms, or the plot of a window.

    Args:
        output: An output whose samples are drawn.
        row: Index of the sample.
        side: Maximum length of the longer side in pixels; larger images are scaled down, except
            spectrograms.

    Returns:
        RGB images, uint8 [height, width, 3]; empty for a file that Pillow can't read.
    """
    sample = output.samples[row]
    if output.layout in SOUNDS:
        return [spectrogram_picture(channel) for channel in channels_of(sample, output.layout)]
    if output.layout == STEPS:
        return [_plot(output, row, side // _PLOT)]
    if output.layout == CLASSES:
        return [] if (mask := mask_picture(output, row, side)) is None else [mask]
    if output.layout == "encoded":
        image = opened(sample)
        pictures = [] if image is None else [np.asarray(image.convert("RGB"))]
    elif output.layout == PATCHES:
        pictures = [_grid(output, row)]
    else:
        frames = pictures_of(sample, output.layout)
        brightness: Any = output.brightness
        chosen = chosen_frames(len(frames), _FRAMES)
        pictures = [to_rgb(frames[k], brightness) for k in chosen]
        if output.steps is not None:
            valid = output.steps[row, chosen]
            pictures = [p if is_valid else faded(p) for p, is_valid in zip(pictures, valid)]
    pictures = [_within(picture, side) for picture in pictures]
    if output.annotations:
        return [overlaid(enlarged(picture, side), output, row) for picture in pictures]
    return pictures


def waveforms_of(output: Output, row: int) -> list[NDArray[np.float64]]:
    """Returns the envelope of each channel of a sound, [columns, 2].

    The values are divided by the largest absolute value of the output.
    """
    figures = output.figures
    most = max(abs(figures.least), abs(figures.most)) if figures is not None else 0
    return [
        envelope(channel, _COLUMNS) / (most or 1)
        for channel in channels_of(output.samples[row], output.layout)
    ]


def _plot(output: Output, row: int, height: int) -> Pixels:
    """Returns the plot of a window, scaled to the range of all windows of the output."""
    figures, steps = output.figures, output.steps
    least, most = (0.0, 1.0) if figures is None else (figures.least, figures.most)
    values = np.asarray(output.samples[row], np.float64)
    values = values.reshape(len(values), -1)
    valid = np.ones(len(values), np.bool_) if steps is None else steps[row]
    return step_plot(values, valid, least, most, (_PLOT * height, height))


def png_uri(pixels: Pixels) -> str:
    """Returns an image as a data URI of a PNG."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _grid(output: Output, row: int) -> Pixels:
    """Returns the patches of a sample in rows of equal length, with white lines between them."""
    shape: Any = patch_shape(output.samples[row].shape)
    brightness: Any = output.brightness
    patches = output.samples[row].reshape(-1, *shape)
    columns = max(1, math.isqrt(max(0, len(patches) - 1)) + 1)
    height, width = shape[0] + 1, shape[1] + 1
    grid = np.full((-(-len(patches) // columns) * height, columns * width, 3), 255, np.uint8)
    for number, patch in enumerate(patches):
        top, left = number // columns * height, number % columns * width
        grid[top : top + shape[0], left : left + shape[1]] = to_rgb(patch, brightness)
    return grid[: max(1, len(grid) - 1), :-1]


def enlarged(pixels: Pixels, side: int) -> Pixels:
    """Returns a small image enlarged by a whole factor, to at most ``side`` pixels."""
    times = max(1, side // max(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)


def _within(pixels: Pixels, side: int) -> Pixels:
    if max(pixels.shape[:2]) <= side:
        return pixels
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image)
