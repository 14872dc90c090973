"""Crops, flips and erased regions: windows against loops of torchvision's definition."""

import math

import numpy as np
import pytest
import scipy.stats
from nvidia.dali import fn, types
from PIL import Image

from dalijax import Draw, augment
from dalijax.core.augment import windows
from dalijax.core.augment.windows import COLUMNS
from drawing import drawn_image, numbers, run

SIZES = [(375, 500), (500, 375), (40, 60), (7, 400), (400, 7), (1, 1), (2, 3), (1000, 30)]


def many_sizes(count=600):
    rng = np.random.default_rng(0)
    drawn = rng.integers(1, 600, (count - len(SIZES), 2))
    return np.concatenate([np.array(SIZES), drawn]).astype(np.int32)


def whole(u, count):
    """Returns an integer below a count."""
    return int(u * count)


def plain_crop(u, height, width, scale=(0.08, 1), ratio=(3 / 4, 4 / 3)):
    """RandomResizedCrop.get_params with given random numbers instead of a generator."""
    areas, ratios, (i, j) = u[:10], u[10:20], u[20:]
    for one, other in zip(areas, ratios):
        target = height * width * (scale[0] + one * (scale[1] - scale[0]))
        log = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(log[0] + other * (log[1] - log[0]))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return whole(i, height - h + 1), whole(j, width - w + 1), h, w
    if width / height < min(ratio):
        w, h = width, max(round(width / min(ratio)), 1)
    elif width / height > max(ratio):
        h, w = height, max(round(height * max(ratio)), 1)
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


def plain_erase(u, height, width, p=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3)):
    """RandomErasing.get_params with given random numbers instead of a generator."""
    if u[22] >= p:
        return 0, 0
    for one, other in zip(u[:10], u[10:20]):
        area = height * width * (scale[0] + one * (scale[1] - scale[0]))
        log = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(log[0] + other * (log[1] - log[0]))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            return (h, w, whole(u[20], height - h + 1), whole(u[21], width - w + 1))
    return 0, 0


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((0.08, 1.0), (3 / 4, 4 / 3)),
        ((0.9, 1.0), (2.0, 3.0)),
        ((1e-4, 2e-4), (0.2, 0.3)),
        ((0, 0.01), (0.5, 2)),
    ],
)
def test_resized_crops_are_torchvisions(scale, ratio):
    sizes = many_sizes()
    u = numbers(np.arange(len(sizes)), "crop", COLUMNS)
    start, end = windows.resized_crops(u.astype(np.float32), sizes, scale, ratio)
    expected = [plain_crop(*row, scale, ratio) for row in zip(u, *sizes.T.tolist())]
    np.testing.assert_array_equal(np.hstack([start, end - start]), expected)
    assert (start >= 0).all() and (end <= sizes).all() and (end > start).all()


# Windows that are clipped to the image, instead of retried, would have 0.52 and 0.53.
@pytest.mark.parametrize(("size", "mean"), [((375, 500), 0.432), ((400, 400), 0.478)])
def test_resized_crops_have_torchvisions_distribution(size, mean):
    count = 20_000
    sizes = np.full((count, 2), size, np.int32)
    u = numbers(np.arange(count), "crop", COLUMNS).astype(np.float32)
    start, end = windows.resized_crops(u, sizes, (0.08, 1.0), (3 / 4, 4 / 3))
    rng = np.random.default_rng(0)  # the definition with another generator
    plain = np.array([plain_crop(rng.random(COLUMNS), *size) for _ in range(count)])
    check_windows(np.hstack([start, end - start]), plain)
    areas = (end - start).prod(axis=1) / math.prod(size)
    assert abs(areas.mean() - mean) < 0.01


def check_windows(ours, plain):
    """Checks areas, ratios and centers of two samples of windows (top, left, height, width)."""
    quantities = [
        (h * w, w / h, y + h / 2, x + w / 2) for y, x, h, w in (ours.T.astype(float), plain.T)
    ]
    for one, other in zip(*quantities):
        assert scipy.stats.ks_2samp(one, other).pvalue > 1e-3


def test_erased_windows_have_torchvisions_distribution():
    count, size = 20_000, (224, 224)
    sizes = np.full((count, 2), size, np.int32)
    u = numbers(np.arange(count), "erase", COLUMNS + 1).astype(np.float32)
    start, extent = windows.erased(u, sizes, 0.5, (0.02, 0.33), (0.3, 3.3))
    rng = np.random.default_rng(0)
    plain = [plain_erase(rng.random(COLUMNS + 1), *size) for _ in range(count)]
    plain = np.array([(y, x, h, w) for h, w, y, x in (one for one in plain if one[0])])
    some = extent[:, 0] > 0
    assert abs(some.mean() - len(plain) / count) < 0.02
    check_windows(np.hstack([start, extent])[some], plain)


def test_a_resized_crop_has_the_pixels_of_pillows_box():
    shapes = [(60, 90), (120, 50), (40, 40), (33, 200)]
    originals = [drawn_image(k, *shape) for k, shape in enumerate(shapes)]
    (images,) = run(
        lambda images, draw: augment.random_resized_crop(images, (24, 32), draw=draw, name="crop"),
        originals,
    )
    u = numbers(np.arange(4), "crop", COLUMNS)
    for image, pixels, row in zip(images, originals, u):
        y, x, h, w = plain_crop(row, *pixels.shape[:2])
        box = (x, y, x + w, y + h)
        expected = Image.fromarray(pixels).resize((32, 24), Image.Resampling.BILINEAR, box=box)
        assert image.shape == (24, 32, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - np.asarray(expected)).max() <= 2


@pytest.mark.parametrize("antialias", (False, True))
@pytest.mark.parametrize("interpolation", (types.INTERP_LINEAR, types.INTERP_CUBIC))
def test_some_resized_crops_are_flipped(interpolation, antialias):
    count = 40
    settings = {"interp_type": interpolation, "antialias": antialias, "name": "crop"}
    originals = [drawn_image(k, 40 + k, 90 - k) for k in range(count)]

    def cropped(flip):
        options = {"flip": flip, **settings}
        (images,) = run(
            lambda x, d: augment.random_resized_crop(x, (24, 32), draw=d, **options), originals
        )
        return images

    coins = numbers(range(count), "crop", COLUMNS + 1)[:, -1] < 0.3
    assert 0 < coins.sum() < count
    for image, unflipped, coin in zip(cropped(0.3), cropped(0.0), coins):
        np.testing.assert_array_equal(image, unflipped[:, ::-1] if coin else unflipped)


@pytest.mark.parametrize("share", (0.0, 1.0))
def test_no_window_or_each_is_flipped(share):
    u = numbers(np.arange(50), "crop", COLUMNS + 1).astype(np.float32)
    start, end = np.zeros((50, 2), np.float32), np.full((50, 2), (3, 4), np.float32)
    ours = windows.flipped(start, end, u, share)
    left, right = (4, 0) if share else (0, 4)
    for array, expected in zip(ours, ((0, left), (3, right))):
        np.testing.assert_array_equal(array, np.full((50, 2), expected, np.float32))
        assert array.dtype == np.float32


@pytest.mark.parametrize("padding", (0, 4, (1, 2), (0, 3, 5, 7)))
def test_random_crops_are_torchvisions(padding):
    originals = [drawn_image(k, 32 + k, 40) for k in range(6)]
    (images,) = run(
        lambda images, draw: augment.random_crop(
            images, (32, 34), draw=draw, padding=padding, fill_value=(9, 8, 7), name="crop"
        ),
        originals,
    )
    sides = {0: (0,) * 4, 4: (4,) * 4, (1, 2): (1, 2, 1, 2)}.get(padding, padding)
    left, top, right, bottom = sides
    for image, pixels, (i, j) in zip(images, originals, numbers(range(6), "crop", 2)):
        height, width = pixels.shape[0] + top + bottom, pixels.shape[1] + left + right
        padded = np.empty((height, width, 3), np.uint8)
        padded[:] = (9, 8, 7)
        padded[top : height - bottom, left : width - right] = pixels
        y, x = whole(i, height - 32 + 1), whole(j, width - 34 + 1)
        np.testing.assert_array_equal(image, padded[y : y + 32, x : x + 34])


def test_random_crops_are_uniform():
    sizes = np.full((6000, 2), (4, 5), np.int32)
    u = numbers(np.arange(6000), "crop", 2).astype(np.float32)
    start = windows.crops(u, sizes, (2, 4), (0, 0, 0, 0))
    counts = np.bincount(start[:, 0] * 2 + start[:, 1], minlength=6)
    assert len(counts) == 6 and (abs(counts - 1000) < 5 * math.sqrt(1000)).all()


def test_a_center_crop_is_torchvisions():
    shapes = [(60, 90), (91, 60), (77, 101), (64, 64)]
    originals = [drawn_image(k, *shape) for k, shape in enumerate(shapes)]
    plain, resized = run(
        lambda images, draw: (
            augment.center_crop(images, 33, draw=draw),
            augment.center_crop(images, (32, 35), draw=draw, resize=40),
        ),
        originals,
    )
    for one, other, pixels in zip(plain, resized, originals):
        height, width = pixels.shape[:2]
        y, x = round((height - 33) / 2), round((width - 33) / 2)
        np.testing.assert_array_equal(one, pixels[y : y + 33, x : x + 33])
        short = min(height, width)
        height, width = int(40 * height / short), int(40 * width / short)
        whole_ = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
        y, x = round((height - 32) / 2), round((width - 35) / 2)
        expected = np.asarray(whole_)[y : y + 32, x : x + 35]
        assert np.abs(other.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("vertical", (False, True))
def test_flips_follow_the_draws(vertical):
    originals = [drawn_image(k) for k in range(20)]
    (images,) = run(
        lambda images, draw: augment.flip(
            images, draw=draw, probability=0.3, vertical=vertical, name="flip"
        ),
        originals,
    )
    coins = numbers(range(20), "flip", 1)[:, 0] < 0.3
    assert 0 < coins.sum() < 20
    for image, pixels, coin in zip(images, originals, coins):
        flipped = pixels[::-1] if vertical else pixels[:, ::-1]
        np.testing.assert_array_equal(image, flipped if coin else pixels)


def test_erased_windows_are_torchvisions():
    sizes = many_sizes()
    u = numbers(np.arange(len(sizes)), "erase", COLUMNS + 1)
    start, extent = windows.erased(u.astype(np.float32), sizes, 0.5, (0.02, 0.33), (0.3, 3.3))
    expected = [plain_erase(*row) for row in zip(u, *sizes.T.tolist())]
    np.testing.assert_array_equal(extent, [row[:2] for row in expected])
    some = extent.prod(axis=1) > 0
    assert 0.4 < some.mean() < 0.6
    np.testing.assert_array_equal(start[some], [row[2:] for row, one in zip(expected, some) if one])
    areas = (extent.prod(axis=1) / sizes.prod(axis=1))[some & (sizes.min(axis=1) > 100)]
    assert areas.min() > 0.015 and areas.max() < 0.335


def test_erased_pixels():
    originals = [drawn_image(k) for k in range(12)]
    (images,) = run(
        lambda images, draw: augment.random_erasing(
            images, draw=draw, probability=0.7, value=(1, 2, 3), name="erase"
        ),
        originals,
    )
    erased = 0
    for image, pixels, row in zip(images, originals, numbers(range(12), "erase", COLUMNS + 1)):
        expected = pixels.copy()
        h, w, *place = plain_erase(row, 40, 60, p=0.7)
        if h:
            y, x = place
            expected[y : y + h, x : x + w] = (1, 2, 3)
            erased += 1
        np.testing.assert_array_equal(image, expected)
    assert 0 < erased < 12


def test_sizes_are_known_after_decoders_and_augmentation_or_requested():
    originals = [drawn_image(k, 30 + k) for k in range(3)]
    seen = []

    def look(images, draw):
        note = lambda u, sizes: (seen.append(sizes), u)[1]  # noqa: E731
        return draw.compute(note, (1,), images=images)

    def graph(images, draw):
        flipped = augment.color_jitter(augment.flip(images, draw=draw), draw=draw)
        crop = augment.random_resized_crop(flipped, (20, 30), draw=draw)
        small = augment.random_crop(augment.random_erasing(crop, draw=draw), (8, 9), draw=draw)
        other = draw.sized(fn.resize(images, size=[5, 6]), (5, 6))
        return tuple(look(x, draw) for x in (flipped, crop, small, augment.flip(other, draw=draw)))

    run(graph, originals)
    for sizes in ([(30, 60), (31, 60), (32, 60)], [(20, 30)] * 3, [(8, 9)] * 3, [(5, 6)] * 3):
        assert any(np.array_equal(one, sizes) for one in seen)
    for call in (augment.random_erasing, lambda x, draw: augment.random_crop(x, 8, draw=draw)):
        for between in (lambda x, draw: x, lambda x, draw: augment.flip(x, draw=draw)):
            with pytest.raises(TypeError, match=r"after .*(Resize|Flip).*draw\.sized\(images, "):
                run(lambda x, d: call(between(fn.resize(x, size=9), draw=d), draw=d), originals)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, d: augment.random_resized_crop(x, 0, draw=d), "above 0, not 0"),
        (lambda x, d: augment.random_resized_crop(x, (1, 2, 3), draw=d), r"not \(1, 2, 3\)"),
        (lambda x, d: augment.random_resized_crop(x, 8, draw=d, scale=(-0.1, 1)), "scale must"),
        (lambda x, d: augment.random_resized_crop(x, 8, draw=d, scale=(0.5, 1.5)), "scale must"),
        (lambda x, d: augment.random_resized_crop(x, 8, draw=d, scale=(0, 0)), "scale must"),
        (lambda x, d: augment.random_resized_crop(x, 8, draw=d, ratio=(2, 1)), "ratio must"),
        (lambda x, d: augment.random_resized_crop(x, 8, draw=d, flip=1.5), "flip must .* not 1.5"),
        (lambda x, d: augment.random_crop(x, 8, draw=d, padding=-1), "padding must .* not -1"),
        (lambda x, d: augment.random_crop(x, 8, draw=d, padding=(1, 2, 3)), "1, 2 or 4 numbers"),
        (lambda x, d: augment.center_crop(x, 8, draw=d, resize=0), "resize must"),
        (lambda x, d: augment.flip(x, draw=d, probability=2), "from 0 to 1, not 2"),
        (lambda x, d: augment.random_erasing(x, draw=d, probability=-1), "from 0 to 1, not -1"),
        (lambda x, d: augment.random_erasing(x, draw=d, ratio=(1,)), "ratio must"),
    ],
)
def test_invalid_settings_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        run(call, [drawn_image(0)])


@pytest.mark.parametrize(
    "call",
    (
        lambda x, d: augment.random_crop(x, 64, draw=d, padding=2),
        lambda x, d: augment.center_crop(x, 64, draw=d),
        lambda x, d: augment.center_crop(x, (64, 99), draw=d, resize=64),
    ),
)
def test_an_image_that_is_too_small_is_a_bad_record(call):
    given = [
        drawn_image(0, 70, 120),
        drawn_image(1),
        drawn_image(2, 64, 100),
        drawn_image(3, 64, 2),
    ]
    with pytest.raises(ValueError, match="has 40 x 60 pixels, too few for a crop of 64 x"):
        run(call, given)
    refused = {}
    (images,) = run(call, given, refuse=lambda row, error: refused.setdefault(row, str(error)))
    assert sorted(refused) == [1, 3] and "64 x 2 pixels" in refused[3]
    (others,) = run(call, given[::2], [0, 2])
    for image, other in zip(images[::2], others):
        np.testing.assert_array_equal(image, other)


NUMBERS = {  # positional arguments
    **{name: (8,) for name in augment.__all__ if name.endswith(("_crop", "_window"))},
    "patch_window": (),
    "iou_window": (None, 8),
    "solarize": (128,),
    "gaussian_blur": (9,),
}
CLASSES = {"PatchWindow", "Window"}
NEED_NO_DRAW = {*CLASSES, "normalize", "center_crop"} | {
    f"{name}_window" for name in ("center", "fit", "resize")
}


@pytest.mark.parametrize("name", sorted({*augment.__all__} - NEED_NO_DRAW))
def test_a_missing_draw_is_explained(name):
    with pytest.raises(TypeError) as raised:
        getattr(augment, name)(None)
    number = {
        "gaussian_blur": "kernel_size",
        "solarize": "threshold",
        "iou_window": "boxes and size",
    }.get(name, "size")
    missing = f"{number} and draw\n  {number.split()[0]}: " if NUMBERS.get(name) else "draw"
    text = str(raised.value)
    assert text.startswith(f"{name}() needs {missing}")
    assert "\n  draw: Add a parameter named draw to the graph function" in text


def test_arrays_are_not_images_of_a_graph():
    draw = Draw(lambda run: None, {})
    for name in sorted({*augment.__all__} - CLASSES):
        arguments = (0, 1) if name == "normalize" else NUMBERS.get(name, ())
        keywords = {} if name == "normalize" else {"draw": draw}
        with pytest.raises(TypeError, match="images must be an output .* not ndarray.*batch_map"):
            getattr(augment, name)(np.zeros((9, 9, 3), np.uint8), *arguments, **keywords)


@pytest.mark.parametrize("draw", (None, 3), ids=str)
def test_invalid_draws_are_named(draw):
    exempt = NEED_NO_DRAW if draw is None else {*CLASSES, "normalize"}
    for name in {*augment.__all__} - exempt:
        arguments = NUMBERS.get(name, ())
        with pytest.raises(TypeError, match=rf"draw must be .* not {draw}. Add"):
            getattr(augment, name)(None, *arguments, draw=draw)
