"""Reads row groups of Parquet files by pyarrow, with the package's access to remote files."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..environment.extras import extra
from ..order.shuffle import Indices
from ..remote.storage import Storage
from ..threads.workers import call_each
from .byte_files import WAITING_THREADS, ByteFiles
from .file_kinds import pointer_fault
from .stamps import settled_stamps

_TAIL = 1 << 16  # bytes at the end of a file, which usually contain the footer
_HOLE = 8 << 10  # bytes between columns that are read with them, as pyarrow does
_HEADER = 128  # bytes; at least the size of the header of a dictionary
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.12 has the name
_REQUEST = 8 << 20  # bytes; larger ranges are requested in parts, at the same time


def _pyarrow() -> tuple[Any, Any]:
    """Returns the modules ``pyarrow`` and ``pyarrow.parquet``."""
    with extra("parquet", "pyarrow, which sources.Parquet needs,"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    return pa, pq


class _Reader:
    """One of several files as a file object, which pyarrow reads.

    Args:
        files: The files.
        number: The number of the file.

    Attributes:
        error: The error of a read; None if all reads were successful.
    """

    closed = False

    def __init__(self, files: ByteFiles, number: int):
        self._files, self._number = files, number
        self._at = 0
        self.error: Exception | None = None

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves to a position, as ``io.IOBase.seek``."""
        self._at = offset + (0, self._at, self._files.sizes[self._number])[whence]
        return self._at

    def read(self, count: int = -1) -> Any:
        """Returns the next ``count`` bytes, or fewer at the end of the file."""
        begin, size = self._at, self._files.sizes[self._number]
        end = size if count < 0 else min(size, begin + count)
        try:
            content = read_range(self._files, self._number, begin, end)
        except Exception as error:
            self.error = error
            raise
        self._at = end
        return content

    def close(self) -> None:
        """Does nothing, since `ByteFiles` closes the file."""


def read_pieces(
    files: ByteFiles, number: int, ranges: Sequence[Sequence[int]]
) -> tuple[list[int], list[Any]]:
    """Reads ranges of a file at once; long ranges of remote files are read by several requests.

    Args:
        files: The files.
        number: The number of the file.
        ranges: The first byte of each range, and the byte after its last.

    Returns:
        The first byte of each piece of a range, and its bytes.
    """
    pieces = [
        (start, min(end - start, _REQUEST))
        for begin, end in ranges
        for start in range(begin, max(begin + 1, end), _REQUEST)
    ]
    starts, sizes = np.array(pieces, np.int64).T
    parts = files.read(
        np.full(len(starts), number), starts, sizes, lambda row: f"byte {starts[row]:,}"
    )
    return starts.tolist(), parts


def read_range(files: ByteFiles, number: int, begin: int, end: int) -> memoryview:
    """Returns a range of a file; see `read_pieces`."""
    _, parts = read_pieces(files, number, [(begin, end)])
    return memoryview(parts[0] if len(parts) == 1 else np.concatenate(parts))


class ParquetFiles:
    """Parquet files, whose footers are read when the object is created.

    Args:
        paths: Paths or URLs.
        storage: Access to remote files.

    Attributes:
        files: The files.
        digests: A digest of the footer of each file. Footers contain the number of rows, and the
            size, the place and usually the extrema of each column of a row group.
        metadata: The ``pyarrow.parquet.FileMetaData`` of each file.
        first_groups: The number of row groups before each file, and of all files, int64 [files +
            1]. Row groups are numbered file by file.
        starts: The first row of each row group, and the number of rows of all files, int64
            [groups + 1].

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is not a Parquet file.
        ImportError: If pyarrow is not installed.
    """

    def __init__(self, paths: Sequence[str], storage: Storage):
        _pyarrow()
        stamps = settled_stamps(paths, storage)
        self.files = ByteFiles(paths, [stamp[0] for stamp in stamps], stamps, None, storage)
        footers = call_each(self._footer, range(len(paths)), WAITING_THREADS, "dalijax-open")
        self.digests = [hashlib.sha256(footer).hexdigest()[:12] for footer in footers]
        self.metadata = [self._metadata(*item) for item in enumerate(footers)]
        groups = [metadata.num_row_groups for metadata in self.metadata]
        self.first_groups = np.cumsum([0, *groups], dtype=np.int64)
        rows = [m.row_group(g).num_rows for m in self.metadata for g in range(m.num_row_groups)]
        self.starts = np.cumsum([0, *rows], dtype=np.int64)

    def _footer(self, number: int) -> bytes:
        """Returns the footer of a file: its length is stored in the last eight bytes."""
        size = self.files.sizes[number]
        tail = read_range(self.files, number, max(0, size - _TAIL), size)
        length = 8 + int.from_bytes(tail[-8:-4], "little")
        if len(tail) < length <= size:
            tail = read_range(self.files, number, size - length, size)
        if fault := pointer_fault(tail):
            raise ValueError(f"{self.files.name(number)}: {fault}")
        return bytes(tail[-length:])

    def _metadata(self, number: int, footer: bytes) -> Any:
        pa, pq = _pyarrow()
        try:
            return pq.read_metadata(pa.BufferReader(footer))
        except (ValueError, OSError) as error:  # of pyarrow
            raise ValueError(
                f"{self.files.name(number)} is not a complete Parquet file: {error}"
            ) from error

    def place(self, group: int) -> tuple[int, int]:
        """Returns the file of a row group, and the number of the row group in the file."""
        file = int(np.searchsorted(self.first_groups, group, side="right")) - 1
        return file, group - int(self.first_groups[file])

    def first_row(self, group: int) -> tuple[str, int]:
        """Returns the name of the file of a row group, and the group's first row in the file."""
        file, number = self.place(group)
        return self.files.name(file), int(self.starts[group] - self.starts[group - number])

    def sizes(self, columns: Sequence[str]) -> Indices:
        """Returns the uncompressed size of some columns in each row group, int64 [groups].

        Raises:
            ValueError: If a file lacks a column.
        """
        sizes = []
        for file, metadata in enumerate(self.metadata):
            names = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
            missing = [column for column in columns if not any(_is_of(x, [column]) for x in names)]
            if missing:
                raise ValueError(
                    f"{self.files.name(file)} has no columns {missing}, unlike the first file. "
                    "Omit the file, or pass fields= with columns of all files"
                )
            wanted = [k for k, name in enumerate(names) if _is_of(name, columns)]
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                sizes.append(sum(group.column(k).total_uncompressed_size for k in wanted))
        return np.array(sizes, np.int64)

    def head(self, count: int) -> Any:
        """Returns the first rows of the first row group that has rows, as a ``pyarrow.Table``.

        Args:
            count: The largest number of rows.

        Raises:
            ValueError: If there are no rows, or they can't be read.
        """
        if not self.starts[-1]:
            names = ", ".join(map(self.files.name, range(min(3, len(self.metadata)))))
            raise ValueError(f"the {len(self.metadata)} files have no rows: {names}")
        group = int(np.flatnonzero(np.diff(self.starts))[0])

        def read(file: Any, number: int) -> Any:
            return next(file.iter_batches(batch_size=count, row_groups=[number]))

        # With a buffer, only the first pages of a column are read.
        source = _Reader(self.files, self.place(group)[0])
        batch = self._call(group, read, source, buffer_size=1 << 20, pre_buffer=False)
        return _pyarrow()[0].Table.from_batches([batch])

    def table(self, group: int, columns: Sequence[str]) -> Any:
        """Returns some columns of a row group as a ``pyarrow.Table``.

        Raises:
            OSError: If the file can't be read, or has changed.
            ValueError: If the row group is damaged.
        """

        def read(file: Any, number: int) -> Any:
            return file.read_row_group(number, columns=list(columns))

        return self._call(group, read, self._copied(group, columns))

    def _copied(self, group: int, columns: Sequence[str]) -> Any:
        """Returns a buffer of the file's size that has the bytes of some columns of a row group.

        Other bytes take no memory. pyarrow reads the buffer in its own threads. If these called
        Python instead, to read a file, Python could not end while a server is slow.
        """
        pa, _ = _pyarrow()
        file, number = self.place(group)
        size = int(self.files.sizes[file])
        row_group = self.metadata[file].row_group(number)
        chunks = [row_group.column(k) for k in range(row_group.num_columns)]
        chunks = [chunk for chunk in chunks if _is_of(chunk.path_in_schema, columns)]
        firsts = [
            min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
            for chunk in chunks
        ]
        # Some writers do not count the header of the dictionary; pyarrow reads it anyway.
        lasts = [first + c.total_compressed_size + _HEADER for first, c in zip(firsts, chunks)]
        spans: list[list[int]] = []
        for first, last in sorted(zip(firsts, lasts)):
            if not spans or first > spans[-1][1] + _HOLE:
                spans.append([first, last])
            spans[-1][1] = min(size, max(spans[-1][1], last))
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        for start, part in zip(*read_pieces(self.files, file, spans)):
            memory[start : start + len(part)] = part
        return pa.BufferReader(pa.py_buffer(memory))

    def _call(self, group: int, read: Any, source: Any, **options: Any) -> Any:
        """Calls a function with a ``pyarrow.parquet.ParquetFile`` and the number of a row group.

        Args:
            group: The row group.
            read: The function.
            source: The file, as a file object or a buffer.
            **options: Further arguments of ``ParquetFile``.
        """
        pa, pq = _pyarrow()
        file, number = self.place(group)
        options |= {"metadata": self.metadata[file], "page_checksum_verification": True}
        try:
            return read(pq.ParquetFile(source, **options), number)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError) as error:
            if isinstance(source, _Reader) and source.error is not None:  # perhaps wrapped
                raise source.error from None
            name = f"row group {number} of {self.files.name(file)}"
            raise ValueError(f"{name} can't be read: {error}") from error


def _is_of(name: str, columns: Sequence[str]) -> bool:
    """Returns whether a column of values, such as "image.bytes", belongs to one of some columns."""
    return any(name == column or name.startswith(f"{column}.") for column in columns)
