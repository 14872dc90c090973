"""Graph functions that return a dict: its keys name the outputs, in every adapter."""

import json

import grain
import jax
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from shardings import rows_over

from dalijax import DALIGenericIterator, data_iterator, errors, sources
from dalijax import fn as jax_fn
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIBatch, DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.t5x import eval_get_dataset_fn
from dalijax.adapters.tfdata import DALIDataset
from numbered import read_files

N, BATCH = 8, 4
X = np.arange(N, dtype=np.int32)
CALL = {"source": sources.Arrays({"x": X}), "batch_size": BATCH, "shuffle": False}


def named(x):
    return {"plus": x + 1, "minus": x - 1, "half": jax_fn.cast(x / 2, "bfloat16")}


def in_another_order(x):
    return dict(reversed(named(x).items()))


def in_order(x):
    outputs = named(x)
    return outputs["half"], outputs["minus"], outputs["plus"]


train = data_iterator(named)


def check(batch, first=0):
    """Compares a batch with NumPy."""
    x = X[first : first + BATCH]
    values = {name: np.asarray(array) for name, array in batch.items()}
    assert values.keys() == {"plus", "minus", "half"}
    np.testing.assert_array_equal(values["plus"].ravel(), x + 1)
    np.testing.assert_array_equal(values["minus"].ravel(), x - 1)
    np.testing.assert_array_equal(values["half"].astype(np.float32).ravel(), x / 2)


@pytest.mark.parametrize("function", (named, in_another_order))
@pytest.mark.parametrize("output_map", ([], ["plus", "half", "minus"]))
@pytest.mark.parametrize("placed", (False, "all", "each"))
def test_the_keys_name_the_outputs(function, output_map, placed):
    options = {}
    if placed:
        sharding = rows_over(2)
        names = ("plus", "minus", "half")
        options["sharding"] = sharding if placed == "all" else dict.fromkeys(names, sharding)
    with data_iterator(function, output_map, **options)(**CALL) as iterator:
        assert sorted(iterator.element_spec) == ["half", "minus", "plus"]
        check(next(iterator))
        check(next(iterator), BATCH)
        assert "'half', 'minus', 'plus'" in repr(iterator) or output_map


def read_graph(files):
    jpegs, x = read_files(files, pad_last_batch=True)
    return {"x": x, "bytes": fn.cast(jpegs.shape()[0], dtype=types.INT32)}


def test_readers_and_their_first_states(jpegs_many):
    iterator_fn = data_iterator(read_graph, reader_name="reader")
    call = {"files": jpegs_many[:N], "batch_size": BATCH}
    stream = iterator_fn.stream(**call)
    with iterator_fn(**call) as iterator:
        first, lazy = iterator.get_state(), stream.get_state()
        assert jax.tree.structure(first) == jax.tree.structure(lazy)
        next(iterator)
        state, batch = iterator.get_state(), next(iterator)
        iterator.set_state(json.dumps(first))
        assert np.asarray(next(iterator)["x"]).ravel().tolist() == [0, 1, 2, 3]
        iterator.set_state(state)
        np.testing.assert_array_equal(next(iterator)["x"], batch["x"])
    stream.close()


def test_the_order_of_the_keys_is_not_in_the_state():
    with train(**CALL) as iterator, data_iterator(in_another_order)(**CALL) as other:
        next(iterator)
        other.set_state(iterator.get_state())
        check(next(other), BATCH)
        assert other.get_state() == iterator.get_state() or next(iterator)
    names = ["half", "minus", "plus"]
    with train(**CALL) as iterator, data_iterator(in_order, names)(**CALL) as other:
        next(iterator)
        other.set_state(iterator.get_state())
        check(next(other), BATCH)


@pytest.mark.parametrize("taken", (0, 1))
def test_a_first_state_is_the_same_before_and_after_the_pipelines_are_built(taken):
    with train(**CALL, prepare_first_batch=False) as iterator:
        before = iterator.get_state()
        iterator.peek()
        assert iterator.get_state() == before
        iterator.set_state(before)
        check(next(iterator))


def renamed(x):
    outputs = named(x)
    return {"half": outputs["half"], "minus": outputs["minus"], "q": outputs["plus"]}


def test_other_keys_are_another_graph():
    with train(**CALL) as iterator, data_iterator(renamed)(**CALL) as other:
        next(iterator)
        next(other)
        with pytest.raises(errors.StateError, match="outputs: .*'plus'.* -> .*'q'"):
            other.set_state(iterator.get_state())


def test_pipelines_of_pipeline_def(jpegs_many):
    pipeline = pipeline_def(read_graph)(
        jpegs_many[:N], batch_size=BATCH, num_threads=1, device_id=None, enable_checkpointing=True
    )
    iterator = DALIGenericIterator(pipeline, reader_name="reader")
    state = iterator.get_state()
    assert sorted(next(iterator)) == ["bytes", "x"]
    iterator.set_state(state)
    assert np.asarray(next(iterator)["x"]).ravel().tolist() == [0, 1, 2, 3]
    decorated = data_iterator(pipeline_def(read_graph), reader_name="reader")
    with decorated(jpegs_many[:N], batch_size=BATCH, num_threads=1, device_id=None) as other:
        assert sorted(next(other)) == ["bytes", "x"]


def test_conditionals():
    def graph(x):
        if x % 2 == 0:  # noqa: SIM108
            y = x
        else:
            y = -x
        return {"y": y, "x": x}

    with data_iterator(graph)(**CALL, enable_conditionals=True) as iterator:
        assert np.asarray(next(iterator)["y"]).ravel().tolist() == [0, -1, 2, -3]


RECORDS = [{"x": x} for x in X]


def of_clu():
    return next(DALIDatasetIterator(train, **CALL))


def of_iter_dataset():
    return next(iter(DALIIterDataset(train, **CALL)))


def of_transform():
    ds = grain.MapDataset.source(RECORDS)
    return next(iter(ds.pipe(DALITransform(named, batch_size=BATCH))))


def of_loader():
    sampler = grain.samplers.IndexSampler(
        N, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=0
    )
    loader = DALIDataLoader(RECORDS, sampler, pipeline_fn=named, batch_size=BATCH)
    return next(iter(loader))


def of_batch():
    sampler = grain.samplers.IndexSampler(
        N, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=0
    )
    operations = [DALIBatch(named, batch_size=BATCH)]
    return next(iter(grain.DataLoader(data_source=RECORDS, sampler=sampler, operations=operations)))


def of_tfdata():
    return next(DALIDataset(train, **CALL).as_numpy_iterator())


def of_t5x():
    config = type("Config", (), {"batch_size": BATCH, "seed": 1})()
    call = {k: v for k, v in CALL.items() if k != "batch_size"}
    datasets = eval_get_dataset_fn(train, masked=("plus",), **call)(config, 0, 1)
    batch = next(iter(datasets["named"]))
    del batch["weights"]
    return batch


@pytest.mark.parametrize(
    "first", (of_clu, of_iter_dataset, of_transform, of_loader, of_batch, of_tfdata, of_t5x)
)
def test_adapters(first):
    check(first())


def test_tensorflow_with_dalis_plugin(jpegs_many):
    iterator_fn = data_iterator(read_graph, ["x", "bytes"], reader_name="reader")
    call = {"files": jpegs_many[:N], "batch_size": BATCH}
    batch = next(DALIDataset(iterator_fn, **call).to_tf_dataset().as_numpy_iterator())
    assert batch["x"].ravel().tolist() == [0, 1, 2, 3]
    assert batch["bytes"].ravel().tolist() == [1, 1, 1, 1]


def test_t5x_names_outputs_that_are_not_in_a_batch():
    config = type("Config", (), {"batch_size": BATCH, "seed": 1})()
    call = {k: v for k, v in CALL.items() if k != "batch_size"}
    datasets = eval_get_dataset_fn(train, masked=("tokens",), **call)(config, 0, 1)
    with pytest.raises(ValueError, match="a batch has no .'tokens'."):
        next(iter(datasets["named"]))


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    (
        (named, {"output_map": ["plus"]}, ValueError, r"output_map is \['plus'\].*dict.*'half'"),
        (named, {"output_map": ["plus", "minus", "half", "x"]}, ValueError, "Omit output_map"),
        (named, {"mask": "plus"}, ValueError, r"named '(mask|x|plus)' already.*mask='valid'"),
        (named, {"sharding": {"plus": 1}}, TypeError, "must be a Sharding"),
        (lambda x: {1: x}, {}, TypeError, "with the key 1. Use names"),
        (lambda x: {}, {}, TypeError, "returns no outputs"),
        (lambda x: {"a": x, "v": {"y": x}}, {}, TypeError, "a dict as 'v'.*{'v/y': ...}"),
        (lambda x: {"v": [x, x]}, {}, TypeError, "a list as 'v'.*{'v_0': ..., 'v_1': ...}"),
        (lambda x: {"v": (x, 1)}, {}, TypeError, r"a tuple as 'v'.*fn.stack\(\*v\)"),
        (lambda x: ([x, x],), {"output_map": ["v"]}, TypeError, "nested.* not in a list"),
        (lambda x: (x, x), {}, ValueError, "output_map is empty. Name each output"),
    ),
)
def test_mistakes_name_the_fix(function, options, error, text):
    with pytest.raises(error, match=text):
        next(data_iterator(function, **options)(**CALL))


def test_a_sharding_of_other_outputs_is_rejected():
    sharding = {"plus": rows_over(2), "minus": rows_over(2)}
    with pytest.raises(ValueError, match="entries for .'minus', 'plus'., but the outputs are"):
        next(data_iterator(named, sharding=sharding)(**CALL))
