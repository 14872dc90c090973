"""Errors of functions of maps: bad records, faults of the function, and functions with state."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dalijax import data_iterator, sources
from dalijax.core.random.hashing import fold
from dalijax.errors import BatchError, StateError
from dalijax.sources import Arrays, Field, Mixture, Named, Records, Selection

COUNT, BATCH = 64, 16
KINDS = {"i": Field(np.int32), "u": Field(np.float32)}


def rows(count=COUNT):
    return Arrays({"i": np.arange(count, dtype=np.int32)})


def iterator_of(source, **config):
    config = {"shuffle": False, "as_numpy": True, **config}
    make = data_iterator(lambda i, u: (i, u), ["i", "u"], **config)
    return make(source=source, batch_size=BATCH, seed=3)


def batches_of(source, **config):
    return list(iterator_of(source, **config))


def joined(batches, name):
    return np.concatenate([batch[name] for batch in batches])


def good(record):
    return {**record, "u": np.float32(record["i"] + 0.5)}


def failing(error, bad=(5, 37)):
    def fail(record):
        if record["i"] in bad:
            raise error
        return good(record)

    return fail


# Bad records

ERRORS = (ValueError("no mask"), StopIteration(), KeyError("caption"), AssertionError(), OSError())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_function_is_a_bad_record(error):
    source = rows().map(failing(error))
    iterator = iterator_of(source)
    with pytest.raises(BatchError, match=f"row 5 .*fail.* raised {type(error).__name__}"):
        list(iterator)
    assert next(iterator)["i"].tolist() == list(range(16, 32))

    skipped = batches_of(source, on_error="skip")
    assert [batch["i"][0] for batch in skipped] == [16, 48]

    masked = batches_of(source, on_error="mask", mask="mask")
    assert np.flatnonzero(~joined(masked, "mask")).tolist() == [5, 37]
    expected = np.where(np.isin(np.arange(COUNT), (5, 37)), np.arange(COUNT) - 1, np.arange(COUNT))
    assert joined(masked, "i").tolist() == expected.tolist()
    assert joined(masked, "u").tolist() == (expected + 0.5).tolist()


WRAPPED = {
    "map": lambda source: source,
    "map of a map": lambda source: source.map(dict),
    "Named": Named,
    "Selection": lambda source: Selection(source, np.ones(COUNT, bool)),
    "Mixture": lambda source: Mixture([(source, 1)]),
    "random_map of a Mixture": lambda source: Mixture([(source, 1)]).random_map(
        lambda record, rng: {**record, "v": rng.random()}
    ),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_bad_records_of_wrapped_maps(wrapped):
    calls = Counter()

    def fail(record):
        calls[int(record["i"])] += 1
        return failing(ValueError("no mask"))(record)

    source = WRAPPED[wrapped](rows().map(fail, stateful=False))
    calls.clear()
    config = {"shuffle": wrapped == "nothing", "on_error": "mask", "mask": "mask"}
    masked = batches_of(source, **config)
    bad = np.isin(joined(masked, "i")[joined(masked, "mask")], (5, 37))
    assert joined(masked, "mask").sum() == COUNT - 2 and not bad.any()
    # Of 64 records, each was processed once; the next epoch's were read ahead.
    assert max(calls.values()) <= 2 and sum(calls.values()) <= 2 * COUNT


def test_a_bad_record_does_not_repeat_the_calls_for_other_records():
    calls = Counter()

    def fail(record):
        calls[int(record["i"])] += 1
        return failing(ValueError("no mask"))(record)

    source = rows(1000).map(fail, stateful=False)
    make = data_iterator(lambda u: u + 0, ["u"], shuffle=False, on_error="mask", mask="mask")
    calls.clear()
    next(make(source=source, batch_size=64))
    assert max(calls.values()) == 1 and calls[5] == calls[37] == 1


def test_records_of_bad_parts_are_processed_once():
    """If the inner source fails, its records are read in parts, without the function's calls."""

    calls = Counter()

    def count(record):
        calls[int(record["i"])] += 1
        return good(record)

    source = Holes({"i": np.arange(1000, dtype=np.int32)}).map(count, stateful=False)
    calls.clear()
    make = data_iterator(lambda u: u + 0, ["u"], shuffle=False, on_error="mask", mask="mask")
    batch = next(make(source=source, batch_size=32))
    assert np.flatnonzero(~np.asarray(batch["mask"])).tolist() == [7]
    assert calls[7] == 0 and max(calls.values()) == 1


def test_random_numbers_beside_a_bad_record_are_unchanged():
    def draw(record, rng):
        u = rng.random()
        if record["i"] in (5, 37):
            raise ValueError("no mask")
        return {**record, "u": u}

    masked = batches_of(rows().random_map(draw), on_error="mask", mask="mask")
    all_good = batches_of(rows().random_map(lambda record, rng: {**record, "u": rng.random()}))
    changed = joined(masked, "u") != joined(all_good, "u")
    assert np.flatnonzero(changed).tolist() == [5, 37]
    assert joined(masked, "u")[5] == joined(masked, "u")[4]  # of its stand-in


class Holes(Arrays):
    """A source whose ``read`` fails for some records, which are then read in smaller parts."""

    holes = (7,)

    def read(self, indices, names):
        if {*self.holes} & {*indices.tolist()}:
            raise ValueError("a hole")
        return super().read(indices, names)


def test_random_numbers_beside_an_unreadable_record_are_unchanged():
    def draw(record, rng):
        return {**record, "u": rng.random()}

    numbers = {"i": np.arange(COUNT, dtype=np.int32)}
    masked = batches_of(Holes(numbers).random_map(draw), on_error="mask", mask="mask")
    changed = joined(masked, "u") != joined(batches_of(Arrays(numbers).random_map(draw)), "u")
    assert np.flatnonzero(changed).tolist() == [7]


def test_stand_ins_of_other_batches_have_the_numbers_of_their_epoch():
    def draw(record, rng):
        return {**record, "u": rng.random()}

    source = Holes({"i": np.arange(COUNT, dtype=np.int32)}).random_map(draw)
    source._source.holes = range(BATCH)  # the whole first batch
    iterator = iterator_of(source, on_error="mask", mask="mask")
    for epoch in range(2):
        first, second = list(iterator)[:2]
        assert not first["mask"].any() and first["i"].tolist() == [BATCH] * BATCH
        rng = np.random.Philox(key=np.array([fold(3, epoch, BATCH), 0], np.uint64))
        assert second["u"][0] == np.float32(np.random.Generator(rng).random())
        assert (first["u"] == second["u"][0]).all()


def test_constant_arrays_of_a_random_map_are_accepted():
    table = np.arange(6, dtype=np.float32).reshape(2, 3)

    def choose(record, rng):
        return {**record, "u": table[rng.integers(2)]}

    iterator = iterator_of(rows().random_map(choose))
    assert {*joined([*iterator, *iterator], "u")[:, 0].tolist()} == {0, 3}


VALUES = {
    "another dtype": (np.float64(0), "float64"),
    "more dimensions": (np.zeros((2, 2), np.float32), "2 dimensions"),
    "text": ("a", "uint8"),
    "ragged lists": ([[1.0], [1.0, 2.0]], "differ in length"),
    "None": (None, "object"),
    "masked": (np.ma.masked_array(np.float32([1]), [True]), "masked"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_of_another_kind_is_a_bad_record(case):
    value, words = VALUES[case]
    source = rows().map(
        lambda record: {"i": record["i"], "u": value} if record["i"] == 9 else good(record)
    )
    if case == "another dtype":  # Python's and NumPy's scalars get the kind of the field
        assert joined(batches_of(source), "u")[9] == 0
        return
    with pytest.raises(BatchError, match=f"row 9 .*returned 'u', .*{words}"):
        batches_of(source)


def test_an_error_of_the_machine_is_retried():
    failures = [MemoryError(), ConnectionResetError()]

    def fail(record):
        if record["i"] == 5 and failures and threading.current_thread().name != "MainThread":
            raise failures.pop()
        return good(record)

    assert len(batches_of(rows().map(fail, stateful=False))) == COUNT // BATCH and not failures


def test_read_names_the_record():
    source = rows().map(failing(ValueError("no mask")))
    with pytest.raises(ValueError, match="^row 37: map.*no mask"):
        source.read(np.arange(30, 40), ["u"])
    with pytest.raises(ValueError, match="^row 5: map.*no mask"):
        Mixture([(source, 1)]).read(np.arange(40), ["u"])


# Faults of the function, whatever on_error is


def test_none_is_refused_since_maps_drop_no_records():
    with pytest.raises(ValueError, match="returned None.*Selection"):
        rows().map(lambda record: None)
    source = rows().map(lambda record: None if record["i"] == 9 else good(record))
    with pytest.raises(ValueError, match=r"returned None.*Selection.*row 9"):
        batches_of(source, on_error="mask", mask="mask")


@pytest.mark.parametrize("extra", ({"z": 1}, {}))
def test_other_fields_are_refused(extra):
    def other(record):
        return {**record, **extra} if record["i"] == 9 else good(record)

    with pytest.raises(ValueError, match=r"the same fields for every record \(row 9\)"):
        batches_of(rows().map(other), on_error="mask", mask="mask")


ARGUMENTS = {
    "no function": (lambda: rows().map(3), TypeError, "requires a function"),
    "a transform of Grain": (
        lambda: rows().map(type("T", (), {"map": lambda self, x: x})()),
        *(TypeError, "Pass its method map"),
    ),
    "a list": (
        lambda: rows().map(lambda record: [1]),
        ValueError,
        r"returned \[1\]. Return a dict",
    ),
    "a number as a name": (lambda: rows().map(lambda record: {1: 2}), TypeError, "name of a field"),
    "an unknown input": (lambda: rows().map(good, inputs=["y"]), ValueError, "inputs has"),
    "a string as inputs": (lambda: rows().map(good, inputs="i"), TypeError, "list of names"),
    "a dtype as a kind": (
        lambda: rows().map(good, fields={"u": np.float32}),
        *(TypeError, r"fields\['u'\] must be"),
    ),
    "names as fields": (lambda: rows().map(good, fields=["u"]), TypeError, "fields must be a dict"),
    "a field that is not an input": (
        lambda: rows().map(lambda record: {"i": 1}, inputs=[]),
        *(ValueError, r"returns \['i'\].*inputs=\[\]"),
    ),
    "no good record": (
        lambda: rows().map(failing(KeyError("k"), range(COUNT))),
        *(ValueError, "none of the first 8 records.*fields=.*KeyError"),
    ),
    "ragged lists": (
        lambda: rows().map(lambda record: {"u": [[1], [1, 2]]}),
        *(ValueError, "'u', but its lists differ in length"),
    ),
    "bytes as text": (
        lambda: Records([{"t": b"a b"}]).map(lambda record: {"t": record["t"].decode()}),
        *(ValueError, r"AttributeError.*bytes\(record\[...\]\)"),
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_mistakes_in_the_arguments(case):
    call, kind, words = ARGUMENTS[case]
    with pytest.raises(kind, match=words):
        call()


def test_the_first_good_record_determines_the_fields():
    source = rows().map(failing(ValueError("no mask"), (0, 1)))
    assert source.fields == KINDS


def test_a_random_map_needs_the_epoch():
    source = rows().random_map(lambda record, rng: {**record, "u": rng.random()})
    with pytest.raises(ValueError, match="neither the seed nor the epoch"):
        source.read(np.arange(2), ["u"])

    class Around(sources.Source):
        fields = source.fields

        def __len__(self):
            return COUNT

        def identity(self):
            return "around"

        def read(self, indices, names):
            return source.read(indices, names)

    with pytest.raises(ValueError, match="neither the seed nor the epoch"):
        batches_of(Around(), on_error="mask", mask="mask")


def test_a_source_that_returns_too_many_values_is_refused():
    class More(Arrays):
        def read(self, indices, names):
            return super().read(np.append(indices, 0), names)

    source = More({"i": np.arange(COUNT, dtype=np.int32)})
    with pytest.raises(ValueError, match="returned 2 values of 'i'"):
        source.map(good)
    with pytest.raises(ValueError, match="returned 17 values of 'i'"):
        batches_of(source.map(good, fields=KINDS), on_error="mask", mask="mask")


def test_a_function_that_reuses_memory_is_refused():
    buffer = np.zeros(3, np.float32)

    def fill(record):
        buffer[:] = record["i"]
        return {"i": record["i"], "u": buffer}

    for source in (rows().map(fill, stateful=False), Mixture([(rows().map(fill), 1)])):
        with pytest.raises(ValueError, match="same memory"):
            batches_of(source)


class Reusing(sources.Source):
    """A source that fills the same buffer for each record."""

    fields = {"x": Field(np.float32, 1)}

    def __init__(self):
        self.buffer = np.zeros(3, np.float32)

    def __len__(self):
        return COUNT

    def identity(self):
        return "reusing"

    def read(self, indices, names):
        values = []
        for index in indices.tolist():
            self.buffer[:] = index
            values.append(self.buffer)
        return {"x": values}


@pytest.mark.parametrize(
    "function",
    (
        lambda record: record,
        lambda record: {"x": record["x"][:2]},
        lambda record: {"x": record["x"] * 2},
        lambda record: {"x": record["x"].sum()},
    ),
    ids=("as it is", "a view", "a new array", "a number"),
)
@pytest.mark.parametrize("wrapped", ("map", "map of a map", "Selection", "Mixture"))
def test_a_source_that_reuses_memory_is_refused_with_a_map(function, wrapped):
    source = WRAPPED[wrapped](Reusing().map(function))
    make = data_iterator(lambda x: x + 0, ["x"], on_error="mask", mask="mask", shuffle=False)
    with pytest.raises(ValueError, match="same memory"):
        list(make(source=source, batch_size=BATCH))


def test_a_function_may_change_its_dict():
    def pop(record):
        record["u"] = np.float32(record.pop("i"))
        return record

    source = rows().map(lambda record: {**record, "j": record["i"]}).map(pop)
    assert list(source.fields) == ["j", "u"]
    assert source.read(np.arange(4), ["u"])["u"].tolist() == [0, 1, 2, 3]


# Functions with state

COUNTER, CACHE = itertools.count(), {}


def cached(record):
    CACHE.setdefault(int(record["i"]), len(CACHE))
    return good(record)


def counting():
    number = 0

    def count(record):
        nonlocal number
        number += 1
        return good(record)

    return count


class Lazy:
    """A tokenizer that is loaded by its first call."""

    words = None

    def __call__(self, record):
        if self.words is None:
            self.words = {"a": 1}
        return {**record, "u": np.float32(self.words["a"])}


IMPURE = {
    "iterator": lambda record: next(COUNTER),
    "np.random": lambda record: np.random.rand(),
    "random": lambda record: random.random(),
    "generator without a seed": lambda record: np.random.default_rng().random(),
    "clock": lambda record: time.perf_counter(),
}


@pytest.mark.parametrize("case", IMPURE)
def test_other_values_for_the_same_record_are_refused(case):
    def impure(record):
        return {**record, "u": IMPURE[case](record)}

    with pytest.raises(ValueError, match="different values of 'u'.*random_map"):
        rows().map(impure)
    source = rows().map(impure, fields=KINDS)  # then the first batch is checked
    with pytest.raises(ValueError, match="different values of 'u'.*random_map"):
        batches_of(source, on_error="mask", mask="mask")
    iterator = iterator_of(rows().map(impure, stateful=True))  # as a user insists
    next(iterator)
    with pytest.raises(StateError, match="declared by stateful=True"):
        iterator.get_state()


def test_a_function_that_changes_the_records_is_refused():
    source = Records([{"words": ["a"], "i": k} for k in range(8)])
    with pytest.raises(ValueError, match="different values of 'words'"):
        source.map(lambda record: record["words"].append("end") or record)


STATEFUL = {
    "closure": (counting, "number"),
    "cache": (lambda: cached, "CACHE"),
    "iterator": (lambda: lambda record: (COUNTER, good(record))[1], "an iterator"),
    "np.random without effect": (
        lambda: lambda record: {**record, "u": np.float32(np.random.rand() > 2)},
        "numpy.random",
    ),
    "np.random in a branch": (
        lambda: (
            lambda record: {**record, "u": np.float32(np.random.rand() if record["i"] % 2 else 0)}
        ),
        "numpy.random",
    ),
}


@pytest.mark.parametrize("case", STATEFUL)
@pytest.mark.parametrize("wrapped", ("map", "Mixture"))
def test_states_are_refused_if_a_function_keeps_state(case, wrapped):
    make, words = STATEFUL[case]
    CACHE.clear()
    source = WRAPPED[wrapped](rows().map(make()))
    iterator = iterator_of(source)
    next(iterator)
    with pytest.raises(StateError, match=f"{words}.*stateful=False"):
        iterator.get_state()
    next(iterator)
    if case != "np.random in a branch":
        iterator = iterator_of(WRAPPED[wrapped](rows().map(make(), stateful=False)))
        next(iterator)
        assert iterator.get_state()


PURE = {
    "large vocabulary": lambda: functools.partial(
        lambda words, record: {**record, "u": np.float32(words["w7"])},
        {f"w{k}": k for k in range(5000)},
    ),
    "lru_cache": lambda: (lambda cache: lambda record: {**record, "u": np.float32(cache(3))})(
        functools.lru_cache(lambda k: k + 1)
    ),
    "loads at its first call": Lazy,
}


@pytest.mark.parametrize("case", PURE)
@pytest.mark.parametrize("fields", (None, KINDS))
def test_pure_functions_are_accepted(case, fields):
    iterator = iterator_of(rows().map(PURE[case](), fields=fields))
    first = iterator.get_state()
    list(iterator)
    iterator.set_state(first)
    assert len(list(iterator)) == COUNT // BATCH


def test_a_record_that_changes_later_is_refused():
    """As for any source: four records are read twice before a state."""
    changes = []

    def late(record):
        return {**record, "u": np.float32(np.random.default_rng().random() if changes else 0)}

    iterator = iterator_of(rows().map(late, stateful=False))
    next(iterator)
    changes.append(1)
    with pytest.raises(StateError, match="changes at each read"):
        iterator.get_state()


@pytest.mark.parametrize("inner", (rows, lambda: Records([{"i": np.int32(k)} for k in range(16)])))
def test_a_pickled_map_is_checked_again(inner):
    source = pickle.loads(pickle.dumps(inner().map(good)))
    iterator = iterator_of(source)
    assert iterator.get_state()  # before its first call
    next(iterator)
    assert iterator.get_state()


def delivered(source, **config):
    """Returns the numbers and the first values of the rows that are delivered and valid."""

    @data_iterator(shuffle=False, on_error="mask", mask="valid")
    def numbers(i, x):
        return {"i": i, "x": x}

    batches = list(numbers(source=source, batch_size=8, seed=3, **config))
    valid = np.concatenate([batch["valid"] for batch in batches])
    return [np.concatenate([np.asarray(b[name]) for b in batches])[valid] for name in "ix"]


def test_reused_memory_is_found_beside_bad_records():
    buffer = np.zeros(2, np.float32)

    def reused(record):
        if record["i"] % 8 == 3:
            raise ValueError("bad")
        buffer[:] = record["i"]
        return {"i": record["i"], "x": buffer}

    with pytest.raises(ValueError, match="in the same memory"):
        delivered(Arrays({"i": np.arange(64, dtype=np.int32)}).map(reused))


def test_reused_memory_is_found_beside_a_constant():
    constant, buffer = np.ones(2, np.float32), np.zeros(2, np.float32)

    def reused(record):
        i = int(record["i"])
        x = np.full(2, i, np.float32) if i < 200 else buffer
        x[:] = i
        return {"i": record["i"], "x": x, "c": constant}

    @data_iterator(shuffle=False)
    def all_fields(i, x, c):
        return {"i": i, "x": x, "c": c}

    source = Arrays({"i": np.arange(400, dtype=np.int32)}).map(reused)
    with pytest.raises(ValueError, match="in the same memory"):
        list(all_fields(source=source, batch_size=8))


def test_a_random_map_that_reuses_the_memory_of_a_record_is_refused():
    buffers = np.zeros((24, 6), np.float32)

    def reused(record, rng):
        buffer = buffers[int(record["i"])]
        buffer[:] = rng.normal(size=6)
        return {"i": record["i"], "x": buffer}

    source = Arrays({"i": np.arange(24, dtype=np.int32)}).random_map(reused)

    @data_iterator
    def numbers(i, x):
        return {"i": i, "x": x}

    iterator = numbers(source=source, batch_size=8, seed=3)
    with pytest.raises(ValueError, match="in the same memory"):
        for _, batches in iterator.epochs(9):
            list(batches)


def test_states_of_a_long_mixture():
    source = Mixture([(Records([{"i": np.int32(k)} for k in range(2)]), 1)], length=5)

    @data_iterator
    def numbers(i):
        return {"i": i}

    iterator = numbers(source=source, batch_size=2)
    next(iterator)
    state, expected = iterator.get_state(), np.asarray(next(iterator)["i"])
    iterator.set_state(state)
    np.testing.assert_array_equal(next(iterator)["i"], expected)


def test_no_batch_is_delivered_after_memory_was_reused():
    buffer = np.zeros(2, np.float32)

    def reused(record):
        buffer[:] = record["i"]
        return {"i": record["i"], "x": buffer}

    @data_iterator(shuffle=False)
    def numbers(i, x):
        return {"i": i, "x": x}

    # The first batch has run, and the second has been read, before the first is delivered.
    iterator = numbers(source=rows(10).map(reused), batch_size=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the same memory"):
            next(iterator)
