"""Proportions of a mixture: the component of each sample, as pure functions of the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ..messages.printable import printable_repr
from ..random.hashing import fold, mix
from .shuffle import Indices

MOST_EXACT = 1000  # largest period with exact proportions, in samples


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


def _rational(weight: Any) -> Fraction:
    """Converts a weight, a real number of any type, to an exact fraction.

    Raises:
        ValueError: If the weight is not a finite, positive number.
    """
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = _fraction(weight)
    if number is None or number <= 0:
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


class Proportions:
    """Assigns a component to each sample of an endless stream.

    In each period of ``sum(counts)`` samples, component i occurs ``counts[i]`` times, in an order
    that depends on the seed and the period.

    Args:
        counts: Number of samples of each component in a period.
        seed: The seed.
    """

    def __init__(self, counts: Sequence[int], seed: int):
        self._counts = np.asarray(counts, np.int64)
        self._seed = seed
        self._size = int(self._counts.sum())
        self._components = np.repeat(np.arange(len(counts)), self._counts)
        self._ranks = np.concatenate([np.arange(count) for count in counts])

    def __call__(self, samples: Any) -> tuple[Indices, Indices]:
        """Returns the component of each sample, and the sample's index in the component's stream.

        Args:
            samples: Indices of samples in the endless stream, int64 [samples].

        Returns:
            Two arrays, int64 [samples].
        """
        periods, slots = np.divmod(np.asarray(samples, np.int64), self._size)
        first, last = (int(periods.min()), int(periods.max())) if len(periods) else (0, 0)
        if last - first > len(periods):  # sparse samples: only their periods are computed
            distinct, row = np.unique(periods, return_inverse=True)
        else:
            distinct, row = np.arange(first, last + 1), periods - first
        hashes = mix(fold(self._seed, distinct)[:, None] ^ mix(np.arange(self._size)))
        components = self._components[np.argsort(hashes, axis=1, kind="stable")]
        # Positions of the slots of each component, in order, to which its ranks are assigned.
        positions = np.argsort(components, axis=1, kind="stable")
        ranks = np.empty_like(components)
        np.put_along_axis(ranks, positions, np.broadcast_to(self._ranks, positions.shape), axis=1)
        component = components[row, slots]
        return component, periods * self._counts[component] + ranks[row, slots]
