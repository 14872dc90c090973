"""Guesses whether samples are images, videos, sounds, text or numbers, and in which layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PICTURES = ("HWC", "CHW", "HW")
VIDEOS = ("FHWC", "FCHW", "CFHW", "FHW")  # volumes, too, whose slices are the frames
SOUNDS = ("T", "TC", "CT")
OTHERS = ("text", "encoded", "numbers", "boxes", "points", "labels")
STEPS = "window"  # floats of several steps, with a mask of the valid steps
CLASSES = "classes"  # a mask of class numbers
PATCHES = "patches"
LAYOUTS = (*PICTURES, *VIDEOS, *SOUNDS, *OTHERS, STEPS, CLASSES, PATCHES)

_CHANNELS = (1, 3, 4)
_LEAST_SIDE = 8  # pixels; a smaller matrix counts as numbers
_LEAST_SOUND = 400  # samples: 25 ms at 16 kHz
_ENCODED = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


def is_encoded(data: bytes) -> bool:
    """Returns whether bytes begin like a JPEG, PNG, WebP, GIF, BMP or TIFF file."""
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return webp or data.startswith(_ENCODED)


def as_text(value: Any) -> str | None:
    """Returns the text of a sample: a str, UTF-8 bytes, or a uint8 array of these bytes.

    Trailing zeros of an array are padding, and are removed.

    Returns:
        The text; None if the sample isn't printable text.
    """
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 1:
            return None
        value = value.tobytes().rstrip(b"\0")
    if isinstance(value, (bytes, np.bytes_)):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            return None
    if not isinstance(value, str):
        return None
    return value if all(c.isprintable() or c in "\n\r\t" for c in value) else None


def guess_layout(samples: Sequence[Any]) -> str:
    """Returns the layout of an output's samples, guessed from the first sample.

    Arrays of uint8 are text only if all samples are text.

    Args:
        samples: An array, a str or bytes for each sample.

    Returns:
        One of `LAYOUTS` that shapes decide: "HWC", "CHW" and "HW" are images, layouts with F are
        videos and volumes, and layouts with T are sounds.
    """
    first = samples[0] if len(samples) else np.zeros([])
    if not isinstance(first, np.ndarray):
        return "encoded" if isinstance(first, bytes) and is_encoded(first) else "text"
    shape = first.shape
    if first.ndim == 1:
        return _vector_layout(samples, first)
    if first.ndim == 2:
        if min(shape) >= _LEAST_SIDE:
            return "HW"
        if max(shape) >= _LEAST_SOUND and first.dtype.kind != "b":
            return "TC" if shape[0] > shape[1] else "CT"
    if first.ndim == 3:
        if shape[2] in _CHANNELS:
            return "HWC"
        if shape[0] in _CHANNELS:
            return "CHW"
        return "FHW" if min(shape) >= _LEAST_SIDE else "numbers"
    if first.ndim == 4:
        for layout, axis in (("FHWC", 3), ("FCHW", 1), ("CFHW", 0)):
            if shape[axis] in _CHANNELS:
                return layout
    return "numbers"


def _vector_layout(samples: Sequence[Any], first: NDArray[Any]) -> str:
    """Returns the layout of samples that are arrays with one dimension."""
    if first.dtype == np.uint8:
        if is_encoded(first[:16].tobytes()):
            return "encoded"
        texts = [as_text(sample) for sample in samples]
        return "text" if all(texts) else "numbers"
    is_sound = first.dtype.kind == "f" or first.dtype == np.int16
    return "T" if is_sound and len(first) >= _LEAST_SOUND else "numbers"


def pictures_of(sample: NDArray[Any], layout: str) -> NDArray[Any]:
    """Returns the images of a sample, channels last.

    Args:
        sample: An array of the layout.
        layout: One of `PICTURES` or `VIDEOS`.

    Returns:
        An array of shape [frames, height, width, channels]; an image has one frame.

    Raises:
        ValueError: If the sample has another number of dimensions than the layout.
    """
    if sample.ndim != len(layout):
        raise ValueError(f"layout {layout!r} does not fit a sample of shape {sample.shape}")
    if "C" not in layout:
        sample, layout = sample[..., None], layout + "C"
    if "F" not in layout:
        sample, layout = sample[None], "F" + layout
    return sample.transpose([layout.index(axis) for axis in "FHWC"])


def channels_of(sample: NDArray[Any], layout: str) -> NDArray[Any]:
    """Returns a sound as an array of shape [channels, time].

    Args:
        sample: An array of the layout.
        layout: One of `SOUNDS`.

    Raises:
        ValueError: If the sample has another number of dimensions than the layout.
    """
    if sample.ndim != len(layout):
        raise ValueError(f"layout {layout!r} does not fit a sample of shape {sample.shape}")
    return sample.T if layout == "TC" else np.atleast_2d(sample)


def patch_shape(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Returns height, width and channels of the square patches in a sample of a shape.

    The shape is [n, side, side, channels] or [n, side * side * channels], otherwise the result is
    None.
    """
    if len(shape) == 4 and shape[1] == shape[2] and shape[3] in _CHANNELS:
        return shape[1], shape[2], shape[3]
    for channels in (3, 1) if len(shape) == 2 else ():
        side = math.isqrt(shape[1] // channels)
        if side > 1 and side * side * channels == shape[1]:
            return side, side, channels
    return None
