"""`SpooledArray`: an array that grows in memory, or in a temporary file if it is large."""

from __future__ import annotations

import tempfile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 1 << 24  # rows that take more bytes are moved to the file


class SpooledArray:
    """An array to which rows are appended. Many rows are moved to a temporary file.

    So an index of millions of steps needs little memory while it is built.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._num_bytes = 0
        self._file: BinaryIO | None = None
        self._in_file: list[tuple[np.dtype[Any], int]] = []  # dtype and number of rows of a part

    def append(self, rows: NDArray[Any]) -> None:
        """Appends an array [rows, ...], whose dtype may differ from the dtype of earlier rows."""
        self._parts.append(rows)
        self._num_bytes += rows.nbytes
        if self._num_bytes > MOST_BYTES:
            self._write()

    def _write(self) -> None:
        """Moves the rows in memory to the temporary file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `array` or `__del__`)
        for part in self._parts:
            if part.size:
                self._file.write(np.ascontiguousarray(part).data)
                self._in_file.append((part.dtype, len(part)))
        self._parts, self._num_bytes = [self._parts[-1][:0]], 0  # an empty part has the shape

    def array(self) -> NDArray[Any]:
        """Returns all rows as an array of their common dtype; must be called only once.

        If rows were moved to the temporary file and have the same dtype, the array is the
        memory-mapped file. If their dtypes differ, the rows are copied to memory.
        """
        if self._file is None:
            return np.concatenate(self._parts)
        self._write()
        shape = self._parts[0].shape[1:]
        dtypes = {dtype for dtype, _ in self._in_file}
        total = sum(count for _, count in self._in_file)
        with self._file as file:
            file.flush()
            if len(dtypes) == 1:
                return np.memmap(file, dtypes.pop(), "r", shape=(total, *shape))
            result, row, at = np.empty((total, *shape), np.result_type(*dtypes)), 0, 0
            for dtype, count in self._in_file:
                part = np.memmap(file, dtype, "r", at, (count, *shape))
                result[row : row + count] = part
                row, at = row + count, at + part.nbytes
        return result

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
