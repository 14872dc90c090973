"""Correct programs that resemble mistakes: no error, and the same data."""

import functools
import inspect
import itertools
import random

import grain
import jax
import numpy as np
import pytest
from nvidia.dali import fn

import dalijax
from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALIIterDataset, DALITransform
from numbered import read_files

COUNT, BATCH = 8, 4
NUMBERS = sources.Arrays({"x": np.arange(COUNT, dtype=np.int32)})
RNG = np.random.default_rng(0)
take = data_iterator(lambda x: x + 0, ["x"])


def open_numbers(**call):
    return take(**{"source": NUMBERS, "batch_size": BATCH, "shuffle": False, **call})


@pytest.mark.parametrize("size", (4, np.int64(4), np.uint8(4), np.array(4)))
def test_whole_numbers_of_any_type(size):
    with open_numbers(batch_size=size, num_threads=np.int32(1), seed=np.uint32(3)) as iterator:
        assert next(iterator)["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", (tuple, dict.fromkeys, iter, lambda names: (n for n in names)))
def test_any_iterable_names_the_outputs(kind):
    both = data_iterator(lambda x: (x + 0, x + 1), kind(["a", "b"]))
    for _ in range(2):  # a generator is not read again
        with both(source=NUMBERS, batch_size=BATCH, shuffle=False) as iterator:
            batch = next(iterator)
            assert [batch[k].tolist()[0] for k in ("a", "b")] == [0, 1]
    keys = {"a": 1, "b": 2}.keys()
    assert data_iterator(lambda x: (x, x), keys)._config.output_map == ("a", "b")
    records = grain.MapDataset.source([{"x": np.int32(k)} for k in range(COUNT)])
    ds = records.pipe(DALITransform(lambda x: (x, x + 1), batch_size=2, output_map=keys))
    assert next(iter(ds))["b"].tolist() == [1, 2]
    graph = data_iterator(lambda x: (x, x + 1), keys, source=NUMBERS)
    assert sorted(next(iter(DALIIterDataset(graph, batch_size=2)))) == ["a", "b"]


def test_a_set_has_no_order():
    with pytest.raises(TypeError, match="in the order of the pipeline's outputs"):
        data_iterator(lambda x: x, {"a", "b"})


def test_a_batch_is_a_plain_dict_for_jax():
    with open_numbers() as iterator:
        batch = next(iterator)
    assert type(batch) is dict
    assert jax.tree.structure(batch) == jax.tree.structure({"x": 0})
    with pytest.raises(KeyError, match="images"):  # Python's own: a batch is a plain dict
        batch["images"]


def seeded(files):
    np.random.seed(0)
    random.seed(0)
    files = [files[k] for k in np.random.permutation(len(files))]
    random.shuffle(files)
    return read_files(files)[1]


def own_generator(files):
    order = np.random.default_rng(0).permutation(len(files))
    return read_files([files[k] for k in order])[1]


@pytest.mark.parametrize("graph", (seeded, own_generator))
def test_seeded_generators_may_order_files(graph, jpegs):
    numpy_state, state = np.random.get_state(), random.getstate()
    try:
        with data_iterator(graph, ["x"], reader_name="reader")(jpegs, batch_size=BATCH) as iterator:
            assert len(next(iterator)["x"]) == BATCH
    finally:
        np.random.set_state(numpy_state)
        random.setstate(state)


def drawn_from_a_global(x):
    return x + np.int32(RNG.integers(9))


def test_a_generator_outside_the_function_is_found():
    with pytest.raises(RuntimeError, match=r"draws from RNG while .*draw\.uniform"):
        data_iterator(drawn_from_a_global, ["x"])(source=NUMBERS, batch_size=BATCH)
    own = random.Random(0)
    with pytest.raises(RuntimeError, match="draws from own while"):
        data_iterator(lambda x: x + own.randint(0, 9), ["x"])(source=NUMBERS, batch_size=BATCH)


def with_helper(x):
    return drawn_from_a_global(x) * 2


def with_default(x, *, rng=np.random.default_rng(1)):
    return x + np.int32(rng.integers(9))


def with_argument(rng, x):
    return x + np.int32(rng.integers(9))


class Graph:
    def __init__(self):
        self.rng = np.random.RandomState(0)

    def method(self, x):
        return self.helper(x)

    def helper(self, x):
        return x + np.int32(self.rng.randint(9))


@pytest.mark.parametrize(
    ("graph", "name"),
    [
        (with_helper, "RNG"),
        (with_default, "rng"),
        (functools.partial(with_argument, np.random.default_rng(2)), "argument 0"),
        (functools.partial(with_default, rng=np.random.default_rng(3)), "rng"),
        (Graph().method, "rng"),
    ],
)
def test_a_generator_is_found_in_helpers_defaults_and_objects(graph, name):
    with pytest.raises(RuntimeError, match=f"draws from {name} while"):
        data_iterator(graph, ["x"])(source=NUMBERS, batch_size=BATCH)


def test_random_numbers_outside_the_graph_are_free():
    random.random()
    with open_numbers() as iterator:
        np.random.rand()
        assert next(iterator)["x"].tolist() == [0, 1, 2, 3]


def test_next_within_eager_transformations_and_callbacks():
    with open_numbers() as iterator:

        def loss(weight):
            return (weight * next(iterator)["x"].astype(np.float32)).sum()

        # Without jit, each call runs the function again with another batch.
        gradients = [float(jax.grad(loss)(np.float32(1))) for _ in range(2)]
    assert gradients == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7]
    with open_numbers(as_numpy=True) as iterator:
        shape = jax.ShapeDtypeStruct((BATCH,), np.int32)
        call = jax.jit(lambda: jax.pure_callback(lambda: next(iterator)["x"], shape))
        assert call().tolist() == [0, 1, 2, 3]


def test_next_within_a_scan_is_refused_and_loses_no_batch():
    with open_numbers() as iterator:
        with pytest.raises(RuntimeError, match="pass the batch as an argument"):
            jax.lax.scan(lambda carry, _: (carry, next(iterator)["x"]), 0, None, length=2)
        assert next(iterator)["x"].tolist() == [0, 1, 2, 3]


def test_a_property_keeps_its_own_attribute_error():
    def wrong(x):
        return x.no_such_thing

    iterator = take.stream(1, source=NUMBERS, batch_size=BATCH)
    assert hasattr(iterator, "element_spec") and not hasattr(iterator, "state_dict")
    stream = data_iterator(wrong, ["x"]).stream(1, source=NUMBERS, batch_size=BATCH)
    with pytest.raises(AttributeError, match="no_such_thing"):
        stream.element_spec


def test_records_of_stacks_with_a_batch_function_are_samples():
    def clip(records):
        return {"x": np.stack([record["x"] for record in records])}

    records = grain.MapDataset.source([{"x": np.int32(k)} for k in range(COUNT)])
    ds = records.batch(2, batch_fn=clip)
    ds = ds.pipe(DALITransform(lambda x: x + 0, batch_size=2, output_map=["x"]))
    assert next(iter(ds))["x"].tolist() == [[0, 1], [2, 3]]


def test_modules_are_there_without_an_import():
    names = {"augment", "errors", "fn", "profile", "show", "sources", "tune"}
    assert all(inspect.ismodule(getattr(dalijax, name)) for name in names)
    assert names <= set(dir(dalijax))


def test_replacements_work():
    with open_numbers() as iterator:
        assert len(list(itertools.islice(iterator, 1))) == 1
    with take.stream(2, source=NUMBERS, batch_size=BATCH) as iterator:
        assert iterator.get_state()["format"]


def refused(x):
    raise ValueError(f"{type(x).__name__} is refused")


@pytest.mark.parametrize(
    ("graph", "kind"),
    ((refused, ValueError), (lambda x: {}["a"] + x, KeyError), (lambda x: [][x.index], IndexError)),
)
def test_errors_of_the_graph_function_itself_are_unchanged(graph, kind):
    with pytest.raises(kind) as raised:
        data_iterator(graph, ["x"])(source=NUMBERS, batch_size=BATCH)
    assert type(raised.value) is kind and "DALI" not in str(raised.value)


def test_whole_records_may_be_indexed():
    def graph(record):
        return record["x"] + fn.cast_like(record["x"], record["x"])

    records = grain.MapDataset.source([{"x": np.int32(k)} for k in range(COUNT)])
    ds = records.pipe(DALITransform(graph, batch_size=2, output_map=["x"]))
    assert next(iter(ds))["x"].tolist() == [0, 2]
