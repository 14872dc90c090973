"""Locates the features of TFRecord files, and selects the index of any features from them."""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from ..messages.printable import printable
from ..remote.storage import Storage
from . import example
from .buffered_reader import SMALL_BUFFER, BufferedReader
from .byte_files import open_files
from .each_file import each_file
from .file_columns import ABSENT, EMPTY, PRESENT, Column, ColumnRows, FileColumns, concat_tables
from .index import Index
from .progress import counted
from .tfrecord_headers import Intact, is_intact_or_large, records
from .tfrecord_index import EMPTY as EMPTY_OFFSET
from .tfrecord_index import (
    KINDS,
    MISSING,
    Wanted,
    about_records,
    add_record,
    check_some_intact,
    features_of,
    no_feature,
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

    def add(self, row: int, feature: example.Feature, take: BufferedReader) -> None:
        """Adds the values of a record; see `FeatureRanges.add`."""
        if not feature.kind:
            return
        if not self.kind:
            self.kind = feature.kind
            if feature.kind == example.FLOATS:
                self._rows.values = array.array("d")
        is_list = feature.kind != example.BYTES
        self.is_odd |= feature.kind not in KINDS
        self.is_odd |= feature.kind != self.kind or bool(feature.loose)
        self.is_odd |= len(feature.ranges) != 1 and not (is_list and not feature.ranges)
        if self.is_odd:
            return
        offset, size = feature.ranges[0] if feature.ranges else (0, 0)
        self._rows.append(row, offset, size, PRESENT if feature.ranges else EMPTY)
        if is_list and 0 < size <= _MOST_BYTES:
            numbers = example.numbers(take, feature)
            if len(numbers) == 1:
                self._rows.values.extend(numbers)

    def column(self, count: int) -> Column | None:
        """Returns the column of the feature, with ``count`` rows; see `FeatureRanges.column`."""
        if not self.kind:
            return None
        num_single = len(self._rows.values)
        is_number = self.kind != example.BYTES and num_single == len(self._rows)
        dtype = np.float32 if self.kind == example.FLOATS else np.int64
        return self._rows.column(count, self.kind, dtype if is_number else None, num_single == 0)


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
    return sizes, concat_tables(tables)


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
        found = {} if damaged[-1] else features_of(label, take, at, size, names)
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


def select_records(
    table: FileColumns, paths: Sequence[str], sizes: Sequence[int], wanted: Wanted
) -> Index | None:
    """Returns the index of the wanted features, which is equal to the result of `index_records`.

    Args:
        table: The columns of the files.
        paths: The files.
        sizes: The sizes of the files in bytes.
        wanted: The wanted features.

    Returns:
        The index; None if the columns lack a wanted feature or its numbers, or the ranges in
        damaged records that are not to be verified.

    Raises:
        MissingFeatureError: If a record lacks a feature without a default.
        ValueError: If a feature has another kind, or all records are damaged.
    """
    if table.damaged.any() and not wanted.verify:
        return None
    columns, intact = wanted.columns(), ~table.damaged
    check_some_intact(paths, table.damaged)
    for result in columns:
        feature = result.feature
        column = table.columns.get(_text(feature))
        field, default = wanted.kinds.get(result.name), wanted.defaults.get(result.name)
        wants_list = field is not None and field.ndim > 0
        if column is None:
            if not table.knows({_text(feature)}) or not len(table):
                return None
            if not wants_list and default is None:
                _raise_missing(table, int(np.argmax(intact)), paths, wanted)
            raise no_feature(
                feature,
                features_of_record(table, int(np.argmax(intact)), paths, wanted.storage),
            )
        is_bytes = column.kind == example.BYTES
        # Whether numbers are a list depends on the first record, and on the user.
        is_unclear = field is not None or not column.has_list
        if not is_bytes and not wants_list and column.values is None and is_unclear:
            return None
        row = int(np.argmax(column.states != ABSENT))
        label = _label(table, row, paths)
        try:
            result.set_kind(column.kind, column.values is not None)
        except ValueError as error:
            raise ValueError(f"{_text(feature)!r} of {label} {error}") from error
        absent = (column.states == ABSENT) & intact
        is_list = result.kind in ("floats", "integers")
        if absent.any() and not is_list and default is None:
            _raise_missing(table, int(np.argmax(absent)), paths, wanted)
            return None
        if result.kind == "value" and column.values is not None:
            values = column.values.astype(np.float64 if column.kind == example.FLOATS else np.int64)
            if absent.any():
                values[absent] = default
            result.values = values
        else:
            offsets = np.where(column.states == PRESENT, column.offsets, EMPTY_OFFSET)
            result.offsets = np.where(absent | table.damaged, MISSING, offsets)
            result.sizes = column.sizes
    arrays = {"start": np.asarray(table.starts, np.int64), "damaged": table.damaged}
    for result in columns:
        arrays |= result.arrays(lambda row: _label(table, row, paths))
    return Index(about_records(paths, sizes, table.first_rows.tolist(), arrays, columns), arrays)


def _file_and_number(table: FileColumns, row: int) -> tuple[int, int]:
    """Returns the number of the file of a row's record, and the record's number in this file."""
    number = int(np.searchsorted(table.first_rows, row, side="right")) - 1
    return number, row - int(table.first_rows[number])


def _label(table: FileColumns, row: int, paths: Sequence[str]) -> str:
    number, record = _file_and_number(table, row)
    return f"{printable(paths[number])}: record {record}"


def _record(
    table: FileColumns, row: int, paths: Sequence[str], storage: Storage
) -> tuple[str, BufferedReader, int, int]:
    """Returns the label of a record, a reader of its file, and offset and size of its content."""
    number, record = _file_and_number(table, row)
    (file,) = open_files([paths[number]], storage)
    take, start = BufferedReader(file, SMALL_BUFFER), int(table.starts[row])
    size = int.from_bytes(take(start - 12, 8), "little")
    return f"{file.shown}: record {record}", take, start, size


def features_of_record(
    table: FileColumns, row: int, paths: Sequence[str], storage: Storage
) -> set[bytes]:
    """Returns the names of the features of a record."""
    return set(features_of(*_record(table, row, paths, storage), None))


def _raise_missing(table: FileColumns, row: int, paths: Sequence[str], wanted: Wanted) -> None:
    """Raises MissingFeatureError about a record that lacks a wanted feature.

    Adds the record to new columns, so that the error is that of `index_records`.
    """
    record = _record(table, row, paths, wanted.storage)
    add_record(*record, wanted.columns(), is_first=row == int(np.argmin(table.damaged)))
