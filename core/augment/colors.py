"""Random changes of brightness, contrast, saturation and hue, for DALI graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names
from ..random.draw import Draw, check_draw
from .layouts import as_rgb
from .windows import Range

_DEGREES = 360.0


@do_not_convert
@knows_its_names
def color_jitter(
    images: DataNode,
    *,
    draw: Draw,
    brightness: float | Range = 0,
    contrast: float | Range = 0,
    saturation: float | Range = 0,
    hue: float | Range = 0,
    name: str | None = None,
) -> DataNode:
    """Changes brightness, contrast, saturation and hue at random, with one ``fn.color_twist``.

    The ranges are as in torchvision's ``ColorJitter``. The operation differs in four ways:

    - The order is fixed: hue, saturation, contrast, brightness.
    - Contrast is relative to 128 instead of the image's mean gray.
    - Hue is rotated in YIQ, which is linear, instead of HSV.
    - Values are rounded and clipped once, at the end.

    With equal factors from 0.7 to 1.3, images differ from torchvision's by 2 of 255 gray levels
    (median); with hue changed by 0.1, by 9.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], with values
            from 0 to 255. Images without three channels fail.
        draw: The argument ``draw`` of the graph function.
        brightness: Range of the factor (low, high), or a number b for (max(0, 1 - b), 1 + b).
        contrast: Range of the factor, as for brightness; 0 is gray.
        saturation: Range of the factor, as for brightness; 0 is gray.
        hue: Range of the hue's rotation (low, high) within -0.5 and 0.5, or a number h for (-h, h);
            1 is a full turn.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If a range is out of order or out of bounds.
    """
    check_draw(draw, images)
    ranges = {
        "brightness": _range(brightness, "brightness"),
        "contrast": _range(contrast, "contrast"),
        "saturation": _range(saturation, "saturation"),
        "hue": _range(hue, "hue", center=0.0, least=-0.5, most=0.5),
    }
    bounds = np.array(list(ranges.values()))

    def factors(u: NDArray[np.float32], _: object) -> list[NDArray[np.float64]]:
        low, high = bounds.T
        values = low + u.astype(np.float64) * (high - low)
        values[:, -1] *= _DEGREES
        return list(values.T)

    forms = [((), np.float32)] * 4
    drawn = draw._compute_outputs(
        factors, forms, columns=4, settings=ranges, name=name, kind="augment.color_jitter"
    )
    arguments: dict[str, Any] = dict(zip(ranges, drawn))
    return draw._recolored(fn.color_twist(as_rgb(images, draw), **arguments), images)


def _range(
    value: float | Range,
    name: str,
    *,
    center: float = 1.0,
    least: float = 0.0,
    most: float = np.inf,
) -> Range:
    """Returns a range (low, high), given as this pair or as a distance from ``center``.

    Raises:
        TypeError: If the value is neither a number nor a pair of numbers.
        ValueError: If the range is out of order or out of bounds.
    """
    numbers: Any = value
    if isinstance(value, (int, float, np.number)):
        numbers = max(least, center - value), center + value
    is_pair = isinstance(numbers, (list, tuple, np.ndarray)) and len(numbers) == 2
    if not is_pair or not all(isinstance(x, (int, float, np.number)) for x in numbers):
        raise TypeError(f"{name} must be a number or a pair of numbers (low, high), not {value!r}")
    low, high = numbers
    if not least <= low <= high <= most or np.isinf(high):
        bounds = "from 0" if np.isinf(most) else f"from 0 to {most:g}"
        raise ValueError(
            f"{name} must be a number {bounds}, or (low, high) in order and from {least:g} to "
            f"{most:g}, not {value!r}"
        )
    return low, high
