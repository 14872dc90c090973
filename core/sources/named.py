"""`Named`: a source with the names of records as a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import knows_its_names
from ..formats.field import Field
from ..order.shuffle import Indices
from ..random.hashing import Bits
from .source import Source, Values, names_of
from .wrapper import Wrapper


class Named(Wrapper):
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
        super().__init__(source)
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
        self._field, self._index = field, index
        self.fields = {**source.fields, **dict.fromkeys(added, Field(None))}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also avoids recursion during unpickling
            raise AttributeError(name)
        return getattr(self._source, name)  # e.g. weights of a Mixture

    def __repr__(self) -> str:
        return f"Named({self._source!r}, {self._field!r}, index={self._index!r})"

    def _names_in_source(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._source.fields]

    def _read_keyed(
        self, indices: Indices, names: Sequence[str], keys: Bits | None
    ) -> tuple[dict[str, Values], dict[int, Exception]]:
        columns, errors = super()._read_keyed(indices, names, keys)
        if self._field is not None and self._field in names:
            columns[self._field] = names_of(self._source, indices)
        if self._index is not None and self._index in names:
            columns[self._index] = indices
        return columns, errors
