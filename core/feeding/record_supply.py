"""`RecordSupply`: supplies the records of a stream, which is read in order, to the pipelines."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.tensors import TensorCPU

from ..formats.field import Field
from ..formats.image_size import Look, look_at_input
from ..order.shuffle import Indices
from ..pipeline.calls import calls
from ..random.draw import DrawFunction, DrawRows
from ..random.hashing import fold
from .graph import FedGraph
from .record_reader import Numbers, ReadError, RecordBatch, RecordPosition, RecordReader
from .schema import Schema, described, values_of
from .stand_ins import BadSamples, NoStandIn, UnusableRecord, choose, digest_of, nearest

_LOOK_AHEAD = 8  # the number of later batches to search for a good record
_MOST_EXAMPLES = 64  # records to search for a list with elements, at least
_ELSEWHERE = object()  # equal to no reader's description of a position

# Returns the graph and the schema of the records, given the first record and an iterable of records
# that also begins with the first record.
Bind = Callable[[Any, Iterable[Any]], tuple[FedGraph, Schema]]


class ReplayQueue:
    """Stores the batches that were read from a stream until `forget`, so that they can run again.

    Batches are numbered by their step in the stream.

    Args:
        reader: Reads the batches; it must be at the start of the stream.

    Attributes:
        step: The step of the first batch in the queue.
        ended: Whether the reader had no further batch; set to False to ask it again.
    """

    def __init__(self, reader: RecordReader):
        self.step = 0
        self.ended = False
        self._reader = reader
        self._batches = collections.deque[RecordBatch]()
        # The reader's description of the position before the first batch.
        self._after: Any = None
        # Stored until its batch is due. The reader raises the error once, but all pipelines must
        # get it.
        self._error: ReadError | None = None

    def begins_at(self, position: RecordPosition) -> bool:
        """Returns whether the queue begins at a position."""
        return self.step == position.step and self._after is position.after

    def clear(self) -> None:
        """Drops the batches; `begins_at` is False until the queue is moved."""
        self._after = _ELSEWHERE  # first, so that an interrupted call leaves the position unknown
        self._batches.clear()
        self._error = None
        self.ended = False

    def seek(self, position: RecordPosition) -> None:
        """Moves the reader and the queue to a position."""
        self.clear()
        self._reader.seek(position)
        self.moved_to(position)

    def moved_to(self, position: RecordPosition) -> None:
        """Begins the cleared queue at a position; the caller has moved the reader."""
        self.step, self._after = position.step, position.after

    def read(self, step: int) -> RecordBatch:
        """Returns the batch of a step in the queue or after it; reads it if necessary.

        Raises:
            StopIteration: If the stream ends before the batch.
            ReadError: If the reading of an earlier record raised.
        """
        while len(self._batches) <= step - self.step:
            if self._error is not None:
                raise self._error
            if self.ended:  # some readers can't be asked again after their end
                raise StopIteration
            try:
                with calls.suspended():
                    batch = self._reader.next_records()
            except ReadError as error:
                self._error = error
                raise
            except StopIteration:
                self.ended = True
                raise
            self._batches.append(batch)
        return self._batches[step - self.step]

    def read_ahead(self, position: RecordPosition, count: int) -> int:
        """Reads up to ``count`` batches from a position on; returns the step after the last batch.

        Raises:
            ReadError: If reading raised before the first batch.
        """
        if self._after is _ELSEWHERE:
            self.seek(position)
        try:
            self.read(self.step + count - 1)
        except StopIteration:
            pass
        except ReadError:
            if not self._batches:
                raise
        return position.step + len(self._batches)

    def pass_over(self, error: ReadError) -> None:
        """Continues after a record whose reading raised; the queue must be empty."""
        self._error = None
        if self._after is not _ELSEWHERE:
            self._after = error.after

    def forget(self, step: int) -> None:
        """Drops the batch of a step and all earlier batches."""
        while self._batches and self.step <= step and self._after is not _ELSEWHERE:
            after = self._batches.popleft().after
            self.step, self._after = self.step + 1, after


@dataclasses.dataclass
class _Prepared:
    """A batch's records, with replacements for bad records, and the inputs of the graph.

    Attributes:
        batch: The batch as it was read.
        records: The record in each row, stand-ins included.
        samples: The number of the sample in each row.
        numbers: The index in the stream of each sample, int64 [rows]; None if it is unknown.
        columns: The values of inputs of the graph, by input.
        looks: The `Look` at each image, by input.
        errors: The error of each row whose own record can't be used.
    """

    batch: RecordBatch
    records: Sequence[Any]
    samples: Indices
    numbers: NDArray[np.int64] | None
    columns: dict[str, Any]
    looks: dict[str, list[Look]]
    errors: dict[int, Exception]


class RecordInputs:
    """Converts records to the inputs of a graph.

    Args:
        graph: The graph.
        schema: The schema of the records.
    """

    def __init__(self, graph: FedGraph, schema: Schema):
        self.fields = graph.inputs
        self._graph, self._schema = graph, schema
        self._numbers = {name: number for number, name in enumerate(schema.names)}

    def check_types(self) -> None:
        """Raises ValueError if the graph uses an input whose type DALI lacks."""
        for name, column in zip(self._schema.names, self._schema.columns):
            if column.field.dtype is None and name in self._graph.used:
                raise ValueError(column.fault)

    def columns(
        self, records: Sequence[Any]
    ) -> tuple[dict[str, Any], dict[str, list[Look]], dict[int, Exception]]:
        """Returns the inputs that the graph uses, looks at images, and the errors by row.

        If a record has an error, there are no inputs and no looks.
        """
        names = sorted(self._graph.used | self._graph.read)
        try:
            columns = {name: self.column(name, records) for name in names}
        except (ValueError, TypeError) as error:
            errors = dict(self._unfit(names, records))
            if not errors:
                raise error
            return {}, {}, errors
        return (
            {name: column for name, (column, _) in columns.items()},
            {name: looks for name, (_, looks) in columns.items() if looks},
            {},
        )

    def _unfit(
        self, names: Sequence[str], records: Sequence[Any]
    ) -> Iterator[tuple[int, Exception]]:
        """Yields the row and the error of each record that can't be an input of the graph."""
        for row, record in enumerate(records):
            try:
                for name in names:
                    self.column(name, [record], row)
            except (ValueError, TypeError) as error:
                yield row, error

    def column(self, name: str, records: Sequence[Any], first: int = 0) -> tuple[Any, list[Look]]:
        """Returns the values of an input of the graph, and looks at images.

        Args:
            name: The input.
            records: The records.
            first: The index of the first record in the batch, for errors.

        Returns:
            The value of each record; and the `Look` at each image. The second list is empty if the
            graph does not use the input as images.

        Raises:
            ValueError, TypeError: If a record lacks the value, or the value isn't an image.
        """
        schema, graph, number = self._schema, self._graph, self._numbers[name]
        try:
            values = schema.column(number, records, first)
        except StopIteration as error:  # which DALI would take for the end
            raise RuntimeError(f"a record raised StopIteration: {error}") from error
        if name not in graph.file_inputs:
            return values, []
        looks = []
        for row, value in enumerate(values, first):
            look = look_at_input(np.ascontiguousarray(value), graph.file_inputs[name])
            if look.fault:
                label = "/".join(schema.columns[number].path) or "the record"
                raise ValueError(f"{label} in record {row} of the batch: {look.fault}")
            if look.lost:
                graph.lost_numbers.setdefault(name, f"record {row} of the batch {look.lost}")
            looks.append(look)
        return values, looks

    def digest(self, columns: Mapping[str, Any], row: int) -> tuple[Hashable, Callable[[], bytes]]:
        """Returns a quick key of a record's values, and a function that computes their digest."""
        key = tuple(int(values[row].nbytes) for values in columns.values())
        inputs = self._graph.file_inputs
        fields = {
            name: Field(np.dtype(np.uint8), is_path=name in inputs and inputs[name].is_path)
            for name in columns
        }
        return key, lambda: digest_of(fields, columns, row)


class RecordRows:
    """The rows of a batch that one pipeline processes; see `RowBatch`.

    Args:
        inputs: Converts the records.
        seed: The seed of ``draw``.
        prepared: The whole batch.
        start: The first row of the pipeline.
        stop: The row after the last row of the pipeline.
    """

    layout = None  # a row of a batch is one record

    def __init__(self, inputs: RecordInputs, seed: int, prepared: _Prepared, start: int, stop: int):
        self._inputs, self._seed, self._prepared = inputs, seed, prepared
        self._start, self._stop = start, stop
        valid = prepared.batch.valid
        self.valid = np.ones(stop - start, bool) if valid is None else valid[start:stop]
        self.samples = prepared.samples[start:stop]
        self._draw_rows: DrawRows | None = None

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Returns the error of each row whose record can't be used."""
        errors, start, stop = self._prepared.errors, self._start, self._stop
        if not errors:  # nearly always; next() reads this property several times
            return {}
        return {row - start: error for row, error in errors.items() if start <= row < stop}

    def row_values(self) -> dict[str, NDArray[Any]]:
        """Returns no values, because a row of a batch is one record."""
        return {}

    def inputs(self, name: str) -> Any:
        """Returns the values of an input of the graph, one per row, with the input's layout.

        The result is an array [rows, ...], or a list of arrays or of tensors, which
        ``fn.external_source`` takes.
        """
        values, field = self._arrays(name), self._inputs.fields[name]
        if not field.dali_layout:
            return values
        return [TensorCPU(array, field.dali_layout) for array in values]

    def _arrays(self, name: str) -> Any:
        """Returns the values of an input of the graph, one per row, without a layout."""
        columns = self._prepared.columns
        if name not in columns:  # the operators of the graph could not be read
            columns[name] = self._inputs.column(name, self._prepared.records)[0]
        return self._rows_of(columns[name])

    def column(self, name: str) -> list[Any]:
        """Returns the values of a record key that bypasses the graph, one per row."""
        return values_of(self._rows_of(self._prepared.records), name, "", self._start)

    def drawn(self, name: str, function: DrawFunction) -> Sequence[Any]:
        """Returns the results of a draw for the rows."""
        if self._draw_rows is None:
            numbers = self._prepared.numbers
            row_numbers = None if numbers is None else self._rows_of(numbers)
            self._draw_rows = DrawRows(
                fold(self._seed, 0, row_numbers),
                self._sizes,
                self._refuse,
                self._arrays,
                self._orientations,
            )
        return self._draw_rows.drawn(name, function)

    def name(self, row: int) -> str:
        """Returns the name of a row's own record, and a short text of the record's values."""
        return _name_of(self._prepared.batch, self._start + row)

    def _rows_of(self, values: Any) -> Any:
        """Returns the values of the pipeline's rows, given the values of all rows of the batch."""
        if self._stop - self._start == len(values):
            return values
        return values[self._start : self._stop]

    def _refuse(self, row: int, error: Exception) -> None:
        """Sets the error of a row whose record can't be augmented, unless an error is set."""
        self._prepared.errors.setdefault(self._start + row, error)

    def _sizes(self, name: str) -> NDArray[np.int32]:
        """Returns heights and widths of an input's images, int32 [rows, 2]; see `DrawRows`."""
        field = self._inputs.fields[name]
        if field.image_layout:
            return field.image_sizes(self._arrays(name))
        return np.array([look.size or (-1, -1) for look in self._looks(name)], np.int32)

    def _orientations(self, name: str) -> NDArray[np.int32]:
        """Returns the EXIF orientations of an input's images, int32 [rows]; see `DrawRows`."""
        return np.array([look.orientation for look in self._looks(name)], np.int32)

    def _looks(self, name: str) -> Sequence[Look]:
        """Returns the `Look` at each image of an input, one per row."""
        looks = self._prepared.looks
        if name not in looks:
            looks[name] = self._inputs.column(name, self._prepared.records)[1]
        rows: Sequence[Look] = self._rows_of(looks[name])
        return rows


def _name_of(batch: RecordBatch, row: int) -> str:
    """Returns the name of a row's record, and a short text of the record's values."""
    return f"{batch.name(row)} ({described(batch.records[row])})"


class RecordSupply:
    """Supplies the records of a stream for each run of the pipelines; see `RowSupply`.

    The sample in row ``r`` of step ``s`` has the number ``s * rows of this process + r``.

    Args:
        queue: The batches of the stream.
        pipelines: The number of pipelines.
        rows: The number of rows of each pipeline's batch.
        numbers: The index in the stream of each row; None if it is unknown.
        seed: The seed of ``draw``.
        bind: Binds the graph's function to records, given the first record.

    Attributes:
        next_run: The run that DALI asks for next.
        seed: The seed of ``draw``; `StreamEngine` changes it.
        inputs: Converts the records to inputs of the graph. Only `bind_first_record` sets it.
    """

    inputs: RecordInputs

    def __init__(
        self,
        queue: ReplayQueue,
        pipelines: int,
        rows: int,
        numbers: Numbers | None,
        seed: int,
        bind: Bind,
    ):
        self.next_run = 0
        self.seed = seed
        self._queue = queue
        self._pipelines, self._rows_each = pipelines, rows
        self._rows_all = pipelines * rows
        self._numbers = numbers
        self._bind = bind
        self._first_step = 0  # the step of run 0
        self._rows: dict[int, list[RecordRows]] = {}  # the rows of each pipeline, by step
        self._bad = BadSamples()

    # Positions

    def seek(self, position: RecordPosition) -> None:
        """Begins the next run at a position."""
        if not self._queue.begins_at(position):
            self.close()
            self._queue.seek(position)
        self._rows.clear()  # other records may be known to be bad by now
        self._first_step = position.step - self.next_run
        self._queue.ended = False  # the reader may have a batch now

    def close(self) -> None:
        """Drops the batches that were read; the next `seek` moves the reader."""
        self._queue.clear()
        self._rows.clear()
        self._bad.samples.clear()  # the same numbers may now belong to other samples

    def is_at(self, run: int, position: RecordPosition) -> bool:
        """Returns whether a run begins at a position."""
        return self._first_step + run == position.step and self._queue.begins_at(position)

    def forget(self, run: int) -> None:
        """Drops the batches of a run and of all earlier runs."""
        step = self._first_step + run
        self._queue.forget(step)
        for old in [old for old in list(self._rows) if old <= step]:
            self._rows.pop(old, None)  # another thread may have closed the supply

    # The graph

    def bind_first_record(self) -> FedGraph:
        """Binds the graph's function to the first record, and returns the graph.

        Raises:
            StopIteration: If there is no record.
            ReadError: If the reading of the first record raised.
            TypeError: If the graph's function can't be called with these records.
            ValueError: If the first batch is empty, or ``draw`` lacks the records' indices.
        """
        first = self._queue.read(self._queue.step)
        if not first.records:
            raise ValueError(
                "the dataset yields an empty list instead of the records of a batch. Filter "
                "empty lists out"
            )
        graph, schema = self._bind(first.records[0], self._further())
        if graph.draws and self._numbers is None:
            raise ValueError(
                "draw requires the index of each record in the stream, which an operation of "
                "grain.DataLoader does not know. Use DALITransform or DALIDataLoader, or draw "
                "the numbers by RandomInputs"
            )
        self.inputs = RecordInputs(graph, schema)
        return graph

    def _further(self) -> Iterator[Any]:
        """Yields the records of the first batches, which stay in the queue."""
        count, first = 0, self._queue.step
        with contextlib.suppress(StopIteration, ReadError):
            for step in itertools.count(first):
                if step > first + _LOOK_AHEAD and count > _MOST_EXAMPLES:
                    break
                records = self._queue.read(step).records
                count += len(records)
                yield from records

    # Rows

    def has(self, run: int) -> bool:
        """Returns whether the stream has a batch for a run."""
        try:
            self._queue.read(self._first_step + run)
        except StopIteration:
            return False
        return True

    def rows(self, run: int, part: int) -> RecordRows:
        """Returns the rows of a pipeline in a run."""
        self.next_run = max(self.next_run, run + 1)
        step = self._first_step + run
        rows = self._rows.get(step)
        if rows is None:
            rows = self._rows[step] = self._prepare(step, self._queue.read(step))
        return rows[part]

    def whole_rows(self) -> list[RecordRows]:
        """Returns the rows of each pipeline for the next batch, padded to a full batch."""
        step = self._queue.step
        return self._prepare(step, self._queue.read(step).padded(self._rows_all))

    def alone(self, samples: Indices) -> RecordRows:
        """Returns rows of some samples without stand-ins, to find out which samples fail alone."""
        records = [self._record(sample) for sample in samples.tolist()]
        batch = RecordBatch(records, None, lambda row: f"record {row}")
        prepared = _Prepared(
            batch, records, samples, self._numbers_of(samples), *self.inputs.columns(records)
        )
        return RecordRows(self.inputs, self.seed, prepared, 0, len(records))

    def _prepare(self, step: int, batch: RecordBatch) -> list[RecordRows]:
        """Returns the rows of a batch for each pipeline, with stand-ins for bad records.

        `FedEngine` decides whether the batch is delivered.

        Args:
            step: The step of the batch.
            batch: The batch, possibly padded.

        Raises:
            NoStandIn: If no record can replace the bad records.
        """
        records = list(batch.records)
        rows = np.arange(len(records), dtype=np.int64)
        last = len(self._queue.read(step).records) - 1  # the row that `padded` repeats
        samples = step * self._rows_all + np.minimum(rows, last)
        columns, looks, errors = self.inputs.columns(records)
        if self._bad.samples or self._bad.records:
            all_valid = not errors
            for row, sample in enumerate(samples.tolist()):
                if row in errors:
                    continue
                row_columns = (
                    (columns, row)
                    if all_valid
                    else (self.inputs.columns(records[row : row + 1])[0], 0)
                )
                if reason := self._known_error(sample, *row_columns):
                    errors[row] = reason
        if errors:
            chosen = choose(
                sorted(errors),
                lambda row: self._candidates(step, row, len(records)),
                lambda sample: self._good_record(sample, step, errors),
            )
            if chosen is None:
                raise NoStandIn([(_name_of(batch, row), errors[row]) for row in sorted(errors)])
            for row, (sample, (record,)) in chosen.items():
                records[row], samples[row] = record, sample
            columns, looks, _ = self.inputs.columns(records)
        prepared = _Prepared(
            batch, records, samples, self._numbers_of(samples), columns, looks, errors
        )

        def rows_of(first: int, end: int) -> RecordRows:
            return RecordRows(self.inputs, self.seed, prepared, first, end)

        if self._pipelines == 1 or len(records) <= self._rows_each:
            return [rows_of(0, len(records))] * self._pipelines
        firsts = range(0, self._rows_all, self._rows_each)
        return [rows_of(first, first + self._rows_each) for first in firsts]

    # Samples

    def _record(self, sample: int) -> Any:
        """Returns the record of a sample."""
        step, row = divmod(sample, self._rows_all)
        return self._queue.read(step).records[row]

    def _numbers_of(self, samples: Indices) -> NDArray[np.int64] | None:
        """Returns the index in the stream of each sample, int64 [samples]; None if unknown."""
        if self._numbers is None:
            return None
        steps, rows = np.divmod(samples, self._rows_all)
        numbers: NDArray[np.int64] = steps * self._numbers.per_step + self._numbers.first[rows]
        return numbers

    def _candidates(self, step: int, row: int, count: int) -> Iterator[int]:
        """Yields the samples that may stand in for a row, of its batch and of later batches.

        Earlier batches are left out, since a resumed run has not read them.

        Args:
            step: The step of the batch.
            row: The row.
            count: The number of rows of the batch that are candidates; 0 for later batches only.
        """
        yield from (step * self._rows_all + row for row in nearest(row, count))
        with contextlib.suppress(StopIteration, ReadError):
            for later in range(step + 1, step + 1 + _LOOK_AHEAD):
                first = later * self._rows_all
                yield from range(first, first + len(self._queue.read(later).records))

    def _good_record(
        self, sample: int, step: int, errors: Mapping[int, Exception]
    ) -> tuple[Any] | None:
        """Returns the record of a sample, as a tuple of length 1; None if the record is bad.

        Args:
            sample: The number of the sample.
            step: The step of the batch that needs a stand-in.
            errors: The errors of the rows of this batch.
        """
        sample_step, row = divmod(sample, self._rows_all)
        record = self._queue.read(sample_step).records[row]
        if sample_step == step:
            return None if row in errors else (record,)
        columns, _, unfit = self.inputs.columns([record])
        bad = unfit or self._known_error(sample, columns, 0)
        return None if bad else (record,)

    def _known_error(
        self, sample: int, columns: Mapping[str, Any], row: int
    ) -> UnusableRecord | None:
        """Returns the error if the sample, or a record with equal values, failed before."""
        reason = self._bad.samples.get(sample)
        if reason is None and self._bad.records:
            reason = self._bad.record_error(*self.inputs.digest(columns, row))
        return reason

    def remember(self, sample: int, reason: UnusableRecord, replace: bool) -> None:
        """Remembers that DALI can't process a sample; see `RowSupply`.

        If a file can't be read or decoded, the sample's record is remembered, too.
        """
        if reason.failure.is_permanent:
            columns, _, _ = self.inputs.columns([self._record(sample)])
            key, digest = self.inputs.digest(columns, 0)
            self._bad.records[key] = digest(), reason
        if replace:
            self._bad.samples[sample] = reason

    def stand_ins(self, run: int) -> Iterator[int]:
        """Yields samples that may replace bad samples of a run, except samples known to be bad."""
        step = self._first_step + run
        count = len(self._queue.read(step).records)
        candidates = [step * self._rows_all], self._candidates(step, 0, count)
        for sample in itertools.chain(*candidates):
            if sample not in self._bad.samples:
                yield sample

    def probes(self, run: int) -> Iterator[int]:
        """Yields samples of the batches after a run."""
        return self._candidates(self._first_step + run, 0, 0)
