"""Random changes of colors, and random blur, for DALI graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..random.draw import Draw, check_draw, check_share
from .layouts import as_rgb, conditional, with_layout
from .windows import Range

_DEGREES = 360.0
_UNCHANGED = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
_WHITE = types.Constant(255, dtype=types.UINT8)


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
    probability: float = 1.0,
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
        probability: Probability that an image is changed, as of torchvision's ``RandomApply``.
            Other images are unchanged; if they are floats, up to rounding.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If a range is out of order or out of bounds, or the probability is not between
            0 and 1.
    """
    check_draw(draw, images)
    check_share("probability", probability)
    ranges = {
        "brightness": _range(brightness, "brightness"),
        "contrast": _range(contrast, "contrast"),
        "saturation": _range(saturation, "saturation"),
        "hue": _range(hue, "hue", center=0.0, least=-0.5, most=0.5),
    }
    bounds = np.array(list(ranges.values()))

    def factors(u: NDArray[np.float32], _: object) -> list[NDArray[np.float64]]:
        numbers = u.astype(np.float64)
        low, high = bounds.T
        values = low + numbers[:, :-1] * (high - low)
        values[:, -1] *= _DEGREES
        # Neutral factors instead of a branch of the graph: the operator costs little on a GPU.
        return list(np.where(numbers[:, -1:] < probability, values, _UNCHANGED).T)

    drawn = draw._compute_outputs(
        factors,
        [((), np.float32)] * 4,
        columns=5,
        settings={**ranges, **({} if probability == 1 else {"probability": probability})},
        name=name,
        kind="augment.color_jitter",
    )
    arguments: dict[str, Any] = dict(zip(ranges, drawn))
    return draw._recolored(fn.color_twist(as_rgb(images, draw), **arguments), images)


@do_not_convert
@knows_its_names
def grayscale(
    images: DataNode, *, draw: Draw, probability: float = 0.1, name: str | None = None
) -> DataNode:
    """Converts images to gray at random: torchvision's ``RandomGrayscale``.

    The three channels of a gray image are equal: 0.299 red + 0.587 green + 0.114 blue.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], uint8. Other
            images fail.
        draw: The argument ``draw`` of the graph function.
        probability: Probability that an image is converted. Other images are unchanged.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the probability is not between 0 and 1.
    """
    check_draw(draw, images)
    chosen = _coin(draw, probability, {}, name, "augment.grayscale")
    return draw._recolored(_some_changed(chosen, _gray, as_rgb(images, draw, types.UINT8)), images)


@do_not_convert
@knows_its_names
def solarize(
    images: DataNode,
    threshold: int,
    *,
    draw: Draw,
    probability: float = 0.5,
    name: str | None = None,
) -> DataNode:
    """Inverts bright values at random: torchvision's ``RandomSolarize``.

    Replaces values v of at least ``threshold`` by 255 - v.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], uint8. Other
            images fail.
        threshold: The lowest value that is inverted, from 0 to 255. BYOL and DINO use 128.
        draw: The argument ``draw`` of the graph function.
        probability: Probability that an image is changed. Other images are unchanged.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the threshold or the probability is out of range.
        TypeError: If the threshold is not a whole number.
    """
    check_draw(draw, images)
    threshold = whole_number("threshold", threshold, "a whole gray level from 0 to 255", 0, 256)
    settings = {"threshold": threshold}
    chosen = _coin(draw, probability, settings, name, "augment.solarize")
    lowest = types.Constant(threshold, dtype=types.UINT8)
    rgb = as_rgb(images, draw, types.UINT8)
    return draw._recolored(
        _some_changed(chosen, lambda bright: solarized(bright, lowest), rgb), images
    )


@do_not_convert
@knows_its_names
def gaussian_blur(
    images: DataNode,
    kernel_size: int,
    *,
    draw: Draw,
    sigma: float | Range = (0.1, 2.0),
    probability: float = 1.0,
    name: str | None = None,
) -> DataNode:
    """Blurs images with a Gaussian kernel of random width: torchvision's ``GaussianBlur``.

    As in torchvision, the kernel is cut off at ``kernel_size``, and images are reflected at their
    edges, without repeating the outermost pixels. (The default window of DALI's
    ``fn.gaussian_blur`` depends on sigma.)

    Args:
        images: Images [height, width, channels], or videos [frames, height, width, channels].
        kernel_size: Height and width of the kernel in pixels, an odd number. SimCLR uses a tenth of
            the image's height.
        draw: The argument ``draw`` of the graph function.
        sigma: Standard deviation of the kernel in pixels: a range (low, high), or a number.
        probability: Probability that an image is blurred, as of torchvision's ``RandomApply``.
            Other images are unchanged.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the kernel's size is even, sigma is not positive or out of order, or the
            probability is not between 0 and 1.
        TypeError: If the kernel's size is not a whole number.
    """
    check_draw(draw, images)
    check_share("probability", probability)
    expected = "an odd number of pixels, 1 or more"
    if whole_number("kernel_size", kernel_size, expected, 1) % 2 == 0:
        raise ValueError(f"kernel_size must be {expected}, not {kernel_size}")
    is_fixed = isinstance(sigma, (int, float, np.number))
    low, high = _range((sigma, sigma) if is_fixed else sigma, "sigma")  # type: ignore[arg-type]
    if np.float32(low) <= 0:
        raise ValueError(f"sigma must be above 0, not {sigma!r}")

    def sigmas(u: NDArray[np.float32], _: object) -> NDArray[np.float64]:
        widths, coins = u.astype(np.float64).T
        return np.where(coins < probability, low + widths * (high - low), 0.0)

    drawn: Any = draw.compute(
        sigmas,
        columns=2,
        settings={"sigma": (low, high), "probability": probability},
        name=name,
        kind="augment.gaussian_blur",
    )

    def blurred(sharp: DataNode, width: DataNode) -> Any:
        return fn.gaussian_blur(sharp, sigma=width, window_size=int(kernel_size))

    sharp = with_layout(images, draw)
    if probability == 1:
        return draw._recolored(blurred(sharp, drawn), images)
    return draw._recolored(_some_changed(drawn > 0, blurred, sharp, drawn), images)


def solarized(images: DataNode, threshold: DataNode) -> DataNode:
    """Returns images, uint8, whose values from the threshold on are inverted."""
    inverted: Any = images ^ ((images >= threshold) * _WHITE)
    return inverted


def _gray(images: DataNode) -> Any:
    """Returns RGB images, uint8, whose three channels are their gray.

    ``fn.color_twist`` with saturation 0 is slower, and its channels differ by 1 in 40 % of colors.
    """
    gray = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def _coin(
    draw: Draw, probability: float, settings: dict[str, Any], name: str | None, kind: str
) -> DataNode:
    """Draws whether to change each image, as bool; the arguments are those of `Draw.compute`."""
    check_share("probability", probability)
    return draw.compute(
        lambda u, _: u < probability,
        dtype=np.bool_,
        settings={**settings, "probability": probability},
        name=name,
        kind=kind,
    )


def _some_changed(
    chosen: Any, function: Callable[..., Any], images: DataNode, *arguments: DataNode
) -> DataNode:
    """Returns the images, of which those that are chosen are passed through a function.

    The batch is split and merged without copying images. For 64 images of 224 x 224 on a CPU, of
    which a fifth is chosen, `grayscale` takes 2 ms of CPU time. A function of all images, with
    neutral arguments for the others, takes 50 ms.

    Args:
        chosen: Whether to change each image, bool.
        function: Called with the chosen images and their arguments.
        images: The images.
        arguments: Further values of each image that the function takes.
    """
    inputs = [conditional.split(node, predicate=chosen) for node in (images, *arguments)]
    changed = function(*(first for first, _ in inputs))
    merged: DataNode = conditional.merge(changed, inputs[0][1], predicate=chosen)
    return merged


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
