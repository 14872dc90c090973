"""`SourceSupply`: reads a record source ahead of the pipelines, in threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.tensors import TensorListCPU

from ..formats.image_size import FileInput
from ..order.samples import SamplePlan, SamplePosition, SampleRows
from ..order.shuffle import Indices
from ..pipeline.calls import calls
from ..random.draw import DrawRows
from ..sources.source import Source, Values, order_of, read_ahead_of
from ..workers import Result, Workers, WorkersEnded
from .announcer import Announcer
from .read_rows import FEWEST, Chunk, ReadRows, ReadSettings, read_chunk
from .reuse import ReuseCheck
from .stand_ins import BadSamples, UnusableRecord, across_epoch, digest_of, stand_ins

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RowRange:
    """The range of rows of a global batch that one pipeline makes.

    Attributes:
        first: The first row.
        last: The row after the last row.
    """

    first: int
    last: int


class PendingRows:
    """The rows of one run of all pipelines, which threads read.

    Args:
        supply: The supply, whose threads read the rows.
        samples: The number of the sample in each row, int64 [rows].
        parts: The range of rows of each pipeline.
        chunk_size: The number of records that a task reads.
        places: The index of each row in the global batch, int64 [rows]; by default 0, 1, 2, ...
        batch: Returns the samples of the global batch; by default ``samples``.
        when_read: Called in a thread when the records were read, or can't be read.
    """

    def __init__(
        self,
        supply: SourceSupply,
        samples: Indices,
        parts: Sequence[slice],
        chunk_size: int,
        places: Indices | None = None,
        batch: Callable[[], Indices] | None = None,
        when_read: Callable[[], None] | None = None,
    ):
        self._samples = samples
        self._supply = supply
        self._parts = parts
        self._chunk_size = chunk_size
        self._places = np.arange(len(samples)) if places is None else places
        self._batch = batch or (lambda: samples)
        self._when_read = when_read or _nothing
        self._result = Result[ReadRows]()
        self._read: ReadRows | None = None

    def start(self) -> None:
        """Submits the tasks that read the rows; if that fails, `read` raises the error."""
        try:
            self._supply.check_announcer()
            self._submit_chunks()
        except BaseException as error:
            self._result.fail(error)
            self._when_read()

    def _submit_chunks(self) -> None:
        """Submits the tasks that read the records. The last task to end creates the `ReadRows`."""
        supply = self._supply
        records, epochs = supply.settings.order(self._samples)
        # In the order of record numbers, so that a task reads few files or parts of a mixture.
        order = np.argsort(records, kind="stable")
        size = self._chunk_size
        starts = range(0, len(records), size)
        chunks: list[Chunk | BaseException | None] = [None] * len(starts)
        ends = itertools.count(1)

        def read(number: int, start: int) -> None:
            """Reads a chunk. The thread that reads the last chunk also joins all chunks."""
            try:
                chunks[number] = read_chunk(supply.settings, records[order[start : start + size]])
            except BaseException as error:
                chunks[number] = error
            if next(ends) < len(chunks):
                return
            try:
                rows = ReadRows(
                    supply.settings,
                    self._samples,
                    records,
                    epochs,
                    order,
                    [_unless_error(chunk) for chunk in chunks],
                    size,
                    self._parts,
                    self._places,
                    self._batch,
                )
            except BaseException as error:
                self._result.fail(error)
            else:
                self._result.set(rows)
            self._when_read()

        for number, start in enumerate(starts):
            supply.submit(read, number, start)

    def end(self) -> None:
        """Makes threads that wait for the rows raise an error, unless the rows were read."""
        self._result.fail(self._supply.ended)

    @property
    def read(self) -> ReadRows:
        """Waits until the records were read, and returns the `ReadRows`.

        Raises:
            Exception: The error of the source, or `WorkersEnded`.
        """
        if self._read is None:
            with calls.suspended():  # a read may take any time
                self._read = self._supply.wait_for(self._result)
        return self._read


class SourceRows:
    """The rows of one run of one pipeline; see `RowBatch`. Methods wait for the reading threads.

    Args:
        pending: The rows of the run.
        part: The number of the pipeline.
        rows: The pipeline's rows, as a slice of the run's rows.
        valid: Whether each row belongs to the consumer's epoch and is not padding, bool [rows].

    Attributes:
        valid: The argument ``valid``.
    """

    def __init__(self, pending: PendingRows, part: int, rows: slice, valid: NDArray[np.bool_]):
        self.valid = valid
        self._pending, self._part, self._rows = pending, part, rows

    @property
    def samples(self) -> Indices:
        """Returns the sample in each row; for a bad record, the sample of its stand-in."""
        return self._pending.read.samples[self._rows]

    @property
    def records(self) -> Indices:
        """Returns the number of each row's own record, even if a stand-in replaces it."""
        return self._pending.read.own_records[self._rows]

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Returns the error of each row whose record can't be used."""
        first, end = self._rows.start, self._rows.stop
        errors = list(self._pending.read.errors.items())
        return {row - first: error for row, error in errors if first <= row < end}

    def inputs(self, name: str) -> TensorListCPU:
        """Returns a field of the records as a TensorList, one tensor per row."""
        return self._pending.read.inputs[name][self._part]

    def column(self, name: str) -> Values:
        """Returns a field of the records, one value per row, without a conversion for DALI."""
        return self._pending.read.column(name)[self._rows]

    def draw_rows(self) -> DrawRows:
        """Returns the `DrawRows`, from which draws compute the random numbers of the rows."""
        return self._pending.read.draw_rows(self._part)

    def name(self, row: int) -> str:
        """Returns the name of a row's own record."""
        return self._pending.read.name(self._rows.start + row)


def _start(runs: Sequence[PendingRows]) -> None:
    """Starts to read runs, in one task: separate tasks could change the order of the runs."""
    for pending in runs:
        pending.start()


def _nothing() -> None:
    """Does nothing."""


def _chunk_size(source: Source, counts: Sequence[int], is_awaited: bool) -> int:
    """Returns the number of records that a task reads.

    One task reads a whole run, so that a single thread is busy while it keeps up, since several
    threads contend for the GIL. An awaited run is split into tasks. All runs are split if the
    source has more threads than the default, because its reads wait, e.g. for a network.

    Args:
        source: The source.
        counts: The number of records for each pipeline.
        is_awaited: Whether the pipelines wait for the run, because no run was read ahead.
    """
    threads, count = source.read_threads, sum(counts)
    if threads > Source.read_threads:
        return max(min(FEWEST, *counts), -(-count // threads))
    return max(FEWEST, -(-count // threads)) if is_awaited else count


def _rows_at(
    plan: SamplePlan, parts: Sequence[RowRange], position: SamplePosition
) -> list[SampleRows]:
    """Returns the rows of each pipeline in the run at a position."""
    return [plan.rows(position, part.first, part.last) for part in parts]


def _joined_samples(rows: Sequence[SampleRows]) -> Indices:
    """Returns the numbers of the samples of all pipelines, concatenated."""
    return np.concatenate([part.samples for part in rows])


def _unless_error(chunk: Chunk | BaseException | None) -> Chunk:
    """Returns a chunk, or raises the error of the task that should have read it."""
    if not isinstance(chunk, Chunk):
        raise chunk or WorkersEnded()
    return chunk


class SourceSupply:
    """Reads the records of a record source for each run of an iterator's pipelines.

    The records of a run depend only on its position. A run may belong to a later epoch than the
    consumer's: DALI prepares the next epoch ahead. The records of all pipelines are read together,
    because each task and each call of NumPy occupies the GIL for a while whatever its size. See
    `RowSupply`.

    Args:
        source: The record source.
        plan: The plan of the batches of the source's stream.
        parts: The rows of the global batch that each pipeline makes.
        names: The fields that the graph takes, and the fields that bypass the graph.
        seed: The seed.
        shuffle: Whether the order is shuffled, in a different way in each epoch.
        depth: The number of runs to read before DALI requests them.
        file_inputs: The fields that the graph decodes or reads as files; empty before it is built.
        bad_samples: The samples and records that DALI could not process before.
        passed: The fields that bypass the graph.
        lost_numbers: Receives the lost numbers of `ReadSettings`.

    Attributes:
        next_run: The run that DALI asks for next.
        settings: The settings of the reading threads.
        ended: The error of threads that wait for rows when the supply is closed.
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
        file_inputs: Mapping[str, FileInput] = MappingProxyType({}),
        bad_samples: BadSamples | None = None,
        passed: Sequence[str] = (),
        lost_numbers: dict[str, str] | None = None,
    ):
        reuse = None if getattr(source, "_gives_new_arrays", False) else ReuseCheck(source)
        order = order_of(source, seed, shuffle)
        self.settings = ReadSettings(
            source,
            tuple(names),
            seed,
            plan.num_samples,
            bad_samples or BadSamples(),
            order,
            reuse,
            file_inputs,
            {} if lost_numbers is None else lost_numbers,
            passed=frozenset(passed),
        )
        # The only reference, so that the threads end with the supply.
        self._workers = Workers(source.read_threads, "dalijax-read")
        # Created here, since modules lose their names before the last supply is freed.
        self.ended = WorkersEnded()
        self._announcer: Announcer | None = None
        self._is_announced = False  # whether the announcer was started since the last `seek`
        if read_ahead_of(source):
            spans = list(parts)
            self._announcer = Announcer(
                source,
                self.settings.names,
                lambda position: order(_joined_samples(_rows_at(plan, spans, position)))[0],
                lambda position: plan.run_from(plan.skip(position, 1)),
            )
        self.next_run = 0
        self._plan = plan
        self._parts = list(parts)
        self._depth = depth
        self._positions: dict[int, SamplePosition] = {0: SamplePosition()}
        self._rows: dict[int, tuple[PendingRows, list[SourceRows]]] = {}

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls a function in a reading thread, without waiting for the call.

        Raises:
            WorkersEnded: If the threads were ended.
        """
        self._workers.submit(function, *arguments)

    def wait_for(self, result: Result[T]) -> T:
        """Waits for the result of a reading thread, and returns it.

        Raises:
            WorkersEnded: If the threads were ended.
            BaseException: The error of the thread.
        """
        return result.get(self._workers)

    def check_announcer(self) -> None:
        """Raises the error that ended the announcements, if any: later reads would be slow."""
        if self._announcer is not None and self._announcer.error is not None:
            raise self._announcer.error

    def seek(self, position: SamplePosition) -> None:
        """Begins the next run at a position."""
        self._rows.clear()
        self._positions = {self.next_run: position}
        self._is_announced = False

    def position(self, run: int) -> SamplePosition:
        """Returns the position at which a run begins; the run must not be forgotten."""
        for last in range(max(self._positions), run):
            after = self._plan.skip(self._positions[last], 1)
            self._positions[last + 1] = self._plan.run_from(after)
        return self._positions[run]

    def is_at(self, run: int, position: SamplePosition) -> bool:
        """Returns whether a run begins at a position."""
        return self.position(run) == position

    def has(self, run: int) -> bool:
        """Returns True: the stream of a record source is endless."""
        return True

    def rows(self, run: int, part: int) -> SourceRows:
        """Returns the rows of a pipeline in a run."""
        self.next_run = max(self.next_run, run + 1)
        if run not in self._rows:
            self._read_from(run)
        return self._rows[run][1][part]

    def _read_from(self, first: int) -> None:
        """Starts to read a run and the next ``depth`` runs, unless their reading has begun."""
        if self._announcer is not None and not self._is_announced:
            self._is_announced = True
            self._announcer.restart(first, self.position(first))
        started: list[PendingRows] = []
        for run in range(first, first + 1 + self._depth):
            if run not in self._rows:
                position = self.position(run)
                rows = _rows_at(self._plan, self._parts, position)

                def batch(position: SamplePosition = position) -> Indices:
                    return self._plan.rows(position).samples

                valid = [part.valid for part in rows]
                self._rows[run] = self._pending(
                    _joined_samples(rows),
                    valid,
                    _chunk_size(self.settings.source, list(map(len, valid)), not self._rows),
                    np.concatenate(
                        [
                            part.first + np.arange(len(row.valid))
                            for part, row in zip(self._parts, rows)
                        ]
                    ),
                    batch,
                    self._when_read(run),
                )
                started.append(self._rows[run][0])
        if started:
            self.submit(_start, started)

    def _when_read(self, run: int) -> Callable[[], None]:
        """Returns a function that tells the announcer, if any, that a run was read."""
        if self._announcer is None:
            return _nothing
        return functools.partial(self._announcer.was_read, self._announcer.generation, run)

    def _pending(
        self, samples: Indices, valid: Sequence[NDArray[np.bool_]], chunk_size: int, *where: Any
    ) -> tuple[PendingRows, list[SourceRows]]:
        """Creates the `PendingRows` of a run, and the `SourceRows` of each pipeline.

        Args:
            samples: The samples of all pipelines.
            valid: For each pipeline, whether each of its rows belongs to the epoch.
            chunk_size: The number of records that a task reads.
            *where: Further arguments of `PendingRows`.
        """
        ends = list(itertools.accumulate(map(len, valid)))
        parts = [slice(end - len(part), end) for part, end in zip(valid, ends)]
        pending = PendingRows(self, samples, parts, chunk_size, *where)
        return pending, list(
            map(SourceRows, itertools.repeat(pending), itertools.count(), parts, valid)
        )

    def forget(self, run: int) -> None:
        """Drops the rows of a run and of all earlier runs, and reads further ahead.

        The engine calls it after making a batch, because the reading threads contend for the GIL.
        """
        dropped = [self._rows.pop(old) for old in list(self._rows) if old <= run]
        # In a thread, since freeing hundreds of buffers takes nearly 1 ms.
        self.submit(dropped.clear)
        self.position(run + 1)
        for old in [old for old in self._positions if old <= run]:
            del self._positions[old]
        self._read_from(self.next_run)

    def alone(self, samples: Indices) -> SourceRows:
        """Returns rows of some samples, for a separate pipeline."""
        pending, rows = self._pending(samples, [np.ones(len(samples), bool)], len(samples))
        self.submit(pending.start)
        return rows[0]

    def remember(self, sample: int, reason: UnusableRecord, replace: bool) -> None:
        """Remembers that DALI can't process a sample; see `RowSupply`.

        If DALI failed to read or decode a file, the sample's record is remembered, too.
        """
        settings = self.settings
        if reason.failure.reads_file:
            rows = self.alone(np.array([sample], np.int64))
            columns = {name: rows.column(name) for name in settings.graph_fields}
            digest = digest_of(settings.source.fields, columns, 0)
            settings.bad_samples.records[int(rows.records[0])] = digest, reason
        if replace:  # last: from now on another sample stands in for it
            settings.bad_samples.samples[settings.seed, sample] = reason

    def stand_ins(self, run: int) -> Iterator[int]:
        """Yields samples that may replace bad samples of a run, except samples known to be bad."""
        rows = self._plan.rows(self.position(run)).samples.tolist()
        samples = stand_ins(rows, self._parts[0].first, self._plan.num_samples)
        for sample in dict.fromkeys(samples):
            if (self.settings.seed, sample) not in self.settings.bad_samples.samples:
                yield sample

    def probes(self, run: int) -> Iterator[int]:
        """Yields samples across the epoch in which a run ends; see `RowSupply`."""
        last = self.position(run).sample + self._plan.batch_size - 1
        yield from dict.fromkeys(
            across_epoch(last // self._plan.num_samples, self._plan.num_samples)
        )

    def close(self) -> None:
        """Ends the threads and drops all rows; threads that wait for rows get an error.

        It takes no lock, and does not wait for a read.
        """
        self._workers.end()
        if self._announcer is not None:
            self._announcer.close()
        for pending, _ in list(self._rows.values()):
            pending.end()
        self._rows.clear()
