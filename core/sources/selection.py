"""`Selection`: some of the records of a source."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import knows_its_names
from ..messages.printable import printable_repr
from ..order.shuffle import Indices
from ..order.windows import Groups
from ..state.envelope import digest
from .source import Source
from .wrapper import Wrapper


class Selection(Wrapper):
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
        super().__init__(source)
        if hasattr(source, "order"):
            raise TypeError(
                f"Selection can't take {printable_repr(source)}: select records of its sources, "
                "and mix the selections"
            )
        self._records = selected_records(records, len(source))

    def _numbers_in_source(self, indices: Indices) -> Indices:
        return self._records[indices]

    @property
    def _groups(self) -> Groups | None:
        groups = super()._groups
        return None if groups is None else groups.selected(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Selection({self._source!r}, {len(self):,} records)"

    def identity(self) -> str:
        """Returns a text that identifies the records; see `dalijax.sources.Source`."""
        return f"{super().identity()}, records {digest(self._records.tobytes())}"


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
            f"as np.arange(len(source)) < 100, not {printable_repr(records)}"
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
