"""`Journals`: the checksums of the ranges in a cache, which several processes write and read.

A process appends entries to a journal of its own, and reads the journals of all processes, so that
no lock is needed. Damaged entries are harmless: a range of a cache is used only if an entry
contains the checksum of its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..random.hashing import fold
from .owned_files import OwnedFile, locked, new_file, owned_names

Bits = NDArray[np.uint64]

# An entry: the `version_of` of an object, a stored range, and the checksum of its bytes.
ENTRY = np.dtype([("object", "<u8"), ("offset", "<i8"), ("size", "<i8"), ("checksum", "<u8")])
_SHARE = 4  # tables are merged unless each has at least 4 times the entries of the previous table


@dataclasses.dataclass(frozen=True)
class _Table:
    """Sorted hashes of journal entries.

    Attributes:
        ranges: The hash of object, offset and size of each entry, uint64 [entries].
        claims: The hash of object, offset, size and checksum of each entry, uint64 [entries]. If a
            journal was damaged, a range may have several entries, one of which has the right
            checksum.
    """

    ranges: Bits
    claims: Bits

    def merged(self, other: _Table) -> _Table:
        """Returns a table with the entries of both tables."""
        return _Table(
            _merged(self.ranges, other.ranges),
            _merged(self.claims, other.claims),
        )


def _merged(first: Bits, second: Bits) -> Bits:
    """Returns a sorted array of the items of two sorted arrays."""
    return np.sort(np.concatenate((first, second)), kind="stable")  # fast for sorted parts


@dataclasses.dataclass(frozen=True)
class _Contents:
    """The entries that were read from journals; immutable, so that threads need no lock.

    Attributes:
        ends: The number of bytes that were read of each journal, by file name.
        tables: Tables of the entries, from small to large.
    """

    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: tuple[_Table, ...] = ()

    def with_entries(self, entries: NDArray[np.void], ends: dict[str, int]) -> _Contents:
        """Returns contents to which entries are added.

        Args:
            entries: The new entries; see `ENTRY`.
            ends: The new `ends`.
        """
        if not len(entries):
            return _Contents(ends, self.tables)
        columns = [entries[name] for name in ENTRY.names or ()]
        table = _Table(np.sort(fold(*columns[:-1])), np.sort(fold(*columns)))
        tables = list(self.tables)
        while tables and len(tables[0].claims) < _SHARE * len(table.claims):
            table = tables.pop(0).merged(table)
        return _Contents(ends, (table, *tables))


def _are_in(hashes: Bits, tables: Iterable[Bits]) -> NDArray[np.bool_]:
    """Returns whether any of the sorted arrays contains each hash, bool [hashes]."""
    found = np.zeros(len(hashes), bool)
    for table in tables:
        rows = np.flatnonzero(~found)
        if not len(rows):
            break
        places = np.searchsorted(table, hashes[rows])
        places[places == len(table)] = 0
        found[rows] = table[places] == hashes[rows]
    return found


class Journals:
    """Reads the journals of a folder, and writes a journal of this process.

    Args:
        folder: The folder.
        objects: The sorted numbers of the objects whose entries are kept in memory; see `ENTRY`.
            If it is empty, the entries of all objects are kept.
    """

    def __init__(self, folder: str, objects: Bits):
        self._folder, self._objects = folder, objects
        self._contents = _Contents()
        self._own: OwnedFile | None = None

    def have(self, objects: Bits, offsets: Indices, sizes: Indices) -> NDArray[np.bool_]:
        """Returns whether each range has an entry, bool [ranges].

        Entries that another process has just added are found, too.

        Args:
            objects: The object of each range; see `ENTRY`.
            offsets: The first byte of each range.
            sizes: The size of each range in bytes.
        """
        return self._are_in(fold(objects, offsets, sizes), lambda table: table.ranges)

    def agree(
        self, objects: Bits, offsets: Indices, sizes: Indices, checksums: Bits
    ) -> NDArray[np.bool_]:
        """Returns whether each range has an entry with the given checksum, bool [ranges].

        Args:
            objects: The object of each range; see `ENTRY`.
            offsets: The first byte of each range.
            sizes: The size of each range in bytes.
            checksums: The checksum of each range.
        """
        return self._are_in(fold(objects, offsets, sizes, checksums), lambda table: table.claims)

    def _are_in(self, hashes: Bits, column: Callable[[_Table], Bits]) -> NDArray[np.bool_]:
        """Returns whether each hash is in a column of the tables, bool [hashes].

        Reads new entries of the journals if a hash is not found.

        Args:
            hashes: The hashes.
            column: Returns the column of a table.
        """
        contents = self._contents
        found = _are_in(hashes, map(column, contents.tables))
        # In a race, another thread may replace the contents by older contents, which is harmless.
        if not found.all() and (refreshed := self._refreshed(contents)) is not contents:
            self._contents = refreshed
            found = _are_in(hashes, map(column, refreshed.tables))
        return found

    def _refreshed(self, contents: _Contents) -> _Contents:
        """Returns contents with the new entries of the journals; ``contents`` if nothing is new."""
        parts, ends = [], dict(contents.ends)
        with contextlib.suppress(OSError):  # the folder may have been removed
            for name in sorted(owned_names(self._folder)):
                path, end = os.path.join(self._folder, name), ends.get(name, 0)
                with contextlib.suppress(OSError):  # the file may have been removed
                    if os.stat(path).st_size >= end + ENTRY.itemsize:
                        parts.append(_entries(path, end))
                        ends[name] = end + parts[-1].nbytes
        if not parts:
            return contents
        entries = np.concatenate(parts)
        if len(self._objects):
            places = np.searchsorted(self._objects, entries["object"])
            places[places == len(self._objects)] = 0
            entries = entries[self._objects[places] == entries["object"]]
        return contents.with_entries(entries, ends)

    def append(self, objects: Bits, offsets: Indices, sizes: Indices, checksums: Bits) -> None:
        """Appends entries of stored ranges to the journal of this process.

        Raises:
            OSError: If the entries can't be written.
        """
        entries = np.empty(len(objects), ENTRY)
        for name, column in zip(ENTRY.names or (), (objects, offsets, sizes, checksums)):
            entries[name] = column
        own = self._own  # another thread may reset the attribute
        if own is None:
            own = self._own = self._unused() or new_file(self._folder)
        try:
            own.append(entries.tobytes())
        except OSError:
            self._own = None  # its last entry may be incomplete
            raise

    def _unused(self) -> OwnedFile | None:
        """Locks and returns the journal of a process that has ended; None if all are in use."""
        for name in owned_names(self._folder):
            with contextlib.suppress(OSError):
                if (file := locked(os.path.join(self._folder, name))) is not None:
                    size = os.fstat(file.fd).st_size
                    os.ftruncate(file.fd, size - size % ENTRY.itemsize)  # drops an incomplete entry
                    return file
        return None


def _entries(path: str, start: int) -> NDArray[np.void]:
    """Returns the complete entries of a journal; see `ENTRY`.

    Args:
        path: The file of the journal.
        start: The offset of the first entry to return, in bytes.

    Raises:
        OSError: If the file can't be read.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        data = file.read()
    return np.frombuffer(data, ENTRY, len(data) // ENTRY.itemsize)


def compact(folder: str, objects: Bits) -> None:
    """Replaces the journals of ended processes by a journal with the entries of some objects.

    Args:
        folder: The folder of the journals.
        objects: The objects whose entries are kept; see `ENTRY`.

    Raises:
        OSError: If a journal can't be read or written.
    """
    replaced, parts = [], [np.empty(0, ENTRY)]
    for name in owned_names(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if (file := locked(path)) is not None:  # locked until it is removed
                parts.append(_entries(path, 0))
                replaced.append((path, file))
    entries = np.unique(np.concatenate(parts))
    entries = entries[np.isin(entries["object"], objects)]
    if len(entries):
        new_file(folder).append(entries.tobytes())
    for path, _ in replaced:
        os.unlink(path)
