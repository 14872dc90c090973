"""A table of what is known about records, in bounded memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices

_MOST_SLOTS = 1 << 21


class RecordTable:
    """Keeps numbers about records. A record may push out another one, which is then looked up anew.

    Up to 2,097,152 records have a slot each. Memory is used only for the pages that are written, at
    most ``4 * (columns + 1)`` bytes for each slot.

    Args:
        count: The number of records, if it is known; others may follow.
        columns: The number of values of a record.
        most_slots: The largest number of records that are kept.
    """

    def __init__(self, count: int, columns: int, most_slots: int = _MOST_SLOTS):
        self._slots = max(1, min(count, most_slots))
        # Which of the records of a slot is in it, from 1: 0 for none.
        self._turns = _zeros(self._slots, 1)[:, 0]
        self._values = _zeros(self._slots, columns)
        # Else one thread may see the turn of a record with the values of another one.
        self._lock = threading.Lock()

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes that the table uses."""
        return self._turns.nbytes + self._values.nbytes

    def get(self, records: Indices) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Returns whether each record is known, and its values, int32 [records, columns]."""
        turns, slots = np.divmod(records, self._slots)
        with self._lock:
            return self._turns[slots] == turns + 1, self._values[slots]

    def put(self, records: Indices, values: Any) -> None:
        """Keeps the values of records, int32 [records, columns]."""
        turns, slots = np.divmod(records, self._slots)
        # Of several records with one slot the last one stays, in both tables.
        _, last = np.unique(slots[::-1], return_index=True)
        rows = len(slots) - 1 - last
        with self._lock:
            self._turns[slots[rows]] = turns[rows] + 1
            self._values[slots[rows]] = np.asarray(values, np.int32)[rows]

    def __reduce__(self) -> Any:
        return RecordTable, (self._slots, self._values.shape[1])  # another process looks for itself


def _zeros(rows: int, columns: int) -> NDArray[np.int32]:
    """Returns int32 zeros of shape [rows, columns], whose memory is used page by page."""
    if not columns:
        return np.empty((rows, 0), np.int32)
    pages = mmap.mmap(-1, rows * columns * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32).reshape(rows, columns)
