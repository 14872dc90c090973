"""Numbers as pixels: how bright a value is drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_FINITE = (255, 0, 255)  # magenta

_OVERSHOOT = 0.05  # of a range: what interpolation may go beyond it
_DARK = 16  # floats up to 255 that don't go beyond it are more likely normalised


@dataclasses.dataclass(frozen=True)
class Brightness:
    """The values that are drawn black and white, with all between in proportion.

    Attributes:
        black: The value that is drawn as 0.
        white: The value that is drawn as 255.
        rule: What the choice follows from, in words.
    """

    black: float
    white: float
    rule: str


def brightness(dtype: Any, least: float, most: float, channels: bool = True) -> Brightness:
    """How the pictures of an output are drawn: all alike, so that they can be compared.

    Args:
        dtype: Their dtype.
        least: Their least finite value.
        most: Their greatest one.
        channels: Whether they have a dimension of channels; whole numbers without one are often
            classes, of which the few there are would all be black.
    """
    kind = np.dtype(dtype).kind
    if kind == "b":
        return Brightness(0, 1, "False is black, True is white")
    if dtype == np.uint8 and channels:
        return Brightness(0, 255, "as they are")
    if kind in "iu" and channels and least >= 0 and 1 < most <= 255:
        return Brightness(0, 255, "0 is black, 255 is white")
    if kind not in "biu":
        for black, white in ((0, 1), (-1, 1), (0, 255)):
            beyond = _OVERSHOOT * (white - black)
            if black - beyond <= least and most <= white + beyond and (white < 255 or most > _DARK):
                return Brightness(black, white, f"{black} is black, {white} is white")
    if least == most:
        return Brightness(least - 1, most + 1, f"all are {least:g}")
    return Brightness(least, most, f"{least:.4g} (the least) is black, {most:.4g} is white")


def to_rgb(picture: NDArray[Any], how: Brightness) -> NDArray[np.uint8]:
    """A picture as bytes of red, green and blue; NaN and infinities are magenta.

    Args:
        picture: An array of shape [height, width, channels] of 1 to 4 channels; the fourth is left
            out, and of two the third is 0.
        how: Which values are black and white.

    Returns:
        uint8 of shape [height, width, 3].
    """
    values = picture[..., :3].astype(np.float64)
    finite = np.isfinite(values)
    scaled = (np.where(finite, values, how.black) - how.black) / (how.white - how.black)
    pixels = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    elif pixels.shape[-1] == 2:
        pixels = np.concatenate([pixels, np.zeros_like(pixels[..., :1])], axis=-1)
    pixels[~finite.all(-1)] = NOT_FINITE
    return pixels


def chosen_frames(count: int, most: int) -> list[int]:
    """Numbers of at most so many frames, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
