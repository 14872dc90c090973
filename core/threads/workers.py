"""Threads that block neither Ctrl-C nor the exit of Python.

`concurrent.futures` is unsuitable. Its ``submit()`` and ``result()`` take locks in Python code,
which Ctrl-C can interrupt between taking and releasing a lock: the lock stays locked, and every
thread that needs it waits forever. Python also joins its threads at exit, however long a read
takes. This module uses primitives written in C, which Ctrl-C can't interrupt halfway, and daemon
threads.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from .per_process import PerProcess

S = TypeVar("S")
T = TypeVar("T")
_RECHECK = 0.1  # seconds between a waiting thread's checks whether to give up
# Seconds that the exit of the process waits for running tasks. Most tasks take milliseconds; a
# thread that waits longer, e.g. for a disk or a network, is abandoned.
_PATIENCE = 1.0


class WorkersEnded(RuntimeError):
    """The threads were ended before they finished a task."""

    def __init__(self) -> None:
        super().__init__("the reading threads were ended")


class Result(Generic[T]):
    """The future result or error of a task."""

    def __init__(self) -> None:
        # Locked until the result is set, so that acquiring it waits for the result.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._calls = itertools.count()
        self._is_set = False
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        """Sets the value, unless the result is already set."""
        self._set(value, None)

    def fail(self, error: BaseException) -> None:
        """Sets the error, unless the result is already set."""
        self._set(None, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if next(self._calls) == 0:
            self._value, self._error = value, error
            self._is_set = True
            self._pending.release()

    @property
    def is_set(self) -> bool:
        """Returns whether the value or the error of the task is set."""
        return self._is_set

    @property
    def error(self) -> BaseException | None:
        """Returns the error of the task; None if the task has not failed."""
        return self._error

    def get(self, workers: Workers | None = None) -> T:
        """Waits for the value and returns it.

        Args:
            workers: The threads that compute the value; if they are ended, waiting ends.

        Raises:
            BaseException: The error of the task, if there is one.
            WorkersEnded: If ``workers``, or the pool of the calling thread, were ended.
            SystemExit, WorkersEnded: If Python exits; see `ending`.
        """
        while not self._is_set:
            if _at_exit.is_set():
                raise ending()
            if (workers is not None and workers.dropped) or _thread.was_ended():
                raise WorkersEnded
            # Ctrl-C between these lines leaves the lock taken. Other waiting threads then notice
            # the result at their next check of _is_set.
            if self._pending.acquire(timeout=_RECHECK):
                self._pending.release()
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value


class _Tasks:
    """The tasks of a pool. Threads refer to the tasks, not to the pool, so it can be freed."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]
        self.queue = queue.SimpleQueue()
        self.dropped = False


class _Thread(threading.local):
    """The tasks of the pool to which the current thread belongs; None outside of pools."""

    tasks: _Tasks | None = None

    def was_ended(self) -> bool:
        """Returns whether the thread belongs to a pool that was ended."""
        return self.tasks is not None and self.tasks.dropped


_thread = _Thread()
# Identifiers of threads that run a task, or are within `busy`.
_busy = PerProcess[dict[int, None]](dict)
_at_exit = threading.Event()


def ending() -> BaseException:
    """Returns the error to raise in the current thread when Python exits.

    The error is WorkersEnded in the main thread. In other threads it is SystemExit, which ends a
    thread silently.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return WorkersEnded() if in_main else SystemExit()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Context manager that makes the exit of Python wait briefly for its block.

    It is for blocks that threads of other libraries run.

    Raises:
        SystemExit, WorkersEnded: If Python exits; see `ending`.
    """
    me = threading.get_ident()
    running = _busy.get()
    running[me] = None
    try:
        if _at_exit.is_set():
            raise ending()
        yield
    finally:
        running.pop(me, None)


class Workers:
    """Daemon threads that run tasks in order; they end when the pool is freed.

    Args:
        count: Number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, count: int, name: str):
        self._tasks = _Tasks()
        self._count = count
        for number in range(count):
            thread_name = f"{name}_{number}"
            threading.Thread(
                target=_work, args=(self._tasks,), name=thread_name, daemon=True
            ).start()

    @property
    def dropped(self) -> bool:
        """Returns whether the threads were ended and pending tasks were dropped."""
        return self._tasks.dropped

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedules a call of a function that handles its own errors.

        Raises:
            WorkersEnded: If the threads were ended.
        """
        if self._tasks.dropped:
            raise WorkersEnded
        self._tasks.queue.put((function, arguments))

    def call(self, function: Callable[..., T], *arguments: Any) -> Result[T]:
        """Schedules a call of a function, and returns the future result.

        Raises:
            WorkersEnded: If the threads were ended.
        """
        result = Result[T]()
        self.submit(set_result, result, function, *arguments)
        return result

    def future(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Schedules a call of a function, and returns a future of the standard library."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.submit(_fulfil, future, function)
        return future

    def end(self, drop: bool = True) -> None:
        """Ends the threads after their current tasks, without waiting.

        It takes no lock, so that Python's garbage collector may call it at any point.

        Args:
            drop: Whether to drop pending tasks; otherwise they run first.
        """
        self._tasks.dropped = self._tasks.dropped or drop
        for _ in range(self._count):
            self._tasks.queue.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_count"):
            self.end()


def call_each(function: Callable[[S], T], items: Sequence[S], count: int, name: str) -> list[T]:
    """Calls a function for each item in threads, and returns the results in order.

    Args:
        function: The function.
        items: The items.
        count: Maximum number of threads.
        name: Prefix of the threads' names.

    Raises:
        BaseException: The first error, in the order of the items. Pending calls are dropped, and
            running calls are not awaited.
    """
    workers = Workers(min(count, len(items)), name)
    try:
        results = [workers.call(function, item) for item in items]
        return [result.get() for result in results]
    finally:
        workers.end()


def set_result(result: Result[T], function: Callable[..., T], *arguments: Any) -> None:
    """Sets a result to the value or the error of a call."""
    try:
        value = function(*arguments)
    except BaseException as error:
        result.fail(error)
        del result  # breaks a cycle: the error's traceback refers to this frame
    else:
        result.set(value)


def _fulfil(future: concurrent.futures.Future[T], function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            value = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)


def _work(tasks: _Tasks) -> None:
    """Runs the tasks of a pool in the current thread, until the pool ends."""
    me, running = threading.get_ident(), _busy.get()
    _thread.tasks = tasks
    while (task := tasks.queue.get()) is not None and not tasks.dropped:
        running[me] = None
        try:
            if _at_exit.is_set():  # checked after registering in _busy, so that no task is missed
                return
            function, arguments = task
            function(*arguments)
        finally:
            del running[me]
        del task, function, arguments  # would otherwise stay alive while the thread waits


@atexit.register  # registered after DALI's hook, so that it runs earlier
def _end_all() -> None:
    """Prevents new tasks, and waits up to a second for running tasks."""
    _at_exit.set()
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(KeyboardInterrupt):
        while _busy.get() and time.monotonic() < end:
            time.sleep(0.002)
