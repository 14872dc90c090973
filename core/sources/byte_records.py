"""`ByteRecords`: base class of sources over larger files, with an index of byte ranges."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.byte_files import WAITING_THREADS, ByteFiles, is_remote
from ..formats.field import Field
from ..formats.file_kinds import pointer_fault
from ..formats.index import Index
from ..formats.tfrecord_index import MISSING
from ..messages.printable import printable, printable_text
from ..order.shuffle import Indices
from ..remote.range_cache import Lease
from ..remote.storage import Storage
from .base import BaseSource
from .source import Values

# Returns a value, given its bytes as a uint8 array, whose address may be unaligned.
Decode = Callable[[NDArray[np.uint8]], Any]


def as_text(data: NDArray[np.uint8]) -> str:
    """Returns a text, given its bytes in UTF-8."""
    return _checked(data).decode()


def as_json(data: NDArray[np.uint8]) -> Any:
    """Returns the Python value of JSON, given its bytes."""
    return json.loads(_checked(data))


def _checked(data: NDArray[np.uint8]) -> bytes:
    """Returns bytes; raises ValueError if they are a git-lfs pointer."""
    if fault := pointer_fault(data):
        raise ValueError(fault)
    return data.tobytes()


def _has_content(
    index: Index,
    paths: Sequence[str],
    index_again: Callable[[Sequence[str]], Index],
    number: int,
) -> bool:
    """Returns whether a file still has the records that an index contains, by indexing it again.

    Args:
        index: The index.
        paths: The files of the index.
        index_again: Builds the index of some files.
        number: The number of the file.
    """
    rows = slice(*index.about["first"][number : number + 2])
    try:
        arrays = index_again([paths[number]]).arrays
    except (OSError, ValueError):
        return False
    return all(np.array_equal(array[rows], arrays[name]) for name, array in index.arrays.items())


HasContent = Callable[[Index, Sequence[str], Callable[[Sequence[str]], Index], int], bool]


class ByteRecords(BaseSource):
    """A source with an index, which contains the value or byte range of each record's fields.

    `dalijax.core.formats.index_checks` describes the index. A subclass whose index has other names
    than its fields, or other rows than its records, overrides `_column` and `_rows`.

    Args:
        index: The index.
        paths: The files, possibly moved since they were indexed.
        fields: Names and kinds of the fields.
        decoders: Functions that decode fields. Byte ranges of other fields become uint8 arrays.
        identity: The identity that the user gave; None: a digest of the records.
        defaults: Values of fields for records without the field.
        index_again: Scans some files again, and returns their index; must be picklable.
        storage: Access to remote files.
        has_content: Returns whether a numbered file still has the content of the index, given the
            index, the files and ``index_again``.
    """

    _gives_new_arrays = True  # read() returns new arrays, so that ReuseCheck is not needed

    def __init__(
        self,
        index: Index,
        paths: Sequence[str],
        fields: Mapping[str, Field],
        decoders: Mapping[str, Decode],
        identity: str | None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        *,
        index_again: Callable[[Sequence[str]], Index],
        storage: Storage,
        has_content: HasContent = _has_content,
    ):
        super().__init__(fields, identity)
        self._defaults = dict(defaults)
        self._index = index
        self._identity_reads = "samples" not in index.about  # otherwise indexing read them
        self._decoders = decoders
        self._files = ByteFiles(
            paths,
            index.about["sizes"],
            index.about.get("stamps", ()),
            functools.partial(has_content, index, tuple(paths), index_again),
            storage,
        )
        are_remote = any(map(is_remote, paths))
        self._read_ahead = storage.read_ahead if are_remote else 0
        if are_remote and not self._read_ahead:
            self.read_threads = WAITING_THREADS
        self._first_records = np.array(index.about["first"], np.int64)

    @property
    def _version(self) -> str | None:
        return self._files.version()

    def __len__(self) -> int:
        return int(self._first_records[-1])

    def __repr__(self) -> str:
        paths = self._files.paths
        location = printable(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
        return f"{type(self).__name__}({location}: {len(self):,} records)"

    def read(self, indices: Indices, names: Sequence[str]) -> dict[str, Values]:
        """Returns fields of some records; see `dalijax.sources.Source`."""
        self._check_intact(indices, names)
        arrays = self._index.arrays
        ranges = self._in_files(names)
        columns: dict[str, Values] = {
            name: np.asarray(arrays[f"{self._column(name)}.value"][self._rows(name, indices)])
            for name in names
            if name not in ranges
        }
        if ranges:
            rows = len(indices)
            pieces = self._files.read(
                *self._byte_ranges(indices, ranges),
                lambda k: (
                    f"{ranges[k // rows]!r} of {printable_text(self.name(int(indices[k % rows])))}"
                ),
            )
            pieces = self._values(pieces, indices, ranges)
            for turn, name in enumerate(ranges):
                values = pieces[turn * rows : (turn + 1) * rows]
                decoded = self._decoded(name, values, indices)
                if name in self._defaults:
                    lacking = arrays[f"{name}.offset"][indices] == MISSING
                    for row in np.flatnonzero(lacking).tolist():
                        decoded[row] = self._defaults[name]
                columns[name] = decoded
        return {name: columns[name] for name in names}

    def _heads(
        self, indices: Indices, name: str, num_bytes: int
    ) -> Sequence[NDArray[np.uint8]] | None:
        """Returns the first bytes of a field of some records; see `heads_of`."""
        if name not in self._in_files([name]) or name in self._decoders or name in self._defaults:
            return None
        self._check_intact(indices, [name])
        # Not of a subclass, which may read whole records to verify them.
        files, offsets, sizes = ByteRecords._byte_ranges(self, indices, [name])
        return self._files.read(
            *(files, offsets, np.minimum(sizes, num_bytes)),
            lambda row: f"{name!r} of {printable_text(self.name(int(indices[row])))}",
            stores=False,
        )

    def _check_intact(self, indices: Indices, names: Sequence[str]) -> None:
        """Raises ValueError if a record, or one of the named fields, was damaged when indexed."""
        damaged = self._are_damaged(indices)
        if damaged.any():
            raise self._damaged(int(indices[np.argmax(damaged)]))

    def _are_damaged(self, indices: Indices) -> NDArray[np.bool_]:
        """Returns whether each record had a wrong checksum when it was indexed."""
        damaged = self._index.arrays.get("damaged")
        return np.zeros(len(indices), bool) if damaged is None else damaged[indices]

    def _damaged(self, index: int) -> ValueError:
        """Returns the error about a record with a wrong checksum."""
        return ValueError(
            f"{printable_text(self.name(index))} is damaged: its checksum is wrong. Copy the file "
            "again, or pass verify=False to read the record as it is"
        )

    def _values(
        self, pieces: list[NDArray[np.uint8]], indices: Indices, names: Sequence[str]
    ) -> list[NDArray[np.uint8]]:
        """Returns the bytes of the values of fields, given the ranges of `_byte_ranges`.

        Args:
            pieces: The bytes of each range.
            indices: The records.
            names: Fields whose values are byte ranges.

        Returns:
            The bytes of all values of the first field, then those of the next field.

        Raises:
            ValueError: If a record is damaged.
        """
        return pieces

    def _range_bytes(self, indices: Indices, names: Sequence[str]) -> int:
        """Returns the number of bytes that `_announce` requests for some records."""
        return self._files.num_bytes(*self._byte_ranges(indices, names))

    def _announce(
        self,
        indices: Indices,
        names: Sequence[str],
        turns: Indices,
        freed: collections.deque[int],
    ) -> list[tuple[Lease, Indices]]:
        """Requests the bytes of records that will be read soon; see `ByteFiles.announce`.

        Returns:
            Pairs of a `Lease` and the turn of each of its ranges.
        """
        files, offsets, sizes = self._byte_ranges(indices, names)
        turns = np.tile(turns, len(files) // max(1, len(indices)))
        return self._files.announce(files, offsets, sizes, turns, freed)

    def _byte_ranges(
        self, indices: Indices, names: Sequence[str]
    ) -> tuple[Indices, Indices, Indices]:
        """Returns the byte ranges of fields of records; fields without a range are omitted.

        Returns:
            The file, the offset and the size in bytes of each range: all ranges of the first field,
            then all ranges of the next field.
        """
        arrays, names = self._index.arrays, self._in_files(names)
        columns = [(self._column(name), self._rows(name, indices)) for name in names]
        none = np.empty(0, np.int64)
        # All ranges of a record are in the same file.
        rows = columns[0][1] if columns else none
        return (
            np.tile(np.searchsorted(self._first_records, rows, side="right") - 1, len(names)),
            np.concatenate([none, *(arrays[f"{name}.offset"][k] for name, k in columns)]),
            # Sizes have 32 or 64 bits; the empty array makes all of them int64.
            np.concatenate([none, *(arrays[f"{name}.size"][k] for name, k in columns)]),
        )

    def _column(self, name: str) -> str:
        """Returns the name of a field in the index."""
        return name

    def _rows(self, name: str, indices: Indices) -> Indices:
        """Returns the rows of the index that contain a field of some records."""
        return indices

    def _in_files(self, names: Sequence[str]) -> list[str]:
        """Returns the fields whose values are byte ranges of files."""
        return [name for name in names if f"{self._column(name)}.size" in self._index.arrays]

    def _decoded(self, name: str, pieces: list[Any], indices: Indices) -> list[Any]:
        """Returns the values of a field of some records, decoded from bytes; see ``decoders``.

        Raises:
            ValueError: If a value can't be decoded.
        """
        decode = self._decoders.get(name)
        if decode is None:
            return pieces
        values = []
        for piece, index in zip(pieces, indices.tolist(), strict=True):
            try:
                values.append(decode(piece))
            except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
                raise ValueError(
                    f"{name!r} of {printable_text(self.name(index))} can't be read: {error}"
                ) from error
        return values

    def _file_and_offset(self, index: int) -> tuple[int, int]:
        """Returns the number of a record's file, and the record's offset in that file."""
        files, starts = self._files_and_offsets(np.array([index]))
        return int(files[0]), int(starts[0])

    def _files_and_offsets(self, indices: Indices) -> tuple[Indices, Indices]:
        """Returns the number of each record's file, and the record's offset in that file."""
        files = np.searchsorted(self._first_records, indices, side="right") - 1
        return files, np.asarray(self._index.arrays["start"][indices], np.int64)

    def _content(self) -> tuple[Any, ...]:
        about = self._index.about
        samples, defaults = about.get("samples"), repr(sorted(self._defaults.items()))
        return about["names"], about["sizes"], about.get("columns"), samples, defaults
