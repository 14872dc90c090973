"""`Parquet`: a source over the rows of Parquet files, which are read by row groups."""

from __future__ import annotations

import collections
import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import knows_its_names, whole_number
from ..formats.byte_files import WAITING_THREADS, is_remote
from ..formats.field import Field
from ..formats.parquet_files import ParquetFiles
from ..formats.paths import Path, Paths, path_list
from ..messages.printable import printable
from ..order.shuffle import Indices
from ..order.windows import Groups
from ..remote.range_cache import Lease
from ..remote.ranges import byte_count
from ..remote.storage import open_storage
from ..threads.per_process import PerProcess
from ..threads.workers import Result, Workers
from .arrow_columns import Table
from .base import BaseSource
from .records import Records
from .source import Values
from .values import joined

_HEAD = 64  # rows that determine the kinds of the fields
_LOCAL_THREADS = 4  # pyarrow decodes without the GIL
_Key = tuple[int, tuple[str, ...]]  # a row group, and the fields to read


class _Rows(Records):
    """The rows of a row group, whose fields were inferred from the first rows of all files."""

    _file, _first = "", 0

    def of(self, table: Any, names: Sequence[str], file: str, first: int) -> _Rows:
        """Returns the rows of another table with the same fields.

        Args:
            table: The ``pyarrow.Table``.
            names: The fields that the table contains.
            file: The name of the file, for errors.
            first: The number of the table's first row in the file.
        """
        rows = copy.copy(self)
        rows._file, rows._first = file, first
        rows._read_from(Table(table), {name: self._paths[name] for name in names})
        return rows

    def columns(self, names: Sequence[str]) -> list[str]:
        """Returns the columns of the table that contain some fields."""
        return sorted({self._paths[name][0] for name in names})

    def name(self, index: int) -> str:
        """Returns the file and the row of a record."""
        return f"{self._file}: row {self._first + index}" if self._file else f"row {index}"


def _loaded(files: ParquetFiles, rows: _Rows, group: int, names: tuple[str, ...]) -> _Rows:
    """Loads some fields of a row group.

    Args:
        files: The files.
        rows: The first rows of the files, which determine the fields.
        group: The row group.
        names: The fields.

    Raises:
        OSError, ValueError: If the row group can't be read.
    """
    table = files.table(group, rows.columns(names))
    return rows.of(table, names, *files.first_row(group))


class _RowGroups:
    """Row groups in memory, which threads load. The row groups that were used last are kept.

    Args:
        load: Loads some fields of a row group.
        most_bytes: The number of bytes to keep.
        num_threads: The number of threads.
    """

    def __init__(self, load: Callable[..., _Rows], most_bytes: int, num_threads: int):
        self._load, self._most_bytes = load, most_bytes
        self._workers = Workers(num_threads, "dalijax-parquet")
        self._results = collections.OrderedDict[_Key, tuple[Result[_Rows], int]]()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[_Key], sizes: Sequence[int]) -> list[Result[_Rows]]:
        """Returns the future rows of row groups, and keeps them until others are used.

        Args:
            keys: The row groups, with their fields.
            sizes: The size of each in bytes.
        """
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                result, _ = self._results.get(key, (None, 0))
                if result is None or isinstance(result.error, OSError):  # which may disappear
                    result = self._workers.call(self._load, *key)
                self._results[key] = result, size
                self._results.move_to_end(key)
            results = [self._results[key][0] for key in keys]
            total = sum(size for _, size in self._results.values())
            while total > self._most_bytes and len(self._results) > 1:
                _, (_, size) = self._results.popitem(last=False)
                total -= size
        return results


class Parquet(BaseSource):
    """Rows of Parquet files, such as those of a data set of the HuggingFace Hub.

    The files are read where they are, by row groups. Each epoch shuffles the row groups and divides
    them into windows, and shuffles the rows of each window. The order depends only on the seed and
    the epoch, so that a state needs no buffers, and restores on any number of processes. Without
    ``shuffle``, the rows are read in order.

    Each process reads all row groups, unless ``parts`` is at least the number of processes.

    Opening the source reads the footer of each file, by which states recognize the file, and the
    first rows of the first file. Fields are those of `Records` for a table of pyarrow.

    Args:
        paths: Paths or URLs of the files, such as
            ``"hf://datasets/OWNER/NAME/data/train-*.parquet"``, or patterns.
        fields: Maps the name of each field to a column or a part of it; see `Records`. Images of
            the Hub are ``"image/bytes"``. None: all columns, under their own names.
        window: The size of a window in bytes of the fields before compression. Larger windows
            shuffle better. A process keeps up to two windows, and two row groups for each part, in
            memory, and needs as much again to load them. Columns whose values repeat need more.
        parts: The number of parts of an epoch that are read side by side. Each batch has as many
            rows of each part, so that each of P processes reads about 1/P of the row groups, if
            ``parts`` is a multiple of P. A window is divided among the parts.
        batch_size: The global batch size for which the parts are made, a multiple of ``parts``.
            With other batch sizes, the records and their order remain.
        kinds: Kinds of fields that differ from the first row; see `Records`.
        identity: A string that replaces the digest of the footers in states.
        storage_options: Credentials and settings of remote files; see docs/sources.md.
        cache: A folder on a local disk that stores the bytes that were read from remote files, for
            later epochs and runs; see docs/sources.md.
        cache_bytes: Largest size of this folder, such as ``"200GB"``; None: all but a tenth of the
            disk.

    Attributes:
        fields: Names and kinds of the fields.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is not a Parquet file or lacks a column, there are no rows, the first
            rows can't be read, or the first row lacks a field.
        ImportError: If pyarrow is not installed.
    """

    _identity_reads = False  # the footers are read instead
    _gives_new_arrays = True  # views of immutable memory, or new objects

    @knows_its_names
    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, Any] | None = None,
        *,
        window: int | str = "500MB",
        parts: int = 1,
        batch_size: int | None = None,
        kinds: Mapping[str, Field] | None = None,
        identity: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache: Path | None = None,
        cache_bytes: int | float | str | None = None,
    ):
        num_bytes = byte_count(window, "window")
        parts = whole_number("parts", parts, "a whole number of parts, 1 or more", 1)
        size = whole_number("batch_size", batch_size or 0, "a global batch size", 0)
        size = size or int(parts == 1)
        if not size or size % parts:
            raise ValueError(
                f"parts={parts} requires the batch_size= of global batches, a multiple of parts, "
                f"not {batch_size}"
            )
        if not 1 <= num_bytes < 1 << 60:
            raise ValueError(f"window must be from 1 byte to 1 EB, not {window!r}")
        storage = open_storage(storage_options, 0, cache, cache_bytes)
        names = path_list(paths, storage)
        files = ParquetFiles(names, storage)
        rows = _Rows(files.head(_HEAD), fields, kinds=kinds)
        super().__init__(rows.fields, identity)
        self._files, self._rows = files, rows
        self._bytes_of: dict[tuple[str, ...], Indices] = {}
        sizes = self._num_bytes(tuple(sorted(rows.fields)))
        part_bytes = max(1, num_bytes // parts)
        self._groups = Groups(files.starts, sizes, part_bytes, parts, size)
        self._read_ahead = max(2, 2 * num_bytes)  # so that the next window is announced, too
        threads = WAITING_THREADS if any(map(is_remote, names)) else _LOCAL_THREADS
        most_bytes = 2 * (num_bytes + parts * max(sizes.tolist()))
        self._row_groups = PerProcess(
            functools.partial(
                _RowGroups, functools.partial(_loaded, files, rows), most_bytes, threads
            )
        )

    @property
    def _version(self) -> str | None:
        return self._files.files.version()

    def _content(self) -> tuple[Any, ...]:
        paths = self._rows._paths
        fields = [[name, *map(str, paths[name])] for name in sorted(paths)]
        return fields, self._files.digests

    def __len__(self) -> int:
        return int(self._groups.starts[-1])

    def __repr__(self) -> str:
        paths = self._files.files.paths
        location = printable(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
        groups = f"{len(self._groups.sizes):,} row groups"
        return f"Parquet({location}: {len(self):,} records in {groups})"

    def name(self, index: int) -> str:
        """Returns the file, and the number of the record's row in it."""
        group = int(self._groups.of(np.array(index)))
        file, first = self._files.first_row(group)
        return f"{file}: row {first + index - int(self._groups.starts[group])}"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        if not names:
            return {}
        of = self._groups.of(indices)
        groups = np.unique(of)
        parts = []
        for group, result in zip(groups.tolist(), self._load(groups, names)):
            try:
                rows = result.get()
            except (OSError, ValueError) as error:
                raise copy.copy(error) from None  # several threads may raise it
            at = np.flatnonzero(of == group)
            parts.append((at, rows.read(indices[at] - self._groups.starts[group], names)))
        return joined(parts, names, len(indices))

    def _load(self, groups: Indices, names: Sequence[str]) -> list[Result[_Rows]]:
        """Begins to load row groups that are not in memory; returns their future rows."""
        fields = tuple(sorted(names))
        keys = [(group, fields) for group in groups.tolist()]
        return self._row_groups.get().get(keys, self._num_bytes(fields)[groups].tolist())

    def _num_bytes(self, names: tuple[str, ...]) -> Indices:
        """Returns the size of some fields in each row group, in bytes before compression."""
        if names not in self._bytes_of:
            columns = self._rows.columns(names)
            self._bytes_of[names] = self._files.sizes(columns)
        return self._bytes_of[names]

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        """Returns the size of the row groups of some records."""
        groups = np.unique(self._groups.of(indices))
        return int(self._num_bytes(tuple(sorted(names)))[groups].sum()) if names else 0

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        """Begins to load the row groups of records that will be read soon, in their order.

        Returns:
            No leases, because `_RowGroups` keeps the row groups.
        """
        groups, firsts = np.unique(self._groups.of(indices), return_index=True)
        if names:
            self._load(groups[np.argsort(firsts)], names)
        return []
