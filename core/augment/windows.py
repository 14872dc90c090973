"""Windows of images as torchvision defines them, in pixels, computed in NumPy for whole batches.

The functions take uniform numbers in [0, 1), float32 [rows, columns], and the images' heights and
widths, int32 [rows, 2], with a row for each image. They compute in double precision, so that all
CPUs give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
Range = tuple[float, float]
Uniform = NDArray[np.float32]
Sizes = NDArray[np.int32]
Floats = NDArray[np.float64]

ATTEMPTS = 10
COLUMNS = 2 * ATTEMPTS + 2  # an area and a ratio for each attempt, and a position (y, x)


def is_whole(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Converts an array to a list, or to a number if it has no dimensions."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def pair(value: int | Sequence[int], name: str) -> Pair:
    """Converts a size to (height, width); an int sets both.

    Raises:
        ValueError: If ``value`` is neither a positive int nor a pair of positive ints.
    """
    value = plain(value)
    numbers = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(numbers) != 2 or not all(is_whole(n) and n >= 1 for n in numbers):
        raise ValueError(f"{name} must be pixels, or (height, width), above 0, not {value!r}")
    return int(numbers[0]), int(numbers[1])


def check_ranges(scale: Range, ratio: Range) -> None:
    """Checks a range of area shares and a range of aspect ratios.

    Raises:
        TypeError: If a range is not a pair.
        ValueError: If a range is out of order or out of bounds.
    """
    for name, value, example in (("scale", scale, "(0.08, 1.0)"), ("ratio", ratio, "(0.75, 1.33)")):
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} must be a pair (low, high) such as {example}, not {value!r}")
    if len(scale) != 2 or not 0 <= scale[0] <= scale[1] <= 1 or scale[1] == 0:
        raise ValueError(
            f"scale must be (low, high) with 0 <= low <= high <= 1 and high above 0, not {scale!r}"
        )
    if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < np.inf:
        raise ValueError(f"ratio must be (low, high) with 0 < low <= high, not {ratio!r}")


def _positions(u: Floats, room: Floats) -> Floats:
    """Returns random positions of windows, whole numbers from 0 to ``room``.

    ``room`` is the number of pixels by which an image exceeds its window.
    """
    return np.floor(u * (room + 1))


def _attempts(
    u: Floats, sizes: Floats, scale: Range, ratio: Range, inverse: bool, relative: bool
) -> Floats:
    """Returns the heights and widths of random windows, float64 [2, rows, attempts].

    Args:
        u: Uniform numbers for the areas, and then for the ratios, [rows, 2 * attempts].
        sizes: Image sizes, [rows, 2].
        scale: Range of the window's share of the image's area.
        ratio: Range of width / height, or of height / width if ``inverse``.
        inverse: See ``ratio``.
        relative: Whether ``ratio`` is relative to the image's own width / height.
    """
    count = u.shape[1] // 2
    areas = np.prod(sizes, axis=1)[:, None] * (scale[0] + u[:, :count] * (scale[1] - scale[0]))
    low, high = np.log(ratio[0]), np.log(ratio[1])
    ratios = np.exp(low + u[:, count:] * (high - low))
    if relative:
        ratios *= sizes[:, 1:] / sizes[:, :1]
    flat, tall = np.sqrt(areas / ratios), np.sqrt(areas * ratios)
    return np.rint(np.stack([tall, flat] if inverse else [flat, tall]))


def _first_fit(
    u: Floats,
    sizes: Floats,
    scale: Range,
    ratio: Range,
    fits: Callable[[Floats, Floats], NDArray[np.bool_]],
    *,
    inverse: bool = False,
    relative: bool = False,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Selects the first of ten random windows that fits into each image.

    Args:
        u: Uniform numbers for ten areas and ten ratios, [rows, 20].
        sizes: Image sizes, [rows, 2].
        scale, ratio, inverse, relative: As for `_attempts`.
        fits: Returns whether heights and widths fit, given windows' and images' sizes.

    Returns:
        Heights and widths of the selected windows, [2, rows], and whether they fit, bool [rows].
    """
    extent = _attempts(u[:, [0, ATTEMPTS]], sizes, scale, ratio, inverse, relative)[:, :, 0]
    fitting = fits(extent, sizes.T).all(axis=0)
    others = np.flatnonzero(~fitting)
    if others.size:  # usually few, so that further attempts take little time
        windows = _attempts(u[others], sizes[others], scale, ratio, inverse, relative)
        fit = fits(windows, sizes[others].T[..., None]).all(axis=0)
        first, rows = fit.argmax(axis=1), np.arange(len(others))
        extent[:, others], fitting[others] = windows[:, rows, first], fit[rows, first]
    return extent, fitting


def resized_crops(
    u: Uniform, sizes: Sizes, scale: Range, ratio: Range, relative: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chooses windows of random area and ratio: ten attempts, then a centered window.

    Args:
        u: Uniform numbers, [rows, at least `COLUMNS`].
        sizes: Image sizes, [rows, 2].
        scale: Range of the window's share of the image's area.
        ratio: Range of width / height.
        relative: Whether ``ratio`` is relative to the image's own width / height.

    Returns:
        Start and end of the windows, (y, x) in whole pixels: two float32 arrays [rows, 2].
    """
    numbers, image_sizes = u.astype(np.float64), sizes.T.astype(np.float64)
    chosen, fitting = _first_fit(
        numbers[:, : 2 * ATTEMPTS],
        image_sizes.T,
        scale,
        ratio,
        lambda window, image: (window > 0) & (window <= image),
        relative=relative,
    )
    extent = np.where(fitting, chosen, _central(image_sizes, ratio, relative))
    room = image_sizes - extent
    position = numbers[:, 2 * ATTEMPTS : COLUMNS].T
    start = np.where(fitting, _positions(position, room), room // 2)
    return start.T.astype(np.float32), (start + extent).T.astype(np.float32)


def flipped(
    start: NDArray[np.float32], end: NDArray[np.float32], u: Uniform, share: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns windows of which some are flipped horizontally: left and right are exchanged.

    Args:
        start, end: Start and end of the windows, (y, x), [rows, 2].
        u: Uniform numbers [rows, ...]; the last column decides which windows are flipped.
        share: Probability of a flip, from 0 to 1.

    Returns:
        Start and end of the windows, two arrays [rows, 2].
    """
    return mirrored(start, end, u[:, -1] < share)


def mirrored(start: Any, end: Any, flips: NDArray[np.bool_]) -> tuple[Any, Any]:
    """Returns pairs of corners (y, x), of which some exchange left and right.

    Args:
        start, end: The corners, two arrays [rows, 2].
        flips: Whether to exchange left and right, [rows].
    """
    swapped = flips[:, np.newaxis] & np.array([False, True])  # x alone
    return np.where(swapped, end, start), np.where(swapped, start, end)


def _central(image_size: Floats, ratio: Range, relative: bool) -> Floats:
    """Returns the heights and widths of the largest windows with an allowed ratio, [2, rows]."""
    height, width = image_size
    own = width / height
    low, high = np.multiply.outer(ratio, own if relative else np.ones_like(own))
    limited = np.clip(own, low, high)
    narrow, wide = own < low, own > high
    return np.maximum(
        [
            np.where(narrow, np.rint(width / limited), height),
            np.where(wide, np.rint(height * limited), width),
        ],
        1.0,
    )


def erased(
    u: Uniform, sizes: Sizes, probability: float, scale: Range, ratio: Range
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chooses rectangles to erase: ten attempts, then an empty rectangle.

    Args:
        u: Uniform numbers, [rows, `COLUMNS` + 1].
        sizes: Image sizes, [rows, 2].
        probability: Probability that an image has an erased rectangle.
        scale: Range of the rectangle's share of the image's area.
        ratio: Range of height / width.

    Returns:
        Start of the rectangles (y, x), and their heights and widths, in whole pixels: two float32
        arrays [rows, 2]. Empty rectangles have height and width 0.
    """
    numbers, image_sizes = u.astype(np.float64), sizes.T.astype(np.float64)
    attempts = numbers[:, : 2 * ATTEMPTS]
    chosen, fitting = _first_fit(attempts, image_sizes.T, scale, ratio, np.less, inverse=True)
    extent = np.where(fitting & (numbers[:, -1] < probability), chosen, 0.0)
    start = _positions(numbers[:, 2 * ATTEMPTS : -1].T, image_sizes - extent)
    return start.T.astype(np.float32), extent.T.astype(np.float32)


def crops(u: Uniform, sizes: Sizes, size: Pair, padding: Sequence[int]) -> NDArray[np.int32]:
    """Chooses positions of fixed-size windows in padded images.

    Args:
        u: Uniform numbers, [rows, 2].
        sizes: Image sizes, [rows, 2].
        size: Height and width of the windows.
        padding: Padding on the left, top, right and bottom, in pixels.

    Returns:
        Start of the windows (y, x) in pixels of the unpadded image, negative within the padding:
        int32 [rows, 2].
    """
    left, top, right, bottom = padding
    padding_size = np.array([top + bottom, left + right])
    room = np.maximum(sizes + padding_size - size, 0)
    return (_positions(u.astype(np.float64), room) - [top, left]).astype(np.int32)


def covering_crops(
    u: Uniform | None, sizes: Sizes, outputs: Sizes
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chooses windows of images after resizing them, with their aspect ratio, to cover an output.

    Args:
        u: Uniform numbers for the place (y, x), [rows, at least 2]; None: the center.
        sizes: Image sizes, [rows, 2].
        outputs: Sizes of the outputs, [rows, 2].

    Returns:
        Start and end of the windows in the original images, (y, x) in pixels: two float32 arrays
        [rows, 2]. They are whole pixels of the resized images.
    """
    factor = (outputs / sizes).max(axis=1, keepdims=True)
    scaled = np.maximum(np.rint(sizes * factor), outputs)
    room: Floats = scaled - outputs
    start = np.rint(room / 2) if u is None else _positions(u[:, :2].astype(np.float64), room)
    back = sizes / scaled
    return (start * back).astype(np.float32), ((start + outputs) * back).astype(np.float32)


def central_crops(
    sizes: Sizes, size: Pair, shorter: int | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Computes centered windows of images after resizing their shorter side.

    Args:
        sizes: Image sizes, [rows, 2].
        size: Height and width of the window, in pixels of the resized image.
        shorter: Length of the shorter side after resizing, in pixels; None: not resized.

    Returns:
        Start and end of the windows in the original images, (y, x) in pixels: two float32 arrays
        [rows, 2].
    """
    scaled = resized(sizes, shorter)
    start = np.rint((scaled - size) / 2)
    back = sizes / scaled
    return (start * back).astype(np.float32), ((start + size) * back).astype(np.float32)


def resized(sizes: Sizes, shorter: int | None) -> Floats:
    """Returns the sizes of images after resizing their shorter side, rounded down, [rows, 2]."""
    image_sizes = sizes.astype(np.float64)
    if shorter is None:
        return image_sizes
    return np.floor(shorter * image_sizes / image_sizes.min(axis=1, keepdims=True))


def too_small(
    sizes: Sizes, size: Pair, *, padding: Sequence[int] = (0, 0, 0, 0), shorter: int | None = None
) -> dict[int, str]:
    """Returns error messages for images that are smaller than a crop, by row in ``sizes``.

    Args:
        sizes: Image sizes, [rows, 2].
        size: Height and width of the crop.
        padding: Padding on the left, top, right and bottom, in pixels.
        shorter: Length of the shorter side after resizing, in pixels; None: not resized.
    """
    left, top, right, bottom = padding
    room = resized(sizes, shorter) + np.array([top + bottom, left + right]) - size
    return {
        row: f"the image has {sizes[row, 0]} x {sizes[row, 1]} pixels, too few for a crop of "
        f"{size[0]} x {size[1]}: pad or resize it"
        for row in np.flatnonzero((room < 0).any(axis=1)).tolist()
    }
