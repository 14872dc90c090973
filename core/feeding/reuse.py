"""Detects record sources that reuse a buffer which is still in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..sources.source import Source, Values

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
        self._alive: dict[tuple[int, str], tuple[weakref.ref[NDArray[Any]], int]] = {}
        self._most = 1024  # entries, after which those of freed arrays are dropped
        self._equal = 0
        self._lock = threading.Lock()  # several threads read

    def check(self, records: Indices, columns: Mapping[str, Values]) -> None:
        """Checks the arrays of some records.

        Raises:
            ValueError: If two records with different values have the same memory, while the array
                of the first record is in use.
        """
        if self._equal >= _ENOUGH:
            return
        for name, values in columns.items():
            self._forget_freed()
            for record, array in _arrays(records, values):
                key = (array.__array_interface__["data"][0], name)
                with self._lock:
                    before = self._alive.get(key)
                    self._alive[key] = weakref.ref(array), record
                if before is not None and before[0]() is not None and before[1] != record:
                    self._compare(name, before[1], record)

    def _forget_freed(self) -> None:
        with self._lock:
            if len(self._alive) > self._most:
                self._alive = {k: v for k, v in self._alive.items() if v[0]() is not None}
                self._most = 2 * len(self._alive) + 1024  # so that an entry is visited about twice

    def _compare(self, name: str, first: int, second: int) -> None:
        """Raises ValueError if two records in the same memory have different values."""
        first_value, second_value = (
            np.array(self._source.read(np.array([record]), [name])[name][0])
            for record in (first, second)
        )
        if not np.array_equal(first_value, second_value):
            raise ValueError(
                f"{type(self._source).__name__}.read() returned {name!r} of records {first} and "
                f"{second} in the same memory, while the first was in use: batches would have the "
                "wrong data. Return new arrays from each call, e.g. by .copy()"
            )
        self._equal += 1


def _arrays(records: Indices, values: Values) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields each record with its array, if the array is writable.

    A column that is one array is yielded once, with the first record.
    """
    rows: Sequence[object] = [values] if isinstance(values, np.ndarray) else values
    for record, value in zip(records.tolist(), rows):
        if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
            yield record, value
