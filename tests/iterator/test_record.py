"""``iterator.record(number)`` is the row of the batches, and does not move the iterator."""

import io
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn
from PIL import Image

from dalijax import augment, data_iterator, sources
from dalijax.errors import BatchError, StateError

COUNT = 7


def encoded(seed, size=(30, 40)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_records(first=0, count=COUNT):
    return sources.Records(
        [
            {"data": encoded(first + k), "x": np.float32([first + k, 0.5]), "text": f"{first + k}"}
            for k in range(count)
        ]
    )


def noisy(record, rng):
    return {"x": record["x"] + rng.random(2, dtype=np.float32)}


SOURCES = {
    "records": make_records,
    "selection": lambda: sources.Selection(make_records(count=12), np.arange(12) % 2 == 0),
    "mixture": lambda: sources.Mixture([(make_records(), 2), (make_records(50, 3), 1)], length=5),
    "random map": lambda: make_records().random_map(noisy, inputs=["x"]),
}


def graph(data, x, *, draw):
    image = fn.decoders.image(data)
    return {
        "image": augment.random_resized_crop(image, 16, flip=0.5, draw=draw),
        "half": augment.normalize(image, mean=99.0, std=50.0, dtype="bfloat16"),
        "x": x,
        "u": draw.uniform(),
    }


def iterator_of(source, batch_size=3, **config):
    config = {"mask": True, "seed": 5, **config}
    seed = config.pop("seed")
    return data_iterator(graph, **config)(source=source, batch_size=batch_size, seed=seed)


def check_equal(record, batch, row):
    record, batch = jax.device_get((record, batch))
    assert list(record) == list(batch)
    for name, value in record.items():
        expected = batch[name][row]
        assert np.shape(value) == np.shape(expected), name
        if name != "index":  # shardings narrow int64
            assert getattr(value, "dtype", str) == getattr(expected, "dtype", str), name
        np.testing.assert_array_equal(value, expected, name)


@pytest.mark.parametrize("name", SOURCES)
def test_a_record_is_its_row_of_the_batches(name):
    """Also with other batches between, in other epochs, and of another iterator."""
    source = sources.Named(SOURCES[name](), "name", index="index")
    iterator, other = iterator_of(source), iterator_of(source, 1, as_numpy=True)
    starts, seen = {}, set()
    for epoch in range(3):
        for batch in iterator:
            for row, number in enumerate(batch["index"].tolist()):
                if not batch["mask"][row]:
                    continue
                # The epoch of a mixture's record is that of its own source.
                passes = starts.setdefault(number, 0)
                starts[number] += 1
                record_epoch = passes if name == "mixture" else epoch
                check_equal(iterator.record(number, record_epoch), batch, row)
                check_equal(other.record(np.int64(number), record_epoch), batch, row)
                seen.add(number)
    assert len(seen) == (10 if name == "mixture" else len(source))
    assert other.step == other.epoch == 0
    with pytest.raises(ValueError, match=rf"record\({len(seen)}\): the source has {len(seen)} rec"):
        other.record(len(seen))


def test_records_have_the_arrays_of_batches_without_sharding():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    source = sources.Named(make_records(), "name", index="index")
    iterator = iterator_of(source, 4, sharding=sharding)
    batch = next(iterator)
    for row, number in enumerate(np.asarray(batch["index"]).tolist()):
        record = iterator.record(number)
        assert len(record["image"].devices()) == 1
        check_equal(record, batch, row)
    with jax.transfer_guard("disallow"):
        assert isinstance(iterator_of(source).record(0)["image"], jax.Array)
    assert isinstance(iterator_of(source, as_numpy=True).record(0)["image"], np.ndarray)


def doubled(batch, key):
    return {**batch, "double": batch["x"] * 2}


def test_batch_map_is_not_applied():
    iterator = iterator_of(make_records(), batch_map=doubled)
    record = iterator.record(0)
    assert "double" not in record and set(next(iterator)) == {*record, "double"}


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("peeks", (False, True))
def test_the_iterator_does_not_move(stream, peeks):
    def new():
        make = data_iterator(graph, mask=True)
        make = make.stream if stream else make
        return make(source=make_records(), batch_size=3, seed=5)

    plain, asked = new(), new()
    for step in range(3):
        for number in range(2):
            if peeks:
                peeked = asked.peek()
            before = asked.get_state(), asked.epoch, asked.step
            asked.record(step + number)
            asked.record(number, 20)
            assert (asked.get_state(), asked.epoch, asked.step) == before
        batch = next(asked)
        jax.tree.map(np.testing.assert_array_equal, batch, next(plain))
        if peeks:
            jax.tree.map(np.testing.assert_array_equal, batch, peeked)
        assert asked.get_state() == plain.get_state()
    if not stream:
        assert next(asked, None) is None
        asked.record(0)
        assert next(asked, None) is None
    restored = new()
    restored.record(1)
    restored.set_state(json.loads(json.dumps(asked.get_state())))
    restored.record(1)
    assert restored.get_state() == asked.get_state()


def test_prefetched_runs_are_kept():
    reads = []

    class Counting(sources.Source):
        fields = {"x": sources.Field(np.int32, 0)}

        def __len__(self):
            return 100

        def read(self, indices, names):
            reads.extend(indices.tolist())
            return {"x": indices.astype(np.int32)}

        def identity(self):
            return "counting"

    def run(asks):
        make = data_iterator(lambda x: x + 0, ["x"], source=Counting(), shuffle=False)
        iterator, batches = make(batch_size=4), []
        for _ in range(10):
            batches.append(np.asarray(next(iterator)["x"]).tolist())
            if asks:
                assert iterator.record(99)["x"] == 99
        iterator.close()
        found = [number for number in reads if number < 40]
        reads.clear()
        return batches, sorted(found)

    assert run(False) == run(True)


def test_the_epoch_is_that_of_the_iterator():
    iterator = iterator_of(make_records())
    first = iterator.record(2)["u"]
    assert first == iterator.record(2, 0)["u"] == iterator.record(2, 0.0)["u"]
    list(iterator)
    iter(iterator)
    assert iterator.epoch == 1
    assert first != iterator.record(2)["u"] == iterator.record(2, 1)["u"]


@pytest.mark.parametrize(
    "arguments, error, text",
    (
        ((-1,), ValueError, "number must be a whole number, 0 or more, not -1"),
        ((7,), ValueError, r"record\(7\): the source has 7 records, from 0 to 6"),
        ((1 << 70,), ValueError, "the source has 7 records"),
        (("a.jpg",), TypeError, "number must be a whole number, 0 or more, not 'a.jpg'"),
        ((True,), TypeError, "number must be"),
        ((0, -1), ValueError, "epoch must be a whole number, 0 or more, not -1"),
        ((0, 0.5), TypeError, "epoch must be"),
        ((0, 1 << 60), ValueError, "epoch must be"),
    ),
)
def test_other_numbers_are_refused(arguments, error, text):
    iterator = iterator_of(make_records())
    with pytest.raises(error, match=text):
        iterator.record(*arguments)
    assert next(iterator)["x"].shape == (3, 2)


# Bad records


def with_bad(kind):
    records = [{"data": encoded(k), "number": np.int32(k)} for k in range(6)]
    if kind == "no image":
        records[3]["data"] = b"no image"
    elif kind == "cut off":
        records[3]["data"] = encoded(3)[:-400]
    elif kind == "too small":
        records[3]["data"] = encoded(3, (10, 10))
    elif kind == "unreadable":

        class Bad(list):
            def __getitem__(self, number):
                if number == 3:
                    raise ValueError("broken")
                return super().__getitem__(number)

        return sources.Records(Bad(records))
    return sources.Records(records)


@pytest.mark.parametrize(
    "kind, text",
    {
        "no image": "it isn't an image that DALI decodes: it begins with b'no image'",
        "cut off": "cut off|decode",
        "too small": "10 x 10",
        "unreadable": "ValueError: broken",
    }.items(),
)
@pytest.mark.parametrize("on_error", ("raise", "mask", "skip"))
def test_a_bad_record_raises_its_error(kind, text, on_error):
    def crops(data, number, *, draw):
        return {"image": augment.random_crop(fn.decoders.image(data), 20, draw=draw), "n": number}

    make = data_iterator(crops, on_error=on_error, mask=True, shuffle=False)
    iterator = make(source=with_bad(kind), batch_size=2)
    numbers = []
    for _ in range(2):
        with pytest.raises(BatchError, match=f"record 3 in epoch 0 failed: .*({text})") as caught:
            iterator.record(3)
        assert caught.value.files == ("record 3",)
        assert iterator.record(2)["n"] == 2 and not iterator.errors
        try:
            batch = next(iterator)
            numbers += np.asarray(batch["n"])[np.asarray(batch["mask"])].tolist()
        except BatchError:
            assert on_error == "raise"
    assert numbers == {"raise": [0, 1], "mask": [0, 1, 2], "skip": [0, 1, 4, 5]}[on_error]


def test_errors_contain_no_secrets():
    class Remote(sources.Source):
        fields = {"x": sources.Field(np.float32, 0)}

        def __len__(self):
            return 4

        def read(self, indices, names):
            raise OSError("https://host/x?sig=SECRET failed")

        def identity(self):
            return "remote"

    iterator = data_iterator(lambda x: x + 0, ["x"])(source=Remote(), batch_size=2)
    with pytest.raises(OSError, match=r"https://host/x") as caught:
        iterator.record(1)
    assert "SECRET" not in str(caught.value)


# Iterators without such records


def test_other_iterators_are_refused(jpegs):
    @data_iterator(reader_name="reader")
    def read():
        data, label = fn.readers.file(files=jpegs, name="reader")
        return {"data": fn.decoders.image(data), "label": label}

    for iterator in (read(batch_size=2), read.stream(batch_size=2)):
        text = r"record\(3\): DALI's readers read sequentially.*Use a source, such as sources.Files"
        with pytest.raises(TypeError, match=text):
            iterator.record(3)

    drawing = data_iterator(lambda x: x + fn.random.uniform(), ["x"])
    with pytest.raises(StateError, match="draws random numbers by .*Uniform.*Draw them for each"):
        drawing(source=sources.Arrays({"x": np.arange(4.0, dtype="f4")}), batch_size=2).record(0)

    iterator = iterator_of(make_records())
    iterator.close()
    with pytest.raises(ValueError, match="the iterator is closed"):
        iterator.record(0)
