"""RandAugment, TrivialAugment and AutoAugment: tables and operations compared with torchvision.

torchvision has its magnitudes in `_AUGMENTATION_SPACE`, and calls its operations in
`_apply_image_or_video_transform`; there are no public names.
"""

import numpy as np
import pytest
from nvidia.dali import types
from torchvision.transforms import v2

from dalijax import augment
from dalijax.core.augment import policies
from drawing import numbers, run
from parity import differences, pixels, tensor

NAMES = list(policies.OPERATIONS)
WARPS = NAMES[1:6]
SIZE = (375, 500)  # height and width
INTERPOLATIONS = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}


def theirs_of(name):
    """Returns torchvision's name of an operation."""
    return "".join(part.capitalize() for part in name.split("_"))


def magnitudes(space, name, bins, size):
    """Returns torchvision's magnitudes of an operation; solarizing is from 0 to 255."""
    values, signed = space[theirs_of(name)]
    table = values(bins, *size)
    table = np.zeros(bins) if table is None else np.broadcast_to(table.numpy(), bins)
    return table.astype(float) * (255 if name == "solarize" else 1), signed


@pytest.mark.parametrize(
    ("transform", "bins"),
    [
        (v2.RandAugment(), 31),
        (v2.RandAugment(), 10),
        (v2.TrivialAugmentWide(), 31),
        (v2.AutoAugment(), 10),
    ],
)
def test_magnitudes_are_torchvisions(transform, bins):
    space = transform._AUGMENTATION_SPACE
    assert [theirs_of(name) for name in NAMES if theirs_of(name) in space] == list(space)
    wide = isinstance(transform, v2.TrivialAugmentWide)
    most = {"shear": 0.99, "translate": 32.0, "rotate": 135.0, "enhance": 0.99, "bits": 6}
    least = {"shear": 0.3, "translate": 150 / 331, "rotate": 30.0, "enhance": 0.9, "bits": 4}
    ours = dict(zip(NAMES, policies.magnitudes(bins, **(most if wide else least))))
    for name in NAMES:
        if theirs_of(name) not in space:
            continue
        expected, signed = magnitudes(space, name, bins, SIZE)
        length = {"translate_x": SIZE[1], "translate_y": SIZE[0]}.get(name, 1)
        np.testing.assert_allclose(ours[name] * (1 if wide else length), expected, rtol=1e-6)
        assert signed == policies._SIGNED[NAMES.index(name)]


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_tables_are_torchvisions(policy):
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    ours = [
        tuple((theirs_of(name), p, number) for name, p, number in pair)
        for pair in policies.POLICIES[policy]
    ]
    assert ours == [tuple((name, p, k or 0) for name, p, k in pair) for pair in theirs]


def both(photos, name, magnitude, interpolation="nearest"):
    """Applies an operation with both signs to photographs: ours, and torchvision's."""
    u = numbers(range(1000), "rand", 2).astype(np.float32)
    (choice,) = policies.rand_augment(u, 1, magnitude, 31)
    chosen, below = choice.operation == NAMES.index(name), u[:, 1] < 0.5
    rows = [np.flatnonzero(chosen & sign)[: len(photos)] for sign in (below, ~below)]
    records, images = np.concatenate(rows), photos * 2
    (ours,) = run(
        lambda x, draw: augment.rand_augment(
            x,
            num_ops=1,
            magnitude=magnitude,
            interp_type=INTERPOLATIONS[interpolation],
            draw=draw,
            name="rand",
        ),
        images,
        records,
    )
    transform = v2.RandAugment(interpolation=interpolation)
    theirs = []
    for image, negative in zip(images, below[records]):
        table, signed = magnitudes(transform._AUGMENTATION_SPACE, name, 31, image.shape[:2])
        size = table[magnitude] / (255 if name == "solarize" else 1)
        result = transform._apply_image_or_video_transform(
            tensor(image),
            theirs_of(name),
            -size if signed and negative else size,
            transform.interpolation,
            transform._fill,
        )
        theirs.append(pixels(result))
    return ours, theirs


# Gray levels by which each operation may differ: torchvision truncates, and we round
# once.
MOST = {
    **dict.fromkeys(("identity", "translate_x", "translate_y", "posterize", "solarize"), 0),
    **dict.fromkeys(("brightness", "contrast", "auto_contrast"), 1),
    **dict.fromkeys(("color", "sharpness", "equalize"), 2),
}


@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
@pytest.mark.parametrize("name", NAMES[:14])
def test_operations_are_torchvisions(photos, name, magnitude):
    ours, theirs = both(photos, name, magnitude)
    if name == "sharpness":  # torchvision does not change the pixels at the edge
        differences("sharpness, with the edge", ours, theirs)
        ours, theirs = ([one[1:-1, 1:-1] for one in images] for images in (ours, theirs))
    levels = differences(name, ours, theirs)
    if name in MOST:
        assert levels.max() <= MOST[name]
    else:  # a pixel that lies between two may be either
        assert np.mean(levels > 0) < 1e-3


@pytest.mark.parametrize("magnitude", [9, 30])
@pytest.mark.parametrize("name", WARPS)
def test_interpolated_operations_are_torchvisions(photos, name, magnitude):
    levels = differences(f"{name}, bilinear", *both(photos, name, magnitude, "bilinear"))
    assert np.median(levels) == 0 and levels.max() <= 2


def test_equalizing_black_corners_is_torchvisions(photos):
    rotated, _ = both(photos, "rotate", 30)
    assert differences("equalize behind a rotation", *both(rotated[:4], "equalize", 9)).max() <= 2


@pytest.mark.parametrize("side", [32, 64, 128])
def test_equalizing_small_images_differs_as_documented(photos, side):
    small = [one[100 : 100 + side, 150 : 150 + side] for one in photos]
    levels = differences(f"equalize {side} x {side}", *both(small, "equalize", 9))
    assert levels.max() <= 65_000 / side**2 + 2
