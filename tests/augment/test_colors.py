"""Color jitter compared with NumPy."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from dalijax import augment
from drawing import drawn_image, numbers, run

RGB_TO_YIQ = np.array(
    [[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]]
)


def plain_jitter(pixels, brightness, contrast, saturation, hue):
    """Hue and saturation in YIQ, contrast around 128, brightness; rounded once."""
    angle = 2 * np.pi * hue
    turn = np.eye(3)
    turn[1:, 1:] = saturation * np.array(
        [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    )
    colors = pixels @ (np.linalg.inv(RGB_TO_YIQ) @ turn @ RGB_TO_YIQ).T
    return np.clip(brightness * (128 + contrast * (colors - 128)), 0, 255)


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({"brightness": 0.4}, [(0.6, 1.4), (1, 1), (1, 1), (0, 0)]),
        ({"contrast": (0.5, 0.7)}, [(1, 1), (0.5, 0.7), (1, 1), (0, 0)]),
        ({"saturation": 2}, [(1, 1), (1, 1), (0, 3), (0, 0)]),
        ({"hue": 0.5}, [(1, 1), (1, 1), (1, 1), (-0.5, 0.5)]),
        ({"hue": (0.1, 0.2)}, [(1, 1), (1, 1), (1, 1), (0.1, 0.2)]),
        (
            {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
            [(0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1)],
        ),
    ],
)
def test_jitter_against_numpy(options, ranges):
    originals = [drawn_image(k) for k in range(12)]
    (images,) = run(
        lambda images, draw: augment.color_jitter(images, draw=draw, name="jitter", **options),
        originals,
    )
    for image, pixels, row in zip(images, originals, numbers(range(12), "jitter", 4)):
        factors = [low + u * (high - low) for u, (low, high) in zip(row, ranges)]
        expected = plain_jitter(pixels.astype(float), *factors)
        assert image.dtype == np.uint8
        assert np.abs(image - expected).max() < 3


@pytest.mark.parametrize("factor", (0, 0.6, 1.4))
@pytest.mark.parametrize(
    ("name", "enhancer"),
    (("brightness", ImageEnhance.Brightness), ("saturation", ImageEnhance.Color)),
)
def test_brightness_and_saturation_are_pillows(name, enhancer, factor):
    originals = [drawn_image(k) for k in range(4)]
    (images,) = run(
        lambda x, draw: augment.color_jitter(x, draw=draw, **{name: (factor, factor)}), originals
    )
    for image, pixels in zip(images, originals):
        expected = np.asarray(enhancer(Image.fromarray(pixels)).enhance(factor))
        assert np.abs(image.astype(int) - expected).max() <= 1


def test_no_jitter_changes_nothing():
    originals = [drawn_image(k) for k in range(3)]
    (images,) = run(lambda images, draw: augment.color_jitter(images, draw=draw), originals)
    for image, pixels in zip(images, originals):
        assert np.abs(image.astype(int) - pixels).max() <= 1


@pytest.mark.parametrize(
    "options",
    (
        *({"brightness": -0.1}, {"contrast": (2, 1)}, {"saturation": (-1, 1)}, {"hue": 0.6}),
        *({"hue": (-0.6, 0)}, {"brightness": float("nan")}, {"brightness": float("inf")}),
    ),
)
def test_ranges_that_can_not_be_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a number from 0"):
        run(lambda x, draw: augment.color_jitter(x, draw=draw, **options), [drawn_image(0)])
