"""Mistakes with windows are refused, with the value and the cure, and not trained on."""

import io

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, types
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


@pytest.mark.parametrize(
    ("dtype", "fill", "cure"),
    (
        ("bool", 255, "bool.*from 0 to 1"),
        ("bool", -1, "bool"),
        ("uint8", -1, "uint8.*from 0 to 255"),
        ("uint8", 300, "uint8"),
        ("uint8", 1.5, "uint8"),
        ("uint8", np.nan, "uint8"),
        ("int8", 255, "int8.*from -128 to 127"),
        ("int16", 70000, "int16"),
        ("int32", 2**31 - 1, "int32.*from -16777216 to 16777216"),
        ("float16", 1e6, "float16"),
    ),
)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_fill_outside_of_the_dtype_is_refused(maker, dtype, fill, cure):
    def masks(mask, *, draw):
        return MAKERS[maker](mask, draw).mask(mask, fill=fill)

    with pytest.raises(ValueError, match=f"fill={fill!r} does not fit.*{cure}"):
        first(masks, [{"mask": RECORD["mask"].astype(dtype)}])


@pytest.mark.parametrize(
    "call",
    (
        lambda x, d: augment.fit_window(x, 64, draw=d).image(x, fill=(1, 2, 300)),
        lambda x, d: augment.fit_window(x, 64).image(x, fill=-1),
        lambda x, d: augment.random_crop(x, 64, draw=d, padding=20, fill_value=(300, 0, 0)),
        lambda x, d: augment.center_window(fn.flip(x), 64).image(fn.flip(x), fill=0.5),
    ),
)
def test_a_fill_outside_of_decoded_images_is_refused(call):
    def images(data, *, draw):
        return call(fn.decoders.image(data), draw)

    with pytest.raises(ValueError, match="does not fit into uint8.*from 0 to 255"):
        first(images)


def test_a_fill_fits_the_dtype_of_the_decoder():
    def masks(data, *, draw):
        image = fn.decoders.image(data, dtype=types.UINT16, output_type=types.GRAY)
        return augment.center_window(image, 64, draw=draw).mask(image, fill=65535)

    assert first(masks)[0, 0, 0, 0] == 65535


def test_a_fill_that_is_no_number_is_refused():
    def images(data, *, draw):
        image = fn.decoders.image(data)
        return augment.fit_window(image, 64, draw=draw).image(image, fill="black")

    with pytest.raises(TypeError, match="fill must be a number.*'black'"):
        first(images)


# Dtypes and layouts


@pytest.mark.parametrize(
    "dtype", ("bool", "uint8", "int8", "uint16", "int16", "int32", "float16", "float32")
)
@pytest.mark.parametrize("shape", ((32, 32), (32, 32, 2)), ids=str)
def test_affine_masks_of_each_dtype(dtype, shape):
    mask = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 120, shape).astype(dtype)

    def half(mask, *, draw):
        window = augment.affine_window(mask, 32, draw=draw, scale=(0.5, 0.5))
        return window.mask(mask, fill=1)

    result = first(half, [{"mask": mask}])[0]
    expected = np.ones(shape, dtype)
    expected[8:24, 8:24] = mask[1::2, 1::2]
    assert result.dtype == mask.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ("uint32", "int64", "uint64", "float64"))
def test_affine_masks_that_lose_numbers_are_refused(dtype):
    def masks(mask, *, draw):
        return augment.affine_window(mask, 64, draw=draw).mask(mask, fill=0)

    with pytest.raises(TypeError, match=f"no {dtype} .*Cast them"):
        first(masks, [{"mask": RECORD["mask"].astype(dtype)}])


@pytest.mark.parametrize("dtype", ("bool", "int8", "int32", "uint32", "float16"))
@pytest.mark.parametrize("maker", MAKERS)
def test_interpolation_of_other_dtypes_is_refused(maker, dtype):
    def images(mask, *, draw):
        return MAKERS[maker](mask, draw).image(mask)

    records = [{"mask": (PIXELS > 99).astype(dtype)}]
    if maker == "crop":
        assert first(images, records).dtype == dtype
        return
    with pytest.raises(TypeError, match=f"{dtype}.*interp_type=types.INTERP_NN"):
        first(images, records)


@pytest.mark.parametrize("dtype", ("int16", "uint16", "float32"))
def test_affine_images_are_interpolated(dtype):
    ramp = np.broadcast_to(np.arange(64) * 10.0, (64, 64)).astype(dtype)

    def images(image, *, draw):
        window = augment.affine_window(image, 64, draw=draw, scale=(2, 2))
        return window.image(image, antialias=False)

    row = first(images, [{"image": ramp}])[0][32]
    assert row.dtype == dtype
    expected = ((np.arange(64) + 0.5 - 32) / 2 + 32 - 0.5) * 10
    np.testing.assert_allclose(row.astype(float), expected, atol=0.6)


@pytest.mark.parametrize("maker", ("fit", "affine"))
def test_layouts_with_the_channels_first(maker):
    planes = PIXELS.transpose(2, 0, 1)

    def images(planes, *, draw):
        return MAKERS[maker](planes, draw).image(planes)

    def source_of(dtype):
        kinds = {"planes": sources.Field(dtype, 3, layout="CHW")}
        return sources.Records([{"planes": planes.astype(dtype)}], kinds=kinds)

    def call(function, dtype):
        iterator = data_iterator(function, output_map=["x"])
        return np.asarray(next(iterator(source=source_of(dtype), batch_size=1))["x"])

    def masks(planes, *, draw):
        return MAKERS[maker](planes, draw).mask(planes, fill=0)

    with pytest.raises(TypeError, match="CHW.*HWC.*source.map"):
        call(masks, "int32")
    if maker == "fit":
        assert call(images, "uint8").shape == (1, 3, 64, 64)
        return
    with pytest.raises(TypeError, match="CHW.*HWC.*source.map"):
        call(images, "uint8")

    def normalized(data, *, draw):
        image = augment.normalize(fn.decoders.image(data), 0, 1, scale=1, layout="CHW")
        return augment.affine_window(image, 64, draw=draw).image(image)

    with pytest.raises(TypeError, match="CHW.*HWC.*source.map"):
        first(normalized)


def test_nearest_neighbors_of_affine_images_equal_those_of_masks():
    def difference(data, *, draw):
        image = fn.decoders.image(data)
        window = augment.affine_window(image, 24, draw=draw, degrees=(30, 30))
        nearest = window.image(image, interp_type=types.INTERP_NN, fill=9)
        return fn.stack(nearest, window.mask(image, fill=9))

    nearest, mask = first(difference)[0]
    np.testing.assert_array_equal(nearest, mask)


# Windows without draw


def test_windows_without_the_argument_draw_have_boxes():
    def boxes(data, boxes, ids):
        window = augment.fit_window(fn.decoders.image(data), 120)
        return window.boxes(boxes, ids, max_boxes=2)[0]

    def boxes_with_draw(data, boxes, ids, *, draw):
        window = augment.fit_window(fn.decoders.image(data), 120, draw=draw)
        return window.boxes(boxes, ids, max_boxes=2)[0]

    np.testing.assert_allclose(first(boxes), BOXES[np.newaxis] * 2, rtol=1e-6)
    np.testing.assert_array_equal(first(boxes), first(boxes_with_draw))


@pytest.mark.parametrize("make", (augment.fit_window, augment.resize_window, augment.center_window))
def test_changed_images_without_draw_have_no_masks(make):
    def flipped(data):
        image = fn.flip(fn.decoders.image(data))
        return make(image, 64).image(image)

    def flipped_mask(data, mask):
        return make(fn.flip(fn.decoders.image(data)), 64).mask(mask)

    def flipped_boxes(data, boxes):
        return make(fn.flip(fn.decoders.image(data)), 64).boxes(boxes)[0]

    def pair(data, mask):
        return make(fn.decoders.image(data), 64).mask(mask)

    with pytest.raises(BatchError, match="Both must have the same size"):
        first(pair, [{**RECORD, "mask": RECORD["mask"][1:]}])
    assert first(flipped).shape == (1, 64, 64, 3)
    with pytest.raises(TypeError, match="two images of a window must show the same places"):
        first(flipped_mask)
    with pytest.raises(TypeError, match="may have been moved, flipped or resized"):
        first(flipped_boxes)


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


def test_windows_over_readers_compare_sizes(tmp_path):
    def run(pairs, folder, matrix=False, **options):
        read = read_files(tmp_path / folder, pairs)

        @data_iterator(output_map=["image", "mask"], reader_name="images", size=-1)
        def graph():
            image, mask = read()
            window = augment.fit_window(image, 60)
            other = window.matrix() if matrix else window.mask(mask, **options)
            return window.image(image), other

        return next(graph(batch_size=1))

    with pytest.raises(TypeError, match="EXIF.*orientation='any'"):
        run([(PIXELS, PIXELS[..., 0])], "a")
    with pytest.raises(TypeError, match="Window.matrix needs a graph over a source"):
        run([(PIXELS, PIXELS[..., 0])], "d", matrix=True)
    batch = run([(PIXELS, PIXELS[..., 0])], "b", orientation="any")
    np.testing.assert_array_equal(np.asarray(batch["mask"])[0, :HEIGHT, :, 0], PIXELS[..., 0])
    with pytest.raises(RuntimeError, match="differ in size") as raised:
        run([(PIXELS, PIXELS[1:, :, 0])], "c", orientation="any")
    assert "smaller than the window" not in str(raised.value)


# Definitions of the graph


@pytest.mark.parametrize(
    "apply",
    (
        lambda w, x, b, p: w.boxes(b)[0],
        lambda w, x, b, p: w.points(p)[0],
        lambda w, x, b, p: w.matrix(),
        lambda w, x, b, p: w.image(x),
        lambda w, x, b, p: w.mask(x),
    ),
    ids=("boxes", "points", "matrix", "image", "mask"),
)
@pytest.mark.parametrize("make", ("fit", "changed"))
def test_a_window_of_another_definition_is_refused(apply, make):
    windows = []

    def graph(data, boxes, points, *, draw):
        image = fn.decoders.image(data)
        if not windows:
            changed = fn.flip(image) if make == "changed" else image
            windows.append(augment.fit_window(changed, 64))
            return windows[0].image(changed)
        return apply(windows[0], image, boxes, points)

    first(graph)
    with pytest.raises(ValueError, match="only be used while its own graph function runs"):
        first(graph)


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


def test_a_window_outside_of_a_definition():
    images = fn.external_source(lambda: [PIXELS], batch=True, layout="HWC")
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    pipeline.set_outputs(augment.center_window(images, (HEIGHT, WIDTH)).image(images))
    pipeline.build()
    np.testing.assert_array_equal(np.array(pipeline.run()[0][0]), PIXELS)


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
            lambda w, x, b, d: augment.fit_window(x, 32, resize=0),
            ValueError,
            "resize must be a number of pixels.*0",
        ),
        *(
            (
                lambda w, x, b, d, resize=resize: augment.fit_window(x, 32, draw=d, resize=resize),
                ValueError,
                "resize must be a number of pixels",
            )
            for resize in ((), 0, (30, 0), 2.5, (30, True))
        ),
        *(
            (
                lambda w, x, b, d, more=more: augment.fit_window(x, 32, **more),
                TypeError,
                "draw must be the draw argument",
            )
            for more in ({"resize": (30, 40)}, {"flip": 0.5})
        ),
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


def test_paddings_of_numpy_integers():
    def graph(data, *, draw):
        image = fn.decoders.image(data)
        sides = np.array([0, 24, 0, 0])
        return augment.crop_window(image, (64, WIDTH), draw=draw, padding=sides).image(image)

    result = first(graph)[0]
    assert not result[:24].any()
    np.testing.assert_array_equal(result[24:], PIXELS)


def test_declared_sizes_do_not_replace_those_of_headers():
    def graph(data, *, draw):
        image = draw.sized(fn.decoders.image(data), (300, 300))
        return augment.fit_window(image, 60, draw=draw).matrix()

    np.testing.assert_allclose(first(graph)[0], np.eye(3))


@pytest.mark.parametrize(
    ("make", "arguments"),
    (
        (augment.fit_window, {"size": 32, "resize": 24}),
        (augment.fit_window, {"size": (32, 48), "resize": (24, 30)}),
        (augment.crop_window, {"size": 44, "padding": 4}),
        (augment.affine_window, {"size": 32, "degrees": 10, "shear": 5}),
    ),
)
def test_numbers_may_be_arrays(make, arguments):
    """Also without dimensions, as NumPy's reductions and jax.device_get return them."""

    def image(arguments):
        def graph(data, *, draw):
            images = fn.decoders.image(data)
            return make(images, draw=draw, **arguments).image(images)

        return first(graph, seed=3)

    arrays = {name: np.array(value) for name, value in arguments.items()}
    np.testing.assert_array_equal(image(arrays), image(arguments))


@pytest.mark.parametrize(
    "arguments", ({"size": np.array(2.5)}, {"size": 32, "resize": np.array(2.5)})
)
def test_arrays_that_are_not_whole_numbers_are_refused(arguments):
    def graph(data):
        images = fn.decoders.image(data)
        return augment.fit_window(images, **arguments).image(images)

    with pytest.raises(ValueError, match=r"(size|resize) must be .*pixels.* not 2\.5"):
        first(graph)
