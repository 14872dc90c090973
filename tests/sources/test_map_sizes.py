"""Images that functions of maps return: their sizes and headers are never those of another read."""

import io

import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator
from dalijax.core.random.hashing import fold
from dalijax.core.sources.source import read_records
from dalijax.sources import Mixture, Named, Records, Selection

BATCH, EPOCHS = 4, 3


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


FILES = [png(np.full((64, 64, 3), 20 * k, np.uint8)) for k in range(8)]


def crop(record, rng):
    """Returns an image of random size."""
    pixels = np.asarray(Image.open(io.BytesIO(record["data"])))
    height, width = rng.integers(8, 60, 2)
    return {"data": png(pixels[:height, :width])}


def records(files=FILES):
    return Records([{"data": file} for file in files])


def halves(change):
    return Mixture([(change(records(FILES[:4])), 1), (change(records(FILES[4:])), 1)])


WRAPPED = {
    "random_map": lambda: records().random_map(crop),
    "map of a random_map": lambda: records().random_map(crop).map(dict),
    "Selection": lambda: Selection(records().random_map(crop), [0, 1, 2, 4, 5, 7]),
    "Named": lambda: Named(records().random_map(crop)),
    "Mixture": lambda: halves(lambda source: source.random_map(crop)),
    "map of a Mixture": lambda: halves(lambda source: source).random_map(crop),
}


def graph(data, draw):
    images = fn.decoders.image(data)
    shapes = fn.cast(images.shape(), dtype=types.INT32)
    return shapes, augment.random_resized_crop(images, 8, draw=draw, scale=(0.2, 1))


def iterator_of(source, function=graph, names=("shapes", "images"), **config):
    config = {"shuffle": False, "as_numpy": True, "last_batch_policy": "partial", **config}
    return data_iterator(function, list(names), **config)(source=source, batch_size=BATCH, seed=1)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_windows_fit_the_image_of_their_epoch(wrapped):
    iterator = iterator_of(WRAPPED[wrapped]())
    epochs = [list(iterator) for _ in range(EPOCHS)]
    assert not np.array_equal(epochs[0][0]["shapes"], epochs[1][0]["shapes"])
    for epoch, batches in enumerate(epochs):
        fresh = iterator_of(WRAPPED[wrapped]())  # knows no sizes of other epochs
        fresh.seek_step(epoch * len(batches))
        for batch in batches:
            other = next(fresh)
            for name in ("shapes", "images"):
                np.testing.assert_array_equal(batch[name], other[name])


@pytest.mark.parametrize("make", (lambda source: source, lambda source: Mixture([(source, 1)])))
def test_an_image_that_changes_without_notice_does_not_end_the_process(make):
    """DALI ends the process if a window lies outside of an image."""
    small, large = png(np.zeros((8, 8, 3), np.uint8)), png(np.zeros((400, 400, 3), np.uint8))
    now = [large]
    source = make(records().map(lambda record: {"data": now[0]}, stateful=False))
    iterator = iterator_of(source)
    assert {tuple(shape) for batch in iterator for shape in batch["shapes"]} == {(400, 400, 3)}
    now[0] = small
    shapes = [tuple(shape) for _ in range(4) for batch in iterator for shape in batch["shapes"]]
    assert (8, 8, 3) in shapes


def test_headers_are_checked_in_each_epoch():
    def spoil(record, rng):
        return {"data": record["data"][:20] if rng.random() < 0.3 else record["data"]}

    source = records().random_map(spoil)
    expected = []
    seed, columns = 1, ["data"]
    for epoch in range(EPOCHS):
        keys = fold(seed, epoch, np.arange(8))
        values, errors = read_records(source, np.arange(8), columns, keys)
        assert not errors
        expected.append([len(value) > 20 for value in values["data"]])
    assert len({tuple(mask) for mask in expected}) > 1 and not all(map(all, expected))

    def decode(data):
        return fn.resize(fn.decoders.image(data), size=[8, 8])

    iterator = iterator_of(source, decode, ["images"], on_error="mask", mask="mask")
    masks = [np.concatenate([batch["mask"] for batch in iterator]) for _ in range(EPOCHS)]
    np.testing.assert_array_equal(masks, expected)


def test_windows_take_boxes_and_masks_that_functions_return():
    """Image, mask and boxes of random crops: the box is that of the pixels of its class."""

    def crop_with_mask(record, rng):
        height, width = rng.integers(24, 60, 2)
        top, left = rng.integers(2, 10, 2)
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[top : top + 12, left : left + 9] = 255
        return {
            "data": png(pixels),
            "mask": (pixels[..., :1] > 0).astype(np.uint8),
            "boxes": np.array([[left, top, left + 9, top + 12]], np.float32),
        }

    def windows(data, mask, boxes, draw):
        images = fn.decoders.image(data)
        window = augment.random_window(images, 32, draw=draw, scale=(0.8, 1), flip=0.5)
        moved, count = window.boxes(boxes)
        return window.image(images, antialias=False), window.mask(mask), moved, count

    names = ["images", "masks", "boxes", "counts"]
    iterator = iterator_of(records().random_map(crop_with_mask), windows, names)
    seen = set()
    for batch in [*iterator, *iterator]:
        for image, mask, boxes, count in zip(*(batch[name] for name in names), strict=True):
            np.testing.assert_array_equal(image[..., 0] > 127, mask[..., 0] == 1)
            if not count:
                continue
            rows, columns = (np.flatnonzero((mask[..., 0] == 1).any(axis=axis)) for axis in (1, 0))
            edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            np.testing.assert_allclose(boxes[0], edges, atol=1.01)
            seen.add(tuple(edges))
    assert len(seen) > 8
