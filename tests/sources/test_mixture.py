"""Mixtures compared with their sources, record by record."""

import decimal
import fractions

import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import fn
from shardings import rows_over

from dalijax import data_iterator
from dalijax.core.order.proportions import counts_per_period
from dalijax.core.order.shuffle import shuffled
from dalijax.core.random.hashing import fold
from dalijax.core.sources.source import order_of
from dalijax.sources import Arrays, Field, Mixture, Source

SIZES = (5, 70, 13)


def components():
    starts = np.cumsum([0, *SIZES])
    return [
        Arrays({"x": np.arange(n) + start, "y": np.zeros((n, 2))})
        for n, start in zip(SIZES, starts)
    ]


def test_records_are_numbered_after_those_of_earlier_sources():
    mixture = Mixture(list(zip(components(), (1, 2, 3))))
    assert len(mixture) == sum(SIZES)
    indices = np.random.default_rng(0).permutation(sum(SIZES))
    values = mixture.read(indices, ["x", "y"])
    np.testing.assert_array_equal(values["x"], indices)
    assert np.shape(values["y"]) == (sum(SIZES), 2)
    assert (
        mixture.name(4) == "row 4" and mixture.name(5) == "row 0" and mixture.name(87) == "row 12"
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_source_has_its_own_epochs(shuffle):
    mixture = Mixture(list(zip(components(), (1, 2, 3))), length=10)
    assert len(mixture) == 10
    records, epochs = order_of(mixture, 7, shuffle)(np.arange(6 * 40))
    periods = np.searchsorted(np.cumsum(SIZES), records, side="right").reshape(-1, 6)
    assert (np.sort(periods) == [0, 1, 1, 2, 2, 2]).all()
    start = 0
    for number, size in enumerate(SIZES):
        rows = (records >= start) & (records < start + size)
        turn = np.arange(rows.sum())
        expected = [
            shuffled(n % size, size, int(fold(7, number)), n // size) if shuffle else n % size
            for n in turn.tolist()
        ]
        np.testing.assert_array_equal(records[rows] - start, expected)
        np.testing.assert_array_equal(epochs[rows], turn // size)
        start += size


def test_parts_of_the_order_agree_with_the_whole():
    order = Mixture(list(zip(components(), (0.3, 0.5, 0.2)))).order(3, True)
    whole = np.stack(order(np.arange(5000)))
    chosen = np.random.default_rng(1).integers(0, 5000, 100)
    np.testing.assert_array_equal(np.stack(order(chosen)), whole[:, chosen])


def test_weights_are_shown_as_stored():
    assert Mixture(list(zip(components(), (1, 2, 3)))).weights == (1 / 6, 2 / 6, 3 / 6)
    assert Mixture(list(zip(components(), (1, 1, 1.0004)))).weights == (0.333, 0.333, 0.334)


@pytest.mark.parametrize(
    "convert",
    (
        *(float, np.float32, np.float16, np.int8, np.uint64, np.array, jnp.asarray),
        *(fractions.Fraction, decimal.Decimal, lambda k: fractions.Fraction(k, 7)),
    ),
)
def test_weights_are_real_numbers_of_any_type(convert):
    weights = [convert(k) for k in (1, 2, 3)]
    mixture = Mixture(list(zip(components(), weights)))
    assert mixture.weights == (1 / 6, 2 / 6, 3 / 6)
    assert mixture.identity() == Mixture(list(zip(components(), (1, 2, 3)))).identity()


def test_fractions_of_any_type_are_rounded_equally():
    wanted = Mixture(list(zip(components(), (0.5, 0.25, 0.125)))).weights
    for convert in (np.float32, np.float64, decimal.Decimal, jnp.float32):
        weights = [convert(k) for k in (0.5, 0.25, 0.125)]
        assert Mixture(list(zip(components(), weights))).weights == wanted
    assert Mixture(list(zip(components(), (10**400, 10**400, 2 * 10**400)))).weights[2] == 0.5


def test_other_weights_are_refused():
    numbers = (0, -1, True, np.True_, 1j, float("nan"), np.inf)
    for weight in (*numbers, "1", b"1", None, np.array([1.0]), [1]):
        with pytest.raises(ValueError, match="weights must be positive numbers, not"):
            Mixture([(components()[0], weight)])


def test_invalid_mixtures_are_refused():
    a, b, _ = components()
    for sources in ([a, b], [()], [[]], [(a,)], [(a, 1, 2)], [(None, 1)], [(Arrays, 1)]):
        with pytest.raises(TypeError, match="requires a list of pairs"):
            Mixture(sources)
    with pytest.raises(TypeError, match="List its sources instead"):
        Mixture([(Mixture([(a, 1)]), 1), (b, 1)])
    other = Arrays({"x": np.zeros(3, np.float32), "z": np.zeros((3, 1))})
    with pytest.raises(
        ValueError, match=r"(?s)equal fields.*x: .*int32.*float32.*y: .*missing.*z: missing"
    ):
        Mixture([(a, 1), (other, 1)])
    with pytest.raises(ValueError, match="a positive integer, not"):
        Mixture([(a, 1)], length=0)
    with pytest.raises(ValueError, match="a positive integer, not 2.5"):
        Mixture([(a, 1)], length=2.5)
    with pytest.raises(ValueError, match="requires at least one source"):
        Mixture([])
    with pytest.raises(ValueError, match="positive numbers"):
        Mixture([(a, 0)])


@pytest.mark.parametrize("weight", [1, 0.5, 1 / 3, np.float32(0.1)])
def test_equal_weights_give_each_record_once_in_an_epoch(weight):
    halves = [Arrays({"x": np.arange(k, k + 70)}) for k in (0, 70)]
    order = Mixture([(half, weight) for half in halves]).order(3, True)
    records, epochs = order(np.arange(140))
    assert np.array_equal(np.sort(records), np.arange(140)) and not epochs.any()


def test_the_identity_depends_on_sources_proportions_and_length():
    a, b, c = components()
    one = Mixture([(a, 1), (b, 2)]).identity()
    assert one == Mixture([(a, 10), (b, 20)]).identity()
    others = [[(a, 2), (b, 1)], [(b, 2), (a, 1)], [(a, 1), (c, 2)]]
    assert len({one, *(Mixture(other).identity() for other in others)}) == 4
    assert one != Mixture([(a, 1), (b, 2)], length=3).identity()


def test_weights_of_other_types_are_refused_or_exact():
    wrong = [np.array(True), jnp.array(True), np.array("1/2"), [1, [2]], np.timedelta64(3, "s")]
    wrong += [np.array([2]), np.complex64(1), np.float32("nan"), jnp.inf, None, 1j]
    for weight in wrong:
        with pytest.raises(ValueError, match="weights must be positive numbers, not"):
            counts_per_period([weight, 1])
    for weight in (np.longdouble(0.5), jnp.bfloat16(0.5), jnp.float32(0.5), np.array(0.5)):
        assert counts_per_period([weight, 0.5]) == (1, 1)


class Stacked(Source):
    """A source that stacks values of equal shapes, and lists other values."""

    fields = {"k": Field(np.dtype(np.int32)), "x": Field(np.dtype(np.float32), 1)}

    def __len__(self):
        return 300

    def read(self, indices, names):
        rows = [np.full(2 + k // 150, k, np.float32) for k in indices.tolist()]
        same = len({row.shape for row in rows}) == 1
        columns = {"k": indices.astype(np.int32), "x": np.stack(rows) if same else rows}
        return {name: columns[name] for name in names}

    def identity(self):
        return "stacked"


def mixed():
    """Returns a mixture of sources whose rows have 2 or 3 numbers."""
    columns = [Stacked().read(np.arange(150) + first, ["k", "x"]) for first in (0, 150)]
    return Mixture([(Arrays(arrays), 1) for arrays in columns])


@pytest.mark.parametrize("make_source", (Stacked, mixed))
@pytest.mark.parametrize("shards", (0, 2))
def test_shapes_may_differ_between_the_tasks_of_a_batch(make_source, shards):
    """Each of the two tasks reads neighboring records, whose shapes are equal here."""
    kwargs = {"sharding": rows_over(shards)} if shards else {"as_numpy": True}
    iterator = data_iterator(
        lambda k, x: (k, fn.reductions.sum(x, axes=[0])),
        output_map=["k", "sum"],
        source=make_source(),
        **kwargs,
    )(batch_size=300, seed=4)
    batch = next(iterator)
    numbers = np.asarray(batch["k"])
    assert sorted(numbers.tolist()) == list(range(300))
    np.testing.assert_array_equal(batch["sum"], numbers * (2 + numbers // 150))
    iterator.close()
