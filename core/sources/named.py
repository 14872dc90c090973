"""`Named`: a source with the names of records as a field."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..formats.field import Field
from ..messages.printable import printable_repr
from ..order.shuffle import Indices
from ..remote.range_cache import Lease
from .source import (
    Source,
    Values,
    announce,
    check_names,
    names_of,
    range_bytes,
    read_ahead_of,
)


class Named(Source):
    """A source with the names or indices of its records as additional fields.

    These fields bypass the graph, like text: a batch contains a NumPy array with a value per row.
    Records, their order, states and identity are unchanged.

    Args:
        source: A source or `Mixture`.
        field: Name of the field with the names of the records; None: no names. A name is the path
            of a file, the tar and key of a sample, or the file and index of a TFRecord's record.
            For your own sources, it is the result of `Source.name`.
        index: Name of the field with the indices of the records, int64. None: no indices.

    Attributes:
        fields: The fields of the source, and the added fields.

    Raises:
        TypeError: If ``source`` is not a source, or the name of a field is not a string.
        ValueError: If the source already has a field of this name, or both names are None.
    """

    @knows_its_names
    def __init__(self, source: Source, field: str | None = "name", *, index: str | None = None):
        if isinstance(source, type) or not hasattr(source, "fields"):
            raise TypeError(
                f"Named requires a source of dalijax.sources, not {printable_repr(source)}"
            )
        added = [name for name in (field, index) if name is not None]
        for name in added:
            if not isinstance(name, str) or not name:
                raise TypeError(f"the name of a field must be a string, not {name!r}")
        if not added:
            raise ValueError("Named requires field= (names of records) or index= (their indices)")
        if duplicates := [name for name in added if name in source.fields or added.count(name) > 1]:
            raise ValueError(
                f"the field {duplicates[0]!r} would exist twice: the source has "
                f"{sorted(source.fields)}. Pass another name as field= or index="
            )
        self._source = source
        self._field, self._index = field, index
        self.fields = {**source.fields, **dict.fromkeys(added, Field(None))}
        self.read_threads = source.read_threads
        self._gives_new_arrays = getattr(source, "_gives_new_arrays", False)

    @property
    def _read_ahead(self) -> int:
        return read_ahead_of(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also avoids recursion during unpickling
            raise AttributeError(name)
        return getattr(self._source, name)  # e.g. order of a Mixture, classes of Files

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"Named({self._source!r}, {self._field!r}, index={self._index!r})"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        source_names = self._inner(names)
        columns = dict(self._source.read(indices, source_names)) if source_names else {}
        if self._field is not None and self._field in names:
            columns[self._field] = names_of(self._source, indices)
        if self._index is not None and self._index in names:
            columns[self._index] = indices
        return columns

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        return self._source.sizes(indices, name, data)

    def name(self, index: int) -> str:
        """Returns the name of a record; see `dalijax.sources.Source`."""
        return self._source.name(index)

    def _check_names(self, names: Sequence[str]) -> None:
        check_names(self._source, self._inner(names))

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        return range_bytes(self._source, indices, self._inner(names))

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        return announce(self._source, indices, self._inner(names), turns, freed)

    def _inner(self, names: Sequence[str]) -> list[str]:
        """Returns the names that are fields of the inner source, without the added fields."""
        return [name for name in names if name in self._source.fields]

    def _record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records."""
        return names_of(self._source, indices)

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        return self._source.identity()
