"""Color jitter, with the same factors as torchvision's."""

import itertools

import numpy as np
import pytest
from torchvision.transforms.v2 import functional as F

from dalijax import augment
from drawing import numbers, run
from parity import differences, pixels, tensor

ADJUST = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": F.adjust_hue,
}
FACTORS = [0.6, 0.8, 1.2, 1.4]


def both(photos, name, factor):
    """Returns an adjustment by one factor: ours, and torchvision's."""
    (ours,) = run(
        lambda x, draw: augment.color_jitter(x, draw=draw, **{name: (factor, factor)}), photos
    )
    return ours, [pixels(ADJUST[name](tensor(one), factor)) for one in photos]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", ["brightness", "saturation"])
def test_brightness_and_saturation_are_torchvisions(photos, name, factor):
    ours, theirs = both(photos, name, factor)
    assert differences(f"jitter, {name}", ours, theirs).max() <= 1


@pytest.mark.parametrize("factor", FACTORS)
def test_contrast_is_torchvisions_but_for_its_center(photos, factor):
    ours, theirs = both(photos, "contrast", factor)
    differences("jitter, contrast", ours, theirs)
    centered = [  # around 128; torchvision uses the mean gray
        np.clip(128 + factor * (one - 128.0), 0, 255) for one in photos
    ]
    assert differences("jitter, contrast about 128", ours, centered).max() <= 1
    for one, other, image in zip(ours, theirs, photos):
        mean = np.floor(pixels(F.rgb_to_grayscale(tensor(image)))).mean()
        shift = (1 - factor) * (128 - mean)
        unclipped = (one > 0) & (one < 255) & (other > 0) & (other < 255)
        assert np.abs(one.astype(float) - other - shift)[unclipped].max() <= 2


@pytest.mark.parametrize("factor", [-0.1, 0.05, 0.1])
def test_hue_turns_the_same_way_as_torchvisions(photos, factor):
    ours, theirs = both(photos, "hue", factor)
    _, other_way = both(photos, "hue", -factor)
    levels = differences("jitter, hue", ours, theirs)
    assert levels.mean() < 0.7 * differences("jitter, hue the other way", ours, other_way).mean()


def test_the_recipes_jitter_in_any_order(photos):
    images = photos * 4
    names = ("brightness", "contrast", "saturation")
    (ours,) = run(
        lambda x, draw: augment.color_jitter(x, draw=draw, name="j", **dict.fromkeys(names, 0.3)),
        images,
    )
    factors = 0.7 + 0.6 * numbers(range(len(images)), "j", 4)[:, :3]
    theirs = []
    for order in itertools.permutations(range(3)):
        for one, row in zip(images, factors):
            image = tensor(one)
            for number in order:
                image = ADJUST[names[number]](image, row[number])
            theirs.append(pixels(image))
    levels = differences("jitter of 0.3 of all three", ours * 6, theirs)
    assert np.median(levels) <= 4 and np.quantile(levels, 0.99) < 30
