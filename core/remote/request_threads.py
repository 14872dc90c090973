"""Runs requests in threads, which wait for the responses of servers.

The clients' calls release the GIL while they wait. A thread for each call needs less CPU than an
event loop, which is woken several times for each call.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..threads.per_process import PerProcess
from ..threads.workers import Result, set_result

T = TypeVar("T")

# Requests in flight. Each has a connection, whose buffers take up to 0.1 MB.
MOST_REQUESTS = 384
_MOST_THREADS = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """A call of a client, which sends requests.

    Attributes:
        run: Calls the client, and handles its errors. Its argument is a function to call as soon as
            the client sends at most one request at a time.
        weight: The number of requests that the call sends at once.
        is_wanted: Returns whether the result is still needed.
    """

    run: Callable[[Callable[[], None]], None]
    weight: int
    is_wanted: Callable[[], bool]


class RequestThreads:
    """Daemon threads that run jobs in order, while there is room for the requests of the jobs.

    Only these threads take locks. Ctrl-C can't interrupt them while they have a lock, because it
    interrupts only the main thread.
    """

    def __init__(self) -> None:
        self._urgent = collections.deque[Job]()  # these jobs run first
        self._jobs = collections.deque[Job]()
        self._unfinished = collections.deque[None]()  # an item for each job
        self._wake = queue.SimpleQueue[None]()  # an item for each added job
        self._turn = threading.Lock()  # held by the thread that starts the next job
        self._room = threading.Semaphore(MOST_REQUESTS)  # further requests that may start
        self._count = 0

    def add(self, jobs: Sequence[Job], urgent: bool = False) -> None:
        """Schedules jobs; urgent jobs run before the others."""
        self._unfinished.extend([None] * len(jobs))
        (self._urgent if urgent else self._jobs).extend(jobs)
        for _ in jobs:
            self._wake.put(None)
        # Running jobs count, too: they may wait for a server for minutes.
        while self._count < min(len(self._unfinished), _MOST_THREADS):
            name = f"dalijax-remote_{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._count += 1

    def call(self, function: Callable[..., T], *arguments: Any) -> Result[T]:
        """Schedules a call of a function as an urgent job, and returns the future result."""
        result = Result[T]()
        job = Job(lambda _: set_result(result, function, *arguments), 1, lambda: True)
        self.add([job], urgent=True)
        return result

    def _work(self) -> None:
        while True:
            self._wake.get()
            self._run_next()

    def _run_next(self) -> None:
        """Runs the next job as soon as there is room for its requests.

        Only the thread with the lock ``_turn`` waits for room, so that jobs begin in their order.
        """
        with self._turn:
            job = self._pop()
            held = min(job.weight, MOST_REQUESTS) if job.is_wanted() else 0
            for _ in range(held):
                self._room.acquire()

        def keep(count: int) -> None:
            """Releases the room of the job's requests, except for ``count`` requests."""
            nonlocal held
            freed, held = max(0, held - count), min(held, count)
            if freed:
                self._room.release(freed)

        try:
            if held:
                job.run(lambda: keep(1))
        finally:
            keep(0)
            self._unfinished.pop()

    def _pop(self) -> Job:
        """Removes the next job and returns it; there is a job for each item of ``_wake``."""
        try:
            return self._urgent.popleft()
        except IndexError:
            return self._jobs.popleft()


_current = PerProcess(RequestThreads)


def request_threads() -> RequestThreads:
    """Returns the threads of this process, which start when they are needed."""
    return _current.get()
