"""Mixtures of sources in exact proportions."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names, whole_number
from ..formats.field import Field
from ..messages.printable import printable_repr, printable_text
from ..order.proportions import Proportions, stages_of
from ..order.shuffle import Indices
from ..random.hashing import Bits, fold
from ..remote.range_cache import Lease
from ..state.envelope import digest
from .identity import stated_identity
from .labels import WITH_CLASSES, classes_of, merged_classes
from .mixture_state import DIGEST, MixtureState
from .source import (
    Order,
    Source,
    Values,
    announce,
    groups_of,
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
from .values import joined

# A weight, or pairs of a number of delivered records and the weight from there on.
Weight = float | Sequence[tuple[int, float]]


class Mixture(Source):
    """A mixture of several sources in exact proportions.

    Records are numbered source by source. The stream consists of periods of at most 1,000 samples.
    In each period, the number of samples of a source is proportional to its weight. Each source has
    its own epochs, which continue across epochs of the mixture.

    A weight may change after a number of delivered records, which does not depend on the batch
    size. A new period begins there, and each source continues its epoch::

        mixture = Mixture([(web, 3), (books, [(0, 1), (2_000_000, 4)])])

    A state can be restored with any mixture that agrees with the state's mixture before the state's
    position: later weights may differ, and further sources may follow in the list; see `then`. A
    source that ends keeps its place in the list, with the weight 0. A source can't get more
    records: end it, and add the larger source.

    Args:
        sources: Pairs of a source and its weight, a real number of any type. Weights are exact if
            the sum of the reduced integer proportions is at most 1,000, as for 0.5 and 0.25;
            other weights are rounded to thousandths. With equal weights and numbers of records, an
            epoch has each record once. A list of pairs (records, weight) is a weight that changes:
            the weight after this number of delivered records, 0 or more. It is 0 before the first
            pair. There may be 99 changes.
        length: Number of records in an epoch; None: the total number of records of the sources that
            have a weight at the start.

    Attributes:
        fields: Names and kinds of the fields, which all sources share.
        weights: Exact share of each source at the start.
        classes: Names of the classes in the order of their labels; empty if the sources do not name
            them, or label them differently. A graph that takes labels is then refused.

    Raises:
        ValueError: If the fields differ, a source has no records, a weight is not positive or is
            rounded to 0, or the changes of a weight are not in order.
        TypeError: If one of the sources is a mixture.
    """

    @knows_its_names
    def __init__(self, sources: Sequence[tuple[Source, Weight]], length: int | None = None):
        pairs = _checked_pairs(sources)
        self._sources = tuple(source for source, _ in pairs)
        self._stages = stages_of([weight for _, weight in pairs])
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
        self._starts = np.cumsum([0, *map(len, self._sources)], dtype=np.int64)
        counts = self._stages[0].counts
        self.weights = tuple(count / sum(counts) for count in counts)
        # The first sources, up to the last that has a weight at the start.
        self._num_first = 1 + max(k for k, count in enumerate(counts) if count)
        self._num_identified = int(self._starts[self._num_first])
        self._record_count = int(self._starts[-1])
        self._gives_new_arrays = all(getattr(s, "_gives_new_arrays", False) for s in self._sources)
        threads = [getattr(s, "read_threads", Source.read_threads) for s in self._sources]
        self.read_threads = max(threads)
        budgets = [*map(read_ahead_of, self._sources)]
        # A batch may need a window of each source.
        windows = [budget for s, budget in zip(self._sources, budgets) if groups_of(s) is not None]
        self._read_ahead = max(*budgets, sum(windows))
        # Sources that are added later must not change the length of an epoch.
        used = [len(source) for source, count in zip(self._sources, counts) if count]
        self._length = sum(used) if length is None else int(length)
        self._mapped_fields = frozenset[str]().union(*map(mapped_fields, self._sources))
        self._maps = [
            (f"{number}.{part}", function)
            for number, source in enumerate(self._sources)
            for part, function in maps_of(source)
        ]

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        parts = ", ".join(f"({s!r}, {w})" for s, w in zip(self._sources, self._shown_weights()))
        return f"Mixture([{parts}], length={self._length:,})"

    def _shown_weights(self) -> list[str]:
        """Returns the weight of each source, as exact shares."""
        if len(self._stages) == 1:
            return [f"{weight:g}" for weight in self.weights]
        return [
            str([(s.start, float(f"{s.counts[k] / sum(s.counts):g}")) for s in self._stages])
            for k in range(len(self._sources))
        ]

    def then(self, records: int, sources: Sequence[tuple[Source, float]]) -> Mixture:
        """Returns a mixture with other weights, or further sources, after some delivered records.

        The returned mixture restores the states of this mixture up to these records::

            mixture = Mixture([(web, 3), (books, 1)])
            longer = mixture.then(state["sample"], [(web, 1), (code, 2)])     # books end

        Write the number into the program: later runs need all changes, for later states and for
        `seek_step`.

        Args:
            records: The number of delivered records, such as ``state["sample"]``, after the last
                change of a weight. With `Packed`, `Buckets` and `MultiImage`, a multiple of
                ``len(mixture)``: the end of an epoch.
            sources: Pairs of a source and its weight. Sources of this mixture are recognized as
                objects, and end if they are not listed. Other sources are added.

        Raises:
            ValueError: If the weights change later than that; otherwise as for `Mixture`.
            TypeError: See `Mixture`.
        """
        last = self._stages[-1].start
        if isinstance(records, (Mapping, str, bytes)):
            raise TypeError("records is a state. Pass its number of records, state['sample']")
        expected = f"a number of records above {last}, where the weights changed last"
        records = whole_number("records", records, expected, last + 1)
        added = _checked_pairs(sources)
        if len({id(source) for source, _ in added}) < len(added):
            raise ValueError("a source is listed twice. List it once, with the sum of its weights")
        changed: list[tuple[Source, Weight]] = []
        for k, source in enumerate(self._sources):
            found = next((n for n, (other, _) in enumerate(added) if other is source), None)
            weight = 0 if found is None else added.pop(found)[1]
            before = [(stage.start, stage.counts[k]) for stage in self._stages]
            changed.append((source, [*before, (records, weight)]))
        changed += [(source, [(records, weight)]) for source, weight in added]
        return Mixture(changed, self._length)

    def order(self, seed: int, shuffle: bool) -> Order:
        """Returns the order of the mixture's stream, as a function; see `order_of`.

        Sample n of a source with N records is position n % N in epoch n // N of this source.

        Args:
            seed: The seed, which determines the proportions and the orders of the sources.
            shuffle: Whether the epochs of each source are shuffled. The sequence of sources is
                always shuffled.
        """
        proportions = Proportions(self._stages, seed)
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
        return joined(parts, names, len(indices)), errors

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
        """Returns a digest of the proportions at the start and of the sources that they need.

        States contain the later proportions and sources separately, since these may differ.
        """
        count = self._num_first
        counts, sources = self._stages[0].counts[:count], self._sources[:count]
        parts = [self._length, *counts, *map(stated_identity, sources)]
        return digest(*(str(part).encode() for part in parts), length=DIGEST)

    @property
    def _mixture(self) -> Mixture:
        return self

    @functools.cached_property
    def _state(self) -> MixtureState:
        """What states contain about the mixture; computing the identities may raise StateError."""
        return MixtureState.of(self._stages, self._sources)

    def _split(self, indices: Indices) -> Iterator[tuple[Source, Indices, Indices]]:
        """Splits records of the mixture by source.

        Yields:
            A source, the positions of its records in ``indices``, and their indices in the source.
        """
        components = np.searchsorted(self._starts, indices, side="right") - 1
        for component in sorted(set(components.tolist())):
            rows = np.flatnonzero(components == component)
            yield self._sources[component], rows, indices[rows] - self._starts[component]


def _checked_pairs(sources: Sequence[tuple[Source, Any]]) -> list[tuple[Source, Any]]:
    """Returns the pairs of sources and weights.

    Raises:
        TypeError: If ``sources`` are not pairs of a source and a weight.
    """
    if isinstance(sources, Mapping):
        raise TypeError("a Mixture requires a list of pairs [(source, weight), ...], not a dict")
    pairs: list[Any] = [
        (*item,) if isinstance(item, (tuple, list)) else (item,) for item in sources
    ]
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[0], type) or not hasattr(pair[0], "fields"):
            raise TypeError(
                "a Mixture requires a list of pairs [(source, weight), ...], not "
                f"{printable_repr(pair[0] if len(pair) == 1 else pair)}"
            )
    return pairs


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
