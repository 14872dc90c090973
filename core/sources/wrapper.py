"""`Wrapper`: the base class of sources that read the records of another source."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable_repr, printable_text
from ..order.shuffle import Indices
from ..order.windows import Groups
from ..random.hashing import Bits
from ..remote.range_cache import Lease
from .identity import stated_identity
from .labels import classes_of
from .source import (
    MapFunction,
    Order,
    Source,
    Values,
    announce,
    check_names,
    groups_of,
    heads_of,
    mapped_fields,
    maps_of,
    mixture_of,
    names_of,
    range_bytes,
    read_ahead_of,
    read_records,
    record_count,
    version_of,
)


class Wrapper(Source):
    """A source that reads the records of another source.

    It passes on each member of a `Source`, including the optional members that
    `core.sources.source` lists. Subclasses convert the record numbers by `_numbers_in_source` and
    the names of fields by `_names_in_source`.

    Args:
        source: The other source.

    Attributes:
        fields: Names and kinds of the fields of the other source.

    Raises:
        TypeError: If ``source`` is not a source.
    """

    def __init__(self, source: Source):
        if isinstance(source, type) or not hasattr(source, "fields"):
            raise TypeError(
                f"{type(self).__name__} requires a source of dalijax.sources, not "
                f"{printable_repr(source)}"
            )
        if getattr(source, "_is_planned", False):
            raise TypeError(
                f"{type(self).__name__} can't take {printable_repr(source)}, whose batches are "
                "planned for its records. Map, select or mix the records before: pass the result "
                f"to {type(source).__name__}"
            )
        self._source = source
        self.fields = source.fields
        self.read_threads = source.read_threads

    def _numbers_in_source(self, indices: Indices) -> Indices:
        """Returns the numbers that records have in the other source."""
        return indices

    def _names_in_source(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the names of the fields that are read from the other source."""
        return names

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        columns, errors = self._read_keyed(indices, names, None)
        for row, error in errors.items():
            name = printable_text(self.name(int(indices[row])))
            raise ValueError(f"{name}: {error}") from error
        return columns

    def _read_keyed(
        self, indices: Indices, names: Sequence[str], keys: Bits | None
    ) -> tuple[dict[str, Values], dict[int, Exception]]:
        """Returns fields of some records, and errors of records; see `read_records`."""
        names = self._names_in_source(names)
        if not names:
            return {}, {}
        numbers = self._numbers_in_source(indices)
        columns, errors = read_records(self._source, numbers, names, keys)
        return dict(columns), errors

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        return self._source.sizes(self._numbers_in_source(indices), name, data)

    def name(self, index: int) -> str:
        """Returns the name of a record; see `dalijax.sources.Source`."""
        return self._source.name(int(self._numbers_in_source(np.array([index]))[0]))

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        return stated_identity(self._source)

    @property
    def order(self) -> Any:
        """The method ``order`` of the other source, if it has this method; see `order_of`."""
        order: Order = self._source.order  # type: ignore[attr-defined]
        return order

    @property
    def _mixture(self) -> Any:
        return mixture_of(self._source)

    @property
    def _groups(self) -> Groups | None:
        return groups_of(self._source)

    @property
    def _record_count(self) -> int:
        source = self._source
        return record_count(source) if hasattr(source, "order") else len(self)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the other source, in the order of their labels."""
        return classes_of(self._source)

    @property
    def _gives_new_arrays(self) -> bool:
        return bool(getattr(self._source, "_gives_new_arrays", False))

    @property
    def _version(self) -> str | None:
        return version_of(self._source)

    @property
    def _maps(self) -> Sequence[tuple[str, MapFunction]]:
        return maps_of(self._source)

    @property
    def _mapped_fields(self) -> frozenset[str]:
        return mapped_fields(self._source)

    @property
    def _read_ahead(self) -> int:
        return read_ahead_of(self._source)

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        numbers = self._numbers_in_source(indices)
        return range_bytes(self._source, numbers, self._names_in_source(names))

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        numbers = self._numbers_in_source(indices)
        return announce(self._source, numbers, self._names_in_source(names), turns, freed)

    def _heads(self, indices: Indices, name: str, num_bytes: int) -> Sequence[Any] | None:
        """Returns the first bytes of a field of some records; see `heads_of`."""
        if not (names := self._names_in_source([name])):
            return None
        return heads_of(self._source, self._numbers_in_source(indices), names[0], num_bytes)

    def _record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records."""
        return names_of(self._source, self._numbers_in_source(indices))

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises ValueError if the fields must not be read together; see `check_names`."""
        check_names(self._source, self._names_in_source(names))
