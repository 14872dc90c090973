"""`augment.normalize` equals NumPy, in every layout and dtype."""

import jax.numpy as jnp
import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import fn, types

from dalijax import augment, data_iterator, sources
from dalijax.errors import GraphError

ROWS, HEIGHT, WIDTH = 4, 6, 5
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, HEIGHT, WIDTH, 3), np.uint8)


def batch_of(function, images=IMAGES, batch_size=ROWS, **call):
    iterator_fn = data_iterator(function, ["images"], **call)
    source = sources.Arrays({"images": images})
    with iterator_fn(source=source, shuffle=False, batch_size=batch_size) as iterator:
        return next(iterator)["images"]


def normalized(images, mean=MEAN, std=STD):
    return (images.astype(np.float64) - mean) / std


def test_it_equals_numpy_in_hwc_by_default():
    def graph(images):
        return augment.normalize(fn.reshape(images, layout="HWC"), MEAN, STD)

    result = batch_of(graph)
    assert result.dtype == np.float32
    assert result.shape == IMAGES.shape
    np.testing.assert_allclose(result, normalized(IMAGES), atol=2e-6)


@pytest.mark.parametrize(
    "dtype",
    ("float32", np.float16, "bfloat16", jnp.bfloat16, jnp.float32, types.FLOAT16, np.dtype("f4")),
)
@pytest.mark.parametrize("layout", ("HWC", "CHW"))
def test_every_form_of_a_dtype_and_layout(dtype, layout):
    def graph(images):
        images = fn.reshape(images, layout="HWC")
        return augment.normalize(images, MEAN, STD, dtype=dtype, layout=layout)

    expected = normalized(IMAGES)
    if layout == "CHW":
        expected = expected.transpose(0, 3, 1, 2)
    result = batch_of(graph)
    name = "float16" if dtype is types.FLOAT16 else np.dtype(dtype).name
    assert result.dtype.name == name
    assert result.shape == expected.shape
    step = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[name]
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=step)


def test_bfloat16_is_the_float32_result_rounded_to_nearest():
    def graph(images, dtype):
        return augment.normalize(fn.reshape(images, layout="HWC"), MEAN, STD, dtype=dtype)

    exact, rounded = (
        batch_of(lambda images, dtype=dtype: graph(images, dtype))
        for dtype in ("float32", "bfloat16")
    )
    expected = jnp.asarray(exact).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rounded), np.asarray(expected))


def test_scale_allows_the_constants_of_torchvision():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def graph(images):
        return augment.normalize(fn.reshape(images, layout="HWC"), mean, std, scale=1 / 255)

    np.testing.assert_allclose(batch_of(graph), normalized(IMAGES / 255, mean, std), atol=2e-6)


def test_videos_and_gray_images():
    videos = IMAGES.reshape(2, 2, HEIGHT, WIDTH, 3)

    def of_videos(images):
        images = fn.reshape(images, layout="FHWC")
        return augment.normalize(images, MEAN, STD, layout="FCHW")

    result = batch_of(of_videos, videos, batch_size=2)
    np.testing.assert_allclose(result, normalized(videos).transpose(0, 1, 4, 2, 3), atol=2e-6)

    def of_gray_images(images):
        return augment.normalize(fn.reshape(images, layout="HWC"), 128, 64)

    gray = IMAGES[..., :1]
    np.testing.assert_allclose(batch_of(of_gray_images, gray), (gray - 128.0) / 64, atol=2e-6)


def stacked(images, layout):
    views = fn.stack(fn.reshape(images, layout="HWC"), fn.flip(images))
    return augment.normalize(views, MEAN, STD, layout=layout)


def test_stacked_views():
    result = batch_of(lambda images: stacked(images, "FHWC"))
    views = np.stack([IMAGES, IMAGES[:, :, ::-1]], axis=1)
    np.testing.assert_allclose(result, normalized(views), atol=2e-6)


@pytest.mark.parametrize(
    "graph",
    (
        lambda images: stacked(images, "HWC"),
        lambda images: augment.normalize(images, MEAN, STD, layout="FHWC"),
    ),
)
def test_a_layout_of_other_dimensions_names_both_layouts(graph):
    with pytest.raises(GraphError, match="pass layout='HWC'.*layout='FHWC'"):
        batch_of(graph)


def test_a_draw_after_it_knows_the_sizes():
    def graph(number, data, draw):
        images = augment.normalize(fn.decoders.image(data), 1, 2)
        return number, fn.resize(augment.random_erasing(images, draw=draw), size=(8, 8))

    iterator_fn = data_iterator(graph, ["number", "images"])
    with iterator_fn(source=Numbers(4), batch_size=4, device_id=None) as iterator:
        assert next(iterator)["images"].shape == (4, 8, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    (
        ({"mean": 0.5, "std": 0.5}, ValueError, "scale=1/255"),
        ({"mean": (0.5, 0.4, 0.4), "std": (0.2, 0.2, 0.2)}, ValueError, "scale=1/255"),
        ({"std": (58, 0, 57)}, ValueError, "std must be positive"),
        ({"mean": "many"}, ValueError, "mean must be a number"),
        ({"mean": (1, np.nan, 1)}, ValueError, "mean must be a number"),
        ({"mean": ()}, ValueError, "mean must be a number"),
        ({"scale": 0}, ValueError, "scale must be a positive number"),
        ({"layout": "NCHW"}, ValueError, "layout of normalize must be one of"),
        ({"dtype": "int8"}, TypeError, "one of .'float32', 'float16', 'bfloat16'"),
        ({"dtype": "float64"}, TypeError, "one of .'float32', 'float16', 'bfloat16'"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a dtype of NumPy, JAX or DALI"),
        ({"data_format": "HWC"}, TypeError, "no argument .'data_format'"),
    ),
)
def test_misuse_names_the_fix(arguments, error, text):
    def graph(images):
        images = fn.reshape(images, layout="HWC")
        return augment.normalize(images, **{"mean": MEAN, "std": STD, **arguments})

    with pytest.raises(error, match=text):
        batch_of(graph)
