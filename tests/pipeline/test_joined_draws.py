"""Draws of one shape and dtype, which are fed by one input that split.c splits."""

import ctypes

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import fn, types

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.feeding import joined_draws
from dalijax.core.native import operators as native_operators
from dalijax.core.pipeline import alternatives
from dalijax.core.state.operators import operators
from drawing import drawn_image, four_views, png

pytestmark = pytest.mark.skipif(
    isinstance(native_operators.checked_library(), str),
    reason="dalijax was installed without a C compiler",
)
FORMS = [((), np.float32), ((), np.bool_), ((3,), np.int16), ((2, 3), np.float64), ((2,), np.uint8)]


def many(x, *, draw, count=7):
    """Returns the sums of some draws of each form, which depend on their order."""
    sums = []
    for number, (shape, dtype) in enumerate(FORMS):
        total = fn.constant(fdata=0.0, shape=[1])
        for k in range(count):
            drawn = draw.compute(lambda u, _: np.floor(u * 9), shape, dtype, name=f"{number}.{k}")
            total = total * 3.0 + fn.reshape(fn.cast(drawn, dtype=types.FLOAT), shape=[-1])
        sums.append(total)
    return *sums, x + 0


NAMES = [*map(str, range(len(FORMS))), "x"]


def rows_of(batches):
    batches = list(batches)
    return {k: np.concatenate([np.asarray(batch[k]) for batch in batches]) for k in batches[0]}


def over_source(count=7, epochs=2):
    source = sources.Arrays({"x": np.arange(11)})
    make = data_iterator(many, NAMES, source=source, mask="mask")
    iterator = make(batch_size=4, num_threads=2, seed=3, count=count)
    return rows_of(batch for _ in range(epochs) for batch in iterator)


def over_grain(count=7):
    records = grain.MapDataset.source([{"x": np.int64(k)} for k in range(11)])
    transform = DALITransform(
        many, batch_size=4, output_map=NAMES, num_threads=2, seed=3, pad="mask", count=count
    )
    return rows_of(iter(records.pipe(transform)))


@pytest.fixture
def built(monkeypatch):
    """The kinds of the operators of each pipeline that is built."""
    found, choose = [], alternatives.choose

    def noted(pipeline):
        choose(pipeline)
        found.append([str(getattr(o._op, "schema_name", o.name)) for o in operators(pipeline)])

    monkeypatch.setattr(alternatives, "choose", noted)
    return found


@pytest.fixture
def apart(monkeypatch):
    """Returns a result of a function without the library."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(joined_draws, "checked_library", lambda: "none")
            return function(*args)

    return call


@pytest.mark.parametrize("count", (1, 2, 6, 7, 8, 13))
@pytest.mark.parametrize("over", (over_source, over_grain))
def test_joined_draws_have_the_numbers_of_single_draws(over, count, apart, built):
    joined, single = over(count), apart(over, count)
    assert joined.keys() == single.keys()
    for name, values in joined.items():
        np.testing.assert_array_equal(values, single[name])
    assert len(np.unique(joined["0"])) > 3
    splits = [kinds.count("NumbaFunction") for kinds in built]
    assert max(splits) == len(FORMS) * {1: 0, 2: 1, 6: 1, 7: 1, 8: 2, 13: 2}[count]
    assert min(splits) == 0


@pytest.mark.parametrize("form", (tuple, dict))
def test_a_graph_returns_joined_draws(form, built, apart):
    names = ["a", "b", "c", "sum", "x"]

    def returned():
        def graph(x, *, draw):
            a, b, c, d = (draw.uniform(name=name) for name in "abcd")
            outputs = a, b, c, b + c + d, x
            return dict(zip(names, outputs)) if form is dict else form(outputs)

        source = sources.Arrays({"x": np.arange(5)})
        make = data_iterator(graph) if form is dict else data_iterator(graph, names)
        return rows_of(make(source=source, batch_size=5))

    joined, single = returned(), apart(returned)
    for name in names:
        np.testing.assert_array_equal(joined[name], single[name])
    assert any("NumbaFunction" in kinds for kinds in built)


def test_draws_that_the_graph_does_not_use_are_not_computed(apart, built):
    def used():
        def refused(u, _):
            raise ValueError("this draw is not used")

        def graph(x, *, draw):
            a, b = draw.uniform(name="a"), draw.uniform(name="b")
            draw.compute(refused, name="refused")
            return a + b * draw.uniform(name="c"), x

        make = data_iterator(graph, ["y", "x"], source=sources.Arrays({"x": np.arange(9)}))
        return rows_of(make(batch_size=4))

    joined, single = used(), apart(used)
    np.testing.assert_array_equal(joined["y"], single["y"])
    assert any("NumbaFunction" in kinds for kinds in built)


@pytest.mark.parametrize(("shape", "is_joined"), (((8, 8), True), ((8, 9), False)))
def test_large_draws_are_not_joined(shape, is_joined, built):
    def graph(x, *, draw):
        return sum(draw.uniform(shape=shape, name=name) for name in "abc"), x

    make = data_iterator(graph, ["sum", "x"], source=sources.Arrays({"x": np.arange(5)}))
    assert rows_of(make(batch_size=5))["sum"].shape == (5, *shape)
    assert any("NumbaFunction" in kinds for kinds in built) == is_joined


@pytest.mark.parametrize("key", (1, ("t", 1)))
def test_outputs_that_are_no_names_have_their_own_error(key):
    source = sources.Arrays({"x": np.arange(5)})
    make = data_iterator(lambda x, *, draw: {key: draw.uniform(), "b": x}, source=source)
    with pytest.raises(TypeError, match="returns a dict with the key"):
        next(make(batch_size=4))


def views(data, *, draw):
    return four_views(fn.decoders.image(data), draw)


def view_iterator():
    records = [{"data": png(drawn_image(k, 40 + k, 60))} for k in range(10)]
    make = data_iterator(views, ["views"], source=sources.Records(records))
    return make(batch_size=4, num_threads=2, seed=5)


def test_views_are_the_same_and_states_restore_with_and_without_the_library(apart):
    def state_and_rest():
        iterator = view_iterator()
        next(iterator)
        state = iterator.get_state()
        return state, np.concatenate([np.asarray(batch["views"]) for batch in iterator])

    def rest(state):
        iterator = view_iterator()
        iterator.set_state(state)
        return np.concatenate([np.asarray(batch["views"]) for batch in iterator])

    state, joined = state_and_rest()
    other_state, single = apart(state_and_rest)
    np.testing.assert_array_equal(joined, single)
    np.testing.assert_array_equal(rest(other_state), joined)
    np.testing.assert_array_equal(apart(rest, state), joined)


def test_draws_of_branches_are_joined(apart, built):
    def branches():
        def graph(x, *, draw):
            a, b, c, d = (draw.uniform(0, 9, name=name) for name in "abcd")
            y = a + b
            if draw.coin_flip(0.5, name="coin") == 1:
                y = c * d
            return y, x

        source = sources.Arrays({"x": np.arange(40)})
        make = data_iterator(graph, ["y", "x"], source=source)
        return rows_of(make(batch_size=8, enable_conditionals=True))

    joined, single = branches(), apart(branches)
    np.testing.assert_array_equal(joined["y"], single["y"])
    assert any("NumbaFunction" in kinds for kinds in built)


@given(data=st.data())
def test_split_copies_each_part(data):
    library = ctypes.CDLL(str(native_operators.LIBRARY))
    bytes_ = data.draw(st.sampled_from((1, 2, 4, 8)))
    parts, samples = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = np.dtype(f"u{bytes_}")
    given = np.random.default_rng(0).integers(0, 255, (samples, parts, *shape)).astype(dtype)
    results = np.full((parts, samples, int(np.prod(shape)) + 1), 7, dtype)  # 7 must stay

    def pointers(addresses):
        return (ctypes.c_void_p * max(1, len(addresses)))(*addresses)

    shapes = np.array([[parts, *shape]] * samples, np.int64)
    found = np.full((parts * samples, len(shape) + 1), -5, np.int64)
    ndims = np.array([len(shape) + 1], np.int32)
    row = shapes.strides[0]
    shape_pointers = pointers([shapes.ctypes.data + row * k for k in range(samples)])
    found_pointers = pointers([found.ctypes.data + row * k for k in range(parts * samples)])
    library.dalijax_split_shapes(
        *(found_pointers, None, parts, shape_pointers, ctypes.c_void_p(ndims.ctypes.data), 1),
        samples,
    )
    assert (found[:, :-1] == shape).all() and (found[:, -1] == -5).all()
    ins = pointers([given[k].ctypes.data for k in range(samples)])
    outs = pointers([results[k, i].ctypes.data for k in range(parts) for i in range(samples)])
    library[f"dalijax_split_{bytes_}"](
        *(outs, found_pointers, None, parts, ins, shape_pointers),
        *(ctypes.c_void_p(ndims.ctypes.data), 1, samples),
    )
    expected = given.swapaxes(0, 1).reshape(parts, samples, -1)
    np.testing.assert_array_equal(results[..., :-1], expected)
    assert (results[..., -1] == 7).all()
