"""The event loop that sends requests, in a thread of this process.

A fork does not copy threads, so that a forked child makes its own loop. At the exit of Python the
loop ends before the interpreter: a thread of obstore that completed a request later would end the
process with an error.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..workers import Result

T = TypeVar("T")

MOST_REQUESTS = 1024  # in flight
_PATIENCE = 1.0  # seconds that the exit of Python waits for the loop


class Job:
    """Requests that the loop sends together, once there is room for them.

    Args:
        run: Sends the requests; handles its own errors.
        weight: Number of requests.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], weight: int):
        self.run, self.weight = run, weight
        self.task: asyncio.Task[None] | None = None
        self.is_dropped = False


class EventLoop:
    """An event loop in a daemon thread; its jobs begin in order, while there is room for them.

    Only the loop's thread changes the queue, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._waiting = collections.deque[Job]()
        self._in_flight = 0
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="dalijax-remote", daemon=True
        )
        self._thread.start()

    def add(self, jobs: Sequence[Job], urgent: bool = False) -> None:
        """Schedules jobs, after the waiting jobs or before them."""
        self._call(self._add, jobs, urgent)

    def drop(self, job: Job) -> None:
        """Cancels a job. Python's garbage collector may call it at any point."""
        job.is_dropped = True
        self._call(self._drop, job)

    def call(self, run: Callable[[], Coroutine[Any, Any, T]], weight: int = 1) -> Result[T]:
        """Schedules a coroutine before the waiting jobs; returns its future result."""
        result = Result[T]()
        self.add([Job(functools.partial(settle, result, run), weight)], urgent=True)
        return result

    def end(self) -> None:
        """Cancels all jobs, and waits briefly for the thread."""
        self._call(self._end)
        self._thread.join(_PATIENCE)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # A forked child must not wake the loop of its parent. A closed loop raises RuntimeError.
        if self._process == os.getpid():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)

    def _add(self, jobs: Sequence[Job], urgent: bool) -> None:
        if urgent:
            self._waiting.extendleft(reversed(jobs))
        else:
            self._waiting.extend(jobs)
        self._begin()

    def _begin(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if job.is_dropped:
                self._waiting.popleft()
                continue
            if self._in_flight and self._in_flight + job.weight > MOST_REQUESTS:
                return
            self._waiting.popleft()
            self._in_flight += job.weight
            job.task = self._loop.create_task(job.run())
            job.task.add_done_callback(functools.partial(self._ended, job))

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        self._in_flight -= job.weight
        job.task = None
        self._begin()

    def _drop(self, job: Job) -> None:
        if job.task is not None:
            job.task.cancel()

    def _end(self) -> None:
        self._waiting.clear()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # After the callbacks of the cancelled tasks.
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)


async def settle(result: Result[T], run: Callable[[], Coroutine[Any, Any, T]]) -> None:
    """Sets a result to the value or the error of a coroutine."""
    try:
        value = await run()
    except BaseException as error:
        result.fail(error)
        if isinstance(error, asyncio.CancelledError):
            raise
    else:
        result.set(value)


_current: EventLoop | None = None
_abandoned: list[EventLoop] = []  # of parents; freeing them would close files that parents use
_lock = threading.Lock()


def event_loop() -> EventLoop:
    """Returns the loop of this process, and starts it first if necessary."""
    global _current
    with _lock:
        if _current is None:
            _current = EventLoop()
        return _current


def _after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    if _current is not None:
        _abandoned.append(_current)
        _current = None


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end() -> None:
    if _current is not None:
        with contextlib.suppress(KeyboardInterrupt):
            _current.end()
