"""Sources on GPUs: ids, masks and random numbers of any layout, pixels within the rounding."""

import itertools
import json
import pathlib

import bad_image_worker
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import backend, fn

from dalijax import augment, data_iterator, sources
from photographs import photos  # noqa: F401 - a fixture
from programs import run_python

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
GPUS = jax.local_device_count()
LAYOUTS = ["cpu", "gpu", "sharded over one", *(["sharded over two"] if GPUS > 1 else [])]
BATCH = 6


def graph(data, label, *, draw, device="mixed"):
    images = fn.decoders.image(data, device=device)
    window = draw.compute(lambda u, sizes: sizes + u, (2,), np.float32, images=images)
    images = augment.random_resized_crop(images, 32, draw=draw, name="crop")
    images = augment.color_jitter(images, draw=draw, brightness=0.2, name="jitter")
    images = augment.grayscale(images, draw=draw, probability=0.5, name="gray")
    images = augment.gaussian_blur(images, 5, draw=draw, probability=0.5, name="blur")
    u = draw.uniform(name="u")
    u = u.gpu() if device == "mixed" else u
    return augment.flip(images, draw=draw, name="flip"), label, u, window


def over(photos, layout, batch=BATCH, seed=None, on_host=()):
    source = sources.Files(paths=photos, labels=list(range(len(photos))))
    more = {"device": "mixed"}
    if layout == "cpu":
        more = {"device": "cpu", "device_id": None}
    config = {}
    if layout.startswith("sharded"):
        devices = jax.local_devices()[: 2 if layout.endswith("two") else 1]
        rows = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec("d"))
        names = ("image", "id", "u", "window")
        config["sharding"] = {name: None if name in on_host else rows for name in names}
    make = data_iterator(graph, ["image", "id", "u", "window"], mask="mask", **config)
    return make(source=source, batch_size=batch, seed=seed, num_threads=2, **more)


def rows_of(iterator, batches):
    out = [{k: np.asarray(v) for k, v in next(iterator).items()} for _ in range(batches)]
    return {k: np.concatenate([batch[k] for batch in out]) for k in out[0]}


def check(rows, reference):
    for name in ("id", "u", "window", "mask"):
        np.testing.assert_array_equal(rows[name], reference[name], name)
    # Which images the hardware decodes depends on the batch.
    off = np.abs(rows["image"].astype(int) - reference["image"].astype(int))
    assert off.mean() < 2 and np.quantile(off, 0.99) < 16


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_one_decoder_gives_the_same_pixels_in_any_batch(photos, load):
    def decode(data, label):
        images = fn.decoders.image(data, device="mixed", hw_decoder_load=load)
        return fn.crop(images, crop=(64, 64)), label

    def decoded(batch, **options):
        make = data_iterator(decode, ["image", "id"], source=source, mask="mask")
        batches = make(batch_size=batch, num_threads=2, **options)
        return {
            int(label): np.asarray(image)
            for b in batches
            for image, label, valid in zip(b["image"], b["id"], b["mask"])
            if valid
        }

    source = sources.Files(paths=photos, labels=list(range(len(photos))))
    expected = decoded(len(photos), shuffle=False)
    for batch, seed in itertools.product((1, BATCH, len(photos)), (1, 2)):
        seen = decoded(batch, seed=seed)
        assert len(seen) == len(photos)
        for label, image in seen.items():
            np.testing.assert_array_equal(image, expected[label])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_records_and_the_numbers_of_a_cpu(photos, layout):
    reference = rows_of(over(photos, "cpu", seed=7), len(photos) // BATCH)
    check(rows_of(over(photos, layout, seed=7), len(photos) // BATCH), reference)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_a_state_resumes_on_any_layout(photos, first, second):
    saved = over(photos, first, seed=7)
    rows_of(saved, 2)
    state = json.loads(json.dumps(saved.get_state()))
    reference = rows_of(saved, 2)
    saved.close()
    for batch, batches in ((BATCH, 2), (2 * BATCH, 1)):
        other = over(photos, second, batch)
        other.set_state(state)
        check(rows_of(other, batches), reference)
        other.close()


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "sharded" in layout])
def test_outputs_that_stay_on_the_host(photos, layout):
    names = ("image", "u")
    wanted, found = (over(photos, layout, seed=3, on_host=names_) for names_ in ((), names))
    for _ in range(3):
        batches = next(wanted), next(found)
        for name, array in batches[1].items():
            assert isinstance(array, np.ndarray if name in names else jax.Array), name
            np.testing.assert_array_equal(np.asarray(array), np.asarray(batches[0][name]), name)


def test_moves_drop_batches_that_a_gpu_has_prepared(photos):
    iterator = over(photos, "gpu", seed=7)
    every = rows_of(iterator, len(photos) // BATCH)
    for step in (2, 0, 2, 1, 1):
        iterator.seek(0, step)
        rows = rows_of(iterator, 1)
        part = {k: v[step * BATCH : (step + 1) * BATCH] for k, v in every.items()}
        check(rows, part)
    iterator.close()


@pytest.mark.parametrize(
    ("how", "bad"),
    [("records", "empty"), ("files", "text"), ("record paths", "cut"), ("grain", "gif")],
)
def test_an_invalid_image_is_masked_in_a_large_batch(how, bad):
    done = run_python(pathlib.Path(bad_image_worker.__file__), f"{how}:{bad}", "mixed")
    assert json.loads(done.stdout) == bad_image_worker.MASKS
