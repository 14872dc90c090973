"""Patches at the aspect ratio of the image: grids of SigLIP 2, pixels compared with NumPy."""

import io

import numpy as np
import pytest
from nvidia.dali import fn, ops, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.core.order.grids import grids
from drawing import drawn_image, png
from patch_oracle import grid_of, resized

SIZES = [(40, 60), (60, 40), (33, 97), (7, 120), (1, 1), (200, 200), (16, 16), (31, 5)]
IMAGES = [drawn_image(k, *size) for k, size in enumerate(SIZES)]


@pytest.mark.parametrize("number", (float, np.float32))
@pytest.mark.parametrize(("patch", "tokens"), ((16, 256), (14, 1024), (16, 64), (32, 49), (8, 1)))
def test_grids_are_those_of_siglip(patch, tokens, number):
    rng = np.random.default_rng(0)
    sizes = np.concatenate(
        [
            rng.integers(1, 4000, (150, 2)),
            rng.integers(1, 40, (30, 2)),
            rng.choice([224, 256, 375, 384, 480, 500, 512, 640], (70, 2)),
        ]
    ).astype(np.int32)
    found = grids(sizes, patch, tokens)
    expected = [grid_of(*size, patch, tokens, number) for size in sizes.tolist()]
    np.testing.assert_array_equal(found, expected)
    assert (found.prod(axis=1) <= tokens).all()


def test_float32_gives_another_grid_for_few_sizes():
    assert grids(np.array([[452, 339]]), 16, 1024).tolist() == [grid_of(452, 339, 16, 1024)]
    assert grid_of(452, 339, 16, 1024, np.float32) != grid_of(452, 339, 16, 1024)


def make(source, patch=8, tokens=24, **options):
    @data_iterator(shuffle=False)
    def cut(data, *, draw):
        images = fn.decoders.image(data)
        found = augment.patches(images, draw=draw, patch=patch, tokens=tokens)
        return dict(zip(("patches", "positions", "mask", "grid"), found))

    return cut(source=source, batch_size=4, **options)


def test_patches_are_the_pixels_of_the_resized_image():
    source = sources.Records([{"data": png(image)} for image in IMAGES])
    rows = [{k: np.asarray(v)[r] for k, v in b.items()} for b in make(source) for r in range(4)]
    for row, image in zip(rows, IMAGES, strict=True):
        height, width = grid_of(*image.shape[:2], 8, 24)
        count = height * width
        assert row["grid"].tolist() == [height, width] and row["grid"].dtype == np.int32
        np.testing.assert_array_equal(row["mask"], np.arange(24) < count)
        wanted = [[y, x] for y in range(height) for x in range(width)]
        assert row["positions"].tolist() == wanted + [[0, 0]] * (24 - count)
        pixels = resized(image, (height * 8, width * 8)).reshape(height, 8, width, 8, 3)
        difference = row["patches"][:count] - pixels.swapaxes(1, 2).reshape(count, -1)
        assert row["patches"].shape == (24, 8 * 8 * 3) and row["patches"].dtype == np.uint8
        assert np.abs(difference).max() <= 1.01 and not row["patches"][count:].any()


def test_arrays_of_other_channels_and_dtypes():
    images = [np.float32(image[..., :2]) / 255 for image in IMAGES[:4]]

    @data_iterator(shuffle=False, source=sources.Records([{"image": x} for x in images]))
    def cut(image, *, draw):
        return {"patches": augment.patches(image, draw=draw, patch=4, tokens=30)[0]}

    batch = np.asarray(next(cut(batch_size=4))["patches"])
    assert batch.shape == (4, 30, 4 * 4 * 2) and batch.dtype == np.float32
    for rows, image in zip(batch, images):
        height, width = grid_of(*image.shape[:2], 4, 30)
        pixels = resized(image, (height * 4, width * 4)).reshape(height, 4, width, 4, 2)
        expected = pixels.swapaxes(1, 2).reshape(height * width, -1)
        np.testing.assert_allclose(rows[: height * width], expected, atol=1e-3)


RESIZED = ("uint8", "int16", "uint16", "float32")  # by fn.resize


@pytest.mark.parametrize("patch", (1, 2, 5, 12, 14, 16))
@pytest.mark.parametrize(
    "dtype", ("bool", "uint8", "int8", "int16", "uint16", "int32", "float16", "float32")
)
def test_each_pixel_is_in_its_patch(patch, dtype):
    rng = np.random.default_rng(0)
    images = {
        f"x{channels}": rng.integers(0, 100, (4, 3 * patch, 2 * patch, channels)).astype(dtype)
        for channels in (1, 3, 4, 5)
    }

    def cut(x1, x3, x4, x5, *, draw):
        found = {}
        for image in (x1, x3, x4, x5):
            copied = draw.sized(fn.copy(image), image)  # of unknown dtype
            for pixels in (image, copied if dtype in RESIZED else image):
                window = augment.patch_window(pixels, draw=draw, patch=patch, tokens=7)
                part, *_ = window.patches(pixels, interp_type=types.INTERP_NN)
                found[f"{len(found)}"] = part
        return found

    make = data_iterator(cut, source=sources.Arrays(images), as_numpy=True)
    batch = next(make(batch_size=4, shuffle=False))
    for number, values in enumerate(images.values()):
        parts = values.reshape(4, 3, patch, 2, patch, -1).swapaxes(2, 3).reshape(4, 6, -1)
        for found in (batch[f"{2 * number}"], batch[f"{2 * number + 1}"]):
            np.testing.assert_array_equal(found[:, :6], parts, strict=True)
            assert not found[:, 6].any()


OPERATORS = {
    "decoder": lambda data, draw: ops.decoders.Image()(data, dtype=types.FLOAT),
    "gray": lambda data, draw: ops.decoders.Image()(data, output_type=types.GRAY),
    "resize": lambda data, draw: draw.sized(
        ops.Resize(size=(24, 16))(fn.decoders.image(data), dtype=types.FLOAT), (24, 16)
    ),
    "normalize": lambda data, draw: draw.sized(
        ops.CropMirrorNormalize(output_layout="HWC")(fn.decoders.image(data), dtype=types.UINT8),
        (24, 16),
    ),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_arguments_of_calls_of_operators_are_known(kind):
    def cut(data, *, draw):
        images = OPERATORS[kind](data, draw)
        window = augment.patch_window(images, draw=draw, patch=8, tokens=6)
        return {"cut": window.patches(images, interp_type=types.INTERP_NN)[0], "images": images}

    records = [{"data": png(drawn_image(k, 24, 16))} for k in range(4)]
    batch = next(data_iterator(cut)(source=sources.Records(records), batch_size=4, shuffle=False))
    images = np.asarray(batch["images"])
    parts = images.reshape(4, 3, 8, 2, 8, -1).swapaxes(2, 3).reshape(4, 6, -1)
    np.testing.assert_array_equal(np.asarray(batch["cut"]), parts, strict=True)


def test_the_orientation_of_a_call_is_known():
    """``draw`` needs the sizes of images as they are decoded."""
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    file = io.BytesIO()
    Image.fromarray(drawn_image(0, 24, 16)).save(file, "jpeg", exif=exif)

    def sizes(data, *, draw):
        images = ops.decoders.Image()(data, adjust_orientation=False)
        size = draw.compute(lambda u, sizes: sizes, (2,), np.int32, images=images)
        return {"drawn": size, "decoded": fn.cast(images.shape()[:2], dtype=types.INT32)}

    records = [{"data": file.getvalue()}] * 2
    batch = next(data_iterator(sizes)(source=sources.Records(records), batch_size=2))
    np.testing.assert_array_equal(batch["drawn"], batch["decoded"])


def test_patches_follow_colors_and_resume():
    source = sources.Records([{"data": png(image)} for image in IMAGES * 3])

    @data_iterator(source=source)
    def cut(data, *, draw):
        images = augment.color_jitter(fn.decoders.image(data), draw=draw, brightness=0.4)
        return {"patches": augment.patches(images, draw=draw, patch=8, tokens=24)[0]}

    with cut(batch_size=6, seed=3) as iterator:
        next(iterator)
        state = iterator.get_state()
        expected = np.asarray(next(iterator)["patches"])
    with cut(batch_size=6, seed=3) as other:
        other.set_state(state)
        np.testing.assert_array_equal(np.asarray(next(other)["patches"]), expected)
    with make(source) as iterator:
        next(iterator)
        state = iterator.get_state()
    with make(source, tokens=25) as another, pytest.raises(ValueError, match="tokens: 24 -> 25"):
        another.set_state(state)
        next(another)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"patch": 0}, "patch must be a number of pixels.*not 0"),
        ({"tokens": 2.5}, "tokens must be a number of patches.*not 2.5"),
        ({"tokens": True}, "tokens must be a number of patches.*not True"),
    ),
)
def test_numbers_are_checked(options, text):
    source = sources.Records([{"data": png(IMAGES[0])}])
    with pytest.raises((ValueError, TypeError), match=text):
        make(source, **options)


@pytest.mark.parametrize(("layout", "shape"), (("CHW", (40, 60, 3)), ("FHWC", (2, 40, 60, 3))))
def test_other_layouts_are_refused(layout, shape):
    @data_iterator(source=sources.Records([{"image": np.zeros(shape, np.uint8)}]))
    def cut(image, *, draw):
        if layout == "CHW":
            image = augment.normalize(image, 0, 255, layout="CHW")
        return {"patches": augment.patches(image, draw=draw)[0]}

    with pytest.raises(TypeError, match=f"layout HWC, not {layout}"):
        cut(batch_size=1)


def test_moved_images_are_refused():
    @data_iterator(source=sources.Records([{"data": png(IMAGES[0])}]))
    def cut(data, *, draw):
        images = fn.rotate(fn.decoders.image(data), angle=45)
        return {"patches": augment.patches(images, draw=draw)[0]}

    with pytest.raises(TypeError, match="sized"):
        cut(batch_size=1)
