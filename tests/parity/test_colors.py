"""Color jitter, grayscale, solarizing and blur, with the same numbers as torchvision's."""

import itertools

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from dalijax import augment
from drawing import numbers, run
from parity import DRAWS, FAR, differences, distance, pixels, tensor

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
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_brightness_contrast_and_saturation_are_torchvisions(photos, name, factor):
    ours, theirs = both(photos, name, factor)
    assert differences(f"jitter, {name}", ours, theirs).max() <= 1


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
    assert np.median(levels) <= 2 and np.quantile(levels, 0.99) < 10


def test_grayscale_is_torchvisions(photos):
    (ours,) = run(lambda x, draw: augment.grayscale(x, draw=draw, probability=1.0), photos)
    theirs = [pixels(F.rgb_to_grayscale(tensor(one), num_output_channels=3)) for one in photos]
    assert differences("grayscale", ours, theirs).max() <= 1


@pytest.mark.parametrize("threshold", [0, 100, 128, 255])
def test_solarizing_is_torchvisions(photos, threshold):
    (ours,) = run(
        lambda x, draw: augment.solarize(x, threshold, draw=draw, probability=1.0), photos
    )
    theirs = [pixels(F.solarize(tensor(one), threshold)) for one in photos]
    assert differences("solarize alone", ours, theirs).max() == 0


@pytest.mark.parametrize("kernel_size", [3, 9, 23])
@pytest.mark.parametrize("sigma", [0.1, 0.8, 2.0])
def test_blur_is_torchvisions(photos, kernel_size, sigma):
    (ours,) = run(
        lambda x, draw: augment.gaussian_blur(x, kernel_size, draw=draw, sigma=sigma), photos
    )
    theirs = [pixels(F.gaussian_blur(tensor(one), kernel_size, sigma)) for one in photos]
    assert differences("blur", ours, theirs).max() <= 1


def test_defaults_are_torchvisions(photos):
    torch.manual_seed(0)
    image = torch.zeros((3, 2, 2), dtype=torch.uint8)
    image[0] = 200

    def share(transform):
        """Returns how often torchvision changes an image."""
        return np.mean([not torch.equal(transform(image), image) for _ in range(DRAWS // 4)])

    images, seen = [photos[0][:8, :8]], {}

    def graph(x, draw):
        x = augment.grayscale(x, draw=draw, name="gray")
        x = augment.solarize(x, 128, draw=draw, name="solarize")
        x = augment.gaussian_blur(x, 9, draw=draw, name="blur")
        seen.update((name, settings) for _, name, settings in draw._described())
        return x

    run(graph, images)
    for name, transform in (("gray", v2.RandomGrayscale()), ("solarize", v2.RandomSolarize(128))):
        assert abs(float(seen[f"draw.{name}"]["probability"]) - share(transform)) < 0.03
    assert seen["draw.blur"]["probability"] == "1.0"
    blur = v2.GaussianBlur(9)
    theirs = np.array([blur.make_params([])["sigma"] for _ in range(DRAWS)])
    assert (theirs[:, 0] == theirs[:, 1]).all()
    low, high = blur.sigma
    ours = low + (high - low) * numbers(range(DRAWS), "blur", 2)[:, 0]
    assert seen["draw.blur"]["sigma"] == f"[{low},{high}]"
    assert distance("blur, sigma", ours, theirs[:, 0]) < FAR
