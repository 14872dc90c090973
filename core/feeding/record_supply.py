"""`RecordSupply`: the records of a stream that is read in order, for each run of pipelines."""

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
from ..formats.image_size import Size, look_at_input
from ..order.shuffle import Indices
from ..pipeline.calls import calls
from ..random.draw import DrawRows
from ..random.hashing import fold
from .graph import FedGraph
from .record_reader import Numbers, ReadError, RecordBatch, RecordPosition, RecordReader
from .schema import Schema, described, values_of
from .stand_ins import BadSamples, NoStandIn, UnusableRecord, choose, digest_of, nearest

_LOOK_AHEAD = 8  # the number of later batches to search for a good record
_SEED = 0  # any seed, for `BadSamples`: `RecordSupply` forgets all samples when it moves

_MOST_EXAMPLES = 64  # the fewest records to search for a list with elements

# Returns the graph and the schema of the records, given the first record and the next records.
Bind = Callable[[Any, Iterable[Any]], tuple[FedGraph, Schema]]


@dataclasses.dataclass
class _Prepared:
    """A batch's records, with replacements for bad records, and the inputs of the graph.

    Attributes:
        batch: The batch as it was read.
        records: The record in each row, stand-ins included.
        samples: The number of the sample in each row.
        numbers: The index in the stream of each sample, int64 [rows]; None if it is unknown.
        errors: The error of each row whose own record can't be used.
        columns: The values of inputs of the graph, by input.
        sizes: The (height, width) of each image, by input; None if the header does not tell.
    """

    batch: RecordBatch
    records: Sequence[Any]
    samples: Indices
    numbers: NDArray[np.int64] | None
    errors: dict[int, Exception]
    columns: dict[str, Any]
    sizes: dict[str, list[Size | None]]


@dataclasses.dataclass
class _Read:
    """A batch that was read, and is stored until `RecordSupply.forget` drops it."""

    batch: RecordBatch
    rows: list[RecordRows] | None = None  # the rows of each pipeline; None until prepared


class RecordRows:
    """The rows of a batch that one pipeline processes; see `RowBatch`.

    Args:
        supply: The supply of the batch.
        prepared: The whole batch.
        first: The first row of the pipeline.
        last: The row after the last row of the pipeline.
    """

    def __init__(self, supply: RecordSupply, prepared: _Prepared, first: int, last: int):
        self._supply, self._prepared = supply, prepared
        self._first, self._last = first, last
        valid = prepared.batch.valid
        self.valid = np.ones(last - first, bool) if valid is None else valid[first:last]
        self.samples = prepared.samples[first:last]

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Returns the error of each row whose record can't be used."""
        errors, first, last = self._prepared.errors, self._first, self._last
        if not errors:  # nearly always; next() gets this property several times
            return {}
        return {row - first: error for row, error in errors.items() if first <= row < last}

    def inputs(self, name: str) -> Any:
        """Returns the values of an input of the graph, one per row, with the input's layout.

        The result is an array [rows, ...], or a list of arrays or of tensors, which
        ``fn.external_source`` takes.
        """
        values, field = self._arrays(name), self._supply.fields[name]
        if not field.dali_layout:
            return values
        return [TensorCPU(array, field.dali_layout) for array in values]

    def _arrays(self, name: str) -> Any:
        """Returns the values of an input of the graph, one per row, without a layout."""
        columns = self._prepared.columns
        if name not in columns:  # the operators of the graph could not be read
            columns[name] = self._supply.column(name, self._prepared.records)[0]
        return self._rows_of(columns[name])

    def column(self, name: str) -> list[Any]:
        """Returns the values of a record key that bypasses the graph, one per row."""
        return values_of(self._rows_of(self._prepared.records), name, "", self._first)

    def draw_rows(self) -> DrawRows:
        """Returns the `DrawRows`, from which draws compute the random numbers of the rows."""
        numbers = self._prepared.numbers
        row_numbers = None if numbers is None else self._rows_of(numbers)
        return DrawRows(fold(self._supply.seed, 0, row_numbers), self._sizes, self._refuse)

    def name(self, row: int) -> str:
        """Returns the name of a row's own record, and a short text of the record's values."""
        batch, row = self._prepared.batch, self._first + row
        return f"{batch.name(row)} ({described(batch.records[row])})"

    def _rows_of(self, values: Any) -> Any:
        """Returns the values of the pipeline's rows, given the values of all rows of the batch."""
        if self._last - self._first == len(values):
            return values
        return values[self._first : self._last]

    def _refuse(self, row: int, error: Exception) -> None:
        """Sets the error of a row whose record can't be augmented, unless an error is set."""
        self._prepared.errors.setdefault(self._first + row, error)

    def _sizes(self, name: str) -> NDArray[np.int32]:
        """Returns heights and widths of an input's images, int32 [rows, 2]; see `DrawRows`."""
        field = self._supply.fields[name]
        if field.image_layout:
            return field.image_sizes(self._arrays(name))
        sizes = self._prepared.sizes
        if name not in sizes:
            sizes[name] = self._supply.column(name, self._prepared.records)[1]
        return np.array([size or (-1, -1) for size in self._rows_of(sizes[name])], np.int32)


class RecordSupply:
    """Supplies the records of a stream for each run of the pipelines; see `RowSupply`.

    Batches that were read are kept until the engine forgets them, so that new pipelines read them
    again. The sample in row ``r`` of step ``s`` has the number ``s * rows of this process + r``.

    Args:
        reader: Reads the batches; it must be at the start of the stream.
        pipelines: The number of pipelines.
        rows: The number of rows of each pipeline's batch.
        numbers: The index in the stream of each row; None if it is unknown.
        seed: The seed of ``draw``.
        bind: Binds the graph's function to records, given the first record.

    Attributes:
        next_run: The run that DALI asks for next.
        seed: The seed of ``draw``; `StreamEngine` changes it.
        graph: The graph; None until a record was read.
        fields: The kinds of the graph's inputs, by name; empty until a record was read.
        ended: Whether the reader had no further batch, since the last `seek`.
    """

    def __init__(
        self,
        reader: RecordReader,
        pipelines: int,
        rows: int,
        numbers: Numbers | None,
        seed: int,
        bind: Bind,
    ):
        self.next_run = 0
        self.seed = seed
        self.graph: FedGraph | None = None
        self.fields: Mapping[str, Field] = {}
        self._schema: Schema | None = None
        self._column_numbers: dict[str, int] = {}
        self._reader = reader
        self._pipelines, self._rows_each = pipelines, rows
        self._rows_all = pipelines * rows
        self._numbers = numbers
        self._bind = bind
        self._batches = collections.deque[_Read]()
        self._first = 0  # the run of the queue's first batch
        # The position of that run; None if the reader is elsewhere.
        self._position: RecordPosition | None = RecordPosition()
        # Kept until its batch is due. The reader raises it once, but all pipelines must get it.
        self._error: ReadError | None = None
        self.ended = False
        self._bad_samples = BadSamples()
        self._has_bad = False  # whether a bad sample or record was ever remembered

    # Positions

    def seek(self, position: RecordPosition) -> None:
        """Begins the next run at a position."""
        if not self._begins_at(position):
            self._clear(None)
            self._reader.seek(position)
            self._position = position
        for read in self._batches:
            read.rows = None  # since other records may be known to be bad by now
        self._first = self.next_run
        self.ended = False  # the reader may have a batch now

    def moved_to(self, position: RecordPosition) -> None:
        """Drops the batches, after the caller has moved the reader to a position."""
        self._clear(position)

    def close(self) -> None:
        """Drops the batches that were read; the next `seek` moves the reader."""
        self._clear(None)

    def _clear(self, position: RecordPosition | None) -> None:
        self._position = None  # first, so that an interrupted call leaves the position unknown
        self._batches.clear()
        self._error = None
        self.ended = False
        if self._has_bad:
            self._bad_samples.forget_samples()
        self._position = position

    def _begins_at(self, position: RecordPosition) -> bool:
        current = self._position
        return (
            current is not None
            and current.step == position.step
            and current.after is position.after
        )

    def is_at(self, run: int, position: RecordPosition) -> bool:
        """Returns whether a run begins at a position."""
        return run == self._first and self._begins_at(position)

    def forget(self, run: int) -> None:
        """Drops the batches of a run and of all earlier runs."""
        while self._first <= run and self._batches and self._position is not None:
            after = self._batches.popleft().batch.after
            self._first += 1
            self._position = RecordPosition(self._position.step + 1, after)

    def pass_over(self, error: ReadError) -> None:
        """Begins the next run after a record whose reading raised."""
        self._error = None
        if self._position is not None:
            self._position = RecordPosition(self._position.step, error.after)

    # Reading

    def learn(self) -> FedGraph:
        """Binds the graph's function to the first record, and returns the graph.

        Raises:
            StopIteration: If there is no record.
            ReadError: If the reading of the first record raised.
            TypeError: If the graph's function can't be called with these records.
            ValueError: If the first batch is empty, or ``draw`` lacks the records' indices.
        """
        if self.graph is None:
            first = self._read(0).batch
            if not first.records:
                raise ValueError(
                    "the dataset yields an empty list instead of the records of a batch. Filter "
                    "empty lists out"
                )
            graph, self._schema = self._bind(first.records[0], self._further())
            if graph.draws and self._numbers is None:
                raise ValueError(
                    "draw requires the index of each record in the stream, which an operation of "
                    "grain.DataLoader does not know. Use DALITransform or DALIDataLoader, or draw "
                    "the numbers by RandomInputs"
                )
            self._column_numbers = {name: k for k, name in enumerate(self._schema.names)}
            self.graph, self.fields = graph, graph.inputs
        return self.graph

    def _further(self) -> Iterator[Any]:
        """Yields records after the first, to the end of a batch; they stay in the queue."""
        count = 0
        with contextlib.suppress(StopIteration, ReadError):
            for place in itertools.count():
                if place > _LOOK_AHEAD and count > _MOST_EXAMPLES:
                    break
                records = self._read(place).batch.records
                count += len(records)
                yield from records

    def check_types(self) -> None:
        """Raises ValueError if the graph uses an input for which DALI has no type."""
        if self.graph is not None and self._schema is not None:
            for name, column in zip(self._schema.names, self._schema.columns):
                if column.field.dtype is None and name in self.graph.used:
                    raise ValueError(column.fault)

    def read_batches(self, position: RecordPosition, count: int) -> int:
        """Reads up to ``count`` batches from a position on; returns the step after the last batch.

        Raises:
            ReadError: If reading raised before the first batch.
        """
        if self._position is None:
            self.seek(position)
        try:
            self._read(count - 1)
        except StopIteration:
            pass
        except ReadError:
            if not self._batches:
                raise
        return position.step + len(self._batches)

    def _read(self, place: int) -> _Read:
        """Returns a batch by its index in the queue; reads it if necessary.

        Raises:
            StopIteration: If the stream ends before the batch.
            ReadError: If the reading of an earlier record raised.
        """
        while len(self._batches) <= place:
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
            self._batches.append(_Read(batch))
        return self._batches[place]

    def batch(self, run: int) -> RecordBatch:
        """Returns the batch of a run as it was read."""
        return self._read(run - self._first).batch

    # Rows

    def has(self, run: int) -> bool:
        """Returns whether the stream has a batch for a run."""
        try:
            self._read(run - self._first)
        except StopIteration:
            return False
        return True

    def rows(self, run: int, part: int) -> RecordRows:
        """Returns the rows of a pipeline in a run."""
        self.next_run = max(self.next_run, run + 1)
        place = run - self._first
        read = self._read(place)
        if read.rows is None:
            read.rows = self._prepare(place, read.batch)
        return read.rows[part]

    def whole_rows(self) -> list[RecordRows]:
        """Returns the rows of each pipeline for the next batch, padded to a full batch."""
        return self._prepare(0, self._read(0).batch.padded(self._rows_all))

    def alone(self, samples: Indices) -> RecordRows:
        """Returns rows of some samples without stand-ins, to find out which samples fail alone."""
        places = [self._place_of(sample) for sample in samples.tolist()]
        records = [self._read(place).batch.records[row] for place, row in places]
        batch = RecordBatch(records, None, lambda row: f"record {row}")
        columns, sizes, errors = self._columns_of(records)
        numbers = self._numbers_of(samples)
        prepared = _Prepared(batch, records, samples, numbers, errors, columns, sizes)
        return RecordRows(self, prepared, 0, len(records))

    def _prepare(self, place: int, batch: RecordBatch) -> list[RecordRows]:
        """Returns the rows of a batch for each pipeline, with stand-ins for bad records.

        `FedEngine` decides whether the batch is delivered.

        Args:
            place: The index of the batch in the queue.
            batch: The batch, possibly padded.

        Raises:
            NoStandIn: If no record can replace the bad records.
        """
        records = list(batch.records)
        rows = np.arange(len(records), dtype=np.int64)
        last = len(self._read(place).batch.records) - 1  # the row that `padded` repeats
        samples = self._base() + place * self._rows_all + np.minimum(rows, last)
        columns, sizes, errors = self._columns_of(records)
        if self._has_bad:
            all_valid = not errors
            for row, sample in enumerate(samples.tolist()):
                if row in errors:
                    continue
                row_columns = (
                    (columns, row)
                    if all_valid
                    else (self._columns_of(records[row : row + 1])[0], 0)
                )
                if reason := self._known_error(sample, *row_columns):
                    errors[row] = reason
        if errors:
            chosen = choose(
                sorted(errors),
                lambda row: self._candidates(place, row, len(records)),
                lambda sample: self._good_record(sample, place, errors),
            )
            if chosen is None:
                rows_of_batch = RecordRows(
                    self,
                    _Prepared(batch, records, samples, None, errors, {}, {}),
                    0,
                    len(records),
                )
                raise NoStandIn([(rows_of_batch.name(row), errors[row]) for row in sorted(errors)])
            for row, (sample, (record,)) in chosen.items():
                records[row], samples[row] = record, sample
            columns, sizes, _ = self._columns_of(records)
        numbers = self._numbers_of(samples)
        prepared = _Prepared(batch, records, samples, numbers, errors, columns, sizes)
        if self._pipelines == 1 or len(records) <= self._rows_each:
            return [RecordRows(self, prepared, 0, len(records))] * self._pipelines
        starts = range(0, self._rows_all, self._rows_each)
        return [RecordRows(self, prepared, first, first + self._rows_each) for first in starts]

    def _columns_of(
        self, records: Sequence[Any]
    ) -> tuple[dict[str, Any], dict[str, list[Size | None]], dict[int, Exception]]:
        """Returns the inputs that the graph uses, the sizes of images, and the errors by row.

        If a record has an error, there are no inputs and no sizes.
        """
        names = sorted(self.graph.used) if self.graph is not None else []
        try:
            columns_and_sizes = {name: self.column(name, records) for name in names}
        except (ValueError, TypeError) as error:
            errors = dict(self._unfit(names, records))
            if not errors:
                raise error
            return {}, {}, errors
        columns = {name: column for name, (column, _) in columns_and_sizes.items()}
        return columns, {name: sizes for name, (_, sizes) in columns_and_sizes.items() if sizes}, {}

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

    def column(
        self, name: str, records: Sequence[Any], first: int = 0
    ) -> tuple[Any, list[Size | None]]:
        """Returns the values of an input of the graph, and the sizes of images.

        Args:
            name: The input.
            records: The records.
            first: The index of the first record in the batch, for errors.

        Returns:
            The value of each record; and the (height, width) of each image, or None if its header
            does not tell. The second list is empty if the graph does not use the input as images.

        Raises:
            ValueError, TypeError: If a record lacks the value, or the value isn't an image.
        """
        schema, graph = self._schema, self.graph
        if schema is None or graph is None:
            raise ValueError("the inputs of the graph are unknown, because no record was read")
        number = self._column_numbers[name]
        try:
            values = schema.column(number, records, first)
        except StopIteration as error:  # which DALI would take for the end
            raise RuntimeError(f"a record raised StopIteration: {error}") from error
        if name not in graph.file_inputs:
            return values, []
        sizes = []
        for place, value in enumerate(values, first):
            look = look_at_input(np.ascontiguousarray(value), graph.file_inputs[name])
            if look.fault:
                label = "/".join(schema.columns[number].path) or "the record"
                raise ValueError(f"{label} in record {place} of the batch: {look.fault}")
            if look.lost:
                graph.lost_numbers.setdefault(name, f"record {place} of the batch {look.lost}")
            sizes.append(look.size)
        return values, sizes

    # Samples

    def _base(self) -> int:
        """Returns the number of the first sample of the first batch in the queue."""
        return (self._position.step if self._position is not None else 0) * self._rows_all

    def _place_of(self, sample: int) -> tuple[int, int]:
        """Returns the index in the queue of a sample's batch, and the row of the sample."""
        return divmod(sample - self._base(), self._rows_all)

    def _numbers_of(self, samples: Indices) -> NDArray[np.int64] | None:
        """Returns the index in the stream of each sample, int64 [samples]; None if unknown."""
        if self._numbers is None:
            return None
        steps, rows = np.divmod(samples, self._rows_all)
        numbers: NDArray[np.int64] = steps * self._numbers.per_step + self._numbers.first[rows]
        return numbers

    def _candidates(self, place: int, row: int, count: int) -> Iterator[int]:
        """Yields the samples that may stand in for a row, of its batch and of later batches.

        Earlier batches are left out, since a resumed run has not read them.

        Args:
            place: The index of the batch in the queue.
            row: The row.
            count: The number of rows of the batch that are candidates; 0 for later batches only.
        """
        base = self._base()
        yield from (base + place * self._rows_all + row for row in nearest(row, count))
        with contextlib.suppress(StopIteration, ReadError):
            for later in range(place + 1, place + 1 + _LOOK_AHEAD):
                first = base + later * self._rows_all
                yield from range(first, first + len(self._read(later).batch.records))

    def _good_record(
        self, sample: int, place: int, errors: Mapping[int, Exception]
    ) -> tuple[Any] | None:
        """Returns the record of a sample, as a tuple of length 1; None if the record is bad.

        Args:
            sample: The number of the sample.
            place: The index in the queue of the batch that needs a stand-in.
            errors: The errors of the rows of this batch.
        """
        batch_place, row = self._place_of(sample)
        record = self._read(batch_place).batch.records[row]
        if batch_place == place:
            return None if row in errors else (record,)
        columns, _, unfit = self._columns_of([record])
        bad = unfit or self._known_error(sample, columns, 0)
        return None if bad else (record,)

    def _known_error(
        self, sample: int, columns: Mapping[str, Any], row: int
    ) -> UnusableRecord | None:
        """Returns the error if the sample, or a record with equal values, failed before."""
        reason = self._bad_samples.sample_error(_SEED, sample)
        if reason is None and self._bad_samples.knows_records():
            reason = self._bad_samples.record_error(*self._digest(columns, row))
        return reason

    def _digest(self, columns: Mapping[str, Any], row: int) -> tuple[Hashable, Callable[[], bytes]]:
        """Returns a quick key of a record's values, and a function that computes their digest."""
        key = tuple(int(values[row].nbytes) for values in columns.values())
        graph = self.graph
        file_inputs = {} if graph is None else graph.file_inputs
        fields = {
            name: Field(
                np.dtype(np.uint8), is_path=name in file_inputs and file_inputs[name].is_path
            )
            for name in columns
        }
        return key, lambda: digest_of(fields, columns, row)

    def remember(self, sample: int, reason: UnusableRecord, replace: bool) -> None:
        """Remembers that DALI can't process a sample; see `RowSupply`.

        If DALI failed to read or decode a file, the sample's record is remembered, too.
        """
        self._has_bad = True
        if reason.failure.reads_file:
            place, row = self._place_of(sample)
            record = self._read(place).batch.records[row]
            key, digest = self._digest(self._columns_of([record])[0], 0)
            self._bad_samples.add_record(key, digest(), reason)
        if replace:
            self._bad_samples.add_sample(_SEED, sample, reason)

    def stand_ins(self, run: int) -> Iterator[int]:
        """Yields samples that may replace bad samples of a run, except samples known to be bad."""
        place = run - self._first
        first = self._base() + place * self._rows_all
        candidates = self._candidates(place, 0, len(self.batch(run).records))
        yield from (
            sample
            for sample in itertools.chain([first], candidates)
            if self._bad_samples.sample_error(_SEED, sample) is None
        )

    def probes(self, run: int) -> Iterator[int]:
        """Yields samples of the batches after a run."""
        return self._candidates(run - self._first, 0, 0)
