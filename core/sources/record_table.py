"""`RecordTable`: a cache of integers about records, with bounded memory."""

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
    """Caches int32 values of records, in a table with a bounded number of slots.

    Each of up to 2,097,152 records has its own slot. Further records share slots, and evict one
    another. Only touched pages use memory, at most ``4 * (columns + 1)`` bytes per slot.

    Args:
        count: The number of records. Records with larger indices are allowed, and share slots.
        columns: The number of values of each record.
        most_slots: The maximum number of slots.
    """

    def __init__(self, count: int, columns: int, most_slots: int = _MOST_SLOTS):
        self._slots = max(1, min(count, most_slots))
        # The record in each slot, as 1 + record // slots; 0 for an empty slot.
        self._turns = _zeros(self._slots, 1)[:, 0]
        self._values = _zeros(self._slots, columns)
        # Without the lock, a thread might combine the turn of a record with values of another.
        self._lock = threading.Lock()

    @property
    def most_bytes(self) -> int:
        """Maximum memory of the table in bytes."""
        return self._turns.nbytes + self._values.nbytes

    def get(self, records: Indices) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Returns whether each record is cached, bool, and the values, int32 [records, columns].

        The values of records that are not cached have no meaning.
        """
        turns, slots = np.divmod(records, self._slots)
        with self._lock:
            return self._turns[slots] == turns + 1, self._values[slots]

    def put(self, records: Indices, values: Any) -> None:
        """Caches the values of records, int32 [records, columns]."""
        turns, slots = np.divmod(records, self._slots)
        # Of several records with the same slot, the last is kept, in both tables.
        _, last = np.unique(slots[::-1], return_index=True)
        rows = len(slots) - 1 - last
        with self._lock:
            self._turns[slots[rows]] = turns[rows] + 1
            self._values[slots[rows]] = np.asarray(values, np.int32)[rows]

    def __reduce__(self) -> Any:
        return RecordTable, (self._slots, self._values.shape[1])  # contents are not pickled


def _zeros(rows: int, columns: int) -> NDArray[np.int32]:
    """Returns int32 zeros [rows, columns]; only touched pages use memory."""
    if not columns:
        return np.empty((rows, 0), np.int32)
    pages = mmap.mmap(-1, rows * columns * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # kernels without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32).reshape(rows, columns)
