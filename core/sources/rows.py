"""`RowSource`: the base class of sources whose batches have rows of several records."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.packing import RowLayout, RowTable
from ..order.shuffle import Indices
from .wrapper import Wrapper


class RowSource(Wrapper):
    """The records of another source, of which a row of a batch contains several.

    A plan decides which records a row contains: see `core.order.samples.RowPlan`.

    Attributes:
        most: The largest number of records in a row.
        row_fields: The names of the values that `row_values` returns.
    """

    most: int
    row_fields: tuple[str, ...] = ()

    @abc.abstractmethod
    def row_table(self, seed: int, shuffle: bool, epoch: int) -> RowTable:
        """Returns the rows of an epoch."""

    def row_values(
        self, layout: RowLayout, records: Indices, valid: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Returns values of the rows of a pipeline, arrays [rows, ...] by name.

        Args:
            layout: The number of records in each row.
            records: The records.
            valid: False for records that count as missing.
        """
        return {}
