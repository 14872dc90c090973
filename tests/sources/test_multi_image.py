"""Records with several images: compared with the records, on any devices, resumed, and damaged."""

import io

import numpy as np
import pytest
from host_batches import epochs_of, equal, on_devices
from nvidia.dali import fn, types
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import StateError
from drawing import drawn_image, png

COUNT, MOST, ROWS = 37, 4, 5
SIZE = 6, 8


def make_records():
    rng = np.random.default_rng(0)
    return [
        {
            "images": [png(drawn_image(10 * k + j, *SIZE)) for j in range(rng.integers(0, 5))],
            "label": np.int32(k),
            "caption": f"record {k}",
        }
        for k in range(COUNT)
    ]


RECORDS = make_records()
LISTS = {"images": sources.Field(None)}


@data_iterator(mask=True)
def train(images, label, *, draw, pack):
    image = fn.decoders.image(images)
    return {
        "images": pack.per_image(image),
        "resized": pack.per_image(fn.resize(image, size=(3, 3))) / np.float32(2) + 1,
        "label": pack.per_row(label),
        "flip": pack.per_image(draw.coin_flip()),
    }


def several(records=RECORDS, **options):
    source = sources.Records(records, kinds=LISTS) if isinstance(records, list) else records
    return sources.MultiImage(source, "images", **{"images": MOST, **options})


def batches(source=None, epochs=2, rows=ROWS, devices=0, **call):
    loop = train(source=source or several(), batch_size=rows, seed=3, **on_devices(devices), **call)
    return epochs_of(loop, epochs)


def test_a_row_has_the_images_of_its_record():
    seen = []
    for batch in batches(epochs=1):
        assert batch["images"].shape == (ROWS, MOST, *SIZE, 3)
        assert batch["label"].shape == batch["mask"].shape == batch["num_images"].shape == (ROWS,)
        for row in range(ROWS):
            if not batch["mask"][row]:
                assert not batch["images"][row].any() and batch["caption"][row] is None
                assert batch["num_images"][row] == 0 and batch["label"][row] == 0
                continue
            label = int(batch["label"][row])
            seen.append(label)
            files = RECORDS[label]["images"]
            assert batch["caption"][row] == RECORDS[label]["caption"]
            assert batch["num_images"][row] == len(files)
            for image, file in zip(batch["images"][row], files):
                np.testing.assert_array_equal(image, np.asarray(Image.open(io.BytesIO(file))))
            assert not batch["images"][row, len(files) :].any()
            assert (batch["resized"][row, len(files) :] == 1).all()
    assert sorted(seen) == list(range(COUNT))
    assert {len(record["images"]) for record in RECORDS} == {0, 1, 2, 3, 4}


def test_batches_do_not_depend_on_devices():
    expected = batches(rows=8)
    for devices in (1, 2, 4, 8):
        found = batches(rows=8, devices=devices)
        assert len(found) == len(expected) == 10
        assert all(map(equal, expected, found)), devices


def test_each_image_has_its_own_numbers():
    flips = np.concatenate([batch["flip"][batch["mask"]] for batch in batches(epochs=1)])
    counts = [len(record["images"]) for record in RECORDS]
    assert 0.2 < flips.sum() / sum(counts) < 0.8


def test_a_state_moves_to_other_rows_and_names_other_images():
    expected = batches()
    loop = train(source=several(), batch_size=ROWS, seed=3)
    assert len(loop) == 8
    for _ in range(3):
        next(loop)
    state = loop.get_state()
    again = train(source=several(), batch_size=1, seed=3)
    again.set_state(state)
    labels = [int(batch["label"][0]) for batch in again]
    rest = np.concatenate([batch["label"][batch["mask"]] for batch in expected[3:8]])
    assert labels == rest.tolist()
    fewer = [dict(record) for record in RECORDS]
    fewer[20] = {**fewer[20], "images": [*fewer[20]["images"], RECORDS[0]["images"][0]][:MOST]}
    for other in (several(fewer), several(images=MOST + 1)):
        with pytest.raises(StateError):
            train(source=other, batch_size=ROWS, seed=3).set_state(state)


@pytest.mark.parametrize("devices", (0, 4))
@pytest.mark.parametrize("number", range(3))
def test_a_bad_image_leaves_the_row_of_its_record_blank(devices, number):
    label = next(k for k, record in enumerate(RECORDS) if len(record["images"]) == 3)
    records = [dict(record) for record in RECORDS]
    files = [*records[label]["images"]]
    data = bytes(files[number])
    at = data.index(b"IDAT") + 4
    files[number] = data[:at] + bytes(len(data) - at - 16) + data[-16:]
    records[label]["images"] = files
    good = batches(rows=8, epochs=1)
    found = batches(several(records), rows=8, epochs=1, devices=devices, on_error="mask")
    for before, after in zip(good, found, strict=True):
        bad = (before["label"] == label) & before["mask"]
        np.testing.assert_array_equal(after["mask"], before["mask"] & ~bad)
        np.testing.assert_array_equal(after["num_images"], np.where(bad, 0, before["num_images"]))
        for name in ("images", "resized", "label", "flip", "caption"):
            np.testing.assert_array_equal(after[name][~bad], before[name][~bad])
        assert not after["images"][bad].any() and (after["resized"][bad] == 1).all()
        assert not after["label"][bad].any() and not after["flip"][bad].any()
        assert after["caption"][bad].tolist() == [None] * bad.sum()
    assert sum(batch["mask"].sum() for batch in found) == COUNT - 1
    left = batches(several(records), epochs=1, on_error="skip")
    assert label not in np.concatenate([batch["label"][batch["mask"]] for batch in left])


@pytest.mark.parametrize("share", (0.2, 0.9))  # the header is damaged, or only the pixels are
def test_a_damaged_image_does_not_hide_records_without_images(share):
    file = png(np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8))
    damaged = {**RECORDS[0], "images": [file[: int(share * len(file))]]}
    records = [damaged, *({**record, "images": record["images"][:1]} for record in RECORDS[1:])]
    assert any(not record["images"] for record in records)
    seen = batches(several(records), epochs=1, on_error="mask")
    labels = np.concatenate([batch["label"][batch["mask"]] for batch in seen])
    assert sorted(labels) == list(range(1, COUNT))


def test_outputs_that_are_not_packed_are_refused():
    @data_iterator(source=several())
    def plain(images, label, *, pack):
        return pack.per_image(fn.decoders.image(images)), label

    with pytest.raises(ValueError, match="output 1 .* is not packed .* pack.per_row"):
        next(iter(plain(batch_size=ROWS)))


def test_mixtures_and_maps_come_before():
    halves = [sources.Records(part, kinds=LISTS) for part in (RECORDS[:10], RECORDS[10:])]
    mixture = several(sources.Mixture([(half, 1) for half in halves], length=40))
    found = [batches(mixture, rows=8, devices=devices) for devices in (1, 4)]
    assert all(map(equal, *found))
    assert sum(batch["mask"].sum() for batch in found[0]) == 80
    source = sources.Records(RECORDS, kinds=LISTS).map(
        lambda record: {"images": record["images"][:1]}, inputs=["images"], fields=LISTS
    )
    for batch in batches(several(source), epochs=1):
        assert batch["num_images"].max() == 1


def test_patches_of_each_image():
    @data_iterator(source=several())
    def cut(images, *, draw, pack):
        image = fn.decoders.image(images)
        patches, _, mask, _ = augment.patches(image, draw=draw, patch=2, tokens=12)
        return {
            "patches": pack.per_image(patches),
            "tokens": pack.per_image(fn.cast(mask, dtype=types.INT32)),
        }

    batch = next(iter(cut(batch_size=ROWS)))
    assert batch["patches"].shape == (ROWS, MOST, 12, 12)
    counts = np.asarray(batch["tokens"]).any(axis=2).sum(axis=1)
    assert counts.tolist() == np.asarray(batch["num_images"]).tolist()


def test_arrays_are_images():
    records = [
        {"images": [np.full((2, 3, 3), 10 * k + j, np.uint8) for j in range(k % 3)], "label": k}
        for k in range(7)
    ]

    @data_iterator(source=several(records), mask=True)
    def plain(images, label, *, pack):
        return {
            "images": pack.per_image(fn.resize(images, size=(1, 1))),
            "label": pack.per_row(label),
        }

    batch = next(iter(plain(batch_size=7)))
    images = np.asarray(batch["images"])
    for row, label in enumerate(np.asarray(batch["label"]).tolist()):
        expected = [10 * label + j for j in range(label % 3)] + [0] * (MOST - label % 3)
        assert images[row, :, 0, 0, 0].tolist() == expected


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="4 images, more than images=2"):
        several(images=2)
    with pytest.raises(ValueError, match="images must be"):
        several(images=1)
    with pytest.raises(TypeError, match="must contain lists"):
        sources.MultiImage(sources.Records([{"x": b"abc"}]), "x", images=2)
    with pytest.raises(ValueError, match="no field 'x'"):
        sources.MultiImage(sources.Records(RECORDS, kinds=LISTS), "x", images=2)
    with pytest.raises(ValueError, match="no record has an image"):
        several([{"images": [], "label": 1}])


def test_methods_of_packed_sources_are_refused():
    for call in (
        lambda images, pack: pack.patches(fn.decoders.image(images)),
        lambda images, pack: pack.tokens(images),
    ):

        @data_iterator(source=several())
        def graph(images, *, pack, call=call):
            return {"x": call(images, pack)}

        with pytest.raises(ValueError, match=r"sources\.Packed"):
            next(iter(graph(batch_size=2)))
