"""Locates all members of tars, and selects the index of any fields from their locations."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import narrow
from ..order.shuffle import Indices
from ..remote.storage import Storage
from .buffered_reader import SMALL_WINDOW, BufferedReader
from .byte_files import open_files
from .each_file import each_file
from .file_columns import ABSENT, PRESENT, Column, FileColumns, joined
from .index import Index
from .tar_headers import members
from .tar_index import (
    NAMED,
    NOT_NUMBER,
    Columns,
    Sample,
    about_tars,
    counted,
    grouped,
    kind_of_extension,
    kinds_of,
    number_of,
    sample_at,
    scattered,
)

_MOST_EXAMINED = 100  # incomplete samples whose headers are read for errors


@dataclasses.dataclass
class _Members:
    """The members of a tar with the same extension.

    Attributes:
        rows: The number of each member's sample in the tar.
        offsets: The offset of each member's content.
        sizes: The size of each member's content in bytes.
        values: The integers in the members, if the extension is one of numbers; `NOT_NUMBER` for
            members that do not contain an integer.
    """

    rows: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    offsets: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    sizes: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    values: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))


def tar_columns(paths: Sequence[str], storage: Storage) -> FileColumns:
    """Reads the headers of tars; returns the columns of the tars, with a row for each sample.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged.
    """
    return joined(each_file(paths, "tars", storage, _columns)[1])


def _columns(take: BufferedReader, advance: Any) -> FileColumns:
    file = take.file
    samples = grouped(members(take, file.size, file.shown), file.shown)
    return columns_of_samples(counted(samples, file.size, advance), take)


def columns_of_samples(samples: Iterable[Sample], take: Callable[[int, int], bytes]) -> FileColumns:
    """Returns the columns of the samples of a tar, including the numbers in ``.cls`` etc.

    Args:
        samples: The samples.
        take: ``take(offset, count)`` returns bytes of the tar.
    """
    starts, repeated = array.array("q"), array.array("b")
    row_of: dict[bytes, int] = {}
    by_extension: dict[str, _Members] = {}
    for row, sample in enumerate(samples):
        starts.append(sample.start)
        before = row_of.setdefault(sample.name, row)
        repeated.append(before < row)
        if before < row:
            repeated[before] = 1
        for extension, member in sample.members.items():
            if member.link:
                continue
            name = extension.decode(errors="surrogateescape")
            column = by_extension.get(name)
            if column is None:
                column = by_extension[name] = _Members()
            column.rows.append(row)
            column.offsets.append(member.offset)
            column.sizes.append(member.size)
            if kind_of_extension(name) == "number":
                value = number_of(take(member.offset, member.size))
                column.values.append(NOT_NUMBER if value is None else value)
    rows = len(starts)
    return FileColumns(
        np.array([0, rows], np.int64),
        np.array(starts, np.int64),
        np.array(repeated, np.bool_),
        np.zeros(rows, np.bool_),
        {name: _column(name, column, rows) for name, column in by_extension.items()},
    )


def _column(name: str, found: _Members, rows: int) -> Column:
    """Returns the column of an extension in a tar.

    Args:
        name: The extension.
        found: The members with the extension.
        rows: The number of samples of the tar.
    """
    places = np.array(found.rows, np.int64)

    def spread(values: Any) -> Indices:
        """Returns ``values`` in an array of all samples, 0 for samples without the member."""
        column = np.zeros(rows, np.int64)
        column[places] = np.array(values, np.int64)
        return column

    states = np.full(rows, ABSENT, np.uint8)
    states[places] = PRESENT
    values = spread(found.values) if kind_of_extension(name) == "number" else None
    return Column(0, states, spread(found.offsets), spread(found.sizes), values)


def select_tars(
    table: FileColumns,
    paths: Sequence[str],
    sizes: Sequence[int],
    extensions: Mapping[str, str],
    storage: Storage,
) -> Index | None:
    """Returns the index of the wanted fields, which is equal to the result of `index_tars`.

    Args:
        table: The columns of the tars.
        paths: The tars.
        sizes: The sizes of the tars in bytes.
        extensions: The field of each extension, e.g. {"jpg": "image", "png": "image"}.
        storage: Access to remote files.

    Returns:
        The index; None if it can't be selected from the columns.

    Raises:
        ValueError: If a sample has a field twice.
    """
    kinds = kinds_of(extensions)
    counts = {name: np.zeros(len(table), np.int64) for name in kinds}
    for extension, name in extensions.items():
        column = table.columns.get(extension)
        if extension in table.unknown or (column is None and not table.is_complete):
            return None
        if column is not None:
            if kinds[name] == "number" and column.values is None:
                return None
            counts[name] += column.states == PRESENT
    is_complete: NDArray[np.bool_] = np.ones(len(table), np.bool_)
    is_double: NDArray[np.bool_] = np.zeros(len(table), np.bool_)
    for count in counts.values():
        is_complete &= count == 1
        is_double |= count > 1
    odd = np.flatnonzero(is_double)[:1] if is_double.any() else np.flatnonzero(~is_complete)
    tars = list(_examined(odd[:_MOST_EXAMINED], table, paths, extensions, storage))
    if is_double.any():
        return None  # the caller indexes the tars by `index_tars`, which raises an error
    arrays: dict[str, NDArray[Any]] = {"start": table.starts[is_complete]}
    for name, kind in kinds.items():
        found = [
            table.columns[e]
            for e, field in extensions.items()
            if field == name and e in table.columns
        ]
        masks = [column.states[is_complete] == PRESENT for column in found]

        def chosen(
            columns: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]] = masks
        ) -> NDArray[Any]:
            """Returns the values of the complete samples, joined from a field's extensions.

            Each complete sample has exactly one of the extensions.
            """
            whole = np.zeros(int(is_complete.sum()), np.int64)
            for column, mask in zip(columns, masks, strict=True):
                whole[mask] = column[is_complete][mask]
            return whole

        if kind == "number":
            values = chosen([column.values for column in found if column.values is not None])
            damaged = arrays[f"{name}.damaged"] = values == NOT_NUMBER
            arrays[f"{name}.value"] = narrow(np.where(damaged, 0, values))
        else:
            arrays[f"{name}.offset"] = chosen([column.offsets for column in found])
            arrays[f"{name}.size"] = chosen([column.sizes for column in found])
    before = np.concatenate([[0], np.cumsum(is_complete)])
    first = before[table.first].tolist()
    about = about_tars(paths, sizes, first, arrays, tars, kinds.keys())
    about["incomplete"] = int(len(table) - is_complete.sum())
    return Index(about, arrays)


def _examined(
    rows: Indices,
    table: FileColumns,
    paths: Sequence[str],
    extensions: Mapping[str, str],
    storage: Storage,
) -> Iterator[Columns]:
    """Yields the `Columns` of the given samples of each tar, after reading their headers.

    Args:
        rows: The rows of the samples in the table, which are incomplete or have a field twice.
        table: The columns of the tars.
        paths: The tars.
        extensions: The field of each extension.
        storage: Access to remote files.

    Raises:
        ValueError: If a sample has a field twice.
    """
    numbers = np.searchsorted(table.first, rows, side="right") - 1
    for number in dict.fromkeys(numbers.tolist()):
        (file,) = open_files([paths[number]], storage)
        columns = Columns(extensions, file.shown)
        repeated: list[Sample] = []
        for row in rows[numbers == number].tolist():
            take = BufferedReader(file, SMALL_WINDOW)
            sample = sample_at(take, int(table.starts[row]))
            columns.add([sample], take)
            if table.repeated[row]:
                repeated.append(sample)
        names = itertools.islice(scattered(columns.incomplete, repeated), NAMED)
        columns.scattered = [f"{file.shown}: {name}" for name in names]
        yield columns
