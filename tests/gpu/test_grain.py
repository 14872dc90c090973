"""Grain's adapters on a GPU: training resumes bit for bit, and workers are refused."""

import os
import pathlib

import absl.flags
import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from nvidia.dali import backend, fn

from dalijax.adapters.grain import DALIIterDataset, DALITransform, pack_records
from numbered import read_files
from photographs import photos  # noqa: F401 - a fixture
from programs import run_python

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() == "cpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
SCRIPT = pathlib.Path(__file__).parent.parent.parent / "examples" / "grain_train.py"


def train(tmp_path, out, steps):
    """Runs the example up to a step and returns its weights there."""
    options = ["--cache", tmp_path / "cache", "--count", "400", "--save-every", "10"]
    flags = "--xla_gpu_deterministic_ops=true"
    command = [SCRIPT, *options, "--steps", steps, "--out", tmp_path / out]
    run_python(*command, env={**os.environ, "XLA_FLAGS": flags})
    checkpoint = tmp_path / out / "checkpoints" / str(steps) / "state"
    return jax.tree.leaves(ocp.StandardCheckpointer().restore(checkpoint))


def test_a_restored_run_has_the_weights_of_one_that_was_not_stopped(tmp_path):
    straight = train(tmp_path, "straight", 40)
    train(tmp_path, "stopped", 20)
    resumed = train(tmp_path, "stopped", 40)
    for a, b in zip(straight, resumed, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def decoded(image):
    return fn.resize(fn.decoders.image(image, device="mixed"), size=(16, 16))


def test_elements_are_jax_arrays_and_a_graph_leaves_the_gpu_to_the_main_process(photos):
    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS.mark_as_parsed()
    records = grain.MapDataset.source([pathlib.Path(f).read_bytes() for f in photos[:8]])
    transform = DALITransform(decoded, batch_size=4, output_map=["x"])
    batches = list(records.pipe(transform))
    assert all(isinstance(batch["x"], jax.Array) for batch in batches)
    assert {d.platform for batch in batches for d in batch["x"].devices()} == {"gpu"}
    options = grain.MultiprocessingOptions(num_workers=1)
    with pytest.raises(RuntimeError, match="a GPU pipeline in a worker process"):
        next(iter(records.pipe(transform).mp_prefetch(options)))
    # The alternative: workers send batches of encoded bytes.
    for batch_fn in (list, pack_records):
        encoded = records.batch(4, batch_fn=batch_fn).to_iter_dataset().mp_prefetch(options)
        for own, other in zip(encoded.pipe(transform), batches, strict=True):
            np.testing.assert_array_equal(own["x"], other["x"])


def read(files, shard_id=0, num_shards=1):
    data, label = read_files(files, pad_last_batch=True)
    return fn.resize(fn.decoders.image(data, device="mixed"), size=(16, 16)), label.gpu()


def test_a_source_resumes_on_the_gpu(photos):
    names = {"output_map": ["image", "x"], "reader_name": "reader"}
    ds = DALIIterDataset(read, files=photos[:10], batch_size=4, num_epochs=2, **names)
    iterator, states, batches = iter(ds), [], []
    while True:
        states.append(iterator.get_state())
        batch = next(iterator, None)
        if batch is None:
            break
        batches.append({k: np.asarray(v) for k, v in batch.items()})
        assert isinstance(batch["image"], jax.Array)
    for k, state in enumerate(states):
        other = iter(ds)
        other.set_state(state)
        for own, want in zip(other, batches[k:], strict=True):
            np.testing.assert_array_equal(own["image"], want["image"])
            np.testing.assert_array_equal(own["x"], want["x"])
