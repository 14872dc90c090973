"""Random changes of colors, and random blur, for DALI graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..arrays.dtypes import dali_type
from ..random.draw import Draw, check_draw, check_share, on_device
from ..state.operators import CHOICE
from .layouts import as_rgb, conditional, dtype_and_layout, with_layout
from .windows import Range

WHITE = types.Constant(255, dtype=types.UINT8)
GRAY = [0.299, 0.587, 0.114]  # weights of red, green and blue (ITU-R BT.601), as in Pillow
# From RGB to YIQ: gray, and two coordinates of chroma.
_YIQ = np.array([GRAY, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_GRAY = np.tile(GRAY, (3, 1))
_CHROMA = np.eye(3) - _GRAY
_TURNED_CHROMA = np.linalg.inv(_YIQ) @ [[0, 0, 0], [0, 0, 1], [0, -1, 0]] @ _YIQ  # by 90 degrees
_UNCHANGED = np.eye(3, 4, dtype=np.float32)
_MATRIX = (3, 4), np.float32  # multiplies (R, G, B, 1)
_WITH_MEAN = (4, 4), np.float32  # the mean of the four results is subtracted from the first three
_MIXABLE = ("uint8", "uint16", "int16", "int32", "float32")  # dtypes that coord_transform takes
_NARROWEST = 1e-3  # pixels; a blur of this sigma changes nothing


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
    """Changes brightness, contrast, saturation and hue at random.

    The ranges are as in torchvision's ``ColorJitter``, and contrast is relative to the mean gray of
    the image, or of the frame. The operation differs in three ways:

    - The order is fixed: hue, saturation, contrast, brightness.
    - Hue is rotated in YIQ, which is linear, instead of HSV.
    - Values are rounded and clipped once, at the end.

    Without contrast, this is a single operator of DALI.

    With equal factors from 0.7 to 1.3, images differ from torchvision's by 1 of 255 gray levels
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
    changes_contrast = ranges["contrast"] != (1, 1)

    def matrices(u: NDArray[np.float32], _: object) -> list[NDArray[np.float32]]:
        numbers = u.astype(np.float64)
        low, high = bounds.T
        factors = low + numbers[:, :-1] * (high - low)
        chosen = numbers[:, -1:, None] < probability
        # The identity instead of a branch of the graph: the operator costs little.
        matrix = np.where(chosen, _matrices(factors), _UNCHANGED)
        if not changes_contrast:
            return [matrix]
        brightness, contrast, *_ = factors.T
        gray = chosen * (brightness * (1 - contrast))[:, None, None] * [*GRAY, 0]
        # Makes the mean of the four results the negative of the gray to add.
        fourth = -4 * gray - matrix.sum(axis=1, keepdims=True)
        return [np.concatenate([matrix, fourth], axis=1)]

    (matrix,) = draw._compute_outputs(
        matrices,
        [_WITH_MEAN if changes_contrast else _MATRIX],
        columns=5,
        settings={**ranges, **({} if probability == 1 else {"probability": probability})},
        name=name,
        kind="augment.color_jitter",
        joins=True,
    )
    return draw._recolored(_mixed(images, draw, matrix, changes_contrast), images)


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
    gray = np.pad(_GRAY, ((0, 0), (0, 1)))
    chosen, matrix = _choice(
        draw, probability, (gray, _UNCHANGED), _MATRIX, {}, name, "augment.grayscale"
    )

    def mixed(rgb: DataNode, matrix: DataNode) -> Any:
        return fn.coord_transform(rgb, MT=matrix, dtype=types.UINT8)

    rgb = as_rgb(images, draw, types.UINT8)
    return draw._recolored(_some_changed(chosen, mixed, rgb, matrix), images)


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
    bits = ((), np.uint8)
    chosen, inverted = _choice(
        draw, probability, (255, 0), bits, settings, name, "augment.solarize"
    )
    lowest = types.Constant(threshold, dtype=types.UINT8)

    def changed(rgb: DataNode, inverted: DataNode) -> Any:
        return solarized(rgb, lowest, inverted)

    rgb = as_rgb(images, draw, types.UINT8)
    return draw._recolored(_some_changed(chosen, changed, rgb, inverted), images)


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

    size = int(kernel_size)
    distances = np.arange(size) - size // 2

    def kernels(u: NDArray[np.float32], _: object) -> list[NDArray[Any]]:
        widths, coins = u.astype(np.float64).T
        chosen = coins < probability
        sigmas = np.where(chosen, low + widths * (high - low), _NARROWEST)
        weights = np.exp(-0.5 * (distances / sigmas[:, np.newaxis]) ** 2)
        return [chosen, weights / weights.sum(axis=1, keepdims=True)]

    chosen, drawn = draw._compute_outputs(
        kernels,
        [((), np.bool_), ((1, size), np.float32)],
        columns=2,
        settings={"sigma": (low, high), "probability": probability, "kernel_size": size},
        name=name,
        kind="augment.gaussian_blur",
        joins=True,
    )

    def blurred(sharp: DataNode, row: DataNode) -> Any:
        # Two filters of one dimension take a fifth of the CPU time of fn.gaussian_blur, which also
        # ends the process at an image without pixels.
        kernel = on_device(row, sharp.device)
        filtered: Any = fn.filter(sharp, kernel, dtype=types.FLOAT)
        column = fn.reshape(kernel, shape=[size, 1])
        return fn.cast_like(fn.filter(filtered, column, dtype=types.FLOAT), sharp)

    sharp = with_layout(images, draw)
    are_all = probability == 1
    result = blurred(sharp, drawn) if are_all else _some_changed(chosen, blurred, sharp, drawn)
    return draw._recolored(result, images)


def solarized(images: DataNode, threshold: DataNode, inverted: Any = WHITE) -> DataNode:
    """Inverts bits, by default all, of the values at or above a threshold, in uint8 images."""
    result: Any = images ^ ((images >= threshold) * inverted)
    return result


def over_pixels(reduce: Callable[..., Any], images: DataNode) -> Any:
    """Returns a reduction of each channel of the images, with shape [1, 1, channels].

    Height and width are reduced separately, because one step of ``fn.reductions`` for both is slow
    on a GPU: 0.45 ms for 18 images of 224 x 224.
    """
    return reduce(reduce(images, axes=[-3], keep_dims=True), axes=[-2], keep_dims=True)


def mean_gray(images: DataNode) -> Any:
    """Returns the mean of each gray RGB image, or of each frame, float32 [1, 1, 1].

    The mean of the gray image is the gray of the mean.
    """
    return fn.coord_transform(over_pixels(fn.reductions.mean, images), M=GRAY)


def _matrices(factors: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns the matrices by which `color_jitter` multiplies (R, G, B, 1), float32 [rows, 3, 4].

    The matrices map the mean gray to (brightness * contrast) times itself.

    Args:
        factors: Brightness, contrast, saturation and hue of each row, [rows, 4].
    """
    brightness, contrast, saturation, hue = factors.T
    angle = 2 * np.pi * hue
    chroma = np.stack([saturation * np.cos(angle), saturation * np.sin(angle)], axis=1)
    colors = _GRAY + np.tensordot(chroma, [_CHROMA, _TURNED_CHROMA], axes=1)
    result = np.zeros((len(factors), 3, 4), np.float32)
    result[:, :, :3] = (brightness * contrast)[:, None, None] * colors
    return result


def _mixed(images: DataNode, draw: Draw, matrix: DataNode, has_mean: bool) -> DataNode:
    """Multiplies colors (R, G, B, 1) by matrices, and keeps the dtype of the images.

    Args:
        images: RGB images.
        draw: The draw of the graph.
        matrix: The matrix of each image, [3, 4] or [4, 4].
        has_mean: Whether the mean of the four results is subtracted from the first three.
    """
    rgb = as_rgb(images, draw)
    dtype, _ = dtype_and_layout(images, draw)
    is_mixable = dtype in _MIXABLE
    if is_mixable and not has_mean:
        return fn.coord_transform(rgb, MT=matrix, dtype=dali_type(dtype))
    numbers = rgb if is_mixable else fn.cast(rgb, dtype=types.FLOAT)
    mixed: Any = fn.coord_transform(numbers, MT=matrix)
    if has_mean:
        # One operator computes the mean, subtracts it and rounds. `over_pixels` of the fourth
        # number, an addition and a cast take 2.8 ms more for 256 images of 224 x 224 on a GPU.
        result = dali_type(dtype) if is_mixable else types.FLOAT
        mixed = fn.normalize(mixed, axis_names="HWC", stddev=1.0, dtype=result)
        mixed = fn.slice(mixed, start=[0], shape=[3], axes=[-1])
    return mixed if is_mixable else fn.cast_like(mixed, rgb)


def _choice(
    draw: Draw,
    probability: float,
    values: tuple[Any, Any],
    form: tuple[Sequence[int], Any],
    settings: dict[str, Any],
    name: str | None,
    kind: str,
) -> tuple[DataNode, DataNode]:
    """Draws whether to change each image, and an argument of the operator that changes images.

    Args:
        draw: The draw of the graph.
        probability: The probability that an image is changed.
        values: The argument for a changed image, and for an unchanged image.
        form: The shape and the dtype of the argument.
        settings, name, kind: As for `Draw.compute`.

    Returns:
        Whether each image is changed, bool, and the arguments.
    """
    check_share("probability", probability)

    def chosen(u: NDArray[np.float32], _: object) -> list[NDArray[Any]]:
        is_chosen = u[:, 0] < probability
        rows = is_chosen.reshape(-1, *(1 for _ in form[0]))
        return [is_chosen, np.where(rows, *values)]

    first, second = draw._compute_outputs(
        chosen,
        [((), np.bool_), form],
        columns=1,
        settings={**settings, "probability": probability},
        name=name,
        kind=kind,
        joins=True,
    )
    return first, second


def _some_changed(
    chosen: DataNode, function: Callable[..., Any], images: DataNode, *arguments: DataNode
) -> DataNode:
    """Applies a function to the chosen images of a batch.

    On a CPU, the batch is split and merged without copying images, so that the other images cost
    nothing. On a GPU, splitting and merging 256 images takes 2 ms, and changing all of them 0.1 to
    0.6 ms, so the function gets all images. States describe both graphs in the same way;
    see `core.state.operators.CHOICE`.

    Args:
        chosen: Whether to change each image, bool.
        function: Called with images and their arguments.
        images: The images.
        arguments: Further values of each image that the function takes. With the values of images
            that are not chosen, the function returns the images unchanged.
    """
    if images.device == "gpu":
        result: DataNode = function(images, *arguments)
        return result
    prefix = f"{CHOICE}{chosen.name}"
    inputs = [
        conditional.split(node, predicate=chosen, name=f"{prefix}_{k}")
        for k, node in enumerate((images, *arguments))
    ]
    changed = function(*(first for first, _ in inputs))
    merged: DataNode = conditional.merge(
        changed, inputs[0][1], predicate=chosen, name=f"{prefix}_merged"
    )
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
