"""Whether a source gives memory again that is still read: wrong data, without a word."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..sources.source import Source, Values

_ENOUGH = 64  # pairs of records with one memory and equal values: the memory is a constant


class ReuseCheck:
    """Compares the memory of what a source reads with that of arrays still in use.

    Reading runs ahead, and DALI takes arrays without a copy. So a source that fills one buffer for
    record after record delivers the last one's values for all. Arrays that are alive at once have
    memory of their own; where two records have the same, both are read again: a constant that they
    share has equal values.

    Args:
        source: The source.
    """

    def __init__(self, source: Source):
        self._source = source
        # By address and field. Weak: an array that nobody reads may give its memory to another.
        self._alive: dict[tuple[int, str], tuple[weakref.ref[NDArray[Any]], int]] = {}
        self._most = 1024  # entries, from which on those of freed arrays are dropped
        self._equal = 0
        self._lock = threading.Lock()  # several threads read

    def check(self, records: Indices, columns: Mapping[str, Values]) -> None:
        """Checks what was read of some records.

        Raises:
            ValueError: If a record's array lies in the memory of another one's, which is in use.
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
                self._most = 2 * len(self._alive) + 1024  # so that each entry is looked at twice

    def _compare(self, name: str, first: int, second: int) -> None:
        """Raises ValueError where two records of one memory have other values."""
        one, other = (
            np.array(self._source.read(np.array([record]), [name])[name][0])
            for record in (first, second)
        )
        if not np.array_equal(one, other):
            raise ValueError(
                f"{type(self._source).__name__}.read() gave {name!r} of records {first} and "
                f"{second} in the same memory, while the first was in use: batches would have the "
                "wrong data. Return new arrays from each call, by .copy() say"
            )
        self._equal += 1


def _arrays(records: Indices, values: Values) -> Iterator[tuple[int, NDArray[Any]]]:
    """The arrays that may be written to, with their record; of a whole column, the first."""
    whole: Sequence[object] = [values] if isinstance(values, np.ndarray) else values
    for record, value in zip(records.tolist(), whole):
        if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
            yield record, value
