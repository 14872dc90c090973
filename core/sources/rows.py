"""`RowSource`: the base class of sources with several records or images in a row of a batch."""

from __future__ import annotations

import abc
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..order.packing import RowLayout, Table
from ..order.samples import RowPlan, SamplePlan, Tables
from ..order.shuffle import Indices
from .planned import PlannedSource
from .source import Source

PACK = "pack"  # the parameter of a graph function that receives the Pack


class RowSource(PlannedSource):
    """The records of another source. A row of a batch contains several records, or images.

    A plan assigns the records to rows: see `core.order.samples.RowPlan`.

    Attributes:
        most: The largest number of records in a row.
        length: What a row holds, such as tokens.
        row_fields: The names of the values that `row_values` returns.
        num_rows: The number of rows of an epoch if it is the same for all epochs, else None.

    Raises:
        ValueError: If a field of the other source has a name that batches or the graph need.
    """

    most: int
    length: int
    row_fields: tuple[str, ...] = ()
    num_rows: int | None = None

    def __init__(self, source: Source):
        super().__init__(source)
        if clashing := sorted({*self.row_fields, PACK} & {*source.fields}):
            raise ValueError(
                f"the source has a field {clashing[0]!r}, the name of an array of these batches, "
                "or of the graph's parameter. Rename the field"
            )

    def plan(
        self, seed: int, shuffle: bool, batch_size: int, policy: LastBatchPolicy, padded: bool
    ) -> SamplePlan:
        """Returns the plan of the batches; see `PlannedSource`."""
        tables = Tables(functools.partial(self.row_table, seed, shuffle), self.num_rows)
        extents = {"most": self.most, "capacity": self.length}
        return RowPlan(len(self), batch_size, policy, True, tables=tables, **extents)

    def mask_of_records(self, layout: RowLayout, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which records of a pipeline are delivered, given those that can be used."""
        return valid

    def column_of_rows(self, layout: RowLayout, values: NDArray[Any]) -> NDArray[Any]:
        """Returns values of the rows of a pipeline, such as the mask, given those of records."""
        return layout.by_row(values)

    @abc.abstractmethod
    def row_table(self, seed: int, shuffle: bool, epoch: int) -> Table:
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
