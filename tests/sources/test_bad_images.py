"""Invalid images are named before DALI decodes: a batch of 32 or more would crash it."""

import io
import json
import os
import re

import bad_image_worker
import numpy as np
import pytest
from forks import run_fork
from nvidia.dali import fn
from PIL import Image
from shardings import rows_over

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError
from dalijax.fn import read_file
from full import FULL, combinations

CASES = [(how, bad) for how in bad_image_worker.HOWS for bad in bad_image_worker.BAD]
SHORT = [
    ("records", "text"),
    ("files", "cut"),
    ("record paths", "zeros"),
    ("grain", "empty"),
    ("grain paths", "gif"),
    ("operator", "text"),
    ("padded paths", "cut"),
    ("record paths", "webp"),
    ("grain", "tiff"),
    ("files", "alpha"),
    ("grain paths", "jpeg2000"),
]


def test_an_invalid_image_is_masked_in_a_large_batch():
    """In a new process, which a crash of DALI would end at the case after the printed cases."""
    cases = CASES if FULL else SHORT
    done = run_fork(bad_image_worker.__file__, ",".join(map(":".join, cases)))
    masks = map(json.loads, done.stdout.splitlines())
    assert dict(zip(cases, masks)) == dict.fromkeys(cases, bad_image_worker.MASKS)


GOOD = bad_image_worker.GOOD
CUT = GOOD[: GOOD.index(b"\xff\xda") + 12]  # a complete header, and no pixels
NONE = b"<html>"
Image.new("L", (9, 7)).save(small_file := io.BytesIO(), "PNG")
SMALL = small_file.getvalue()


def decode(data, number):
    return fn.decoders.image(data)[0, 0, 0], number


@pytest.mark.parametrize(("seed", "devices"), combinations(2, range(6), [None, 2]))
def test_good_images_are_delivered_once_among_wholly_bad_batches(seed, devices):
    rng = np.random.default_rng(seed)
    kinds = [(GOOD, CUT, NONE)[k] for k in rng.choice(3, 24, p=[0.4, 0.3, 0.3])]
    kinds[-1] = GOOD  # otherwise no row could replace the bad rows
    source = sources.Records([{"data": data, "number": k} for k, data in enumerate(kinds)])
    sharding = rows_over(devices) if devices else None
    make = data_iterator(decode, ["x", "n"], source=source, mask="mask", shuffle=False)
    numbers = []
    for batch in make(batch_size=4, num_threads=1, on_error="mask", sharding=sharding):
        numbers += np.asarray(batch["n"])[np.asarray(batch["mask"])].tolist()
    assert numbers == [k for k, data in enumerate(kinds) if data is GOOD]


@pytest.mark.parametrize("on_error", ("raise", "mask"))
def test_a_set_without_a_usable_image_names_files(tmp_path, on_error):
    for number in range(70):
        (tmp_path / f"{number:02}.jpg").write_bytes(b"GIF89a" + bytes(50))
    make = data_iterator(lambda data: fn.decoders.image(data), ["x"], mask="mask", shuffle=False)
    iterator = make(source=sources.Files(str(tmp_path)), batch_size=4, on_error=on_error)
    for _ in range(2):  # no batch is lost
        words = r"00.jpg, .*01.jpg, .*02.jpg, .*03.jpg can't be read, and neither .* decoders: GIF$"
        with pytest.raises(ValueError, match=words):
            next(iterator)


@pytest.mark.parametrize(
    ("image", "mask", "words"),
    (
        (b"GIF89a" + bytes(50), GOOD, "image: not supported by DALI's decoders: GIF"),
        (CUT, GOOD, "decoders.image"),
        (GOOD, SMALL, "but mask has 7 x 9"),
    ),
    ids=("header", "pixels", "size"),
)
def test_an_error_names_the_files_that_the_graph_reads(tmp_path, image, mask, words):
    def graph(image, mask, *, draw):
        images, masks = (fn.decoders.image(read_file(path)) for path in (image, mask))
        window = augment.random_window(images, 4, draw=draw)
        return window.image(images), window.mask(masks)

    records = []
    for number, contents in enumerate(((GOOD, GOOD), (GOOD, GOOD), (image, mask))):
        paths = [tmp_path / f"{number}.{end}" for end in ("jpg", "png")]
        for path, content in zip(paths, contents):
            path.write_bytes(content)
        records.append({"image": str(paths[0]).encode() + b"\0", "mask": str(paths[1]).encode()})
    source = sources.Selection(sources.Records(records), [False, True, True])
    make = data_iterator(graph, ["x", "y"], source=source)
    name = re.escape(f"record 2 ({tmp_path / '2.jpg'}, {tmp_path / '2.png'})")
    with pytest.raises(BatchError, match=name) as raised:
        next(make(batch_size=2))
    assert words in str(raised.value)


def test_an_image_of_impossible_size_is_invalid():
    png = bytearray(bad_image_worker.encoded("PNG"))
    png[16:20] = b"\xff" * 4
    source = sources.Records([{"data": GOOD, "number": 0}, {"data": bytes(png), "number": 1}])
    make = data_iterator(decode, ["x", "n"], source=source, mask="mask", shuffle=False)
    assert next(make(batch_size=2, on_error="mask"))["mask"].tolist() == [True, False]


def test_arrays_of_a_source_may_have_any_memory_layout():
    rows = np.asfortranarray(np.random.default_rng(0).random((4, 3, 2), np.float32))

    class Own(sources.Source):
        fields = {"x": sources.Field(np.dtype("float32"), 2)}

        def __len__(self):
            return 4

        def read(self, indices, names):
            return {"x": [np.asfortranarray(rows[k]) for k in indices]}

        def identity(self):
            return "own"

        def name(self, index):
            return str(index)

    make = data_iterator(lambda x: x + 0, ["x"], source=Own(), shuffle=False)
    np.testing.assert_array_equal(next(make(batch_size=4))["x"], rows)


def test_a_missing_file_of_a_record_is_named(tmp_path):
    path = tmp_path / "0.png"
    Image.new("RGB", (30, 20)).save(path)
    missing = str(tmp_path / "missing.png")
    records = [{"path": os.fsencode(path)}, {"path": os.fsencode(missing)}]

    def crop(path, draw):
        images = fn.decoders.image(read_file(path), device="cpu")
        return augment.random_resized_crop(images, 8, draw=draw)

    make = data_iterator(crop, ["x"], source=sources.Records(records))
    with pytest.raises(BatchError, match=rf"record 1 \({re.escape(missing)}\).*no such file"):
        next(make(batch_size=2))


def test_paths_may_be_urls_that_dali_reads(tmp_path):
    rows = np.arange(4 * 30, dtype=np.uint8).reshape(4, 30)
    records = []
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.png"
        Image.fromarray(row.reshape(2, 5, 3)).save(path)
        records.append({"path": path.as_uri().encode()})
    make = data_iterator(
        lambda path: fn.decoders.image(read_file(path), device="cpu"),
        ["x"],
        source=sources.Records(records),
        shuffle=False,
    )
    np.testing.assert_array_equal(next(make(batch_size=4))["x"].reshape(4, 30), rows)


@pytest.mark.parametrize("on_error", ("raise", "mask", "skip"))
def test_an_image_without_a_size_is_a_bad_record(tmp_path, on_error):
    """Crops need the size before DALI decodes; a file that was deleted has none."""
    paths = [tmp_path / f"{k}.png" for k in range(8)]
    for path in paths:
        Image.new("RGB", (30, 20)).save(path)
    source = sources.Files(str(tmp_path))
    paths[3].unlink()

    def crop(data, draw):
        images = fn.decoders.image(data, device="cpu")
        return augment.random_resized_crop(images, 8, draw=draw)

    mask = {"mask": "mask"} if on_error == "mask" else {}
    make = data_iterator(crop, ["x"], source=source, shuffle=False, on_error=on_error, **mask)
    with make(batch_size=4, num_threads=1) as iterator:
        if on_error == "raise":
            with pytest.raises(RuntimeError, match=re.escape(str(paths[3]))):
                next(iterator)
        batches = [np.asarray(batch.get("mask", np.ones(4, bool))).tolist() for batch in iterator]
    good = [True] * 4
    assert batches == ([[True, True, True, False], good] if on_error == "mask" else [good])
