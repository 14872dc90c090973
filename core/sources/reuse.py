"""Detects record sources that reuse a buffer which is still in use."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..random.hashing import Bits
from .source import Source, SourceFault, Values, mapped_fields, read_records
from .values import StoredArrays

_Record = tuple[int, Bits | None]  # a record and its key

_ENOUGH = 64  # pairs of equal records in the same memory, after which checks of a field end


class ReuseCheck:
    """Detects sources whose arrays are in the memory of other records' arrays, still in use.

    Threads read ahead, and DALI takes arrays without a copy. If a source fills the same buffer for
    several records, all of them get the values of the last record. If two records have the same
    memory, both are read again and compared, since records may share a constant array.

    Args:
        source: The source.

    Attributes:
        fault: The first error of `check`. Records that were read before may be wrong, too.
    """

    def __init__(self, source: Source):
        self.fault: SourceFault | None = None
        self._source = source
        # By memory and field. Weak, since the memory of a freed array may be used again.
        self._alive: dict[tuple[int, str], tuple[weakref.ref[NDArray[Any]], _Record]] = {}
        self._most = 1024  # entries, after which those of freed arrays are dropped
        self._equal = collections.Counter[str]()  # by field
        # Functions of random maps return other values for other keys of the same record.
        self._by_key = mapped_fields(source)
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
        numbers = records.tolist()
        for name, values in columns.items():
            if self._equal[name] >= _ENOUGH or isinstance(values, StoredArrays):
                continue
            self._forget_freed()
            rows: Sequence[Any] = [values] if isinstance(values, np.ndarray) else values
            by_key = keys is not None and name in self._by_key
            alike: list[tuple[_Record, _Record]] = []
            with self._lock:
                for row, (number, array) in enumerate(zip(numbers, rows)):
                    if type(array) is np.ndarray and isinstance(array.base, bytes):
                        continue  # encoded files, which nobody can change
                    record = number, None if keys is None else keys[row : row + 1]
                    before = self._alive.get((id(array), name))
                    if before and before[1][0] == number and before[0]() is array and not by_key:
                        continue  # the usual case of records in memory
                    for memory in _memory_of(array):
                        before = self._alive.get((memory, name))
                        if before and before[0]() is None:
                            before = None  # freed
                        if before and _differ(before[1], record, by_key):
                            alike.append((before[1], record))
                        self._alive[memory, name] = weakref.ref(array), record
            for pair in alike:
                self._compare(name, *pair)

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
            self.fault = SourceFault(
                f"{type(self._source).__name__}.read() returned {name!r} of records {pair[0][0]} "
                f"and {pair[1][0]} in the same memory, while the first was in use: batches would "
                "have the wrong data. Return new arrays from each call, e.g. by .copy()"
            )
            raise self.fault
        self._equal[name] += 1

    def __reduce__(self) -> Any:
        return ReuseCheck, (self._source,)


def _differ(first: _Record, second: _Record, by_key: bool) -> bool:
    """Returns whether two records have different numbers, or different keys if these count."""
    return first[0] != second[0] or (by_key and first[1] != second[1])


def _memory_of(value: Any) -> tuple[int, ...]:
    """Returns numbers that arrays with the same memory have in common while they are in use.

    An array that owns its memory shares it only with views of it, so that its identity is enough. A
    view has its address, and if it shows all of the memory, also the identity of the array that
    owns it. Other values, and arrays whose memory is read-only, have no numbers.
    """
    if not isinstance(value, np.ndarray) or not value.size:
        return ()
    base = value.base  # of a view that is read-only, such as a map's input
    if base is None:
        return (id(value),) if value.flags.writeable else ()
    is_array = isinstance(base, np.ndarray)
    if not (value.flags.writeable or (is_array and base.flags.writeable)):
        return ()
    address: int = value.__array_interface__["data"][0]
    is_whole = is_array and base.base is None and base.size == value.size
    return (address, id(base)) if is_whole else (address,)
