"""Locates all features of the episodes in TFRecord files, for shared indexes.

The range of a feature is its offset in the file and its size. Given the ranges, `LocatedEpisodes`
reads only the numbers and texts of the wanted features, by the code that also indexes whole files.
So both indexes are equal.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import example
from ..formats.buffered_reader import SMALL_BUFFER, BufferedReader
from ..formats.byte_files import ByteFile, ByteFiles, Stamp
from ..formats.file_columns import (
    ABSENT,
    EMPTY,
    PRESENT,
    UNSET,
    Column,
    ColumnRows,
    FileColumns,
    item_offsets,
)
from ..formats.tfrecord_columns import are_adjacent, tfrecord_columns
from ..formats.tfrecord_headers import FOOTER, HEADER, is_intact
from ..formats.tfrecord_index import KINDS
from ..order.shuffle import Indices
from ..remote.storage import Storage
from .episode_columns import (
    HEAD,
    Episode,
    EpisodeColumns,
    EpisodeFeatures,
    columns_of,
    kind_of,
)
from .rlds_features import TEXT


class _ListRanges:
    """Collects the offsets and sizes of the lists of a feature in the records of a file.

    Implements `dalijax.core.formats.tfrecord_columns.FeatureRanges`.
    """

    def __init__(self) -> None:
        self.kind = 0  # kind of the feature in the first record that has a list
        self.is_odd = False
        self._rows, self._items = ColumnRows(), array.array("q")

    def add(self, row: int, feature: example.Feature, take: BufferedReader) -> None:
        """Adds the list of a record; see `FeatureRanges.add`."""
        kind, ranges = feature.kind, np.array(feature.ranges, np.int64).reshape(-1, 2)
        if len(ranges):  # the kind of an empty list does not matter
            self.kind = self.kind or kind
            self.is_odd |= kind != self.kind
        self.is_odd |= kind not in (0, *KINDS) or bool(feature.loose)
        (at, size), count = ranges[0] if len(ranges) else (0, 0), len(ranges)
        if kind == example.BYTES:
            size = int(ranges[-1].sum()) - at if count else 0
            self.is_odd |= not are_adjacent(feature.ranges)
        elif count == 1:
            count, is_whole = _count(take(at, size), kind)
            self.is_odd |= not is_whole
        else:
            self.is_odd |= count > 1
        if self.is_odd:
            return
        self._rows.append(row, at, size, PRESENT if len(ranges) else EMPTY if kind else UNSET)
        self._rows.counts.append(count)
        if kind == example.BYTES:
            self._items.extend(ranges[:, 1].tolist())

    def column(self, count: int) -> Column:
        """Returns the column of the feature, with ``count`` rows; see `FeatureRanges.column`."""
        items = np.array(self._items, np.int64) if self.kind == example.BYTES else None
        return self._rows.column(count, self.kind, items=items)


def _count(data: bytes, kind: int) -> tuple[int, bool]:
    """Returns how many packed numbers some bytes contain, and whether the last number is complete.

    Args:
        data: The packed numbers.
        kind: FLOATS or INTS of `dalijax.core.formats.example`.
    """
    if kind == example.FLOATS:
        return len(data) // 4, len(data) % 4 == 0
    ends = np.frombuffer(data, np.uint8) < 128
    return int(ends.sum()), not len(ends) or bool(ends[-1])


def episode_ranges(paths: Sequence[str], storage: Storage, verify: bool = True) -> FileColumns:
    """Reads TFRecord files; returns the columns of all features, with a row for each episode.

    Args:
        paths: The files.
        storage: Access to remote files.
        verify: Whether to verify the checksums of episodes.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is damaged, or a record is not a tf.train.Example.
    """
    intact = is_intact if verify else None
    return tfrecord_columns(paths, storage, new_ranges=_ListRanges, intact=intact)[1]


class _FetchedReader(BufferedReader):
    """A `BufferedReader` that takes some ranges of a file from memory instead of reading them.

    Args:
        file: The file.
        offsets: Offset of each range in the file.
        ranges: The bytes of each range, as uint8 arrays.
    """

    def __init__(self, file: ByteFile, offsets: Indices, ranges: Sequence[NDArray[np.uint8]]):
        super().__init__(file, SMALL_BUFFER)
        order = np.argsort(offsets, kind="stable")
        self._offsets, self._ranges = offsets[order], [ranges[k] for k in order.tolist()]

    def __call__(self, at: int, count: int) -> bytes:
        if not self._start <= at <= self._start + len(self._data) - count:
            number = int(np.searchsorted(self._offsets, at, side="right")) - 1
            start = int(self._offsets[number]) if number >= 0 else 0
            if number >= 0 and at + count <= start + len(self._ranges[number]):
                self._data, self._start = self._ranges[number].tobytes(), start
        return super().__call__(at, count)


class LocatedEpisodes:
    """Reads the wanted features of episodes, given the ranges of the features.

    Args:
        table: The columns of all wanted features and of `COUNTERS`; see `episode_ranges`.
        paths: The files.
        stamps: The stamp of each file.
        features: The wanted features.
    """

    def __init__(
        self,
        table: FileColumns,
        paths: Sequence[str],
        stamps: Sequence[Stamp],
        features: EpisodeFeatures,
    ):
        self._table, self._features = table, features
        # Without the user's disk cache, since the index contains the values that are read here.
        storage = Storage(features.storage.options)
        self._files = ByteFiles(paths, [stamp[0] for stamp in stamps], stamps, storage=storage)
        names = features.needed
        self._columns = {k: column for k, column in table.columns.items() if k in names}
        # For features of byte strings, the number of byte strings before each record, and in total;
        # and the offset of each byte string.
        self._items: dict[str, tuple[Indices, Indices]] = {}
        for name, column in self._columns.items():
            if column.items is not None and column.counts is not None:
                first = np.concatenate([[0], np.cumsum(column.counts)])
                self._items[name] = first, item_offsets(column)

    def read(self, number: int) -> EpisodeColumns:
        """Returns the episodes of a file, given its number; equal to the result of `read_episodes`.

        Raises:
            OSError: If the file can't be read, or has changed.
            ValueError: If an episode can't be read as steps.
        """
        rows = np.arange(*self._table.first_rows[number : number + 2])
        offsets, sizes, heads = [], [], []
        for name in self._features.names:
            column = self._columns.get(name)
            present = rows if column is None else rows[column.states[rows] == PRESENT]
            if column is None or not len(present):
                continue
            if name in self._items:
                heads.append((name, present))
                continue
            offsets.append(column.offsets[present])
            sizes.append(column.sizes[present])
        for (name, present), head in zip(heads, self._heads(number, heads), strict=True):
            spec, column = self._features.specs.get(name), self._columns[name]
            if (spec.kind if spec else kind_of(head.tobytes())) == TEXT:
                offsets.append(column.offsets[present])
                sizes.append(column.sizes[present])
        starts = np.concatenate([[], *offsets]).astype(np.int64)
        ranges = self._ranges(number, starts, np.concatenate([[], *sizes]).astype(np.int64))
        file = self._files.file(number)
        take = _FetchedReader(file, starts, ranges)
        return columns_of(self._episodes(rows, file.size), take, self._features)

    def _heads(self, number: int, columns: Sequence[tuple[str, Indices]]) -> list[Any]:
        """Returns the first bytes of a byte string of each column, which tell images from texts.

        Args:
            number: The number of the file.
            columns: Pairs of a feature and the rows that have byte strings of it. The first byte
                string of the first row is read.
        """
        starts, sizes = [], []
        for name, rows in columns:
            first, offsets = self._items[name]
            item = first[rows[0]]
            starts.append(offsets[item])
            items = self._columns[name].items
            sizes.append(0 if items is None else min(HEAD, items[item]))
        return self._ranges(number, np.array(starts, np.int64), np.array(sizes, np.int64))

    def _ranges(self, number: int, offsets: Indices, sizes: Indices) -> list[NDArray[np.uint8]]:
        """Returns the bytes of ranges of a file, given its number, as uint8 arrays."""
        files = np.full(len(offsets), number)
        return self._files.read(files, offsets, sizes, lambda row: "an episode")

    def _episodes(self, rows: Indices, file_size: int) -> Iterator[Episode]:
        """Yields the episodes of a file.

        Args:
            rows: The rows of all episodes of the file in the table.
            file_size: The size of the file in bytes.
        """
        starts = self._table.starts[rows].tolist()
        ends = [start - HEADER for start in starts[1:]] + [file_size] * (len(starts) > 0)
        for row, start, end in zip(rows.tolist(), starts, ends, strict=True):
            size = end - FOOTER - start
            if self._table.damaged[row]:
                yield start, size, None
                continue
            found = [
                (column.offsets[row], name.encode(), self._feature(name, column, row))
                for name, column in self._columns.items()
                if column.states[row] != ABSENT
            ]
            found.sort(key=lambda item: item[0])
            yield start, size, [(name, feature) for _, name, feature in found]

    def _feature(self, name: str, column: Column, row: int) -> example.Feature:
        """Returns a feature of an episode, as `example.features` would locate it in the file."""
        if column.states[row] != PRESENT or column.counts is None:
            return example.Feature(example.INTS if column.states[row] == EMPTY else 0, [], [], 0)
        count = int(column.counts[row])
        if name in self._items and column.items is not None:
            first, offsets = self._items[name]
            items = slice(first[row], first[row + 1])
            ranges = list(zip(offsets[items].tolist(), column.items[items].tolist(), strict=True))
            return example.Feature(column.kind, ranges, [], count)
        only = int(column.offsets[row]), int(column.sizes[row])
        return example.Feature(column.kind, [only], [], count)
