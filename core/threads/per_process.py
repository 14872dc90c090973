"""`PerProcess`: values that a forked child creates again instead of sharing its parent's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_forks = 0  # number of forks between the program's first process and this process


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class PerProcess(Generic[T]):
    """A value that each process creates when it first calls `get`.

    A forked child has copies of its parent's locks, requests, connections and locked files, but
    not of its threads. These copies do not work, because the child has no thread that would answer
    a request or free a lock.

    Args:
        make: Creates the value. In a race of threads, it may be called twice, and all threads get
            the same value. An object that has a `PerProcess` can be pickled if ``make`` can.
        keeps: Whether a child keeps the value of its parent in memory, because its destructor may
            wait for threads of the parent.
    """

    def __init__(self, make: Callable[[], T], keeps: bool = False):
        self._make, self._keeps = make, keeps
        self._values: dict[tuple[int, int], T] = {}  # by process and number of forks

    def __reduce__(self) -> Any:
        return PerProcess, (self._make, self._keeps)

    def get(self) -> T:
        """Returns the value of this process, which the first call creates."""
        process = os.getpid(), _forks  # the system reuses process ids
        try:
            return self._values[process]
        except KeyError:
            value = self._values.setdefault(process, self._make())  # atomic
        if not self._keeps:
            for other in list(self._values):
                if other != process:
                    self._values.pop(other, None)
        return value
