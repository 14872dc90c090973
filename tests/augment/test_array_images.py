"""Augmentation of images that are arrays: equal to that of files, with and without a layout."""

import functools

import grain
import numpy as np
import pytest
from nvidia.dali import fn, types

from dalijax import augment, data_iterator
from dalijax.adapters.grain import DALIDataLoader, DALITransform
from dalijax.errors import BatchError, GraphError
from dalijax.sources import Arrays, Field, Records
from drawing import FUNCTIONS, drawn_image, png

COUNT = 8
RAGGED = [drawn_image(k, 30 + k % 3, 44 + k % 2) for k in range(COUNT)]
ALIKE = [drawn_image(k, 30, 44) for k in range(COUNT)]
EVERY = {
    **FUNCTIONS,
    "center_crop": lambda x, d: augment.center_crop(x, (20, 24), draw=d, resize=28),
    "center_crop without draw": lambda x, d: augment.center_crop(x, (20, 24), resize=28),
}


def every(images, draw):
    """Applies each function, and returns a dict of images, padded to one shape."""
    return {
        name: fn.pad(function(images, draw), axes=[0, 1], shape=[40, 50])
        for name, function in EVERY.items()
    }


def of_pixels(x, *, draw):
    return every(x, draw)


def of_files(x, *, draw):
    return every(fn.decoders.image(x), draw)


def without_layout(x, *, draw):
    """Augments images with a layout that is unknown when the graph is defined."""
    return every(draw.sized(fn.reinterpret(x, layout=""), x), draw)


def rows(values):
    return [{"x": value} for value in values]


def files(images):
    return rows([png(image).tobytes() for image in images])


def over(source, graph):
    return next(data_iterator(graph)(source=source, batch_size=COUNT, seed=3))


def transformed(records, graph, **more):
    transform = DALITransform(graph, batch_size=COUNT, seed=3, **more)
    return next(iter(grain.MapDataset.source(records).seed(1).pipe(transform)))


def loaded(records, graph):
    sampler = grain.samplers.SequentialSampler(len(records), grain.sharding.NoSharding())
    options = {"sampler": sampler, "pipeline_fn": graph, "batch_size": COUNT, "seed": 3}
    return next(iter(DALIDataLoader(data_source=records, **options)))


@functools.cache
def of_records():
    """Returns the augmented images of files in a source."""
    return over(Records(files(RAGGED)), of_files)


def check_equal(batch, wanted, levels=0):
    """Checks that images are equal, up to a number of levels if they were resized."""
    assert {*batch} == {*wanted}
    for name, images in wanted.items():
        got, wants = (np.asarray(x).astype(np.float64) for x in (batch[name], images))
        most = levels if "resized_crop" in name or "center_crop" in name else 0
        np.testing.assert_allclose(got, wants, rtol=0, atol=most, err_msg=name)


OFF = Field(np.uint8, 3, layout="")
SOURCES = {
    "a layout": (Records(rows(RAGGED)), of_pixels),
    "no layout": (Records(rows(RAGGED), kinds={"x": OFF}), of_pixels),
    "an unknown layout": (Records(rows(RAGGED)), without_layout),
}


@pytest.mark.parametrize("case", SOURCES)
def test_pixels_are_augmented_like_files(case):
    # DALI resizes images of an unknown layout.
    check_equal(over(*SOURCES[case]), of_records(), levels=int(case == "an unknown layout"))


@pytest.mark.parametrize("run", (transformed, loaded))
def test_pixels_in_grain_are_augmented_like_files(run):
    check_equal(run(rows(RAGGED), of_pixels), run(files(RAGGED), of_files))


VIDEOS = np.stack([[image, image[::-1]] for image in ALIKE])


@functools.cache
def of_frames():
    """Returns the augmented images of each frame of the videos."""
    return [over(Arrays({"x": VIDEOS[:, frame]}), of_images) for frame in range(2)]


def of_images(x, *, draw):
    return {name: function(x, draw) for name, function in EVERY.items()}


@pytest.mark.parametrize("layout", (None, ""))
def test_frames_of_a_video_are_augmented_like_images(layout):
    kinds = {"x": Field(np.uint8, 4, layout=layout)}
    batch = over(Arrays({"x": VIDEOS}, kinds=kinds), of_images)
    for frame, images in enumerate(of_frames()):
        frames = {k: np.asarray(v)[:, frame] for k, v in batch.items()}
        check_equal(frames, images, levels=1)  # DALI resizes videos


@pytest.mark.parametrize("layout", ("FHWC", "FCHW"))
def test_videos_without_a_layout_are_normalized(layout):
    videos = np.random.default_rng(0).random((COUNT, 2, 4, 5, 3), np.float32)

    def graph(x):
        direct = augment.normalize(x, 2, 4, layout=layout)
        return {"a": direct, "b": augment.normalize(fn.reshape(x, layout=""), 2, 4, layout=layout)}

    batch = next(data_iterator(graph, shuffle=False)(source=Arrays({"x": videos}), batch_size=8))
    wanted = (videos - 2) / 4
    wanted = wanted.transpose(0, 1, 4, 2, 3) if layout == "FCHW" else wanted
    for images in batch.values():
        np.testing.assert_allclose(np.asarray(images), wanted, rtol=1e-6)


def test_floats_are_cropped_flipped_and_erased_like_bytes():
    def graph(x, *, draw):
        images = augment.random_crop(x, 24, padding=3, draw=draw)
        images = augment.flip(images, draw=draw)
        return {"y": augment.random_erasing(images, draw=draw, probability=1.0)}

    floats = over(Records(rows([np.float32(image) for image in RAGGED])), graph)["y"]
    np.testing.assert_array_equal(floats, np.float32(over(Records(rows(RAGGED)), graph)["y"]))


@pytest.mark.parametrize("perm", ([2, 0, 1], [1, 0, 2]))
def test_images_of_any_layout_are_erased(perm):
    """DALI's other operators support neither of them as the layout of an image."""

    def erased(images, x, draw):
        return augment.random_erasing(draw.sized(images, x), draw=draw, probability=1.0)

    def moved(x, *, draw):
        return {"y": erased(fn.transpose(x, perm=perm), x, draw)}

    def gray(x, *, draw):
        return {"y": erased(x[:, :, 0], x, draw)}

    source = Arrays({"x": np.stack(ALIKE)})
    wanted = np.asarray(over(source, lambda x, draw: {"y": erased(x, x, draw)})["y"])
    axes = [0, *(axis + 1 for axis in perm)]
    np.testing.assert_array_equal(np.asarray(over(source, moved)["y"]), wanted.transpose(axes))
    np.testing.assert_array_equal(np.asarray(over(source, gray)["y"]), wanted[..., 0])


def test_stand_ins_have_their_own_sizes():
    """A bad record is replaced by a neighbor of another size."""

    def graph(x, image, *, draw):
        small = augment.random_resized_crop(fn.decoders.image(image), 16, draw=draw, name="a")
        return {"y": augment.random_resized_crop(x, 16, draw=draw, name="b"), "image": small}

    good = [{"x": p, "image": f["x"]} for p, f in zip(RAGGED, files(RAGGED), strict=True)]
    bad = [*good[:2], {**good[2], "image": b"no image"}, *good[3:]]
    iterator_fn = data_iterator(graph, mask="mask", on_error="mask", shuffle=False)
    for run in (
        lambda records: transformed(records, graph, on_error="mask", pad="mask"),
        lambda records: next(iterator_fn(source=Records(records), batch_size=COUNT)),
    ):
        batch, wanted = run(bad), run(good)
        valid = np.asarray(batch["mask"])
        assert valid.tolist() == [k != 2 for k in range(COUNT)]
        for name in ("y", "image"):
            found, own = (np.asarray(arrays[name])[valid] for arrays in (batch, wanted))
            np.testing.assert_array_equal(found, own)


def one_operation(x, *, draw):
    return {"y": augment.trivial_augment(x, draw=draw)}


@pytest.mark.parametrize("channels", (1, 2, 4))
@pytest.mark.parametrize(
    "function",
    (
        lambda x, draw: augment.color_jitter(x, draw=draw, saturation=0.5),
        lambda x, draw: augment.grayscale(x, draw=draw, probability=0.0),
        lambda x, draw: augment.solarize(x, 128, draw=draw, probability=0.0),
    ),
)
def test_images_without_three_channels_have_no_colors(function, channels):
    """DALI's operators would read other memory, or end the process."""

    def jittered(x, *, draw):
        return {"y": function(augment.random_crop(x, 24, draw=draw), draw)}

    odd = [*RAGGED[:3], np.zeros((30, 44, channels), np.uint8), *RAGGED[4:]]
    with pytest.raises(BatchError, match=r"for record 3: (?s:.)*color_jitter takes RGB images"):
        next(data_iterator(jittered, shuffle=False)(source=Records(rows(odd)), batch_size=COUNT))
    every_odd = Arrays({"x": np.zeros((COUNT, 30, 44, channels), np.uint8)})
    with pytest.raises(GraphError, match=f"30 x 44 x {channels}"):
        next(data_iterator(one_operation)(source=every_odd, batch_size=2))


def test_gray_images_get_channels():
    gray = np.stack(ALIKE)[..., 0]

    def flat(x, *, draw):
        return {"y": augment.flip(x, draw=draw)}

    with pytest.raises(GraphError, match=r"images = fn.expand_dims\(images, axes=2\)"):
        over(Arrays({"x": gray}), flat)

    def colored(x, *, draw):
        images = fn.expand_dims(x, axes=2)
        images = draw.sized(fn.cat(images, images, images, axis=2), x)
        return {"y": augment.rand_augment(images, draw=draw)}

    three = np.repeat(gray[..., np.newaxis], 3, axis=3)
    wanted = over(Arrays({"x": three}), lambda x, draw: {"y": augment.rand_augment(x, draw=draw)})
    check_equal(over(Arrays({"x": gray}), colored), wanted)


def test_gray_images_are_cropped_at_the_center():
    gray = np.arange(COUNT * 28 * 32, dtype=np.float32).reshape(COUNT, 28, 32)
    crop = over(Arrays({"x": gray}), lambda x: {"y": augment.center_crop(x, (20, 24)), "x": x})
    np.testing.assert_array_equal(np.asarray(crop["y"]), np.asarray(crop["x"])[:, 4:24, 4:28])


def test_floats_are_rejected_whatever_is_drawn():
    """Some operations would accept floats, so that an error would depend on the random numbers."""

    floats = Arrays({"x": np.stack(ALIKE).astype(np.float32)})
    with pytest.raises(GraphError, match="failed for every record"):
        next(data_iterator(one_operation)(source=floats, batch_size=2))


def test_a_branch_augments_pixels():
    def augmented(x, draw):
        images = augment.random_crop(x, (30, 44), padding=3, draw=draw)
        return augment.rand_augment(images, draw=draw)

    def in_a_branch(x, *, draw):
        some = draw.coin_flip()
        images = x
        if some == 1:
            images = augmented(x, draw)
        return {"y": images, "some": some}

    def always(x, *, draw):
        return {"some": draw.coin_flip(), "y": augmented(x, draw)}

    call = {"source": Arrays({"x": np.stack(ALIKE)}), "batch_size": COUNT, "seed": 3}
    batch = next(data_iterator(in_a_branch, shuffle=False)(**call, enable_conditionals=True))
    wanted = next(data_iterator(always, shuffle=False)(**call))
    some = np.asarray(batch["some"]).astype(bool)
    assert 0 < some.sum() < COUNT
    own = np.where(some[:, None, None, None], np.asarray(wanted["y"]), np.stack(ALIKE))
    np.testing.assert_array_equal(np.asarray(batch["y"]), own)


COLORS = {
    "color_jitter": lambda x, d: augment.color_jitter(x, draw=d, brightness=0.4),
    "grayscale": lambda x, d: augment.grayscale(x, draw=d),
    "solarize": lambda x, d: augment.solarize(x, 128, draw=d),
    "rand_augment": lambda x, d: augment.rand_augment(x, draw=d),
}


@pytest.mark.parametrize("function", COLORS)
@pytest.mark.parametrize(
    ("shape", "layout"), (((3, 8, 3), "CHW"), ((2, 3, 8, 3), "FCHW"), ((8, 3), None))
)
def test_colors_of_three_columns_are_refused(function, shape, layout):
    kinds = {"x": Field(np.uint8, len(shape), layout=layout)}
    source = Arrays({"x": np.zeros((COUNT, *shape), np.uint8)}, kinds=kinds)
    with pytest.raises(ValueError, match=f"not {layout or 'HW'}. Transpose"):
        over(source, lambda x, *, draw: {"y": COLORS[function](x, draw)})


@pytest.mark.parametrize("shape", ((0, 5, 3), (5, 0, 3), (2, 0, 5, 3)))
@pytest.mark.parametrize(
    "function",
    (
        lambda x, d: augment.gaussian_blur(x, 5, draw=d, probability=0.5),
        lambda x, d: augment.gaussian_blur(augment.flip(x, draw=d), 5, draw=d),
    ),
)
def test_an_image_without_pixels_is_a_bad_record(function, shape):
    """``fn.gaussian_blur`` would end the process."""
    full = tuple(extent or 4 for extent in shape)
    pixels = [np.ones(full, np.uint8) for _ in range(COUNT)]
    pixels[3] = np.ones(shape, np.uint8)
    graph = data_iterator(lambda x, *, draw: {"y": function(x, draw)}, shuffle=False)
    with pytest.raises(BatchError, match="record 3"):
        next(graph(source=Records(rows(pixels)), batch_size=COUNT))


@pytest.mark.parametrize("shape", ((0, 5, 3), (5, 0, 3), (2, 0, 5, 3)))
def test_contrast_leaves_an_image_without_pixels(shape):
    def sums(x, *, draw):
        images = augment.color_jitter(x, draw=draw, contrast=0.4)
        shape = fn.cast(images.shape(), dtype=types.INT32)
        return {"sum": fn.reductions.sum(images), "shape": shape}

    full = tuple(extent or 4 for extent in shape)
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, full, np.uint8) for _ in range(COUNT)]
    wanted = transformed(rows(pixels), sums)
    pixels[3] = np.ones(shape, np.uint8)
    found = transformed(rows(pixels), sums)
    np.testing.assert_array_equal(found["shape"][3], shape)
    assert found["sum"][3] == 0
    others = np.arange(COUNT) != 3
    np.testing.assert_array_equal(found["sum"][others], wanted["sum"][others])
