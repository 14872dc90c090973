"""Proportions of a mixture: the component of each sample, as pure functions of the weights.

A stage begins at a sample of the endless stream, and ends where the next stage begins. Its order
depends on the seed, its proportions and its start, so that adding a later stage does not change it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import whole_number
from ..messages.printable import printable_repr
from ..random.hashing import fold, mix
from .samples import MOST_SAMPLES
from .shuffle import Indices

MOST_EXACT = 1000  # largest period with exact proportions, in samples
MOST_STAGES = 100  # which states contain


class Stage(NamedTuple):
    """A part of a mixture's stream with constant proportions.

    Attributes:
        start: Index of the first sample in the stream.
        counts: Number of samples of each component in a period.
    """

    start: int
    counts: tuple[int, ...]


def stages_of(weights: Sequence[Any]) -> tuple[Stage, ...]:
    """Returns the stages of a mixture. Successive stages have different proportions.

    Args:
        weights: For each component, a positive number, or pairs of an index of a sample and the
            weight from there on, which may be 0. It is 0 before the first pair.

    Raises:
        TypeError: If an index is not an integer.
        ValueError: If a weight is invalid, the indices of a list do not increase, no component has
            a positive weight, or there are more than 100 stages.
    """
    changes: dict[int, dict[int, Any]] = {0: {}}
    for k, weight in enumerate(weights):
        for start, value in _schedule(weight):
            changes.setdefault(start, {})[k] = value
    current = dict[int, Any]()
    stages: list[Stage] = []
    for start in sorted(changes):
        current |= changes[start]
        used = {k: value for k, value in sorted(current.items()) if value != 0}
        if weights and not used:
            raise ValueError(
                f"no source has a weight from record {start:,} on. Give one of them a positive "
                "weight there"
            )
        counts = dict(zip(used, counts_per_period([*used.values()])))
        stage = Stage(start, tuple(counts.get(k, 0) for k in range(len(weights))))
        if not stages or stages[-1].counts != stage.counts:
            stages.append(stage)
        if len(stages) > MOST_STAGES:
            raise ValueError(
                f"the weights change more than {MOST_STAGES - 1} times, but states have no room "
                "for more changes. Change them in larger steps"
            )
    return tuple(stages)


def _schedule(weight: Any) -> list[tuple[int, Any]]:
    """Returns a weight as pairs of an index of a sample and the weight from there on."""
    is_list = isinstance(weight, (list, tuple)) and len(weight) > 0
    if not is_list or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in weight):
        _rational(weight)
        return [(0, weight)]
    expected = "numbers of records that increase, as in [(0, 1), (2_000_000, 4)]"
    pairs: list[tuple[int, Any]] = []
    for first, value in weight:
        least = pairs[-1][0] + 1 if pairs else 0
        first = whole_number("changes of a weight", first, expected, least, MOST_SAMPLES)
        pairs.append((first, value if _rational(value, may_be_zero=True) else 0))
    return pairs


def _fraction(weight: Any) -> Fraction | None:
    """Converts a number to a fraction; None for an array or another type."""
    if isinstance(weight, np.generic) or hasattr(weight, "__array__"):
        array = np.asarray(weight)
        if array.ndim or array.dtype.kind not in "iufVO":  # bfloat16 has the kind V
            return None
        weight = array.item()
        if isinstance(weight, np.longdouble):  # Fraction accepts it only since Python 3.12
            weight = Fraction(*weight.as_integer_ratio())
    return None if isinstance(weight, (bool, str, bytes)) else Fraction(weight)


def _rational(weight: Any, may_be_zero: bool = False) -> Fraction:
    """Converts a weight, a real number of any type, to an exact fraction.

    Raises:
        ValueError: If the weight is not a finite, positive number, or 0 if it may be.
    """
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = _fraction(weight)
    if number is None or number < 0 or (number == 0 and not may_be_zero):
        raise ValueError(f"weights must be positive numbers, not {printable_repr(weight)}")
    return number


def counts_per_period(weights: Sequence[Any]) -> tuple[int, ...]:
    """Returns the number of samples of each source in a period, which is as short as possible.

    Weights are exact if the sum of the reduced integer proportions is at most 1,000. Other weights
    are rounded to thousandths by the largest remainder method.

    Raises:
        ValueError: If there is no weight, or a weight is not positive, or is rounded to 0.
    """
    if not weights:
        raise ValueError("a mixture requires at least one source")
    numbers = [_rational(weight) for weight in weights]
    scale = math.lcm(*(number.denominator for number in numbers))
    exact = _reduced([int(number * scale) for number in numbers])
    if sum(exact) <= MOST_EXACT:
        return exact
    total = sum(numbers)
    shares = [number / total * MOST_EXACT for number in numbers]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: MOST_EXACT - sum(counts)]:
        counts[k] += 1
    for weight, count in zip(weights, counts):
        if count == 0:
            raise ValueError(
                f"the weight {weight} is less than a thousandth of the sum of {list(weights)}. "
                "Omit its source, or increase its weight"
            )
    return _reduced(counts)


def _reduced(counts: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


class StageOrder:
    """Assigns a component to each sample of a stage.

    In each period of ``sum(counts)`` samples, component i occurs ``counts[i]`` times, in an order
    that depends on the seed, the start of the stage and the period. The first period begins with
    the stage.

    Args:
        stage: The stage.
        seed: The seed.
    """

    def __init__(self, stage: Stage, seed: int):
        self._counts = np.asarray(stage.counts, np.int64)
        self._key = (seed, stage.start) if stage.start else (seed,)
        self._size = int(self._counts.sum())
        self._components = np.repeat(np.arange(len(stage.counts)), self._counts)
        self._ranks = np.concatenate([np.arange(count) for count in stage.counts])

    def __call__(self, samples: Any) -> tuple[Indices, Indices]:
        """Returns the component of each sample, and the number of its earlier samples in the stage.

        Args:
            samples: Indices of samples in the stage, int64 [samples].

        Returns:
            Two arrays, int64 [samples].
        """
        periods, slots = np.divmod(np.asarray(samples, np.int64), self._size)
        first, last = (int(periods.min()), int(periods.max())) if len(periods) else (0, 0)
        if last - first > len(periods):  # sparse samples: only their periods are computed
            distinct, row = np.unique(periods, return_inverse=True)
        else:
            distinct, row = np.arange(first, last + 1), periods - first
        hashes = mix(fold(*self._key, distinct)[:, None] ^ mix(np.arange(self._size)))
        components = self._components[np.argsort(hashes, axis=1, kind="stable")]
        # Positions of the slots of each component, in order, to which its ranks are assigned.
        positions = np.argsort(components, axis=1, kind="stable")
        ranks = np.empty_like(components)
        np.put_along_axis(ranks, positions, np.broadcast_to(self._ranks, positions.shape), axis=1)
        component = components[row, slots]
        return component, periods * self._counts[component] + ranks[row, slots]

    def totals(self, length: int) -> NDArray[np.int64]:
        """Returns how many of the first samples belong to each component, int64 [components]."""
        periods, cut = divmod(length, self._size)
        components, _ = self(np.arange(length - cut, length))  # of the cut period
        return periods * self._counts + np.bincount(components, minlength=len(self._counts))


class Proportions:
    """Assigns a component to each sample of an endless stream.

    Args:
        stages: The stages, of which the first begins at 0.
        seed: The seed.
    """

    def __init__(self, stages: Sequence[Stage], seed: int):
        self._starts = np.array([stage.start for stage in stages], np.int64)
        self._orders = [StageOrder(stage, seed) for stage in stages]
        totals = map(StageOrder.totals, self._orders, np.diff(self._starts).tolist())
        zeros = np.zeros(len(stages[0].counts), np.int64)
        # The number of samples of each component before each stage.
        self._before = np.cumsum([zeros, *totals], axis=0)

    def __call__(self, samples: Any) -> tuple[Indices, Indices]:
        """Returns the component of each sample, and the sample's index in the component's stream.

        Args:
            samples: Indices of samples in the endless stream, int64 [samples].

        Returns:
            Two arrays, int64 [samples].
        """
        if len(self._orders) == 1:
            return self._orders[0](samples)
        samples = np.asarray(samples, np.int64)
        stages = np.searchsorted(self._starts, samples, side="right") - 1
        components, numbers = np.empty_like(samples), np.empty_like(samples)
        for stage in np.unique(stages).tolist():  # a batch spans one stage or a few
            rows = stages == stage
            component, number = self._orders[stage](samples[rows] - self._starts[stage])
            components[rows] = component
            numbers[rows] = number + self._before[stage, component]
        return components, numbers
