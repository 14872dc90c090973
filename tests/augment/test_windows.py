"""Windows: masks, boxes and points follow the image, compared with the matrix and with loops."""

import io

import jax
import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError, StateError
from drawing import drawn_image
from drawing import run as run_graph

MAKERS = {
    "random": lambda im, boxes, draw: augment.random_window(
        im, 96, draw=draw, scale=(0.3, 1), flip=0.5, name="w"
    ),
    "scale": lambda im, boxes, draw: augment.scale_window(
        im, (96, 80), draw=draw, scale=(0.5, 2), flip=0.5, name="w"
    ),
    "crop": lambda im, boxes, draw: augment.crop_window(
        im, 56, draw=draw, padding=9, flip=0.5, name="w"
    ),
    "center": lambda im, boxes, draw: augment.center_window(im, 96, draw=draw),
    "center resized": lambda im, boxes, draw: augment.center_window(
        im, (90, 96), draw=draw, resize=80
    ),
    "fit": lambda im, boxes, draw: augment.fit_window(im, (96, 120), draw=draw),
    "fit resized": lambda im, boxes, draw: augment.fit_window(im, (96, 120), draw=draw, resize=70),
    "fit random": lambda im, boxes, draw: augment.fit_window(
        im, (96, 120), draw=draw, resize=(40, 60, 90), flip=0.5, name="w"
    ),
    "resize": lambda im, boxes, draw: augment.resize_window(im, (96, 120), draw=draw),
    "iou": lambda im, boxes, draw: augment.iou_window(im, boxes, 96, draw=draw, flip=0.5, name="w"),
    "affine": lambda im, boxes, draw: augment.affine_window(
        im, (96, 110), draw=draw, degrees=30, scale=(0.7, 1.4), translate=(0.2, 0.1), shear=10,
        flip=0.5, name="w",
    ),
}  # fmt: skip


def encoded(image, orientation=0, form="PNG"):
    file, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x112] = orientation
    Image.fromarray(image).save(file, form, exif=exif)
    return file.getvalue()


def make_records(count=48, seed=0):
    """Records with 0 to 3 boxes. ``places`` has the coordinates (x, y) of each pixel."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        height, width = rng.integers(60, 200, 2)
        corner = rng.uniform(-10, [width - 20, height - 20], (number % 4, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(11, 60, (number % 4, 2))], axis=1)
        records.append(
            {
                "data": encoded(rng.integers(0, 256, (height, width, 3), np.uint8)),
                "places": np.stack(np.meshgrid(range(width), range(height)), axis=2).astype(
                    "int32"
                ),
                "boxes": boxes.astype(np.float32),
                "ids": rng.integers(0, 1000, number % 4),
                "corners": boxes.reshape(-1, 2, 2).astype(np.float32),
                "sizes": np.array([width, height], np.int32),
            }
        )
    return records


RECORDS = make_records()


def graph(make, **options):
    @data_iterator(shuffle=options.pop("shuffle", False))
    def windows(data, places, boxes, ids, corners, sizes, *, draw):
        window = make(fn.decoders.image(data), boxes, draw)
        kept, kept_ids, kept_corners, count = window.boxes(boxes, ids, corners, max_boxes=5)
        points, visible, num_points = window.points(corners, max_points=5)
        return {
            "image": window.image(fn.decoders.image(data)),
            "places": window.mask(places, fill=-1),
            "boxes": kept,
            "ids": kept_ids,
            "corners": kept_corners,
            "count": count,
            "points": points,
            "visible": visible,
            "num_points": num_points,
            "matrix": window.matrix(),
            "extent": window.extent(),
            "sizes": sizes,
        }

    return windows


def run(make, records=RECORDS, batch_size=8, **call):
    batches = list(graph(make)(source=sources.Records(records), batch_size=batch_size, **call))
    return {key: np.concatenate([np.asarray(b[key]) for b in batches]) for key in batches[0]}


def by_loops(record, matrix, size, by_center):
    """Returns the index and the box of each box in a window, computed box by box."""
    (width, height), found = record["sizes"], []
    for number, (x0, y0, x1, y1) in enumerate(record["boxes"].astype(float)):
        x, y = np.clip([x0, x1], 0, width), np.clip([y0, y1], 0, height)
        corners = matrix @ [[x[0], x[1], x[0], x[1]], [y[0], y[0], y[1], y[1]], np.ones(4)]
        low, high = (np.clip(edge(corners[:2], axis=1), 0, size) for edge in (np.min, np.max))
        center = matrix @ [(x0 + x1) / 2, (y0 + y1) / 2, 1]
        is_inside = (center[:2] > 0).all() and (center[:2] < size).all()
        if (high - low >= 1 - 1e-6).all() and (is_inside or not by_center):
            found.append((number, [*low, *high]))
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_everything_follows_the_matrix(name):
    result = run(MAKERS[name])
    height, width = result["image"].shape[1:3]
    centers = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=2) + 0.5
    num_boxes = num_differing = 0
    for row, record in enumerate(RECORDS):
        matrix = result["matrix"][row].astype(float)
        inverse = np.linalg.inv(matrix)
        places = centers @ inverse[:2, :2].T + inverse[:2, 2]
        expected = np.floor(places).astype(int)
        is_outside = ((places < 0) | (places >= record["sizes"])).any(axis=2)
        expected[is_outside] = -1
        is_at_edge = (np.abs(places - np.rint(places)) < 2e-3).any(axis=2)
        differs = (expected != result["places"][row]).any(axis=2)
        assert not (differs & ~is_at_edge).any()
        num_differing += differs.sum()
        width_of, height_of = record["sizes"]
        corners = matrix @ [[0, width_of, 0, width_of], [0, 0, height_of, height_of], np.ones(4)]
        extent = np.clip(
            [edge(corners[:2], axis=1) for edge in (np.min, np.max)], 0, (width, height)
        )
        np.testing.assert_allclose(result["extent"][row], extent.ravel(), atol=1e-3)

        boxes = by_loops(record, matrix, (width, height), name == "iou")
        count = result["count"][row]
        assert count == len(boxes)
        indices = [number for number, _ in boxes]
        np.testing.assert_allclose(
            result["boxes"][row, :count], np.reshape([box for _, box in boxes], (-1, 4)), atol=2e-3
        )
        np.testing.assert_array_equal(result["ids"][row, :count], record["ids"][indices])
        np.testing.assert_array_equal(result["corners"][row, :count], record["corners"][indices])
        assert (result["ids"][row, count:] == -1).all() and not result["boxes"][row, count:].any()

        total = len(record["boxes"])
        points = record["corners"].astype(float) @ matrix[:2, :2].T + matrix[:2, 2]
        assert result["num_points"][row] == total and not result["points"][row, total:].any()
        np.testing.assert_allclose(result["points"][row, :total], points, atol=2e-3)
        is_seen = (points >= 0) & (points < (width, height))
        is_seen &= (record["corners"] >= 0) & (record["corners"] < record["sizes"])
        np.testing.assert_array_equal(result["visible"][row, :total], is_seen.all(axis=2))
        num_boxes += count
    assert num_boxes > 20 and num_differing < result["places"].size / 100


@pytest.mark.parametrize("name", MAKERS)
def test_windows_depend_only_on_the_record(name):
    expected = run(MAKERS[name])
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    for result in (run(MAKERS[name], batch_size=3), run(MAKERS[name], sharding=sharding)):
        for key, values in expected.items():
            np.testing.assert_array_equal(result[key][: len(values)], values)


@pytest.mark.parametrize("name", ("random", "center", "iou", "affine"))
def test_windows_resume(name):
    def iterator(make):
        source = sources.Records(RECORDS)
        return graph(make, shuffle=True)(source=source, batch_size=8, seed=3)

    first = iterator(MAKERS[name])
    for _ in range(2):
        next(first)
    state = first.get_state()
    second = iterator(MAKERS[name])
    second.set_state(state)
    for left, right in zip(first, second, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            np.testing.assert_array_equal(left[key], right[key])
    for other in {"random", "scale", "fit"} - {name}:
        with pytest.raises(StateError, match="window"):
            iterator(MAKERS[other]).set_state(state)


def test_fitted_windows_have_each_length_and_begin_at_the_top_left():
    result = run(MAKERS["fit random"])
    lengths = []
    for (left, top, right, bottom), matrix, (width, height) in zip(
        result["extent"], result["matrix"], result["sizes"]
    ):
        assert (left, top) == (0, 0) and right == int(right) and bottom == int(bottom)
        is_flipped = matrix[0, 0] < 0
        np.testing.assert_allclose(matrix[0] @ [width * is_flipped, 0, 1], 0, atol=1e-3)
        factor = min(96 / height, 120 / width)
        wanted = [min(factor, length / min(height, width)) for length in (40, 60, 90)]
        sizes = [(int(width * f + 1e-6), int(height * f + 1e-6)) for f in wanted]
        assert (right, bottom) in sizes
        lengths.append((sizes.index((right, bottom)), is_flipped))
    assert len({*lengths}) == 6


SCALE = {"scale": (0.2, 0.9), "flip": 0.5, "name": "a"}
EQUAL = {
    "random": (
        lambda x, d: augment.random_resized_crop(x, (50, 40), draw=d, **SCALE),
        lambda x, d: augment.random_window(x, (50, 40), draw=d, **SCALE).image(x),
    ),
    "crop": (
        lambda x, d: augment.random_crop(x, 60, draw=d, padding=3, fill_value=9),
        lambda x, d: augment.crop_window(x, 60, draw=d, padding=3).image(x, fill=9),
    ),
    "center": (
        lambda x, d: augment.center_crop(x, 48, draw=d, resize=70),
        lambda x, d: augment.center_window(x, 48, draw=d, resize=70).image(x),
    ),
    "center in the graph": (
        lambda x, d: augment.center_window(x, (90, 151), draw=d).image(x, fill=7),
        lambda x, d: augment.center_window(x, (90, 151)).image(x, fill=7),
    ),
    "center resized in the graph": (
        lambda x, d: augment.center_window(x, (90, 150), draw=d, resize=99).image(x, fill=7),
        lambda x, d: augment.center_window(x, (90, 150), resize=99).image(x, fill=7),
    ),
    "fit in the graph": (
        lambda x, d: augment.fit_window(x, (90, 150), draw=d).image(x),
        lambda x, d: augment.fit_window(x, (90, 150)).image(x),
    ),
    "resize": (
        lambda x, d: fn.resize(x, size=(90, 150)),
        lambda x, d: augment.resize_window(x, (90, 150), draw=d).image(x),
    ),
    "resize in the graph": (
        lambda x, d: fn.resize(fn.flip(x), size=(90, 150)),
        lambda x, d: augment.resize_window(flipped := fn.flip(x), (90, 150)).image(flipped),
    ),
    "fit resized in the graph": (
        lambda x, d: augment.fit_window(x, (90, 150), draw=d, resize=70).image(x),
        lambda x, d: augment.fit_window(x, (90, 150), resize=70).image(x),
    ),
    "own pixels": (
        lambda x, d: augment.random_window(x, 40, draw=d, name="a").image(x),
        lambda x, d: augment.random_window(
            augment.color_jitter(x, draw=d, brightness=0.5, name="b"), 40, draw=d, name="a"
        ).image(x),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_windows_have_equal_pixels(name):
    def images(call):
        @data_iterator(output_map=["x"], shuffle=False)
        def window(data, *, draw):
            return call(fn.decoders.image(data), draw)

        batches = window(source=sources.Records(RECORDS), batch_size=16)
        return np.concatenate([batch["x"] for batch in batches])

    levels = 1 if name.startswith("resize") else 0  # compared with DALI's fn.resize
    one, other = (images(call).astype(int) for call in EQUAL[name])
    np.testing.assert_allclose(one, other, rtol=0, atol=levels)


def outputs(function, records=RECORDS, **call):
    """Returns the first batch of a graph function's output."""
    source = sources.Records(records)
    iterator = data_iterator(function, output_map=["x"], shuffle=False, **call)
    return next(iterator(source=source, batch_size=len(records)))


@pytest.mark.parametrize(
    "dtype", ("bool", "uint8", "int8", "uint16", "int16", "int32", "uint32", "float16", "float32")
)
@pytest.mark.parametrize("shape", ((40, 60), (40, 60, 2)), ids=str)
def test_masks_of_each_dtype(dtype, shape):
    mask = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 120, shape).astype(dtype)

    def flat(mask, *, draw):
        return augment.center_window(mask, (50, 30), draw=draw).mask(mask, fill=1)

    result = np.asarray(outputs(flat, [{"mask": mask}])["x"])[0]
    expected = np.ones((50, 30, *shape[2:]), dtype)
    expected[5:45] = mask[:, 15:45]
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("form", ("xyxy", "xywh", "cxcywh", "yxyx"))
@pytest.mark.parametrize("normalized", (False, True), ids=("pixels", "shares"))
def test_forms_of_boxes(form, normalized):
    def formed(boxes, sizes):
        left, top, right, bottom = (boxes / np.tile(sizes, 2) if normalized else boxes).T
        return np.stack(
            {
                "xyxy": (left, top, right, bottom),
                "xywh": (left, top, right - left, bottom - top),
                "cxcywh": ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top),
                "yxyx": (top, left, bottom, right),
            }[form],
            axis=1,
        ).astype(np.float32)

    def boxes_of(data, boxes, *, draw, **options):
        window = augment.random_window(fn.decoders.image(data), 96, draw=draw, name="a")
        return window.boxes(boxes, max_boxes=3, **options)[0]

    plain = np.asarray(outputs(lambda data, boxes, *, draw: boxes_of(data, boxes, draw=draw))["x"])
    records = [{**r, "boxes": formed(r["boxes"].astype(float), r["sizes"])} for r in RECORDS]
    options = {"format": form, "normalized": normalized}
    result = np.asarray(
        outputs(lambda data, boxes, *, draw: boxes_of(data, boxes, draw=draw, **options), records)[
            "x"
        ]
    )
    for row, expected in zip(result, plain):
        np.testing.assert_allclose(row, formed(expected.astype(float), [96, 96]), atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "padding", "result"),
    (("int64", -1, "int32"), ("int8", -1, "int8"), ("uint8", 0, "uint8"), ("bool", 0, "bool"),
     ("float64", 0, "float32"), ("uint64", 0, "uint32")),
)  # fmt: skip
def test_columns_are_padded(dtype, padding, result):
    box = np.array([[2, 2, 30, 30]], np.float32)
    column = np.ones((1, 2), dtype)
    records = [{"image": np.zeros((40, 40, 3), np.uint8), "boxes": box, "column": column}]

    def columns(image, boxes, column, *, draw):
        return augment.fit_window(image, 40, draw=draw).boxes(boxes, column, max_boxes=2)[1]

    found = np.asarray(outputs(columns, records)["x"])[0]
    assert found.dtype == result and found.tolist() == [[1, 1], [padding, padding]]


def bad(record, text, function, **call):
    """Checks that a record is refused with a text, and that only its row is masked."""
    good = {**RECORDS[3], "mask": np.zeros((*RECORDS[3]["sizes"][::-1], 1), np.uint8)}
    records = [good, {**good, **record}, good]
    with pytest.raises(BatchError, match=text) as raised:
        outputs(function, records)
    assert "record 1" in str(raised.value)
    batch = outputs(function, records, on_error="mask", mask="valid")
    assert np.asarray(batch["valid"]).tolist() == [True, False, True]


def labelled(data, mask, boxes, ids, corners, *, draw):
    image = fn.decoders.image(data)
    window = augment.random_window(image, 32, draw=draw)
    boxes, ids, count = window.boxes(boxes, ids, max_boxes=3, min_size=0)
    points, visible, num_points = window.points(corners, max_points=4)
    total = fn.cast(count + num_points, dtype=types.FLOAT)
    total += fn.reductions.sum(boxes) + fn.reductions.sum(fn.cast(ids, dtype=types.FLOAT))
    total += fn.reductions.sum(points) + fn.reductions.sum(fn.cast(visible, dtype=types.FLOAT))
    return total + fn.reductions.sum(fn.cast(window.mask(mask), dtype=types.FLOAT))


NUMBERS = np.zeros((70, 90, 3), np.uint8)
BOX = [10.0, 10, 30, 30]


@pytest.mark.parametrize(
    ("record", "text"),
    (
        ({"mask": np.zeros((9, 7, 1), np.uint8)}, "pixels, but mask has 9 x 7"),
        (
            {"boxes": np.array([[10, 10, 5, 30]] * 3, np.float32)},
            r"the box \[10.0, 10.0, 5.0, 30.0\]",
        ),
        ({"boxes": np.array([[900, 10, 950, 30]] * 3, np.float32)}, "does not lie in the image"),
        ({"boxes": np.array([[0.1, 0.1, 0.9, 0.9]] * 3, np.float32)}, "normalized=False"),
        ({"boxes": np.array([[np.nan] * 4] * 3, np.float32)}, "does not lie in the image"),
        ({"boxes": np.array([BOX] * 2, np.float32)}, "ids has 3 rows, but boxes has 2"),
        ({"ids": np.array([1, 2, 1 << 40])}, "does not fit into int32"),
        (
            {"corners": np.zeros((9, 2, 2), np.float32)},
            "9 points in the window, more than max_points=4",
        ),
        ({"corners": np.full((3, 2, 2), np.inf, np.float32)}, "not a finite number"),
        ({"corners": np.full((3, 2, 2), np.nan, np.float32)}, "not a finite number"),
        (
            {"corners": np.zeros((3, 3, 2), np.float32)},
            r"numbers \[n, 2, 2\], not float32 \[3, 3, 2\]",
        ),
        (
            {"data": encoded(NUMBERS, 3), "mask": NUMBERS[..., :1]},
            "EXIF orientation turns .*adjust_orientation=False",
        ),
    ),
)
def test_bad_records_are_named(record, text):
    bad(record, text, labelled)


def test_too_many_boxes_are_refused_or_truncated():
    boxes = np.array([[0, 0, 5 + k, 9] for k in range(3)], np.float32)
    records = [{"image": np.zeros((40, 40, 3), np.uint8), "boxes": boxes}]

    def of(truncate):
        def few(image, boxes, *, draw):
            window = augment.fit_window(image, 40, draw=draw)
            return window.boxes(boxes, max_boxes=2, truncate=truncate)[0]

        return np.asarray(outputs(few, records)["x"])[0]

    with pytest.raises(BatchError, match="3 boxes in the window, more than max_boxes=2"):
        of(False)
    np.testing.assert_array_equal(of(True), boxes[:2])


def test_orientations_may_be_stated():
    image = np.zeros((70, 90, 3), np.uint8)
    image[:35, :45] = 255
    record = {"mask": image[..., :1], "boxes": np.array([[0, 0, 45, 35]], np.float32)}

    def window(data, mask, boxes, *, draw, adjust, orientation):
        image = fn.decoders.image(data, adjust_orientation=adjust)
        fit = augment.fit_window(image, 90, draw=draw)
        found = fit.mask(mask, orientation=orientation, fill=0)
        box = fit.boxes(boxes, orientation=orientation, max_boxes=1)[0]
        return fn.cat(fit.image(image, orientation=orientation)[:, :, :1], found, axis=2), box

    # Drawn on the image as it is displayed; and drawn on the stored pixels.
    for data, adjust, orientation in (
        (encoded(image[::-1, ::-1], 3), True, "any"),
        (encoded(image, 3), False, "equal"),
        (encoded(np.rot90(image, -1), 8), True, "any"),
    ):

        def given(data, mask, boxes, *, draw, adjust=adjust, orientation=orientation):
            return window(data, mask, boxes, draw=draw, adjust=adjust, orientation=orientation)

        source = sources.Records([{**record, "data": data}])
        batch = next(data_iterator(given, output_map=["x", "box"])(source=source, batch_size=1))
        pixels, box = np.asarray(batch["x"])[0], np.asarray(batch["box"])[0, 0]
        np.testing.assert_array_equal(pixels[..., 0], pixels[..., 1])
        assert pixels[..., 0].astype(bool).sum() == np.prod(box[2:] - box[:2])


def wrong(call):
    def function(data, boxes, ids, sizes, places, *, draw):
        image = fn.decoders.image(data)
        return call(image, boxes, ids, sizes, places, draw)

    return function


@pytest.mark.parametrize(
    ("call", "error", "text"),
    (
        (
            lambda x, b, i, s, p, d: augment.random_window(
                augment.flip(x, draw=d), 32, draw=d
            ).boxes(b),
            TypeError,
            "may have been moved, flipped or resized",
        ),
        (
            lambda x, b, i, s, p, d: augment.random_window(
                augment.random_window(x, 64, draw=d).image(x), 32, draw=d
            ).boxes(b),
            TypeError,
            "may have been moved",
        ),
        (
            lambda x, b, i, s, p, d: augment.random_window(x, 32, draw=d).image(
                augment.flip(x, draw=d)
            ),
            TypeError,
            "two images of a window must show the same places",
        ),
        (
            lambda x, b, i, s, p, d: augment.random_window(x, 32, draw=d).mask(
                draw_sized(d, fn.resize(x, size=[40, 40]))
            ),
            TypeError,
            "two images of a window must show the same places",
        ),
        (
            lambda x, b, i, s, p, d: augment.random_window(x, 32, draw=d).boxes(b + 1.0),
            TypeError,
            "boxes must be a field of the records.*not the result of .*Arithmetic",
        ),
        (
            lambda x, b, i, s, p, d: augment.fit_window(x, 32, draw=d).boxes(b, format="yxxy"),
            ValueError,
            "format must be one of .*'yxxy'",
        ),
        (
            lambda x, b, i, s, p, d: augment.fit_window(x, 32, draw=d).boxes(p),
            TypeError,
            "boxes must be a field",
        ),
        (
            lambda x, b, i, s, p, d: augment.fit_window(x, 32, draw=d).boxes(b, orientation="same"),
            ValueError,
            "orientation must be 'equal' or 'any'",
        ),
        (
            lambda x, b, i, s, p, d: augment.affine_window(x, 32, draw=d, scale=(0, 1)),
            ValueError,
            "scale must be .low, high. with 0 < low",
        ),
        (
            lambda x, b, i, s, p, d: augment.affine_window(x, 32, draw=d, shear=90),
            ValueError,
            "shear must be",
        ),
        (
            lambda x, b, i, s, p, d: augment.affine_window(x, 32, draw=d).image(x, fill=(1, 2, 3)),
            ValueError,
            "fill must be a number",
        ),
    ),
)
def test_misuse_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        outputs(wrong(call))


def draw_sized(draw, images):
    return draw.sized(images, (40, 40))


@pytest.mark.parametrize(
    "change",
    (
        lambda x, draw: augment.color_jitter(x, draw=draw, hue=0.1),
        lambda x, draw: augment.grayscale(x, draw=draw),
        lambda x, draw: augment.solarize(x, 128, draw=draw),
        lambda x, draw: augment.gaussian_blur(x, 3, draw=draw, probability=0.5),
        lambda x, draw: augment.random_erasing(x, draw=draw),
        lambda x, draw: augment.normalize(x, 0, 1, scale=1),
    ),
    ids=("color_jitter", "grayscale", "solarize", "gaussian_blur", "random_erasing", "normalize"),
)
def test_other_colors_keep_boxes(change):
    def window(data, boxes, *, draw, changed):
        image = fn.decoders.image(data)
        image = change(image, draw) if changed else image
        return augment.scale_window(image, 50, draw=draw, name="a").boxes(boxes)[0]

    def plain(data, boxes, *, draw):
        return window(data, boxes, draw=draw, changed=False)

    def recolored(data, boxes, *, draw):
        return window(data, boxes, draw=draw, changed=True)

    np.testing.assert_array_equal(outputs(plain)["x"], outputs(recolored)["x"])


def test_boxes_without_their_images(tmp_path):
    for number, record in enumerate(RECORDS[:4]):
        (tmp_path / f"{number}.png").write_bytes(record["data"])
    files = sources.Files(tmp_path)

    def matrix(data):
        return augment.fit_window(fn.decoders.image(data), 96).matrix()

    def both(data):
        window = augment.fit_window(fn.decoders.image(data), 96)
        return window.matrix(), window.image(fn.decoders.image(data))

    def first(function, names):
        iterator = data_iterator(function, output_map=names, shuffle=False)
        return np.asarray(next(iterator(source=files, batch_size=4))["x"])

    np.testing.assert_array_equal(first(matrix, ["x"]), first(both, ["x", "image"]))


ALIKE = {
    "random_window": lambda x, draw, **o: augment.random_window(x, 20, flip=0.5, draw=draw, **o),
    "scale_window": lambda x, draw, **o: augment.scale_window(x, 20, flip=0.5, draw=draw, **o),
    "affine_window": lambda x, draw, **o: augment.affine_window(x, 20, degrees=30, draw=draw, **o),
}


@pytest.mark.parametrize("maker", ALIKE)
def test_windows_of_equal_settings_do_not_depend_on_each_other(maker):
    """They are computed at once."""
    originals = [drawn_image(k, 40 + k % 3, 60 - k % 5) for k in range(9)]

    def graph(images, draw, names):
        windows = [ALIKE[maker](images, draw, name=name) for name in names]
        others = [augment.color_jitter(images, draw=draw, hue=0.1, name=f"{n}.c") for n in names]
        return *(w.image(images) for w in windows), *(w.matrix() for w in windows), *others

    together = run_graph(lambda x, d: graph(x, d, ["a", "b", "c"]), originals)
    for k, name in enumerate("abc"):
        alone = run_graph(lambda x, d, name=name: graph(x, d, [name]), originals)
        for one, two in zip(alone, together[k::3], strict=True):
            for a, b in zip(one, two, strict=True):
                np.testing.assert_array_equal(a, b)
    assert not np.array_equal(together[3][0], together[4][0])


@pytest.mark.parametrize("device", ("cpu", "mixed"))
def test_results_are_on_the_device_of_the_images(device):
    """Defines the graph alone, so that the test needs no GPU."""
    devices = []

    def graph(data, places, boxes, ids, corners, sizes, *, draw):
        images = fn.decoders.image(data, device=device)
        window = augment.random_window(images, 8, draw=draw)
        results = [window.mask(places), window.matrix(), window.image(images)]
        results += [*window.boxes(boxes), *window.points(corners)]
        devices.extend(node.device for node in results)
        raise KeyboardInterrupt

    make = data_iterator(graph, source=sources.Records(RECORDS))
    with pytest.raises(KeyboardInterrupt):
        make(batch_size=2, device_id=0 if device == "mixed" else None)
    assert devices == ["cpu" if device == "cpu" else "gpu"] * len(devices) and len(devices) == 8
