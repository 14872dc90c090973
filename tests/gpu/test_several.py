"""Tests that need several GPUs: every mesh gets its rows, decoded once, in place."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import backend, types
from nvidia.dali import fn as dali_fn

from dalijax import data_iterator, fn
from photographs import graph, photos  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() < 2 or jax.device_count() < 2,
    reason="needs two GPUs, and DALIJAX_TEST_GPU=1",
)


@pytest.mark.parametrize("order", ("in order", "reversed"))
@pytest.mark.parametrize("shape,spec", [((2, 1), ("a",)), ((1, 2), ("a",)), ((1, 2), (None, "b"))])
def test_meshes(photos, shape, spec, order):
    devices = jax.devices()[:2] if order == "in order" else jax.devices()[1::-1]
    mesh = Mesh(np.array(devices).reshape(shape), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    by_rows = NamedSharding(mesh, PartitionSpec(*spec[:1]))
    iterator = data_iterator(
        graph,
        ["image", "x"],
        reader_name="reader",
        mask="mask",
        sharding={"image": sharding, "x": by_rows},
    )(photos, batch_size=8)
    shards = shape[0]
    assert len(iterator._engine.prepare().pipelines) == shards
    reference = [
        iter(
            data_iterator(graph, ["image", "x"], reader_name="reader", mask="mask")(
                photos, False, s, shards, batch_size=8 // shards, seed=s
            )
        )
        for s in range(shards)
    ]
    made, seen = iterator._engine.make_batch, []

    def recorded(outputs, *more):
        pointers = [int(own[1].as_tensor().data_ptr()) for own in outputs]
        batch = made(outputs, *more)
        pieces = {s.device: s.data.unsafe_buffer_pointer() for s in batch["x"].addressable_shards}
        seen.append(all(p in pieces.values() for p in pointers))
        return batch

    iterator._engine.make_batch = recorded
    counted = []
    for batch in iterator:
        own = [next(it) for it in reference]
        for name in ("image", "x", "mask"):
            want = np.concatenate([np.asarray(b[name]) for b in own])
            array = batch[name]
            where = array.sharding.devices_indices_map(array.shape)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), want[where[shard.device]])
        counted += np.asarray(batch["x"])[np.asarray(batch["mask"])].ravel().tolist()
    assert sorted(counted) == list(range(len(photos)))
    assert seen and all(seen)  # labels stay in DALI's memory
    jax.debug.visualize_array_sharding(batch["x"])


@pytest.mark.parametrize("spec", ("d", None))
def test_batch_map(photos, spec):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec(spec))

    def centered(batch, key):
        x = batch["x"]
        return {"x": x, "c": x - x.mean(), "f": x[::-1] + jax.random.uniform(key)}

    def of_files(files, shard_id=0, num_shards=1):
        _, label = graph(files, shard_id=shard_id, num_shards=num_shards)
        return dali_fn.cast(label, dtype=types.FLOAT)

    def started():
        settings = {"reader_name": "reader", "sharding": sharding, "batch_map": centered}
        return data_iterator(of_files, ["x"], **settings)(photos[:16], batch_size=8)

    iterator, states, batches = started(), [], []
    for batch in iterator:
        x, c, f = (np.asarray(batch[name]).ravel() for name in "xcf")
        np.testing.assert_allclose(c, x - x.mean(), rtol=1e-6)
        drawn = f - x[::-1]
        np.testing.assert_allclose(drawn, drawn[0], rtol=1e-5, atol=1e-5)
        assert batch["c"].sharding == sharding
        states.append(iterator.get_state())
        batches.append(f)
    assert len(batches) == 2
    other = started()
    other.set_state(states[0])
    np.testing.assert_array_equal(np.asarray(next(other)["f"]).ravel(), batches[1])


def test_batch_map_next_to_a_step(photos):
    """Both use collectives, which the GPUs must start in the same order."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d"))

    def centered(batch, key):
        x = batch["x"]
        return {"x": x, "c": x - x.mean(), "f": x[::-1]}

    @jax.jit
    def step(weight, x):
        work = jax.numpy.full((2048, 2048), 1e-3)
        for _ in range(4):
            work = work @ work
        return weight + x.mean() + 0 * (work[0, 0] + x[::-1].sum())

    def of_files(files, shard_id=0, num_shards=1):
        _, label = graph(files, shard_id=shard_id, num_shards=num_shards)
        return dali_fn.cast(label, dtype=types.FLOAT)

    settings = {"reader_name": "reader", "sharding": sharding, "batch_map": centered}
    made = data_iterator(of_files, ["x"], auto_reset=True, **settings)
    iterator, weight, batches = made(photos[:48], batch_size=8), jax.numpy.zeros(()), []
    while len(batches) < 120:
        for batch in iterator:
            weight = step(weight, batch["c"])
            batches.append(batch)
    for batch in batches:
        x, c, f = (np.asarray(batch[name]).ravel() for name in "xcf")
        np.testing.assert_allclose(c, x - x.mean(), rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(f, x[::-1])
    assert abs(float(weight)) < 1e-2


def test_dali_waits_for_cupys_batches_on_each_gpu(photos):
    cupy = pytest.importorskip("cupy")
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d"))
    streams = {}

    def doubled(samples):
        device = cupy.cuda.runtime.getDevice()
        if device not in streams:
            streams[device] = cupy.cuda.Stream(non_blocking=True)
        streams[device].use()
        idle = work = cupy.full((2048, 2048), 1e-3, cupy.float32)
        for _ in range(20):
            idle = idle @ work
        return [cupy.from_dlpack(x) * 2 + 0 * idle[0, 0] for x in samples]

    def of_files(files, shard_id=0, num_shards=1):
        _, label = graph(files, shard_id=shard_id, num_shards=num_shards)
        x = dali_fn.cast(label, dtype=types.FLOAT)
        function = {"function": doubled, "batch_processing": True, "stateful": False}
        return x, dali_fn.copy(fn.dl_tensor_python_function(x, **function))

    made = data_iterator(of_files, ["x", "c"], reader_name="reader", sharding=sharding)
    iterator, rows = made(photos, batch_size=8), []
    for batch in iterator:
        x, c = (np.asarray(batch[name]).ravel() for name in "xc")
        np.testing.assert_array_equal(c, 2 * x)
        rows += x.tolist()
    assert set(rows) == set(range(len(photos)))
    assert set(streams) == {0, 1}


def test_functions_without_inputs_are_on_their_own_gpu(photos):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d"))
    devices = []

    @fn.jax_function(device="gpu", stateful=False)
    def counted():
        return np.arange(4, dtype=np.float32)[:, None]

    @fn.jax_function(stateful=False)
    def seen(x):
        devices.append(x.devices())
        return x

    def of_files(files, shard_id=0, num_shards=1):
        _, label = graph(files, shard_id=shard_id, num_shards=num_shards)
        return label, seen(counted())

    made = data_iterator(of_files, ["x", "c"], reader_name="reader", sharding=sharding)
    for batch in made(photos, batch_size=8):
        np.testing.assert_array_equal(np.asarray(batch["c"]).ravel(), [0, 1, 2, 3, 0, 1, 2, 3])
    assert {next(iter(own)) for own in devices} == set(jax.devices()[:2])
