"""Resizing and normalization on the CPU by resize.c, compared with NumPy, DALI and Pillow."""

import ctypes
import io
import os
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import Pipeline, fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.core.augment import cpu_pixels
from dalijax.core.augment.geometry import needed_part
from dalijax.core.native import operators as native_operators
from dalijax.core.native.library import LIBRARY, VARIABLE
from dalijax.core.pipeline.alternatives import choose
from dalijax.core.random.draw import Draw, operator_kind
from dalijax.core.state.operators import operators
from dalijax.errors import StateError
from drawing import drawn_image, png

SOURCE = LIBRARY.with_name("resize.c")
PHOTO = drawn_image(3, 113, 150)
INT, POINTER = ctypes.c_int, ctypes.c_void_p

needs_library = pytest.mark.skipif(
    cpu_pixels._library() is None, reason="dalijax was installed without a C compiler"
)


def compiled(folder, name, *options):
    """Compiles resize.c; skips without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCE.exists():
        pytest.skip("there is no C compiler")
    flags = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
    path = folder / f"{name}.so"
    command = [compiler, *flags, *options, "-shared", "-fPIC", SOURCE, "-o", path, "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("library"), "resize")


def resized(library, image, start, end, size, first=(0, 0)):
    """Calls resize.c; the output has bytes around it that must not change."""
    window = np.array([*start, *end], np.float32)
    channels = image.shape[2]
    buffer = np.full(size[0] * size[1] * channels + 64, 7, np.uint8)
    image = np.ascontiguousarray(image)
    library.dalijax_resize_window(
        *(POINTER(image.ctypes.data), *map(INT, image.shape), *map(INT, first)),
        *(POINTER(window.ctypes.data), POINTER(window.ctypes.data + 8), *map(INT, size)),
        POINTER(buffer.ctypes.data + 32),
    )
    assert (buffer[:32] == 7).all() and (buffer[-32:] == 7).all()
    return buffer[32:-32].reshape(*size, channels)


def weights(low, high, outputs, extent):
    """The weights [outputs, extent] of one axis: a triangle around each output's center."""
    low, high = np.float32(low), np.float32(high)
    scale = (float(high) - float(low)) / outputs
    support = max(abs(scale), 1.0)
    matrix = np.zeros((outputs, extent))
    for k in range(outputs):
        center = float(low) + (k + 0.5) * scale - 0.5
        at = np.arange(int(center - support) - 2, int(center + support) + 3)
        values = np.maximum(1 - np.abs(at - center) / support, 0)
        np.add.at(matrix[k], np.clip(at, 0, extent - 1), values / values.sum())
    return matrix


def in_numpy(image, start, end, size):
    """The same in float64, without rounding."""
    down, across = (weights(*axis) for axis in zip(start, end, size, image.shape[:2]))
    return np.einsum("yh,xw,hwc->yxc", down, across, image.astype(np.float64), optimize=True)


@st.composite
def windows(draw):
    """An image, a window that may lie outside or be flipped, and the size of the output."""
    shape = draw(st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 6)))
    size = draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
    edges = [st.floats(-4, extent + 4, width=32) for extent in shape[:2]]
    start, end = draw(st.tuples(*edges)), draw(st.tuples(*edges))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(("noise", "extremes", "constant")))
    levels = {"noise": 256, "extremes": 2, "constant": 1}[kind]
    image = random.integers(0, levels, shape) * (255 if kind == "extremes" else 1)
    return (image + 200 * (kind == "constant")).astype(np.uint8), start, end, size


@settings(max_examples=300, deadline=None)
@given(case=windows())
def test_pixels_are_those_of_a_triangular_filter(library, case):
    image, *rest = case
    wanted = in_numpy(image, *rest)
    got = resized(library, image, *rest)
    assert np.abs(got - wanted).max() < 1  # 14 bits of weights, and 7 between the passes
    if (image == image.flat[0]).all():
        assert (got == image.flat[0]).all()


@pytest.mark.parametrize(
    ("shape", "size"),
    (
        ((10_000, 1, 3), (1, 1)),
        ((1, 10_000, 1), (2, 3)),
        ((65_500, 2, 3), (1, 1)),
        ((400, 300, 3), (5, 299)),
        ((300, 400, 4), (4, 3)),
    ),
)
def test_large_scales_keep_all_pixels(library, shape, size):
    """Weights are small: rounded to 14 bits, they would all be 0."""
    random = np.random.default_rng(0)
    for image in (random.integers(0, 256, shape), 255 * (np.indices(shape)[0] % 2)):
        image = image.astype(np.uint8)
        wanted = in_numpy(image, (0, 0), shape[:2], size)
        assert np.abs(resized(library, image, (0, 0), shape[:2], size) - wanted).max() < 1


@pytest.mark.parametrize("corner", (np.nan, np.inf, -np.inf, 1e30, -3e9))
def test_absurd_windows_do_no_harm(library, corner):
    image = np.full((4, 4, 3), 9, np.uint8)
    for start, end in (((corner, 0), (4, 4)), ((0, 0), (4, corner)), ((corner,) * 2,) * 2):
        assert (resized(library, image, start, end, (3, 3)) == 9).all()


@settings(max_examples=200, deadline=None)
@given(case=windows())
def test_all_processors_compute_the_same_bytes(library, plain, sse2, native, case):
    wanted = resized(library, *case)
    for other in (plain, sse2, native):
        np.testing.assert_array_equal(resized(other, *case), wanted)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plain"), "plain", "-DDALIJAX_PLAIN", "-O1")


@pytest.fixture(scope="module")
def sse2(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("sse2"), "sse2", "-DDALIJAX_SSE2")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("native"), "native", "-march=native")


@settings(max_examples=200, deadline=None)
@given(case=windows(), flip=st.booleans())
def test_a_part_suffices(library, case, flip):
    image, *corners, size = case
    sizes = np.array([image.shape[:2]], np.int32)
    start, end = (np.clip([corner], 0, sizes).astype(np.float32) for corner in corners)
    start, end = np.minimum(start, end), np.maximum(np.maximum(start, end), start + 0.5)
    if flip:
        start[:, 1], end[:, 1] = end[:, 1].copy(), start[:, 1].copy()
    (first, *_), (shape, *_) = needed_part(sizes, start, end, size)
    part = image[tuple(slice(f, f + n) for f, n in zip(first, shape))]
    got = resized(library, part, start[0], end[0], size, first)
    np.testing.assert_array_equal(got, resized(library, image, start[0], end[0], size))


def converted(library, image, values, factors):
    """Calls a table's function of resize.c; the output has bytes around it that must not change."""
    bits = np.dtype(f"u{values.itemsize}")
    table = np.hstack([values.view(bits), factors.astype(np.float32).view(bits)])
    shapes = [np.array(array.shape, np.int64) for array in (image, table)]
    buffer = np.full(image.size * bits.itemsize + 64, 7, np.uint8)
    pointers = POINTER * 1, POINTER * 2, POINTER * 2
    outs, ins, ins_shapes = (
        make(*(array.ctypes.data for array in arrays))
        for make, arrays in zip(pointers, ([buffer[32:]], [image, table], shapes))
    )
    library.dalijax_table_2(outs, None, None, INT(1), ins, ins_shapes, None, INT(2))
    assert (buffer[:32] == 7).all() and (buffer[-32:] == 7).all()
    return buffer[32:-32].view(values.dtype).reshape(image.shape)


FACTORS = st.sampled_from((0.0, 1.0, 127.5, 1 / 255, 1e-30, 1e30, np.inf)) | st.floats(
    -300, 300, width=32
)


@settings(max_examples=300, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 5)),
    factors=st.lists(FACTORS, min_size=10, max_size=10),
    is_shared=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16", "float32")),
    other=st.none() | st.integers(0, 255),
    seed=st.integers(0, 9),
)
def test_the_table_defines_the_normalization(
    library, plain, sse2, native, shape, factors, is_shared, dtype, other, seed
):
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    channels = 1 if is_shared else max(1, shape[2])
    factors = np.array(factors, np.float32).reshape(5, 2)[:channels]
    with np.errstate(all="ignore"):
        values = (np.arange(256, dtype=np.float32) - factors[:, :1]) * factors[:, 1:]
        values = values.astype(jnp.dtype(dtype))
    if other is not None:  # an entry that is not the product
        values[-1, other] = 3
    wanted = values[np.zeros_like(image) if is_shared else np.arange(channels), image]
    for each in (library, plain, sse2, native):
        got = converted(each, image, values, factors)
        assert got.tobytes() == wanted.tobytes()


# In graphs


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def jpeg(orientation=1, **options):
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(Image.fromarray(PHOTO), "JPEG", exif=exif, **options)


GRAY = Image.fromarray(PHOTO).convert("L")
KINDS = {
    **{f"EXIF {k}": jpeg(k) for k in range(1, 9)},
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1),
    "progressive": jpeg(progressive=True),
    "CMYK": encoded(Image.fromarray(PHOTO).convert("CMYK"), "JPEG"),
    "gray": encoded(GRAY, "JPEG"),
    "PNG": encoded(Image.fromarray(PHOTO), "PNG"),
    "gray PNG": encoded(GRAY, "PNG"),
    "WebP": encoded(Image.fromarray(PHOTO), "WEBP"),
    "lossless WebP": encoded(Image.fromarray(PHOTO), "WEBP", lossless=True),
    "BMP": encoded(Image.fromarray(PHOTO), "BMP"),
    "PPM": encoded(Image.fromarray(PHOTO), "PPM"),
    "TIFF": encoded(Image.fromarray(PHOTO), "TIFF"),
    "JPEG 2000": encoded(Image.fromarray(PHOTO), "JPEG2000"),
    "tiny": encoded(Image.fromarray(PHOTO[:1, :1]), "JPEG"),
    "narrow": encoded(Image.fromarray(PHOTO[:, :2]), "PNG"),
}
MAKERS = {
    "random": lambda x, d: augment.random_resized_crop(x, (40, 56), draw=d, flip=0.5, name="w"),
    "small": lambda x, d: augment.random_resized_crop(
        x, (224, 200), draw=d, scale=(0.01, 0.1), name="w"
    ),
    "scaled": lambda x, d: augment.scale_window(x, 64, draw=d, flip=0.5, name="w").image(x),
    "fit": lambda x, d: augment.fit_window(x, (60, 50), draw=d).image(x),
    "center": lambda x, d: augment.center_crop(x, 40, draw=d, resize=48),
    "resize": lambda x, d: augment.resize_window(x, (30, 70), draw=d).image(x),
    "patches": lambda x, d: augment.patch_window(
        x, draw=d, patch=4, tokens=64, scale=(0.3, 1.0), flip=0.5, name="w"
    ).patches(x)[0],
}


def kinds_of(iterator):
    """The operators that run, as DALI names them; without those that split draws."""
    ran = iterator._engine._runner.pipelines[0]._ops
    return [operator_kind(o) for o in ran if not type(o._op).__name__.startswith("dalijax_split")]


def batches(function, epochs=2, records=None, **decoding):
    """The images of some epochs, and the operators of the graph."""
    records = [{"data": data} for data in (KINDS.values() if records is None else records)]

    def graph(data, *, draw):
        return {"x": function(fn.decoders.image(data, **decoding), draw)}

    source = sources.Records(records)
    iterator = data_iterator(graph, source=source)(batch_size=8, shuffle=False, as_numpy=True)
    found = [np.concatenate([batch["x"] for batch in iterator]) for _ in range(epochs)]
    return np.stack(found), kinds_of(iterator)


@pytest.fixture
def by_dali(monkeypatch):
    """Returns a function that returns the batches of DALI's operators."""

    def call(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, "dali")
            return batches(*arguments, **options)

    return call


@needs_library
@pytest.mark.parametrize("name", MAKERS)
def test_windows_differ_from_those_of_dali_by_one_level(name, by_dali):
    got, kinds = batches(MAKERS[name])
    wanted, kinds_of_dali = by_dali(MAKERS[name])
    assert "NumbaFunction" in kinds and "Resize" not in kinds
    assert "NumbaFunction" not in kinds_of_dali and "Resize" in kinds_of_dali
    difference = np.abs(got.astype(int) - wanted)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.01


@needs_library
@pytest.mark.parametrize("name", MAKERS)
def test_decoding_parts_changes_no_pixel(name):
    parts, kinds = batches(MAKERS[name])
    assert "decoders__ImageSlice" in kinds and "decoders__Image" not in kinds

    def whole(images, draw):  # another user of the images
        return MAKERS[name](images, draw) + fn.cast(images[0, 0, 0] * 0, dtype=types.UINT8)

    images, kinds = batches(whole)
    assert "decoders__ImageSlice" not in kinds and kinds.count("decoders__Image") == 1
    np.testing.assert_array_equal(parts, images)


@needs_library
@pytest.mark.parametrize(
    "decoding",
    (
        {"output_type": types.GRAY},
        {"output_type": types.BGR},
        {"adjust_orientation": False},
        {"jpeg_fancy_upsampling": True},
        {"use_fast_idct": True},
    ),
    ids=str,
)
def test_parts_are_decoded_with_the_same_arguments(decoding, by_dali):
    got, kinds = batches(MAKERS["random"], **decoding)
    assert "decoders__ImageSlice" in kinds and "decoders__Image" not in kinds
    difference = np.abs(got.astype(int) - by_dali(MAKERS["random"], **decoding)[0])
    assert difference.max() <= 1


@needs_library
def test_images_with_several_windows_are_decoded_once():
    def two(images, draw):
        crops = [augment.random_resized_crop(images, 32, draw=draw) for _ in range(2)]
        return fn.stack(*crops)

    pixels, kinds = batches(two)
    assert kinds.count("decoders__Image") == 1 and "decoders__ImageSlice" not in kinds
    assert (pixels[:, :, 0] != pixels[:, :, 1]).any()


BRANCHES = {
    "normalized": lambda x: augment.normalize(augment.center_crop(x, 24, resize=30), 100, 50),
    "a crop of a crop": lambda x: augment.center_crop(
        augment.center_crop(x, 40, resize=50), 24, resize=30
    ),
    "after a flip": lambda x: augment.center_crop(fn.flip(x, horizontal=1), 24, resize=30),
}


def windows_in_branches(data, number, *, branch):
    images = fn.decoders.image(data)
    if number > 5:
        x = BRANCHES[branch](images)
    else:
        x = BRANCHES[branch](fn.flip(images, horizontal=0, vertical=1))
    return {"x": x}


def windows_before_branches(data, number, *, branch):
    x = BRANCHES[branch](fn.decoders.image(data))
    if number > 5:
        x = fn.flip(x, horizontal=1)
    return {"x": x}


@needs_library
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("graph", (windows_in_branches, windows_before_branches))
def test_graphs_with_an_if_equal_those_of_dali(branch, graph, monkeypatch):
    """An operator in a branch receives a part of the batch."""
    records = [{"data": data, "number": k} for k, data in enumerate(KINDS.values())]

    def pixels():
        make = data_iterator(graph, source=sources.Records(records), as_numpy=True)
        iterator = make(batch_size=8, shuffle=False, branch=branch, enable_conditionals=True)
        found = np.concatenate([batch["x"] for batch in iterator]).astype(np.float32)
        return found, kinds_of(iterator)

    got, kinds = pixels()
    assert ("NumbaFunction" in kinds) == (graph is windows_before_branches)
    monkeypatch.setenv(VARIABLE, "dali")
    levels = np.abs(got - pixels()[0]) * (50 if branch == "normalized" else 1)
    assert levels.max() < (2.5 if "of a crop" in branch else 1.5)


@needs_library
def test_a_record_is_bad_in_the_same_epochs_after_a_restore():
    """A damaged image has undamaged windows; a restored iterator has not seen other epochs."""
    whole = encoded(Image.fromarray(PHOTO), "JPEG", quality=95)
    records = [{"data": whole}, {"data": whole[: whole.size // 2]}, {"data": whole}]

    def graph(data, *, draw):
        images = fn.decoders.image(data)
        crop = augment.random_resized_crop(images, 16, draw=draw, scale=(0.02, 0.1))
        return {"x": crop}

    def iterator():
        make = data_iterator(graph, source=sources.Records(records), on_error="mask", mask="m")
        return make(batch_size=3, seed=1, as_numpy=True)

    def epoch(one):
        return [(batch["m"].tolist(), batch["x"].tolist()) for batch in one]

    whole_run, states, seen = iterator(), [], []
    for _ in range(8):
        states.append(whole_run.get_state())
        seen.append(epoch(whole_run))
        whole_run.reset()
    masks = [mask for [(mask, _)] in seen]
    assert len({sum(mask) for mask in masks}) == 2  # bad in some epochs
    for state, want in zip(states, seen, strict=True):
        one = iterator()
        one.set_state(state)
        assert epoch(one) == want


@needs_library
def test_results_that_are_copied_to_a_gpu_are_replaced():
    """Only up to the build, which needs a GPU."""
    draw = None

    def graph(data):
        crop = augment.random_resized_crop(fn.decoders.image(data), 16, draw=draw)
        return crop, crop.gpu(), fn.flip(crop.gpu())

    with Pipeline(batch_size=2, num_threads=1, device_id=0) as pipeline:
        data = fn.external_source(lambda: None, batch=True, name="data")
        draw = Draw(lambda run: None, {data.name: "data"})
        pipeline.set_outputs(*graph(data))
    choose(pipeline)
    kinds = [operator_kind(operator) for operator in operators(pipeline)]
    assert "Resize" not in kinds and kinds.count("NumbaFunction") == 1
    assert [node.device for node in pipeline._graph_out] == ["cpu", "gpu", "gpu"]


@needs_library
def test_colors_and_masks_follow(by_dali):
    def graph(images, draw):
        crop = augment.random_resized_crop(images, 32, draw=draw, name="crop")
        crop = augment.grayscale(crop, draw=draw, probability=0.5, name="gray")
        return augment.flip(crop, draw=draw, name="flip")

    got, wanted = batches(graph)[0], by_dali(graph)[0]
    assert np.abs(got.astype(int) - wanted).max() <= 2  # sums of three rounded channels


@needs_library
@pytest.mark.parametrize("interp_type", (types.INTERP_TRIANGULAR, types.INTERP_CUBIC))
def test_other_filters_are_those_of_dali(interp_type, by_dali):
    def graph(images, draw):
        return augment.random_resized_crop(images, 32, draw=draw, interp_type=interp_type)

    got, kinds = batches(graph)
    assert "NumbaFunction" not in kinds
    np.testing.assert_array_equal(got, by_dali(graph)[0])


NUMBERS = st.floats(-300, 300, width=32).map(lambda x: x or 0.5)


@needs_library
@settings(max_examples=15, deadline=None)
@given(
    mean=st.lists(NUMBERS, min_size=3, max_size=3),
    std=st.lists(st.floats(0.5, 300, width=32), min_size=3, max_size=3),
    one=st.sampled_from(("neither", "mean", "std", "both")),
    dtype=st.sampled_from(("float16", "bfloat16", "float32")),
)
def test_normalization_equals_that_of_dali(mean, std, one, dtype):
    mean = mean[0] if one in ("mean", "both") else mean
    std = std[0] if one in ("std", "both") else std
    levels = np.arange(256, dtype=np.uint8)
    ramp = np.stack([levels, levels[::-1], levels ^ 85], axis=1)[np.newaxis]

    def graph(data):
        images = fn.decoders.image(data)
        kind = types.FLOAT16 if dtype == "float16" else types.FLOAT
        dali = fn.crop_mirror_normalize(images, dtype=kind, output_layout="HWC", mean=mean, std=std)
        return {"fast": augment.normalize(images, mean, std, dtype=dtype, scale=1), "dali": dali}

    source = sources.Records([{"data": png(ramp)}] * 2)
    iterator = data_iterator(graph, source=source)(batch_size=2, shuffle=False, as_numpy=True)
    batch = next(iterator)
    assert "NumbaFunction" in kinds_of(iterator)
    with np.errstate(over="ignore"):
        wanted = batch["dali"].astype(batch["fast"].dtype)
    assert batch["fast"].dtype.name == dtype
    np.testing.assert_array_equal(batch["fast"], wanted)


@needs_library
@pytest.mark.parametrize("name", ("random", "resize"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_one_operator_resizes_and_normalizes(name, dtype):
    def normalized(images, draw):
        crop = MAKERS[name](images, draw)
        result = augment.normalize(crop, (120, 110, 100), (60, 50, 55), dtype=dtype)
        return crop, result

    got, kinds = batches(lambda *arguments: normalized(*arguments)[1])
    assert kinds.count("NumbaFunction") == 1
    source = sources.Records([{"data": data} for data in KINDS.values()])

    def both(data, *, draw):  # another user of the crop
        return dict(zip(("crop", "x"), normalized(fn.decoders.image(data), draw)))

    iterator = data_iterator(both, source=source)(batch_size=8, shuffle=False, as_numpy=True)
    wanted = np.stack([np.concatenate([batch["x"] for batch in iterator]) for _ in range(2)])
    assert kinds_of(iterator).count("NumbaFunction") == 2
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got, wanted)


@needs_library
def test_normalized_crops_are_reshaped_to_a_shape_in_the_graph():
    def flat(images, draw):
        crop = augment.normalize(augment.random_resized_crop(images, 24, draw=draw), 100, 50)
        zero = fn.cast(images.shape()[:1] * 0, dtype=types.INT32)
        return fn.reshape(crop, shape=zero + 24 * 24 * 3)

    flattened, kinds = batches(flat)
    assert kinds.count("NumbaFunction") == 1 and flattened.shape[2:] == (24 * 24 * 3,)


@needs_library
def test_a_state_names_the_implementation(monkeypatch):
    def graph(data, *, draw):
        return {"x": MAKERS["random"](fn.decoders.image(data), draw)}

    source = sources.Records([{"data": data} for data in KINDS.values()])

    def iterator():
        return data_iterator(graph, source=source)(batch_size=4, as_numpy=True, seed=5)

    first = iterator()
    wanted = [batch["x"] for batch in first]
    own = iterator()
    next(own)
    state = own.get_state()
    again = iterator()
    again.set_state(state)
    for got, want in zip(again, wanted[1:], strict=True):
        np.testing.assert_array_equal(got["x"], want)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "dali")
        other = iterator()
        with pytest.raises(
            StateError, match="resized.by: dalijax 1 -> dali\n.*unset.*DALIJAX_RESIZE"
        ):
            other.set_state(state)
            next(other)
        next(other)
        state = other.get_state()
        iterator().set_state(state)
    with pytest.raises(StateError, match="resized.by: dali -> dalijax 1\n.*DALIJAX_RESIZE=dali"):
        late = iterator()
        late.set_state(state)
        next(late)


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "pillow")
    with pytest.raises(ValueError, match="DALIJAX_RESIZE is 'pillow'. Unset it, or set it to dali"):
        batches(MAKERS["random"])


@pytest.fixture
def checked_again(monkeypatch):
    native_operators.checked_library.cache_clear()
    cpu_pixels._warn.cache_clear()
    yield
    monkeypatch.undo()
    native_operators.checked_library.cache_clear()


def test_dali_resizes_without_the_library(checked_again, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native_operators, "LIBRARY", tmp_path / "missing.so")
    _, kinds = batches(MAKERS["random"])
    assert "NumbaFunction" not in kinds
    (record,) = [r for r in caplog.records if r.name == cpu_pixels.__name__]
    assert "missing.so" in record.getMessage() and "=dali" in record.getMessage()


def test_dali_resizes_if_the_check_fails(checked_again, monkeypatch, caplog):
    def operator(name):
        raise KeyError("NumbaFuncImpl")

    if cpu_pixels._library() is None:
        pytest.skip("dalijax was installed without a C compiler")
    native_operators.checked_library.cache_clear()
    monkeypatch.setattr(native_operators, "_operator", operator)
    _, kinds = batches(MAKERS["random"])
    assert "NumbaFunction" not in kinds
    (record,) = [r for r in caplog.records if r.name == cpu_pixels.__name__]
    assert "a check failed: 'NumbaFuncImpl'" in record.getMessage()


def test_this_version_of_dali_calls_functions_by_their_addresses(library):
    """Otherwise, `cpu_pixels` needs another operator of DALI; see its source."""
    if not ctypes.c_int32.in_dll(library, "dalijax_resize_is_fast").value:
        pytest.skip("DALI resizes on processors without SSE2")
    assert cpu_pixels._library() is not None
