"""Arrays are zero-copy, valid as long as they are referenced, and never overwritten."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types

from dalijax import DALIGenericIterator, data_iterator
from full import FULL

SHAPE = (64, 256)


def counting(shape=SHAPE):
    """Batch k contains k in every element of its two samples."""

    def batch(info):
        return [np.full(shape, info, np.float32)] * 2

    return fn.external_source(batch) + 0.0  # through an operator, so that the buffers are DALI's


def test_host_views_are_zero_copy_read_only_and_stay_alive():
    iterator = data_iterator(counting, ["x"], 200, as_numpy=True)(batch_size=2)
    held = [next(iterator)["x"] for _ in range(50)]
    iterator.close()
    del iterator
    gc.collect()
    for k, view in enumerate(held):
        assert isinstance(view, np.ndarray) and not view.flags.owndata
        assert view.ctypes.data % 64 == 0
        assert (view == k).all()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_jax_arrays_are_placed_without_a_copy():
    pipelines = [
        pipeline_def(counting)(batch_size=2, num_threads=1, device_id=None) for _ in range(2)
    ]
    views = DALIGenericIterator(pipelines[0], ["x"], 200, as_numpy=True)
    view = next(views)["x"]
    array = jax.device_put(view, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == view.ctypes.data  # this test relies on it

    class Seen:
        pointers: list[int] = []

    iterator = DALIGenericIterator(pipelines[1], ["x"], 200)
    place = iterator._engine.make_batch._placement.place

    def recorded(name, pieces):
        Seen.pointers.append(pieces[0].ctypes.data)
        return place(name, pieces)

    iterator._engine.make_batch._placement.place = recorded
    held = [next(iterator)["x"] for _ in range(20)]
    assert [x.unsafe_buffer_pointer() for x in held] == Seen.pointers
    assert [float(x[0, 0, 0]) for x in held] == list(range(20))
    assert all(x.devices() == {jax.devices("cpu")[0]} for x in held)


def test_a_training_step_compiles_once():
    compiled = []

    @jax.jit
    def step(parameter, x):
        compiled.append(1)
        return parameter + x.sum()

    iterator = data_iterator(counting, ["x"], 200)(batch_size=2)
    parameter = jnp.zeros(())
    for _ in range(4):
        parameter = step(parameter, next(iterator)["x"])
    assert step._cache_size() == len(compiled) == 1
    # A batch on the CPU can be combined with parameters that are committed to another device.
    elsewhere = jax.device_put(parameter, jax.devices()[2])
    assert step(elsewhere, next(iterator)["x"]).devices() == {jax.devices()[2]}


@pytest.mark.parametrize("as_numpy", (False, True))
@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("depth", (1, 2))
def test_a_heavy_asynchronous_step_reads_its_own_batch(dynamic, depth, as_numpy):
    # DALI issue 5617: without the dynamic executor, DALI's plugin copies asynchronously and
    # returns the buffer before the copy is finished.
    def step(x, burn):
        for _ in range(20):
            burn = burn @ burn / jnp.linalg.norm(burn)
        # The sum waits for the matrix products, long after the buffer could be reused.
        x = x + 0 * burn.sum()
        return x.min(), x.max(), x

    pipeline = pipeline_def(counting)(
        batch_size=2,
        num_threads=2,
        device_id=None,
        exec_dynamic=dynamic,
        prefetch_queue_depth=depth,
    )
    iterator = DALIGenericIterator(pipeline, ["x"], 1000, as_numpy=as_numpy)
    burn, count = jnp.eye(300) + 0.01, 60 if FULL else 20
    # A donated buffer is returned, or overwritten, as soon as the step can.
    run = jax.jit(step, donate_argnums=() if as_numpy else 0)
    seen = [run(next(iterator)["x"], burn)[:2] for _ in range(count)]
    assert [(float(a), float(b)) for a, b in seen] == [(k, k) for k in range(count)]


def test_partial_batches_are_views_too():
    iterator = data_iterator(
        counting, ["x"], 5, last_batch_policy=policy("PARTIAL"), last_batch_padded=True
    )(batch_size=2)
    assert [b["x"].shape[0] for b in iterator] == [2, 2, 1]


def policy(name):
    from dalijax import LastBatchPolicy

    return LastBatchPolicy[name]


def test_masks_can_be_combined_with_any_device():
    iterator = data_iterator(counting, ["x"], 3, mask="mask", last_batch_padded=True)(batch_size=2)
    batches = list(iterator)
    assert [b["mask"].tolist() for b in batches] == [[True, True], [True, False]]
    assert all(b["mask"].dtype == bool and not b["mask"].committed for b in batches)
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[3])
    assert jnp.where(batches[1]["mask"], elsewhere, 0.0).tolist() == [1.0, 0.0]


def mixed():
    drawn = fn.random.uniform(shape=[2])
    return drawn, drawn.gpu(), fn.copy(drawn.gpu()), types.Constant(3.0)


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("as_numpy", (None, True, False))
def test_dali_copies_gpu_outputs_for_numpy_batches(dynamic, as_numpy):
    """Pipelines are defined but not built; tests/gpu/test_host.py checks the values."""
    iterator_fn = data_iterator(mixed, ["a", "b", "c", "d"], as_numpy=as_numpy)
    call = {"batch_size": 2, "device_id": 0, "exec_dynamic": dynamic}
    for made in (iterator_fn, iterator_fn._for_host(call)):
        source, config = made._prepared((), dict(call))
        asked = made is not iterator_fn
        assert config.as_numpy == (True if asked else as_numpy)
        nodes = source.define()._graph_out
        devices = ["cpu"] * 3 if asked and dynamic else ["cpu", "gpu", "gpu"]
        assert [node.device for node in nodes[:3]] == devices and len(nodes) == 4
    # An explicit setting is kept.
    assert (iterator_fn._for_host(call) is iterator_fn) == (as_numpy is not None)
    assert iterator_fn._for_host({**call, "as_numpy": False}) is iterator_fn
    assert iterator_fn._for_host({**call, "devices": []}) is iterator_fn
