"""Warnings of shapes that differ between batches, because each shape compiles a step."""

import warnings

import grain
import numpy as np
import pytest
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform

ROWS = [{"a": np.arange(k // 2 + 1, dtype=np.float32)} for k in range(40)]


def padded(a):
    return fn.pad(a)


def to_one_shape(a):
    return fn.pad(a, shape=[20])


def to_few_shapes(a):
    return fn.pad(a, align=[4])


def over_source(graph, **options):
    make = data_iterator(graph, ["x"], source=sources.Records(ROWS), **options)
    return make(batch_size=2, shuffle=False, num_threads=1)


def over_records(graph, **options):
    transform = DALITransform(graph, batch_size=2, output_map=["x"], num_threads=1, **options)
    return iter(grain.MapDataset.source(ROWS).pipe(transform))


@pytest.mark.parametrize("make", (over_source, over_records))
@pytest.mark.parametrize("options", ({}, {"writable": True}))
def test_more_than_a_few_shapes_are_warned_of_once(make, options):
    if make is over_source:
        options = {"as_numpy": not options}
    iterator, warned = make(padded, **options), []
    for number in range(20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert next(iterator)["x"].shape == (2, number + 1)
        warned += [(number, str(warning.message), warning.filename) for warning in caught]
    iterator.close()
    ((number, text, file),) = warned
    assert number == 8
    assert file == __file__  # of the call of next()
    assert text.startswith(
        "samples of output 'x' have had 9 different shapes, such as (1,) and (9,)"
    )


@pytest.mark.parametrize("make", (over_source, over_records))
@pytest.mark.parametrize(
    "graph,shapes", ((to_one_shape, {20}), (to_few_shapes, {4, 8, 12, 16, 20}))
)
def test_one_shape_or_a_few_shapes_do_not_warn(make, graph, shapes):
    iterator = make(graph)  # a warning would be an error
    assert {next(iterator)["x"].shape[1] for _ in range(20)} == shapes
    iterator.close()
