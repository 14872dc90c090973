"""Detects record sources that reuse a buffer which is still in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..random.hashing import Bits
from .source import Source, SourceFault, Values, read_records

_Record = tuple[int, Bits | None]  # a record and its key

_ENOUGH = 64  # pairs of records with equal values in the same memory, after which checks end


class ReuseCheck:
    """Detects sources whose arrays are in the memory of other records' arrays, still in use.

    Threads read ahead, and DALI takes arrays without a copy. If a source fills the same buffer for
    several records, all of them get the values of the last record. If two records have the same
    memory, both are read again and compared, since records may share a constant array.

    Args:
        source: The source.
    """

    def __init__(self, source: Source):
        self._source = source
        # By address and field. Weak, since the memory of a freed array may be used again.
        self._alive: dict[tuple[int, str], tuple[weakref.ref[NDArray[Any]], _Record]] = {}
        self._most = 1024  # entries, after which those of freed arrays are dropped
        self._equal = 0
        self._lock = threading.Lock()  # several threads read

    def check(
        self, records: Indices, columns: Mapping[str, Values], keys: Bits | None = None
    ) -> None:
        """Checks the arrays of some records.

        Args:
            records: The records.
            columns: The values of their fields.
            keys: The key of each record; see `read_records`.

        Raises:
            SourceFault: If two records with different values have the same memory, while the array
                of the first record is in use.
        """
        if self._equal >= _ENOUGH:
            return
        for name, values in columns.items():
            self._forget_freed()
            for row, array in _arrays(values):
                record = int(records[row]), None if keys is None else keys[row : row + 1]
                key = (array.__array_interface__["data"][0], name)
                with self._lock:
                    before = self._alive.get(key)
                    self._alive[key] = weakref.ref(array), record
                if before is not None and before[0]() is not None and before[1][0] != record[0]:
                    self._compare(name, before[1], record)

    def _forget_freed(self) -> None:
        with self._lock:
            if len(self._alive) > self._most:
                self._alive = {k: v for k, v in self._alive.items() if v[0]() is not None}
                self._most = 2 * len(self._alive) + 1024  # so that an entry is visited about twice

    def _compare(self, name: str, *pair: _Record) -> None:
        """Raises SourceFault if two records in the same memory have different values."""
        values: list[NDArray[Any]] = []
        for record, key in pair:
            columns, errors = read_records(self._source, np.array([record]), [name], key)
            if errors:
                return  # of a function that has returned a value before
            values.append(np.array(columns[name][0]))
        if not np.array_equal(values[0], values[1]):
            raise SourceFault(
                f"{type(self._source).__name__}.read() returned {name!r} of records {pair[0][0]} "
                f"and {pair[1][0]} in the same memory, while the first was in use: batches would "
                "have the wrong data. Return new arrays from each call, e.g. by .copy()"
            )
        self._equal += 1

    def __reduce__(self) -> Any:
        return ReuseCheck, (self._source,)


def _arrays(values: Values) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields each row with its array, if its memory is writable.

    A column that is one array is yielded once, with the first row.
    """
    rows: Sequence[object] = [values] if isinstance(values, np.ndarray) else values
    for row, value in enumerate(rows):
        if isinstance(value, np.ndarray) and value.size:
            base = value.base  # of a view that is read-only, such as a map's input
            if value.flags.writeable or (isinstance(base, np.ndarray) and base.flags.writeable):
                yield row, value
