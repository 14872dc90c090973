"""Builds indexes of tars: locates all members, and selects the members of the wanted fields."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.dtypes import narrow
from ..order.shuffle import Indices
from ..remote.storage import Storage
from . import index_checks
from .buffered_reader import SMALL_BUFFER, BufferedReader
from .byte_files import is_remote, open_files
from .each_file import each_file
from .file_columns import MOST_COLUMNS, PRESENT, ColumnRows, FileColumns, concat_tables
from .index import Index
from .paths import object_names
from .progress import counted
from .tar_headers import members
from .tar_samples import (
    NAMED,
    NOT_NUMBER,
    Incomplete,
    Sample,
    apart,
    grouped,
    kind_of_extension,
    kinds_of,
    number_of,
    sample_at,
    scattered,
)

# Types of the entries of ``about`` that exist only in indexes of tars.
_ABOUT: Mapping[str, type] = {
    "incomplete": int,
    "reasons": list,
    "extensions": list,
    "scattered": list,
    "has_links": bool,
    "apart": list,
}
_PARTS = ("offset", "size"), ("value", "damaged")  # the arrays of a field, and of a number
# Incomplete samples whose headers are read for errors. A remote sample needs a request.
_MOST_EXAMINED, _MOST_EXAMINED_REMOTE = 10_000, 100


def tar_columns(
    paths: Sequence[str], storage: Storage, names: Collection[str] | None = None
) -> tuple[list[int], FileColumns]:
    """Reads the headers of tars; returns the sizes in bytes of the tars, and their columns.

    Args:
        paths: The tars.
        storage: Access to remote files.
        names: The wanted extensions; None: all.

    Returns:
        The sizes, and the columns with a row for each sample.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged.
    """

    def columns(take: BufferedReader, advance: Any) -> FileColumns:
        file = take.file
        samples = grouped(members(take, file.size, file.shown), file.shown)
        return columns_of_samples(counted(samples, file.size, advance), take, names)

    sizes, tables = each_file(paths, "tars", storage, columns)
    return sizes, concat_tables(tables, MOST_COLUMNS if names is None else len(names))


def columns_of_samples(
    samples: Iterable[Sample],
    take: Callable[[int, int], bytes],
    names: Collection[str] | None = None,
) -> FileColumns:
    """Returns the columns of the samples of a tar, including the numbers in ``.cls`` etc.

    Args:
        samples: The samples.
        take: ``take(offset, count)`` returns bytes of the tar.
        names: The wanted extensions; None: all.
    """
    # A dict of all names would take more memory. Equal hashes of different names are harmless,
    # since the names of repeated samples are compared later.
    starts, hashes = array.array("q"), array.array("q")
    by_extension: dict[str, ColumnRows] = {}
    for row, sample in enumerate(samples):
        starts.append(sample.start)
        hashes.append(hash(sample.name))
        for extension, member in sample.members.items():
            if member.link:
                continue
            name = extension.decode(errors="surrogateescape")
            if names is not None and name not in names:
                continue
            column = by_extension.get(name)
            if column is None:
                column = by_extension[name] = ColumnRows()
            column.append(row, member.offset, member.size)
            if kind_of_extension(name) == "number":
                value = number_of(take(member.offset, member.size))
                column.values.append(NOT_NUMBER if value is None else value)
    rows = len(starts)
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return FileColumns(
        np.array([0, rows], np.int64),
        np.array(starts, np.int64),
        counts[inverse] > 1,
        np.zeros(rows, np.bool_),
        {
            name: column.column(rows, value_dtype=np.int64 if column.values else None)
            for name, column in by_extension.items()
        },
    )


def index_tars(paths: Sequence[str], extensions: Mapping[str, str], storage: Storage) -> Index:
    """Reads tars, and returns their index; see `dalijax.core.formats.index_checks`.

    Args:
        paths: The tars.
        extensions: The field of each extension, e.g. {"jpg": "image", "png": "image"}.
        storage: Access to remote files.

    Raises:
        OSError: If a tar can't be read.
        ValueError: If a tar is damaged, or a sample has a field twice.
    """
    sizes, table = tar_columns(paths, storage, extensions)
    return select_tars(table, paths, sizes, extensions, storage)


def has_columns(table: FileColumns, extensions: Mapping[str, str]) -> bool:
    """Returns whether `select_tars` can select the index of the wanted fields from columns."""
    numbers = {name for name in extensions if kind_of_extension(name) == "number"}
    found = [table.columns[name] for name in numbers & table.columns.keys()]
    return table.knows(extensions.keys()) and all(column.values is not None for column in found)


def select_tars(
    table: FileColumns,
    paths: Sequence[str],
    sizes: Sequence[int],
    extensions: Mapping[str, str],
    storage: Storage,
) -> Index:
    """Returns the index of the wanted fields, given the columns of tars.

    Args:
        table: The columns of the tars, which have the wanted extensions; see `has_columns`.
        paths: The tars.
        sizes: The sizes of the tars in bytes.
        extensions: The field of each extension.
        storage: Access to remote files.

    Raises:
        OSError: If an incomplete sample can't be read.
        ValueError: If a sample has a field twice.
    """
    kinds = kinds_of(extensions)
    counts = {name: np.zeros(len(table), np.int64) for name in kinds}
    for extension, name in extensions.items():
        if extension in table.columns:
            counts[name] += table.columns[extension].states == PRESENT
    is_complete = np.all([count == 1 for count in counts.values()], axis=0)
    is_double = np.any([count > 1 for count in counts.values()], axis=0)
    # A sample that has a field twice is read first, which raises an error.
    odd = np.flatnonzero(is_double)[:1] if is_double.any() else np.flatnonzero(~is_complete)
    most = _MOST_EXAMINED_REMOTE if any(map(is_remote, paths)) else _MOST_EXAMINED
    tars = list(_examined(odd[:most], most, table, paths, extensions, storage))
    starts = table.starts[is_complete]

    def chosen(name: str, part: str) -> NDArray[Any]:
        """Returns the offsets, sizes or values of a field in the complete samples.

        A complete sample has exactly one of the field's extensions. The columns of the other
        extensions contain 0, so that their sum is the value.
        """
        found = [e for e, field in extensions.items() if field == name and e in table.columns]
        parts = (getattr(table.columns[e], part)[is_complete] for e in found)
        return sum(parts, np.zeros(len(starts), np.int64))

    arrays: dict[str, NDArray[Any]] = {"start": starts}
    for name, kind in kinds.items():
        if kind == "number":
            values = chosen(name, "values")
            damaged = arrays[f"{name}.damaged"] = values == NOT_NUMBER
            arrays[f"{name}.value"] = narrow(np.where(damaged, 0, values))
        else:
            arrays[f"{name}.offset"] = chosen(name, "offsets")
            arrays[f"{name}.size"] = chosen(name, "sizes")
    before = np.concatenate([[0], np.cumsum(is_complete)])
    first = before[table.first_rows].tolist()
    about = {
        "names": object_names(paths),
        "sizes": list(sizes),
        "first": first,
        "columns": index_checks.column_digest(arrays),
        "incomplete": int(len(table) - is_complete.sum()),
        "reasons": [reason for tar in tars for reason in tar.reasons][:NAMED],
        "extensions": sorted({extension for tar in tars for extension in tar.extensions}),
        "scattered": [name for tar in tars for name in tar.scattered][:NAMED],
        "has_links": any(tar.has_links for tar in tars),
        "apart": [] if first[-1] else apart(tars, kinds.keys()),
    }
    return Index(about, arrays)


def is_valid(index: Index, extensions: Mapping[str, str]) -> bool:
    """Returns whether a stored index has the wanted fields, and its ranges lie within the tars.

    Args:
        index: The index.
        extensions: The field of each extension.
    """
    columns = {"start"}
    for name, kind in kinds_of(extensions).items():
        columns |= {f"{name}.{part}" for part in _PARTS[kind == "number"]}
    return index_checks.is_valid(index, columns, _ABOUT)


def _examined(
    rows: Indices,
    most: int,
    table: FileColumns,
    paths: Sequence[str],
    extensions: Mapping[str, str],
    storage: Storage,
) -> Iterator[Incomplete]:
    """Yields the descriptions of the given samples of each tar, after reading their headers.

    Args:
        rows: The rows of the samples in the table, which are incomplete or have a field twice.
        most: The largest number of other samples of the same names whose headers are read.
        table: The columns of the tars.
        paths: The tars.
        extensions: The field of each extension.
        storage: Access to remote files.

    Raises:
        ValueError: If a sample has a field twice.
    """
    numbers = np.searchsorted(table.first_rows, rows, side="right") - 1
    for number in dict.fromkeys(numbers.tolist()):
        (file,) = open_files([paths[number]], storage)
        incomplete = Incomplete(extensions, file.shown)
        starts = table.starts[rows[numbers == number]].tolist()
        for start in starts:
            incomplete.add(sample_at(BufferedReader(file, SMALL_BUFFER), start))
        of_tar = slice(*table.first_rows[number : number + 2])
        repeated = table.starts[of_tar][table.repeated[of_tar]][:most].tolist()
        if not set(starts).isdisjoint(repeated):
            samples = (sample_at(BufferedReader(file, SMALL_BUFFER), start) for start in repeated)
            names = itertools.islice(scattered(incomplete.fields, samples), NAMED)
            incomplete.scattered = [f"{file.shown}: {name}" for name in names]
        yield incomplete
