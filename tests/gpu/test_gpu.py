"""Tests that need a GPU: mixed decoding, zero-copy, the asynchronous step, exact resume.

Run by `DALIJAX_TEST_GPU=1 python -m pytest tests/gpu` on a machine with a GPU, a JAX that supports
it, and DALI; skipped elsewhere.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import backend, fn, pipeline_def, types
from PIL import Image

from conformance import Expected, check
from conftest import corrupt
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from numbered import read_files
from photographs import BATCH, COUNT, graph, photos  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)


def make(files, augment=False, batch_size=BATCH, call=None, **config):
    config = {"reader_name": "reader", "mask": "mask", **config}
    iterator_fn = data_iterator(graph, ["image", "x"], **config)
    return iterator_fn(files, augment, batch_size=batch_size, **(call or {}))


def decoded(path):
    return np.asarray(Image.open(path), np.float32)


def test_mixed_decoding_gives_the_images(photos):
    iterator = make(photos)
    seen = []
    for batch in iterator:
        assert batch["image"].devices() == batch["x"].devices() == {jax.devices()[0]}
        valid = np.asarray(batch["mask"])
        for image, label in zip(np.asarray(batch["image"])[valid], np.asarray(batch["x"])[valid]):
            mean = decoded(photos[int(label[0])]).mean((0, 1))
            np.testing.assert_allclose(image.astype(np.float32).mean((0, 1)), mean, atol=3)
            seen.append(int(label[0]))
    assert seen == list(range(COUNT))


def test_zero_copy(photos):
    pipeline = pipeline_def(graph)(photos, batch_size=BATCH, num_threads=2, device_id=0)
    iterator = DALIGenericIterator(pipeline, ["image", "x"], reader_name="reader")
    pointers = []
    made = iterator._engine.make_batch

    def recorded(outputs, *more):
        pointers.append([int(out.as_tensor().data_ptr()) for out in outputs[0]])
        return made(outputs, *more)

    iterator._engine.make_batch = recorded
    held = list(iterator)
    assert [[b[k].unsafe_buffer_pointer() for k in ("image", "x")] for b in held] == pointers


def test_arrays_outlive_their_pipelines(photos):
    iterator = make(photos)
    held = list(iterator)
    want = [{k: np.array(v) for k, v in batch.items()} for batch in held]
    iterator.close()
    for _ in range(3):  # would overwrite the buffers if DALI had reclaimed them
        with make(photos, augment=True) as other:
            assert len(list(other)) == len(held)
    for batch, values in zip(held, want, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(np.asarray(array), values[name])


def counting(shape=(64, 224, 224, 3)):
    """Batch k is k everywhere, created by DALI on the GPU."""

    def batch(info):
        return [np.full(shape[1:], info % 256, np.uint8)] * shape[0]

    return fn.cast(fn.external_source(batch).gpu(), dtype=types.FLOAT)


@pytest.mark.parametrize("dynamic,depth,steps", [(True, 1, 300), (True, 2, 300), (False, 2, 100)])
def test_a_heavy_step_reads_its_own_batch(dynamic, depth, steps):
    # DALI issue 5617, with donated inputs and without block_until_ready.
    pipeline = pipeline_def(counting)(
        batch_size=64,
        num_threads=4,
        device_id=0,
        exec_dynamic=dynamic,
        prefetch_queue_depth=depth,
    )
    iterator = DALIGenericIterator(pipeline, ["x"], 10**6)

    def step(x, burn):
        for _ in range(40):
            burn = burn @ burn
            burn = burn / jnp.abs(burn).max()
        x = x + 0 * burn.sum()
        return x.min(), x.max(), x

    step = jax.jit(step, donate_argnums=0)
    burn = jax.random.normal(jax.random.key(0), (2048, 2048))
    seen = [step(next(iterator)["x"], burn)[:2] for _ in range(steps)]
    wrong = [k for k, (a, b) in enumerate(seen) if not float(a) == float(b) == k % 256]
    assert wrong == []


def test_two_thousand_steps_of_mixed_decoding(photos):
    # Checksums inside jit, donated inputs, no block_until_ready, against a blocking run.
    @jax.jit
    def checksum(image, label):
        weights = jnp.arange(image.size, dtype=jnp.float32).reshape(image.shape) % 251
        return (image * weights).sum() + label.sum().astype(jnp.float32)

    burn = jax.random.normal(jax.random.key(0), (1024, 1024))

    def heavy(image, label, burn):
        for _ in range(20):
            burn = burn @ burn
            burn = burn / jnp.abs(burn).max()
        image = image + 0 * burn.sum()
        return checksum(image, label), image

    def run(block):
        iterator = make(photos, augment=True, auto_reset=True)
        step = jax.jit(heavy, donate_argnums=0)
        sums = []
        while len(sums) < 2000:
            for batch in iterator:
                if block:
                    batch = jax.block_until_ready({k: jnp.array(v) for k, v in batch.items()})
                value, _ = step(batch["image"], batch["x"], burn)
                sums.append(value)
                if block:
                    value.block_until_ready()
        return np.asarray(jnp.stack(sums[:2000]))

    free, blocking = run(False), run(True)
    print("wrong batches of 2000:", int((free != blocking).sum()))  # noqa: T201
    assert (free == blocking).all()


def test_conformance_on_a_mixed_pipeline(photos):
    batches = [list(range(k, min(k + BATCH, COUNT))) for k in range(0, COUNT, BATCH)]
    epoch = []
    for own in batches:
        x = own + [COUNT - 1] * (BATCH - len(own))
        epoch.append({"x": np.array(x)[:, None], "mask": np.arange(BATCH) < len(own)})
    check(lambda: make(photos, augment=True), Expected([epoch] * 3))


def test_partial_and_as_numpy_and_devices(photos):
    sizes = [b["image"].shape[0] for b in make(photos, last_batch_policy=LastBatchPolicy.PARTIAL)]
    assert sizes == [6, 6, 6, 2]
    batch = next(make(photos, as_numpy=True))
    assert isinstance(batch["image"], jax.Array) and isinstance(batch["mask"], np.ndarray)

    stacked = next(make(photos, devices=jax.devices()[:1]))
    assert stacked["image"].shape == (1, BATCH, 64, 64, 3) and stacked["mask"].shape == (1, BATCH)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharded = next(make(photos, sharding=NamedSharding(mesh, PartitionSpec("data"))))
    for name in ("image", "x"):
        assert sharded[name].sharding.mesh == mesh
        np.testing.assert_array_equal(np.asarray(sharded[name]), np.asarray(stacked[name][0]))


def test_a_cpu_pipeline_on_a_gpu_machine(photos):
    def pipe():
        data, label = fn.readers.file(files=photos, name="reader")
        return fn.resize(fn.decoders.image(data), size=(8, 8)), label

    iterator_fn = data_iterator(pipe, ["image", "x"], reader_name="reader")
    for device_id in (None, 0):
        batch = next(iterator_fn(batch_size=4, device_id=device_id))
        assert batch["image"].devices() == {jax.local_devices(backend="cpu")[0]}


def drawing(files, gpu):
    """Random operators on the CPU and on the GPU, with equal numbers on both."""
    device = "gpu" if gpu else "cpu"
    data, label = read_files(files, random_shuffle=True, pad_last_batch=True)
    image = fn.decoders.image_random_crop(data, device="mixed" if gpu else "cpu")
    image = fn.random_resized_crop(image, size=(32, 32))
    flip = fn.random.coin_flip()
    image = fn.crop_mirror_normalize(image, mirror=flip, dtype=types.FLOAT)
    drawn = fn.random.uniform(device=device, shape=[4])
    return label, flip, drawn, image


KINDS = {
    "cpu": dict(gpu=False, device_id=None, as_numpy=True),
    "gpu": dict(gpu=True),
    "to the host": dict(gpu=True),
    "older executor": dict(gpu=True, exec_dynamic=False),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("now", KINDS)
def test_a_state_resumes_on_another_device(photos, saved, now):
    names = ["label", "flip", "drawn", "image"]
    iterator_fn = data_iterator(drawing, names, reader_name="reader")
    ours, other = (
        (iterator_fn._for_host(KINDS[kind]) if kind == "to the host" else iterator_fn).stream(
            None, photos, batch_size=BATCH, seed=3, **KINDS[kind]
        )
        for kind in (saved, now)
    )
    for _ in range(6):  # into the second epoch
        next(ours)
    other.set_state(ours.get_state())
    for _ in range(6):
        one, two = next(ours), next(other)
        for name in names[:-1]:
            np.testing.assert_array_equal(one[name], two[name])
        # The GPU's decoder rounds differently.
        alike = 0 if (saved == "cpu") == (now == "cpu") else 2
        np.testing.assert_allclose(one["image"], two["image"], rtol=0, atol=alike)


def test_failures_and_wide_outputs(photos, tmp_path):
    files = []
    for i, path in enumerate(photos):
        files.append(str(tmp_path / f"{i}.jpg"))
        shutil.copy(path, files[-1])
    corrupt(files[7])
    iterator = make(files)
    for _ in range(5):
        for step in range(4):
            if step == 1:
                with pytest.raises(RuntimeError, match="batch 1 of epoch"):
                    next(iterator)
            else:
                assert int(next(iterator)["x"][0, 0]) == step * BATCH
        iterator.reset()

    def wide():
        return fn.cast(counting((2, 2, 2, 1)), dtype=types.INT64)

    with pytest.raises(TypeError, match="'x' is int64.*fn.cast"):
        next(data_iterator(wide, ["x"])(batch_size=2))
