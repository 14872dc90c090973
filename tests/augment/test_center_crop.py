"""`augment.center_crop` without draw equals its windows with draw, over any reader."""

import pathlib

import grain
import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import fn
from PIL import Image

from dalijax import augment, data_iterator, errors, sources
from dalijax.adapters.grain import DALITransform
from dalijax.core.augment.windows import central_crops
from numbered import read_files

SIZES = [(24, 37), (25, 24), (40, 41), (63, 30), (31, 31)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """PNGs of random pixels in several sizes."""
    folder = tmp_path_factory.mktemp("sizes")
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES):
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


def central(path, size):
    """Crops the center of a file in NumPy."""
    image = np.asarray(Image.open(path))
    start, end = central_crops(np.array([image.shape[:2]]), size, None)
    (top, left), (bottom, right) = start[0].astype(int), end[0].astype(int)
    return image[top:bottom, left:right]


@pytest.mark.parametrize("options", ({}, {"resize": 29}, {"resize": 40, "antialias": False}))
@pytest.mark.parametrize("size", (24, (20, 23), (21, 24)))
def test_windows_equal_those_with_draw(paths, size, options):
    def both(data, draw):
        images = fn.decoders.image(data)
        return {
            "with_draw": augment.center_crop(images, size, draw=draw, **options),
            "without": augment.center_crop(images, size, **options),
        }

    call = {"source": sources.Files(paths=paths), "batch_size": len(paths), "shuffle": False}
    with data_iterator(both)(**call) as iterator:
        batch = next(iterator)
    np.testing.assert_array_equal(np.asarray(batch["without"]), np.asarray(batch["with_draw"]))


def test_readers_and_grain(paths):
    size = (22, 23)
    expected = np.stack([central(path, size) for path in paths])

    def read():
        images = fn.decoders.image(read_files(paths)[0])
        return augment.center_crop(images, size)

    with data_iterator(read, ["images"], reader_name="reader")(batch_size=len(paths)) as iterator:
        np.testing.assert_array_equal(np.asarray(next(iterator)["images"]), expected)

    def decode(data):
        return augment.center_crop(fn.decoders.image(data), size)

    records = [{"data": pathlib.Path(path).read_bytes()} for path in paths]
    transform = DALITransform(decode, batch_size=len(paths), output_map=["images"])
    batch = next(iter(grain.MapDataset.source(records).pipe(transform)))
    np.testing.assert_array_equal(batch["images"], expected)


def test_a_later_draw_knows_the_sizes(paths):
    def graph(data, draw):
        images = augment.center_crop(fn.resize(fn.decoders.image(data), size=(50, 60)), 24)
        return augment.random_crop(images, 20, draw=draw)

    call = {"source": sources.Files(paths=paths), "batch_size": len(paths)}
    with data_iterator(graph, ["images"])(**call) as iterator:
        assert next(iterator)["images"].shape == (len(paths), 20, 20, 3)


def test_small_images_are_bad_records():
    def graph(number, data):
        return number, augment.center_crop(fn.decoders.image(data), 17)

    call = {"source": Numbers(4), "batch_size": 4, "shuffle": False, "device_id": None}
    iterator = data_iterator(graph, ["number", "images"])(**call)
    with iterator, pytest.raises(errors.BatchError, match="number 0"):
        next(iterator)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    (
        ({"size": 32, "resize": 24}, ValueError, r"size=\(32, 32\) exceeds resize=24"),
        ({"size": 0}, ValueError, "size"),
        ({"size": 8, "draw": 3}, TypeError, "draw must be the draw argument"),
    ),
)
def test_mistakes_name_the_fix(arguments, error, text):
    def graph(data):
        return augment.center_crop(fn.decoders.image(data), **arguments)

    with pytest.raises(error, match=text):
        data_iterator(graph, ["images"])(source=Numbers(4), batch_size=4, device_id=None)
