"""Mistakes of users' sources: reused buffers and missing fields."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
from shardings import rows_over

from dalijax import data_iterator
from dalijax.core.sources.reuse import ReuseCheck
from dalijax.errors import StateError
from dalijax.sources import (
    Arrays,
    Field,
    Files,
    Mixture,
    Named,
    Records,
    Selection,
    Source,
)

N, BATCH = 300, 8


class Rows(Source):
    """Rows of three numbers, each its own number; the test provides `read`."""

    fields = {"x": Field(np.int32, 1), "k": Field(np.int32)}

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return N

    def identity(self):
        return "rows"

    def read(self, indices, names):
        columns = {"x": [self.make(int(k)) for k in indices], "k": indices.astype(np.int32)}
        return {name: columns[name] for name in names}


class Meeting(Rows):
    """Each record waits until as many records are read at once as the source has threads."""

    def __init__(self, threads):
        super().__init__(self.meet)
        self.read_threads = threads
        self.meeting = threading.Barrier(threads)
        self.most, self.now, self.lock = 0, 0, threading.Lock()

    def meet(self, k):
        return np.full(3, k, np.int32)

    def read(self, indices, names):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.meeting.wait(timeout=60)
        finally:
            with self.lock:
                self.now -= 1
        return super().read(indices, names)


BUFFER = np.zeros(3, np.int32)
TABLE = np.repeat(np.arange(N, dtype=np.int32)[:, None], 3, axis=1)
ONES = np.ones(3, np.int32)


def fill(k):
    BUFFER[:] = k
    return BUFFER


def batches(source, on_error="raise", mask=None, **options):
    take = data_iterator(
        lambda x, k: (x + 0, k + 0),
        ["x", "k"],
        source=source,
        as_numpy=True,
        on_error=on_error,
        mask=mask,
    )
    with take(batch_size=BATCH, num_threads=1, last_batch_padded=True, **options) as iterator:
        return [(batch["x"].copy(), batch["k"].copy()) for batch in iterator]


@pytest.mark.parametrize("shuffle", (True, False))
def test_a_reused_buffer_is_refused(shuffle):
    with pytest.raises(ValueError, match=r"Rows\.read\(\) returned 'x' .* same memory.*new arrays"):
        batches(Rows(fill), shuffle=shuffle)


def test_a_reused_column_is_refused():
    column = np.zeros(N, np.int32)

    class Columns(Rows):
        def read(self, indices, names):
            column[: len(indices)] = indices
            values = {"x": [np.full(3, k, np.int32) for k in indices], "k": column[: len(indices)]}
            return {name: values[name] for name in names}

    with pytest.raises(ValueError, match=r"Columns\.read\(\) returned 'k'"):
        batches(Columns(None))


def test_an_object_that_reuses_a_buffer_is_refused():
    class Data:
        def __len__(self):
            return N

        def __getitem__(self, k):
            return {"x": fill(int(k)), "k": np.int32(k)}

    with pytest.raises(ValueError, match=r"Records\.read\(\) returned 'x'"):
        batches(Records(Data(), identity="data"))


@pytest.mark.parametrize(
    "make",
    (
        lambda k: np.full(3, k, np.int32),
        lambda k: TABLE[k],
        lambda k: TABLE[k].copy(),
        lambda k: np.full(3, k, ">i4"),
    ),
    ids=("new", "view", "copy", "big-endian"),
)
def test_separate_rows_are_delivered(make):
    for x, k in batches(Rows(make), seed=1):
        np.testing.assert_array_equal(x, np.repeat(k[:, None], 3, axis=1))


def test_a_column_may_be_an_array_of_objects():
    class Objects(Rows):
        def read(self, indices, names):
            rows = np.empty(len(indices), object)
            for place, k in enumerate(indices.tolist()):
                rows[place] = self.make(k)
            columns = {"x": rows, "k": indices.astype(np.int32)}
            return {name: columns[name] for name in names}

    for x, k in batches(Objects(lambda k: np.full(3, k, np.int32)), seed=1):
        np.testing.assert_array_equal(x, np.repeat(k[:, None], 3, axis=1))
    with pytest.raises(ValueError, match=r"Objects\.read\(\) returned 'x' .* same memory"):
        batches(Objects(fill), seed=1)


@pytest.mark.parametrize("as_column", (False, True))
def test_masked_elements_are_refused(as_column):
    class Masked(Rows):
        def read(self, indices, names):
            column = np.ma.masked_greater(TABLE[indices], 4)
            columns = {"x": column if as_column else [*column], "k": indices.astype(np.int32)}
            return {name: columns[name] for name in names}

    with pytest.raises(ValueError, match=r"Masked\.read\(\) .* returned 'x', but it has masked"):
        batches(Masked(None))


def test_a_constant_may_be_shared():
    seen = batches(Rows(lambda k: ONES), seed=1)
    assert sorted({int(k) for _, ks in seen for k in ks}) == list(range(N))
    assert all((x == 1).all() for x, _ in seen)


@pytest.mark.parametrize(
    "wrong, error, text",
    (
        (lambda x, k: None, TypeError, "must return a dict of them, not NoneType"),
        (lambda x, k: {"x": x}, ValueError, r"returned \['x'\], without \['k'\]"),
        (lambda x, k: {"x": x[:-1], "k": k}, ValueError, r"returned \d+ values of 'x': return one"),
        (lambda x, k: {"x": x, "k": 3}, ValueError, "returned 3 values of 'k': return one"),
    ),
    ids=("none", "no-field", "few", "a-number"),
)
@pytest.mark.parametrize("on_error", ("raise", "mask"))
def test_unexpected_fields_are_refused(wrong, error, text, on_error):
    class Wrong(Rows):
        def read(self, indices, names):
            return wrong([np.full(3, k, np.int32) for k in indices], indices.astype(np.int32))

    with pytest.raises(error, match=rf"Wrong\.read\(\) of \d+ records .*{text}"):
        batches(Wrong(None), on_error=on_error, mask="mask")


OF_OTHER_KINDS = {
    "dtype": (lambda k: np.full(3, k, np.int64), "int64 with 1 dimension"),
    "float": (lambda k: np.full(3, k, np.float32), "float32 with 1 dimension"),
    "more dimensions": (lambda k: np.full((3, 2), k, np.int32), "int32 with 2 dimensions"),
    "no dimension": (lambda k: np.int32(k), "int32 with 0 dimensions"),
    "a number of Python": (lambda k: k, "int64 with 0 dimensions"),
    "bytes": (lambda k: b"abc", "uint8 with 1 dimension"),
    "text": (lambda k: "abc", "uint8 with 1 dimension"),
    "None": (lambda k: None, "object with 0 dimensions"),
    "an object": (lambda k: object(), "object with 0 dimensions"),
}


# Every kind of value, and for some kinds also a single value, a whole array and masked errors.
VALUES = [
    *((kind, "all", "raise") for kind in OF_OTHER_KINDS),
    *((kind, others, "raise") for kind in ("dtype", "None") for others in ("one", "array")),
    *(("float", others, "mask") for others in ("all", "one", "array")),
]


@pytest.mark.parametrize("kind,others,on_error", VALUES, ids=map(" ".join, VALUES))
def test_a_value_unlike_its_field_names_source_field_and_record(kind, others, on_error):
    make, found = OF_OTHER_KINDS[kind]

    class Unlike(Rows):
        def read(self, indices, names):
            columns = super().read(indices, names)
            if others == "array":
                columns["x"] = np.array(columns["x"], object if "object" in found else None)
            return columns

    def value(k):
        return make(k) if others != "one" or k == 13 else np.full(3, k, np.int32)

    options = {"on_error": on_error, "mask": "is_valid"} if on_error == "mask" else {}
    function = data_iterator(lambda x: x, ["x"], source=Unlike(value), shuffle=False, **options)
    with pytest.raises(TypeError) as caught:
        list(function(batch_size=BATCH))
    message = str(caught.value)
    assert found in message and "int32 with 1 dimension" in message
    assert "Unlike.read()" in message and "'x'" in message
    assert ("record 13" if others == "one" else "record 0") in message


def test_arrays_that_were_freed_are_forgotten():
    check = ReuseCheck(Rows(None))
    alive = [np.full(3, k, np.int32) for k in range(5000)]
    check.check(np.arange(5000), {"x": alive})
    assert len(check._alive) == 5000
    del alive
    for k in range(2):
        check.check(np.array([k]), {"x": [np.full(3, k, np.int32)]})
    assert len(check._alive) <= 2


class Stated(Rows):
    """Rows whose identity is a value, or raises it."""

    def __init__(self, value):
        super().__init__(lambda k: np.full(3, k, np.int32))
        self.value = value

    def identity(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    "value", (3, None, b"rows", "", KeyError("boom"), StopIteration()), ids=repr
)
@pytest.mark.parametrize("wrap", (lambda s: s, lambda s: Mixture([(s, 1), (Stated("b"), 1)])))
def test_an_identity_that_is_not_text_fails_each_state_and_no_batch(value, wrap):
    take = data_iterator(lambda x: x + 0, ["x"], as_numpy=True)
    with (
        take(source=wrap(Stated("rows")), batch_size=BATCH) as other,
        take(source=wrap(Stated(value)), batch_size=BATCH) as iterator,
    ):
        want = [next(other)["x"].tolist() for _ in range(3)]
        assert next(iterator)["x"].tolist() == want[0]
        for call in (iterator.get_state, lambda: iterator.set_state(other.get_state())):
            with pytest.raises(ValueError, match=r"Stated\.identity\(\) (returned|failed)"):
                call()
        assert [next(iterator)["x"].tolist() for _ in range(2)] == want[1:]


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_the_source_sets_the_number_of_reading_threads(threads):
    source = Meeting(threads)  # a task reads 64 records of a batch
    mixture = Mixture([(Arrays({"x": TABLE, "k": np.arange(N)}), 1), (source, 1)])
    assert mixture.read_threads == max(2, threads)
    take = data_iterator(lambda x, k: (x + 0, k + 0), ["x", "k"], source=source, as_numpy=True)
    with take(batch_size=64 * threads, num_threads=1, shuffle=False) as iterator:
        x = next(iterator)["x"].copy()
        source.meeting.abort()  # batches that are not delivered are not awaited
    assert source.most == threads
    assert x.tolist() == np.repeat(np.arange(64 * threads)[:, None] % N, 3, axis=1).tolist()


def test_a_small_batch_of_several_pipelines_is_read_by_several_threads():
    source = Meeting(4)  # a task reads the 2 records of a pipeline
    take = data_iterator(
        lambda x, k: (x + 0, k + 0), ["x", "k"], source=source, sharding=rows_over(4)
    )
    with take(batch_size=8, num_threads=1, shuffle=False) as iterator:
        x = np.asarray(next(iterator)["x"])
        source.meeting.abort()  # batches that are not delivered are not awaited
    assert source.most == 4
    assert x.tolist() == np.repeat(np.arange(8)[:, None], 3, axis=1).tolist()


def test_a_mixture_takes_a_source_without_a_number_of_threads():
    class Bare:
        fields, __len__ = Rows.fields, Rows.__len__

    assert Mixture([(Bare(), 1)]).read_threads == Source.read_threads == 2


@pytest.mark.parametrize(
    "threads,error",
    ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)),
)
def test_an_invalid_number_of_threads_is_refused(threads, error):
    source = Arrays({"x": TABLE})
    source.read_threads = threads
    with pytest.raises(
        error, match=rf"read_threads of Arrays must be .* at least 1, not {threads}"
    ):
        data_iterator(lambda x: x + 0, ["x"], source=source)(batch_size=BATCH)


def test_a_source_without_records_is_refused_by_name(monkeypatch):
    source = Rows(lambda k: TABLE[k])
    monkeypatch.setattr(Rows, "__len__", lambda self: 0)
    with pytest.raises(ValueError, match=r"Rows has no records: its len\(\) is 0"):
        data_iterator(lambda x: x + 0, ["x"], source=source)(batch_size=BATCH)
    with pytest.raises(ValueError, match="Rows.* has no records. Omit it from the Mixture"):
        Mixture([(source, 1), (Rows(lambda k: TABLE[k]), 1)])


class Changes:
    """Records that change; the test provides their values."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return N

    def __getitem__(self, k):
        return {"x": self.value(np.full(3, k, np.float32)), "k": k}


RNG, COUNT = np.random.default_rng(0), itertools.count()
CHANGES = {
    "noise": lambda x: x + RNG.random(3).astype(np.float32),
    "the time": lambda x: x * 0 + time.perf_counter_ns() % 1_000_000,
    "a counter": lambda x: x + next(COUNT),
}
WRAPPED = {
    "records": Records,
    "identified records": lambda changes: Records(changes, identity="v1"),
    "a source": lambda changes: Rows(lambda k: changes[k]["x"].view(np.int32)),
    "a selection": lambda changes: Selection(Records(changes), np.arange(N) % 3 == 0),
    "a mixture": lambda changes: Mixture([(Records(changes), 2), (Arrays(ROW), 1)]),
    "named records": lambda changes: Named(Records(changes)),
}
ROW = {"x": np.zeros((4, 3), np.float32), "k": np.arange(4)}


@pytest.mark.parametrize(
    ("change", "wrap"),
    [*((change, "records") for change in CHANGES), *(("noise", wrap) for wrap in WRAPPED)],
)
def test_records_that_change_have_batches_and_no_state(change, wrap):
    take = data_iterator(lambda x, k: (x + 0, k), ["x", "k"], shuffle=False)
    source = WRAPPED[wrap](Changes(CHANGES[change]))
    with take(source=source, batch_size=BATCH) as iterator:
        assert next(iterator)["x"].shape == (BATCH, 3)
        text = "'x' of record .* changes at each read, .* Draw random numbers in the graph"
        with pytest.raises(StateError, match=text):
            iterator.get_state()
        iterator.seek_step(2)  # the order resumes
        assert iterator.step == 2
        # Processes that compare their records find the reason of the difference, too.
        values = iterator._engine._shared_values()["records (names, sizes, bytes)"]
        assert "'x' of record" in values and values.endswith("changes at each read)")


def test_records_that_do_not_change_have_states():
    def text_and_objects(k):
        return {"x": np.float32([k]), "t": f"{k}", "o": {"a": object()}, "l": ["a", f"{k}"]}

    take = data_iterator(lambda x: x + 0, ["x"])
    for source in (Records([*map(text_and_objects, range(9))]), Stated("a")):
        with take(source=source, batch_size=4) as iterator:
            next(iterator)
            state = iterator.get_state()
            expected = next(iterator)["x"].tolist()
            iterator.set_state(state)
            assert next(iterator)["x"].tolist() == expected


def test_a_read_of_single_records_is_refused():
    class Single(Rows):
        def read(self, index):
            return {"x": self.make(index), "k": index}

    with pytest.raises(TypeError, match=r"read of Single: .* Define read\(self, indices, names\)"):
        next(data_iterator(lambda x: x + 0, ["x"])(source=Single(int), batch_size=4))


class Raises:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise StopIteration


MISTAKES = {
    "no path": (lambda: Files(3), TypeError, "path of a directory, not 3"),
    "a list": (
        lambda: Files(["a.jpg"]),
        TypeError,
        r"not \['a.jpg'\]. Pass a list or a pattern of files as paths=",
    ),
    "no identity": (lambda: Records([1], identity=""), TypeError, "a non-empty string"),
    "unlike rows": (
        lambda: Arrays({"x": [[1, 2], [3]]}),
        ValueError,
        "'x' .* rows differ in shape",
    ),
    "too large": (
        lambda: Arrays({"x": np.array([1, 1 << 40])}),
        ValueError,
        "'x' contains 1099511627776, which exceeds int32, .* as text",
    ),
    "too large a float": (
        lambda: Arrays({"x": np.array([1e300])}),
        ValueError,
        r"'x' contains 1e\+300, which exceeds float32",
    ),
    "too small": (lambda: Arrays({"x": np.array([-(1 << 31) - 1])}), ValueError, "exceeds int32"),
    "unsigned": (
        lambda: Arrays({"x": np.array([1 << 32], np.uint64)}),
        ValueError,
        "exceeds uint32",
    ),
    "raises": (lambda: Records(Raises()), ValueError, "record 0 of the Raises, .*StopIteration"),
    "ragged": (
        lambda: Records([{"x": [[1, 2], [3]]}]),
        ValueError,
        "'x' of the first record with elements can't be converted: its lists differ in length",
    ),
}


@pytest.mark.parametrize("make,error,text", MISTAKES.values(), ids=MISTAKES)
def test_objects_that_are_not_sources_raise_at_the_call(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_numbers_that_fit_are_unchanged():
    values = np.array([-(1 << 31), 0, (1 << 31) - 1])
    take = data_iterator(lambda x: x + 0, ["x"], as_numpy=True, source=Arrays({"x": values}))
    with take(batch_size=3, shuffle=False) as iterator:
        assert next(iterator)["x"].tolist() == values.tolist()


def test_an_unfilled_parameter_is_named_with_the_fixes():
    for function in (lambda x, k=1: (x, k), lambda *, x: (x, x)):
        with pytest.raises(TypeError, match=r"gets no value for \['x'\].* or a source="):
            data_iterator(function, ["x", "k"], source=None, size=3)(batch_size=BATCH)


@pytest.mark.parametrize("taken", range(1, 8))
def test_errors_of_batches_that_a_move_drops_are_dropped(taken):
    """A batch is read some batches ahead, and its error is raised when the batch is due."""
    down = []

    def make(k):
        if down:
            raise OSError("the disk is gone")
        return np.full(3, k, np.int32)

    take = data_iterator(lambda x: x + 0, ["x"], source=Rows(make), as_numpy=True)
    with take(batch_size=BATCH, num_threads=1, shuffle=False) as iterator:
        next(iterator)
        down.append(True)
        with contextlib.suppress(OSError):
            for _ in range(taken):
                next(iterator)
        down.clear()
        iterator.seek(0, 20)
        rows = np.concatenate([np.array(batch["x"]) for batch in iterator])
    np.testing.assert_array_equal(rows[: N - 20 * BATCH], TABLE[20 * BATCH :])
