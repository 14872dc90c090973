"""Mistakes with windows are refused, with the value and the cure, and not trained on."""

import io

import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError, StateError

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


def test_states_contain_the_orientation():
    def iterator(orientation):
        @data_iterator(output_map=["x"], shuffle=False)
        def graph(data, boxes, *, draw):
            window = augment.fit_window(fn.decoders.image(data), 64, draw=draw)
            return window.boxes(boxes, orientation=orientation)[0]

        return graph(source=sources.Records([RECORD] * 4), batch_size=1)

    first_iterator = iterator("any")
    next(first_iterator)
    with pytest.raises(StateError, match="orientation"):
        iterator("equal").set_state(first_iterator.get_state())


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


def test_the_visibility_has_the_shape_of_the_points():
    result = first(points_of)[0]
    np.testing.assert_allclose(result[..., :2], RECORD["points"] * 2)
    np.testing.assert_array_equal(result[..., 2], 2)
    refused(points_of, {"visible": np.ones((2, 1), np.int32)}, r"visible must be .*\[n, 2\]")
    refused(points_of, {"visible": np.ones((1, 2), np.int32)}, "visible has 1 rows")
    for visible in (np.ones(2, np.int32), np.ones((2, 2, 2), np.int32)):
        with pytest.raises(TypeError, match=r"visible must be a field \[n, 2\]"):
            first(points_of, [{**RECORD, "visible": visible}])
    with pytest.raises(TypeError, match="visible .*integers or booleans.*float32"):
        first(points_of, [{**RECORD, "visible": np.ones((2, 2), np.float32)}])
    flags = first(points_of, [{**RECORD, "visible": np.ones((2, 2), bool)}])
    np.testing.assert_array_equal(flags[0, ..., 2], 1)


def boxes_of(data, boxes, ids, *, draw):
    window = augment.fit_window(fn.decoders.image(data), 120, draw=draw)
    boxes, ids, _ = window.boxes(boxes, ids, max_boxes=2)
    return fn.cat(boxes, fn.expand_dims(fn.cast(ids, dtype=types.FLOAT), axes=1), axis=1)


FIELDS = {
    "data": sources.Field(np.uint8, 1),
    "boxes": sources.Field(np.float32, 2),
    "ids": sources.Field(np.int64, 1),
}


@pytest.mark.parametrize(
    "record",
    (
        {"ids": np.array([1.5, 2.5])},
        {"ids": np.array([1.5, np.nan], np.float32)},
        {"ids": np.array([1, 2], np.uint64)},
        {"boxes": BOXES.astype(np.float64)},
        {"boxes": BOXES.astype(np.int64)},
    ),
    ids=str,
)
def test_values_of_another_dtype_than_declared_are_refused(record):
    ((name, values),) = record.items()
    text = f"{name} .*{values.dtype}.*declared as.*{FIELDS[name].dtype}"
    with pytest.raises(BatchError, match=text) as raised:
        first(boxes_of, [RECORD, {**RECORD, **record}], FIELDS)
    assert "record 1" in str(raised.value)


@pytest.mark.parametrize("empty", ([], np.zeros(0), np.zeros(0, np.float32)), ids=repr)
def test_empty_values_of_any_dtype_are_accepted(empty):
    records = [RECORD, {**RECORD, "boxes": empty, "ids": empty}]
    result = first(boxes_of, records, FIELDS)
    np.testing.assert_allclose(result[0, :, :4], BOXES * 2)
    np.testing.assert_array_equal(result[0, :, 4], RECORD["ids"])
    assert not result[1, :, :4].any() and (result[1, :, 4] == -1).all()


def test_points_and_boxes_of_another_unit_are_refused():
    def forms(data, boxes, points, *, draw, normalized):
        window = augment.fit_window(fn.decoders.image(data), 120, draw=draw)
        boxes = window.boxes(boxes, max_boxes=2, normalized=normalized)[0]
        points = window.points(points, max_points=2, normalized=normalized)[0]
        return fn.cat(boxes, fn.reshape(points, shape=[2, 4]), axis=1)

    def pixels(data, boxes, points, *, draw):
        return forms(data, boxes, points, draw=draw, normalized=False)

    def shares(data, boxes, points, *, draw):
        return forms(data, boxes, points, draw=draw, normalized=True)

    size = np.array([WIDTH, HEIGHT], np.float32)
    normal = {"boxes": BOXES / np.tile(size, 2), "points": RECORD["points"] / size}
    assert first(shares, [{**RECORD, **normal}]).max() <= 1
    zero = np.zeros((2, 2, 2), np.float32)
    assert not first(pixels, [{**RECORD, "points": zero}])[0, :, 4:].any()
    some = {"points": np.where([[[1], [0]]] * 2, normal["points"], 0)}
    for record in ({"points": normal["points"]}, some):
        refused(pixels, record, "points.*normalized=True")
    with pytest.raises(BatchError, match="does not lie in the image.*normalized=True"):
        first(shares, [{**RECORD, **normal}, {**RECORD, **normal, "boxes": BOXES}])
    with pytest.raises(BatchError, match="points.*normalized=False"):
        first(shares, [{**RECORD, **normal}, {**RECORD, **normal, "points": RECORD["points"]}])


# Arguments


@pytest.mark.parametrize(
    ("call", "error", "text"),
    (
        (lambda w, x, b, d: w.boxes(b, min_size=np.nan), ValueError, "min_size must be .*nan"),
        (lambda w, x, b, d: w.boxes(b, min_size=np.inf), ValueError, "min_size must be .*inf"),
        (lambda w, x, b, d: w.boxes(b, min_size=-1), ValueError, "min_size must be .*-1"),
        (
            lambda w, x, b, d: augment.iou_window(x, b, 32, draw=d, options=(np.nan,)),
            ValueError,
            "options must be .*nan",
        ),
        (
            lambda w, x, b, d: augment.iou_window(x, b, 32, draw=d, options=(-0.1,)),
            ValueError,
            "options must be .*-0.1",
        ),
        (
            lambda w, x, b, d: augment.crop_window(x, 32, draw=d, padding=True),
            ValueError,
            "padding must be .*True",
        ),
        (lambda w, x, b, d: augment.fit_window(x, True), ValueError, "size must be .*True"),
        (
            lambda w, x, b, d: augment.affine_window(x, 32, draw=d, degrees=np.nan),
            ValueError,
            "degrees must be a finite number or a range.*nan",
        ),
        (
            lambda w, x, b, d: augment.affine_window(x, 32, draw=d, shear=90),
            ValueError,
            "shear must be .*between -90 and 90.*90",
        ),
    ),
)
def test_arguments_out_of_bounds_are_refused(call, error, text):
    def graph(data, boxes, *, draw):
        image = fn.decoders.image(data)
        call(augment.fit_window(image, 64, draw=draw), image, boxes, draw)
        return image

    with pytest.raises(error, match=text):
        first(graph)


def test_declared_sizes_do_not_replace_those_of_headers():
    def graph(data, *, draw):
        image = draw.sized(fn.decoders.image(data), (300, 300))
        return augment.fit_window(image, 60, draw=draw).matrix()

    np.testing.assert_allclose(first(graph)[0], np.eye(3))
