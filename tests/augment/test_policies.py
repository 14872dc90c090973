"""RandAugment, TrivialAugment and AutoAugment: choices, magnitudes and tables, and pixels."""

import math

import numpy as np
import pytest
from nvidia.dali import types
from nvidia.dali.auto_aug import auto_augment as dali_policies
from PIL import Image, ImageEnhance, ImageOps

from dalijax import augment
from dalijax.core.augment import policies
from drawing import drawn_image, numbers, run

# torchvision's order, written out again.
OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness"),
    *("color", "contrast", "sharpness", "posterize", "solarize", "auto_contrast", "equalize"),
)
SIGNED = {*OPERATIONS[1:10]}


def plain_magnitude(name, k, bins, wide=False):
    """Unsigned; for translations, a fraction of the size, or pixels in the wide space."""
    most = {
        "shear": 0.99 if wide else 0.3,
        "translate": 32 if wide else 150 / 331,
        "rotate": 135 if wide else 30,
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.99 if wide else 0.9),
    }
    share = k / (bins - 1)
    if name == "posterize":
        return 8 - round(k / ((bins - 1) / (6 if wide else 4)))
    if name == "solarize":
        return round(255 * (1 - share), 6)
    return most.get(name.split("_")[0], 0) * share


def plain_choice(u, k, bins, wide=False):
    """Returns name and magnitude for a random number for the operation and another for its sign."""
    name = OPERATIONS[int(u[0] * 14)]
    size = plain_magnitude(name, k, bins, wide)
    return name, -size if name in SIGNED and u[1] < 0.5 else size


def warped(pixels, a, b, c, d, e, f):
    """Returns the nearest pixels at (a x + b y + c, d x + e y + f), black outside, for all ties."""
    height, width = pixels.shape[:2]
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    candidates = []
    for dx, dy in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
        i = np.floor(d * x + e * y + f + 1e-3 * dy).astype(int)
        j = np.floor(a * x + b * y + c + 1e-3 * dx).astype(int)
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        values = pixels[np.clip(i, 0, height - 1), np.clip(j, 0, width - 1)]
        candidates.append(values * inside[..., None])
    return candidates


def equalized(channel):
    """Pillow's histogram equalization, except that it rounds its step down, one in many."""
    histogram = np.bincount(channel.ravel(), minlength=256)
    lower = histogram.cumsum() - histogram
    return np.rint(lower / (channel.size - histogram[channel.max()]) * 255)[channel]


def plain_operation(pixels, name, m, wide=False):
    """Returns a list of possible results, and the tolerance."""
    image = Image.fromarray(pixels)
    height, width = pixels.shape[:2]
    if name == "shear_x":
        return warped(pixels, 1, m, 0, 0, 1, 0), 0
    if name == "shear_y":
        return warped(pixels, 1, 0, 0, m, 1, 0), 0
    if name == "translate_x":
        return warped(pixels, 1, 0, -int(m if wide else m * width), 0, 1, 0), 0
    if name == "translate_y":
        return warped(pixels, 1, 0, 0, 0, 1, -int(m if wide else m * height)), 0
    if name == "rotate":
        cos, sin, x, y = *(f(math.radians(m)) for f in (math.cos, math.sin)), width / 2, height / 2
        offset = x - cos * x + sin * y, y - sin * x - cos * y
        return warped(pixels, cos, -sin, offset[0], sin, cos, offset[1]), 0
    if name == "solarize":
        return [np.where(pixels < m, pixels, 255 - pixels)], 0
    if name == "equalize":
        return [np.stack([equalized(pixels[..., k]) for k in range(3)], -1)], 1
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "color": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name in enhancers:
        return [np.asarray(enhancers[name](image).enhance(1 + m))], 2
    others = {
        "identity": lambda: image,
        "posterize": lambda: ImageOps.posterize(image, m),
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "invert": lambda: ImageOps.invert(image),
    }
    return [np.asarray(others[name]())], 1 if name == "auto_contrast" else 0


def records_of(name):
    """Returns the records, of 400, whose first operation in RandAugment is a given operation."""
    return [
        k for k, u in enumerate(numbers(range(400), "rand", 2)) if plain_choice(u, 9, 31)[0] == name
    ]


def check(image, pixels, name, magnitude, wide=False):
    expected, most = plain_operation(pixels, name, magnitude, wide)
    inside = np.s_[1:-1, 1:-1] if name == "sharpness" else np.s_[:]  # Pillow omits the edge
    differences = [np.abs(image.astype(int) - one)[inside].max(axis=-1) for one in expected]
    assert np.min(differences, axis=0).max() <= most, (name, magnitude)


def drawn_images(count):
    return [drawn_image(k, 40 + k % 3, 60) for k in range(count)]


@pytest.mark.parametrize(("magnitude", "bins"), ((9, 31), (30, 31), (0, 31), (4, 10)))
def test_rand_augment_does_torchvisions_operations(magnitude, bins):
    given = drawn_images(80)
    (images,) = run(
        lambda images, draw: augment.rand_augment(
            images,
            draw=draw,
            num_ops=1,
            magnitude=magnitude,
            num_magnitude_bins=bins,
            name="rand",
        ),
        given,
    )
    seen = set()
    for image, pixels, u in zip(images, given, numbers(range(80), "rand", 2)):
        name, size = plain_choice(u, magnitude, bins)
        check(image, pixels, name, size)
        seen.add(name)
        assert image.dtype == np.uint8
    assert seen == set(OPERATIONS)


def check_alone(given, name, expected):
    """Compares images of an operation of RandAugment with a function of Pillow's images."""
    (images,) = run(
        lambda images, draw: augment.rand_augment(images, draw=draw, num_ops=1, name="rand"),
        given,
        records_of(name)[: len(given)],
    )
    for image, pixels in zip(images, given):
        difference = image.astype(int) - np.asarray(expected(Image.fromarray(pixels)))
        assert np.abs(difference).max() <= 1


def test_equalizing_matches_pillow_even_for_mostly_black_images():
    given = [drawn_image(k, 300, 400) for k in range(6)]
    given += [np.asarray(Image.fromarray(one).rotate(20)) for one in given]
    check_alone(given, "equalize", ImageOps.equalize)


def test_contrast_is_about_the_mean_of_gray():
    records, rng = records_of("contrast")[:24], np.random.default_rng(0)
    given = [rng.integers(*rng.integers((0, 200), (60, 256)), (40, 60, 3)) for _ in records]
    given = [(one * rng.uniform(0.2, 1, 3)).astype(np.uint8) for one in given]
    (images,) = run(
        lambda images, draw: augment.rand_augment(
            images, draw=draw, num_ops=1, magnitude=30, name="rand"
        ),
        given,
        records,
    )
    for image, pixels, u in zip(images, given, numbers(records, "rand", 2)):
        factor = 1 + plain_choice(u, 30, 31)[1]
        mean = (pixels @ np.array([0.299, 0.587, 0.114])).mean()
        exact = np.clip(factor * pixels + (1 - factor) * mean, 0, 255)
        assert np.abs(image - exact).max() < 0.51


def test_auto_contrast_leaves_channels_of_one_value_as_they_are():
    rng, given = np.random.default_rng(0), []
    for k in range(12):
        pixels = rng.integers(40, 200, (40, 60, 3), np.uint8)
        pixels[..., k % 3] = (0, 100, 255)[k // 4]
        given.append(pixels)
    check_alone(given, "auto_contrast", ImageOps.autocontrast)


def test_operations_follow_one_another():
    given = drawn_images(120)
    (images,) = run(
        lambda images, draw: augment.rand_augment(images, draw=draw, num_ops=3, name="rand"), given
    )
    exact, seen = {"identity", "translate_x", "translate_y", "posterize", "solarize"}, 0
    for image, pixels, u in zip(images, given, numbers(range(120), "rand", 6)):
        stages = [plain_choice(u[k : k + 2], 9, 31) for k in (0, 2, 4)]
        if {name for name, _ in stages} <= exact:
            seen += len({name for name, _ in stages}) > 1
            expected = pixels
            for name, size in stages:
                expected = plain_operation(expected, name, size)[0][0].astype(np.uint8)
            np.testing.assert_array_equal(image, expected)
    assert seen > 2


def test_trivial_augment_does_torchvisions_operations():
    given = drawn_images(120)
    (images,) = run(
        lambda images, draw: augment.trivial_augment(images, draw=draw, name="trivial"), given
    )
    for image, pixels, u in zip(images, given, numbers(range(120), "trivial", 3)):
        name, size = plain_choice(u[[0, 2]], int(u[1] * 31), 31, wide=True)
        check(image, pixels, name, size, wide=True)


# DALI's tables of the paper, without operations of probability 0.
TABLES = {
    "imagenet": dali_policies.get_reduced_image_net_policy(),
    "cifar10": dali_policies.get_reduced_cifar10_policy(),
    "svhn": dali_policies.get_svhn_policy(),
}


def table(policy):
    return [
        [(operation.name, p, bin_ or 0) for operation, p, bin_ in pair]
        for pair in TABLES[policy].sub_policies
    ]


@pytest.mark.parametrize("policy", TABLES)
def test_tables_are_the_papers(policy):
    ours = [[one for one in pair if one[1] > 0] for pair in policies.POLICIES[policy]]
    assert ours == table(policy)


def plain_policy(policy, u):
    """Returns the operations and magnitudes of both stages."""
    pair = policies.POLICIES[policy][int(u[0] * 25)]
    stages = []
    for (name, p, k), chance, sign in zip(pair, u[1:3], u[3:5]):
        name = name if chance < p else "identity"
        size = plain_magnitude(name, k, 10)
        stages.append((name, -size if name in SIGNED and sign < 0.5 else size))
    return stages


@pytest.mark.parametrize("policy", TABLES)
def test_auto_augment_does_torchvisions_operations(policy):
    count = 150
    given = drawn_images(count)
    (images,) = run(
        lambda images, draw: augment.auto_augment(images, draw=draw, policy=policy, name="auto"),
        given,
    )
    single = 0
    for image, pixels, u in zip(images, given, numbers(range(count), "auto", 5)):
        some = [one for one in plain_policy(policy, u) if one[0] != "identity"]
        if len(some) < 2:
            check(image, pixels, *(some or [("identity", 0)])[0])
            single += len(some)
        else:  # exact for the first, so that the second operation's bound holds
            first, most = plain_operation(pixels, *some[0])
            if most == 0 and len(first) == 1:
                check(image, first[0].astype(np.uint8), *some[1])
    assert single > 20


def shares(choices):
    operations = np.concatenate([one.operation for one in choices])
    return np.bincount(operations, minlength=len(policies.OPERATIONS)) / len(operations)


@pytest.mark.parametrize("space", ("rand", "trivial"))
def test_operations_and_signs_are_all_as_likely(space):
    count = 20_000
    u = numbers(range(count), space, 4).astype(np.float32)
    if space == "rand":
        choices = policies.rand_augment(u, 2, 9, 31)
    else:
        choices = policies.trivial_augment(u[:, :3], 31)
        (choice,) = choices
        brightness = np.abs(choice.magnitude[choice.operation == 6])
        counts = np.bincount(np.rint(brightness / 0.99 * 30).astype(int), minlength=31)
        expected = len(brightness) / 31
        assert len(counts) == 31 and (abs(counts - expected) < 5 * math.sqrt(expected)).all()
    total = count * len(choices)
    bound = 5 * math.sqrt(1 / 14 * 13 / 14 / total)
    assert (abs(shares(choices)[:14] - 1 / 14) < bound).all() and shares(choices)[14] == 0
    for choice in choices:
        signed = np.isin(choice.operation, range(1, 10)) & (choice.magnitude != 0)
        below = (choice.magnitude < 0)[signed]
        assert abs(below.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(below))
        assert (choice.magnitude[~np.isin(choice.operation, range(1, 10))] >= 0).all()
    if space == "rand":  # the second operation does not depend on the first
        together = np.bincount(choices[0].operation * 14 + choices[1].operation, minlength=196)
        assert (abs(together - count / 196) < 5.5 * math.sqrt(count / 196)).all()


@pytest.mark.parametrize("policy", TABLES)
def test_auto_augment_has_the_tables_probabilities(policy):
    count = 50_000
    u = numbers(range(count), "auto", 5).astype(np.float32)
    first, second = policies.auto_augment(u, policy)
    for stage, choice in enumerate((first, second)):
        expected = np.zeros(len(policies.OPERATIONS))
        for pair in policies.POLICIES[policy]:
            name, p, _ = pair[stage]
            expected[list(policies.OPERATIONS).index(name)] += p / 25
            expected[0] += (1 - p) / 25
        bound = 5 * np.sqrt(expected * (1 - expected) / count)
        assert (abs(shares([choice]) - expected) <= bound).all()


def test_interpolation_and_filling():
    given = drawn_images(60)

    def graph(images, draw):
        return augment.rand_augment(
            images,
            draw=draw,
            num_ops=1,
            magnitude=20,
            interp_type=types.INTERP_LINEAR,
            fill_value=128,
            name="rand",
        )

    (images,) = run(graph, given)
    seen = 0
    for image, pixels, u in zip(images, given, numbers(range(60), "rand", 2)):
        name, size = plain_choice(u, 20, 31)
        if name == "translate_x":
            offset, seen = int(size * 60), seen + 1
            empty = image[:, :offset] if offset > 0 else image[:, offset:]
            assert (empty == 128).all()
            rest = image[:, offset:] if offset > 0 else image[:, :offset]
            assert np.array_equal(rest, pixels[:, :-offset] if offset > 0 else pixels[:, -offset:])
    assert seen > 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, d: augment.rand_augment(x, draw=d, num_ops=0), "1 or more, not 0"),
        (lambda x, d: augment.rand_augment(x, draw=d, magnitude=31), "not 31 of 31"),
        (lambda x, d: augment.rand_augment(x, draw=d, magnitude=-1), "not -1 of 31"),
        (lambda x, d: augment.rand_augment(x, draw=d, num_magnitude_bins=1), "not 9 of 1"),
        (lambda x, d: augment.trivial_augment(x, draw=d, num_magnitude_bins=1), "not 1"),
        (lambda x, d: augment.auto_augment(x, draw=d, policy="image_net"), "'svhn'.*'image_net'"),
    ],
)
def test_invalid_settings_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        run(call, [drawn_image(0)])
