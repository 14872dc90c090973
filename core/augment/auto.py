"""RandAugment, TrivialAugment and AutoAugment as functions for DALI graphs.

Each stage splits the batch by operation, applies DALI's operators and merges the results, as an
``if`` statement in a DALI graph does. The functions call DALI's split and merge operators directly,
so that callers need not pass ``enable_conditionals``, which would rewrite their graph function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, whole_number
from ..random.draw import Draw, check_draw, on_device
from . import policies
from .colors import WHITE, mean_gray, over_pixels, solarized
from .layouts import as_rgb, conditional
from .policies import Choice

_NAMES = list(policies.BRANCHES)


@do_not_convert
@knows_its_names
def rand_augment(
    images: DataNode,
    *,
    draw: Draw,
    num_ops: int = 2,
    magnitude: int = 9,
    num_magnitude_bins: int = 31,
    interp_type: Any = types.INTERP_NN,
    fill_value: float = 0,
    name: str | None = None,
) -> DataNode:
    """Applies random operations of a fixed magnitude: RandAugment (Cubuk et al., 2019).

    Uses the fourteen operations and magnitudes of torchvision's ``RandAugment``: identity; shear up
    to 0.3; translation up to 150/331 of the size; rotation up to 30 degrees; brightness, color,
    contrast and sharpness by factors of 1 +- 0.9; posterizing to 4 bits; solarizing from 255 to 0;
    auto contrast; equalizing. Signs are random.

    Pixels differ from torchvision's by rounding, with two exceptions. Sharpness also filters the
    outermost pixels, which torchvision leaves unchanged. Equalizing differs by up to
    65,000 / (height * width) gray levels, because torchvision rounds the number of pixels per gray
    level down.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], uint8, with
            sizes that ``draw`` can look up. Other images fail.
        draw: The argument ``draw`` of the graph function.
        num_ops: Number of operations, applied in sequence.
        magnitude: Magnitude of the operations, from 0 to ``num_magnitude_bins - 1``.
        num_magnitude_bins: Number of magnitudes.
        interp_type: Interpolation of sheared, translated and rotated images.
        fill_value: Value of pixels outside the original image.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    num_ops = whole_number("num_ops", num_ops, "a number of operations, 1 or more", 1)
    if num_magnitude_bins < 2 or not 0 <= magnitude < num_magnitude_bins:
        raise ValueError(
            "magnitude must be at least 0 and below num_magnitude_bins, which must be at least 2, "
            f"not {magnitude} of {num_magnitude_bins}"
        )
    return _augmented(
        images,
        draw,
        lambda u: policies.rand_augment(u, num_ops, magnitude, num_magnitude_bins),
        [policies.branches_of(None, 0)] * num_ops,
        2 * num_ops,
        {"num_ops": num_ops, "magnitude": magnitude, "num_magnitude_bins": num_magnitude_bins},
        name,
        "augment.rand_augment",
        interp_type=interp_type,
        fill_value=fill_value,
    )


@do_not_convert
@knows_its_names
def trivial_augment(
    images: DataNode,
    *,
    draw: Draw,
    num_magnitude_bins: int = 31,
    interp_type: Any = types.INTERP_NN,
    fill_value: float = 0,
    name: str | None = None,
) -> DataNode:
    """Applies one random operation of random magnitude: TrivialAugment (Mueller and Hutter, 2021).

    Uses the fourteen operations of `rand_augment`, with the wide magnitudes of torchvision's
    ``TrivialAugmentWide``: shear to 0.99; translation to 32 pixels; rotation to 135 degrees;
    factors of 1 +- 0.99; posterizing to 2 bits.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], uint8, with
            sizes that ``draw`` can look up. Other images fail.
        draw: The argument ``draw`` of the graph function.
        num_magnitude_bins: Number of magnitudes.
        interp_type: Interpolation of sheared, translated and rotated images.
        fill_value: Value of pixels outside the original image.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If ``num_magnitude_bins`` is less than 2.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    if num_magnitude_bins < 2:
        raise ValueError(f"num_magnitude_bins must be 2 or more, not {num_magnitude_bins}")
    return _augmented(
        images,
        draw,
        lambda u: policies.trivial_augment(u, num_magnitude_bins),
        [policies.branches_of(None, 0)],
        3,
        {"num_magnitude_bins": num_magnitude_bins},
        name,
        "augment.trivial_augment",
        pixels=True,
        interp_type=interp_type,
        fill_value=fill_value,
    )


@do_not_convert
@knows_its_names
def auto_augment(
    images: DataNode,
    *,
    draw: Draw,
    policy: str = "imagenet",
    interp_type: Any = types.INTERP_NN,
    fill_value: float = 0,
    name: str | None = None,
) -> DataNode:
    """Applies two operations of a learned policy: AutoAugment (Cubuk et al., 2018).

    Uses the policies and ten magnitudes of torchvision's ``AutoAugment``, which are the
    paper's policies for ImageNet, CIFAR-10 and SVHN. (DALI's ``image_net`` is a different policy,
    from TensorFlow's TPU models; its ``reduced_image_net`` is the paper's.) One of 25 pairs is
    chosen for each image, and each of its two operations is applied with its probability. See
    `rand_augment` for the operations.

    Args:
        images: RGB images [height, width, 3], or videos [frames, height, width, 3], uint8, with
            sizes that ``draw`` can look up. Other images fail.
        draw: The argument ``draw`` of the graph function.
        policy: ``"imagenet"``, ``"cifar10"`` or ``"svhn"``.
        interp_type: Interpolation of sheared, translated and rotated images.
        fill_value: Value of pixels outside the original image.
        name: Name of the draw; see `dalijax.Draw`.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the policy is unknown.
        TypeError: If ``draw`` cannot look up the sizes of the images.
    """
    check_draw(draw, images)
    if policy not in policies.POLICIES:
        raise ValueError(f"policy must be one of {list(policies.POLICIES)}, not {policy!r}")
    return _augmented(
        images,
        draw,
        lambda u: policies.auto_augment(u, policy),
        [policies.branches_of(policy, stage) for stage in (0, 1)],
        5,
        {"policy": policy},
        name,
        "augment.auto_augment",
        interp_type=interp_type,
        fill_value=fill_value,
    )


def _augmented(
    images: DataNode,
    draw: Draw,
    choose: Callable[[NDArray[np.float32]], list[Choice]],
    stages: Sequence[Sequence[int]],
    columns: int,
    settings: Mapping[str, Any],
    name: str | None,
    kind: str,
    *,
    pixels: bool = False,
    **warp: Any,
) -> DataNode:
    """Applies randomly chosen operations to images, one after another, and returns the images.

    Args:
        images: RGB images [height, width, 3], uint8.
        draw: The argument ``draw`` of the graph function.
        choose: Maps uniform numbers, float32 [images, columns], to a `Choice` for each stage.
        stages: For each stage, the branches that it may choose, as indices into
            `policies.BRANCHES`.
        columns: Number of uniform numbers for each image.
        settings: Arguments of the augmentation, for states and their comparison.
        name: Name of the draw; see `dalijax.Draw`.
        kind: Name of the public function, for states and their comparison.
        pixels: Whether translations are in pixels; otherwise they are shares of the size.
        **warp: Arguments of ``fn.warp_affine``.
    """
    stage_arguments = [_arguments_of(branches) for branches in stages]
    # All arguments of a stage are concatenated to one vector, which is sliced at each operator.
    # Separate arguments would all be split at each branching, which took a CPU 25 % longer on small
    # images.
    forms: list[tuple[tuple[int, ...], Any]] = []
    for names in stage_arguments:
        numbers = sum(math.prod(policies.FORMS[form]) for form in names)
        forms += [((), np.int32), ((numbers,), np.float32)]

    def arguments(u: NDArray[np.float32], sizes: Any) -> list[NDArray[Any]]:
        arrays: list[NDArray[Any]] = []
        for choice, names in zip(choose(u), stage_arguments):
            values = policies.arguments(choice, sizes, names, pixels=pixels)
            arrays += [policies.branches(choice), _hstacked(values)]
        return arrays

    nodes = iter(
        draw._compute_outputs(
            arguments,
            forms,
            columns=columns,
            images=images,
            settings=settings,
            name=name,
            kind=kind,
            joins=True,
        )
    )
    augmented = as_rgb(images, draw, types.UINT8)
    for branches, names in zip(stages, stage_arguments):
        augmented = _select(branches, augmented, next(nodes), next(nodes), names, warp)
    return draw.sized(augmented, images)


def _hstacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenates arrays [rows, ...] to an array [rows, numbers]; a single array is unchanged."""
    if len(arrays) == 1:
        return arrays[0]
    return np.hstack([a.reshape(len(a), math.prod(a.shape[1:])) for a in arrays])


def _part_of(numbers: Any, shapes: Sequence[tuple[int, ...]], k: int) -> DataNode:
    """Returns the k-th array of each sample, sliced out of the arrays of `_hstacked`.

    Args:
        numbers: The DataNode of the concatenated arrays, of shape [numbers] for each sample.
        shapes: The shapes of the arrays before concatenation, for each sample.
        k: The index of the array.
    """
    first, shape = sum(map(math.prod, shapes[:k])), shapes[k]
    part = numbers[first : first + math.prod(shape)] if shape else numbers[first]
    if len(shape) > 1:
        part = fn.reshape(part, shape=list(shape))
    node: DataNode = part
    return node


def _arguments_of(branches: Sequence[int]) -> list[str]:
    """Returns the names of the arguments that branches need, in the order of `policies.FORMS`."""
    users = {policies.BRANCHES[_NAMES[branch]] for branch in branches}
    return [name for name in policies.FORMS if name in users]


def _select(
    branches: Sequence[int],
    images: DataNode,
    branch: DataNode,
    numbers: DataNode,
    names: Sequence[str],
    warp: Mapping[str, Any],
) -> DataNode:
    """Applies to each image the operator of its branch, and returns the images.

    Splits the batch into images of the lower and of the upper half of the branches, recursively,
    and merges the results.

    Args:
        branches: The branches that may occur, as sorted indices into `policies.BRANCHES`.
        images: The images.
        branch: The branch of each image, an index into `policies.BRANCHES`.
        numbers: The concatenated arguments of the operators for each image, float32 [numbers].
        names: Names of the concatenated arguments in `policies.FORMS`.
        warp: Arguments of ``fn.warp_affine``.
    """
    if len(branches) == 1:
        name = _NAMES[branches[0]]
        argument = policies.BRANCHES[name]
        value = None
        if argument is not None:
            shapes = [policies.FORMS[argument_name] for argument_name in names]
            value = _part_of(numbers, shapes, names.index(argument))
        return _operate(name, images, value, warp)
    middle = len(branches) // 2
    chosen = branch < branches[middle]
    halves = branches[:middle], branches[middle:]
    image_halves, branch_halves, number_halves = (
        _split(node, chosen) for node in (images, branch, numbers)
    )
    sides = zip(halves, image_halves, branch_halves, number_halves)
    outputs = [_select(*side, names, warp) for side in sides]
    merged: DataNode = conditional.merge(*outputs, predicate=chosen)
    return merged


def _split(node: DataNode, chosen: DataNode) -> tuple[DataNode, DataNode]:
    """Returns the chosen samples of a batch, and the remaining samples."""
    first, second = conditional.split(node, predicate=chosen)
    return first, second


def _operate(branch: str, images: DataNode, value: Any, warp: Mapping[str, Any]) -> DataNode:
    """Applies the operator of a branch to images, and returns the images.

    Args:
        branch: The name of the branch in `policies.BRANCHES`.
        images: The images.
        value: The argument of the operator; None if it has no argument.
        warp: Arguments of ``fn.warp_affine``.
    """
    output: Any = images
    if branch == "affine":
        output = fn.warp_affine(images, matrix=value, **warp)
    elif branch == "brightness":
        output = fn.brightness(images, brightness=value)
    elif branch == "color":
        output = fn.saturation(images, saturation=value)
    elif branch == "contrast":
        output = fn.cast_like(images * value + mean_gray(images) * (1 - value), images)
    elif branch == "sharpness":
        output = fn.filter(images, on_device(value, images.device))
    elif branch == "posterize":
        output = images & fn.cast(value, dtype=types.UINT8)
    elif branch == "solarize":
        output = solarized(images, value)
    elif branch == "auto_contrast":
        output = _auto_contrast(images)
    elif branch == "equalize":
        # DALI and Pillow round the two ends of the histogram differently: DALI's range starts after
        # the lowest value, Pillow's ends before the highest. Inverting the values swaps the ends.
        output = fn.equalize(images ^ WHITE) ^ WHITE
    return output


def _auto_contrast(images: DataNode) -> DataNode:
    """Returns images with each channel stretched to 0..255; constant channels are unchanged.

    Computes the same as DALI's ``auto_aug.augmentations.auto_contrast``, with faster reductions.
    """
    low, high = (over_pixels(r, images) for r in (fn.reductions.min, fn.reductions.max))
    uneven = high > low
    scale = 255 / ((high - low) * uneven + WHITE * (high == low))
    stretched: DataNode = fn.cast_like((images - low * uneven) * scale, images)
    return stretched
