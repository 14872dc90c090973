"""The pictures of a sample, as they are drawn in the page and on the sheet."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra
from .audio import envelope, spectrogram_picture
from .contents import Output
from .layouts import SOUNDS, channels_of, pictures_of
from .pixels import chosen_frames, to_rgb

with extra("show", "dalijax.show"):
    from PIL import Image

Pixels = NDArray[np.uint8]

_FRAMES = 8  # of a video
_SIDE = 320  # pixels: larger pictures are made smaller, for a page of a few megabytes
_COLUMNS = 240  # of a waveform


def pixels_of(output: Output, row: int, side: int = _SIDE) -> list[Pixels]:
    """The pictures of a sample: one, the frames of a video, or a sound's spectrograms.

    Args:
        output: An output whose samples are drawn.
        row: The sample's number.
        side: The longest side in pixels; larger ones are made smaller.

    Returns:
        uint8 arrays of shape [height, width, 3]; none for a file that Pillow can't read.
    """
    sample = output.samples[row]
    if output.layout in SOUNDS:
        return [spectrogram_picture(one) for one in channels_of(sample, output.layout)]
    if output.layout == "encoded":
        pictures = [] if (decoded := _decoded(sample)) is None else [decoded]
    else:
        frames = pictures_of(sample, output.layout)
        how: Any = output.brightness
        pictures = [to_rgb(frames[k], how) for k in chosen_frames(len(frames), _FRAMES)]
    return [_within(one, side) for one in pictures]


def waveforms_of(output: Output, row: int) -> list[NDArray[np.float64]]:
    """Envelopes of a sound's channels, of shape [columns, 2], in shares of the output's loudest."""
    figures = output.figures
    most = max(abs(figures.least), abs(figures.most)) if figures is not None else 0
    return [
        envelope(one, _COLUMNS) / (most or 1)
        for one in channels_of(output.samples[row], output.layout)
    ]


def png_uri(pixels: Pixels) -> str:
    """A picture as a data URI, without loss."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _decoded(sample: Any) -> Pixels | None:
    data = sample.tobytes() if isinstance(sample, np.ndarray) else bytes(sample)
    try:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    # Pillow's errors for files that it can't read, or whose pixels would fill the memory.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _within(pixels: Pixels, side: int) -> Pixels:
    if max(pixels.shape[:2]) <= side:
        return pixels
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image)
