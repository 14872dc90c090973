"""A bare PartitionSpec refers to the mesh that is current when an iterator is created."""

import contextlib
import pickle
import threading
import warnings

import grain
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def

from dalijax import DALIGenericIterator, data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform

P = PartitionSpec
RECORDS = np.arange(16, dtype=np.int32)


def take(x):
    return x + 0


def function(sharding):
    source = sources.Arrays({"x": RECORDS})
    return data_iterator(take, ["x"], source=source, shuffle=False, sharding=sharding)


def read(shard_id=0, num_shards=1):
    return fn.external_source(
        lambda info: RECORDS[8 * info.iteration + 2 * shard_id :][:2], batch_info=True
    )


@pipeline_def(batch_size=2, num_threads=1, device_id=None)
def handmade(shard):
    return read(shard)


def transformed(sharding):
    ds = grain.MapDataset.source([{"x": x} for x in RECORDS])
    transform = DALITransform(
        take, batch_size=8, output_map=["x"], sharding=sharding, drop_remainder=True
    )
    return ds.pipe(transform)


def loader(sharding):
    sampler = grain.samplers.IndexSampler(16, num_epochs=1, shuffle=False, seed=0)
    options = {"batch_size": 8, "output_map": ["x"], "drop_remainder": True}
    records = [{"x": x} for x in RECORDS]
    return DALIDataLoader(records, sampler, pipeline_fn=take, sharding=sharding, **options)


MAKE = {
    "source": lambda s: function(s)(batch_size=8),
    "stream": lambda s: function(s).stream(1, batch_size=8),
    "reader": lambda s: data_iterator(read, ["x"], size=16, sharding=s)(batch_size=8),
    "handmade": lambda s: DALIGenericIterator(
        [handmade(k) for k in range(4)], ["x"], 16, sharding=s
    ),
    "clu": lambda s: DALIDatasetIterator(function(s), element="jax", batch_size=8),
    "dataset": lambda s: iter(DALIIterDataset(function(s), batch_size=8, drop_remainder=True)),
    "transform": lambda s: iter(transformed(s)),
    "loader": lambda s: iter(loader(s)),
}
CONTEXTS = {
    "auto": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)),
    "explicit": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), (AxisType.Explicit,) * 2)),
    "reversed": lambda: jax.set_mesh(Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("a", "b"))),
    "jax.sharding.set_mesh": lambda: jax.sharding.set_mesh(jax.make_mesh((4, 2), ("a", "b"))),
    "with mesh": lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")),
}


def mesh_in(context):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        entered = contextlib.ExitStack()
        entered.enter_context(context())
    return entered


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_partition_spec_uses_the_current_mesh(make, context):
    with mesh_in(context):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            mesh = context()
        iterator = make(P("a"))
    want = next(make(NamedSharding(mesh, P("a"))))["x"]
    batch = next(iterator)["x"]  # outside the context
    assert batch.sharding == want.sharding == NamedSharding(mesh, P("a"))
    np.testing.assert_array_equal(batch, want)
    np.testing.assert_array_equal(np.ravel(batch), RECORDS[:8])


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_without_a_mesh_the_error_names_the_cure(make):
    cure = r"no mesh is set in this thread.*jax.set_mesh\(mesh\).*NamedSharding\(mesh, P"
    with pytest.raises(ValueError, match=cure):
        make(P("a"))


def test_a_dict_of_specs():
    def two(x):
        return x + 0, x * 2

    make = data_iterator(two, ["x", "y"], source=sources.Arrays({"x": RECORDS}), shuffle=False)
    with mesh_in(CONTEXTS["auto"]):
        mesh = jax.sharding.get_mesh()
        batch = next(make(batch_size=8, sharding={"x": P("a"), "y": P()}))
    assert batch["x"].sharding == NamedSharding(mesh, P("a"))
    assert batch["y"].sharding == NamedSharding(mesh, P())
    np.testing.assert_array_equal(batch["y"], 2 * RECORDS[:8])


def test_functions_and_datasets_are_made_before_the_mesh():
    """They pickle without a mesh, and each iterator uses its own mesh."""
    made = pickle.loads(pickle.dumps(function(P("a")))), transformed(P("a"))
    for context in ("auto", "reversed"):
        with mesh_in(CONTEXTS[context]):
            mesh = jax.sharding.get_mesh()
            iterators = made[0](batch_size=8), iter(made[1])
            spec = grain.experimental.get_element_spec(made[1])
        assert spec["x"].shape == (8,)
        for iterator in iterators:
            batch = next(iterator)["x"]
            assert batch.sharding == NamedSharding(mesh, P("a"))
            np.testing.assert_array_equal(batch, RECORDS[:8])


def test_batches_may_be_taken_in_another_thread():
    with mesh_in(CONTEXTS["explicit"]):
        mesh = jax.sharding.get_mesh()
        iterators = [make(P("a")) for make in MAKE.values()]
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(next(it)["x"] for it in iterators))
    thread.start()
    thread.join()
    assert all(batch.sharding == NamedSharding(mesh, P("a")) for batch in taken)
    assert len(taken) == len(MAKE)


def test_an_axis_that_the_mesh_has_not():
    with mesh_in(CONTEXTS["auto"]), pytest.raises(ValueError, match="'c'"):
        MAKE["source"](P("c"))
