"""Keyed numbers, orders and mixtures: golden values, bijections, statistics."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from python_numbers import MASK, by_feistel, folded, listed_order

from dalijax.core.order import shuffle as order
from dalijax.core.order.proportions import Proportions, Stage, counts_per_period
from dalijax.core.order.shuffle import shuffled
from dalijax.core.random.hashing import column_keys, fold, mix, name_key, uniform

SEEDS, EPOCHS = st.integers(-1, 2**32 - 1), st.integers(0, 10**6)

GOLDEN_BITS = [[4947037, 6730803], [4464446, 10077721], [2921179, 769046]]
# By epoch.
GOLDEN_SMALL = [[3, 4, 2, 1, 0], [4, 1, 3, 2, 0], [0, 1, 2, 4, 3]]
GOLDEN_LARGE = [
    [86758631, 797225655, 137852774],
    [545114778, 720729074, 445493282],
    [949466175, 133717984, 928394950],
]
GOLDEN_COMPONENTS = [0, 1, 0, 1, 0, 0]
GOLDEN_NUMBERS = [0, 0, 1, 1, 2, 3]
GOLDEN_NAME = 16654413820857875841


def test_splitmix64_matches_the_reference():
    # The first outputs of the reference implementation (Vigna) from the state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + k * 0x9E3779B97F4A7C15) & MASK for k in range(3)]
    assert [int(mix(np.uint64(s))) for s in states] == expected


def test_fold_matches_pythons_integers():
    for parts in ((1, 2, 3), (3, 2, 1), (0,), (-1, 5), (MASK, 1 << 63)):
        assert int(fold(*parts)) == folded(*parts)
    assert int(fold(1, 3, 7)) != int(fold(1, 7, 3))


def test_golden_values():
    """These values are part of the format: changing them needs another version of states."""
    records = fold(42, 3, np.array([0, 1, 10**12]))
    numbers = uniform(records, column_keys("crop", 2))
    bits = (numbers * 2.0**24).astype(int).tolist()
    assert bits == GOLDEN_BITS
    for epoch in range(3):
        assert shuffled(np.arange(5), 5, 1, epoch).tolist() == GOLDEN_SMALL[epoch]
        assert shuffled(np.arange(3), 10**9, 1, epoch).tolist() == GOLDEN_LARGE[epoch]
    component, number = Proportions([Stage(0, (2, 1))], 9)(np.arange(6))
    assert component.tolist() == GOLDEN_COMPONENTS
    assert number.tolist() == GOLDEN_NUMBERS
    assert name_key("crop") == GOLDEN_NAME


@pytest.mark.parametrize("epoch", (0, 1, 2, 10**6))
@pytest.mark.parametrize("seed", (0, 7, -1))
def test_orders_match_pythons_integers(seed, epoch):
    for count in (1, 2, 9, 300):
        expected = listed_order(count, seed, epoch)
        assert shuffled(np.arange(count), count, seed, epoch).tolist() == expected
    for count in (order.MOST_SORTED + 1, 1_281_167):
        positions = [0, 1, 255, count // 2, count - 1]
        expected = [by_feistel(position, count, seed, epoch) for position in positions]
        assert shuffled(positions, count, seed, epoch).tolist() == expected


@pytest.mark.parametrize("seed", (0, 7, -1))
def test_the_network_of_large_orders_permutes_any_count(seed, monkeypatch):
    monkeypatch.setattr(order, "MOST_SORTED", 0)
    for count in range(1, 60):
        found = shuffled(np.arange(count), count, seed, count % 3).tolist()
        assert sorted(found) == list(range(count))
        assert found == [by_feistel(k, count, seed, count % 3) for k in range(count)]


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.integers(1, 3 * order.MOST_SORTED), SEEDS, EPOCHS)
@hypothesis.example(order.MOST_SORTED, 0, 0)
@hypothesis.example(order.MOST_SORTED + 1, 0, 0)
@hypothesis.example(100_003, -1, 10**6)
def test_an_order_has_each_record_once(count, seed, epoch):
    np.testing.assert_array_equal(
        np.sort(shuffled(np.arange(count), count, seed, epoch)), np.arange(count)
    )


def test_orders_of_few_records_are_uniform():
    seen = {}
    for epoch in range(12_000):
        key = tuple(shuffled(np.arange(4), 4, 9, epoch))
        seen[key] = seen.get(key, 0) + 1
    expected = 12_000 / math.factorial(4)
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values())
    assert len(seen) == 24
    assert chi2 < 49.7  # 23 degrees of freedom: p = 0.001


def test_parts_of_a_large_order_agree_with_the_whole():
    count = 100_003
    whole = shuffled(np.arange(count), count, 5, 2)
    part = np.array([7, 99_999, 7, 50_000])
    np.testing.assert_array_equal(shuffled(part, count, 5, 2), whole[part])
    assert abs(np.corrcoef(np.arange(count), whole)[0, 1]) * np.sqrt(count) < 4
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) * np.sqrt(count) < 4
    other = shuffled(np.arange(count), count, 5, 3)
    assert abs(np.corrcoef(whole, other)[0, 1]) * np.sqrt(count) < 4


def test_numbers_are_uniform_and_unrelated():
    keys = np.concatenate(
        [column_keys("crop", 4), column_keys("flip", 1), column_keys("erase", 11)]
    )
    records = np.arange(50_000)
    x = uniform(fold(0, 0, records), keys)
    counts = np.bincount((x.ravel() * 4096).astype(int), minlength=4096)
    expected = x.size / 4096
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 4095) < 5 * math.sqrt(2 * 4095)
    low = np.bincount((x.ravel().astype(np.float64) * 2**24).astype(np.int64) & 255, minlength=256)
    assert abs(((low - x.size / 256) ** 2 / (x.size / 256)).sum() - 255) < 5 * math.sqrt(2 * 255)
    for a, b in (
        (x[:-1], x[1:]),
        (x[:, :-1], x[:, 1:]),
        (x, uniform(fold(0, 1, records), keys)),
        (x, uniform(fold(1, 0, records), keys)),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * math.sqrt(a.size) < 5
    assert x.min() >= 0 and x.max() < 1


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1, 1], (1, 1)),
        ([3, 1], (3, 1)),
        ([500, 300, 200], (5, 3, 2)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([1 / 3, 1 / 3, 1 / 3], (1, 1, 1)),
        ([0.1, 0.9], (1, 9)),
        ([1 / 3, 2 / 3 + 0.1], (303, 697)),
        ([1], (1,)),
    ],
)
def test_counts_of_a_period(weights, counts):
    assert counts_per_period(weights) == counts


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([], "requires at least one source"),
        ([1, 0], "not 0"),
        ([1, True], "not True"),
        ([1, -2], "not -2"),
        ([1, math.inf], "not inf"),
        ([1, 1e-5], "1e-05"),
    ],
)
def test_invalid_weights_are_refused(weights, text):
    with pytest.raises(ValueError, match=text):
        counts_per_period(weights)


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    st.lists(st.integers(1, 80), min_size=1, max_size=12), SEEDS, st.integers(0, 10**9)
)
@hypothesis.example([1] * 100, 7, 10**7)
def test_each_period_of_a_mixture_is_exact(counts, seed, begin):
    proportions, size = Proportions([Stage(0, tuple(counts))], seed), sum(counts)
    samples = np.arange(begin * size, (begin + 20) * size)
    component, number = proportions(samples)
    for window in component.reshape(20, size):
        np.testing.assert_array_equal(np.bincount(window, minlength=len(counts)), counts)
    for k, count in enumerate(counts):  # in its own order, without a gap
        np.testing.assert_array_equal(
            number[component == k], np.arange(begin * count, (begin + 20) * count)
        )
    few = np.array([samples[3], samples[-1], samples[3]])
    for whole, part in zip((component, number), proportions(few)):
        np.testing.assert_array_equal(part, whole[few - samples[0]])
