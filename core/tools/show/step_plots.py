"""Plots the numbers of successive steps as lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...environment.extras import extra

with extra("show", "dalijax.show"):
    from PIL import Image, ImageDraw

_SCALE = 3  # the plot is drawn larger and reduced, which smooths its lines
_BAND, _FAINT, _ZERO = (226, 226, 226), (176, 176, 176), (205, 205, 205)
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2")


def step_plot(
    values: NDArray[np.float64],
    valid: NDArray[np.bool_],
    least: float,
    most: float,
    size: tuple[int, int],
) -> NDArray[np.uint8]:
    """Returns a plot with a line for each number of a step; steps outside of the mask are gray.

    Args:
        values: The numbers of each step, [steps, numbers]. A line has gaps at non-finite values.
        valid: The mask of the steps, [steps].
        least: The value at the lower edge.
        most: The value at the upper edge.
        size: Width and height in pixels.

    Returns:
        The RGB image, uint8 [height, width, 3].
    """
    width, height = size[0] * _SCALE, size[1] * _SCALE
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    margin = height / 16
    span = (most - least) or 1.0

    def y_of(value: float) -> float:
        return height - margin - (value - least) / span * (height - 2 * margin)

    steps = len(values)
    for k in np.flatnonzero(~valid).tolist():
        pen.rectangle([k * width / steps, 0, (k + 1) * width / steps, height], _BAND)
    if least < 0 < most:
        pen.line([0, y_of(0), width, y_of(0)], _ZERO, _SCALE)
    pen.rectangle([0, 0, width - 1, height - 1], outline=_BAND, width=_SCALE)
    centers = [(k + 0.5) * width / steps for k in range(steps)]
    radius = min(2 * _SCALE, width / steps / 3)
    for number, line in enumerate(values.T):
        color = _COLORS[number % len(_COLORS)]
        dots = [(x, y_of(y)) if np.isfinite(y) else None for x, y in zip(centers, line.tolist())]
        for k, (dot, following) in enumerate(zip(dots, [*dots[1:], None])):
            if dot is None:
                continue
            if following is not None:
                inside = valid[k] and valid[k + 1]
                pen.line([dot, following], color if inside else _FAINT, _SCALE)
            pen.circle(dot, radius, color if valid[k] else _FAINT)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS))
