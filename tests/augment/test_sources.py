"""Augmentation of records of a source, through the iterator: layouts, states, small images."""

import ast
import functools
import json
import re

import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import fn
from shardings import rows_over

from dalijax import augment, data_iterator

COUNT = 24


def graph(number, data, draw, magnitude=9, value=0, probability=0.5):
    images = fn.decoders.image(data)
    images = augment.random_resized_crop(images, 16, draw=draw)
    images = augment.flip(images, draw=draw, probability=probability)
    images = augment.rand_augment(images, draw=draw, magnitude=magnitude)
    images = augment.color_jitter(images, draw=draw, brightness=0.4, saturation=0.4)
    return number, augment.random_erasing(images, draw=draw, value=value)


def view(number, data, draw):
    images = augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw)
    images = augment.color_jitter(images, draw=draw, saturation=0.8, probability=0.8)
    images = augment.grayscale(images, draw=draw, probability=0.3)
    images = augment.gaussian_blur(images, 5, draw=draw, probability=0.5)
    return number, augment.solarize(images, 128, draw=draw, probability=0.3)


def crops(number, data, draw):
    return number, augment.random_crop(fn.decoders.image(data), 17, draw=draw, padding=(1, 0, 0, 0))


def make(batch_size, shards=0, function=graph, count=COUNT, **more):
    options = {}
    if shards:
        options["sharding"] = rows_over(shards)
    iterator_fn = data_iterator(function, ["number", "images"], mask="mask", **options)
    call = {"source": Numbers(count), "batch_size": batch_size, "device_id": None, "seed": 5}
    return iterator_fn(**call, **more)


def by_number(batches):
    """Returns the image of each record in some batches of an epoch."""
    return {
        int(number): np.asarray(image)
        for batch in batches
        for number, image in zip(np.asarray(batch["number"]), np.asarray(batch["images"]))
    }


@pytest.mark.parametrize("function", (graph, view))
@pytest.mark.parametrize(("batch_size", "shards"), ((6, 0), (8, 2), (24, 4)))
def test_a_record_is_augmented_equally_on_every_layout(batch_size, shards, function):
    with make(4, 0, function) as iterator, make(batch_size, shards, function) as other:
        images, others = by_number(iterator), by_number(other)
    assert sorted(images) == sorted(others) == list(range(COUNT))
    for number, image in images.items():
        np.testing.assert_array_equal(image, others[number])


def test_a_state_resumes_and_compares_the_settings():
    with make(4) as iterator:
        next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        assert len(json.dumps(state)) <= 3072  # of nearly two hundred operators
        rest = by_number(iterator)
    with make(10) as other:
        other.set_state(state)
        again = by_number(other)
    assert {k: again[k].tolist() for k in rest} == {k: v.tolist() for k, v in rest.items()}
    # Short values are shown as they are, for draws and operators.
    for change, name, values in (
        ({"probability": 0.3}, "augment.flip.probability", "0.5 -> 0.3"),
        ({"magnitude": 10}, "augment.rand_augment.magnitude", "9 -> 10"),
        ({"value": 1}, "erase.fill_value", r"\[0.0\] -> \[1.0\]"),
    ):
        with make(4, **change) as other:
            differs = rf"different data.*\n  operators\.{name}: {values}\nRecreate"
            with pytest.raises(ValueError, match=differs):
                other.set_state(state)
                next(other)
            other.set_state(state, allow=[f"operators.{name}"])
            assert next(other)["number"].tolist() == list(rest)[:4]


def jittered(number, data, draw, jitter=0.0):
    images = augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw, name="crop")
    if jitter:
        images = augment.color_jitter(images, draw=draw, brightness=jitter, name="jitter")
    return number, images


@pytest.mark.parametrize(("before", "after"), ((0.0, 0.4), (0.4, 0.0)))
def test_a_state_resumes_with_other_draws_if_allowed(before, after):
    with make(4, function=jittered, jitter=before) as iterator:
        next(iterator)
        state = iterator.get_state()
        expected = next(iterator)["number"].tolist()
    with make(4, function=jittered, jitter=after) as other:
        with pytest.raises(ValueError, match="To ignore the differences, pass allow=") as refused:
            other.set_state(state)
            next(other)
        allow = ast.literal_eval(re.search(r"pass allow=(\[.*?\]) to", str(refused.value))[1])
        assert {"operators.draw.jitter", "operators.coord_transform"} <= {*allow}
        other.set_state(state, allow=allow)
        assert next(other)["number"].tolist() == expected


def test_a_state_names_the_settings_of_a_view():
    def changed(number, data, draw):
        images = augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw)
        images = augment.color_jitter(images, draw=draw, saturation=0.8, probability=0.7)
        images = augment.grayscale(images, draw=draw, probability=0.2)
        images = augment.gaussian_blur(images, 7, draw=draw, sigma=(0.1, 1), probability=0.4)
        return number, augment.solarize(images, 100, draw=draw, probability=0.1)

    with make(4, function=view) as iterator:
        next(iterator)
        state = iterator.get_state()
    with make(4, function=changed) as other, pytest.raises(ValueError) as refused:
        other.set_state(state)
        next(other)
    for name, values in (
        ("augment.color_jitter.probability", "0.8 -> 0.7"),
        ("augment.grayscale.probability", "0.3 -> 0.2"),
        ("augment.gaussian_blur.sigma", "[0.1,2.0] -> [0.1,1]"),
        ("augment.gaussian_blur.probability", "0.5 -> 0.4"),
        ("augment.gaussian_blur.kernel_size", "5 -> 7"),
        ("augment.solarize.threshold", "128 -> 100"),
        ("augment.solarize.probability", "0.3 -> 0.1"),
    ):
        assert f"\n  operators.{name}: {values}\n" in str(refused.value)


@pytest.mark.parametrize("is_output", (True, False))
def test_a_state_does_not_depend_on_how_samples_are_chosen(is_output):
    """Without a probability, all images are blurred, and the graph has no choice, as on a GPU."""

    def blurred(number, data, draw, **options):
        images = augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw)
        images = augment.gaussian_blur(images, 5, draw=draw, **options)
        return number, images if is_output else fn.flip(images)

    with make(4, function=blurred) as iterator:
        next(iterator)
        state = iterator.get_state()
    other = make(4, function=functools.partial(blurred, probability=0.5))
    with other, pytest.raises(ValueError) as refused:
        other.set_state(state)
        next(other)
    differences = re.findall(r"^  (operators\S*: .*)$", str(refused.value), re.MULTILINE)
    assert differences == ["operators.augment.gaussian_blur.probability: 1.0 -> 0.5"]


def two_draws(number, data, draw, swapped=False):
    first, second = draw.uniform(name="a"), draw.uniform(name="b")
    if swapped:
        first, second = second, first
    return number, first * 2 + second


def two_outputs(number, data, draw, swapped=False):
    def wide(u, _):
        return [np.repeat(u[:, k : k + 1], 70, axis=1) for k in range(2)]

    forms = [((70,), np.float32)] * 2
    first, second = draw._compute_outputs(wide, forms, columns=2, name="wide")
    if swapped:
        first, second = second, first
    return number, first * 2 + second


@pytest.mark.parametrize("function", (two_draws, two_outputs))
def test_a_state_is_refused_if_draws_changed_their_order(function):
    with make(4, function=function) as iterator:
        next(iterator)
        state = iterator.get_state()
    with make(4, function=function) as same:
        same.set_state(state)
        next(same)
    with (
        make(4, function=function, swapped=True) as other,
        pytest.raises(ValueError, match=r"different data.*\n  operators\."),
    ):
        other.set_state(state)
        next(other)


def test_images_that_are_too_small_are_named():
    with (
        make(4, function=crops, shuffle=False) as iterator,
        pytest.raises(
            Exception,
            match=r"number 0 can't be read.*has 16 x 16 pixels, too few.*; number 3 can't be read",
        ),
    ):
        next(iterator)
