"""Outputs of dtype bfloat16, which DALI lacks, in iterators, states and adapters."""

import json

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from shardings import rows_over

from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator, errors, sources
from dalijax import fn as jax_fn
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from numbered import read_files

N, BATCH = 12, 4
VALUES = np.random.default_rng(3).normal(size=(N, 5)).astype(np.float32)
ROUNDED = np.asarray(jnp.asarray(VALUES).astype(jnp.bfloat16))


def graph(x, dtype="bfloat16"):
    return jax_fn.cast(x, dtype), x


train = data_iterator(graph, ["y", "x"])
CALL = {
    "source": sources.Arrays({"x": VALUES}),
    "batch_size": BATCH,
    "shuffle": False,
    "device_id": None,
}


def check(batch, first=0, count=BATCH):
    """Compares a batch with NumPy."""
    rows = slice(first, first + count)
    assert batch["y"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["y"]), ROUNDED[rows])
    np.testing.assert_array_equal(np.asarray(batch["x"]), VALUES[rows])


@pytest.mark.parametrize(
    "options",
    ({}, {"as_numpy": True}, {"sharding": (2,)}, {"sharding": (2, 2)}, {"devices": 2}),
    ids=str,
)
def test_batches_and_specs(options):
    call = {**CALL, **options}
    if "sharding" in call:
        call["sharding"] = rows_over(*call["sharding"])
    if "devices" in call:
        call["devices"] = jax.devices()[: call["devices"]]
    if len({"sharding", "devices"} & set(call)):
        del call["device_id"]
    with train(**call) as iterator:
        spec, batch = iterator.element_spec, next(iterator)
    assert spec["y"].dtype == jnp.bfloat16
    assert spec["y"].shape == batch["y"].shape
    assert isinstance(batch["y"], np.ndarray if call.get("as_numpy") else jax.Array)
    if "devices" in call:
        batch = {k: np.concatenate(np.asarray(v)) for k, v in batch.items()}
    check(batch)


def reader_graph(files, dtype="bfloat16", scale=7):
    x = fn.cast(read_files(files, pad_last_batch=True)[1], dtype=types.FLOAT) / scale
    return jax_fn.cast(x, dtype), x


read = data_iterator(reader_graph, ["y", "x"], reader_name="reader")


@pytest.mark.parametrize("policy", LastBatchPolicy)
@pytest.mark.parametrize("dynamic", (True, False))
def test_a_reader_with_every_executor_and_policy(jpegs_many, dynamic, policy):
    call = {"batch_size": BATCH, "exec_dynamic": dynamic, "last_batch_policy": policy}
    with read(files=jpegs_many[:N], **call) as iterator:
        for batch in iterator:
            assert batch["y"].dtype == jnp.bfloat16
            expected = np.asarray(batch["x"]).astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(batch["y"]), expected)


def test_pipelines_of_pipeline_def_also_after_a_restore(jpegs_many):
    pipeline = pipeline_def(reader_graph)(
        jpegs_many[:N], batch_size=BATCH, num_threads=1, device_id=None, enable_checkpointing=True
    )
    iterator = DALIGenericIterator(pipeline, ["y", "x"], reader_name="reader")
    state, batch = iterator.get_state(), next(iterator)
    iterator.set_state(state)
    again = next(iterator)
    assert batch["y"].dtype == again["y"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["y"]), np.asarray(again["y"]))


def over_files(dtype, files):
    return read(files=files, dtype=dtype, batch_size=BATCH)


def over_arrays(dtype, files):
    return train(**CALL, dtype=dtype)


@pytest.mark.parametrize("make", (over_files, over_arrays))
def test_states_of_another_dtype_are_rejected_unless_allowed(make, jpegs_many):
    with make("float32", jpegs_many) as iterator, make("bfloat16", jpegs_many) as other:
        next(iterator)
        next(other)
        plain, rounded = iterator.get_state(), other.get_state()
        expected, expected_rounded = next(iterator), next(other)
        for target, state in ((other, plain), (iterator, rounded)):
            with pytest.raises(errors.StateError, match="operators.bfloat16"):
                target.set_state(json.dumps(state))
            allow = ["operators.bfloat16", "operators.connections", "operators.cast"]
            target.set_state(state, allow=allow)
            following = next(target)
            wanted = expected if target is iterator else expected_rounded
            np.testing.assert_array_equal(np.asarray(following["y"]), np.asarray(wanted["y"]))
            assert following["y"].dtype == wanted["y"].dtype


def test_batch_map_takes_them():
    def doubled(batch, key):
        return {**batch, "y": batch["y"] * 2}

    with train(**CALL, batch_map=doubled) as iterator:
        spec, batch = iterator.element_spec, next(iterator)
    assert spec["y"].dtype == batch["y"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["y"]), ROUNDED[:BATCH] * 2)


def records():
    return grain.MapDataset.source([{"x": row} for row in VALUES])


def of_clu():
    return next(DALIDatasetIterator(train, **CALL))


def of_clu_as_jax():
    return next(DALIDatasetIterator(train, element="jax", **CALL))


def of_tfdata():
    element = next(iter(DALIDataset(train, **CALL)))
    return {name: array.numpy() for name, array in element.items()}


def of_tensorflow():
    ds = DALIDataset(train, **CALL).to_tf_dataset()
    assert ds.element_spec["y"].dtype.name == "bfloat16"
    return next(ds.as_numpy_iterator())


def of_transform():
    return next(iter(records().pipe(DALITransform(graph, output_map=["y", "x"], batch_size=BATCH))))


def of_iter_dataset():
    return next(iter(DALIIterDataset(train, **CALL)))


def of_loader():
    sampler = grain.samplers.IndexSampler(
        N, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=0
    )
    source = [{"x": row} for row in VALUES]
    loader = DALIDataLoader(
        source, sampler, pipeline_fn=graph, batch_size=BATCH, output_map=["y", "x"]
    )
    return next(iter(loader))


@pytest.mark.parametrize(
    "first",
    (of_clu, of_clu_as_jax, of_tfdata, of_tensorflow, of_transform, of_iter_dataset, of_loader),
)
def test_adapters_agree(first):
    check(first())


def test_only_outputs_can_be_bfloat16():
    def used(x):
        return jax_fn.cast(x, "bfloat16") * 2, x

    def used_and_returned(x):
        y = jax_fn.cast(x, "bfloat16")
        return y, fn.flip(y)

    def in_a_branch(x):
        if fn.random.coin_flip():  # noqa: SIM108
            y = jax_fn.cast(x, "bfloat16")
        else:
            y = x
        return y, x

    for function, operator in (
        (used, "fn.mul"),
        (used_and_returned, "fn.flip"),
        (in_a_branch, "an if statement"),
    ):
        iterator_fn = data_iterator(function, ["y", "x"])
        conditionals = function is in_a_branch
        with pytest.raises(TypeError, match=f"{operator} takes .* at the end of the graph"):
            iterator_fn(**CALL, enable_conditionals=conditionals)


def test_other_dtypes_are_those_of_dali():
    def cast(x):
        return jax_fn.cast(x * 10, "int16"), jax_fn.cast(x, types.FLOAT16)

    with data_iterator(cast, ["i", "h"])(**CALL) as iterator:
        batch = next(iterator)
    assert (batch["i"].dtype, batch["h"].dtype) == (np.int16, np.float16)
    np.testing.assert_array_equal(np.asarray(batch["h"]), VALUES[:BATCH].astype(np.float16))
    for dtype, text in (("int4", "DALI does not support"), ("f1", "must be a dtype")):
        with pytest.raises(TypeError, match=text):
            train(**CALL, dtype=dtype)
