"""Maps numbers to pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_FINITE = (255, 0, 255)  # magenta

# From low to high: black, violet, red, yellow, white.
_HEAT = np.array([(0, 0, 8), (80, 18, 123), (214, 69, 65), (252, 193, 80), (255, 255, 230)])
_OVERSHOOT = 0.05  # share of a range by which interpolation may exceed it
_DARK = 16  # floats up to 255 that do not exceed this are more likely normalized


@dataclasses.dataclass(frozen=True)
class Brightness:
    """A linear mapping of values to brightness.

    Attributes:
        black: The value drawn as 0.
        white: The value drawn as 255.
        rule: The reason for the choice, in words.
    """

    black: float
    white: float
    rule: str


def brightness(dtype: Any, least: float, most: float, channels: bool = True) -> Brightness:
    """Returns the mapping for all images of an output, so that the images can be compared.

    Args:
        dtype: Dtype of the images.
        least: Minimum finite value of the images.
        most: Maximum finite value of the images.
        channels: Whether images have a channel dimension. Integers without channels are often
            classes, whose small values would all look black.
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
            tolerance = _OVERSHOOT * (white - black)
            if (
                black - tolerance <= least
                and most <= white + tolerance
                and (white < 255 or most > _DARK)
            ):
                return Brightness(black, white, f"{black} is black, {white} is white")
    if least == most:
        return Brightness(least - 1, most + 1, f"all are {least:g}")
    return Brightness(least, most, f"{least:.4g} (the least) is black, {most:.4g} is white")


def to_rgb(picture: NDArray[Any], rule: Brightness) -> NDArray[np.uint8]:
    """Returns an image in RGB; pixels with NaN or infinities are magenta.

    Args:
        picture: An array [height, width, channels] with 1 to 4 channels. A fourth channel is
            ignored; with two channels, the third is 0.
        rule: The values that are drawn black and white.

    Returns:
        The RGB image, uint8 [height, width, 3].
    """
    values = picture[..., :3].astype(np.float64)
    finite = np.isfinite(values)
    scaled = (np.where(finite, values, rule.black) - rule.black) / (rule.white - rule.black)
    pixels = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    elif pixels.shape[-1] == 2:
        pixels = np.concatenate([pixels, np.zeros_like(pixels[..., :1])], axis=-1)
    pixels[~finite.all(-1)] = NOT_FINITE
    return pixels


def class_colors(numbers: Any, black: float, white: float) -> NDArray[np.uint8]:
    """Returns the colors of class numbers [...], uint8 [..., 3].

    The numbers ``black`` and ``white`` have these colors, and negative numbers are white. The
    numbers 1 to 300 have different colors.
    """
    classes, positions = np.unique(np.asarray(numbers), return_inverse=True)
    number = classes.astype(np.float64)
    # Steps of the golden ratio spread the hues of any successive numbers evenly.
    hue = (number * 0.618034 + 0.38) % 1
    value, saturation = 1 - 0.4 * (number // 3 % 2), 0.95 - 0.35 * (number // 6 % 2)
    offsets = (hue[:, None] * 6 + [5, 3, 1]) % 6  # of red, green and blue
    share = np.minimum(offsets, 4 - offsets).clip(0, 1)
    colors = np.rint(255 * value[:, None] * (1 - saturation[:, None] * share)).astype(np.uint8)
    colors[number == black] = 0
    colors[(number < 0) | (number == white)] = 255
    return colors[positions.reshape(np.shape(numbers))]


def heat_colors(values: NDArray[Any], rule: Brightness) -> NDArray[np.uint8]:
    """Returns the colors of values [...], uint8 [..., 3]; NaN and infinities are magenta."""
    finite = np.isfinite(values)
    shares = (np.where(finite, values, rule.black) - rule.black) / (rule.white - rule.black)
    stops = np.linspace(0, 1, len(_HEAT))
    colors = np.stack([np.interp(shares, stops, _HEAT[:, k]) for k in range(3)], -1)
    return np.where(finite[..., None], np.rint(colors), NOT_FINITE).astype(np.uint8)


def faded(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a gray and pale copy of an image, for frames outside of a mask."""
    gray = pixels.mean(-1, keepdims=True).repeat(3, -1)
    return np.rint(0.3 * gray + 0.7 * 226).astype(np.uint8)


def chosen_frames(count: int, most: int) -> list[int]:
    """Returns the indices of ``most`` evenly spaced frames, including the first and the last.

    Args:
        count: Number of frames of the video; if it is at most ``most``, all frames are chosen.
        most: Maximum number of frames to choose.
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
