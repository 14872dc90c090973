"""`FileColumns`: the offsets and sizes of all values of the records of some files.

The columns include values that a source does not read. A shared index stores a column in about 4
bytes for each record: the offset of each value is predicted from the sizes of the values before it,
and zlib compresses the deviations.
"""

from __future__ import annotations

import array
import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices

# States of the value of a record. EMPTY: an empty list. UNSET: a feature that contains no list.
ABSENT, PRESENT, EMPTY, UNSET = 0, 1, 2, 3
MOST_COLUMNS = 256
_DTYPES = ("|i1", "<i2", "<i4", "<i8", "<f4")


@dataclasses.dataclass
class Column:
    """The locations of an extension of tars, or of a feature of TFRecords, in all records.

    Attributes:
        kind: BYTES, FLOATS or INTS of `dalijax.core.formats.example`; 0 for tars, and for features
            that are always UNSET.
        states: ABSENT, PRESENT, EMPTY or UNSET, uint8 [records].
        offsets: Offsets in the file, int64 [records]; 0 unless a value is PRESENT.
        sizes: Sizes in bytes, int64 [records]; 0 unless a value is PRESENT.
        values: The numbers, [records], if each value is a single number; otherwise None.
        has_list: Whether no value is a single number.
        counts: For features of episodes, and for byte strings of which a record has several, the
            length of each list, int64 [records]; otherwise None. ``offsets`` and ``sizes`` then
            describe the packed numbers of a list, or the range from the first to the last byte
            string.
        items: Sizes of the byte strings of all lists, int64 [sum of counts]; None for numbers.
    """

    kind: int
    states: NDArray[np.uint8]
    offsets: Indices
    sizes: Indices
    values: NDArray[Any] | None = None
    has_list: bool = False
    counts: Indices | None = None
    items: Indices | None = None


class ColumnRows:
    """Collects the values of a `Column` in the records of a file; other records are ABSENT.

    Attributes:
        values: The numbers, if each value is a single number.
        counts: The lengths of lists of features of episodes.
    """

    def __init__(self) -> None:
        self._states = array.array("B")
        self._rows, self._offsets, self._sizes = (array.array("q") for _ in range(3))
        self.values: array.array[Any] = array.array("q")
        self.counts = array.array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: int, offset: int, size: int, state: int = PRESENT) -> None:
        """Adds a value.

        Args:
            row: The number of the record in the file.
            offset: The offset of the value in the file.
            size: The size of the value in bytes.
            state: PRESENT, EMPTY or UNSET.
        """
        self._rows.append(row)
        self._states.append(state)
        self._offsets.append(offset)
        self._sizes.append(size)

    def column(
        self,
        count: int,
        kind: int = 0,
        value_dtype: Any = None,
        has_list: bool = False,
        items: Indices | None = None,
    ) -> Column:
        """Returns the column of all records.

        Args:
            count: The number of records of the file.
            kind: The kind of the column.
            value_dtype: The dtype of the column's numbers; None: the column has no numbers.
            has_list: Whether no value is a single number.
            items: The sizes of the byte strings of all lists.
        """
        rows = np.array(self._rows, np.int64)

        def spread(values: Any, dtype: Any = np.int64) -> NDArray[Any]:
            return _spread(np.array(values, dtype), rows, count)

        return Column(
            kind,
            spread(self._states, np.uint8),
            spread(self._offsets),
            spread(self._sizes),
            None if value_dtype is None else spread(self.values, value_dtype),
            has_list,
            spread(self.counts) if self.counts else None,
            items,
        )


def head_sizes(sizes: Indices) -> Indices:
    """Returns how many bytes protobuf stores before a byte string of each size.

    The bytes are the key of the field, which is one byte, and the size as a varint.
    """
    limits = np.array([1 << 7 * k for k in range(1, 9)])
    return 2 + np.searchsorted(limits, sizes, side="right")


def counts_of(column: Column) -> Indices:
    """Returns the length of each list of a column, int64 [records]; a single value counts as 1."""
    return (column.states == PRESENT).astype(np.int64) if column.counts is None else column.counts


def item_offsets(column: Column) -> Indices:
    """Returns the offset of each byte string of a column in its file, int64 [sum of counts].

    Raises:
        ValueError: If the sizes of a record's byte strings don't fit its entry in ``sizes``.
    """
    if column.items is None or column.counts is None:
        raise ValueError("the column has no byte strings")
    heads = head_sizes(column.items)
    counts, ends = column.counts, np.cumsum(column.items + heads)
    first = np.cumsum(counts) - counts
    before = np.concatenate([[0], ends])
    filled = counts > 0
    bases = np.zeros(len(counts), np.int64)
    bases[filled] = column.offsets[filled] - before[first[filled]] - heads[first[filled]]
    stops = bases + before[first + counts]
    if not np.array_equal(stops[filled], (column.offsets + column.sizes)[filled]):
        raise ValueError("the byte strings of a list don't fit its size")
    offsets: Indices = np.repeat(bases, counts) + ends - column.items
    return offsets


@dataclasses.dataclass
class FileColumns:
    """Columns with a row for each record of some files.

    Attributes:
        first_rows: Number of records before each file, and in total, int64 [files + 1].
        starts: Offset of each record in its file, int64 [records].
        repeated: Whether another record of the file has the same name, bool [records].
        damaged: Whether the record's checksum is wrong, bool [records]. Its values are ABSENT.
        columns: The column of each extension or feature.
        unknown: Extensions or features without a column, because their values are irregular.
        is_complete: Whether every other extension or feature of the files has a column.
    """

    first_rows: Indices
    starts: Indices
    repeated: NDArray[np.bool_]
    damaged: NDArray[np.bool_]
    columns: dict[str, Column]
    unknown: set[str] = dataclasses.field(default_factory=set)
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.starts)

    def knows(self, names: Set[str]) -> bool:
        """Returns whether the columns contain all values of some extensions or features.

        An extension or feature without a column then has no values.
        """
        return not names & self.unknown and (self.is_complete or names <= self.columns.keys())


def rows_of(first_rows: Indices, files: Indices) -> Indices:
    """Returns the rows of the records of some files in a table, in the order of ``files``.

    Args:
        first_rows: Number of records before each file, and in total.
        files: Numbers of files.
    """
    counts = np.diff(first_rows)[files]
    before = np.cumsum(counts) - counts
    return np.repeat(first_rows[files] - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def of_files(table: FileColumns, files: Indices) -> FileColumns:
    """Returns the columns of the files with the numbers in ``files``, in this order."""
    if np.array_equal(files, np.arange(len(table.first_rows) - 1)):
        return table
    rows = rows_of(table.first_rows, files)
    columns = {name: _of_rows(column, rows) for name, column in table.columns.items()}
    first_rows = np.concatenate([[0], np.cumsum(np.diff(table.first_rows)[files])])
    return dataclasses.replace(
        table,
        first_rows=first_rows,
        starts=table.starts[rows],
        repeated=table.repeated[rows],
        damaged=table.damaged[rows],
        columns={name: column for name, column in columns.items() if column.states.any()},
    )


def _of_rows(column: Column, rows: Indices) -> Column:
    """Returns a copy of a column with only the given rows, in their order."""
    counts, items = column.counts, column.items
    if counts is not None and items is not None:
        items = items[rows_of(np.concatenate([[0], np.cumsum(counts)]), rows)]
    return dataclasses.replace(
        column,
        states=column.states[rows],
        offsets=column.offsets[rows],
        sizes=column.sizes[rows],
        values=None if column.values is None else column.values[rows],
        counts=None if counts is None else counts[rows],
        items=items,
    )


def concat_tables(tables: Sequence[FileColumns], most: int = MOST_COLUMNS) -> FileColumns:
    """Returns the columns of several groups of files, concatenated.

    Args:
        tables: The columns of each group.
        most: The largest number of columns. If there are more, the columns with the most values are
            kept.
    """
    if len(tables) == 1:
        return tables[0]
    ends = np.cumsum([len(table) for table in tables]).tolist()
    starts = [0, *ends[:-1]]
    parts: dict[str, list[tuple[slice, Column]]] = {}
    for table, start, end in zip(tables, starts, ends, strict=True):
        for name, column in table.columns.items():
            parts.setdefault(name, []).append((slice(start, end), column))
    unknown = {name for table in tables for name in table.unknown}
    unknown |= {name for name, part in parts.items() if len({c.kind for _, c in part} - {0}) > 1}
    often = sorted(parts, key=lambda name: -sum(int(c.states.sum()) for _, c in parts[name]))
    names = {*often[:most]} - unknown
    total = [table.first_rows[1:] + start for table, start in zip(tables, starts, strict=True)]
    return FileColumns(
        np.concatenate([[0], *total]),
        np.concatenate([table.starts for table in tables]),
        np.concatenate([table.repeated for table in tables]),
        np.concatenate([table.damaged for table in tables]),
        {name: _whole_column(part, ends[-1]) for name, part in parts.items() if name in names},
        unknown,
        len(parts) <= most and all(table.is_complete for table in tables),
    )


def _whole_column(parts: Sequence[tuple[slice, Column]], rows: int) -> Column:
    """Returns a column that is concatenated from its parts.

    Args:
        parts: Pairs of a range of rows, and the column of these rows. Other rows are ABSENT.
        rows: Number of rows of the column.
    """
    dtypes = [column.values.dtype for _, column in parts if column.values is not None]
    has_values = len(dtypes) == len(parts)
    # Byte strings may be single values in some of the files, and lists in others.
    has_counts = any(column.counts is not None for _, column in parts)
    items: list[Indices] = []
    if any(column.items is not None for _, column in parts):
        items = [c.sizes[c.states == PRESENT] if c.items is None else c.items for _, c in parts]
    whole = Column(
        max(column.kind for _, column in parts),
        np.zeros(rows, np.uint8),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.result_type(*dtypes)) if has_values else None,
        all(column.has_list for _, column in parts),
        np.zeros(rows, np.int64) if has_counts else None,
        np.concatenate(items) if items else None,
    )
    for rows_of_part, column in parts:
        whole.states[rows_of_part] = column.states
        whole.offsets[rows_of_part] = column.offsets
        whole.sizes[rows_of_part] = column.sizes
        if whole.values is not None and column.values is not None:
            whole.values[rows_of_part] = column.values
        if whole.counts is not None:
            whole.counts[rows_of_part] = counts_of(column)
    return whole


@dataclasses.dataclass(frozen=True)
class Layout:
    """The usual distances between values in a kind of files.

    Attributes:
        header: Number of bytes between the padded end of a value and the next value.
        block: Values are padded to a multiple of this number of bytes.
    """

    header: int
    block: int


def packed(table: FileColumns, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns compressed columns.

    Returns:
        A JSON object, and arrays of compressed bytes, from which `unpacked` restores the table.
    """
    streams: dict[str, NDArray[Any]] = {}
    # The end of the last value so far, relative to the start of the record.
    ends = np.zeros(len(table), np.int64)
    for number, column in enumerate(table.columns.values()):
        present = column.states == PRESENT
        if not present.all():
            streams[f"{number}.state"] = column.states
        offsets = column.offsets - table.starts
        streams[f"{number}.offset"] = (offsets - ends - layout.header)[present]
        streams[f"{number}.size"] = column.sizes[present]
        ends = np.where(present, offsets + _padded(column.sizes, layout), ends)
        if column.values is not None:
            streams[f"{number}.value"] = column.values[present]
        if column.counts is not None:
            streams[f"{number}.count"] = column.counts[present]
        if column.items is not None:
            streams[f"{number}.item"] = column.items
    streams["start"] = table.starts - _before(table.starts + ends, table.first_rows)
    flags = {"repeated": table.repeated, "damaged": table.damaged}
    streams |= {name: flag for name, flag in flags.items() if flag.any()}
    arrays, dtypes = {}, {}
    for name, stream in streams.items():
        dtypes[name], arrays[name] = _compressed(stream)
    about = {
        "first": table.first_rows.tolist(),
        "unknown": sorted(table.unknown),
        "is_complete": table.is_complete,
        "columns": [[name, c.kind, c.has_list] for name, c in table.columns.items()],
        "dtypes": dtypes,
    }
    return about, arrays


def unpacked(
    about: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    layout: Layout,
    names: Collection[str] | None = None,
) -> FileColumns:
    """Returns the columns that `packed` has compressed.

    Args:
        about: The JSON object.
        arrays: The compressed arrays.
        layout: The layout that was passed to `packed`.
        names: Names of the wanted columns; None: all.

    Raises:
        ValueError, TypeError, LookupError: If the object or an array is damaged.
    """
    first_rows = np.array(about["first"], np.int64)
    rows = int(first_rows[-1])

    def stream(name: str, count: int) -> NDArray[Any]:
        return _decompressed(arrays[name], about["dtypes"][name], count)

    columns: dict[str, Column] = {}
    ends = np.zeros(rows, np.int64)
    for number, (name, kind, has_list) in enumerate(about["columns"]):
        states = np.ones(rows, np.uint8)
        if f"{number}.state" in arrays:
            states = stream(f"{number}.state", rows).view(np.uint8)
        present = states == PRESENT
        count = int(present.sum())
        sizes = _spread(stream(f"{number}.size", count).astype(np.int64), present, rows)
        steps = _spread(stream(f"{number}.offset", count).astype(np.int64), present, rows)
        offsets = ends + steps + layout.header
        ends = np.where(present, offsets + _padded(sizes, layout), ends)
        if names is not None and name not in names:
            continue
        values = None
        if f"{number}.value" in arrays:
            values = _spread(stream(f"{number}.value", count), present, rows)
        column = Column(int(kind), states, offsets, sizes, values, bool(has_list))
        if f"{number}.count" in arrays:
            counts = stream(f"{number}.count", count).astype(np.int64)
            column.counts = _spread(counts, present, rows)
            if (column.counts < 0).any():
                raise ValueError("a list has a negative length")
        if f"{number}.item" in arrays and column.counts is not None:
            total = int(column.counts.sum())
            column.items = stream(f"{number}.item", total).astype(np.int64)
        columns[name] = column
    steps = stream("start", rows) + _before(ends, first_rows)
    totals = np.cumsum(steps)
    bases = np.concatenate([[0], totals])[first_rows[:-1]]
    starts = totals - np.repeat(bases, np.diff(first_rows))
    for column in columns.values():
        column.offsets += starts
        column.offsets[column.states != PRESENT] = 0
        if column.items is not None:
            item_offsets(column)  # raises ValueError if the sizes are damaged
    repeated, damaged = (
        stream(name, rows).astype(np.bool_) if name in arrays else np.zeros(rows, np.bool_)
        for name in ("repeated", "damaged")
    )
    unknown, is_complete = set(about["unknown"]), bool(about["is_complete"])
    return FileColumns(first_rows, starts, repeated, damaged, columns, unknown, is_complete)


def _spread(values: NDArray[Any], rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Returns an array of the values of all records, 0 for records without a value.

    Args:
        values: The values of the records that have a value.
        rows: The numbers of these records, or a boolean for each record.
        count: The number of all records.
    """
    if len(values) == count:
        return values
    whole = np.zeros(count, values.dtype)
    whole[rows] = values
    return whole


def _padded(sizes: Indices, layout: Layout) -> Indices:
    """Returns sizes in bytes, rounded up to a multiple of the layout's block."""
    return np.asarray(-(-sizes // layout.block) * layout.block, np.int64)


def _before(ends: Indices, first_rows: Indices) -> Indices:
    """Returns the end of the record before each record, or 0 for the first record of a file.

    Args:
        ends: The end of each record.
        first_rows: Number of records before each file, and in total.
    """
    before = np.concatenate([[0], ends[:-1]])[: len(ends)]
    before[first_rows[:-1][np.diff(first_rows) > 0]] = 0
    return before


def _compressed(values: NDArray[Any]) -> tuple[str, NDArray[np.uint8]]:
    """Compresses an array; returns the narrowest dtype for its values, and a zlib stream."""
    dtype = "<f4"
    if values.dtype.kind != "f":
        wide = values.astype(np.int64)
        low, high = int(np.min(wide, initial=0)), int(np.max(wide, initial=0))
        limits = ((name, np.iinfo(name)) for name in _DTYPES[:-1])
        dtype = next(name for name, limit in limits if limit.min <= low and high <= limit.max)
    narrow = np.ascontiguousarray(values.astype(dtype))
    # Groups the bytes by significance, because zlib compresses similar bytes better.
    planes = narrow.view(np.uint8).reshape(len(narrow), narrow.itemsize).T
    return dtype, np.frombuffer(zlib.compress(planes.tobytes()), np.uint8)


def _decompressed(content: NDArray[Any], dtype: str, count: int) -> NDArray[Any]:
    """Returns the array of ``count`` values that `_compressed` has compressed.

    Raises:
        ValueError: If the content is damaged.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"an array has dtype {dtype!r:.40}")
    size = count * np.dtype(dtype).itemsize
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(content.tobytes(), size + 1)  # 0 would be no limit
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) != size or not stream.eof:
        raise ValueError(f"an array has {len(data):,} bytes instead of {size:,}")
    planes = np.frombuffer(data, np.uint8).reshape(np.dtype(dtype).itemsize, count)
    return np.ascontiguousarray(planes.T).view(dtype)[:, 0]
