"""A record's augmentation: the same alone and in other batches, with conditionals and without."""

import numpy as np
import pytest

from drawing import FUNCTIONS, picture, run

RECORDS = [7, 10**10, 0, 3, 12, 5, 9, 1, 2, 4, 6, 8]


def pictures(records):
    return [picture(record, 30 + record % 7, 44 + record % 5) for record in records]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_record_is_augmented_alike_in_every_batch(function):
    graph = FUNCTIONS[function]
    (together,) = run(graph, pictures(RECORDS), RECORDS)
    for conditionals in (False, True):
        for start, stop in ((0, 1), (1, 2), (2, 7), (7, 12)):
            part = RECORDS[start:stop]
            (images,) = run(graph, pictures(part), part, conditionals=conditionals)
            for image, expected in zip(images, together[start:stop]):
                np.testing.assert_array_equal(image, expected)
    (others,) = run(graph, pictures(RECORDS), RECORDS, epoch=2)
    assert sum(not np.array_equal(a, b) for a, b in zip(together, others)) > 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_branch_of_a_graph_with_conditionals_augments_its_samples_alone(function):
    def graph(images, draw):
        if draw.coin_flip(name="some") == 1:
            images = FUNCTIONS[function](images, draw)
        return images

    def always(images, draw):
        return draw.coin_flip(name="some"), FUNCTIONS[function](images, draw)

    (images,) = run(graph, pictures(RECORDS), RECORDS, conditionals=True)
    some, augmented = run(always, pictures(RECORDS), RECORDS)
    assert 0 < np.sum(some) < len(RECORDS)
    for image, one, other, pixels in zip(images, some, augmented, pictures(RECORDS)):
        np.testing.assert_array_equal(image, other if one else pixels)
