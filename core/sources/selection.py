"""`Selection`: some of the records of a source."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import knows_its_names
from ..messages.printable import printable_repr
from ..order.shuffle import Indices
from ..remote.range_cache import Lease
from ..state.envelope import digest
from .identity import stated_identity
from .labels import classes_of
from .source import Source, Values, announce, names_of, range_bytes, read_ahead_of


class Selection(Source):
    """Some of the records of a source, to filter it or to split it into parts.

    Args:
        source: A source; of a `Mixture`, select records of its sources instead.
        records: A boolean for each record, or increasing numbers of records.

    Attributes:
        fields: Names and kinds of the fields of the source.
        classes: Names of the classes of the source, in the order of their labels.

    Raises:
        TypeError: If ``source`` is not a source, or is a mixture, or ``records`` are neither
            booleans nor integers.
        ValueError: If no record is left, or ``records`` are not increasing numbers of records.
    """

    @knows_its_names
    def __init__(self, source: Source, records: Any):
        if isinstance(source, type) or not hasattr(source, "fields"):
            raise TypeError(
                f"Selection requires a source of dalijax.sources, not {printable_repr(source)}"
            )
        if hasattr(source, "order"):
            raise TypeError(
                f"Selection can't take {source!r:.80}: select records of its sources, and mix the "
                "selections"
            )
        self._source = source
        self._records = selected_records(records, len(source))
        self.fields = source.fields
        self.classes = classes_of(source)
        self.read_threads = source.read_threads
        self._gives_new_arrays = getattr(source, "_gives_new_arrays", False)

    @property
    def _read_ahead(self) -> int:
        return read_ahead_of(self._source)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Selection({self._source!r}, {len(self):,} records)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        return dict(self._source.read(self._records[indices], names))

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """Returns heights and widths of images; see `dalijax.sources.Source`."""
        return self._source.sizes(self._records[indices], name, data)

    def name(self, index: int) -> str:
        """Returns the name of a record; see `dalijax.sources.Source`."""
        return self._source.name(int(self._records[index]))

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        return f"{stated_identity(self._source)}, records {digest(self._records.tobytes())}"

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        return range_bytes(self._source, self._records[indices], names)

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        return announce(self._source, self._records[indices], names, turns, freed)

    def _record_names(self, indices: Indices) -> list[str]:
        """Returns the names of several records."""
        return names_of(self._source, self._records[indices])


def selected_records(records: Any, count: int) -> Indices:
    """Returns the numbers of selected records, int64.

    Args:
        records: A boolean for each record, or increasing numbers of records.
        count: The number of records to select from.

    Raises:
        TypeError: If ``records`` are neither booleans nor integers.
        ValueError: If no record is left, or ``records`` are not increasing numbers of records.
    """
    chosen = np.asarray(records)
    if chosen.ndim != 1 or (chosen.dtype.kind not in "biu" and chosen.size):
        raise TypeError(
            "a selection is an array of a boolean for each record, or of numbers of records, such "
            f"as np.arange(len(source)) < 100, not {records!r:.80}"
        )
    if chosen.dtype == np.bool_:
        if len(chosen) != count:
            raise ValueError(f"the selection has {len(chosen):,} booleans for {count:,} records")
        chosen = np.flatnonzero(chosen)
    if not len(chosen):
        raise ValueError("the selection leaves no record. Select at least one")
    chosen = chosen.astype(np.int64)
    if chosen[0] < 0 or chosen[-1] >= count or (np.diff(chosen) <= 0).any():
        raise ValueError(
            f"a selection has increasing numbers from 0 to {count - 1:,}, without repetitions: "
            "pass numpy.unique(numbers). Use a Mixture to repeat records"
        )
    return chosen
