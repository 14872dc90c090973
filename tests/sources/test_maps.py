"""Python functions of records: `Source.map` and `Source.random_map`, compared with NumPy alone."""

from __future__ import annotations

import functools
import io
import json
import pickle
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, types
from PIL import Image

import dalijax
from dalijax import augment, data_iterator, sources
from dalijax.core.random.hashing import fold
from dalijax.core.random.record_generators import RecordGenerators
from dalijax.errors import StateError
from dalijax.sources import Arrays, Field, Files, Mixture, Named, Records, Selection
from tars import write_tar

COUNT, SEED = 24, 3


def rows(count=COUNT, first=0):
    """Records with a number and a vector of it."""
    numbers = np.arange(first, first + count, dtype=np.int32)
    return Arrays({"i": numbers, "x": np.float32(numbers)[:, None] * np.ones(3, np.float32)})


def generator(seed, epoch, record, place=0):
    """Returns the documented generator of a record, made by NumPy alone."""
    key = np.array([fold(seed, epoch, record), place], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def jitter(record, rng):
    return {**record, "x": record["x"] + rng.normal(size=3).astype(np.float32)}


def double(record):
    return {**record, "x": record["x"] * 2}


def noise(record, rng):
    return {"u": rng.random(), "k": rng.integers(1 << 20)}


@data_iterator(output_map=["i", "x"], as_numpy=True, last_batch_policy="partial")
def plain(i, x):
    return i, x


@data_iterator(output_map=["i", "u", "k"], as_numpy=True, last_batch_policy="partial")
def noisy(i, u, k):
    return i, u, k


def over(source, batch_size=4, graph=plain, **call):
    return graph(**{"source": source, "batch_size": batch_size, "seed": SEED, **call})


def joined(batches, name):
    return np.concatenate([np.asarray(batch[name]) for batch in batches])


def assert_equal(batches, others):
    assert len(batches) and batches[0].keys() == others[0].keys()
    for name in batches[0]:
        np.testing.assert_array_equal(joined(batches, name), joined(others, name))


# Values


def test_a_map_returns_what_the_function_returns():
    source = rows().map(lambda record: {"i": record["i"] + 1, "x": np.flip(record["x"])})
    batches = list(over(source))
    assert sorted(joined(batches, "i")) == list(range(1, COUNT + 1))
    np.testing.assert_array_equal(joined(batches, "x")[:, 0] + 1, joined(batches, "i"))
    assert source.identity() == rows().identity() and len(source) == COUNT
    assert repr(source).endswith(
        "map(test_a_map_returns_what_the_function_returns.<locals>.<lambda>)"
    )


def test_random_numbers_are_those_of_the_record_the_epoch_and_the_seed():
    source = rows().random_map(jitter)
    iterator = over(source, 5, shuffle=False)
    for epoch in range(2):
        for n, value in enumerate(joined(list(iterator), "x")):
            rng = generator(SEED, epoch, n)
            expected = np.full(3, n, np.float32) + rng.normal(size=3).astype(np.float32)
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("key", (0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15))
@pytest.mark.parametrize("place", (0, 1, 7))
def test_generators_equal_new_generators_of_numpy(key, place):
    generators = RecordGenerators(np.array([key, 5], np.uint64), place)
    for row, row_key in ((0, key), (1, 5), (0, key)):
        ours, numpys = (
            generators.of_row(row),
            np.random.Generator(np.random.Philox(key=np.array([row_key, place], np.uint64))),
        )
        for draw in (
            lambda rng: rng.integers(7, dtype=np.int32),  # leaves half of 64 bits in a buffer
            lambda rng: rng.random(5),
            lambda rng: rng.permutation(9),
            lambda rng: rng.choice(5),
        ):
            np.testing.assert_array_equal(draw(ours), draw(numpys))


@pytest.mark.parametrize("batch_size", (1, 5, COUNT))
def test_batch_sizes_do_not_change_records(batch_size):
    source = rows().random_map(jitter).random_map(noise, inputs=[])
    assert_equal(list(over(source, 4)), list(over(source, batch_size)))


@pytest.mark.parametrize("devices", (2, 4))
def test_devices_do_not_change_records(devices):
    source = rows().random_map(noise, inputs=[])
    sharding = NamedSharding(Mesh(jax.devices()[:devices], ("d",)), PartitionSpec("d"))
    make = data_iterator(lambda i, u, k: (i, u, k), ["i", "u", "k"], sharding=sharding)
    sharded = list(make(source=source, batch_size=8, seed=SEED, shuffle=True))
    assert_equal(list(over(source, 8, noisy, shuffle=True)), sharded)


def test_slices_of_the_batch_equal_the_whole():
    source = rows().random_map(noise, inputs=[])
    make = data_iterator(lambda u: u + 0, ["u"], as_numpy=True, shuffle=True)
    whole = list(make(source=source, batch_size=8, seed=SEED))
    parts = []
    for host in range(2):
        arguments = make._shard_arguments(host, 2, seed=SEED, call={"source": source})
        parts.append(list(make(source=source, batch_size=4, **arguments)))
    assert_equal(whole, [{"u": np.concatenate([a["u"], b["u"]])} for a, b in zip(*parts)])


def test_threads_do_not_change_records():
    source = rows(256).random_map(jitter)
    expected = list(over(source, 256))
    source.read_threads = 4
    assert_equal(list(over(source, 256)), expected)


def test_the_position_among_random_maps_determines_the_numbers():
    def named(name):
        return lambda record, rng: {name: rng.random()}

    two = rows().random_map(named("a"), inputs=[]).random_map(named("b"), inputs=[])
    between = rows().random_map(named("a"), inputs=[]).map(double)
    between = between.random_map(named("b"), inputs=[])
    make = data_iterator(lambda a, b: (a, b), ["a", "b"], as_numpy=True, shuffle=False)
    first, second = (list(over(source, 8, make)) for source in (two, between))
    assert_equal(first, second)
    for n, (a, b) in enumerate(zip(joined(first, "a"), joined(first, "b"))):
        assert a == np.float32(generator(SEED, 0, n, 0).random())
        assert b == np.float32(generator(SEED, 0, n, 1).random())


# Compositions, against a model in NumPy

STEPS = st.lists(
    st.sampled_from(("map", "random_map", "Selection", "Named", "Mixture")), min_size=1, max_size=5
)


def composed(steps):
    """Returns a source, and a function that returns the x of its record n in an epoch."""
    source = rows()
    operations = []
    for step in steps:
        if step == "map":
            source = source.map(double, inputs=["x"]) if len(operations) % 2 else source.map(double)
        elif step == "random_map":
            source = source.random_map(jitter)
        elif step == "Selection":
            source = Selection(source, np.arange(0, len(source), 2))
        elif step == "Named":
            source = Named(source, f"name{len(operations)}")
        elif not hasattr(source, "order"):
            source = Mixture([(source, 1)])
        operations.append(step)

    def value(n, epoch):
        base = n
        for step in reversed(operations):
            base = 2 * base if step == "Selection" else base
        x, place = np.full(3, base, np.float32), 0
        for step in operations:
            if step == "map":
                x = x * 2
            elif step == "random_map":
                x = x + generator(SEED, epoch, n, place).normal(size=3).astype(np.float32)
                place += 1
        return base, x

    return source, value


@settings(max_examples=30)
@given(STEPS, st.integers(1, 7), st.integers(1, 7), st.integers(0, 10))
def test_compositions_equal_a_model_and_resume(steps, batch_size, other_size, skipped):
    for k, step in enumerate(steps):
        if step == "Selection" and "Mixture" in steps[:k]:
            steps = [s for s in steps if s != "Mixture"]
            break
    source, value = composed(steps)
    for name in source.fields:
        assert name in ("i", "x") or source.fields[name] == Field(None)
    is_mixture = hasattr(source, "order")
    order = dalijax.core.sources.source.order_of(source, SEED, True)
    count = len(source)
    records, epochs = order(np.arange(2 * count))
    expected = [value(n, epoch) for n, epoch in zip(records.tolist(), epochs.tolist())]

    iterator = over(source, batch_size)
    batches = [*iterator, *iterator]
    np.testing.assert_array_equal(joined(batches, "i"), [i for i, _ in expected])
    np.testing.assert_array_equal(joined(batches, "x"), [x for _, x in expected])
    assert is_mixture == ("Mixture" in steps)

    iterator = over(source, batch_size)
    skipped %= len(iterator)
    for _ in range(skipped):
        next(iterator)
    again = over(composed(steps)[0], other_size)
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    done = skipped * batch_size
    np.testing.assert_array_equal(joined(list(again), "x"), [x for _, x in expected[done:count]])

    step = len(iterator) + skipped
    again = over(source, batch_size)
    again.seek_step(step)
    rest = [x for _, x in expected[count + done :]]
    np.testing.assert_array_equal(joined(list(again), "x"), rest)


def test_parts_of_a_mixture_have_their_own_maps():
    parts = [(rows().random_map(jitter), 2), (rows(10, 100), 1)]
    mixtures = [Mixture(parts), Mixture([*parts[:1], (rows(10, 100).map(double), 1)])]
    batches, doubled = (list(over(mixture, 6)) for mixture in mixtures)
    assert_equal(batches, list(over(mixtures[0], 5)))
    numbers, x = joined(batches, "i"), joined(batches, "x")
    order = mixtures[0].order(SEED, True)
    for sample, (record, epoch) in enumerate(zip(*map(np.ndarray.tolist, order(np.arange(34))))):
        assert numbers[sample] == (record if record < COUNT else record - COUNT + 100)
        if record < COUNT:
            noise = generator(SEED, epoch, record).normal(size=3).astype(np.float32)
            np.testing.assert_array_equal(x[sample], np.full(3, record, np.float32) + noise)
    is_second = numbers >= 100
    np.testing.assert_array_equal(joined(doubled, "x")[is_second], 2 * x[is_second])
    np.testing.assert_array_equal(joined(doubled, "x")[~is_second], x[~is_second])


@pytest.mark.parametrize("batch_size", (5, 22))
def test_random_maps_of_all_parts_of_a_mixture(batch_size):
    parts = [(rows(12, first).random_map(jitter), 1) for first in (0, 100, 200)]
    mixture = Mixture(parts)
    batches = list(over(mixture, batch_size))
    samples = zip(*map(np.ndarray.tolist, mixture.order(SEED, True)(np.arange(36))))
    for value, (record, epoch) in zip(joined(batches, "x"), samples, strict=True):
        noise = generator(SEED, epoch, record).normal(size=3).astype(np.float32)
        start = np.full(3, record // 12 * 100 + record % 12, np.float32)
        np.testing.assert_array_equal(value, start + noise)


# Fields


class Counted(sources.Source):
    """Records that note which fields were read."""

    fields = {
        "data": Field(np.uint8, 1),
        "words": Field(None),
        "ids": Field(np.int32, 1, bypass=True),
    }

    def __init__(self):
        self.names_read = set()

    def __len__(self):
        return 8

    def identity(self):
        return "counted"

    def read(self, indices, names):
        self.names_read |= set(names)
        values = {
            "data": lambda k: np.full(4, k, np.uint8),
            "words": lambda k: f"a {k}",
            "ids": lambda k: np.full(2, k, np.int32),
        }
        return {name: [values[name](k) for k in indices.tolist()] for name in names}


def test_fields_outside_of_inputs_remain_and_are_not_read():
    source = Counted()
    mapped = source.map(lambda record: {"ids": record["ids"] + 1}, inputs=["ids"])
    assert list(mapped.fields) == ["data", "words", "ids"]
    source.names_read.clear()
    make = data_iterator(lambda ids: ids + 0, ["ids"], shuffle=False, as_numpy=True)
    batch = next(make(source=mapped, batch_size=4))
    assert source.names_read == {"ids", "words"}  # text is in each batch
    np.testing.assert_array_equal(batch["ids"], np.arange(1, 5)[:, None] * [1, 1])
    assert list(batch["words"]) == [f"a {k}" for k in range(4)]


def test_a_batch_without_results_does_not_call_the_function():
    calls = []

    def count(record):
        calls.append(1)
        return {"n": np.int32(len(calls) * 0)}

    mapped = Counted().map(count, inputs=["ids"], stateful=False)
    assert list(mapped.fields) == ["data", "words", "n"]  # inputs that are not returned are dropped
    calls.clear()
    make = data_iterator(lambda data: data + 0, ["data"], as_numpy=True)
    assert len(list(make(source=mapped, batch_size=4))) == 2 and not calls
    make = data_iterator(lambda n: n + 0, ["n"], as_numpy=True)
    assert len(list(make(source=mapped, batch_size=4, shuffle=False))) == 2 and len(calls) >= 8


def test_unchanged_and_replaced_fields_keep_their_bypass_and_layout():
    kinds = {"image": Field(np.uint16, 3, layout="HWC"), "b": Field(np.int32, 1, bypass=True)}
    pixels = np.arange(8 * 12, dtype=np.uint16).reshape(8, 2, 2, 3)
    source = Arrays({"image": pixels, "b": np.ones((8, 2), np.int32)}, kinds=kinds)
    assert source.map(dict).fields == source.fields
    doubled = source.map(lambda record: {**record, "b": record["b"] * 2})
    assert doubled.fields == source.fields
    make = data_iterator(lambda image: image + 0, ["image"], as_numpy=True)
    np.testing.assert_array_equal(next(make(source=doubled, batch_size=8))["b"], np.full((8, 2), 2))


RETURNED = {
    "int": (7, Field(np.int32), 7),
    "float": (0.5, Field(np.float32), 0.5),
    "bool": (True, Field(np.bool_), True),
    "list": ([1, 2], Field(np.int64, 1), [1, 2]),
    "bytes": (b"ab\0", Field(np.uint8, 1), [97, 98, 0]),
    "array": (np.ones((2, 3), np.float64), Field(np.float64, 2), np.ones((2, 3))),
    "transposed array": (
        np.arange(6).reshape(2, 3).T,
        Field(np.int64, 2),
        [[0, 3], [1, 4], [2, 5]],
    ),
    "big-endian array": (np.array([1, 2], ">i4"), Field(np.int32, 1), [1, 2]),
    "image": (np.ones((2, 3, 3), np.uint8), Field(np.uint8, 3), np.ones((2, 3, 3))),
    "channels first": (
        *(np.ones((3, 2, 8), np.uint8), Field(np.uint8, 3, layout="")),
        np.ones((3, 2, 8)),
    ),
    "no boxes": (np.zeros((0, 4), np.float32), Field(np.float32, 2), np.zeros((0, 4))),
    "jax.Array": (jax.numpy.ones(2), Field(np.float32, 1), [1, 1]),
}


@pytest.mark.parametrize("case", RETURNED)
def test_kinds_of_returned_values(case):
    value, kind, expected = RETURNED[case]
    source = rows(4).map(lambda record: {"value": value})
    assert source.fields == {"value": kind}
    values = source.read(np.arange(3), ["value"])["value"]
    assert len(values) == 3
    for read in values:
        np.testing.assert_array_equal(read, expected)
        assert read.dtype == kind.dtype and read.ndim == kind.ndim


def test_text_and_objects_bypass_the_graph():
    words = Records([{"t": f"a b{k}", "meta": {"k": k}} for k in range(8)])
    source = words.map(
        lambda record: {
            "t": record["t"].upper(),
            "meta": {**record["meta"], "n": 1},
            "ids": [len(word) for word in record["t"].split()],
        }
    )
    assert source.fields == {"t": Field(None), "meta": Field(None), "ids": Field(np.int64, 1)}
    make = data_iterator(lambda ids: fn.cast(ids, dtype=types.INT32), ["ids"], as_numpy=True)
    batch = next(make(source=source, batch_size=8, shuffle=False))
    assert list(batch["t"]) == [f"A B{k}" for k in range(8)]
    assert batch["meta"][5] == {"k": 5, "n": 1} and batch["ids"].tolist() == [[1, 2]] * 8


@pytest.mark.parametrize("value", ({(1, 2): 3}, {1: 2, "a": 3}, object(), 1j, {"a": {1, 2}}))
def test_any_object_bypasses_the_graph(value):
    source = rows(4).map(lambda record: {**record, "object": value})
    assert source.fields["object"] == Field(None)
    batch = next(over(source, 4))
    assert all(returned is value for returned in batch["object"])


def test_empty_lists_of_the_first_records_get_the_kind_of_later_lists():
    boxes = [[], [], [[1.0, 2.0, 3.0, 4.0]], []]
    source = rows(4).map(lambda record: {"boxes": boxes[record["i"]]})
    assert source.fields == {"boxes": Field(np.float64, 2)}
    shapes = [value.shape for value in source.read(np.arange(4), ["boxes"])["boxes"]]
    assert shapes == [(0, 4), (0, 4), (1, 4), (0, 4)]


def test_given_fields_convert_values_and_no_record_is_read():
    class Unread(Arrays):
        def read(self, indices, names):
            raise OSError("not now")

    kinds = {"y": Field(np.float32, 1, bypass=True)}
    source = Unread({"i": np.arange(4)}).map(lambda record: {"y": [record["i"]]}, fields=kinds)
    assert source.fields == kinds
    source = rows(4).map(lambda record: {"y": [record["i"], 1]}, fields=kinds)
    make = data_iterator(lambda draw: draw.uniform(), ["u"], as_numpy=True)
    batch = next(make(source=source, batch_size=4, shuffle=False))
    np.testing.assert_array_equal(batch["y"], [[k, 1] for k in range(4)])
    assert batch["y"].dtype == np.float32


def test_json_text_palettes_and_16_bits(tmp_path):
    """The case of the issue: class numbers and boxes, from a tar."""
    generator = np.random.default_rng(0)
    masks = generator.integers(0, 21, (6, 8, 12), np.uint8)
    depths = generator.integers(0, 1 << 16, (6, 8, 12), np.uint16)

    def png(pixels, palette=False):
        image = Image.fromarray(pixels, "P") if palette else Image.fromarray(pixels)
        if palette:
            image.putpalette([(37 * k) % 256 for k in range(768)])
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    samples = [
        {
            "mask.png": png(masks[k], palette=True),
            "depth.png": png(depths[k]),
            "boxes.json": json.dumps({"boxes": [[k, 0, 1, 2]] * k}).encode(),
            "text.bin": f'{{"k": {k}}}'.encode(),
        }
        for k in range(6)
    ]
    members = [(f"{k}.{name}", data) for k, s in enumerate(samples) for name, data in s.items()]
    write_tar(tmp_path / "a.tar", members)
    fields = {"mask": "mask.png", "depth": "depth.png", "boxes": "boxes.json", "text": "text.bin"}

    def decode(record):
        opened = {name: Image.open(io.BytesIO(record[name])) for name in ("mask", "depth")}
        return {
            "mask": np.asarray(opened["mask"])[..., None],
            "depth": np.asarray(opened["depth"]).astype(np.uint16),
            "boxes": np.array(record["boxes"]["boxes"], np.float32).reshape(-1, 4),
            "k": json.loads(bytes(record["text"]))["k"],
        }

    source = sources.Tar(tmp_path / "a.tar", fields, cache_dir=tmp_path / "cache").map(decode)
    read = source.read(np.arange(6), ["mask", "depth", "boxes", "k"])
    np.testing.assert_array_equal(np.array(read["mask"])[..., 0], masks)
    np.testing.assert_array_equal(read["depth"], depths)
    assert [len(boxes) for boxes in read["boxes"]] == list(range(6))
    assert read["k"].tolist() == list(range(6))


@pytest.fixture
def pictures(tmp_path):
    """A folder of PNGs of different heights."""
    generator = np.random.default_rng(0)
    for k in range(8):
        path = tmp_path / "pictures" / f"{'ab'[k % 2]}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20 + k, 30, 3), np.uint8)).save(path)
    return tmp_path / "pictures"


def test_functions_receive_the_contents_of_files(pictures):
    source = Files(pictures)

    def with_height(record):
        return {**record, "height": Image.open(io.BytesIO(record["data"])).size[1]}

    mapped = source.map(with_height)
    assert mapped.fields["data"] == Field(np.uint8, 1) and mapped.classes == source.classes
    alone = source.map(lambda record: {"n": record["label"]}, inputs=["label"])
    assert alone.fields["data"].is_path  # DALI reads the file

    def crop(data, *, draw):
        return augment.random_resized_crop(fn.decoders.image(data), 8, draw=draw)

    make = data_iterator(crop, ["images"], shuffle=False, as_numpy=True)
    wanted = next(make(source=source, batch_size=8))["images"]
    np.testing.assert_array_equal(next(make(source=mapped, batch_size=8))["images"], wanted)
    heights = mapped.read(np.arange(8), ["height"])["height"]
    assert heights.tolist() == [20, 22, 24, 26, 21, 23, 25, 27]


def test_arrays_are_read_only(pictures):
    seen = {}

    def look(record):
        seen.update(record)
        return record

    Files(pictures).map(look)
    assert not seen["data"].flags.writeable and isinstance(seen["label"], np.int32)
    rows().map(look)
    assert not seen["x"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        rows().map(lambda record: {"x": record["x"].__iadd__(1)})


def test_classes_of_other_labels_are_unknown(pictures):
    source = Files(pictures)
    swapped = source.map(lambda record: {"label": 1 - record["label"]}, inputs=["label"])
    assert not hasattr(swapped, "classes") and hasattr(Named(source.map(dict)), "classes")
    assert Mixture([(source.map(dict), 1), (swapped.map(dict), 1)]).classes == source.classes


# States


def counted(record):
    return {**record, "x": record["x"] + 1}


def test_states_name_the_functions():
    source = rows().map(double).random_map(jitter)
    iterator = over(source)
    next(iterator)
    state = iterator.get_state()
    for other, words in (
        (rows().map(counted).random_map(jitter), ["map double", "map counted"]),
        (rows().random_map(jitter).map(double), ["position"]),
        (rows().map(double), ["random_map jitter"]),
        (rows(), ["map double", "random_map jitter"]),
        (rows().map(functools.partial(double)).random_map(jitter), ["map partial(double)"]),
    ):
        again = over(other)
        with pytest.raises(StateError) as raised:
            again.set_state(state)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        again.set_state(state, allow=["operators"])
    again = over(pickle.loads(pickle.dumps(source)))
    again.set_state(state)
    assert again.get_state() == state
    assert_equal(list(iterator), list(again))


def test_the_position_of_a_map_is_its_depth():
    parts = [(rows().map(double), 1), (rows().map(double).map(double), 1)]
    iterator = over(Mixture(parts).map(double))
    next(iterator)
    lines = [line for line in iterator._engine._lines() if line.startswith("map")]
    assert [line.split("\t")[2] for line in lines] == [
        f"position={position}" for position in ("0.0", "1.0", "1.1", "2")
    ]


def test_states_of_random_maps_name_the_version_of_numpy(monkeypatch):
    iterator = over(rows().random_map(jitter))
    next(iterator)
    state = iterator.get_state()
    version = np.__version__.split(".")
    monkeypatch.setattr(np, "__version__", ".".join([*version[:2], "99"]))
    over(rows().random_map(jitter)).set_state(state)
    monkeypatch.setattr(np, "__version__", "9.8.7")
    again = over(rows().random_map(jitter))
    with pytest.raises(StateError, match=r"operators\.jitter\.numpy: \d\.\d+ -> 9\.8\n"):
        again.set_state(state)
    again.set_state(state, allow=["operators.jitter.numpy"])
    assert over(rows().map(double)).get_state()


def test_lambdas_with_other_code_have_the_same_name():
    """Documented, as for functions of the graph: a state has the name of a function, no code."""
    iterator = over(rows().map(lambda record: {**record, "x": record["x"] + 1}))
    next(iterator)
    again = over(rows().map(lambda record: {**record, "x": record["x"] + 2}))
    again.set_state(iterator.get_state())
    assert joined(list(again), "x").shape == (COUNT - 4, 3)


# Other sources


def test_tfrecords_tars_and_episodes_have_maps():
    for name in ("Arrays", "Files", "Mixture", "Named", "RLDS", "Records", "Selection", "Source"):
        assert getattr(sources, name).map is sources.Source.map
    for name in ("TFRecord", "Tar"):
        assert getattr(sources, name).random_map is sources.Source.random_map


def test_functions_run_in_the_reading_threads():
    names = set()

    def note(record):
        names.add(threading.current_thread().name)
        return record

    source = rows().map(note, stateful=False)
    names.clear()
    list(over(source))
    assert names and all(name.startswith("dalijax-read") for name in names)
