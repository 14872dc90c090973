"""Packed rows: contents compared with single images, packing with Python loops, and devices."""

import concurrent.futures
import io
import json
import math
import threading
import warnings
from types import MappingProxyType

import numpy as np
import pytest
from host_batches import epochs_of, equal, on_devices, on_host
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import fn, types
from PIL import Image

from dalijax import Pack, augment, data_iterator, sources
from dalijax.adapters.grain import DALIIterDataset
from dalijax.core.order.packing import (
    WINDOW,
    Table,
    first_fit_decreasing,
    packed_rows,
    packed_table,
)
from dalijax.core.order.samples import Tables
from dalijax.errors import GraphError, StateError
from drawing import drawn_image, png

LENGTH, IMAGES, PATCH, TOKENS, ROWS = 96, 6, 4, 40, 4
COUNT = 90


def make_records(count=COUNT):
    """Images of whole patches, which are not resized, and some others; labels and token ids."""
    rng = np.random.default_rng(0)
    records = []
    for k in range(count):
        height, width = (rng.integers(1, 7, 2) * PATCH).tolist()
        if k % 5 == 4:
            height, width = rng.integers(3, 90, 2).tolist()
        records.append(
            {
                "data": png(drawn_image(k, height, width)),
                "label": np.int32(k),
                "text": np.arange(1, 1 + k % 4, dtype=np.int32),
                "caption": f"image {k}",
            }
        )
    return records


RECORDS = make_records()


@data_iterator(mask=True)
def train(data, label, text, *, draw, pack):
    images = fn.decoders.image(data)
    flipped = fn.flip(images, horizontal=draw.coin_flip(0.5, name="flip"))
    return {
        "patches": pack.patches(images),
        "flipped": pack.patches(flipped),
        "label": pack.per_image(label),
        "tokens": pack.tokens(text),
    }


def packed(records=RECORDS, **options):
    source = sources.Records(records) if isinstance(records, list) else records
    settings = {"length": LENGTH, "images": IMAGES, "patch": PATCH, "tokens": TOKENS}
    return sources.Packed(source, **{**settings, "text": "text", **options})


def iterator(source=None, rows=ROWS, devices=0, function=train, **call):
    settings = {"shuffle": True, "seed": 7, "num_threads": 1, **call}
    return function(source=source or packed(), batch_size=rows, **on_devices(devices), **settings)


def images_of(batch):
    """Yields the row, the number in the row and the label of each image of a batch."""
    for row, slot in np.argwhere(batch["mask"]).tolist():
        yield row, slot, int(batch["label"][row, slot])


def patches_of(pixels):
    """Returns patches [patches, patch * patch * channels] of pixels, as NumPy slices them."""
    height, width, _ = pixels.shape
    return np.array(
        [
            pixels[y : y + PATCH, x : x + PATCH].reshape(-1)
            for y in range(0, height, PATCH)
            for x in range(0, width, PATCH)
        ]
    )


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(20, 30),
    st.integers(1, 5),
)
def test_first_fit_decreasing_is_that_of_a_loop(lengths, repeats, capacity, most):
    lengths = lengths * repeats  # few lengths are packed by another algorithm
    rows, expected = [], [None] * len(lengths)
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        fits = (r for r, row in enumerate(rows) if sum(row) + lengths[k] <= capacity)
        number = next((r for r in fits if len(rows[r]) < most), len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(lengths[k])
        expected[k] = number
    several = np.array([lengths, lengths[::-1]], np.int32)
    found = first_fit_decreasing(several, capacity, most)
    assert found[0].tolist() == expected


@pytest.mark.parametrize("shuffle", (False, True))
@pytest.mark.parametrize("count", (1, 3, WINDOW, 3 * WINDOW + 5))
def test_a_table_has_each_record_once_in_rows_that_fit(count, shuffle):
    lengths = np.random.default_rng(count).integers(0, 50, count).astype(np.int32)
    lengths[0] = 50
    table = packed_table(lengths, 60, 4, 3, 5, shuffle)
    assert sorted(table.positions.tolist()) == np.flatnonzero(lengths).tolist()
    counts = np.diff(table.starts)
    assert counts.min() >= 1 and counts.max() <= 4
    assert np.add.reduceat(lengths[table.positions], table.starts[:-1]).max() <= 60
    other = packed_table(lengths, 60, 4, 4, 5, shuffle)
    if count != 3:
        is_same = other.positions.tolist() == table.positions.tolist()
        assert is_same == (not shuffle or count == 1)


@pytest.mark.parametrize(("most", "share"), ((64, 0.01), (6, 0.04)))
def test_little_is_padded(most, share):
    rng = np.random.default_rng(0)
    areas = np.exp(rng.normal(np.log(500 * 375), 0.7, 20_000))
    lengths = np.clip(areas / 256, 1, 1024).astype(np.int32)
    table = packed_table(lengths, 4096, most, 0, 0, True)
    assert np.diff(table.starts).max() <= most
    assert np.add.reduceat(lengths[table.positions], table.starts[:-1]).max() <= 4096
    assert 1 - lengths.sum() / (table.num_groups * 4096) < share


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(20, 30), st.integers(1, 5)
)
def test_packed_rows_hold_each_item_once(lengths, capacity, most):
    items = np.array([lengths, lengths[::-1]], np.int32)
    rows = packed_rows(items, capacity, most)
    decreasing = first_fit_decreasing(items, capacity, most)
    for window, found in enumerate(rows):
        own = [items[window][(found == row) & (items[window] > 0)] for row in set(found.tolist())]
        used = [part for part in own if len(part)]
        assert all(part.sum() <= capacity and len(part) <= most for part in used)
        assert len(used) <= len(set(decreasing[window][items[window] > 0].tolist()))


def test_rows_contain_images_text_and_positions():
    loop = iterator()
    seen = []
    for batch in map(on_host, loop):
        assert batch["patches"].shape == (ROWS, LENGTH, PATCH * PATCH * 3)
        assert batch["label"].shape == batch["mask"].shape == (ROWS, IMAGES)
        ends = [0] * ROWS
        for row, slot, label in images_of(batch):
            seen.append(label)
            record = RECORDS[label]
            pixels = np.asarray(Image.open(io.BytesIO(record["data"])))
            first = ends[row]
            segment = batch["segment_ids"][row] == slot + 1
            (inside,) = np.nonzero(segment)
            ends[row] = first + len(inside)
            assert inside.tolist() == list(range(first, ends[row]))  # follow the image before
            count = len(inside) - len(record["text"])
            places = batch["positions"][row, inside]
            assert batch["grids"][row, slot].prod() == count
            grid = places[:count].max(axis=0) + 1
            assert places[:count].tolist() == [[y, x] for y, x in np.ndindex(*grid)]
            assert places[count:].tolist() == [[-1, k] for k in range(len(record["text"]))]
            tokens = batch["tokens"][row, inside]
            assert tokens.tolist() == [0] * count + record["text"].tolist()
            assert batch["caption"][row, slot] == record["caption"]
            if label % 5 != 4:
                assert (grid * PATCH).tolist() == list(pixels.shape[:2])
                patches = batch["patches"][row, inside]
                np.testing.assert_array_equal(patches[:count], patches_of(pixels))
                assert not patches[count:].any()
            else:
                height, width, _ = pixels.shape
                native = math.ceil(height / PATCH) * math.ceil(width / PATCH)
                assert count == native if native <= TOKENS else TOKENS * 0.7 < count <= TOKENS
        for row, end in enumerate(ends):
            for name in ("patches", "segment_ids", "positions", "tokens"):
                assert not batch[name][row, end:].any(), name
        assert not batch["grids"][~batch["mask"]].any()
        assert (batch["caption"][~batch["mask"]] == None).all()  # noqa: E711 elementwise
    assert sorted(seen) == list(range(COUNT))


def test_resized_images_are_those_of_augment_patches():
    @data_iterator(source=sources.Records(RECORDS))
    def alone(data, label, *, draw):
        patches, _, mask, _ = augment.patches(
            fn.decoders.image(data), draw=draw, patch=PATCH, tokens=TOKENS
        )
        return {"patches": patches, "mask": mask, "label": label}

    expected = on_host(next(iter(alone(batch_size=COUNT, shuffle=False))))
    loop = iterator(packed(text=None, enlarge=True), function=without_text)
    for batch in map(on_host, loop):
        for row, slot, label in images_of(batch):
            found = batch["patches"][row, batch["segment_ids"][row] == slot + 1]
            wanted = expected["patches"][label][expected["mask"][label]]
            np.testing.assert_array_equal(found, wanted)


@data_iterator(mask=True)
def without_text(data, label, *, pack):
    return {"patches": pack.patches(fn.decoders.image(data)), "label": pack.per_image(label)}


def test_batches_do_not_depend_on_devices():
    expected = epochs_of(iterator())
    assert len({batch["label"].tobytes() for batch in expected}) == len(expected)
    for devices in (1, 2, 4):
        found = epochs_of(iterator(devices=devices))
        assert len(found) == len(expected)
        assert all(map(equal, expected, found)), devices


def test_a_pipeline_without_an_image_delivers_zeros():
    source = packed(RECORDS[:7])
    (batch,) = map(on_host, iterator(source, rows=8, devices=4))
    blank = ~batch["mask"].any(axis=1)
    assert blank[6:].all()
    assert not any(batch[name][blank].any() for name in ("patches", "tokens", "segment_ids"))
    assert equal(batch, on_host(next(iter(iterator(source, rows=8)))))


def test_statistics_count_images_on_any_number_of_devices():
    for devices in (1, 4):
        loop = iterator(packed(RECORDS[:7]), rows=8, devices=devices)
        stats = loop.watch()
        list(loop)
        assert (stats.batches, stats.examples, stats.padding) == (1, 7, 0), devices


def test_operators_after_packing_change_blank_rows_on_all_devices():
    @data_iterator(mask=True)
    def scaled(data, label, text, *, pack):
        patches = fn.cast(pack.patches(fn.decoders.image(data)), dtype=types.FLOAT)
        return {
            "patches": patches / 127.5 - 1.0,
            "label": pack.per_image(label) + 1,
            "tokens": pack.tokens(text) - 1,
        }

    source = packed(RECORDS[:7])
    for count in (1, 2, 4, 8):
        (batch,) = map(on_host, iterator(source, 8, min(count, 4), scaled))
        missing = ~batch["mask"]
        padding = batch["segment_ids"] == 0
        assert missing.any() and (batch["label"][missing] == 1).all(), count
        assert (batch["patches"][padding] == -1).all() and (batch["tokens"][padding] == -1).all()


def test_a_state_moves_to_other_devices_and_other_rows():
    expected = epochs_of(iterator())
    loop = iterator(devices=2)
    for _ in range(3):
        next(loop)
    state = json.loads(json.dumps(loop.get_state()))
    again = iterator(devices=4)
    again.set_state(state)
    rest = epochs_of(again)
    assert all(map(equal, expected[3:], rest)) and len(rest) == len(expected) - 3
    smaller = iterator(rows=2)
    smaller.set_state(state)
    rows = [row for batch in map(on_host, smaller) for row in batch["patches"]]
    num_first = len(iterator())
    wanted = [row for batch in expected[3:num_first] for row in batch["patches"]]
    assert all(map(np.array_equal, wanted, rows)) and len(rows) in (len(wanted), len(wanted) - 2)


def test_seek_step_and_lengths_count_the_rows_of_each_epoch():
    stream = train.stream(source=packed(), batch_size=ROWS, shuffle=True, seed=7, num_epochs=3)
    batches = [on_host(batch) for batch in stream]
    lengths = []
    loop = iterator()
    for _ in range(3):
        lengths.append(len(loop))
        assert len(list(loop)) == lengths[-1]
    again = train.stream(source=packed(), batch_size=ROWS, shuffle=True, seed=7, num_epochs=3)
    assert len(again) == len(batches) == sum(lengths)
    for step in (0, 5, lengths[0], lengths[0] + lengths[1] + 2):
        again.seek_step(step)
        assert equal(on_host(next(again)), batches[step])


def test_drop_leaves_out_the_last_rows():
    full = [on_host(batch) for batch in iterator()]
    loop = iterator(drop_remainder=True)
    found = [on_host(batch) for batch in loop]
    incomplete = not full[-1]["mask"].any(axis=1).all()
    assert len(found) == len(full) - incomplete and all(map(equal, full, found))


def test_partial_batches_are_refused():
    with pytest.raises(ValueError, match="'partial' can't be used with rows"):
        iterator(last_batch_policy="partial")
    with pytest.raises(ValueError, match=r"\(Grain: pad='mask'\), .* drop_remainder=True"):
        list(DALIIterDataset(data_iterator(train.pipeline_fn, source=packed()), batch_size=ROWS))


def test_batches_are_not_filled_with_the_next_epoch():
    with pytest.raises(ValueError, match="last_batch_padded=False: a batch of Packed has no rec"):
        iterator(last_batch_padded=False)


def test_epochs_without_a_row_have_no_batch():
    unreadable = [{**record, "data": record["data"][:10]} for record in RECORDS[:30]]
    halves = [(sources.Records(unreadable), 9), (sources.Records(RECORDS[30:35]), 1)]
    source = packed(sources.Mixture(halves, length=2))
    counts = [source.row_table(7, True, epoch).num_groups for epoch in range(12)]
    assert 0 in counts and 1 in counts
    stream = train.stream(source=source, batch_size=1, shuffle=True, seed=7, num_epochs=12)
    assert len(stream) == len(list(stream)) == sum(counts)


def labels_of(loop):
    return sorted(label for batch in map(on_host, loop) for _, _, label in images_of(batch))


def test_mixtures_and_selections_are_packed():
    halves = [sources.Records(RECORDS[:30]), sources.Records(RECORDS[30:])]
    mixture = sources.Mixture([(halves[0], 1), (halves[1], 1)], length=100)
    found = [epochs_of(iterator(packed(mixture), devices=devices)) for devices in (1, 4)]
    assert all(map(equal, *found)) and len(found[0]) == len(found[1])
    assert sum(batch["mask"].sum() for batch in found[0]) == 200
    even = sources.Selection(sources.Records(RECORDS), np.arange(0, COUNT, 2))
    assert labels_of(iterator(packed(even))) == list(range(0, COUNT, 2))


def damaged(label):
    """Returns the records, with wrong pixels in one PNG."""
    records = [dict(record) for record in RECORDS]
    data = bytes(records[label]["data"])
    at = data.index(b"IDAT") + 4
    damaged_data = data[:at] + bytes(len(data) - at - 16) + data[-16:]
    records[label]["data"] = np.frombuffer(damaged_data, np.uint8)
    return records


def first_label():
    """Returns a label of the third batch, whose image has more than one patch."""
    batch = [on_host(batch) for batch in iterator()][2]
    return max((label for _, _, label in images_of(batch)), key=lambda k: len(RECORDS[k]["data"]))


def test_a_bad_record_is_masked_in_its_place():
    label = first_label()
    good = [on_host(batch) for batch in iterator()]
    records = damaged(label)
    found = [
        [on_host(batch) for batch in iterator(packed(records), devices=d, on_error="mask")]
        for d in (1, 4)
    ]
    assert all(map(equal, *found))
    for before, after in zip(good, found[0], strict=True):
        (row, slot), is_bad = (0, 0), np.zeros_like(before["mask"])
        if label in before["label"][before["mask"]]:
            row, slot = np.argwhere((before["label"] == label) & before["mask"])[0]
            is_bad[row, slot] = True
        np.testing.assert_array_equal(after["mask"], before["mask"] & ~is_bad)
        segments = np.where(is_bad.any() & (before["segment_ids"] == slot + 1), 0, 1)
        segments[np.arange(ROWS) != row] = 1
        np.testing.assert_array_equal(after["segment_ids"], before["segment_ids"] * segments)
        for name in ("patches", "flipped", "tokens", "positions"):
            assert not after[name][after["segment_ids"] == 0].any(), name
        assert not after["label"][~after["mask"]].any() and not after["grids"][~after["mask"]].any()
        assert (after["caption"][~after["mask"]] == None).all()  # noqa: E711 elementwise
        keeps = after["segment_ids"] > 0
        np.testing.assert_array_equal(after["patches"][keeps], before["patches"][keeps])


@pytest.mark.parametrize("rows", (1, 2, 4))
def test_a_stand_in_may_have_a_longer_text(rows):
    records = [
        {"data": RECORDS[k]["data"], "label": np.int32(k), "text": np.arange(1, 4, dtype=np.int32)}
        for k in range(20)
    ]
    damaged_data = damaged(first_label())[first_label()]["data"]
    records[5] = {**records[5], "data": damaged_data, "text": np.int32([1])}
    found = [
        [on_host(batch) for batch in iterator(packed(records), rows, d, on_error="mask")]
        for d in (0, rows)
    ]
    assert all(map(equal, *found))
    for batch in found[0]:
        assert batch["tokens"].shape == batch["segment_ids"].shape
    assert labels_of(found[0]) == [k for k in range(20) if k != 5]


def test_a_bad_record_fails_its_batch():
    label = first_label()
    records = damaged(label)
    loop = iterator(packed(records), on_error="skip")
    found = labels_of(loop)
    batch = [on_host(batch) for batch in iterator()][2]
    lost = [k for _, _, k in images_of(batch)]
    assert sorted([*found, *lost]) == list(range(COUNT))


def test_a_record_without_a_size_is_in_no_row(caplog):
    records = [*RECORDS]
    records[11] = {**records[11], "data": records[11]["data"][:10]}
    source = packed(records)
    assert source.num_unreadable == 1 and "record 11" in caplog.text
    assert labels_of(iterator(source)) == [k for k in range(COUNT) if k != 11]


def test_a_state_names_other_sizes():
    state = iterator().get_state()
    for change in ({"length": 100}, {"images": 5}, {"patch": 8}, {"tokens": 30}, {"text": None}):
        function = without_text if change == {"text": None} else train
        with pytest.raises(StateError):
            iterator(packed(**change), function=function).set_state(state)
    records = [dict(record) for record in RECORDS]
    for label in (0, 37, COUNT - 1):
        changed = [*records]
        changed[label] = {**records[label], "data": png(drawn_image(label, 8, 20))}
        with pytest.raises(StateError):
            iterator(packed(changed)).set_state(state)


def test_one_record_is_not_packed():
    found = on_host(iterator().record(3))
    pixels = np.asarray(Image.open(io.BytesIO(RECORDS[3]["data"])))
    text = len(RECORDS[3]["text"])
    np.testing.assert_array_equal(found["patches"][:-text], patches_of(pixels))
    assert found["label"].tolist() == [3]


def test_paths_are_declared_in_the_source(tmp_path):
    records = []
    for k, record in enumerate(RECORDS[:6]):
        path = tmp_path / f"{k}.png"
        path.write_bytes(record["data"])
        records.append({**record, "data": str(path).encode()})
    with pytest.raises(ValueError, match=r"paths, pass kinds={'data': .*without read_file"):
        packed(records)
    kinds = {"data": sources.Field(np.uint8, 1, is_path=True)}
    found = iterator(packed(sources.Records(records, kinds=kinds)))
    assert all(map(equal, map(on_host, found), map(on_host, iterator(packed(RECORDS[:6])))))


def test_sizes_are_stored(tmp_path):
    folder = tmp_path / "images"
    (folder / "class").mkdir(parents=True)
    sizes = []
    for k, record in enumerate(RECORDS[:6]):
        (folder / "class" / f"{k}.png").write_bytes(record["data"])
        sizes.append(Image.open(io.BytesIO(record["data"])).size[::-1])
    options = {"text": None, "cache_dir": tmp_path / "cache"}
    first = packed(sources.Files(folder), **options)
    (stored,) = (tmp_path / "cache").iterdir()
    again = packed(sources.Files(folder), **options)
    assert [stored] == [*(tmp_path / "cache").iterdir()]
    for source in (first, again):
        expected = [[math.ceil(side / PATCH) for side in size] for size in sizes]
        assert [
            grid for grid, size in zip(source.grids.tolist(), expected) if math.prod(size) <= TOKENS
        ] == [size for size in expected if math.prod(size) <= TOKENS]


def test_stored_sizes_depend_on_the_use_of_a_field(tmp_path):
    for k, record in enumerate(RECORDS):
        (tmp_path / f"{k}.png").write_bytes(record["data"])
    files = sources.Files(tmp_path)
    cache = {"cache_dir": tmp_path / "cache", "images": IMAGES}
    sources.Packed(files, None, text="data", length=100_000, **cache)  # the bytes are the text
    grids = packed(files, text=None, **cache).grids
    assert grids.tolist() == packed(files, text=None, cache_dir=tmp_path / "other").grids.tolist()


def test_stored_sizes_depend_on_the_kind_of_a_field(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = pyarrow.array([np.zeros((8, 12, 4), np.uint8).tolist()] * 3)
    parquet.write_table(pyarrow.table({"data": images}), tmp_path / "images.parquet")

    def grids(layout, cache):
        kinds = {"data": sources.Field(np.uint8, 3, layout=layout)}
        source = sources.Parquet([tmp_path / "images.parquet"], kinds=kinds)
        return packed(source, text=None, cache_dir=tmp_path / cache).grids.tolist()

    assert grids("CHW", "a") == [[3, 1]] * 3
    assert grids("HWC", "a") == grids("HWC", "b") == [[2, 3]] * 3


def test_a_repaired_image_is_read_again(tmp_path):
    (tmp_path / "images").mkdir()
    paths = [tmp_path / "images" / f"{k}.png" for k in range(100)]
    for k, path in enumerate(paths):
        path.write_bytes(RECORDS[k % COUNT]["data"])
    data = paths[50].read_bytes()
    options = {"text": None, "cache_dir": tmp_path / "cache"}
    paths[50].write_bytes(bytes(len(data)))
    assert packed(sources.Files(paths=paths, identity="A"), **options).num_unreadable == 1
    paths[50].write_bytes(data)
    again = packed(sources.Files(paths=paths, identity="A"), **options)
    assert again.num_unreadable == 0 and again.lengths.all()


def test_text_alone_is_packed_with_images_of_one_size():
    records = [
        {**record, "text": np.arange(1, 2 + label % 40, dtype=np.int32)}
        for label, record in enumerate(RECORDS)
    ]
    source = packed(records, field=None)

    @data_iterator(source=source, mask=True)
    def train(data, label, text, *, pack):
        images = fn.resize(fn.decoders.image(data), size=(6, 7))
        return {
            "images": pack.per_image(images),
            "tokens": pack.tokens(text),
            "label": pack.per_image(label),
        }

    seen = []
    for batch in map(on_host, train(batch_size=ROWS)):
        assert batch["images"].shape == (ROWS, IMAGES, 6, 7, 3)
        assert batch["images"][batch["mask"]].any(axis=(1, 2, 3)).all()
        assert not batch["images"][~batch["mask"]].any() and "grids" not in batch
        for row, slot, label in images_of(batch):
            seen.append(label)
            is_own = batch["segment_ids"][row] == slot + 1
            assert batch["tokens"][row, is_own].tolist() == records[label]["text"].tolist()
            assert batch["positions"][row, is_own].tolist() == list(range(is_own.sum()))
    assert sorted(seen) == list(range(COUNT))

    @data_iterator(source=source)
    def cut(data, *, pack):
        return {"patches": pack.patches(fn.decoders.image(data))}

    with pytest.raises(ValueError, match="not cut into patches"):
        next(iter(cut(batch_size=ROWS)))


def test_exif_orientation_is_part_of_the_plan():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = io.BytesIO()
    Image.fromarray(drawn_image(0, 8, 24)).save(file, "JPEG", exif=exif)
    source = packed([{"data": file.getvalue(), "label": np.int32(0)}], text=None)
    assert source.grids.tolist() == [[6, 2]]

    def half(images):
        return fn.cast(images * 0.5, dtype=types.UINT8)

    def unchanged(images):
        return images

    def as_float(images):
        return fn.cast(images, dtype=types.FLOAT)

    for change in (fn.copy, fn.flip, as_float, unchanged, fn.hsv, half):

        @data_iterator(source=source)
        def ignoring(data, label, *, pack):
            images = change(fn.decoders.image(data, adjust_orientation=False))
            return {"patches": pack.patches(images)}

        with pytest.raises(ValueError, match="adjust_orientation=False. Omit it"):
            next(iter(ignoring(batch_size=1)))

    @data_iterator(source=source)
    def ignoring_in_a_branch(data, label, *, pack):
        if label > 0:
            images = fn.decoders.image(data)
        else:
            images = fn.decoders.image(data, adjust_orientation=False)
        return {"patches": pack.patches(images)}

    with pytest.raises(ValueError, match="adjust_orientation=False. Omit it"):
        next(iter(ignoring_in_a_branch(batch_size=1, enable_conditionals=True)))

    turned = []
    for turns_itself in (True, False):

        @data_iterator(source=source)
        def turning(data, label, *, pack):
            images = fn.decoders.image(data, adjust_orientation=not turns_itself)
            images = fn.rotate(images, angle=-90.0) if turns_itself else images
            return {"patches": pack.patches(images)}

        turned.append(np.asarray(next(iter(turning(batch_size=1)))["patches"]))
    assert turned[0].any() and np.array_equal(*turned)


def test_more_rows_than_records_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(iterator(packed(RECORDS[:3]), rows=8))
    assert batch["mask"].sum() == 3


@pytest.mark.parametrize("images", (1, IMAGES))
def test_outputs_that_are_not_packed_are_refused(images):
    one_per_row = [{**record, "vector": np.zeros(images, np.float32)} for record in RECORDS]
    source = packed(one_per_row, images=images, enlarge=True, tokens=LENGTH, text=None)

    @data_iterator(source=source)
    def plain(data, vector, *, pack):
        return {"patches": pack.patches(fn.decoders.image(data)), "vector": vector + 1}

    with pytest.raises(ValueError, match="output 'vector' of the graph is not packed into rows"):
        next(iter(plain(batch_size=ROWS)))


@pytest.mark.parametrize("form", (MappingProxyType, lambda outputs: (outputs,)))
def test_dicts_of_packed_outputs_may_have_other_forms(form):
    def batch(form):
        @data_iterator(source=packed(text=None))
        def train(data, *, pack):
            return form({"patches": pack.patches(fn.decoders.image(data))})

        return on_host(next(iter(train(batch_size=ROWS, seed=1))))

    assert equal(batch(form), batch(dict))


@pytest.mark.parametrize("form", (lambda x: {"of": x}, lambda x: [x, x]))
def test_packed_outputs_in_an_output_have_their_own_error(form):
    @data_iterator(source=packed(text=None))
    def train(data, *, pack):
        return {"patches": form(pack.patches(fn.decoders.image(data)))}

    with pytest.raises(TypeError, match="an output is a single array"):
        next(iter(train(batch_size=ROWS)))


def test_outputs_whose_shapes_change_are_refused():
    @data_iterator(source=packed())
    def halved(data, *, pack):
        return {"patches": fn.slice(pack.patches(fn.decoders.image(data)), 0, 1, axes=[0])}

    with pytest.raises(ValueError, match="output 'patches' do not fill the rows"):
        next(iter(halved(batch_size=ROWS)))


@pytest.mark.parametrize("images", (1, IMAGES))
@pytest.mark.parametrize("rows", (1, ROWS))
@pytest.mark.parametrize("change", (lambda x: fn.cat(x, x), lambda x: x[:0]))
def test_texts_of_other_lengths_than_planned_are_refused(change, rows, images):
    records = [record for record in RECORDS if len(record["text"])]

    @data_iterator(source=packed(records, images=images))
    def changed(data, text, *, pack):
        return {"tokens": pack.tokens(change(text))}

    with pytest.raises(GraphError, match="reinterpret failed for every record"):
        next(iter(changed(batch_size=rows)))


def test_a_text_of_another_length_is_a_bad_record():
    records = [{**record, "targets": record["text"]} for record in RECORDS]
    swapped = [k for k in range(COUNT) if k % 4 in (1, 2) and k < 40]
    for k in swapped:  # the sum of the lengths stays
        records[k]["targets"] = RECORDS[k + 1 if k % 4 == 1 else k - 1]["text"]

    @data_iterator(source=packed(records), mask=True)
    def both(text, targets, label, *, pack):
        return {
            "tokens": pack.tokens(text),
            "targets": pack.tokens(targets),
            "label": pack.per_image(label),
        }

    seen = []
    for batch in map(on_host, both(batch_size=ROWS, on_error="mask")):
        assert np.array_equal(batch["tokens"], batch["targets"])
        seen += [label for _, _, label in images_of(batch)]
    assert sorted(seen) == sorted({*range(COUNT)} - {*swapped})


@pytest.mark.parametrize("dtype", (np.bool_, np.uint8, np.int32))
@pytest.mark.parametrize("ndim", (2, 3))
def test_masks_are_cut_as_images_are(dtype, ndim):
    records = []
    for record in RECORDS[:4]:
        pixels = np.asarray(Image.open(io.BytesIO(record["data"])))
        mask = (pixels[..., :1] % 2).astype(dtype)
        records.append({**record, "mask": mask if ndim == 3 else mask[..., 0]})

    @data_iterator(source=packed(records, text=None), mask=True)
    def cut(data, mask, label, *, pack):
        masks = pack.patches(mask, interp_type=types.INTERP_NN)
        return {"masks": masks, "label": pack.per_image(label)}

    batch = on_host(next(cut(batch_size=ROWS)))
    seen = []
    for row, slot, label in images_of(batch):
        patches = batch["masks"][row, batch["segment_ids"][row] == slot + 1]
        expected = records[label]["mask"]
        assert patches.dtype == dtype
        assert patches.tolist() == patches_of(np.atleast_3d(expected)).tolist()
        seen.append(label)
    assert sorted(seen) == [0, 1, 2, 3]
    assert not batch["masks"][batch["segment_ids"] == 0].any()


def test_images_with_the_channels_first_are_refused():
    @data_iterator(source=packed())
    def planes(data, *, pack):
        images = fn.crop_mirror_normalize(fn.decoders.image(data))
        return {"patches": pack.patches(images)}

    with pytest.raises(TypeError, match="layout HWC, not CHW"):
        next(iter(planes(batch_size=1)))
    arrays = [{"data": drawn_image(k, 8, 12).transpose(2, 0, 1)} for k in range(4)]
    kinds = {"data": sources.Field(np.uint8, 3, layout="CHW")}

    @data_iterator(source=packed(sources.Records(arrays, kinds=kinds), text=None))
    def arrays_of(data, *, draw, pack):
        return {"patches": pack.patches(data)}

    with pytest.raises(TypeError, match="layout HWC, not CHW"):
        next(iter(arrays_of(batch_size=1)))


def test_a_graph_takes_pack_only_from_a_packed_source():
    with pytest.raises(TypeError, match=r"needs pack, which only"):
        iterator(sources.Records(RECORDS))

    def label_alone(label):
        return {"label": label}

    with pytest.raises(TypeError, match=r"label_alone\(\) does not take pack"):
        data_iterator(label_alone)(source=packed(), batch_size=2)


def test_packed_sources_are_not_wrapped():
    source = packed()
    for wrap in (
        lambda: sources.Selection(source, [0]),
        lambda: source.map(dict),
        lambda: sources.Named(source),
        lambda: sources.Mixture([(source, 1)]),
        lambda: packed(source),
    ):
        with pytest.raises(TypeError, match="to Packed|mixture to Packed instead"):
            wrap()


def test_arguments_are_checked():
    for options, text in (
        ({"length": 0}, "length must be"),
        ({"images": 0}, "images must be"),
        ({"field": "image"}, "no field 'image'"),
        ({"field": "label", "text": None}, "the size of none of the 90 images"),
        ({"length": 3, "tokens": 3}, "3 tokens of text.* with a patch"),
        ({"field": None, "length": 2}, "3 tokens of text.* row of 2. Use"),
        ({"field": None, "text": None}, "pass field="),
        ({"field": None}, "record 0 has no token"),
    ):
        with pytest.raises(ValueError, match=text):
            packed(**options)


def test_random_maps_must_not_change_lengths():
    source = sources.Records(RECORDS).random_map(
        lambda record, rng: {"text": record["text"][: rng.integers(2)]}, inputs=["text"]
    )
    with pytest.raises(ValueError, match="one length per record"):
        packed(source)
    assert packed(source, text=None).lengths.any()


def test_pack_is_public():
    assert Pack.per_image.__doc__


def test_a_table_can_be_used_while_another_is_computed():
    is_computing, may_end = threading.Event(), threading.Event()

    def make(epoch):
        if epoch == 1:
            is_computing.set()
            may_end.wait()
        return Table(np.arange(3), np.array([0, 2, 3]))

    tables = Tables(make)
    first = tables(0)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        second = threads.submit(tables, 1)
        is_computing.wait()
        assert tables(0) is first and tables.num_groups(0) == 2
        may_end.set()
        assert second.result().num_groups == 2
