"""Windows that are cut into patches: pixels, masks, boxes and points agree, compared with NumPy."""

import io

import jax
import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError, StateError
from drawing import drawn_image, png
from patch_oracle import grid_of, resized

PATCH, TOKENS = 4, 120
NAMES = ("patches", "positions", "mask", "grid")
WHOLE = {}
RANDOM = {"scale": (0.2, 0.8), "ratio": (0.5, 2.0), "flip": 0.5}


def make_records(count=32):
    """Records with 0 to 3 boxes of whole pixels; ``drawn`` has each box in its own channel."""
    rng, records = np.random.default_rng(0), []
    for number in range(count):
        size = rng.integers(30, 130, 2)
        boxes, drawn = np.zeros((number % 4, 4), np.int64), np.zeros((*size, 3), np.uint8)
        for k in range(number % 4):
            start = rng.integers(0, size - 12)
            end = np.minimum(start + rng.integers(10, 60, 2), size)
            boxes[k] = [*start[::-1], *end[::-1]]
            drawn[start[0] : end[0], start[1] : end[1], k] = 1
        records.append(
            {
                "data": png(drawn_image(number, *size)),
                "drawn": drawn,
                "places": np.stack(np.indices(size)[::-1], axis=2).astype(np.int32),
                "boxes": boxes.astype(np.float32),
                "ids": rng.integers(0, 1000, number % 4),
                "corners": boxes.reshape(-1, 2, 2).astype(np.float32),
            }
        )
    return records


RECORDS = make_records()


def graph(shuffle=False, **options):
    @data_iterator(shuffle=shuffle)
    def cut(data, drawn, places, boxes, ids, corners, *, draw):
        images = fn.decoders.image(data)
        window = augment.patch_window(images, draw=draw, patch=PATCH, tokens=TOKENS, **options)
        result = dict(zip(NAMES, window.patches(images)))
        for name, masks in (("drawn", drawn), ("places", places)):
            result[name] = window.patches(masks, interp_type=types.INTERP_NN)[0]
        for name, values in (
            ("boxes", window.boxes(boxes, ids, max_boxes=3)),
            ("points", window.points(corners, max_points=3)),
        ):
            result.update({f"{name}.{k}": value for k, value in enumerate(values)})
        return {**result, "matrix": window.matrix(), "extent": window.extent()}

    return cut


def run(options, records=RECORDS, batch_size=8, **call):
    """Returns the outputs of each record."""
    batches = list(graph(**options)(source=sources.Records(records), batch_size=batch_size, **call))
    return [
        {key: np.asarray(values)[row] for key, values in batch.items()}
        for batch in batches
        for row in range(batch_size)
    ][: len(records)]


def joined(patches, grid):
    """Returns the output that was cut into patches, [height, width, channels]."""
    height, width = grid
    cells = patches[: height * width].reshape(height, width, PATCH, PATCH, -1)
    return cells.swapaxes(1, 2).reshape(height * PATCH, width * PATCH, -1)


def part(row, record):
    """Returns the part of an image that a window shows, and whether it is flipped."""
    inverse = np.linalg.inv(row["matrix"].astype(float))
    corners = inverse @ [[0, row["extent"][2]], [0, row["extent"][3]], [1, 1]]
    (left, right), (top, bottom) = np.rint(corners[:2]).astype(int)
    np.testing.assert_allclose(corners[:2], [[left, right], [top, bottom]], atol=1e-3)
    is_flipped = left > right
    left, right = sorted((left, right))
    assert 0 <= left < right <= record["drawn"].shape[1]
    assert 0 <= top < bottom <= record["drawn"].shape[0]
    return (slice(top, bottom), slice(left, right)), is_flipped


def pixels_of(record):
    return np.asarray(Image.open(io.BytesIO(record["data"].tobytes())))


@pytest.mark.parametrize("options", (WHOLE, RANDOM), ids=("whole", "random"))
def test_patches_show_a_part_of_the_image(options):
    flips = set()
    for row, record in zip(run(options), RECORDS, strict=True):
        place, is_flipped = part(row, record)
        crop = pixels_of(record)[place]
        if is_flipped:
            crop = crop[:, ::-1]
        grid = grid_of(*crop.shape[:2], PATCH, TOKENS)
        size = np.multiply(grid, PATCH)
        assert row["grid"].tolist() == grid and row["extent"].tolist() == [0, 0, *size[::-1]]
        count = np.prod(grid)
        np.testing.assert_array_equal(row["mask"], np.arange(TOKENS) < count)
        wanted = np.stack(np.indices(grid), axis=2).reshape(-1, 2)
        np.testing.assert_array_equal(row["positions"][:count], wanted)
        assert not row["positions"][count:].any() and not row["patches"][count:].any()
        # At its edges, the filter also takes the pixels next to the window.
        inner = slice(2, -2) if options else slice(None)
        difference = (joined(row["patches"], grid) - resized(crop, size))[inner, inner]
        assert np.abs(difference).max() <= 0.51
        flips.add(is_flipped)
    assert flips == ({False, True} if options else {False})


@pytest.mark.parametrize("options", (WHOLE, RANDOM), ids=("whole", "random"))
def test_masks_boxes_and_points_follow(options):
    num_boxes = num_omitted = num_hidden = 0
    for row, record in zip(run(options), RECORDS, strict=True):
        width, height = row["extent"][2:]
        matrix = row["matrix"].astype(float)
        centers = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=2) + 0.5
        inverse = np.linalg.inv(matrix)
        places = centers @ inverse[:2, :2].T + inverse[:2, 2]
        differs = (joined(row["places"], row["grid"]) != np.floor(places)).any(axis=2)
        is_at_edge = (np.abs(places - np.rint(places)) < 2e-3).any(axis=2)
        assert not (differs & ~is_at_edge).any()

        drawn, at = joined(row["drawn"], row["grid"]), 0
        for k, (box, number) in enumerate(zip(record["boxes"].astype(float), record["ids"])):
            corners = box.reshape(2, 2) @ matrix[:2, :2].T + matrix[:2, 2]
            low, high = np.clip([corners.min(axis=0), corners.max(axis=0)], 0, (width, height))
            is_in_box = ((centers > low) & (centers < high)).all(axis=2)
            differs = is_in_box != drawn[..., k].astype(bool)
            assert not (differs & ~is_at_edge).any()
            if (high - low < 1).any():
                num_omitted += 1
                continue
            np.testing.assert_allclose(row["boxes.0"][at], [*low, *high], atol=2e-3)
            assert row["boxes.1"][at] == number
            at += 1
        assert row["boxes.2"] == at and not row["boxes.0"][at:].any()
        num_boxes += at

        points = record["corners"].astype(float) @ matrix[:2, :2].T + matrix[:2, 2]
        total = len(points)
        np.testing.assert_allclose(row["points.0"][:total], points, atol=2e-3)
        is_seen = (points > -1e-3) & (points < np.array([width, height]) - 1e-3)
        np.testing.assert_array_equal(row["points.1"][:total], is_seen.all(axis=2))
        assert row["points.2"] == total
        num_hidden += (~is_seen.all(axis=2)).sum()
    assert num_boxes > 30 and (not options or (num_omitted and num_hidden))


@pytest.mark.parametrize("form", ("xyxy", "cxcywh"))
def test_normalized_boxes_and_points_are_shares_of_the_output(form):
    def shares(boxes, size):
        scaled = boxes.astype(float) / np.tile(size, 2)
        low, high = scaled[:, :2], scaled[:, 2:]
        pair = (low, high) if form == "xyxy" else ((low + high) / 2, high - low)
        return np.concatenate(pair, axis=1)

    @data_iterator(shuffle=False)
    def cut(data, boxes, corners, *, draw):
        images = fn.decoders.image(data)
        window = augment.patch_window(images, draw=draw, patch=PATCH, tokens=TOKENS, **RANDOM)
        found = window.boxes(boxes, max_boxes=3, format=form, normalized=True)
        points = window.points(corners, max_points=3, normalized=True)
        return {"boxes": found[0], "count": found[1], "points": points[0]}

    records = []
    for record in RECORDS:
        size = record["drawn"].shape[1::-1]
        boxes = shares(record["boxes"], size).astype(np.float32)
        corners = (record["corners"] / size).astype(np.float32)
        records.append({"data": record["data"], "boxes": boxes, "corners": corners})
    batch = next(cut(source=sources.Records(records), batch_size=len(records)))
    for k, row in enumerate(run(RANDOM)):
        size, count = row["extent"][2:], np.asarray(batch["count"])[k]
        assert count == row["boxes.2"]
        expected = shares(row["boxes.0"][:count], size)
        np.testing.assert_allclose(np.asarray(batch["boxes"])[k, :count], expected, atol=1e-4)
        expected = row["points.0"] / size
        np.testing.assert_allclose(np.asarray(batch["points"])[k], expected, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    (
        {"scale": (0.3, 0.6)},
        {"scale": (0.3, 0.6), "ratio": (0.5, 0.8)},
        {"scale": (1.0, 1.0), "ratio": (1.5, 1.5)},
        {"ratio": (0.5, 2.0)},
    ),
    ids=str,
)
def test_windows_have_the_given_areas_and_ratios(options):
    scale, ratio = options.get("scale", (1, 1)), options.get("ratio", (1, 1))
    shares, ratios, starts = [], [], []
    for row, record in zip(run(options), RECORDS, strict=True):
        (rows, columns), is_flipped = part(row, record)
        image = np.array(record["drawn"].shape[:2])
        size = np.array([rows.stop - rows.start, columns.stop - columns.start])
        low, high = (size - 0.5) / image, (size + 0.5) / image  # before rounding
        is_largest = (size == image).any()  # used if ten windows do not fit
        assert is_largest or (low.prod() <= scale[1] and high.prod() >= scale[0])
        assert low[1] / high[0] <= ratio[1] and high[1] / low[0] >= ratio[0]
        assert not is_flipped
        shares.append((size / image).prod())
        ratios.append(size[1] / size[0] * image[0] / image[1])
        starts.append((rows.start, columns.start))
    if scale == (0.3, 0.6):
        assert min(shares) < 0.35 and max(shares) > 0.55 and len({*starts}) > 20
    if ratio == (0.5, 0.8):
        assert min(ratios) < 0.6 and max(ratios) > 0.7


def test_the_whole_image_has_the_same_patches_as_patches():
    @data_iterator(shuffle=False)
    def cut(data, *, draw):
        images = fn.decoders.image(data)
        found = augment.patches(images, draw=draw, patch=PATCH, tokens=TOKENS)
        return dict(zip(NAMES, found))

    batch = next(cut(source=sources.Records(RECORDS), batch_size=len(RECORDS)))
    for k, row in enumerate(run(WHOLE)):
        for name in NAMES:
            np.testing.assert_array_equal(np.asarray(batch[name])[k], row[name])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_follow_images_as_displayed_and_as_stored(orientation):
    """White boxes on black: the boxes of the white patches are known."""
    image, file, exif = np.zeros((70, 90, 3), np.uint8), io.BytesIO(), Image.Exif()
    image[20:40, 10:70] = 255
    exif[0x112] = orientation
    Image.fromarray(image).save(file, "PNG", exif=exif)
    flips = {2: "h", 3: "hv", 4: "v", 5: "t", 6: "th", 7: "thv", 8: "tv"}
    displayed = image
    for step in flips.get(orientation, ""):
        displayed = {"h": displayed[:, ::-1], "v": displayed[::-1]}.get(
            step, displayed.swapaxes(0, 1)
        )

    def box_of(pixels):
        rows, columns = np.nonzero(pixels[..., 0])
        return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]

    def cut(stored):
        def graph(data, boxes, *, draw):
            images = fn.decoders.image(data, adjust_orientation=not stored)
            window = augment.patch_window(images, draw=draw, patch=2, tokens=2000, **RANDOM)
            tokens, _, _, grid = window.patches(images, interp_type=types.INTERP_NN)
            kind = "equal" if stored else "any"
            return tokens, grid, window.boxes(boxes, max_boxes=1, orientation=kind)[0]

        return data_iterator(graph, output_map=["patches", "grid", "boxes"], shuffle=False)

    for stored, shown in ((True, image), (False, displayed)):
        box = np.array([box_of(shown)], np.float32)
        source = sources.Records([{"data": file.getvalue(), "boxes": box}] * 6)
        batch = {
            k: np.asarray(v) for k, v in next(cut(stored)(source=source, batch_size=6)).items()
        }
        for tokens, (height, width), found in zip(batch["patches"], batch["grid"], batch["boxes"]):
            cells = tokens[: height * width].reshape(height, width, 2, 2, 3).swapaxes(1, 2)
            pixels = cells.reshape(height * 2, width * 2, 3)
            if pixels.any():
                np.testing.assert_allclose(found[0], box_of(pixels), atol=1)
            else:
                assert (found[0, 2:] - found[0, :2] <= 1).any()


def test_turned_images_need_an_orientation():
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x112] = 3
    Image.fromarray(pixels_of(RECORDS[1])).save(file, "PNG", exif=exif)
    record = {**RECORDS[1], "data": np.frombuffer(file.getvalue(), np.uint8)}
    with pytest.raises(BatchError, match="EXIF orientation turns .*orientation='any'"):
        run(RANDOM, [RECORDS[0], record], batch_size=2)


@pytest.mark.parametrize("dtype", ("bool", "uint8", "int8", "int16", "int32", "uint32", "float32"))
@pytest.mark.parametrize("channels", ((), (1,), (2,)), ids=str)
def test_masks_of_each_dtype(dtype, channels):
    shape = (40, 60, *channels)
    mask = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 120, shape).astype(dtype)

    @data_iterator(source=sources.Records([{"mask": mask}]))
    def cut(mask, *, draw):
        window = augment.patch_window(mask, draw=draw, patch=10, tokens=24)
        return {"x": window.patches(mask, interp_type=types.INTERP_NN)[0]}

    found = np.asarray(next(cut(batch_size=1))["x"])[0]
    expected = mask.reshape(4, 10, 6, 10, -1).swapaxes(1, 2).reshape(24, -1)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_images_and_masks_have_the_sizes_of_their_grids():
    @data_iterator(shuffle=False)
    def whole(data, drawn, *, draw):
        images = fn.decoders.image(data)
        window = augment.patch_window(images, draw=draw, patch=PATCH, tokens=TOKENS, **RANDOM)
        found = window.image(images), window.mask(drawn, fill=0)
        return dict(zip(("image", "drawn"), map(fn.pad, found)))

    batch = next(whole(source=sources.Records(RECORDS), batch_size=len(RECORDS)))
    for k, row in enumerate(run(RANDOM)):
        height, width = row["grid"] * PATCH
        for name, values in (("image", row["patches"]), ("drawn", row["drawn"])):
            found = np.asarray(batch[name])[k]
            np.testing.assert_array_equal(found[:height, :width], joined(values, row["grid"]))


def test_windows_depend_only_on_the_record():
    expected = run(RANDOM)
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    for result in (run(RANDOM, batch_size=3), run(RANDOM, sharding=sharding)):
        for row, other in zip(expected, result, strict=True):
            for key, values in row.items():
                np.testing.assert_array_equal(other[key], values)


def test_windows_resume_and_states_name_settings():
    def iterator(**options):
        return graph(True, **options)(source=sources.Records(RECORDS), batch_size=8, seed=3)

    with iterator(**RANDOM) as first, iterator(**RANDOM) as second:
        next(first)
        state = first.get_state()
        second.set_state(state)
        for left, right in zip(first, second, strict=True):
            for key in left:
                np.testing.assert_array_equal(left[key], right[key])
    for option, value in (("scale", (0.2, 0.9)), ("ratio", (0.5, 1.5)), ("flip", 0.25)):
        other = iterator(**{**RANDOM, option: value})
        with pytest.raises(StateError, match=f"{option}: "):
            other.set_state(state)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"scale": (0.5, 2.0)}, "scale must be"),
        ({"ratio": (2.0, 1.0)}, "ratio must be"),
        ({"flip": 1.5}, "flip must be from 0 to 1"),
    ),
)
def test_numbers_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        run(options)


@pytest.mark.parametrize("device", ("cpu", "mixed"))
def test_results_are_on_the_device_of_the_images(device):
    """Defines the graph alone, so that the test needs no GPU."""
    devices = []

    def cut(data, drawn, boxes, *, draw):
        images = fn.decoders.image(data, device=device)
        window = augment.patch_window(images, draw=draw, **RANDOM)
        results = [*window.patches(images), *window.patches(drawn, interp_type=types.INTERP_NN)]
        devices.extend(node.device for node in (*results, *window.boxes(boxes)))
        raise KeyboardInterrupt

    make = data_iterator(cut, source=sources.Records(RECORDS))
    with pytest.raises(KeyboardInterrupt):
        make(batch_size=2, device_id=0 if device == "mixed" else None)
    assert devices == ["cpu" if device == "cpu" else "gpu"] * 10
