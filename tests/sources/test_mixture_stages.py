"""Mixtures whose weights change, compared with a reference that takes one sample at a time."""

import itertools
import json
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from shardings import rows_over
from staged_mixtures import (
    FIRSTS,
    SEED,
    SIZES,
    TOTAL,
    WEIGHTS,
    mixed,
    parts,
    reference,
    restored,
    saved,
    stages_of,
    stream,
    taken,
)

from dalijax import data_iterator
from dalijax.core.sources.source import order_of
from dalijax.sources import Arrays, Mixture
from processes import started

WORKER = pathlib.Path(__file__).parents[1] / "support" / "mixture_worker.py"


@pytest.fixture(scope="module")
def expected():
    """The records of the mixture of all parts with WEIGHTS."""
    return reference(SIZES, WEIGHTS, TOTAL)[0]


# The order


@st.composite
def mixtures(draw):
    count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    starts = draw(st.lists(st.integers(1, 300), max_size=4, unique=True))
    weight = st.integers(0, 6)
    changes = st.dictionaries(st.sampled_from([0, *starts]), weight, min_size=1)
    schedule = changes.map(lambda changes: sorted(changes.items()))
    weights = [draw(st.integers(1, 6) | schedule) for _ in sizes]
    return sizes, weights


@hypothesis.given(mixtures(), st.booleans(), st.integers(-1, 2**32), st.data())
@hypothesis.settings(max_examples=150)
def test_the_order_is_that_of_the_reference(mixture, shuffle, seed, data):
    sizes, weights = mixture
    pairs = [(Arrays({"x": np.arange(size)}), weight) for size, weight in zip(sizes, weights)]
    try:
        stages = stages_of(weights)
    except ValueError:
        with pytest.raises(ValueError, match="no source has a weight from record"):
            Mixture(pairs)
        return
    made = Mixture(pairs)
    assert len(made) == sum(size for size, count in zip(sizes, stages[0][1]) if count)
    order = order_of(made, seed, shuffle)
    records, components, epochs = reference(sizes, weights, 500, shuffle, seed)
    np.testing.assert_array_equal(order(np.arange(500)), [records, epochs])
    some = np.array(data.draw(st.lists(st.integers(0, 499), max_size=30)), np.int64)
    np.testing.assert_array_equal(order(some), [records[some], epochs[some]])
    for (start, counts), (end, _) in itertools.pairwise([*stages, (500, None)]):
        size = sum(counts)
        periods = components[start : start + max(0, end - start) // size * size].reshape(-1, size)
        assert (np.sort(periods) == np.repeat(np.arange(len(counts)), counts)).all()


def test_each_source_continues_its_epochs(expected):
    for first, size in zip(FIRSTS, SIZES):
        own = expected[(expected >= first) & (expected < first + size)]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) and (np.sort(epochs) == np.arange(first, first + size)).all()


@pytest.mark.parametrize("convert", (float, np.float32, np.array))
def test_weights_and_records_of_other_types(convert):
    weights = (convert(3), ((np.int32(0), convert(1)), (np.uint64(401), convert(4)), (1003, 0)))
    assert mixed(*weights).identity() == mixed(*WEIGHTS[:2]).identity()
    assert repr(mixed(*weights)) == repr(mixed(*WEIGHTS[:2]))


def test_equal_proportions_are_no_change():
    assert repr(mixed([(0, 1), (7, 2)], [(0, 3), (7, 6)])) == repr(mixed(1, 3))
    assert repr(mixed(3, [(0, 1), (401, 4)])) == (
        "Mixture([(Arrays(x: 50 rows), [(0, 0.75), (401, 0.428571)]), "
        "(Arrays(x: 37 rows), [(0, 0.25), (401, 0.571429)])], length=87)"
    )


@pytest.mark.parametrize(
    ("weight", "error", "text"),
    [
        ([(5, 1), (5, 2)], ValueError, "that increase, .* not 5"),
        ([(2, 1), (1, 1)], ValueError, "that increase, .* not 1"),
        ([(-1, 1)], ValueError, "not -1"),
        ([(2**53, 1)], ValueError, "not 9007199254740992"),
        ([(1.5, 1)], TypeError, "not 1.5"),
        ([(True, 1)], TypeError, "not True"),
        ([(0, -1)], ValueError, "weights must be positive numbers, not -1"),
        ([(0, "1")], ValueError, "weights must be positive numbers, not '1'"),
        ([(0, 1), (3, 1e-5)], ValueError, "the weight 1e-05 is less than a thousandth"),
        ([(0, 1, 2)], ValueError, "weights must be positive numbers"),
        ([(k, 1 + k % 2) for k in range(101)], ValueError, "more than 99 times"),
    ],
)
def test_invalid_changes_are_refused(weight, error, text):
    with pytest.raises(error, match=text):
        mixed(1, weight)
    with pytest.raises(ValueError, match="no source has a weight from record 9 on"):
        mixed([(0, 1), (9, 0)])


# Streams and states


@pytest.mark.parametrize("devices", (1, 2, 4))
@pytest.mark.parametrize("batch_size", (8, 40))
def test_streams_over_devices(expected, devices, batch_size):
    kwargs = {"seed": SEED, "sharding": rows_over(devices)}
    iterator = stream(mixed(*WEIGHTS), batch_size, **kwargs)
    batches = TOTAL // batch_size
    np.testing.assert_array_equal(taken(iterator, batches), expected)
    for step in (batches - 1, 401 // batch_size, 0, 402 // batch_size + 1, 1003 // batch_size):
        iterator.seek_step(step)
        rows = taken(iterator, 1)
        np.testing.assert_array_equal(rows, expected[step * batch_size :][:batch_size])
    iterator.close()


def test_states_move_between_batch_sizes_and_devices(expected):
    iterator, begin = stream(mixed(*WEIGHTS), 24, seed=SEED), 0
    for devices, batch_size, batches in ((2, 8, 51), (4, 60, 6), (1, 24, 12), (4, 8, 15)):
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        iterator = stream(mixed(*WEIGHTS), batch_size, sharding=rows_over(devices))
        iterator.set_state(state)
        assert iterator.get_state() == state
        rows = taken(iterator, batches)
        np.testing.assert_array_equal(rows, expected[begin : begin + len(rows)])
        begin += len(rows)
    assert begin > 1003
    iterator.close()


def test_a_run_changes_its_mixture_twice():
    a, b, c = parts()
    begun = Mixture([(a, 3), (b, 1)])
    first = saved(begun, 17)
    assert first["sample"] == 408
    changed = begun.then(408, [(c, 2), (b, 1)])
    assert len(changed) == len(begun) == 87
    weights = ([(0, 3), (408, 0)], 1, [(408, 2)])
    rows = reference(SIZES, weights, TOTAL)[0]
    iterator = restored(changed, first, 8)
    np.testing.assert_array_equal(taken(iterator, 75), rows[408:1008])
    second = iterator.get_state()
    iterator.close()
    literal = Mixture([*zip((a, b, c), weights)])
    assert literal._state == changed._state and literal.identity() == changed.identity()
    last = changed.then(1008, [(a, 1), (b, 3)])
    rows = reference(
        SIZES, ([*weights[0], (1008, 1)], [(0, 1), (1008, 3)], [(408, 2), (1008, 0)]), TOTAL
    )[0]
    for state in (saved(begun, 3), first, second, saved(last, 45)):
        iterator = restored(last, state, 40)
        np.testing.assert_array_equal(taken(iterator, 10), rows[state["sample"] :][:400])
        iterator.seek_step(30)
        np.testing.assert_array_equal(taken(iterator, 2), rows[1200:1280])
        iterator.close()


def test_then_needs_a_later_change():
    a, b, _ = parts()
    mixture = Mixture([(a, 1), (b, [(0, 1), (9, 2)])])
    with pytest.raises(ValueError, match="records above 9, .* not 9"):
        mixture.then(9, [(a, 1)])
    with pytest.raises(ValueError, match="no source has a weight from record 10 on"):
        mixture.then(10, [])
    with pytest.raises(TypeError, match="requires a list of pairs"):
        mixture.then(10, [a])
    twice = Mixture([(a, 1), (a, 2)], length=4).then(7, [(a, 5), (b, 1)])
    assert repr(twice) == repr(
        Mixture([(a, [(0, 1), (7, 5)]), (a, [(0, 2), (7, 0)]), (b, [(7, 1)])], length=4)
    )


@pytest.mark.parametrize("policy", ("fill", "drop", "partial"))
@pytest.mark.parametrize("padded", (False, True))
def test_weights_change_at_an_epoch(policy, padded):
    """The next epoch of a padded mixture begins before the end of the last batch."""
    options = dict(last_batch_policy=policy, last_batch_padded=padded, as_numpy=True)
    make = data_iterator(lambda x: {"x": x}, mask="mask", **options)
    a, b, c = parts()
    mixture, batches = Mixture([(a, 3), (b, 1)]), []
    iterator = make(source=mixture, batch_size=24, seed=SEED)
    for _ in iterator:
        state = iterator.get_state()
    begin = 87 if padded else state["sample"] if policy != "drop" else 96
    changed = mixture.then(begin, [(c, 1), (a, 1)])
    if padded and policy != "drop":
        assert state["sample"] == 96
    iterator = make(source=changed, batch_size=24)
    iterator.set_state(state)
    iterator.reset()
    rows = reference(SIZES, ([(0, 3), (begin, 1)], [(0, 1), (begin, 0)], [(begin, 1)]), TOTAL)[0]
    for batch in iterator:
        batches.append(batch["x"][batch["mask"]])
    rows = rows[begin : begin + sum(map(len, batches))]
    np.testing.assert_array_equal(np.concatenate(batches), rows)


@pytest.mark.slow
def test_two_processes(tmp_path, expected):
    options = {"devices": 2, "state": saved(mixed(*WEIGHTS), 30, 10)}
    reports = started(WORKER, tmp_path, options, 2)
    weights = ([(0, 3), (240, 0)], 1, [(240, 2)])
    rows = reference(SIZES, weights, 720)[0]
    for name, wanted in {
        "before": rows[:240],
        "after": rows[240:480],
        "moved": expected[300:780],
    }.items():
        held = [{int(k): v for k, v in report[name].items()} for report in reports]
        assert not held[0].keys() & held[1].keys()
        merged = held[0] | held[1]
        np.testing.assert_array_equal([merged[k] for k in sorted(merged)], wanted)
    assert reports[0]["state"] == reports[1]["state"]
    iterator = restored(mixed(*weights), reports[1]["last"], 60)
    np.testing.assert_array_equal(taken(iterator, 4), rows[480:720])
    iterator.close()
    for report in reports:
        assert "weights: process 0 has " in report["error"]
