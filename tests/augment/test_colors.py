"""Color jitter, grayscale, solarizing and blur, compared with NumPy and Pillow."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image, ImageEnhance, ImageOps
from plain_colors import plain_blur, plain_jitter

from dalijax import augment, data_iterator, sources
from dalijax.core.augment import layouts
from dalijax.core.random.draw import operator_kind
from drawing import drawn_image, numbers, run


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
        assert np.abs(image - expected).max() < 0.51


@pytest.mark.parametrize("is_known", (True, False))
def test_float_images_are_jittered_as_bytes_are_but_not_rounded(is_known):
    options = {"brightness": 0.4, "contrast": 0.8, "saturation": 0.4, "hue": 0.1}

    def graph(images, draw):
        floats = fn.resize(images, resize_y=20, dtype=types.FLOAT) if is_known else images * 1.0
        return augment.color_jitter(floats, draw=draw, name="jitter", **options), floats

    images, originals = run(graph, [drawn_image(k) for k in range(6)])
    for image, pixels, row in zip(images, originals, numbers(range(6), "jitter", 4)):
        ranges = [(0.6, 1.4), (0.2, 1.8), (0.6, 1.4), (-0.1, 0.1)]
        factors = [low + u * (high - low) for u, (low, high) in zip(row, ranges)]
        expected = plain_jitter(pixels, *factors)
        assert image.dtype == np.float32
        inside = (expected > 0) & (expected < 255)  # the oracle clips
        np.testing.assert_allclose(image[inside], expected[inside], atol=1e-2)


@pytest.mark.parametrize("dtype", (np.int8, np.uint16, np.int64, np.float16, np.float64))
def test_arrays_of_each_dtype_are_jittered(dtype):
    arrays = [(drawn_image(k) // 2).astype(dtype) for k in range(4)]
    factors = {"brightness": 0.7, "contrast": 0.8, "saturation": 1.1, "hue": 0.1}

    def jitter(x, draw):
        options = {name: (factor, factor) for name, factor in factors.items()}
        known = augment.color_jitter(x, draw=draw, **options)
        return known, augment.color_jitter(fn.reshape(x, src_dims=[0, 1, 2]), draw=draw, **options)

    make = data_iterator(jitter, ["known", "unknown"], source=sources.Arrays({"x": arrays}))
    with jax.enable_x64(True):
        batch = next(make(batch_size=4, shuffle=False))
    for number, array in enumerate(arrays):
        expected = plain_jitter(array.astype(float), *factors.values())
        inside = expected > 0  # the oracle clips
        for name in ("known", "unknown"):
            assert batch[name].dtype == dtype
            found = batch[name][number].astype(float)
            np.testing.assert_allclose(found[inside], expected[inside], atol=0.51)


def test_contrast_is_about_the_mean_of_each_frame():
    videos = np.stack([[drawn_image(2 * k), drawn_image(2 * k + 1) // 4] for k in range(4)])
    source = sources.Arrays({"x": videos}, kinds={"x": sources.Field(np.uint8, 4, layout="FHWC")})

    def jitter(x, draw):
        return augment.color_jitter(x, draw=draw, brightness=(0.8, 0.8), contrast=(0.5, 0.5))

    batch = next(data_iterator(jitter, ["y"], source=source)(batch_size=4, shuffle=False))
    for frames, found in zip(videos, np.asarray(batch["y"])):
        for frame, pixels in zip(frames, found):
            expected = plain_jitter(frame.astype(float), 0.8, 0.5, 1.0, 0.0)
            assert np.abs(pixels - expected).max() < 0.51


@pytest.mark.parametrize("factor", (0, 0.6, 1.4))
@pytest.mark.parametrize(
    ("name", "enhancer"),
    (
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ),
)
def test_brightness_contrast_and_saturation_are_pillows(name, enhancer, factor):
    originals = [drawn_image(k) for k in range(4)]
    (images,) = run(
        lambda x, draw: augment.color_jitter(x, draw=draw, **{name: (factor, factor)}), originals
    )
    for image, pixels in zip(images, originals):
        expected = np.asarray(enhancer(Image.fromarray(pixels)).enhance(factor))
        assert np.abs(image.astype(int) - expected).max() <= 1


def test_jitter_without_contrast_is_one_operator():
    """Computing the mean gray would cost time."""

    def graph(images, draw):
        changed = augment.color_jitter(images, draw=draw, brightness=0.4, hue=0.1, probability=0.5)
        assert operator_kind(changed.source) == "CoordTransform"
        assert changed.source.inputs[0] is images
        return changed

    run(graph, ORIGINALS[:1])


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


ORIGINALS = [drawn_image(k, 40 + k % 3, 60 - k % 5) for k in range(40)]
CHANGES = {
    "color_jitter": lambda x, draw, **more: augment.color_jitter(
        x, draw=draw, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, **more
    ),
    "grayscale": lambda x, draw, **more: augment.grayscale(x, draw=draw, **more),
    "solarize": lambda x, draw, **more: augment.solarize(x, 90, draw=draw, **more),
    "gaussian_blur": lambda x, draw, **more: augment.gaussian_blur(
        x, 11, draw=draw, sigma=(0.5, 2), **more
    ),
}
COIN = {"color_jitter": 4, "grayscale": 0, "solarize": 0, "gaussian_blur": 1}  # column


@pytest.mark.parametrize("probability", (0.0, 0.3, 0.8, 1))
@pytest.mark.parametrize("function", CHANGES)
def test_images_are_changed_with_a_probability(function, probability):
    change = CHANGES[function]
    (images,) = run(lambda x, d: change(x, d, probability=probability, name="it"), ORIGINALS)
    (changed,) = run(lambda x, d: change(x, d, probability=1.0, name="it"), ORIGINALS)
    coins = numbers(range(len(ORIGINALS)), "it", COIN[function] + 1)[:, -1]
    for image, other, pixels, coin in zip(images, changed, ORIGINALS, coins):
        np.testing.assert_array_equal(image, other if coin < probability else pixels, strict=True)
        assert not np.array_equal(other, pixels)


def test_every_color_is_unchanged_or_gray():
    levels = np.arange(0, 256, 3, dtype=np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(len(levels), -1, 3)
    *unchanged, gray = run(
        lambda x, d: (
            augment.color_jitter(x, draw=d, brightness=0.8, hue=0.5, probability=0.0),
            augment.color_jitter(x, draw=d, contrast=0.8, hue=0.5, probability=0.0),
            augment.grayscale(x, draw=d, probability=1.0),
        ),
        [colors],
    )
    for (image,) in unchanged:
        np.testing.assert_array_equal(image, colors)
    assert (gray[0] == gray[0][..., :1]).all()
    expected = np.asarray(Image.fromarray(colors).convert("L"))
    assert np.abs(gray[0][..., 0].astype(int) - expected).max() <= 1


@pytest.mark.parametrize("threshold", (0, 1, 128, 255))
def test_solarizing_is_pillows(threshold):
    (images,) = run(lambda x, d: augment.solarize(x, threshold, draw=d, probability=1.0), ORIGINALS)
    for image, pixels in zip(images, ORIGINALS):
        expected = ImageOps.solarize(Image.fromarray(pixels), threshold)
        np.testing.assert_array_equal(image, np.asarray(expected))


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    radius=st.integers(0, 12),
    sigma=st.tuples(st.floats(0.01, 12), st.floats(0.01, 12)).map(sorted),
    probability=st.sampled_from((0.5, 1.0)),
)
def test_blur_against_numpy(size, radius, sigma, probability):
    originals = [drawn_image(k, *size) for k in range(4)]
    (images,) = run(
        lambda x, d: augment.gaussian_blur(
            x, 2 * radius + 1, draw=d, sigma=sigma, probability=probability, name="blur"
        ),
        originals,
    )
    for image, pixels, row in zip(images, originals, numbers(range(4), "blur", 2)):
        expected = pixels
        if row[1] < probability:
            drawn = sigma[0] + row[0] * (sigma[1] - sigma[0])
            expected = plain_blur(pixels, 2 * radius + 1, drawn)
        assert image.dtype == np.uint8 and image.shape == pixels.shape
        assert np.abs(image - expected).max() < 0.51


def test_a_fixed_sigma():
    (images,) = run(lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=1.5), ORIGINALS)
    for image, pixels in zip(images, ORIGINALS):
        assert np.abs(image - plain_blur(pixels, 9, 1.5)).max() < 0.51


BYTES = {
    "grayscale": lambda x, draw: augment.grayscale(x, draw=draw, probability=0.0),
    "solarize": lambda x, draw: augment.solarize(x, 128, draw=draw, probability=0.0),
    "rand_augment": lambda x, draw: augment.rand_augment(x, draw=draw),
}


@pytest.mark.parametrize("function", BYTES)
@pytest.mark.parametrize(
    "convert",
    (
        lambda x: fn.resize(x, size=(9, 9), dtype=types.FLOAT),
        lambda x: fn.gaussian_blur(x, sigma=1.0, dtype=types.FLOAT),
        lambda x: fn.color_twist(x, dtype=types.INT16),
        lambda x: fn.color_space_conversion(x, image_type=types.RGB, output_type=types.GRAY),
    ),
)
def test_images_of_another_form_are_refused(convert, function):
    def graph(images, draw):
        return BYTES[function](draw.sized(convert(images), (9, 9)), draw)

    with pytest.raises(RuntimeError, match="same size in bytes"):
        run(graph, [drawn_image(0)])


def test_views_are_known_as_rgb_images_of_bytes():
    """Otherwise, each function would add operators that check the shapes."""

    def graph(images, draw):
        for function in CHANGES.values():
            changed = function(images, draw, probability=0.5)
            assert layouts.is_rgb(changed, draw)
        return changed

    run(graph, ORIGINALS[:1])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    (
        (lambda x, d: augment.color_jitter(x, draw=d, probability=1.1), ValueError, "from 0 to 1"),
        (lambda x, d: augment.grayscale(x, draw=d, probability=-0.1), ValueError, "from 0 to 1"),
        (lambda x, d: augment.grayscale(x, draw=d, probability=None), TypeError, "not None"),
        (lambda x, d: augment.solarize(x, 0.5, draw=d), TypeError, "from 0 to 255, not 0.5"),
        (lambda x, d: augment.solarize(x, 256, draw=d), ValueError, "from 0 to 255, not 256"),
        (lambda x, d: augment.solarize(x, -1, draw=d), ValueError, "from 0 to 255, not -1"),
        (lambda x, d: augment.solarize(x, 128, draw=d, probability=2), ValueError, "from 0 to 1"),
        (lambda x, d: augment.gaussian_blur(x, 8, draw=d), ValueError, "an odd number .* not 8"),
        (lambda x, d: augment.gaussian_blur(x, -3, draw=d), ValueError, "an odd number .* not -3"),
        (lambda x, d: augment.gaussian_blur(x, 2.5, draw=d), TypeError, "an odd number .* not 2.5"),
        (lambda x, d: augment.gaussian_blur(x, (9, 9), draw=d), TypeError, "not .9, 9"),
        (lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=0), ValueError, "above 0, not 0"),
        (
            lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=(0, 2)),
            ValueError,
            "above 0, not .0, 2",
        ),
        (lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=(2, 1)), ValueError, "in order"),
        (lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=(1, 2, 3)), TypeError, "pair"),
        (
            lambda x, d: augment.gaussian_blur(x, 9, draw=d, sigma=float("nan")),
            ValueError,
            "in order",
        ),
        (
            lambda x, d: augment.gaussian_blur(x, 9, draw=d, probability=2),
            ValueError,
            "from 0 to 1",
        ),
    ),
)
def test_arguments_that_can_not_be_are_refused(call, kind, text):
    with pytest.raises(kind, match=text):
        run(call, [drawn_image(0)])
