"""Mistakes with windows are refused, with the value and the cure, and not trained on."""

import io

import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError

HEIGHT, WIDTH = 40, 60
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
BOXES = np.array([[2, 3, 20, 30], [30, 10, 50, 35]], np.float32)


def encoded(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


RECORD = {
    "data": encoded(PIXELS),
    "mask": PIXELS[..., 0].copy(),
    "boxes": BOXES,
    "ids": np.array([4, 5]),
    "points": BOXES.reshape(2, 2, 2).copy(),
    "visible": np.full((2, 2), 2, np.int32),
}


def first(function, records=None, fields=None, **call):
    """Returns the first batch of a graph function's output, an array [1, ...]."""
    records = [RECORD] if records is None else records
    iterator = data_iterator(function, output_map=["x"], shuffle=False)
    source = sources.Records(records) if fields is None else Declared(records, fields)
    return np.asarray(next(iterator(source=source, batch_size=len(records), **call))["x"])


class Declared(sources.Source):
    """A source that returns values as they are, whatever its fields declare."""

    def __init__(self, records, fields):
        self.records, self.fields = records, fields

    def __len__(self):
        return len(self.records)

    def identity(self):
        return "declared"

    def read(self, indices, names):
        return {name: [self.records[int(k)][name] for k in indices] for name in names}


# Values outside of the image


MAKERS = {
    "fit": lambda x, draw: augment.fit_window(x, 64, draw=draw),
    "center": lambda x, draw: augment.center_window(x, 64),
    "crop": lambda x, draw: augment.crop_window(x, 64, padding=20, draw=draw),
    "affine": lambda x, draw: augment.affine_window(x, 64, draw=draw),
}


def read_files(folder, pairs):
    """Returns a function that reads pairs of an image and a mask by DALI's readers."""
    for kind, images in zip(("images", "masks"), zip(*pairs)):
        (folder / kind / "0").mkdir(parents=True)
        for number, image in enumerate(images):
            (folder / kind / "0" / f"{number}.png").write_bytes(encoded(image))

    def read():
        files = [
            fn.readers.file(file_root=str(folder / kind), name=kind)[0]
            for kind in ("images", "masks")
        ]
        return fn.decoders.image(files[0]), fn.decoders.image(files[1], output_type=types.GRAY)

    return read


def test_names_of_parts_are_taken():
    def after(data, boxes, *, draw):
        window = augment.random_window(fn.decoders.image(data), 64, draw=draw, name="a")
        boxes = window.boxes(boxes)[0]
        return boxes[0, 0] + draw.uniform(name="a.boxes.0")

    def before(data, boxes, *, draw):
        number = draw.uniform(name="a.boxes.0")
        window = augment.random_window(fn.decoders.image(data), 64, draw=draw, name="a")
        return window.boxes(boxes)[0][0, 0] + number

    for graph in (after, before):
        with pytest.raises(ValueError, match=r"two draws have the name 'a.boxes.0'"):
            first(graph)


def test_masks_in_branches():
    def branches(data, mask, *, draw):
        image = fn.decoders.image(data)
        window = augment.fit_window(image, 60, draw=draw)
        if draw.coin_flip(1.0):
            result = window.mask(mask, fill=7)
        else:
            result = augment.crop_window(mask, 60, padding=20, draw=draw).mask(mask)
        return result

    result = first(branches, enable_conditionals=True)
    np.testing.assert_array_equal(result[0, :HEIGHT], RECORD["mask"])
    np.testing.assert_array_equal(result[0, HEIGHT:], 7)


# Records


def refused(function, record, text, **call):
    """Checks that the second of two records is refused with a text, and the first is not."""
    with pytest.raises(BatchError, match=text) as raised:
        first(function, [RECORD, {**RECORD, **record}], **call)
    assert "record 1" in str(raised.value)


def points_of(data, points, visible, *, draw):
    window = augment.fit_window(fn.decoders.image(data), 120, draw=draw)
    points, visible, _ = window.points(points, visible, max_points=2)
    return fn.cat(points, fn.expand_dims(fn.cast(visible, dtype=types.FLOAT), axes=2), axis=2)


def boxes_of(data, boxes, ids, *, draw):
    window = augment.fit_window(fn.decoders.image(data), 120, draw=draw)
    boxes, ids, _ = window.boxes(boxes, ids, max_boxes=2)
    return fn.cat(boxes, fn.expand_dims(fn.cast(ids, dtype=types.FLOAT), axes=1), axis=1)


FIELDS = {
    "data": sources.Field(np.uint8, 1),
    "boxes": sources.Field(np.float32, 2),
    "ids": sources.Field(np.int64, 1),
}


def test_declared_sizes_do_not_replace_those_of_headers():
    def graph(data, *, draw):
        image = draw.sized(fn.decoders.image(data), (300, 300))
        return augment.fit_window(image, 60, draw=draw).matrix()

    np.testing.assert_allclose(first(graph)[0], np.eye(3))
