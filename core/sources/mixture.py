"""Mixtures: which component each sample is of, in exact proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..hashing import fold, mix
from .order import Indices

MOST_EXACT = 1000  # samples of a window


def window_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each component in a window.

    Whole weights whose sum, divided by their greatest common divisor, is at most 1,000 are exact;
    others are rounded to thousandths by the largest remainder.

    Raises:
        ValueError: If there is no weight, or one is not above 0, or is rounded to 0.
    """
    if not weights:
        raise ValueError("a mixture needs a source at least")
    for weight in weights:
        if not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
            raise ValueError(f"weights must be numbers above 0, not {weight!r}")
    if all(float(weight).is_integer() for weight in weights):
        whole = [int(weight) for weight in weights]
        divisor = math.gcd(*whole)
        if sum(whole) // divisor <= MOST_EXACT:
            return tuple(weight // divisor for weight in whole)
    total = math.fsum(weights)
    shares = [weight / total * MOST_EXACT for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_rest[: MOST_EXACT - sum(counts)]:
        counts[k] += 1
    for weight, count in zip(weights, counts):
        if count == 0:
            raise ValueError(
                f"the weight {weight} is less than a thousandth of their sum {total}: leave its "
                "source out, or give it more"
            )
    return tuple(counts)


class Proportions:
    """The component of each sample of an endless stream.

    In each window of ``sum(counts)`` samples, from a multiple of its size on, component i comes
    ``counts[i]`` times, in an order that follows from seed and window.

    Args:
        counts: Samples of each component in a window.
        seed: The seed.
    """

    def __init__(self, counts: Sequence[int], seed: int):
        self._counts = np.asarray(counts, np.int64)
        self._seed = seed
        self._size = int(self._counts.sum())
        self._components = np.repeat(np.arange(len(counts)), self._counts)
        self._ranks = np.concatenate([np.arange(count) for count in counts])

    def __call__(self, samples: Any) -> tuple[Indices, Indices]:
        """The component of each sample, and its number among the samples of that component."""
        windows, slots = np.divmod(np.asarray(samples, np.int64), self._size)
        distinct, row = np.unique(windows, return_inverse=True)
        hashes = mix(fold(self._seed, distinct)[:, None] ^ mix(np.arange(self._size)))
        components = self._components[np.argsort(hashes, axis=1, kind="stable")]
        # Where the slots of each component are, in order; their ranks go there.
        places = np.argsort(components, axis=1, kind="stable")
        ranks = np.empty_like(components)
        np.put_along_axis(ranks, places, np.broadcast_to(self._ranks, places.shape), axis=1)
        component = components[row, slots]
        return component, windows * self._counts[component] + ranks[row, slots]
