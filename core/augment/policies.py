"""The random choices of RandAugment, TrivialAugment and AutoAugment, in NumPy.

Operations and magnitudes are torchvision's; AutoAugment's tables are the paper's: Cubuk et al.,
AutoAugment (2018), appendix; Cubuk et al., RandAugment (2019); Mueller and Hutter, TrivialAugment
(2021), the wide space.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .windows import Floats, Sizes, Uniform

Ints = NDArray[np.int64]

# The branches of the graph: for each, the name in `FORMS` of the argument that its operator takes;
# None if the operator takes no argument.
BRANCHES = {
    "identity": None,
    "affine": "matrix",
    "brightness": "factor",
    "color": "factor",
    "contrast": "factor",
    "sharpness": "kernel",
    "posterize": "mask",
    "solarize": "threshold",
    "auto_contrast": None,
    "equalize": None,
}
# The operations, in torchvision's order, each with its branch.
OPERATIONS = {
    "identity": "identity",
    **dict.fromkeys(("shear_x", "shear_y", "translate_x", "translate_y", "rotate"), "affine"),
    **{name: name for name in ("brightness", "color", "contrast", "sharpness", "posterize")},
    **{name: name for name in ("solarize", "auto_contrast", "equalize")},
    "invert": "solarize",  # with threshold 0
}
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
_BRANCH_OF = np.array([list(BRANCHES).index(branch) for branch in OPERATIONS.values()])
_COUNT = len(OPERATIONS) - 1  # without "invert", which only AutoAugment uses
_SIGNED = np.array([1 <= number <= _NUMBER["sharpness"] for number in _NUMBER.values()])
_BLUR = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
_SHARP = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])

_TRANSLATE = 150 / 331  # share of the width or height: 150 pixels of RandAugment's 331
_WIDE_TRANSLATE = 32.0  # pixels


class Choice(NamedTuple):
    """One operation for each image of a batch.

    Attributes:
        operation: Indices into `OPERATIONS`, int64 [rows].
        magnitude: Signed magnitudes, float64 [rows].
    """

    operation: Ints
    magnitude: Floats


# The arguments of the graph's operators, with the shape of each argument for one image.
FORMS: dict[str, tuple[int, ...]] = {
    "factor": (),  # for brightness, color and contrast
    "threshold": (),  # lowest value that is inverted
    "matrix": (2, 3),  # maps the output's pixels to the input's, (x, y)
    "kernel": (3, 3),  # a filter
    "mask": (),  # bits to keep, an integer
}


@functools.cache
def magnitudes(
    bins: int, *, shear: float, translate: float, rotate: float, enhance: float, bits: int
) -> Floats:
    """Returns a table with the magnitudes of each operation, float64 [operations, bins].

    Args:
        bins: Number of magnitudes, at least 2.
        shear: Maximum shear, in pixels per pixel.
        translate: Maximum translation, as a share of the size or in pixels; see `arguments`.
        rotate: Maximum angle, in degrees.
        enhance: Maximum distance of a color factor from 1.
        bits: Maximum number of bits that posterizing removes.
    """
    most = {
        **dict.fromkeys(("shear_x", "shear_y"), shear),
        **dict.fromkeys(("translate_x", "translate_y"), translate),
        "rotate": rotate,
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), enhance),
    }
    table = np.array([np.linspace(0.0, most.get(name, 0.0), bins) for name in OPERATIONS])
    table[_NUMBER["posterize"]] = 8 - np.rint(np.arange(bins) / ((bins - 1) / bits))
    table[_NUMBER["solarize"]] = np.linspace(255.0, 0.0, bins)
    table.setflags(write=False)
    return table


def rand_augment(u: Uniform, num_ops: int, magnitude: int, bins: int) -> list[Choice]:
    """Chooses operations for each image uniformly, all with the same magnitude.

    Args:
        u: Uniform numbers, [rows, 2 * num_ops], with a row for each image.
        num_ops: Number of operations.
        magnitude: Index of the magnitude.
        bins: Number of magnitudes.

    Returns:
        ``num_ops`` choices, to be applied in this order.
    """
    table = magnitudes(bins, shear=0.3, translate=_TRANSLATE, rotate=30.0, enhance=0.9, bits=4)
    numbers = u.astype(np.float64)
    choices = []
    for first in range(0, 2 * num_ops, 2):
        operation = _integers(numbers[:, first], _COUNT)
        size = table[operation, magnitude]
        choices.append(Choice(operation, _signed(operation, size, numbers[:, first + 1])))
    return choices


def trivial_augment(u: Uniform, bins: int) -> list[Choice]:
    """Chooses one operation and its magnitude for each image uniformly.

    Args:
        u: Uniform numbers, [rows, 3], with a row for each image.
        bins: Number of magnitudes.

    Returns:
        A list with a single choice.
    """
    table = magnitudes(
        bins, shear=0.99, translate=_WIDE_TRANSLATE, rotate=135.0, enhance=0.99, bits=6
    )
    numbers = u.astype(np.float64)
    operation = _integers(numbers[:, 0], _COUNT)
    size = table[operation, _integers(numbers[:, 1], bins)]
    return [Choice(operation, _signed(operation, size, numbers[:, 2]))]


def auto_augment(u: Uniform, policy: str) -> list[Choice]:
    """Chooses two operations of a policy for each image.

    Each operation is chosen with its probability in the policy, otherwise the identity is chosen.

    Args:
        u: Uniform numbers, [rows, 5], with a row for each image.
        policy: A name in `POLICIES`.

    Returns:
        Two choices, to be applied in this order.
    """
    table = magnitudes(10, shear=0.3, translate=_TRANSLATE, rotate=30.0, enhance=0.9, bits=4)
    numbers = u.astype(np.float64)
    pairs = _numbered(policy)[_integers(numbers[:, 0], len(POLICIES[policy]))]
    choices = []
    for stage in (0, 1):
        operation, probability, number = pairs[:, stage].T
        applied = numbers[:, 1 + stage] < probability
        operation = np.where(applied, operation, _NUMBER["identity"]).astype(np.int64)
        size = table[operation, number.astype(np.int64)]
        choices.append(Choice(operation, _signed(operation, size, numbers[:, 3 + stage])))
    return choices


@functools.cache
def _numbered(policy: str) -> Floats:
    """Returns a policy's pairs of operations as an array, float64 [pairs, 2, 3].

    The last dimension contains the operation's index into `OPERATIONS`, its probability, and the
    index of its magnitude.
    """
    return np.array([[(_NUMBER[name], p, k) for name, p, k in pair] for pair in POLICIES[policy]])


def branches_of(policy: str | None, stage: int) -> list[int]:
    """Returns the branches that a stage may choose, as sorted indices into `BRANCHES`.

    Args:
        policy: A name in `POLICIES`; None for RandAugment and TrivialAugment.
        stage: 0 for the first operation of the policy's pairs, 1 for the second.
    """
    names = list(OPERATIONS)[:_COUNT]
    if policy is not None:
        names = ["identity", *(pair[stage][0] for pair in POLICIES[policy])]
    return sorted({int(_BRANCH_OF[_NUMBER[name]]) for name in names})


def branches(choice: Choice) -> Ints:
    """Returns the index into `BRANCHES` of each chosen operation, [rows]."""
    return _BRANCH_OF[choice.operation]


def arguments(
    choice: Choice, sizes: Sizes, names: Iterable[str], *, pixels: bool = False
) -> list[NDArray[Any]]:
    """Returns the arguments of the graph's operators, an array [rows, ...] for each name.

    Args:
        choice: Operations and magnitudes.
        sizes: Heights and widths of the images, [rows, 2].
        names: Names in `FORMS` of the arguments to compute.
        pixels: Whether translations are in pixels; otherwise they are shares of the size.
    """
    operation, magnitude = choice
    factor = 1.0 + magnitude
    bits = np.where(operation == _NUMBER["posterize"], magnitude, 8.0).astype(np.int64)
    functions: dict[str, Callable[[], NDArray[Any]]] = {
        "factor": lambda: factor,
        "threshold": lambda: magnitude,  # 0 inverts the whole image
        "matrix": lambda: _matrices(choice, sizes, pixels),
        "kernel": lambda: factor[:, None, None] * _SHARP - magnitude[:, None, None] * _BLUR,
        "mask": lambda: 256 - (1 << (8 - bits)),
    }
    return [functions[name]() for name in names]


def _matrices(choice: Choice, sizes: Sizes, pixels: bool) -> Floats:
    """Returns the matrices of affine operations, float64 [rows, 2, 3].

    As in Pillow's ``Image.transform``, a matrix maps pixels (x, y) of the output to the input. It
    is the identity for other operations.
    """
    operation, magnitude = choice
    matrices = np.zeros((len(operation), 2, 3))
    matrices[:, 0, 0] = matrices[:, 1, 1] = 1.0
    heights, widths = sizes.T.astype(np.float64)

    def put(name: str, row: int, column: int, values: Floats) -> None:
        chosen = operation == _NUMBER[name]
        matrices[chosen, row, column] = values[chosen]

    put("shear_x", 0, 1, magnitude)
    put("shear_y", 1, 0, magnitude)
    for name, row, length in (("translate_x", 0, widths), ("translate_y", 1, heights)):
        offset = magnitude if pixels else magnitude * length
        # Rounded to float32 first, so that 149.99999999999997 becomes 150 pixels.
        put(name, row, 2, -np.trunc(offset.astype(np.float32)).astype(np.float64))
    angle = np.deg2rad(magnitude)  # counter-clockwise, about the center
    cos, sin, x, y = np.cos(angle), np.sin(angle), widths / 2, heights / 2
    for row, column, values in (
        *((0, 0, cos), (0, 1, -sin), (0, 2, x - cos * x + sin * y)),
        *((1, 0, sin), (1, 1, cos), (1, 2, y - sin * x - cos * y)),
    ):
        put("rotate", row, column, values)
    return matrices


def _integers(u: Floats, count: int) -> Ints:
    """Converts uniform numbers in [0, 1) to integers from 0 to ``count - 1``."""
    return (u * count).astype(np.int64)


def _signed(operation: Ints, magnitude: Floats, u: Floats) -> Floats:
    """Returns the magnitudes, negated if ``u`` is below 0.5 and the operation has a sign."""
    return np.where(_SIGNED[operation] & (u < 0.5), -magnitude, magnitude)


# For each pair, two operations, each with its probability and the index of its magnitude (of ten; 0
# if the operation has no magnitude).
POLICIES = {
    "imagenet": (
        (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
        (("solarize", 0.6, 5), ("auto_contrast", 0.6, 0)),
        (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
        (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
        (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
        (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
        (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
        (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
        (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
        (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
        (("rotate", 0.8, 8), ("color", 0.4, 0)),
        (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
        (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
        (("invert", 0.6, 0), ("equalize", 1.0, 0)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("rotate", 0.8, 8), ("color", 1.0, 2)),
        (("color", 0.8, 8), ("solarize", 0.8, 7)),
        (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
        (("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
        (("color", 0.4, 0), ("equalize", 0.6, 0)),
        (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
        (("solarize", 0.6, 5), ("auto_contrast", 0.6, 0)),
        (("invert", 0.6, 0), ("equalize", 1.0, 0)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    ),
    "cifar10": (
        (("invert", 0.1, 0), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
        (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
        (("auto_contrast", 0.5, 0), ("equalize", 0.9, 0)),
        (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
        (("color", 0.4, 3), ("brightness", 0.6, 7)),
        (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
        (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
        (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
        (("color", 0.7, 7), ("translate_x", 0.5, 8)),
        (("equalize", 0.3, 0), ("auto_contrast", 0.4, 0)),
        (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
        (("brightness", 0.9, 6), ("color", 0.2, 8)),
        (("solarize", 0.5, 2), ("invert", 0.0, 0)),
        (("equalize", 0.2, 0), ("auto_contrast", 0.6, 0)),
        (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
        (("color", 0.9, 9), ("equalize", 0.6, 0)),
        (("auto_contrast", 0.8, 0), ("solarize", 0.2, 8)),
        (("brightness", 0.1, 3), ("color", 0.7, 0)),
        (("solarize", 0.4, 5), ("auto_contrast", 0.9, 0)),
        (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
        (("auto_contrast", 0.9, 0), ("solarize", 0.8, 3)),
        (("equalize", 0.8, 0), ("invert", 0.1, 0)),
        (("translate_y", 0.7, 9), ("auto_contrast", 0.9, 0)),
    ),
    "svhn": (
        (("shear_x", 0.9, 4), ("invert", 0.2, 0)),
        (("shear_y", 0.9, 8), ("invert", 0.7, 0)),
        (("equalize", 0.6, 0), ("solarize", 0.6, 6)),
        (("invert", 0.9, 0), ("equalize", 0.6, 0)),
        (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("auto_contrast", 0.8, 0)),
        (("shear_y", 0.9, 8), ("invert", 0.4, 0)),
        (("shear_y", 0.9, 5), ("solarize", 0.2, 6)),
        (("invert", 0.9, 0), ("auto_contrast", 0.8, 0)),
        (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("solarize", 0.3, 3)),
        (("shear_y", 0.8, 8), ("invert", 0.7, 0)),
        (("equalize", 0.9, 0), ("translate_y", 0.6, 6)),
        (("invert", 0.9, 0), ("equalize", 0.6, 0)),
        (("contrast", 0.3, 3), ("rotate", 0.8, 4)),
        (("invert", 0.8, 0), ("translate_y", 0.0, 2)),
        (("shear_y", 0.7, 6), ("solarize", 0.4, 8)),
        (("invert", 0.6, 0), ("rotate", 0.8, 4)),
        (("shear_y", 0.3, 7), ("translate_x", 0.9, 3)),
        (("shear_x", 0.1, 6), ("invert", 0.6, 0)),
        (("solarize", 0.7, 2), ("translate_y", 0.6, 7)),
        (("shear_y", 0.8, 4), ("invert", 0.8, 0)),
        (("shear_x", 0.7, 9), ("translate_y", 0.8, 3)),
        (("shear_y", 0.8, 5), ("auto_contrast", 0.7, 0)),
        (("shear_x", 0.7, 2), ("invert", 0.1, 0)),
    ),
}
