"""Layouts of fields: uint8 arrays of images have one, from sources and from Grain."""

import grain
import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image
from scipy import ndimage

from dalijax import data_iterator
from dalijax.adapters.grain import DALITransform
from dalijax.errors import BatchError, GraphError, RecordError, StateError
from dalijax.sources import Arrays, Field, Mixture, Records, Source
from drawing import drawn_image, png

COUNT = 4


class Own(Source):
    """A user's source of arrays whose layout is not inferred from the records."""

    def __init__(self, arrays, **field):
        self.arrays = arrays
        self.fields = {"x": Field(arrays[0].dtype, arrays[0].ndim, **field)}

    def __len__(self):
        return len(self.arrays)

    def read(self, indices, names):
        return {"x": [self.arrays[i].copy() for i in indices]}

    def identity(self):
        return "own"


def over(source, graph, **more):
    """Returns the outputs of a graph for all records of a source, in order."""
    iterator_fn = data_iterator(graph, ["y"], shuffle=False)
    return np.asarray(next(iterator_fn(source=source, batch_size=COUNT, **more))["y"])


def over_grain(values, graph, spec=None, **more):
    transform = DALITransform(graph, batch_size=COUNT, output_map=["y"], element_spec=spec, **more)
    return np.asarray(next(iter(dataset(values).pipe(transform)))["y"])


def dataset(values):
    return grain.MapDataset.source([{"x": value} for value in values]).seed(1)


def records(values):
    return Records([{"x": value} for value in values])


ORIGINS = {
    "Arrays": lambda values, graph: over(Arrays({"x": np.stack(values)}), graph),
    "Records": lambda values, graph: over(records(values), graph),
    "Grain": over_grain,
    "own source": lambda values, graph: over(Own(values), graph),
}


def layout(x):
    """Returns the letters of the layout of a graph's input, uint8 [dimensions]."""
    return fn.get_property(x, key="layout")


def text(letters):
    return letters[0].tobytes().decode()


IMAGES = [drawn_image(k, 24, 32) for k in range(COUNT)]


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_blur_of_pixels_equals_a_blur_of_files_and_scipy(origin):
    pixels = ORIGINS[origin](IMAGES, lambda x: fn.gaussian_blur(x, sigma=1.0))
    files = records([png(image).tobytes() for image in IMAGES])
    decoded = over(files, lambda x: fn.gaussian_blur(fn.decoders.image(x), sigma=1.0))
    np.testing.assert_array_equal(pixels, decoded)
    for result, image in zip(pixels, IMAGES, strict=True):
        options = {"sigma": (1, 1, 0), "mode": "mirror", "truncate": 3}
        wanted = ndimage.gaussian_filter(image.astype(np.float64), **options)
        assert np.abs(result - wanted).max() < 1


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        *(((4, 5, channels), np.uint8, "HWC") for channels in (1, 2, 3, 4)),
        ((2, 4, 5, 3), np.uint8, "FHWC"),
        *((shape, np.uint8, "") for shape in ((3, 4, 5), (4, 5), (2, 4, 5, 6), (1, 2, 4, 5, 3))),
        *(((4, 5, 3), dtype, "") for dtype in (np.float32, np.uint16, np.int8, np.bool_)),
    ],
    ids=str,
)
def test_uint8_arrays_with_channels_have_a_layout(shape, dtype, wanted):
    values = [np.zeros(shape, dtype)] * COUNT
    for origin in ("Arrays", "Records", "Grain"):
        assert text(ORIGINS[origin](values, layout)) == wanted, origin


@pytest.mark.parametrize(
    ("shape", "dtype", "given"),
    [
        ((4, 5, 3), np.uint16, "HWC"),
        ((4, 5, 3), np.float32, "HWC"),
        ((3, 4, 5), np.uint8, "CHW"),
        ((4, 5, 6), np.uint8, "HWC"),
        ((4, 5, 3), np.uint8, ""),
        ((4, 5), np.uint8, "HW"),
    ],
    ids=str,
)
def test_a_field_states_its_layout(shape, dtype, given):
    values = [np.zeros(shape, dtype)] * COUNT
    kind = Field(dtype, len(shape), layout=given)
    rows = [{"x": value} for value in values]
    for source in (
        Arrays({"x": np.stack(values)}, kinds={"x": kind}),
        Records(rows, kinds={"x": kind}),
        Own(values, layout=given),
        Mixture([(Own(values, layout=given), 1), (Records(rows, kinds={"x": kind}), 1)]),
    ):
        assert text(over(source, layout)) == given
    assert text(over_grain(values, layout, {"x": kind})) == given


@pytest.mark.parametrize("given", ("hwc", "HW", "HWCD", "HHC", "H C", 3, b"HWC"))
def test_a_layout_has_a_letter_for_each_dimension(given):
    with pytest.raises(ValueError, match=r"layout=.* does not fit ndim=3: .* such as 'HWC'"):
        Field(np.uint8, 3, layout=given)


def test_kinds_of_arrays_fit_their_arrays():
    arrays = {"x": np.zeros((4, 5), np.float32), "k": np.arange(4), "t": np.array(["a"] * 4)}
    kinds = {"x": Field(np.float32, 1, bypass=True), "k": Field(np.int64)}
    fields = Arrays(arrays, kinds=kinds).fields
    assert fields == {**kinds, "t": Field(None)}
    for kind in ({"x": Field(np.uint8, 1)}, {"x": Field(np.float32, 2)}, {"t": Field(np.uint8, 1)}):
        with pytest.raises(TypeError, match=f"{next(iter(kind))!r} is .*Convert the array, or"):
            Arrays(arrays, kinds=kind)
    with pytest.raises(ValueError, match="'k' contains 300, which exceeds int8"):
        Arrays({"k": np.array([1, 300])}, kinds={"k": Field(np.int8)})


SEVEN = [*IMAGES[:3], np.zeros((24, 32, 7), np.uint8)]


def red(x):
    return fn.gaussian_blur(x, sigma=1.0)[:, :, 0]


def test_records_of_other_channels_are_bad_records():
    with pytest.raises(BatchError, match=r"record 3 can't be read.*\(24, 32, 7\).*layout=''\)"):
        over(records(SEVEN), red)
    with pytest.raises(RecordError, match=r"x has the shape \(24, 32, 7\) in record 3 .*it is an"):
        over_grain(SEVEN, red)
    with pytest.raises(RecordError, match=r"x has the shape \(24, 32, 3\) in record 1 .*it is not"):
        over_grain(SEVEN[::-1], red)
    # The layout that the error names makes them equal to images of three channels.
    wanted = over(records(IMAGES), red)[:3]
    kinds = {"x": Field(np.uint8, 3, layout="HWC")}
    rows = [{"x": value} for value in SEVEN]
    np.testing.assert_array_equal(over(Records(rows, kinds=kinds), red)[:3], wanted)
    np.testing.assert_array_equal(over_grain(SEVEN, red, kinds)[:3], wanted)


def test_a_source_of_volumes_must_state_the_layout():
    volumes = [np.random.default_rng(k).integers(0, 256, (8, 8, 8), np.uint8) for k in range(COUNT)]

    def blur(x):
        return fn.gaussian_blur(x, sigma=1.0)

    with pytest.raises(ValueError, match=r"shape \(8, 8, 8\).*Field\(np.uint8, 3, layout=''\)"):
        over(Own(volumes), blur)
    wanted = over(records(volumes), blur)  # without a layout, since no dimension is the channels
    np.testing.assert_array_equal(over(Own(volumes, layout=""), blur), wanted)
    options = {"sigma": 1, "mode": "mirror", "truncate": 3}
    exact = ndimage.gaussian_filter(volumes[0].astype(np.float64), **options)
    assert np.abs(wanted[0] - exact).max() < 1


def test_pillow_images_and_gray_images_with_alpha_mix():
    rows = [Image.new("RGB", (5, 4)), Image.new("LA", (5, 4)), Image.new("RGBA", (5, 4))]
    rows = [*rows, Image.new("RGB", (5, 4))]
    assert text(over(records(rows), layout)) == text(over_grain(rows, layout)) == "HWC"


@pytest.mark.parametrize("origin", ("source", "Grain"))
def test_a_state_is_refused_if_the_layout_differs(origin):
    def make(given):
        kinds = {"x": Field(np.uint8, 3, layout=given)}
        if origin == "Grain":
            transform = DALITransform(red, batch_size=1, output_map=["y"], element_spec=kinds)
            return iter(dataset(IMAGES).pipe(transform))
        source = Records([{"x": image} for image in IMAGES], kinds=kinds)
        return data_iterator(red, ["y"])(source=source, batch_size=1)

    iterator = make("HWC")
    next(iterator)
    state = iterator.get_state()
    wanted = np.asarray(next(iterator)["y"])
    for given in ("HWC", None):
        same = make(given)
        same.set_state(state)
        np.testing.assert_array_equal(np.asarray(next(same)["y"]), wanted)
    other = make("")
    with pytest.raises(StateError, match=r"operators\.record_field_x\.layout: HWC -> \(left out\)"):
        other.set_state(state)
        next(other)


def zeros_or(x, draw, dtype):
    result = x
    if draw.coin_flip(name="some") == 1:
        result = fn.zeros(shape=[24, 32, 3], dtype=dtype)
    return result


def test_branches_with_and_without_a_layout():
    def of_floats(x, *, draw):
        return zeros_or(x, draw, types.FLOAT)

    def of_bytes(x, *, draw):
        return zeros_or(x, draw, types.UINT8)

    floats = over(records([np.float32(i) for i in IMAGES]), of_floats, enable_conditionals=True)
    assert 0 < np.any(floats, axis=(1, 2, 3)).sum() < COUNT
    with pytest.raises(BatchError, match=r"distinct layouts.*\n.*fn.reinterpret\(images, layout="):
        over(records(IMAGES), of_bytes, enable_conditionals=True)
    off = Records([{"x": i} for i in IMAGES], kinds={"x": Field(np.uint8, 3, layout="")})
    np.testing.assert_array_equal(over(off, of_bytes, enable_conditionals=True), floats)


def test_erasing_without_a_layout_is_an_error():
    """With its own default axes, DALI ends the process."""

    def erased(x):
        return fn.erase(x, anchor=[5.0, 6.0], shape=[9.0, 3.0])

    wanted = np.stack(IMAGES)
    wanted[:, 5:14, 6:9] = 0
    np.testing.assert_array_equal(over(records(IMAGES), erased), wanted)
    with pytest.raises(GraphError, match=r"Axis 'H' is not present.*\n.*e.g. axes=\[0, 1\]"):
        over(records([np.float32(image) for image in IMAGES]), erased)
