"""States over every kind of reader and source; sources without a state raise an error."""

import functools
import io
import itertools
import json
import re
import struct
import tarfile
import warnings

import numpy as np
import nvidia.dali.tfrecord as tfrecord
import pytest
from nvidia.dali import fn, types

import dalijax
from cells import Cell
from conformance import Expected, check, frozen
from dalijax import LastBatchPolicy, data_iterator
from dalijax.core.messages import user_warnings
from full import FULL
from oracle import Case

N = 7

# Readers: each delivers the number of the sample


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, content):
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(value):
    """A tf.train.Example whose feature x is an int64."""
    feature = field(3, field(1, varint(value)))  # Feature.int64_list, Int64List.value
    return field(1, field(1, field(1, b"x") + field(2, feature)))  # Features.feature: a map


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the numbers below N in each format."""
    folder = tmp_path_factory.mktemp("sources")
    with open(folder / "x.tfrecord", "wb") as file, open(folder / "x.idx", "w") as index:
        for i in range(N):
            start, content = file.tell(), example(i)
            # DALI skips both checksums without checking them.
            file.write(struct.pack("<QI", len(content), 0) + content + struct.pack("<I", 0))
            index.write(f"{start} {file.tell() - start}\n")
    with tarfile.open(folder / "x.tar", "w") as file, open(folder / "x.tar.idx", "w") as index:
        index.write(f"v1.2 {N}\n")
        for i in range(N):
            content = np.array([i], np.int32).tobytes()
            member = tarfile.TarInfo(f"{i}.raw")
            member.size = len(content)
            start = file.offset + tarfile.BLOCKSIZE
            file.addfile(member, io.BytesIO(content))
            index.write(f"raw {start} {len(content)} {i}.raw\n")
    for i in range(N):
        np.save(folder / f"{i}.npy", np.array([i], np.int32))
    return str(folder)


def read(kind, folder, **reader):
    if kind == "file":
        files = [f"{i}.npy" for i in range(N)]
        return fn.readers.file(file_root=folder, files=files, labels=list(range(N)), **reader)[1]
    if kind == "numpy":
        return fn.readers.numpy(file_root=folder, file_filter="*.npy", **reader)
    if kind == "tfrecord":
        features = {"x": tfrecord.FixedLenFeature([1], tfrecord.int64, -1)}
        path = {"path": f"{folder}/x.tfrecord", "index_path": f"{folder}/x.idx"}
        return fn.cast(
            fn.readers.tfrecord(features=features, **path, **reader)["x"], dtype=types.INT32
        )
    index = {"index_paths": [f"{folder}/x.tar.idx"]} if kind == "webdataset" else {}
    return fn.readers.webdataset(
        paths=[f"{folder}/x.tar"], ext=["raw"], dtypes=[types.INT32], **index, **reader
    )


def graph(kind, folder, cell):
    x = read(
        kind,
        folder,
        name="reader",
        shard_id=cell.stream,
        num_shards=cell.case.shards,
        stick_to_shard=cell.case.stick,
        pad_last_batch=cell.case.padded,
        random_shuffle=cell.shuffle == "random_shuffle",
        initial_fill=4,
    )
    return x, fn.random.uniform()


def over_reader(kind, folder, cell):
    iterator_fn = data_iterator(
        graph,
        ["x", "u"],
        reader_name="reader",
        auto_reset=cell.auto_reset,
        last_batch_policy=LastBatchPolicy[cell.case.policy],
        mask="mask",
        as_numpy=True,
    )
    build = {"batch_size": cell.case.batch, "num_threads": 1, "prefetch_queue_depth": cell.depth}
    return functools.partial(iterator_fn, kind, folder, cell, **build)


READERS = ("file", "numpy", "tfrecord", "webdataset", "webdataset without an index")
CELLS = [
    Cell(Case(N, 1, 2, "FILL", True, False)),
    Cell(Case(N, 3, 2, "FILL", False, False), stream=1, depth=1),
    Cell(Case(N, 2, 3, "DROP", True, False), stream=1, auto_reset=True),
    Cell(Case(N, 1, 2, "DROP", False, True), depth=3),
    Cell(Case(N, 2, 2, "PARTIAL", True, True), stream=1, auto_reset=True),
    Cell(Case(N, 3, 2, "PARTIAL", False, False), stream=2),
    Cell(Case(N, 1, 2, "FILL", True, False), shuffle="random_shuffle", auto_reset=True),
    Cell(Case(N, 2, 2, "DROP", False, False), shuffle="random_shuffle", stream=1),
]


@pytest.mark.parametrize("kind", READERS)
def test_readers(data, kind):
    for k, cell in enumerate(CELLS):
        if (
            not FULL and k > 0 and (k + READERS.index(kind)) % 2
        ):  # each cell with two or three kinds
            continue
        # A row of each kind is also restored in another process.
        process = k == 0 and kind in READERS[:4]
        check(over_reader(kind, data, cell), cell.expected(), process=process, tail=6)


# Two readers in a graph, such as readers of images and of masks

UNSEEDED = {"random_shuffle": True, "initial_fill": 4}
SEEDED = {**UNSEEDED, "seed": 7}
AFTER = {"shuffle_after_epoch": True}
HALF = {"num_shards": 2}
PAIRS = [
    ("file", {}, "numpy", {"seed": 3}, ""),
    ("file", {}, "tfrecord", {}, ""),
    ("file", SEEDED, "numpy", SEEDED, ""),
    ("file", SEEDED, "numpy", {**SEEDED, "seed": 8}, "differ in seed"),
    ("file", UNSEEDED, "file", UNSEEDED, r"a \(7 samples, shuffled without seed=\) .* in seed"),
    ("file", UNSEEDED, "file", SEEDED, r"b \(7 samples, seed=7\) differ in seed"),
    ("file", {**SEEDED, "initial_fill": 3}, "file", SEEDED, "differ in initial_fill"),
    ("file", {**SEEDED, "initial_fill": 1024}, "file", {**SEEDED, "initial_fill": None}, ""),
    ("file", SEEDED, "file", {}, "differ in random_shuffle,"),
    ("file", SEEDED, "tfrecord", SEEDED, "differ in kind of reader"),
    ("webdataset", SEEDED, "tfrecord", SEEDED, ""),
    ("file", AFTER, "numpy", {**AFTER, "seed": 4}, ""),
    ("file", AFTER, "numpy", {}, "differ in shuffle_after_epoch"),
    ("file", HALF, "numpy", {**HALF, "shard_id": 1}, "differ in shard_id"),
    ("file", HALF, "numpy", {**HALF, "stick_to_shard": True}, "differ in stick_to_shard"),
    ("file", {}, "numpy", {"stick_to_shard": True}, ""),
    ("file", {}, "numpy", {"pad_last_batch": True}, "differ in pad_last_batch"),
    ("file", {}, "short", {}, r"a \(7 samples, not shuffled\) and b \(6 samples, not shuffled\)"),
]


def pair(folder, kinds, arguments):
    readers = [
        fn.readers.file(files=[f"{folder}/{i}.npy" for i in range(N - 1)], name=name, **options)[1]
        if kind == "short"
        else read(kind, folder, name=name, **{k: v for k, v in options.items() if v is not None})
        for kind, name, options in zip(kinds, "ab", arguments, strict=True)
    ]
    return tuple(fn.reshape(reader, shape=[1]) for reader in readers)


@pytest.mark.parametrize("first, one, second, other, text", PAIRS)
def test_readers_in_different_orders_are_reported_once(data, first, one, second, other, text):
    user_warnings.warn_user_once.cache_clear()
    function = data_iterator(pair, ["a", "b"], size=12 * 2, as_numpy=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            batches = list(function(data, (first, second), (one, other), batch_size=2))
    is_aligned = all((batch["a"] == batch["b"]).all() for batch in batches)
    assert is_aligned == (not text)
    if text:
        (warning,) = caught
        assert re.search(f"the readers .*{text}", str(warning.message))
        assert warning.filename == __file__
    else:
        assert not caught


def test_other_sets_of_readers(data):
    def unused():
        a, _ = pair(data, ("file", "short"), ({}, {}))
        return (a,)

    def outputs():
        return tuple(fn.readers.file(files=[f"{data}/0.npy"], name="only", **UNSEEDED))

    def three(with_function):
        a, b = pair(data, ("file", "numpy"), (SEEDED, SEEDED))
        c = read("webdataset", data, name="c")
        # DALI can't serialize a graph with such a function.
        if with_function:
            options = {"batch_processing": False}
            a = dalijax.fn.dl_tensor_python_function(a, function=lambda x: x, **options)
        return a, b, c

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(data_iterator(unused, ["a"], reader_name="a")(batch_size=2))
        next(data_iterator(outputs, ["x", "y"], reader_name="only")(batch_size=2))
    for with_function in (False, True):
        user_warnings.warn_user_once.cache_clear()
        text = (
            r"a \(7 samples, seed=7\), b .* and c \(7 samples, not shuffled\) differ in random_sh"
        )
        with pytest.warns(UserWarning, match=text):
            data_iterator(three, ["a", "b", "c"], reader_name="a")(with_function, batch_size=2)


# External sources: callables that get the number of the sample or batch


class Source:
    """Rows of consecutive numbers, of samples or batches; it pickles for DALI's processes.

    Args:
        kind: The argument: "sample" info, "batch" info, or the batch's "index".
        batch: The batch size.
        ends: Number of batches before StopIteration; None for an endless source.
    """

    def __init__(self, kind, batch, ends=None):
        self.kind, self.batch, self.ends = kind, batch, ends

    def __call__(self, told):
        if self.kind == "sample":
            if self.ends is not None and told.iteration >= self.ends:
                raise StopIteration
            return self.row(told.idx_in_epoch, told.epoch_idx)
        number, epoch = (told, 0) if self.kind == "index" else (told.iteration, told.epoch_idx)
        if self.ends is not None and number >= self.ends:
            raise StopIteration
        # A list: DALI's processes can't send an array of a whole batch.
        return [self.row(number * self.batch + k, epoch) for k in range(self.batch)]

    def row(self, number, epoch):
        return np.array([number + 1000 * epoch], np.int32)


HOW = {"sample": {"batch": False}, "batch": {"batch_info": True}, "index": {"batch": True}}


def source_graph(source, parallel=False):
    x = fn.external_source(source, parallel=parallel, **HOW[source.kind])
    return x, fn.random.uniform()


def over_source(source, depth=2, parallel=False, **config):
    iterator_fn = data_iterator(source_graph, ["x", "u"], mask="mask", as_numpy=True, **config)
    build = {"batch_size": source.batch, "prefetch_queue_depth": depth}
    if parallel:
        build |= {"py_start_method": "spawn", "py_num_workers": 1}
    return functools.partial(iterator_fn, source, parallel, **build)


def sized(size, batch, policy, padded, epochs=3):
    """Returns the expected batches of an endless source, split into epochs by its size."""
    read = Case(size, 1, batch, "FILL", padded, False).epochs(epochs)
    cut = Case(size, 1, batch, policy, padded, False).epochs(epochs)
    if policy == "DROP":
        # A batch that crosses the end of the epoch is consumed and dropped.
        read = [(e, [[None] * -(-size // batch)]) for e in range(epochs)]
    out, behind = [], 0
    for (_, (consumed,)), (number, (delivered,)) in zip(read, cut, strict=True):
        out.append([])
        for step, own in enumerate(delivered):
            first = (behind + step) * batch
            x = np.arange(first, first + batch, dtype=np.int32)[: len(own), None]
            mask = np.array(Case(size, 1, batch, policy, padded, False).mask(own, number))
            out[-1].append({"x": x, "mask": mask})
        behind += len(consumed)
    return out


@pytest.mark.parametrize("kind", HOW)
def test_sources_of_a_size(kind):
    rows = itertools.product(("FILL", "DROP", "PARTIAL"), (False, True))
    for k, (policy, padded) in enumerate(rows):
        if not FULL and k > 0 and (k + [*HOW].index(kind)) % 2:  # each row with one or two kinds
            continue
        size = (5, 6, 7)[k % 3]
        expected = Expected(sized(size, 2, policy, padded), auto_reset=bool(k % 2))
        make = over_source(
            Source(kind, 2),
            depth=1 + k % 3,
            size=size,
            last_batch_policy=LastBatchPolicy[policy],
            last_batch_padded=padded,
            auto_reset=bool(k % 2),
        )
        check(make, expected, process=k == 0, tail=6)


def ending(kind, batch, batches, epochs=3):
    """Returns the expected batches of a source that gets the epoch and raises StopIteration."""
    out = []
    for epoch in range(epochs):
        shift = 0 if kind == "index" else 1000 * epoch
        rows = (shift + np.arange(batches * batch)).astype(np.int32).reshape(batches, batch, 1)
        out.append([{"x": x, "mask": np.ones(batch, bool)} for x in rows])
    return out


@pytest.mark.parametrize("kind", HOW)
@pytest.mark.parametrize("auto_reset", (False, True))
def test_sources_that_end(kind, auto_reset):
    for depth in (1, 2, 3) if FULL else (1 + ([*HOW].index(kind) + auto_reset) % 3,):
        expected = Expected(ending(kind, 3, 3), auto_reset, sized=False)
        make = over_source(Source(kind, 3, ends=3), depth, auto_reset=auto_reset)
        check(make, expected, tail=6)
        # A source that ends at its size behaves the same, and its length is known.
        expected = Expected(ending(kind, 3, 3), auto_reset)
        make = over_source(Source(kind, 3, ends=3), depth, size=9, auto_reset=auto_reset)
        check(make, expected, tail=6)


@pytest.mark.parametrize("depth", (1, 2))
def test_a_source_resets_the_iterator_that_it_feeds(depth):
    fed = []

    def numbers(number):
        if number == 4 and fed:  # once, when it is read ahead
            fed.pop().reset()
        return np.full((2, 1), number, np.int32)

    @data_iterator(output_map=["x"])
    def graph():
        return fn.external_source(numbers, batch=True)

    iterator = iter(graph(batch_size=2, prefetch_queue_depth=depth))
    fed.append(iterator)
    seen = [int(next(iterator)["x"][0, 0]) for _ in range(8)]
    before = 5 - depth  # batches that were delivered, or that next() then delivered
    assert seen == [*range(before), *range(8 - before)]


ALL_PARALLEL = [("sample", None), ("sample", 2), ("batch", None), ("batch", 2)]


# DALI leaves a socket to the garbage collector when it starts a process.
@pytest.mark.filterwarnings("ignore:unclosed.*socket:ResourceWarning")
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("kind,ends", ALL_PARALLEL if FULL else ALL_PARALLEL[::3])
def test_sources_in_separate_processes(kind, ends):
    size = -1 if ends else 5
    make = over_source(Source(kind, 2, ends), parallel=True, size=size, auto_reset=True)
    wanted = ending(kind, 2, ends) if ends else sized(size, 2, "FILL", False)
    if FULL:
        check(make, Expected(wanted, auto_reset=True, sized=size > 0))
    with make() as iterator:
        states, batches = [], []
        for epoch in wanted:
            states.append((len(batches), iterator.get_state()))
            for batch, want in zip(iterator, epoch, strict=True):
                assert np.array_equal(batch["x"], want["x"])
                assert np.array_equal(batch["mask"], want["mask"])
                batches.append(frozen(batch))
                states.append((len(batches), iterator.get_state()))
    # Each restore starts two processes; DALIJAX_FULL=1 runs all of them.
    for at, state in (states[1], states[-3]) if FULL else (states[1 if ends else -3],):
        with make() as iterator:
            iterator.set_state(json.loads(json.dumps(state)))
            assert iterator.get_state() == state
            rest = [frozen(b) for _ in range(3 - state["epoch"]) for b in iterator]
            assert rest == batches[at:], at


class Pairs(Source):
    """Two outputs, given the batch."""

    def __call__(self, told):
        x = super().__call__(told)
        return x, [2 * one for one in x]


def pairs_graph():
    x, y = fn.external_source(Pairs("batch", 2, ends=3), num_outputs=2, batch_info=True)
    return x, y, x + fn.external_source(Source("sample", 2), batch=False)


def test_several_sources_and_outputs():
    epochs = ending("batch", 2, 3)
    for number, epoch in enumerate(epochs):
        for step, batch in enumerate(epoch):
            first = 2 * step
            batch["y"] = 2 * batch["x"]
            # The endless source restarts with the other source.
            own = np.array([[first], [first + 1]], np.int32) + 1000 * number
            batch["sum"] = batch["x"] + own
    make = functools.partial(
        data_iterator(pairs_graph, ["x", "y", "sum"], mask="mask", as_numpy=True), batch_size=2
    )
    check(make, Expected(epochs, sized=False), tail=6)


# Sources without a state


def rows(k):
    return np.full((2, 1), k, np.int32)


def generated():
    yield from map(rows, range(3))


class Counter:
    """A callable without arguments, three batches long."""

    def __init__(self):
        self.count = -1

    def __call__(self):
        self.count += 1
        if self.count % 4 == 3:
            raise StopIteration
        return rows(self.count % 4)


STATELESS = {
    "generator function": (lambda: generated, "GENERATOR_FUNC"),
    "generator": (generated, "ITERABLE"),
    "list": (lambda: [rows(k) for k in range(3)], "ITERABLE"),
    "callable without arguments": (Counter, "parameterless callable"),
}


@pytest.mark.parametrize("kind", STATELESS)
def test_a_source_without_a_state_is_refused_when_one_is_asked_for(kind):
    new, name = STATELESS[kind]

    def pipe():
        resumable = fn.external_source(Source("sample", 2), batch=False)
        return fn.external_source(new()), resumable, fn.random.uniform()

    make = data_iterator(pipe, ["x", "y", "u"], as_numpy=True)
    state = data_iterator(pairs_graph, ["x", "y", "sum"])(batch_size=2).get_state()
    iterator = make(batch_size=2)
    for epoch in range(3):
        for k, batch in enumerate(iterator):
            assert batch["x"].ravel().tolist() == [k, k]
            if epoch == 1:
                for ask in (
                    iterator.get_state,
                    iterator.checkpoints,
                    lambda: iterator.set_state(state),
                ):
                    with pytest.raises(ValueError, match=f"external source.*{name}.*callable with"):
                        ask()
        assert k == 2
    with pytest.raises(ValueError, match=name):
        make(batch_size=2).get_state()
