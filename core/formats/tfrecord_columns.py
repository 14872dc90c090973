"""Builds indexes of TFRecords: locates features, and selects wanted fields from their ranges."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable
from ..remote.storage import Storage
from . import example
from .buffered_reader import BufferedReader
from .byte_files import open_files
from .each_file import each_file
from .file_columns import (
    ABSENT,
    EMPTY,
    MOST_COLUMNS,
    PRESENT,
    Column,
    ColumnRows,
    FileColumns,
    concat_tables,
    counts_of,
    head_sizes,
    item_offsets,
)
from .index import Index
from .progress import counted
from .tfrecord_headers import HEADER, Intact, is_intact_or_large, records
from .tfrecord_index import EMPTY as EMPTY_OFFSET
from .tfrecord_index import (
    KINDS,
    MISSING,
    FieldColumn,
    LocatedRecord,
    Wanted,
    about_records,
    add_record,
    check_some_intact,
    features_of,
    missing_feature,
    no_feature,
    with_gaps,
)

_MOST_BYTES = 10  # largest size of a single number


class FeatureRanges(Protocol):
    """Collects the offsets and sizes of a feature in the records of a file.

    Attributes:
        is_odd: Whether the feature gets no column, because its values are irregular.
    """

    is_odd: bool

    def add(self, row: int, feature: example.Feature, take: BufferedReader) -> None:
        """Adds the values of a record.

        Args:
            row: The number of the record in the file.
            feature: The located feature of the record.
            take: Reads the file.
        """
        ...

    def column(self, count: int) -> Column | None:
        """Returns the column of the feature in the file; None if no record has a value.

        Args:
            count: The number of records of the file.
        """
        ...


class _ValueRanges:
    """Collects the ranges of single values, or of lists of numbers; see `FeatureRanges`."""

    def __init__(self) -> None:
        self.kind = 0  # kind of the feature in the first record that has the feature
        self.is_odd = False
        self._rows = ColumnRows()
        self._items = array.array("q")  # the sizes of byte strings

    def add(self, row: int, feature: example.Feature, take: BufferedReader) -> None:
        """Adds the values of a record; see `FeatureRanges.add`."""
        if not feature.kind:
            return
        if not self.kind:
            self.kind = feature.kind
            if feature.kind == example.FLOATS:
                self._rows.values = array.array("d")
        is_list = feature.kind != example.BYTES
        count = len(feature.ranges)
        self.is_odd |= feature.kind not in KINDS
        self.is_odd |= feature.kind != self.kind or bool(feature.loose)
        self.is_odd |= count > 1 and (is_list or not are_adjacent(feature.ranges))
        if self.is_odd:
            return
        offset, size = feature.ranges[0] if feature.ranges else (0, 0)
        if count > 1:
            size = sum(feature.ranges[-1]) - offset
        self._rows.append(row, offset, size, PRESENT if feature.ranges else EMPTY)
        if not is_list:
            self._rows.counts.append(count)
            self._items.extend(size for _, size in feature.ranges)
        if is_list and 0 < size <= _MOST_BYTES:
            try:
                numbers = example.numbers(take, feature)
            except ValueError:  # a number is cut off
                self.is_odd = True
                return
            if len(numbers) == 1:
                self._rows.values.extend(numbers)

    def column(self, count: int) -> Column | None:
        """Returns the column of the feature, with ``count`` rows; see `FeatureRanges.column`."""
        if not self.kind:
            return None
        num_single = len(self._rows.values)
        is_number = self.kind != example.BYTES and num_single == len(self._rows)
        dtype = np.float32 if self.kind == example.FLOATS else np.int64
        items = None
        if all(number == 1 for number in self._rows.counts):
            self._rows.counts = array.array("q")  # the lengths of lists
        else:
            items = np.array(self._items, np.int64)
        value_dtype = dtype if is_number else None
        return self._rows.column(count, self.kind, value_dtype, num_single == 0, items)


def are_adjacent(ranges: Sequence[tuple[int, int]]) -> bool:
    """Returns whether byte strings follow one another, with protobuf's shortest heads between them.

    Args:
        ranges: The offset and the size of each byte string.
    """
    array = np.array(ranges, np.int64).reshape(-1, 2)
    starts = array[:-1].sum(axis=1) + head_sizes(array[1:, 1])
    return np.array_equal(starts, array[1:, 0])


def tfrecord_columns(
    paths: Sequence[str],
    storage: Storage,
    names: Collection[bytes] | None = None,
    new_ranges: Callable[[], FeatureRanges] = _ValueRanges,
    intact: Intact | None = is_intact_or_large,
) -> tuple[list[int], FileColumns]:
    """Reads TFRecord files in several threads; returns their sizes in bytes, and their columns.

    Args:
        paths: The files.
        storage: Access to remote files.
        names: The wanted features; None: all.
        new_ranges: Creates the collector of the ranges of a feature in a file.
        intact: Verifies a record; None: records are not verified.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is damaged, or a record is not a tf.train.Example.
    """
    sizes, tables = each_file(
        paths,
        "TFRecord files",
        storage,
        lambda take, advance: _columns(take, names, new_ranges, intact, advance),
    )
    return sizes, concat_tables(tables, MOST_COLUMNS if names is None else len(names))


def _columns(
    take: BufferedReader,
    names: Collection[bytes] | None,
    new_ranges: Callable[[], FeatureRanges],
    intact: Intact | None,
    advance: Any,
) -> FileColumns:
    """Returns the columns of one file; see `tfrecord_columns`."""
    file, starts = take.file, array.array("q")
    by_name: dict[bytes, FeatureRanges] = {}
    damaged = array.array("b")
    walk = counted(records(take, file.size, file.shown), file.size, advance)
    for number, (at, size) in enumerate(walk):
        label = f"{file.shown}: record {number}"
        damaged.append(intact is not None and not intact(take, at, size))
        record = LocatedRecord(label, take, at, size)
        found = {} if damaged[-1] else features_of(record, names)
        for name, feature in found.items():
            ranges = by_name.get(name)
            if ranges is None:
                ranges = by_name[name] = new_ranges()
            ranges.add(number, feature, take)
        starts.append(at)
    rows = len(starts)
    regular = {_text(name): p.column(rows) for name, p in by_name.items() if not p.is_odd}
    return FileColumns(
        np.array([0, rows], np.int64),
        np.array(starts, np.int64),
        np.zeros(rows, np.bool_),
        np.array(damaged, np.bool_),
        {name: column for name, column in regular.items() if column is not None},
        {_text(name) for name, ranges in by_name.items() if ranges.is_odd},
    )


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


def index_records(paths: Sequence[str], wanted: Wanted) -> Index:
    """Reads TFRecord files, and returns their index; see `dalijax.core.formats.index_checks`.

    Args:
        paths: The files.
        wanted: The wanted features.

    Raises:
        OSError: If a file can't be read.
        MissingFeatureError: If a record lacks a feature without a default.
        ValueError: If a file or every record is damaged, all files are empty, or a feature does not
            fit.
    """
    features = {*wanted.fields.values()}
    sizes, table = tfrecord_columns(paths, wanted.storage, features, intact=wanted.intact)
    return select_records(table, paths, sizes, wanted)


def has_columns(table: FileColumns, wanted: Wanted) -> bool:
    """Returns whether `select_records` can select the index of the wanted features from columns.

    The columns may have been made for other features, or with checksums that are now ignored.
    """
    names = {_text(feature) for feature in wanted.fields.values()}
    return table.knows(names) and (wanted.verify or not table.damaged.any())


def select_records(
    table: FileColumns, paths: Sequence[str], sizes: Sequence[int], wanted: Wanted
) -> Index:
    """Returns the index of the wanted features, given the columns of files.

    Records with a wrong checksum are not parsed. The index contains 0 for their values.

    Args:
        table: The columns of the files, which have the wanted features; see `has_columns`. Records
            are parsed again if a feature has no column.
        paths: The files.
        sizes: The sizes of the files in bytes.
        wanted: The wanted features.

    Raises:
        OSError: If a file can't be read.
        MissingFeatureError: If a record lacks a feature without a default.
        ValueError: If all files are empty, all records are damaged, or a feature does not fit.
    """
    if not len(table):
        raise ValueError(f"{', '.join(map(printable, paths[:3]))} has no records")
    check_some_intact(paths, table.damaged)
    columns = wanted.columns()
    arrays = {"start": np.asarray(table.starts, np.int64), "damaged": table.damaged}
    for result in columns:
        arrays |= _filled(result, table, paths, wanted)
    return Index(about_records(paths, sizes, table.first_rows.tolist(), arrays, columns), arrays)


def _filled(
    result: FieldColumn, table: FileColumns, paths: Sequence[str], wanted: Wanted
) -> dict[str, NDArray[Any]]:
    """Fills the column of a field; returns its arrays of the index.

    Raises the errors of `select_records`.

    Args:
        result: The column of the field, without records.
        table: The columns of the files, which have an intact record.
        paths: The files.
        wanted: The wanted features.
    """
    intact, storage = ~table.damaged, wanted.storage
    first, name = int(np.argmax(intact)), _text(result.feature)
    column = table.columns.get(name)
    if column is None:
        if not table.knows({name}):
            return _parsed(result, table, paths, storage)
        record = _record(table, first, paths, storage)
        if result.is_required:
            raise missing_feature(record, result, is_first=True)
        raise no_feature(result.feature, set(features_of(record, None)))
    row, is_single = int(np.argmax(column.states != ABSENT)), column.values is not None
    try:
        if not is_single and not column.has_list and result.name not in wanted.kinds:
            # Whether numbers are a list depends on the first record.
            take = _record(table, row, paths, storage).take
            place = int(column.offsets[row]), int(column.sizes[row])
            numbers = example.numbers(take, example.Feature(column.kind, [place], []))
            is_single = len(numbers) == 1
        result.set_kind(column.kind, is_single)
    except ValueError as error:
        raise ValueError(f"{name!r} of {_label(table, row, paths)} {error}") from error
    # These raise errors: a record has several numbers, or not one byte string.
    has_several = column.counts is not None and result.number is None
    if has_several or (result.kind == "value" and column.values is None):
        return _parsed(result, table, paths, storage)
    if result.number is not None:
        _number(result, column)
        return result.arrays(lambda row: _label(table, row, paths))
    absent = (column.states == ABSENT) & intact
    if absent.any() and result.is_required:
        row = int(np.argmax(absent))
        record = _record(table, row, paths, storage)
        raise missing_feature(record, result, is_first=row == first)
    if result.kind == "value" and column.values is not None:
        values = column.values.astype(np.float64 if column.kind == example.FLOATS else np.int64)
        if absent.any():
            values[absent] = wanted.defaults[result.name]
        result.values = values
    else:
        offsets = np.where(column.states == PRESENT, column.offsets, EMPTY_OFFSET)
        result.offsets = np.where(absent | table.damaged, MISSING, offsets)
        result.sizes = column.sizes
    return result.arrays(lambda row: _label(table, row, paths))


def _number(result: FieldColumn, column: Column) -> None:
    """Sets the rows of a field that is one of several byte strings of each record.

    Args:
        result: The column of the field.
        column: The column of the byte strings.
    """
    result.counts = counts = counts_of(column)
    number = result.number or 0
    rows = np.flatnonzero(counts > number)
    result.offsets, result.sizes = np.full(len(counts), MISSING), np.zeros(len(counts), np.int64)
    if column.items is None:
        result.offsets[rows], result.sizes[rows] = column.offsets[rows], column.sizes[rows]
    else:
        items = (np.cumsum(counts) - counts)[rows] + number
        result.offsets[rows] = item_offsets(column)[items]
        result.sizes[rows] = column.items[items]


def _parsed(
    result: FieldColumn, table: FileColumns, paths: Sequence[str], storage: Storage
) -> dict[str, NDArray[Any]]:
    """Adds all intact records to the column of a field; returns its arrays of the index.

    This parses the records again. It accepts single numbers that are not packed, which a table of
    columns can't contain, and raises the errors of `add_record` about other irregular values.
    """
    rows = np.flatnonzero(~table.damaged).tolist()
    for row, record in zip(rows, _records(table, rows, paths, storage), strict=True):
        add_record(record, [result], is_first=row == rows[0])
    arrays = result.arrays(lambda number: _label(table, rows[number], paths))
    return with_gaps(arrays, table.damaged)


def _file_and_number(table: FileColumns, row: int) -> tuple[int, int]:
    """Returns the number of the file of a row's record, and the record's number in this file."""
    number = int(np.searchsorted(table.first_rows, row, side="right")) - 1
    return number, row - int(table.first_rows[number])


def _label(table: FileColumns, row: int, paths: Sequence[str]) -> str:
    number, record = _file_and_number(table, row)
    return f"{printable(paths[number])}: record {record}"


def _record(table: FileColumns, row: int, paths: Sequence[str], storage: Storage) -> LocatedRecord:
    """Returns the record of a row."""
    return next(_records(table, [row], paths, storage))


def _records(
    table: FileColumns, rows: Iterable[int], paths: Sequence[str], storage: Storage
) -> Iterator[LocatedRecord]:
    """Yields the records of rows in the order of their files."""
    for number, group in itertools.groupby(rows, lambda row: _file_and_number(table, row)[0]):
        (file,) = open_files([paths[number]], storage)
        take = BufferedReader(file)
        for row in group:
            start = int(table.starts[row])
            size = int.from_bytes(take(start - HEADER, 8), "little")
            yield LocatedRecord(_label(table, row, paths), take, start, size)
