"""What pipelines are fed with, run by run: rows of the stream, read ahead by threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hashing import fold
from ..pipeline.draw import DrawRows
from ..pipeline.lifetime import calls
from .order import Indices
from .plan import SamplePlan, SamplePosition
from .source import Source, order_of

_THREADS = 4  # more were no faster on 16 cores
_CHUNK = 64  # records of a task
_MOST_TRIED = 64  # records behind a batch of which none can be read, for one to stand there


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows of each global batch that one pipeline makes.

    Attributes:
        first: The first.
        last: The row behind the last.
    """

    first: int
    last: int


@dataclasses.dataclass
class _Chunk:
    """Records that one task has read.

    Attributes:
        columns: For each field the values of the records, None where one can't be read.
        errors: What the reading of a record raised, by its place.
    """

    columns: dict[str, list[Any]]
    errors: dict[int, Exception]


def _read(source: Source, records: Indices, names: Sequence[str]) -> _Chunk:
    """Reads records, and each alone where they can't be read together."""
    try:
        columns = source.read(records, names)
        return _Chunk({name: list(columns[name]) for name in names}, {})
    except Exception as error:
        if len(records) == 1:
            return _Chunk({name: [None] for name in names}, {0: error})
    chunk = _Chunk({name: [] for name in names}, {})
    for place in range(len(records)):
        single = _read(source, records[place : place + 1], names)
        for name in names:
            chunk.columns[name] += single.columns[name]
        if single.errors:
            chunk.errors[place] = single.errors[0]
    return chunk


class Rows:
    """The rows of one run of one pipeline.

    Attributes:
        samples: The sample of the stream in each, shape [rows].
        valid: Which of them belong to the consumer's epoch, shape [rows].
        records: The record of each, int64 [rows].
        errors: What the reading raised, by row; another record stands there.
    """

    def __init__(self, feed: Feed, samples: Indices, valid: NDArray[np.bool_]):
        stand_ins = feed.stand_ins
        self.samples, self.valid = samples, valid
        self.errors: dict[int, Exception] = {}
        if stand_ins:
            masked = np.isin(samples, list(stand_ins))
            self.valid = valid & ~masked
            samples = np.array([stand_ins.get(int(t), int(t)) for t in samples], np.int64)
        self.records, epochs = feed.order(samples)
        self.drawn = fold(feed.seed, epochs, self.records)
        self._feed = feed
        self._columns: dict[str, list[Any]] | None = None
        self._tasks = [
            feed.pool.submit(_read, feed.source, self.records[k : k + _CHUNK], feed.names)
            for k in range(0, len(self.records), _CHUNK)
        ]

    def column(self, name: str) -> list[Any]:
        """A field of the records."""
        if self._columns is None:
            self._columns = self._gathered()
        return self._columns[name]

    def sizes(self, name: str) -> NDArray[np.int32]:
        """Heights and widths of a field's pictures, int32 [rows, 2].

        A picture whose header can't be read counts as a record that can't be; 1 x 1 stands there.
        """
        data = self.column(name)
        sizes = np.array(self._feed.source.sizes(self.records, name, data), np.int32)
        for row in np.flatnonzero((sizes < 1).any(axis=1)).tolist():
            sizes[row] = 1
            unknown = ValueError("the size of the picture can't be read from its header")
            self.errors.setdefault(row, unknown)
        return sizes

    def draw_rows(self) -> DrawRows:
        """What numbers are drawn for."""
        return DrawRows(self.drawn, self.sizes, self.refuse)

    def refuse(self, row: int, error: Exception) -> None:
        """Has a row's record count as one that can't be read, if nothing was wrong before."""
        self.errors.setdefault(row, error)

    def _gathered(self) -> dict[str, list[Any]]:
        names = self._feed.names
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for number, task in enumerate(self._tasks):
            with calls.suspended():  # it may wait as long as a disk likes
                chunk = task.result()
            for name in names:
                columns[name] += chunk.columns[name]
            self.errors |= {number * _CHUNK + at: error for at, error in chunk.errors.items()}
        self._tasks.clear()
        if self.errors:
            self._replace(columns)
        return columns

    def _replace(self, columns: dict[str, list[Any]]) -> None:
        """Has the nearest record that was read stand for each that was not.

        Raises:
            Exception: What was raised for the first, where the records behind can't be read
                either: it is the source that fails then, and the batch is not lost.
        """
        good = [row for row in range(len(self.records)) if row not in self.errors]
        spare = {} if good else self._spare()
        for row in self.errors:
            nearest = min(good, key=lambda k: abs(k - row), default=-1)
            for name, values in columns.items():
                values[row] = values[nearest] if good else spare[name][0]

    def _spare(self) -> dict[str, list[Any]]:
        """A record of the samples behind, where none of these can be read."""
        behind = int(self.samples[-1]) + 1 + np.arange(_MOST_TRIED)
        for record in self._feed.order(behind)[0]:
            chunk = _read(self._feed.source, np.array([record]), self._feed.names)
            if not chunk.errors:
                return chunk.columns
        raise next(iter(self.errors.values()))


class Feed:
    """The rows of each run of the pipelines of one iterator.

    Runs are numbered as DALI does, from the first one of the pipelines; each follows from its
    position alone. They run on from epoch to epoch.

    Args:
        source: The source.
        plan: The batches of its stream.
        parts: The rows of each pipeline.
        names: The fields that the graph takes.
        seed: The seed.
        shuffle: Whether each epoch has an order of its own.
        depth: Runs that are read ahead of the one that DALI asks for.

    Attributes:
        next_run: The run that DALI asks for next.
        stand_ins: Samples of the stream, and those that stand for them, masked.
    """

    def __init__(
        self,
        source: Source,
        plan: SamplePlan,
        parts: Sequence[RowRange],
        names: Sequence[str],
        seed: int,
        shuffle: bool,
        depth: int,
    ):
        self.source, self.seed, self.names = source, seed, tuple(names)
        self.order = order_of(source, seed, shuffle)
        self.pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "dalijax-read")
        # Threads end with the last reference, not with the process.
        self._end = weakref.finalize(self, self.pool.shutdown, wait=False, cancel_futures=True)
        self.next_run = 0
        self.stand_ins: dict[int, int] = {}
        self._plan = plan
        self._parts = list(parts)
        self._depth = depth
        self._positions: dict[int, SamplePosition] = {0: SamplePosition()}
        self._rows: dict[tuple[int, int], Rows] = {}

    def start_at(self, position: SamplePosition) -> None:
        """Has the run that DALI asks for next begin at a position."""
        self._rows.clear()
        self._positions = {self.next_run: position}

    def position(self, run: int) -> SamplePosition:
        """Where a run begins, which is none of those that were forgotten."""
        while run not in self._positions:
            last = max(self._positions)
            behind = self._plan.skip(self._positions[last], 1)
            self._positions[last + 1] = self._plan.run_from(behind)
        return self._positions[run]

    def rows(self, run: int, part: int) -> Rows:
        """The rows of a pipeline in a run."""
        self.next_run = max(self.next_run, run + 1)
        for ahead in range(run, run + 1 + self._depth):
            if (ahead, part) not in self._rows:
                position, own = self.position(ahead), self._parts[part]
                rows = self._plan.rows(position, own.first, own.last)
                self._rows[ahead, part] = Rows(self, rows.samples, rows.valid)
        return self._rows[run, part]

    def forget(self, run: int) -> None:
        """Drops what was read for a run and those before it."""
        for key in [key for key in self._rows if key[0] <= run]:
            del self._rows[key]
        self.position(run + 1)
        for old in [old for old in self._positions if old <= run]:
            del self._positions[old]

    def column(self, run: int, part: int, name: str) -> list[Any]:
        """A field of the records of a run."""
        return self.rows(run, part).column(name)

    def draw_rows(self, run: int, part: int) -> DrawRows:
        """What numbers are drawn for in a run."""
        return self.rows(run, part).draw_rows()

    def alone(self, samples: Indices) -> SomeRows:
        """Rows of some samples, for a pipeline of their own."""
        return SomeRows(Rows(self, samples, np.ones(len(samples), bool)))

    def close(self) -> None:
        """Ends the threads, and drops what was read."""
        self._end()
        self._rows.clear()


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """Rows that a pipeline is fed with in each run.

    Attributes:
        rows: The rows.
    """

    rows: Rows

    def column(self, run: int, part: int, name: str) -> list[Any]:
        """A field of the records."""
        return self.rows.column(name)

    def draw_rows(self, run: int, part: int) -> DrawRows:
        """What numbers are drawn for."""
        return self.rows.draw_rows()
