"""Mixtures of sources in exact proportions."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..formats.field import Field
from ..messages.printable import printable_repr, printable_text
from ..order.proportions import Proportions, counts_per_period
from ..order.shuffle import Indices
from ..random.hashing import Bits, fold
from ..remote.range_cache import Lease
from ..state.envelope import digest
from .identity import stated_identity
from .labels import WITH_CLASSES, classes_of, merged_classes
from .source import (
    Order,
    Source,
    Values,
    announce,
    heads_of,
    mapped_fields,
    maps_of,
    names_of,
    order_of,
    range_bytes,
    read_ahead_of,
    read_records,
    version_of,
)


class Mixture(Source):
    """A mixture of several sources in exact proportions.

    Records are numbered source by source. The stream consists of periods of at most 1,000 samples.
    In each period, the number of samples of a source is proportional to its weight. Each source has
    its own epochs, which continue across epochs of the mixture.

    Args:
        sources: Pairs of a source and its weight, a real number of any type. Weights are exact if
            the sum of the reduced integer proportions is at most 1,000, as for 0.5 and 0.25;
            other weights are rounded to thousandths. With equal weights and numbers of records, an
            epoch has each record once.
        length: Number of records in an epoch; None: the total number of records of the sources.

    Attributes:
        fields: Names and kinds of the fields, which all sources share.
        weights: Exact share of each source.
        classes: Names of the classes in the order of their labels; empty if the sources do not name
            them, or label them differently. A graph that takes labels is then refused.

    Raises:
        ValueError: If the fields differ, a source has no records, or a weight is not positive or is
            rounded to 0.
        TypeError: If one of the sources is a mixture.
    """

    @knows_its_names
    def __init__(self, sources: Sequence[tuple[Source, float]], length: int | None = None):
        if isinstance(sources, Mapping):
            raise TypeError(
                "a Mixture requires a list of pairs [(source, weight), ...], not a dict"
            )
        pairs: list[tuple[Any, ...]] = [
            (*item,) if isinstance(item, (tuple, list)) else (item,) for item in sources
        ]
        for pair in pairs:
            if len(pair) != 2 or isinstance(pair[0], type) or not hasattr(pair[0], "fields"):
                raise TypeError(
                    "a Mixture requires a list of pairs [(source, weight), ...], not "
                    f"{printable_repr(pair[0] if len(pair) == 1 else pair)}"
                )
        self._sources = tuple(source for source, _ in pairs)
        self._counts = counts_per_period([weight for _, weight in pairs])
        for source in self._sources:
            if getattr(source, "_is_planned", False):
                raise TypeError(
                    f"a Mixture can't contain {printable_repr(source)}. Pass the mixture to "
                    f"{type(source).__name__} instead"
                )
            if hasattr(source, "order"):
                raise TypeError("a Mixture can't contain another Mixture. List its sources instead")
            if not len(source):
                raise ValueError(
                    f"{printable_repr(source)} has no records. Omit it from the Mixture"
                )
        _check_alike(self._sources)
        is_integer = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if length is not None and not (is_integer and length >= 1):
            raise ValueError(f"length must be a positive integer, not {length!r}")
        self.fields: Mapping[str, Field] = self._sources[0].fields
        self._classes = [classes_of(source) for source in self._sources]
        self.classes: tuple[str, ...] = ()
        with contextlib.suppress(ValueError):  # `_check_names` raises it if labels are read
            self.classes = merged_classes(self._classes)
        self.weights = tuple(count / sum(self._counts) for count in self._counts)
        self._starts = np.cumsum([0, *map(len, self._sources)], dtype=np.int64)
        self._record_count = int(self._starts[-1])
        self._gives_new_arrays = all(getattr(s, "_gives_new_arrays", False) for s in self._sources)
        threads = [getattr(s, "read_threads", Source.read_threads) for s in self._sources]
        self.read_threads = max(threads)
        self._read_ahead = max(map(read_ahead_of, self._sources))
        self._length = int(self._starts[-1]) if length is None else int(length)
        self._mapped_fields = frozenset[str]().union(*map(mapped_fields, self._sources))
        self._maps = [
            (f"{number}.{part}", function)
            for number, source in enumerate(self._sources)
            for part, function in maps_of(source)
        ]

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        parts = ", ".join(f"({s!r}, {w:g})" for s, w in zip(self._sources, self.weights))
        return f"Mixture([{parts}], length={self._length:,})"

    def order(self, seed: int, shuffle: bool) -> Order:
        """Returns the order of the mixture's stream, as a function; see `order_of`.

        Sample n of a source with N records is position n % N in epoch n // N of this source.

        Args:
            seed: The seed, which determines the proportions and the orders of the sources.
            shuffle: Whether the epochs of each source are shuffled. The sequence of sources is
                always shuffled.
        """
        proportions = Proportions(self._counts, seed)
        orders = [
            order_of(source, int(fold(seed, number)), shuffle)
            for number, source in enumerate(self._sources)
        ]

        def order(samples: Indices) -> tuple[Indices, Indices]:
            components, numbers = proportions(samples)
            records, epochs = np.empty_like(numbers), np.empty_like(numbers)
            for component, component_order in enumerate(orders):
                rows = np.flatnonzero(components == component)
                if len(rows):
                    positions, epochs[rows] = component_order(numbers[rows])
                    records[rows] = positions + self._starts[component]
            return records, epochs

        return order

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        columns, errors = self._read_keyed(indices, names, None)
        for row, error in errors.items():
            raise ValueError(f"{printable_text(self.name(int(indices[row])))}: {error}") from error
        return columns

    def _read_keyed(
        self, indices: Indices, names: Sequence[str], keys: Bits | None
    ) -> tuple[dict[str, Values], dict[int, Exception]]:
        """Returns fields of some records, and errors of records; see `read_records`."""
        parts = []
        errors: dict[int, Exception] = {}
        for source, rows, local in self._split(indices):
            part_keys = None if keys is None else keys[rows]
            part, part_errors = read_records(source, local, names, part_keys)
            parts.append((rows, part))
            errors |= {int(rows[row]): error for row, error in part_errors.items()}
        if len(parts) == 1:
            return dict(parts[0][1]), errors
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
                    for row, item in zip(rows.tolist(), value, strict=True):
                        column[row] = item
            columns[name] = column
        return columns, errors

    @property
    def _version(self) -> str | None:
        versions = [version_of(source) for source in self._sources]
        return None if None in versions else "\n".join(map(str, versions))

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises ValueError if the names contain labels that have different meanings."""
        if not WITH_CLASSES.isdisjoint(names):
            merged_classes(self._classes)

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        return sum(range_bytes(s, local, names) for s, _, local in self._split(indices))

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        """Requests the bytes of records that will be read soon; see `announce`."""
        return [
            lease
            for source, rows, local in self._split(indices)
            for lease in announce(source, local, names, turns[rows], freed)
        ]

    def _heads(self, indices: Indices, name: str, num_bytes: int) -> Sequence[Any] | None:
        """Returns the first bytes of a field of some records; see `heads_of`."""
        heads: list[Any] = [None] * len(indices)
        for source, rows, local in self._split(indices):
            part = heads_of(source, local, name, num_bytes)
            if part is None:
                return None
            for row, head in zip(rows.tolist(), part, strict=True):
                heads[row] = head
        return heads

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        # Without a table of its own, since only the sources know which sizes may be cached.
        sizes = np.empty((len(indices), 2), np.int32)
        for source, rows, local in self._split(indices):
            images = [data[row] for row in rows.tolist()]
            sizes[rows] = source.sizes(local, name, images)
        return sizes

    def name(self, index: int) -> str:
        """Returns the name of a record in its own source; see `dalijax.sources.Source`."""
        return self._record_names(np.array([index]))[0]

    def _record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records."""
        names = [""] * len(indices)
        for source, rows, local in self._split(indices):
            for row, name in zip(rows.tolist(), names_of(source, local), strict=True):
                names[row] = name
        return names

    def identity(self) -> str:
        """Returns a digest of the sources' identities and the proportions."""
        parts = [self._length, *self._counts, *map(stated_identity, self._sources)]
        return digest(*(str(part).encode() for part in parts), length=32)

    def _split(self, indices: Indices) -> Iterator[tuple[Source, Indices, Indices]]:
        """Splits records of the mixture by source.

        Yields:
            A source, the positions of its records in ``indices``, and their indices in the source.
        """
        components = np.searchsorted(self._starts, indices, side="right") - 1
        for component in sorted(set(components.tolist())):
            rows = np.flatnonzero(components == component)
            yield self._sources[component], rows, indices[rows] - self._starts[component]


def _check_alike(sources: Sequence[Source]) -> None:
    """Raises ValueError if the fields of the sources differ."""
    first = sources[0].fields
    for number, source in enumerate(sources):
        lines = [
            f"  {name}: {first.get(name, 'missing')} -> {source.fields.get(name, 'missing')}"
            for name in sorted({*first, *source.fields})
            if first.get(name) != source.fields.get(name)
        ]
        if lines:
            raise ValueError(
                "the sources of a mixture must have equal fields, but these differ between source "
                f"0 -> source {number}:\n" + "\n".join(lines)
            )
