"""Buckets of aspect ratios: assignment, batches, pixels, policies, states and devices."""

import collections
import fractions
import io
import json
import math

import numpy as np
import pytest
from host_batches import epochs_of, equal, on_devices, on_host
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import fn, types
from PIL import Image

from dalijax import Bucket, augment, data_iterator, sources
from dalijax.core.augment.windows import covering_crops
from dalijax.core.order.buckets import bucket_table, nearest_buckets
from dalijax.errors import StateError
from drawing import drawn_image, png

BUCKETS = [(24, 24), (20, 28), (28, 20), (16, 36), (48, 48)]
COUNT, ROWS = 90, 8


def make_records(count=COUNT):
    """Images of several sizes, every third of exactly the size of a bucket, and their numbers."""
    rng = np.random.default_rng(0)
    records = []
    for k in range(count):
        size = BUCKETS[k // 3 % 5] if k % 3 == 0 else rng.integers(14, 90, 2).tolist()
        pixels = drawn_image(k, *size)
        mask = pixels[:, :, :1].copy()
        records.append(
            {"data": png(pixels), "mask": mask, "label": np.int32(k), "caption": f"image {k}"}
        )
    return records


RECORDS = make_records()


@data_iterator(mask=True)
def train(data, label, mask, *, bucket):
    images = fn.decoders.image(data)
    window = bucket.window(images, flip=0.5)
    return {
        "image": window.image(images),
        "region": window.mask(mask),
        "label": label,
        "size": bucket.size(),
        "conditioning": bucket.conditioning(window),
        "matrix": window.matrix(),
    }


def bucketed(records=RECORDS, **options):
    source = sources.Records(records) if isinstance(records, list) else records
    return sources.Buckets(source, **{"buckets": BUCKETS, **options})


def iterator(source=None, rows=ROWS, devices=0, function=train, **call):
    settings = {"shuffle": True, "seed": 7, "num_threads": 1, **call}
    return function(source=source or bucketed(), batch_size=rows, **on_devices(devices), **settings)


def size_of(record):
    return Image.open(io.BytesIO(record["data"])).size[::-1]


def bucket_of(size, buckets=tuple(BUCKETS)):
    """Returns the bucket of an image, by exact fractions."""
    ratio = fractions.Fraction(*map(int, size))

    def distance(bucket):
        quotient = ratio / fractions.Fraction(*bucket)
        return max(quotient, 1 / quotient)

    nearest = min(buckets, key=distance)
    alike = [b for b in buckets if b[0] * nearest[1] == b[1] * nearest[0]]
    filled = [b for b in alike if b[0] <= size[0] and b[1] <= size[1]]
    return max(filled) if filled else min(alike)


def expected_counts(records=RECORDS):
    return collections.Counter(bucket_of(size_of(record)) for record in records)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    st.sampled_from((1, 8, 64)),
)
def test_buckets_are_those_of_exact_fractions(sizes, buckets, unit):
    buckets = list(dict.fromkeys((unit * height, unit * width) for height, width in buckets))
    found = nearest_buckets(np.array(sizes, np.int32), buckets)
    for size, k in zip(sizes, found.tolist(), strict=True):
        expected = bucket_of(size, tuple(buckets))
        if buckets[k] == expected:
            continue
        logs = [math.log(h / w) for h, w in (size, buckets[k], expected)]
        assert abs(logs[1] - logs[0]) == pytest.approx(abs(logs[2] - logs[0]), abs=1e-12)


@given(
    st.lists(st.integers(-1, 4), min_size=1, max_size=60),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_a_table_has_the_batches_of_a_loop(buckets, size, drops, shuffle):
    table = bucket_table(np.array(buckets, np.int32), size, drops, 2, 5, shuffle)
    found = [part.tolist() for part in np.split(table.positions, table.starts[1:-1])]
    if not table.num_groups:
        found = []
    expected, open_batches = [], {}
    for position, bucket in enumerate(buckets):
        if bucket >= 0:
            if len(open_batches.get(bucket, [0] * size)) == size:
                open_batches[bucket] = []
                expected.append(open_batches[bucket])
            open_batches[bucket].append(position)
    expected = [batch for batch in expected if len(batch) == size or not drops]
    assert (sorted(found) if shuffle else found) == expected


def test_shuffled_epochs_have_other_batches():
    buckets = np.arange(200, dtype=np.int32) % 4
    tables = [bucket_table(buckets, 4, False, epoch, 5, True) for epoch in (0, 1)]
    assert len({table.positions.tobytes() for table in tables}) == 2


@pytest.mark.parametrize("is_random", (False, True))
def test_crops_cover_their_outputs(is_random):
    rng = np.random.default_rng(0)
    sizes = rng.integers(64, 2000, (5000, 2)).astype(np.int32)
    outputs = rng.integers(1, 1024, (5000, 2)).astype(np.int32)
    u = rng.random((5000, 3)).astype(np.float32)
    start, end = covering_crops(u if is_random else None, sizes, outputs)
    factor = (outputs / sizes).max(axis=1)[:, np.newaxis]
    assert (start >= 0).all() and (end <= sizes * (1 + 1e-6)).all()
    # Each side of the resized image is a whole number of pixels.
    assert (
        np.abs((end - start) * factor - outputs) <= 0.5 * outputs / np.rint(sizes * factor) + 1e-2
    ).all()
    if not is_random:
        removed = np.stack([start, sizes - end]) * factor
        assert np.abs(removed[0] - removed[1]).max() <= 1.1


def test_each_batch_has_images_of_one_bucket():
    loop = iterator()
    for _ in range(2):
        labels = []
        for batch in map(on_host, loop):
            size = tuple(batch["image"].shape[1:3])
            assert len(batch["image"]) == ROWS and size in BUCKETS
            assert (batch["size"] == size).all()
            assert batch["region"].shape == (ROWS, *size, 1)
            chosen = batch["label"][batch["mask"]].tolist()
            assert {bucket_of(size_of(RECORDS[label])) for label in chosen} == {size}
            assert (batch["label"][~batch["mask"]] == chosen[-1]).all()  # repeats the last image
            assert batch["mask"].tolist() == [k < len(chosen) for k in range(ROWS)]
            assert batch["caption"].tolist() == [f"image {label}" for label in batch["label"]]
            labels += chosen
        assert sorted(labels) == list(range(COUNT)) and labels != sorted(labels)


def test_images_of_the_size_of_their_bucket_are_not_changed():
    seen = 0
    for batch in map(on_host, iterator()):
        for row, label in enumerate(batch["label"].tolist()):
            pixels = np.asarray(Image.open(io.BytesIO(RECORDS[label]["data"])))
            if pixels.shape != batch["image"][row].shape:
                continue
            if batch["matrix"][row, 0, 0] < 0:
                pixels = pixels[:, ::-1]
            np.testing.assert_array_equal(batch["image"][row], pixels)
            np.testing.assert_array_equal(batch["region"][row], pixels[:, :, :1])
            seen += 1
    assert seen >= COUNT // 3


def assert_nearly_equal(found, expected):
    """Compares pixels with Pillow's, from which those of DALI differ at the last row and column."""
    difference = np.abs(found - expected)
    assert (difference <= 2).mean() > 0.95 and difference.max() <= 16


def test_pixels_are_those_of_pillow():
    @data_iterator(mask=True)
    def cropping(data, label, *, bucket):
        images = fn.decoders.image(data)
        window = bucket.window(images, flip=0.5)
        return {
            "image": bucket.crop(images, random=False, interp_type=types.INTERP_TRIANGULAR),
            "moved": window.image(images, interp_type=types.INTERP_TRIANGULAR),
            "numbers": bucket.conditioning(window),
            "matrix": window.matrix(),
            "label": label,
        }

    places = set()
    for batch in map(on_host, iterator(function=cropping)):
        for row, label in enumerate(batch["label"].tolist()):
            image = Image.open(io.BytesIO(RECORDS[label]["data"]))
            height, width = batch["image"].shape[1:3]
            factor = max(height / image.height, width / image.width)
            scaled = round(image.width * factor), round(image.height * factor)
            resized = np.asarray(image.resize(scaled, Image.Resampling.BILINEAR), np.int32)
            top, left = round((scaled[1] - height) / 2), round((scaled[0] - width) / 2)
            central = resized[top : top + height, left : left + width]
            assert_nearly_equal(batch["image"][row], central)
            numbers = batch["numbers"][row].tolist()
            assert numbers[:2] == [image.height, image.width]
            assert numbers[4:] == [height, width]
            top, left = numbers[2:4]
            places.add((top > 0, left > 0))
            if batch["matrix"][row, 0, 0] < 0:
                resized = resized[:, ::-1]
            moved = resized[top : top + height, left : left + width]
            assert_nearly_equal(batch["moved"][row], moved)
    assert places == {(False, False), (True, False), (False, True)}


def test_counts_and_lengths():
    source = bucketed()
    counts = expected_counts()
    assert source.counts == {bucket: counts[bucket] for bucket in BUCKETS}
    full = sum(count // ROWS for count in counts.values())
    batches = sum(-(-count // ROWS) for count in counts.values())
    assert full < batches
    for call, length in (
        ({}, batches),
        ({"drop_remainder": True}, full),
        ({"last_batch_policy": "partial"}, batches),
        ({"shuffle": False}, batches),
    ):
        loop = iterator(source, **call)
        assert len(loop) == len(list(loop)) == length
    stream = train.stream(source=source, batch_size=ROWS, num_epochs=3, seed=7)
    assert len(stream) == len(list(stream)) == 3 * batches


def test_incomplete_batches_follow_the_policy():
    counts = expected_counts()
    found = [on_host(batch) for batch in iterator(last_batch_policy="partial")]
    assert all(batch["mask"].all() for batch in found)
    sizes = collections.Counter(batch["image"].shape[:3] for batch in found)
    expected = collections.Counter()
    for bucket, count in counts.items():
        expected[(ROWS, *bucket)] += count // ROWS
        expected[(count % ROWS, *bucket)] += count % ROWS > 0
    assert sizes == +expected
    spec = iterator(last_batch_policy="partial").element_spec
    assert len(found[0]["label"]) < ROWS and {value.shape[0] for value in spec.values()} == {ROWS}
    filled = [on_host(batch) for batch in iterator()]
    for batch, cut in zip(filled, found, strict=True):
        rows = batch.pop("mask")
        assert all(np.array_equal(batch[name][rows], cut[name]) for name in batch)
    dropped = [on_host(batch) for batch in iterator(drop_remainder=True)]
    assert all(batch["mask"].all() for batch in dropped)
    full = [
        {tuple(b["label"].tolist()) for b in part if b["label"].size == ROWS}
        for part in (dropped, found)
    ]
    assert full[0] == full[1]


def test_repetitions_need_a_mask():
    @data_iterator(source=bucketed())
    def unmasked(data, label, *, bucket):
        return {"image": bucket.crop(fn.decoders.image(data)), "label": label}

    with pytest.raises(ValueError, match="Pass mask=True"):
        unmasked(batch_size=ROWS)
    with pytest.raises(ValueError, match="Pass mask=True"):
        unmasked.stream(batch_size=ROWS)
    assert len(list(unmasked(batch_size=ROWS, drop_remainder=True)))
    assert len(list(unmasked(batch_size=ROWS, last_batch_padded=True))) == len(list(iterator()))
    with pytest.raises(ValueError, match="no bucket has batch_size=64 images"):
        unmasked(batch_size=64, drop_remainder=True)


@pytest.mark.parametrize("policy", ("fill", "drop", "partial"))
def test_batches_are_not_filled_with_the_next_epoch(policy):
    with pytest.raises(ValueError, match="last_batch_padded=False: a batch of Buckets has no rec"):
        iterator(last_batch_padded=False, last_batch_policy=policy)


def test_without_shuffling_batches_follow_their_first_record():
    firsts = [on_host(batch)["label"][0] for batch in iterator(shuffle=False)]
    assert firsts == sorted(firsts)


def test_batches_do_not_depend_on_devices():
    expected = epochs_of(iterator())
    assert len({batch["label"].tobytes() for batch in expected}) == len(expected)
    for devices in (1, 2, 4):
        found = epochs_of(iterator(devices=devices))
        assert len(found) == len(expected)
        assert all(map(equal, expected, found)), devices


def test_a_state_moves_to_other_devices():
    expected = epochs_of(iterator())
    loop = iterator(devices=2)
    for _ in range(3):
        next(loop)
    again = iterator(devices=4)
    again.set_state(json.loads(json.dumps(loop.get_state())))
    rest = epochs_of(again)
    assert len(rest) == len(expected) - 3
    assert all(map(equal, expected[3:], rest))


def test_a_state_names_the_batch_size():
    state = iterator().get_state()
    other = iterator(rows=4)
    before = on_host(other.peek())
    with pytest.raises(StateError, match=r"in batches of 8 -> .* in batches of 4") as error:
        other.set_state(state)
    assert "can't ignore order" in str(error.value)
    assert equal(on_host(next(other)), before)


def test_a_state_names_the_buckets_and_all_sizes():
    state = iterator().get_state()
    with pytest.raises(StateError):
        iterator(bucketed(buckets=BUCKETS[:-1])).set_state(state)
    for label in (0, 37, COUNT - 1):
        records = [dict(record) for record in RECORDS]
        height, width = size_of(records[label])
        records[label]["data"] = png(drawn_image(label, height, width + 1))
        with pytest.raises(StateError):
            iterator(bucketed(records)).set_state(state)


def test_seek_step_and_skip_go_anywhere():
    stream = train.stream(source=bucketed(), batch_size=ROWS, shuffle=True, seed=7, num_epochs=3)
    batches = [on_host(batch) for batch in stream]
    length = len(batches) // 3
    again = train.stream(source=bucketed(), batch_size=ROWS, shuffle=True, seed=7, num_epochs=3)
    for step in (0, 5, length - 1, length, 2 * length + 3, 1):
        again.seek_step(step)
        assert equal(on_host(next(again)), batches[step])
    loop = iterator()
    assert loop.skip(4) == 4
    assert equal(on_host(next(loop)), batches[4])
    loop.seek(1, 2)
    assert equal(on_host(next(loop)), batches[length + 2])
    assert loop.skip(length - 3) == length - 3
    with pytest.raises(StopIteration):
        next(loop)


def labels_of(loop):
    batches = map(on_host, loop)
    return sorted(label for batch in batches for label in batch["label"][batch["mask"]].tolist())


def test_mixtures_and_selections():
    halves = [sources.Records(RECORDS[:30]), sources.Records(RECORDS[30:])]
    mixture = sources.Mixture([(halves[0], 1), (halves[1], 1)], length=100)
    found = [epochs_of(iterator(bucketed(mixture), devices=devices)) for devices in (1, 4)]
    assert all(map(equal, *found)) and len(found[0]) == len(found[1])
    assert sum(batch["mask"].sum() for batch in found[0]) == 200
    stream = train.stream(source=bucketed(mixture), batch_size=ROWS, seed=7, num_epochs=4)
    assert len(stream) == len(list(stream))
    even = sources.Selection(sources.Records(RECORDS), np.arange(0, COUNT, 2))
    assert labels_of(iterator(bucketed(even))) == list(range(0, COUNT, 2))


def damaged(labels):
    """Returns the records, with wrong pixels in some PNGs."""
    records = [dict(record) for record in RECORDS]
    for label in labels:
        data = bytes(records[label]["data"])
        at = data.index(b"IDAT") + 4
        records[label]["data"] = data[:at] + bytes(len(data) - at - 16) + data[-16:]
    return records


@pytest.mark.parametrize("lost", ("one", "all but one", "all"))
def test_bad_records_are_masked_in_their_places(lost):
    good = [on_host(batch) for batch in iterator()]
    labels = good[2]["label"][good[2]["mask"]].tolist()
    labels = {"one": labels[1:2], "all but one": labels[:-1], "all": labels}[lost]
    source = bucketed(damaged(labels))
    found = [[*map(on_host, iterator(source, devices=d, on_error="mask"))] for d in (1, 4)]
    assert len(found[0]) == len(found[1]) and all(map(equal, *found))
    for before, after in zip(good, found[0], strict=True):
        is_bad = np.isin(before["label"], labels)
        np.testing.assert_array_equal(after["mask"], before["mask"] & ~is_bad)
        assert after["image"].shape == before["image"].shape
        np.testing.assert_array_equal(after["image"][~is_bad], before["image"][~is_bad])


def test_bad_records_fail_their_batch():
    good = [on_host(batch) for batch in iterator()]
    lost = good[2]["label"][good[2]["mask"]].tolist()
    found = labels_of(iterator(bucketed(damaged(lost[:1])), on_error="skip"))
    assert sorted([*found, *lost]) == list(range(COUNT))


def test_a_record_without_a_size_is_in_no_batch(caplog):
    records = [*RECORDS]
    records[11] = {**records[11], "data": records[11]["data"][:10]}
    source = bucketed(records)
    assert source.num_unreadable == 1 and "record 11" in caplog.text
    assert sum(source.counts.values()) == COUNT - 1
    assert labels_of(iterator(source)) == [k for k in range(COUNT) if k != 11]


def test_one_record_has_the_size_of_its_bucket():
    for number in (3, 4):
        found = on_host(iterator().record(number))
        assert found["image"].shape[:2] == bucket_of(size_of(RECORDS[number]))
        assert found["label"] == number


def test_many_buckets_give_no_warning(recwarn):
    buckets = [(12 + 2 * k, 40 - 2 * k) for k in range(12)]
    rng = np.random.default_rng(1)
    sizes = [*buckets, *rng.integers(10, 60, (20, 2)).tolist()]
    records = [
        {**RECORDS[k], "data": png(drawn_image(k, *size)), "mask": np.zeros((*size, 1), np.uint8)}
        for k, size in enumerate(sizes)
    ]
    shapes = {batch["image"].shape for batch in iterator(bucketed(records, buckets=buckets))}
    assert len(shapes) == 12
    assert not [warning for warning in recwarn if "different shapes" in str(warning.message)]


def test_boxes_follow_the_window():
    records = [
        {**record, "boxes": np.array([[0, 0, *size_of(record)[::-1]]], np.float32)}
        for record in RECORDS
    ]

    @data_iterator(mask=True)
    def boxed(data, boxes, *, bucket):
        images = fn.decoders.image(data)
        window = bucket.window(images)
        kept, count = window.boxes(boxes, max_boxes=2)
        return {
            "image": window.image(images),
            "boxes": kept,
            "count": count,
            "extent": window.extent(),
        }

    for batch in map(on_host, iterator(bucketed(records), function=boxed)):
        height, width = batch["image"].shape[1:3]
        assert (batch["count"] == 1).all()
        np.testing.assert_allclose(batch["boxes"][:, 0], [[0, 0, width, height]] * ROWS, atol=1e-4)
        np.testing.assert_allclose(batch["extent"], [[0, 0, width, height]] * ROWS, atol=1e-4)


def test_exif_orientation_is_part_of_the_plan():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = io.BytesIO()
    Image.fromarray(drawn_image(0, 20, 28)).save(file, "JPEG", exif=exif)
    source = bucketed([{"data": file.getvalue(), "label": np.int32(0)}])
    assert source.counts[28, 20] == 1

    @data_iterator(source=source, mask=True)
    def ignoring(data, label, *, bucket):
        return {"image": bucket.crop(fn.decoders.image(data, adjust_orientation=False))}

    with pytest.raises(ValueError, match="adjust_orientation=False. Omit it"):
        next(iter(ignoring(batch_size=1)))


def test_images_that_were_moved_are_refused():
    @data_iterator(source=bucketed(), mask=True)
    def moved(data, label, *, bucket):
        images = fn.decoders.image(data)
        return {"image": bucket.crop(fn.rotate(images, angle=10.0))}

    with pytest.raises(TypeError, match="image sizes are known for"):
        next(iter(moved(batch_size=ROWS)))


def test_a_graph_takes_bucket_only_over_buckets():
    with pytest.raises(TypeError, match=r"needs bucket, which only sources.Buckets has"):
        iterator(sources.Records(RECORDS))
    with pytest.raises(TypeError, match=r"needs bucket, which only sources.Buckets has"):
        iterator(sources.Packed(sources.Records(RECORDS), length=64, images=4))

    def label_alone(label):
        return {"label": label}

    with pytest.raises(TypeError, match=r"label_alone\(\) does not take bucket"):
        data_iterator(label_alone)(source=bucketed(), batch_size=2)


def test_a_field_may_be_named_bucket():
    records = [{**record, "bucket": np.int32(3)} for record in RECORDS]

    @data_iterator(source=sources.Records(records))
    def named(data, bucket):
        return {"bucket": bucket}

    assert np.asarray(next(iter(named(batch_size=2)))["bucket"]).tolist() == [3, 3]


def test_buckets_are_not_wrapped():
    source = bucketed()
    for wrap in (
        lambda: sources.Selection(source, [0]),
        lambda: source.map(dict),
        lambda: sources.Named(source),
        lambda: sources.Mixture([(source, 1)]),
        lambda: sources.Packed(source, length=64, images=4),
        lambda: bucketed(source),
    ):
        with pytest.raises(TypeError, match="to Buckets"):
            wrap()


def test_arguments_are_checked():
    for options, text in (
        ({"buckets": []}, "buckets must be a list"),
        ({"buckets": [512]}, "buckets must be a list"),
        ({"buckets": [(0, 4)]}, "the height of a bucket"),
        ({"field": "image"}, "no field 'image'"),
        ({"field": "label"}, "the size of none of the 90 images"),
    ):
        with pytest.raises(ValueError, match=text):
            bucketed(**options)
    assert bucketed(buckets=np.array(BUCKETS)).buckets == tuple(BUCKETS)


def test_sizes_are_stored(tmp_path):
    folder = tmp_path / "images"
    (folder / "class").mkdir(parents=True)
    for k, record in enumerate(RECORDS[:6]):
        (folder / "class" / f"{k}.png").write_bytes(record["data"])
    first = bucketed(sources.Files(folder), cache_dir=tmp_path / "cache")
    (stored,) = (tmp_path / "cache").iterdir()
    again = bucketed(sources.Files(folder), cache_dir=tmp_path / "cache")
    assert [stored] == [*(tmp_path / "cache").iterdir()]
    assert first.identity() == again.identity()
    assert first.counts == again.counts == {b: expected_counts(RECORDS[:6])[b] for b in BUCKETS}


def test_colors_after_the_crop():
    @data_iterator(source=bucketed(), mask=True)
    def normalized(data, label, *, bucket):
        images = bucket.crop(fn.decoders.image(data), flip=0.5, name="crop")
        return {"image": augment.normalize(images, mean=127.5, std=127.5), "label": label}

    batch = on_host(next(iter(normalized(batch_size=ROWS))))
    assert batch["image"].dtype == np.float32 and np.abs(batch["image"]).max() <= 1


def test_bucket_is_public():
    assert Bucket.crop.__doc__
