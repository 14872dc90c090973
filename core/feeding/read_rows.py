"""Reads the records of a batch in threads, and prepares them for the pipelines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import types
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from ..formats.field import Field
from ..formats.image_size import FileInput, ImageInput, look_at_input
from ..formats.riff import cut_off, file_cut_off
from ..messages.printable import printable_text
from ..order.packing import RowLayout
from ..order.shuffle import Indices
from ..pipeline.failure import with_retries
from ..pipeline.failure_errors import first_names
from ..random.draw import DrawFunction, DrawRows
from ..random.hashing import Bits, fold
from ..sources.record_table import RecordTable
from ..sources.reuse import ReuseCheck
from ..sources.rows import RowSource
from ..sources.source import (
    Source,
    Values,
    checked_columns,
    image_sizes,
    is_of_record,
    read_records,
)
from ..sources.values import leaf
from .stand_ins import BadSamples, NoStandIn, UnusableRecord, choose, digest_of, stand_ins

_PARTS = 4  # the number of parts of a failed read; 2 would need as many reads, of more records
FEWEST = 64  # the fewest records of a task if tasks share a batch, unless the batch has fewer


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """The settings for reading and preparing records, which the reading threads share.

    Attributes:
        source: The record source.
        names: The fields to read.
        order: Returns the record and the epoch of each sample, given the samples' numbers.
        file_inputs: The fields that the graph decodes or reads as files; empty before it is built.
        reuse: Detects reused buffers; None if the source returns new arrays.
        lost_numbers: By field, the first record whose numbers a decoder loses, and how.
        checked_headers: By field, the EXIF orientation of each record whose header was checked and
            is complete.
        bad_samples: The samples and records that DALI could not process before.
        seed, num_samples: The seed, and the number of samples of an epoch.
        sized: The fields of images whose sizes draws have requested.
        draws: The functions of the graph's draws, by name.
        passed: The fields that bypass the graph.
        unfed: The fields that operators of the graph do not take; empty before the graph is built.
        mapped: The fields that functions of maps return; see `mapped_fields`.
        has_random_maps: Whether reads need the keys of the records.
        row_source: The source, if the rows of its batches contain several records.
        turn: A lock of the reading threads while they run Python code. They would take turns
            anyway, but the more threads wait for the GIL, the longer next() waits for it.
    """

    source: Source
    names: tuple[str, ...]
    seed: int
    num_samples: int
    bad_samples: BadSamples
    order: Callable[[Indices], tuple[Indices, Indices]]
    reuse: ReuseCheck | None
    file_inputs: Mapping[str, FileInput]
    lost_numbers: dict[str, str] = dataclasses.field(default_factory=dict)
    checked_headers: dict[str, RecordTable] = dataclasses.field(default_factory=dict)
    sized: set[str] = dataclasses.field(default_factory=set)
    draws: dict[str, DrawFunction] = dataclasses.field(default_factory=dict)
    passed: Collection[str] = ()
    unfed: Collection[str] = ()
    mapped: Collection[str] = ()
    has_random_maps: bool = False
    row_source: RowSource | None = None
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def keys(self, records: Indices, epochs: Indices) -> Bits | None:
        """Returns the key of each record for random maps; None if the source has none.

        The keys are the hashes of draws.
        """
        return fold(self.seed, epochs, records) if self.has_random_maps else None

    @property
    def graph_fields(self) -> list[str]:
        """Returns the fields that are inputs of the graph."""
        return [name for name in self.names if name not in self.passed]

    @property
    def fed_fields(self) -> list[str]:
        """Returns the inputs of the graph that its operators take."""
        return [name for name in self.graph_fields if name not in self.unfed]


@dataclasses.dataclass(frozen=True)
class RunRows:
    """Describes the rows of a run of all pipelines, before their records are read.

    Attributes:
        samples: The number of the sample of the stream in each row, int64 [rows].
        parts: The range of rows of each pipeline.
        global_rows: The index of each row in the global batch, int64 [rows].
        batch: Returns the samples of the whole global batch.
        layouts: The layout of each pipeline's rows if these contain several samples, else empty.
            ``samples`` and ``global_rows`` then have an element for each sample.
    """

    samples: Indices
    parts: Sequence[slice]
    global_rows: Indices
    batch: Callable[[], Indices]
    layouts: Sequence[RowLayout] = ()


@dataclasses.dataclass
class Chunk:
    """The records that a task has read.

    Attributes:
        columns: For each field, the values of the records; None for a record that can't be read.
        errors: The exception of each record that can't be used, by its index in the columns.
        inputs: For each field whose column is a list, a DALI tensor of each value.
        sizes: For each field whose image sizes draws need, heights and widths, int32 [records, 2].
        orientations: For each field of encoded images, EXIF orientations, int32 [records].
    """

    columns: dict[str, Values]
    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)
    inputs: dict[str, list[TensorCPU]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, NDArray[np.int32]] = dataclasses.field(default_factory=dict)
    orientations: dict[str, NDArray[np.int32]] = dataclasses.field(default_factory=dict)


def concatenated(columns: Sequence[Values]) -> Values:
    """Returns the values of a field in several ranges of rows, concatenated.

    Returns:
        An array if all columns are arrays of the same shape per record; otherwise a list. Records
        of two sources of a mixture, for example, may have different shapes.
    """
    arrays = [c for c in columns if isinstance(c, np.ndarray) and c.dtype != object]
    if len(arrays) == len(columns) and len({array.shape[1:] for array in arrays}) == 1:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return list(itertools.chain.from_iterable(columns))


def _cut_off(settings: ReadSettings, chunk: Chunk) -> dict[int, Exception]:
    """Returns an error for each record with a truncated AVI or WAV, by index in the chunk."""
    errors: dict[int, Exception] = {}
    for name, values in chunk.columns.items():
        field, file_input = settings.source.fields[name], settings.file_inputs.get(name)
        if field.dtype != np.uint8 or field.ndim != 1:
            continue
        if isinstance(file_input, ImageInput) and not file_input.is_path:
            continue  # `_not_decodable` rejects all files that are not images
        for index, value in enumerate(values):
            if index in chunk.errors:
                continue
            if fault := file_cut_off(bytes(value)) if field.is_path else cut_off(value):
                errors.setdefault(index, ValueError(f"{name}: {fault}"))
    return errors


def _misfits(settings: ReadSettings, chunk: Chunk) -> dict[int, Exception]:
    """Returns an error for each record with an array that its field's layout does not fit."""
    errors: dict[int, Exception] = {}
    for name in settings.graph_fields:
        field, values = settings.source.fields[name], chunk.columns[name]
        if not field.has_default_layout:
            continue
        if isinstance(values, np.ndarray) and not field.misfit(values.shape[1:]):
            continue
        for index, value in enumerate(values):
            if index not in chunk.errors and (fault := field.misfit(np.shape(value))):
                errors[index] = ValueError(f"{name} {fault}")
    return errors


def _not_decodable(settings: ReadSettings, records: Indices, chunk: Chunk) -> dict[int, Exception]:
    """Returns an error for each record that DALI can't decode, by index in the chunk.

    Adds the EXIF orientations of the records to the chunk.
    """
    errors: dict[int, Exception] = {}
    for name, file_input in list(settings.file_inputs.items()):
        table = None
        has_header = np.zeros(len(records), np.bool_)
        orientations = np.zeros((len(records), 1), np.int32)
        if name not in settings.mapped:
            table = settings.checked_headers.get(name)
            if table is None:
                new_table = RecordTable(len(settings.source), 1)
                table = settings.checked_headers.setdefault(name, new_table)
            has_header, orientations = table.get(records)
        good: list[int] = []
        values = chunk.columns[name]
        for index in np.flatnonzero(~has_header).tolist():
            if index in chunk.errors:
                continue
            value = np.asarray(values[index], order="C")
            look = look_at_input(value, file_input)
            if look.lost:
                record_name = printable_text(settings.source.name(int(records[index])))
                settings.lost_numbers.setdefault(name, f"{record_name} {look.lost}")
            if look.fault:
                errors.setdefault(index, ValueError(f"{name}: {look.fault}"))
            else:
                good.append(index)
                orientations[index] = look.orientation
        if good and table is not None:
            table.put(records[good], orientations[good])
        chunk.orientations[name] = orientations[:, 0]
    return errors


def _sizes_of(
    settings: ReadSettings, records: Indices, name: str, values: Values
) -> NDArray[np.int32]:
    """Returns heights and widths of images: bytes, paths or arrays, int32 [records, 2]."""
    field = settings.source.fields[name]
    if field.image_layout:
        return field.image_sizes(values)
    if settings.file_inputs.get(name, ImageInput()).is_path and not field.is_path:
        return image_sizes(values, are_paths=True)
    return settings.source.sizes(records, name, values)


def _read(source: Source, records: Indices, names: Sequence[str], keys: Bits | None) -> Chunk:
    """Returns a chunk of records; its ``errors`` contain the errors of single records.

    The records are read together. If the read raises, ever smaller parts of them are read, until
    the bad records are found.

    Args:
        source: The source.
        records: The records.
        names: The fields.
        keys: The key of each record; see `read_records`.

    Raises:
        Exception: An error of the machine, the network or a remote file that persists after some
            retries.
    """
    try:
        columns, errors = with_retries(lambda: read_records(source, records, names, keys))
    except Exception as error:
        if not is_of_record(error):
            raise
        if len(records) == 1:
            return Chunk({name: [None] for name in names}, {0: error})
    else:
        return Chunk(checked_columns(source, len(records), names, columns), errors)
    parts = np.array_split(np.arange(len(records)), min(_PARTS, len(records)))
    chunks = [
        _read(source, records[part], names, None if keys is None else keys[part]) for part in parts
    ]
    firsts = itertools.accumulate(map(len, parts), initial=0)
    return Chunk(
        {name: concatenated([chunk.columns[name] for chunk in chunks]) for name in names},
        {
            first + index: error
            for first, chunk in zip(firsts, chunks)
            for index, error in chunk.errors.items()
        },
    )


def _read_checked(settings: ReadSettings, records: Indices, keys: Bits | None) -> Chunk:
    """Returns a chunk of records, with errors for unreadable, damaged and known bad records."""
    chunk = _read(settings.source, records, settings.names, keys)
    _check(settings, records, chunk)
    return chunk


def _check(settings: ReadSettings, records: Indices, chunk: Chunk) -> None:
    """Adds the errors of damaged and known bad records to a chunk."""
    chunk.errors.update(_cut_off(settings, chunk))
    chunk.errors.update(_misfits(settings, chunk))
    chunk.errors.update(_not_decodable(settings, records, chunk))
    if settings.bad_samples.records:
        columns = {name: chunk.columns[name] for name in settings.graph_fields}
        for index, record in enumerate(records.tolist()):
            if index not in chunk.errors:
                digest = functools.partial(digest_of, settings.source.fields, columns, index)
                error = settings.bad_samples.record_error(record, digest)
                if error is not None:
                    chunk.errors[index] = error


def _tensors(values: Values) -> list[TensorCPU]:
    """Returns a DALI tensor for each value, without a copy of contiguous arrays."""
    arrays = [np.asarray(value, order="C") for value in values]
    try:  # faster by a quarter than the buffer protocol
        return [TensorCPU(array.__dlpack__()) for array in arrays]
    except BufferError:  # read-only arrays, or types that only `leaf` converts
        return [TensorCPU(leaf(value)) for value in values]


def _described(dtype: Any, ndim: int) -> str:
    """Formats a dtype and a number of dimensions: "uint8 with 1 dimension"."""
    return f"{np.dtype(dtype)} with {ndim} dimension{'s' * (ndim != 1)}"


def read_chunk(settings: ReadSettings, records: Indices, keys: Bits | None = None) -> Chunk:
    """Returns a chunk of records, with the tensors and image sizes that the graph needs."""
    sized = list(settings.sized)
    chunk = _read(settings.source, records, settings.names, keys)
    with settings.turn:
        _check(settings, records, chunk)
        if settings.reuse is not None:
            settings.reuse.check(records, chunk.columns, keys)
        if not chunk.errors:
            for name in settings.fed_fields:
                if not isinstance(chunk.columns[name], np.ndarray):
                    with contextlib.suppress(TypeError):  # `ReadRows` raises it, with the name
                        chunk.inputs[name] = _tensors(chunk.columns[name])
            chunk.sizes = {
                name: _sizes_of(settings, records, name, chunk.columns[name]) for name in sized
            }
    return chunk


class ReadRows:
    """The records of a run, prepared for the pipelines.

    A reading thread creates this object, so that the training loop does not wait.

    Args:
        settings: The settings of the reading threads.
        run: The rows.
        records, epochs: The record and the epoch of each sample.
        order: The rows in the order of reading.
        chunks: The records that the tasks have read, in the order of ``order``.
        chunk_size: The number of records of a chunk; the last chunk may be smaller.

    Attributes:
        samples: The sample in each row; for a bad record, the sample that stands in for it.
        own_records: The index of each row's own record, even if a stand-in replaces it.
        errors: The error of each row whose record can't be used.
        inputs: For each field that the graph takes, a TensorList for each pipeline.

    Raises:
        NoStandIn: If no record can replace the bad records, and DALI failed to process some of
            them.
        Exception: If no record can replace the bad records, and DALI failed at none of the records:
            the error of the first bad record. A ValueError names all bad records. The batch is not
            lost: the next call reads it again.
    """

    def __init__(
        self,
        settings: ReadSettings,
        run: RunRows,
        records: Indices,
        epochs: Indices,
        order: Indices,
        chunks: Sequence[Chunk],
        chunk_size: int,
    ):
        self.samples, self.own_records = run.samples, records
        self._own_samples = run.samples
        self._records = records  # with the records of stand-ins
        self.errors: dict[int, Exception] = {}
        self._settings, self._order, self._parts = settings, order, run.parts
        self._layouts = run.layouts
        self._epochs = epochs
        self._chunks = chunks
        self._columns: dict[str, Values] = {}
        self._kept_indices: list[int] | None = None
        for number, chunk in enumerate(self._chunks):
            for index, error in chunk.errors.items():
                self.errors[int(order[number * chunk_size + index])] = error
        if settings.bad_samples.samples:
            for row, sample in enumerate(run.samples.tolist()):
                error_before = settings.bad_samples.samples.get((settings.seed, sample))
                if error_before is not None:
                    self.errors.setdefault(row, error_before)
        if self.errors:
            self._replace(run.batch().tolist(), run.global_rows.tolist())
        # Not cached_property, whose lock (before Python 3.12) a fork could copy locked.
        self._draw_rows: DrawRows | None = None
        self.inputs = {name: self._as_inputs(name) for name in settings.fed_fields}
        for name in settings.passed:
            self.column(name)
        self._drawn = {
            name: self._draw(function) for name, function in list(settings.draws.items())
        }
        self._row_values: dict[int, tuple[bytes, dict[str, NDArray[Any]]]] = {}
        for part in range(len(self._layouts)):
            self.row_values(part)  # takes milliseconds, for which next() need not wait

    def row_values(self, part: int) -> dict[str, NDArray[Any]]:
        """Returns the `RowSource.row_values` of a pipeline; computes them if errors were added."""
        source, rows = self._settings.row_source, self._parts[part]
        if source is None:
            return {}
        valid = np.ones(rows.stop - rows.start, np.bool_)
        valid[[row - rows.start for row in list(self.errors) if rows.start <= row < rows.stop]] = 0
        key, values = self._row_values.get(part, (b"", {}))
        if key != valid.tobytes():
            values = source.row_values(self._layouts[part], self.own_records[rows], valid)
            self._row_values[part] = valid.tobytes(), values
        return values

    def name(self, row: int) -> str:
        """Returns the name of a row's own record, or its number if the source has no names.

        The paths of files that the graph decodes follow in parentheses.
        """
        record = int(self.own_records[row])
        try:
            name = self._settings.source.name(record)
        except Exception:
            name = f"record {record}"
        paths = ", ".join(self._own_paths(row))
        return f"{name} ({paths})" if paths else name

    def _own_paths(self, row: int) -> Iterator[str]:
        """Yields the fields of a row's own record that are paths of files to decode."""
        settings = self._settings
        for field, file_input in list(settings.file_inputs.items()):
            if not file_input.is_path or settings.source.fields[field].is_path:
                continue  # the source's name is the path already
            value = self._in_row_order([chunk.columns[field] for chunk in self._chunks])[row]
            if value is not None:  # None if the record can't be read
                yield os.fsdecode(bytes(value).partition(b"\0")[0])

    def _indices_read(self) -> list[int]:
        """Returns the index of each row in the order of reading."""
        if self._kept_indices is None:
            indices: list[int] = np.argsort(self._order).tolist()
            self._kept_indices = indices
        return self._kept_indices

    def column(self, name: str) -> Values:
        """Returns the values of a field, one for each row."""
        if name not in self._columns:
            parts = [chunk.columns[name] for chunk in self._chunks]
            self._columns[name] = self._in_row_order(parts)
        return self._columns[name]

    def drawn(self, name: str, function: DrawFunction, part: int) -> Sequence[NDArray[Any]]:
        """Returns the outputs of a draw for a pipeline.

        From now on, the reading threads compute the draw.
        """
        if name not in self._drawn:
            self._drawn[name] = self._draw(function)
        self._settings.draws[name] = function  # the first call has checked it
        return self._drawn[name][part]

    def _draw(self, function: DrawFunction) -> list[list[NDArray[Any]]]:
        """Returns the outputs of a draw for each pipeline."""
        if self._draw_rows is None:
            self._draw_rows = DrawRows(
                fold(self._settings.seed, self._epochs, self._records),
                self._sizes,
                self._refuse,
                self.column,
                self._orientations,
                own_records=self.own_records,
                replaced=self.samples != self._own_samples,
                layouts=self._layouts,
            )
        arrays = function(self._draw_rows)
        return [[array[rows] for array in arrays] for rows in self._parts]

    def _refuse(self, row: int, error: Exception) -> None:
        """Sets the error of a row whose record can't be augmented, unless the row has an error."""
        self.errors.setdefault(row, error)

    def _sizes(self, name: str) -> NDArray[np.int32]:
        """Returns heights and widths of a field's images, int32 [rows, 2]; see `DrawRows`."""
        self._settings.sized.add(name)  # from now on the reading threads read the sizes
        if not self.errors and all(name in chunk.sizes for chunk in self._chunks):
            return np.asarray(self._in_row_order([chunk.sizes[name] for chunk in self._chunks]))
        return _sizes_of(self._settings, self._records, name, self.column(name))

    def _orientations(self, name: str) -> NDArray[np.int32]:
        """Returns the EXIF orientations of a field's images, int32 [rows]; see `DrawRows`."""
        if not self.errors and all(name in chunk.orientations for chunk in self._chunks):
            parts = [chunk.orientations[name] for chunk in self._chunks]
            return np.asarray(self._in_row_order(parts))
        file_input = self._settings.file_inputs.get(name, ImageInput())
        looks = [
            look_at_input(np.asarray(value, order="C"), file_input) for value in self.column(name)
        ]
        return np.array([look.orientation for look in looks], np.int32)

    def _as_inputs(self, name: str) -> list[TensorListCPU]:
        """Returns the values of a field as a TensorList for each pipeline.

        Raises:
            TypeError: If a value has another dtype or number of dimensions than the field.
        """
        field = self._settings.source.fields[name]
        try:
            inputs = self._as_tensors(name)
        except (TypeError, ValueError, RuntimeError) as error:
            # The values differ from each other, or DALI lacks their type.
            raise (self._other_kind(name, field) or error) from error
        for tensors in inputs:
            kind = types.to_numpy_type(tensors.dtype), len(tensors[0].shape())
            if kind != (field.dtype, field.ndim):
                raise self._other_kind(name, field) or TypeError(f"{name!r} is {kind}, not {field}")
        return inputs

    def _other_kind(self, name: str, field: Field) -> TypeError | None:
        """Returns an error about the first value that is not of the field's kind, or None."""
        for row, value in enumerate(self.column(name)):
            try:
                array = leaf(value)
            except TypeError:
                array = np.asarray(value)
            if (array.dtype, array.ndim) != (field.dtype, field.ndim):
                return TypeError(
                    f"{type(self._settings.source).__name__}.read() returned {name!r} of "
                    f"{self.name(row)} as {_described(array.dtype, array.ndim)}, but the source's "
                    f"`fields` declare {_described(field.dtype, field.ndim)}. Convert the values, "
                    f"or declare their own kind: Field(dtype, ndim)"
                )
        return None

    def _as_tensors(self, name: str) -> list[TensorListCPU]:
        if not self.errors and all(name in chunk.inputs for chunk in self._chunks):
            values: Any = self._in_row_order([chunk.inputs[name] for chunk in self._chunks])
        else:
            values = self.column(name)
            if not isinstance(values, np.ndarray):
                values = _tensors(values)
        layout = self._settings.source.fields[name].dali_layout
        if isinstance(values, np.ndarray):
            array = np.asarray(values, order="C")
            return [TensorListCPU(array[rows], layout) for rows in self._parts]
        make: Any = TensorListCPU  # the stub lacks `contiguous`
        # Without a copy.
        return [make(values[rows], layout, contiguous=False) for rows in self._parts]

    def _in_row_order(self, values: Sequence[Values]) -> Values:
        """Returns the values that the tasks have read, concatenated in the order of the rows."""
        together = concatenated(values)
        if isinstance(together, np.ndarray):
            rows = np.empty_like(together)
            rows[self._order] = together
            return rows
        return list(map(together.__getitem__, self._indices_read()))

    def _replace(self, batch: Sequence[int], global_rows: Sequence[int]) -> None:
        """Replaces each bad record by the nearest good record of the global batch.

        If the global batch has no good record, records of other batches are tried; see `stand_ins`.
        Rows of other processes may be read, too, so that the stand-ins do not depend on how rows
        are distributed. `FedEngine` decides whether the batch is delivered.
        """
        settings = self._settings
        row_of = {int(sample): row for row, sample in enumerate(self.samples)}
        read: dict[int, Chunk] = {}  # the records of samples in no row

        def values_of(sample: int) -> tuple[Mapping[str, Values], int] | None:
            """Returns the columns that contain a sample, and its index in them; None if bad."""
            row = row_of.get(sample)
            if row is not None:
                return None if row in self.errors else (columns, row)
            if (settings.seed, sample) in settings.bad_samples.samples:
                return None
            if sample not in read:
                records, epochs = settings.order(np.array([sample], np.int64))
                read[sample] = _read_checked(settings, records, settings.keys(records, epochs))
            return None if read[sample].errors else (read[sample].columns, 0)

        columns = {name: list(self.column(name)) for name in settings.names}
        samples = self.samples.copy()
        chosen = choose(
            sorted(self.errors),
            lambda row: stand_ins(batch, global_rows[row], settings.num_samples),
            values_of,
        )
        if chosen is None:
            bad = [(self.name(row), self.errors[row]) for row in sorted(self.errors)]
            first = bad[0][1]
            if any(isinstance(error, UnusableRecord) for _, error in bad):
                raise NoStandIn(bad)
            if not isinstance(first, ValueError):  # e.g. an OSError, which may disappear
                raise first
            raise ValueError(
                f"{first_names([name for name, _ in bad])} can't be read, and neither can the "
                f"records that were tried in their place. {first}"
            ) from first
        for row, (sample, (values, index)) in chosen.items():
            samples[row] = sample
            for name in settings.names:
                columns[name][row] = values[name][index]
        self._columns.update(columns)
        self.samples = samples
        self._records, self._epochs = settings.order(samples)
