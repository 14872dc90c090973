"""Protocols for `FedEngine`: a `RowSupply` has a `RowBatch` for each run of each pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..order.packing import RowLayout
from ..order.shuffle import Indices
from ..random.draw import DrawnRows
from .stand_ins import UnusableRecord

P = TypeVar("P", contravariant=True)


class RowBatch(DrawnRows, Protocol):
    """The rows of one run of one pipeline.

    Attributes:
        valid: False for rows of padding, bool [rows].
        samples: The sample of the stream in each row; for a bad record, the sample of its stand-in.
        errors: The error of each row whose record can't be used.
        layout: The layout of the rows of the batch, if these contain several records; the other
            attributes then have an element for each record.
    """

    @property
    def valid(self) -> NDArray[np.bool_]: ...  # noqa: D102
    @property
    def samples(self) -> Indices: ...  # noqa: D102
    @property
    def errors(self) -> Mapping[int, Exception]: ...  # noqa: D102
    @property
    def layout(self) -> RowLayout | None: ...  # noqa: D102

    def row_values(self) -> Mapping[str, NDArray[Any]]:
        """Returns further arrays of rows that contain several records; see `RowSource`."""
        ...

    def inputs(self, name: str) -> Any:
        """Returns the values of an input of the graph, in a form that ``external_source`` takes."""
        ...

    def column(self, name: str) -> Any:
        """Returns the values of a field or record key that bypasses the graph, one per row."""
        ...

    def name(self, row: int) -> str:
        """Returns the name of a row's own record, even if a stand-in replaces it; for errors."""
        ...


class RowSupply(Protocol[P]):
    """Supplies the rows of each run of an iterator's pipelines.

    Runs are numbered from the first run of the pipelines. DALI requests several runs ahead, and the
    engine forgets a run after making its batch. The supply of a record source can move to any
    position, since a position determines the records. The supply of a stream, which is read in
    order, stores the records until they are forgotten, so that new pipelines can read them again.

    Attributes:
        next_run: The run that DALI asks for next.
    """

    next_run: int

    def seek(self, position: P) -> None:
        """Begins the next run at a position."""
        ...

    def is_at(self, run: int, position: P) -> bool:
        """Returns whether a run begins at a position."""
        ...

    def has(self, run: int) -> bool:
        """Returns whether the stream has a batch for a run."""
        ...

    def rows(self, run: int, part: int) -> RowBatch:
        """Returns the rows of a pipeline in a run.

        Raises:
            StopIteration: If the stream has ended.
            Exception: If no record can be read.
        """
        ...

    def alone(self, samples: Indices) -> RowBatch:
        """Returns rows of some samples, for a separate pipeline."""
        ...

    def forget(self, run: int) -> None:
        """Drops the rows of a run and of all earlier runs."""
        ...

    def remember(self, sample: int, reason: UnusableRecord, replace: bool) -> None:
        """Remembers that DALI can't process a sample.

        Args:
            sample: The number of the sample.
            reason: The error of DALI.
            replace: Whether another sample replaces the sample from now on.
        """
        ...

    def stand_ins(self, run: int) -> Iterator[int]:
        """Yields samples that may replace bad samples of a run, except samples known to be bad."""
        ...

    def probes(self, run: int) -> Iterator[int]:
        """Yields samples of other runs, to find out whether the graph fails for every record."""
        ...

    def close(self) -> None:
        """Drops everything that was read."""
        ...
