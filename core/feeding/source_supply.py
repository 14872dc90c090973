"""`SourceSupply`: reads a record source ahead of the pipelines, in threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.tensors import TensorListCPU

from ..order.packing import RowLayout
from ..order.samples import SamplePlan, SamplePosition, SampleRows
from ..order.shuffle import Indices
from ..pipeline.calls import calls
from ..random.draw import DrawFunction
from ..sources.source import Source, Values, read_ahead_of
from ..threads.workers import Result, Workers, WorkersEnded, set_result
from .announcer import Announcer
from .read_rows import FEWEST, Chunk, ReadRows, ReadSettings, RunRows, read_chunk
from .stand_ins import UnusableRecord, across_epoch, digest_of, stand_ins


def _ignored() -> None:
    """Does nothing; the default ``when_read`` of `PendingRows`."""


@dataclasses.dataclass(frozen=True)
class RowRange:
    """The range of rows of a global batch that a pipeline makes.

    Attributes:
        first: The first row.
        last: The row after the last row.
    """

    first: int
    last: int


class PendingRows:
    """The rows of one run of all pipelines, which threads read.

    Args:
        workers: The threads.
        settings: The settings of the threads.
        run: The rows.
        chunk_size: The number of records that a task reads.
        announcer: Announces the records of later runs, if the source is remote.
        when_read: Called in a thread when the records were read, or can't be read.

    Attributes:
        run: The argument ``run``.
    """

    def __init__(
        self,
        workers: Workers,
        settings: ReadSettings,
        run: RunRows,
        chunk_size: int,
        announcer: Announcer | None,
        when_read: Callable[[], None] = _ignored,
    ):
        self.run = run
        self._workers, self._settings = workers, settings
        self._chunk_size = chunk_size
        self._announcer, self._when_read = announcer, when_read
        self._result = Result[ReadRows]()
        self._read: ReadRows | None = None

    def start(self) -> None:
        """Submits the tasks that read the rows; if that fails, `read` raises the error."""
        try:
            if self._announcer is not None and self._announcer.error is not None:
                raise self._announcer.error  # later reads would be slow
            self._submit_chunks()
        except BaseException as error:
            self._result.fail(error)
            self._when_read()

    def _submit_chunks(self) -> None:
        """Submits the tasks that read the records. The last task to end creates the `ReadRows`."""
        records, epochs = self._settings.order(self.run.samples)
        # In the order of record numbers, so that a task reads few files or parts of a mixture.
        order = np.argsort(records, kind="stable")
        keys = self._settings.keys(records, epochs)
        starts = range(0, len(records), self._chunk_size)
        chunks = [Result[Chunk]() for _ in starts]
        ends = itertools.count(1)

        def read(number: int, start: int) -> None:
            """Reads a chunk. The thread that reads the last chunk also joins all chunks."""
            rows = order[start : start + self._chunk_size]
            chunk_keys = None if keys is None else keys[rows]
            set_result(chunks[number], read_chunk, self._settings, records[rows], chunk_keys)
            if next(ends) == len(chunks):
                set_result(self._result, all_rows)
                self._when_read()

        def all_rows() -> ReadRows:
            read_chunks = [chunk.get() for chunk in chunks]
            settings, size = self._settings, self._chunk_size
            with settings.turn:
                return ReadRows(settings, self.run, records, epochs, order, read_chunks, size)

        for number, start in enumerate(starts):
            self._workers.submit(read, number, start)

    def end(self, error: Exception) -> None:
        """Makes threads that wait for the rows raise an error, unless the rows were read."""
        self._result.fail(error)

    @property
    def read(self) -> ReadRows:
        """Waits until the records were read, and returns the `ReadRows`.

        Raises:
            Exception: The error of the source, or `WorkersEnded`.
            SourceFault: If the source reuses memory, which may have changed these records.
        """
        reuse = self._settings.reuse
        if reuse is not None and reuse.fault is not None:
            raise reuse.fault.with_traceback(None)
        if self._read is None:
            with calls.suspended():  # a read may take any time
                self._read = self._result.get(self._workers)
        return self._read


class SourceRows:
    """The rows of one run of one pipeline; see `RowBatch`. Methods wait for the reading threads.

    Args:
        pending: The rows of the run.
        part: The number of the pipeline.
        valid: Whether each row belongs to the consumer's epoch and is not padding, bool [rows].
        layout: The layout of the rows, if these contain several records.

    Attributes:
        valid, layout: The arguments of the same names.
    """

    def __init__(
        self,
        pending: PendingRows,
        part: int,
        valid: NDArray[np.bool_],
        layout: RowLayout | None = None,
    ):
        self.valid, self.layout = valid, layout
        self._pending, self._part, self._rows = pending, part, pending.run.parts[part]

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

    def row_values(self) -> dict[str, NDArray[Any]]:
        """Returns the `RowSource.row_values` of the rows."""
        return self._pending.read.row_values(self._part)

    def inputs(self, name: str) -> TensorListCPU:
        """Returns a field of the records as a TensorList, one tensor per row."""
        return self._pending.read.inputs[name][self._part]

    def column(self, name: str) -> Values:
        """Returns a field of the records, one value per row, without a conversion for DALI."""
        return self._pending.read.column(name)[self._rows]

    def drawn(self, name: str, function: DrawFunction) -> Sequence[NDArray[Any]]:
        """Returns the results of a draw for the rows, usually computed ahead."""
        return self._pending.read.drawn(name, function, self._part)

    def name(self, row: int) -> str:
        """Returns the name of a row's own record."""
        return self._pending.read.name(self._rows.start + row)


def _start(runs: Sequence[PendingRows]) -> None:
    """Starts to read runs. Separate tasks could change the order of the runs."""
    for pending in runs:
        pending.start()


def _chunk_size(source: Source, counts: Sequence[int], is_awaited: bool) -> int:
    """Returns the number of records that a task reads.

    Usually a task reads a whole run, because several threads would contend for the GIL. A run for
    which the pipelines wait is split into tasks. All runs are split if the source has more threads
    than the default, because its reads wait, e.g. for a network.

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


def _all_samples(rows: Sequence[SampleRows]) -> Indices:
    """Returns the numbers of the samples of all pipelines, concatenated."""
    return np.concatenate([part.samples for part in rows])


class SourceSupply:
    """Reads the records of a record source for each run of an iterator's pipelines.

    The records of a run depend only on its position. A run may belong to a later epoch than the
    consumer's: DALI prepares the next epoch ahead. The records of all pipelines are read together,
    because each task and each call of NumPy holds the GIL for some time, regardless of its size.
    See `RowSupply`.

    Args:
        settings: The settings of the reading threads.
        plan: The plan of the batches of the source's stream.
        parts: The rows of the global batch that each pipeline makes.
        depth: The number of runs to read ahead of DALI's requests.

    Attributes:
        next_run: The run that DALI asks for next.
        settings: The argument ``settings``.
    """

    def __init__(
        self, settings: ReadSettings, plan: SamplePlan, parts: Sequence[RowRange], depth: int
    ):
        self.settings = settings
        # Only the supply and its rows refer to the threads, so that these end with the supply.
        self._workers = Workers(settings.source.read_threads, "dalijax-read")
        # Created here, since modules lose their names before the last supply is freed.
        self._ended = WorkersEnded()
        self._announcer: Announcer | None = None
        self._is_announced = False  # whether the announcer was started since the last `seek`
        if read_ahead_of(settings.source):

            def records_of(position: SamplePosition) -> Indices:
                records, _ = settings.order(_all_samples(_rows_at(plan, parts, position)))
                return records

            self._announcer = Announcer(
                settings.source,
                settings.names,
                records_of,
                lambda position: plan.run_from(plan.skip(position, 1)),
            )
        self.next_run = 0
        self._plan = plan
        self._parts = parts
        self._depth = depth
        self._positions: dict[int, SamplePosition] = {0: SamplePosition()}
        self._rows: dict[int, tuple[PendingRows, list[SourceRows]]] = {}
        self._prepared = 0  # the latest epoch that was prepared

    def seek(self, position: SamplePosition) -> None:
        """Begins the next run at a position."""
        self._rows.clear()
        self._positions = {self.next_run: position}
        self._is_announced = False

    def position(self, run: int) -> SamplePosition:
        """Returns the position of the start of a run; the run must not have been forgotten."""
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
        """Starts to read a run and the next ``depth`` runs, except runs that are being read."""
        if self._announcer is not None and not self._is_announced:
            self._is_announced = True
            self._announcer.restart(first, self.position(first))
        started: list[PendingRows] = []
        for run in range(first, first + 1 + self._depth):
            if run not in self._rows:
                self._rows[run] = self._pending(run)
                started.append(self._rows[run][0])
        if started:
            self._workers.submit(_start, started)
            self._prepare(self.position(first).epoch + 1)

    def _prepare(self, epoch: int) -> None:
        """Prepares an epoch in a thread, once."""
        if epoch > self._prepared:
            self._prepared = epoch
            self._workers.submit(self._plan.prepare, epoch)

    def _pending(self, run: int) -> tuple[PendingRows, list[SourceRows]]:
        """Creates the `PendingRows` of a run, and the `SourceRows` of each pipeline."""
        position = self.position(run)
        rows = _rows_at(self._plan, self._parts, position)
        counts = [len(part.valid) for part in rows]
        ends = itertools.accumulate(counts)
        parts = [slice(end - count, end) for end, count in zip(ends, counts)]
        global_rows = np.concatenate([part.first + np.arange(len(part.valid)) for part in rows])
        plan = self._plan
        run_rows = RunRows(
            _all_samples(rows),
            parts,
            global_rows,
            lambda: plan.rows(position).samples,
            [part.layout for part in rows if part.layout is not None],
        )
        chunk_size = _chunk_size(self.settings.source, counts, is_awaited=not self._rows)
        when_read = _ignored
        if self._announcer is not None:
            generation = self._announcer.generation
            when_read = functools.partial(self._announcer.was_read, generation, run)
        pending = PendingRows(
            self._workers, self.settings, run_rows, chunk_size, self._announcer, when_read
        )
        return pending, [
            SourceRows(pending, k, part.valid, part.layout) for k, part in enumerate(rows)
        ]

    def forget(self, run: int) -> None:
        """Drops the rows of a run and of all earlier runs, and reads further ahead.

        The engine calls this method after it has made a batch, because the reading threads would
        slow it down by holding the GIL.
        """
        dropped = [self._rows.pop(old) for old in list(self._rows) if old <= run]
        # In a thread, since freeing hundreds of buffers takes nearly 1 ms.
        self._workers.submit(dropped.clear)
        self.position(run + 1)
        for old in [old for old in self._positions if old <= run]:
            del self._positions[old]
        self._read_from(self.next_run)

    def alone(self, samples: Indices) -> SourceRows:
        """Returns rows of some samples, for a separate pipeline."""
        count = len(samples)
        run = RunRows(samples, [slice(0, count)], np.arange(count), lambda: samples)
        pending = PendingRows(self._workers, self.settings, run, count, self._announcer)
        self._workers.submit(pending.start)
        return SourceRows(pending, 0, np.ones(count, bool))

    def remember(self, sample: int, reason: UnusableRecord, replace: bool) -> None:
        """Remembers that DALI can't process a sample; see `RowSupply`.

        If a file can't be read or decoded, the sample's record is remembered, too.
        """
        settings = self.settings
        if reason.failure.is_permanent:
            rows = self.alone(np.array([sample], np.int64))
            columns = {name: rows.column(name) for name in settings.graph_fields}
            digest = digest_of(settings.source.fields, columns, 0)
            settings.bad_samples.records[int(rows.records[0])] = digest, reason
        if replace:  # last: from now on another sample stands in for it
            settings.bad_samples.samples[settings.seed, sample] = reason

    def stand_ins(self, run: int) -> Iterator[int]:
        """Yields samples that may replace bad samples of a run, except samples known to be bad."""
        position, part = self.position(run), self._parts[0]
        first = self._plan.rows(position, part.first, part.last).first
        batch = self._plan.rows(position).samples.tolist()
        samples = stand_ins(batch, first, self._plan.num_samples)
        for sample in dict.fromkeys(samples):
            if (self.settings.seed, sample) not in self.settings.bad_samples.samples:
                yield sample

    def probes(self, run: int) -> Iterator[int]:
        """Yields samples across the epoch at the end of a run; see `RowSupply`."""
        last = self.position(run).sample + self._plan.batch_size - 1
        yield from dict.fromkeys(
            across_epoch(last // self._plan.num_samples, self._plan.num_samples)
        )

    def close(self) -> None:
        """Ends the threads and drops all rows; threads that wait for rows get an error.

        This method takes no lock, and does not wait for reads.
        """
        self._workers.end()
        if self._announcer is not None:
            self._announcer.close()
        for pending, _ in list(self._rows.values()):
            pending.end(self._ended)
        self._rows.clear()
