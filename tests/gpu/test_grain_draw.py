"""`draw` in graphs of Grain's adapters on GPUs: a CPU's numbers, and pixels within the rounding."""

import itertools
import pathlib

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import backend, fn

from dalijax import augment
from dalijax.adapters.grain import DALIDataLoader, DALITransform
from dalijax.fn import read_file
from photographs import photos  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
GPUS = jax.local_device_count()
LAYOUTS = ["cpu", "gpu", "sharded over one", *(["sharded over two"] if GPUS > 1 else [])]
BATCH = 6


def graph(image, id, *, draw, device="mixed"):
    images = fn.decoders.image(image, device=device)
    window = draw.compute(lambda u, sizes: sizes + u, (2,), np.float32, images=images)
    images = augment.random_resized_crop(images, 32, draw=draw, name="crop")
    u = draw.uniform(name="u")
    u = u.gpu() if device == "mixed" else u
    return augment.flip(images, draw=draw, name="flip"), id + 0, u, window


def graph_of_paths(image, id, *, draw, device="mixed"):
    return graph(read_file(image), id, draw=draw, device=device)


def options(layout):
    more = {"output_map": ["image", "id", "u", "window"], "pad": "mask", "num_threads": 2}
    if layout == "cpu":
        more |= {"device": "cpu", "device_id": None}
    if layout.startswith("sharded"):
        devices = jax.local_devices()[: 2 if layout.endswith("two") else 1]
        more["sharding"] = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec("d"))
    return more


def records(photos):
    files = map(pathlib.Path, photos)
    return [{"image": path.read_bytes(), "id": np.int32(k)} for k, path in enumerate(files)]


def rows_of(iterator):
    out = [{k: np.asarray(v) for k, v in batch.items()} for batch in iterator]
    return {k: np.concatenate([batch[k] for batch in out]) for k in out[0]}


def check(rows, reference):
    valid = reference["mask"]
    for name in ("id", "u", "window", "mask"):
        np.testing.assert_array_equal(rows[name][valid], reference[name][valid], name)
    off = np.abs(rows["image"][valid].astype(int) - reference["image"][valid].astype(int))
    assert off.mean() < 2 and np.quantile(off, 0.99) < 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transform_draws_the_numbers_of_a_cpu(photos, layout):
    ds = grain.MapDataset.source(records(photos))

    def over(layout):
        return iter(ds.pipe(DALITransform(graph, batch_size=BATCH, seed=7, **options(layout))))

    check(rows_of(over(layout)), rows_of(over("cpu")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_paths_equal_images_of_bytes(photos, layout):
    paths = [{"image": str(path), "id": np.int32(k)} for k, path in enumerate(photos)]

    def over(records, graph, layout):
        ds = grain.MapDataset.source(records)
        return iter(ds.pipe(DALITransform(graph, batch_size=BATCH, seed=7, **options(layout))))

    check(
        rows_of(over(paths, graph_of_paths, layout)), rows_of(over(records(photos), graph, "cpu"))
    )


@pytest.mark.parametrize(("first", "second"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_a_loader_resumes_on_any_layout(photos, first, second):
    sampler = grain.samplers.IndexSampler(len(photos), shuffle=True, num_epochs=1, seed=3)

    def over(layout):
        return iter(
            DALIDataLoader(
                records(photos),
                sampler,
                pipeline_fn=graph,
                batch_size=BATCH,
                seed=7,
                **options(layout),
            )
        )

    reference = over("cpu")
    for _ in range(2):
        next(reference)
    saved = over(first)
    for _ in range(2):
        next(saved)
    rest = over(second)
    rest.set_state(saved.get_state())
    check(rows_of(rest), rows_of(reference))
