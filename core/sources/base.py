"""`BaseSource`: the base class of this package's sources, with identities and image sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.field import Field
from ..order.shuffle import Indices
from .identity import identity_of
from .record_table import RecordTable
from .source import Source, Values


class BaseSource(Source):
    """A source whose identity is a digest, and whose image sizes are read once.

    Args:
        fields: Names and kinds of the fields.
        identity: The identity that the user gave; None: a digest of the records.
    """

    _identity_reads = True  # whether computing the identity reads records
    # Fields with names of records or files. Names are not a part of the identity.
    _described: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, fields: Mapping[str, Field], identity: str | None):
        if identity is not None and (not isinstance(identity, str) or not identity):
            raise TypeError(
                f"identity must be a non-empty string naming the data, not {identity!r}"
            )
        self.fields = fields
        self._identity = self._given_identity = identity
        self._sizes = SizeTables()

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        if self._identity is None:
            self._identity = identity_of(
                self, *self._content(), without=self._described, reads=self._identity_reads
            )
        return self._identity

    def _content(self) -> tuple[Any, ...]:
        """Returns the parts of the identity in addition to 64 records, e.g. names and sizes."""
        return ()

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; reads most headers once per process."""
        look_up = super().sizes
        return self._sizes.sizes(
            len(self),
            indices,
            name,
            lambda rows: look_up(indices[rows], name, [data[row] for row in rows.tolist()]),
        )


class SizeTables:
    """Caches the image sizes of a source; most sizes are read once per process."""

    def __init__(self) -> None:
        self._tables: dict[str, RecordTable] = {}  # by field

    def sizes(
        self,
        count: int,
        indices: Indices,
        name: str,
        look_up: Callable[[Indices], NDArray[np.int32]],
    ) -> NDArray[np.int32]:
        """Returns heights and widths of the images of a field, int32 [rows, 2].

        Args:
            count: The number of records of the source.
            indices: The record of each row, int64 [rows].
            name: The field.
            look_up: Returns the sizes of the images in some rows, which it reads.
        """
        table = self._tables.get(name)
        if table is None:
            table = self._tables.setdefault(name, RecordTable(count, 2))
        are_known, sizes = table.get(indices)
        rows = np.flatnonzero(~are_known)
        if len(rows):
            sizes[rows] = new_sizes = look_up(rows)
            table.put(indices[rows], new_sizes)
        return sizes

    def __reduce__(self) -> Any:
        return SizeTables, ()  # sizes are not pickled, since another process reads them itself
