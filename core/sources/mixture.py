"""Mixtures of sources in exact proportions."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..random.hashing import fold, mix
from .base import SizeTables
from .identity import stated_identity
from .source import Field, Order, Source, Values, names_of, order_of

MOST_EXACT = 1000  # samples of a window


def _fraction(weight: Any) -> Fraction | None:
    """Converts a number to a fraction; None for an array or another type."""
    if isinstance(weight, np.generic) or hasattr(weight, "__array__"):
        array = np.asarray(weight)
        if array.ndim or array.dtype.kind not in "iufVO":  # bfloat16 has the kind V
            return None
        weight = array.item()
        if isinstance(weight, np.longdouble):  # Fraction takes it from Python 3.12 on
            weight = Fraction(*weight.as_integer_ratio())
    return None if isinstance(weight, (bool, str, bytes)) else Fraction(weight)


def _rational(weight: Any) -> Fraction:
    """A weight, of any type of real numbers, as an exact fraction.

    Raises:
        ValueError: If it is not a finite number above 0.
    """
    number = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = _fraction(weight)
    if number is None or number <= 0:
        raise ValueError(f"weights must be numbers above 0, not {weight!r:.80}")
    return number


def window_counts(weights: Sequence[Any]) -> tuple[int, ...]:
    """Samples of each component in a window.

    Whole numbers and fractions are exact if the sum of the whole proportions is at most 1,000.
    Other weights are rounded to thousandths by the largest remainder.

    Raises:
        ValueError: If there is no weight, or one is not above 0, or is rounded to 0.
    """
    if not weights:
        raise ValueError("a mixture needs a source at least")
    numbers = [_rational(weight) for weight in weights]
    if all(isinstance(w, Rational) or n.denominator == 1 for w, n in zip(weights, numbers)):
        scale = math.lcm(*(number.denominator for number in numbers))
        whole = [int(number * scale) for number in numbers]
        divisor = math.gcd(*whole)
        if sum(whole) // divisor <= MOST_EXACT:
            return tuple(number // divisor for number in whole)
    total = sum(numbers)
    shares = [number / total * MOST_EXACT for number in numbers]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_rest[: MOST_EXACT - sum(counts)]:
        counts[k] += 1
    for weight, count in zip(weights, counts):
        if count == 0:
            raise ValueError(
                f"the weight {weight} is less than a thousandth of the sum of {list(weights)}: "
                "leave its source out, or give it more"
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
        first, last = (int(windows.min()), int(windows.max())) if len(windows) else (0, 0)
        if last - first > len(windows):  # samples that lie apart
            distinct, row = np.unique(windows, return_inverse=True)
        else:
            distinct, row = np.arange(first, last + 1), windows - first
        hashes = mix(fold(self._seed, distinct)[:, None] ^ mix(np.arange(self._size)))
        components = self._components[np.argsort(hashes, axis=1, kind="stable")]
        # Where the slots of each component are, in order; their ranks go there.
        places = np.argsort(components, axis=1, kind="stable")
        ranks = np.empty_like(components)
        np.put_along_axis(ranks, places, np.broadcast_to(self._ranks, places.shape), axis=1)
        component = components[row, slots]
        return component, windows * self._counts[component] + ranks[row, slots]


class Mixture(Source):
    """Several sources as one, in exact proportions.

    Records are numbered source by source. In each window of the stream, the number of samples from
    a source is proportional to its weight. Each source has epochs of its own, which continue
    across the epochs of the mixture.

    Args:
        sources: Pairs of a source and its weight, a real number of any type. Whole numbers and
            fractions are exact if the sum of the whole proportions is at most 1,000; other weights
            are rounded to thousandths.
        length: Records of an epoch; None: as many as the sources have together.

    Attributes:
        fields: The names and kinds of the fields, which all sources share.
        weights: The share of each source, as it is kept.

    Raises:
        ValueError: If the fields differ, or a weight is not above 0 or is rounded to 0.
        TypeError: If one of the sources is a mixture: list its sources instead.
    """

    def __init__(self, sources: Sequence[tuple[Source, float]], length: int | None = None):
        if isinstance(sources, Mapping):
            raise TypeError("a Mixture takes a list of pairs [(source, weight), ...], not a dict")
        pairs = [(*one,) if isinstance(one, (tuple, list)) else (one,) for one in sources]
        for pair in pairs:
            if len(pair) != 2 or isinstance(pair[0], type) or not hasattr(pair[0], "fields"):
                raise TypeError(
                    "a Mixture takes a list of pairs [(source, weight), ...], not "
                    f"{pair if len(pair) > 1 else pair[0]!r:.80}"
                )
        self._sources = tuple(source for source, _ in pairs)
        self._counts = window_counts([weight for _, weight in pairs])
        for source in self._sources:
            if hasattr(source, "order"):
                raise TypeError("a Mixture can't be a part of another one: list its sources there")
        _check_alike(self._sources)
        whole = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if length is not None and not (whole and length >= 1):
            raise ValueError(
                f"length must be a whole number of records, at least 1, not {length!r}"
            )
        self.fields: Mapping[str, Field] = self._sources[0].fields
        self.weights = tuple(count / sum(self._counts) for count in self._counts)
        self._starts = np.cumsum([0, *map(len, self._sources)], dtype=np.int64)
        self._sizes = SizeTables()
        self.gives_new_arrays = all(getattr(s, "gives_new_arrays", False) for s in self._sources)
        threads = [getattr(s, "read_threads", Source.read_threads) for s in self._sources]
        self.read_threads = max(threads)
        self._length = int(self._starts[-1]) if length is None else int(length)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        parts = ", ".join(f"({s!r}, {w:g})" for s, w in zip(self._sources, self.weights))
        return f"Mixture([{parts}], length={self._length:,})"

    def order(self, seed: int, shuffle: bool) -> Order:
        """The order of the stream; sample n of a source is position ``n % N`` of its epoch n // N.

        Args:
            seed: The seed; the proportions follow from it, and with a source's number its order.
            shuffle: Whether the epochs of the sources have orders of their own; the sources take
                turns in a shuffled way in either case.
        """
        proportions = Proportions(self._counts, seed)
        orders = [
            order_of(source, int(fold(seed, number)), shuffle)
            for number, source in enumerate(self._sources)
        ]

        def order(samples: Indices) -> tuple[Indices, Indices]:
            components, numbers = proportions(samples)
            records, epochs = np.empty_like(numbers), np.empty_like(numbers)
            for component, of_component in enumerate(orders):
                rows = np.flatnonzero(components == component)
                if len(rows):
                    positions, epochs[rows] = of_component(numbers[rows])
                    records[rows] = positions + self._starts[component]
            return records, epochs

        return order

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """See `dalijax.sources.Source`."""
        parts = [(rows, s.read(local, names)) for s, rows, local in self._split(indices)]
        if len(parts) == 1:
            return dict(parts[0][1])
        columns: dict[str, Values] = {}
        for name in names:
            values = [part[name] for _, part in parts]
            column: Any = [None] * len(indices)
            arrays = [value for value in values if isinstance(value, np.ndarray)]
            if len(arrays) == len(values) and len({a.shape[1:] for a in arrays}) == 1:
                column = np.empty((len(indices), *arrays[0].shape[1:]), np.result_type(*arrays))
                for (rows, _), array in zip(parts, arrays):
                    column[rows] = array
            else:
                for (rows, _), value in zip(parts, values):
                    for row, one in zip(rows.tolist(), value, strict=True):
                        column[row] = one
            columns[name] = column
        return columns

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """See `dalijax.sources.Source`."""

        def look_up(unknown: Indices) -> NDArray[np.int32]:
            table = np.empty((len(unknown), 2), np.int32)
            for source, rows, local in self._split(indices[unknown]):
                pictures = [data[row] for row in unknown[rows].tolist()]
                table[rows] = source.sizes(local, name, pictures)
            return table

        return self._sizes.sizes(int(self._starts[-1]), indices, name, look_up)

    def name(self, index: int) -> str:
        """See `dalijax.sources.Source`: the name in the record's own source."""
        return self.record_names(np.array([index]))[0]

    def record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records."""
        names = [""] * len(indices)
        for source, rows, local in self._split(indices):
            for row, name in zip(rows.tolist(), names_of(source, local), strict=True):
                names[row] = name
        return names

    def identity(self) -> str:
        """A digest of the identities and the proportions."""
        parts = [self._length, *self._counts, *map(stated_identity, self._sources)]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]

    def _split(self, indices: Indices) -> Iterator[tuple[Source, Indices, Indices]]:
        """For each source the rows that are its, and the numbers of their records there."""
        components = np.searchsorted(self._starts, indices, side="right") - 1
        for component in sorted(set(components.tolist())):
            rows = np.flatnonzero(components == component)
            yield self._sources[component], rows, indices[rows] - self._starts[component]


def _check_alike(sources: Sequence[Source]) -> None:
    first = sources[0].fields
    for number, source in enumerate(sources):
        lines = [
            f"  {name}: {first.get(name, 'missing')} -> {source.fields.get(name, 'missing')}"
            for name in sorted({*first, *source.fields})
            if first.get(name) != source.fields.get(name)
        ]
        if lines:
            raise ValueError(
                "the sources of a mixture need the same fields, which source 0 -> source "
                f"{number} have not:\n" + "\n".join(lines)
            )
