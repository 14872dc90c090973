"""What pipelines are fed with, run by run: rows of the stream, read ahead by threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.tensors import TensorCPU

from ..hashing import Bits, fold
from ..pipeline.draw import DrawRows
from ..pipeline.runner import calls
from .order import Indices
from .plan import SamplePlan, SamplePosition
from .reuse import ReuseCheck
from .source import Source, Values, order_of

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
        inputs: What DALI is handed of the fields whose values differ in size.
        sizes: Heights and widths of pictures, by field, where they are wanted.
    """

    columns: dict[str, Values]
    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)
    inputs: dict[str, list[TensorCPU]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, NDArray[np.int32]] = dataclasses.field(default_factory=dict)


def _checked(source: Source, count: int, names: Sequence[str], columns: Any) -> dict[str, Values]:
    """The fields that a source has read.

    Raises:
        TypeError, ValueError: If they are not what was asked for: a mistake of the source, and no
            bad record.
    """

    def call() -> str:
        return f"{type(source).__name__}.read() of {count} records and the fields {list(names)}"

    if not isinstance(columns, Mapping):
        raise TypeError(f"{call()} must return a dict of them, not {type(columns).__name__}")
    if missing := [name for name in names if name not in columns]:
        raise ValueError(f"{call()} returned {sorted(map(str, columns))}, without {missing}")
    for name in names:
        has = len(columns[name]) if hasattr(columns[name], "__len__") else columns[name]
        if not isinstance(has, int) or has != count:
            raise ValueError(
                f"{call()} returned {has} values of {name!r}: return one for each record"
            )
    return {name: columns[name] for name in names}


def _read(source: Source, records: Indices, names: Sequence[str]) -> _Chunk:
    """Reads records, and each alone where they can't be read together."""
    try:
        columns = source.read(records, names)
    except Exception as error:
        if len(records) == 1:
            return _Chunk({name: [None] for name in names}, {0: error})
    else:
        return _Chunk(_checked(source, len(records), names, columns))
    values: dict[str, list[Any]] = {name: [] for name in names}
    errors = {}
    for place in range(len(records)):
        single = _read(source, records[place : place + 1], names)
        for name in names:
            values[name] += list(single.columns[name])
        if single.errors:
            errors[place] = single.errors[0]
    return _Chunk({**values}, errors)


def _prepared(
    source: Source,
    records: Indices,
    names: Sequence[str],
    sized: Sequence[str],
    reuse: ReuseCheck | None,
) -> _Chunk:
    """Reads records, and makes of them what the loop would wait for."""
    chunk = _read(source, records, names)
    if reuse is not None and not chunk.errors:
        reuse.check(records, chunk.columns)
    if not chunk.errors:
        chunk.inputs = {
            name: [TensorCPU(value) for value in chunk.columns[name]]
            for name in names
            if source.fields[name].dtype is not None
            and not isinstance(chunk.columns[name], np.ndarray)
        }
        chunk.sizes = {name: source.sizes(records, name, chunk.columns[name]) for name in sized}
    return chunk


@dataclasses.dataclass(frozen=True)
class _Started:
    """What is known of rows as they are read.

    Attributes:
        records: The record of each row.
        hashes: A hash of its seed, epoch and record, to draw by.
        order: The rows in the order in which they are read.
        tasks: What reads them, some after others.
    """

    records: Indices
    hashes: Bits
    order: Indices
    tasks: list[concurrent.futures.Future[_Chunk]]


class Rows:
    """The rows of one run of one pipeline, read by threads.

    Attributes:
        samples: The sample of the stream in each, shape [rows].
        valid: Which of them belong to the consumer's epoch, shape [rows].
        errors: What the reading raised, by row; another record stands there.
    """

    def __init__(self, feed: Feed, samples: Indices, valid: NDArray[np.bool_]):
        self.samples, self.valid = samples, valid
        self.errors: dict[int, Exception] = {}
        if feed.stand_ins:
            self.valid = valid & ~np.isin(samples, list(feed.stand_ins))
        self._feed = feed
        self._chunks: list[_Chunk] | None = None
        self._columns: dict[str, Values] = {}
        self._started = feed.pool.submit(self._start)

    def _start(self) -> _Started:
        """Starts to read."""
        feed, samples = self._feed, self.samples
        if feed.stand_ins:
            samples = np.array([feed.stand_ins.get(int(t), int(t)) for t in samples], np.int64)
        records, epochs = feed.order(samples)
        names, sized = feed.names, list(feed.sized)
        # By number: a task reads of few files, or parts of a mixture, and onwards in each.
        rows = np.argsort(records, kind="stable")
        tasks = [
            feed.pool.submit(
                _prepared, feed.source, records[rows[k : k + _CHUNK]], names, sized, feed.reuse
            )
            for k in range(0, len(records), _CHUNK)
        ]
        return _Started(records, fold(feed.seed, epochs, records), rows, tasks)

    @property
    def records(self) -> Indices:
        """The record of each row, int64 [rows]."""
        return self._started.result().records

    def column(self, name: str) -> Values:
        """A field of the records."""
        self._wait()
        if name not in self._columns:
            self._columns[name] = self._joined([one.columns[name] for one in self._chunks or ()])
        return self._columns[name]

    def inputs(self, name: str) -> Any:
        """A field of the records as DALI takes it."""
        chunks = self._wait()
        if not self.errors and all(name in one.inputs for one in chunks):
            return self._joined([one.inputs[name] for one in chunks])
        return self.column(name)

    def sizes(self, name: str) -> NDArray[np.int32]:
        """Heights and widths of a field's pictures, int32 [rows, 2].

        A picture whose header can't be read counts as a record that can't be; 1 x 1 stands there.
        """
        chunks = self._wait()
        self._feed.sized.add(name)  # from now on the threads look them up
        if not self.errors and all(name in one.sizes for one in chunks):
            sizes = np.asarray(self._joined([one.sizes[name] for one in chunks]))
        else:
            sizes = np.array(
                self._feed.source.sizes(self.records, name, self.column(name)), np.int32
            )
        for row in np.flatnonzero((sizes < 1).any(axis=1)).tolist():
            sizes[row] = 1
            unknown = ValueError("the size of the picture can't be read from its header")
            self.errors.setdefault(row, unknown)
        return sizes

    def draw_rows(self) -> DrawRows:
        """What numbers are drawn for."""
        return DrawRows(self._started.result().hashes, self.sizes, self.refuse)

    def refuse(self, row: int, error: Exception) -> None:
        """Has a row's record count as one that can't be read, if nothing was wrong before."""
        self.errors.setdefault(row, error)

    def _joined(self, values: Sequence[Values]) -> Values:
        """The values of all tasks in the order of the rows: an array where they are arrays."""
        order = self._started.result().order
        if all(isinstance(value, np.ndarray) for value in values):
            array = np.concatenate(values)
            rows = np.empty_like(array)
            rows[order] = array
            return rows
        result: list[Any] = [None] * len(order)
        for row, value in zip(order.tolist(), itertools.chain.from_iterable(values)):
            result[row] = value
        return result

    def _wait(self) -> list[_Chunk]:
        """Waits for what is read."""
        if self._chunks is None:
            with calls.suspended():  # it may wait as long as a disk likes
                started = self._started.result()
                self._chunks = [task.result() for task in started.tasks]
            for number, chunk in enumerate(self._chunks):
                for place, error in chunk.errors.items():
                    self.errors[int(started.order[number * _CHUNK + place])] = error
            if self.errors:
                self._replace()
        return self._chunks

    def _replace(self) -> None:
        """Has the nearest record that was read stand for each that was not.

        Raises:
            Exception: What was raised for the first, where the records behind can't be read
                either: it is the source that fails then, and the batch is not lost.
        """
        good = [row for row in range(len(self.samples)) if row not in self.errors]
        spare = {} if good else self._spare()
        for name in self._feed.names:
            values = list(self.column(name))
            for row in self.errors:
                nearest = min(good, key=lambda k: abs(k - row), default=-1)
                values[row] = values[nearest] if good else spare[name][0]
            self._columns[name] = values

    def _spare(self) -> dict[str, Values]:
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
        sized: The fields of pictures whose sizes the graph wants.
        stand_ins: Samples of the stream, and those that stand for them, masked.
        reuse: Checks the memory of what is read; None where the source gives new arrays by itself.
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
        self.pool = concurrent.futures.ThreadPoolExecutor(source.read_threads, "dalijax-read")
        # Threads end with the last reference, not with the process.
        self._end = weakref.finalize(self, self.pool.shutdown, wait=False, cancel_futures=True)
        self.next_run = 0
        self.sized: set[str] = set()
        self.stand_ins: dict[int, int] = {}
        self.reuse = None if getattr(source, "gives_new_arrays", False) else ReuseCheck(source)
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
                position, span = self.position(ahead), self._parts[part]
                rows = self._plan.rows(position, span.first, span.last)
                self._rows[ahead, part] = Rows(self, rows.samples, rows.valid)
        return self._rows[run, part]

    def forget(self, run: int) -> None:
        """Drops what was read for a run and those before it."""
        for key in [key for key in self._rows if key[0] <= run]:
            del self._rows[key]
        self.position(run + 1)
        for old in [old for old in self._positions if old <= run]:
            del self._positions[old]

    def inputs(self, run: int, part: int, name: str) -> Any:
        """A field of the records of a run, as DALI takes it."""
        return self.rows(run, part).inputs(name)

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


@dataclasses.dataclass
class OnceRead:
    """The rows of each run, for pipelines whose batches nobody takes: they are dropped in time.

    Attributes:
        feed: The rows.
        kept: Runs that one pipeline may be ahead of another.
    """

    feed: Feed
    kept: int = 1

    def inputs(self, run: int, part: int, name: str) -> Any:
        """A field of the records of a run, as DALI takes it."""
        if run > self.kept:
            self.feed.forget(run - self.kept - 1)
        return self.feed.inputs(run, part, name)

    def draw_rows(self, run: int, part: int) -> DrawRows:
        """What numbers are drawn for in a run."""
        return self.feed.draw_rows(run, part)


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """Rows that a pipeline is fed with in each run.

    Attributes:
        rows: The rows.
    """

    rows: Rows

    def inputs(self, run: int, part: int, name: str) -> Any:
        """A field of the records, as DALI takes it."""
        return self.rows.inputs(name)

    def draw_rows(self, run: int, part: int) -> DrawRows:
        """What numbers are drawn for."""
        return self.rows.draw_rows()
