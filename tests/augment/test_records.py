"""A record's augmentation is the same alone and in other batches, with and without conditionals."""

import numpy as np
import pytest

from dalijax import augment
from drawing import FUNCTIONS, drawn_image, run

RECORDS = [7, 10**10, 0, 3, 12, 5, 9, 1, 2, 4, 6, 8]


def drawn_images(records):
    return [drawn_image(record, 30 + record % 7, 44 + record % 5) for record in records]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_record_is_augmented_equally_in_every_batch(function):
    graph = FUNCTIONS[function]
    (together,) = run(graph, drawn_images(RECORDS), RECORDS)
    for conditionals in (False, True):
        for start, stop in ((0, 1), (1, 2), (2, 7), (7, 12)):
            part = RECORDS[start:stop]
            (images,) = run(graph, drawn_images(part), part, conditionals=conditionals)
            for image, expected in zip(images, together[start:stop]):
                np.testing.assert_array_equal(image, expected)
    (others,) = run(graph, drawn_images(RECORDS), RECORDS, epoch=2)
    assert sum(not np.array_equal(a, b) for a, b in zip(together, others)) > 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_branch_of_a_graph_with_conditionals_augments_its_samples_alone(function):
    def graph(images, draw):
        if draw.coin_flip(name="some") == 1:
            images = FUNCTIONS[function](images, draw)
        return images

    def always(images, draw):
        return draw.coin_flip(name="some"), FUNCTIONS[function](images, draw)

    (images,) = run(graph, drawn_images(RECORDS), RECORDS, conditionals=True)
    some, augmented = run(always, drawn_images(RECORDS), RECORDS)
    assert 0 < np.sum(some) < len(RECORDS)
    for image, one, other, pixels in zip(images, some, augmented, drawn_images(RECORDS)):
        np.testing.assert_array_equal(image, other if one else pixels)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (augment.random_resized_crop, {"scale": (0.5, 1.0)}),
        (augment.random_resized_crop, {"ratio": (1.0, 1.0)}),
        (augment.random_resized_crop, {"flip": 0.5}),
        (augment.random_crop, {"padding": 1}),
        (augment.random_erasing, {"probability": 0.1}),
        (augment.flip, {"probability": 0.1}),
        (augment.color_jitter, {"hue": 0.1}),
        (augment.color_jitter, {"probability": 0.5}),
        (augment.grayscale, {"probability": 0.5}),
        (augment.solarize, {"probability": 0.1}),
        (augment.gaussian_blur, {"sigma": (0.1, 1.0)}),
        (augment.gaussian_blur, {"probability": 0.5}),
        (augment.rand_augment, {"magnitude": 10}),
        (augment.trivial_augment, {"num_magnitude_bins": 11}),
        (augment.auto_augment, {"policy": "svhn"}),
    ],
)
def test_states_detect_different_settings(function, change):
    """They are not arguments of an operator."""
    seen = []

    numbers = {
        augment.random_resized_crop: [16],
        augment.random_crop: [16],
        augment.solarize: [128],
        augment.gaussian_blur: [9],
    }

    def graph(images, draw, **more):
        output = function(images, *numbers.get(function, ()), draw=draw, name="it", **more)
        seen.append(draw._described())
        return output

    for more in ({}, {}, change):
        run(lambda x, d: graph(x, d, **more), drawn_images(RECORDS[:2]))
    assert seen[0] == seen[1] != seen[2]
    assert all(
        len(lines) == 1 and lines[0][:2] == (f"augment.{function.__name__}", "draw.it")
        for lines in seen
    )
