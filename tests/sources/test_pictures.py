"""What is no picture is named before DALI decodes: of 32 and more, one ends the process."""

import json
import pathlib

import numpy as np
import picture_worker
import pytest
from nvidia.dali import fn
from shardings import rows_over

from dalijax import data_iterator, sources
from full import in_full
from programs import run_python

CASES = [(how, bad) for how in picture_worker.HOWS for bad in picture_worker.BAD]
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


@pytest.mark.parametrize(
    ("how", "bad"),
    [one if one in SHORT else in_full(*one) for one in CASES],
    ids=map(" ".join, CASES),
)
def test_a_record_that_is_no_picture_is_masked_in_a_large_batch(how, bad):
    done = run_python(pathlib.Path(picture_worker.__file__), how, bad)
    assert json.loads(done.stdout) == picture_worker.MASKS


GOOD = picture_worker.GOOD
CUT = GOOD[: GOOD.index(b"\xff\xda") + 12]  # a whole header, and no pixels
NONE = b"<html>"


def decode(data, number):
    return fn.decoders.image(data)[0, 0, 0], number


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("devices", [None, 2])
def test_good_pictures_come_once_among_wholly_bad_batches(seed, devices):
    rng = np.random.default_rng(seed)
    kinds = [(GOOD, CUT, NONE)[k] for k in rng.choice(3, 24, p=[0.4, 0.3, 0.3])]
    kinds[-1] = GOOD  # else nothing may be left to stand for the others
    source = sources.Records([{"data": data, "number": k} for k, data in enumerate(kinds)])
    sharding = rows_over(devices) if devices else None
    make = data_iterator(decode, ["x", "n"], source=source, mask="mask", shuffle=False)
    numbers = []
    for batch in make(batch_size=4, num_threads=1, on_error="mask", sharding=sharding):
        numbers += np.asarray(batch["n"])[np.asarray(batch["mask"])].tolist()
    assert numbers == [k for k, data in enumerate(kinds) if data is GOOD]


def test_a_picture_of_impossible_size_is_one_that_is_none():
    png = bytearray(picture_worker.encoded("PNG"))
    png[16:20] = b"\xff" * 4
    source = sources.Records([{"data": GOOD, "number": 0}, {"data": bytes(png), "number": 1}])
    make = data_iterator(decode, ["x", "n"], source=source, mask="mask", shuffle=False)
    assert next(make(batch_size=2, on_error="mask"))["mask"].tolist() == [True, False]


def test_arrays_of_a_source_may_lie_in_any_order():
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
