"""Threads for which neither Ctrl-C nor the end of Python has to wait.

`concurrent.futures` is no base for them. Its ``submit()`` and ``result()`` take locks in functions
written in Python, which Ctrl-C can interrupt between the lock and its release: the lock then stays
locked, and every thread that needs it waits forever. Python also joins these threads at exit,
however long a read takes. The callers here use primitives written in C, which Ctrl-C can't
interrupt halfway, and the threads are daemons.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
_RECHECK = 0.1  # seconds, after which a waiting thread looks again
# Seconds that the end of the process waits for tasks. Most take milliseconds; a thread that waits
# longer, for a disk or a network, is left behind.
_PATIENCE = 1.0


class WorkersEnded(RuntimeError):
    """The threads were ended before they had done a task."""

    def __init__(self) -> None:
        super().__init__("the threads that read were ended")


class Result(Generic[T]):
    """The result of a task, or its error, for which threads can wait."""

    def __init__(self) -> None:
        self._known = threading.Lock()  # locked until the result is known
        self._known.acquire()
        self._calls = itertools.count()
        self._is_known = False
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        """Sets the value, unless the result is known."""
        self._set(value, None)

    def fail(self, error: BaseException) -> None:
        """Sets an error, unless the result is known."""
        self._set(None, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if next(self._calls) == 0:
            self._value, self._error = value, error
            self._is_known = True
            self._known.release()

    def get(self, workers: Workers | None = None) -> T:
        """Waits for the value, and returns it.

        Args:
            workers: The threads that set it: if they are ended, the value may never come.

        Raises:
            BaseException: The error, if there is one.
            WorkersEnded: If the threads were ended.
            SystemExit, WorkersEnded: If Python ends; see `ending`.
        """
        while not self._is_known:
            if _at_exit.is_set():
                raise ending()
            if workers is not None and workers.dropped:
                raise WorkersEnded
            # Ctrl-C between these two keeps the lock: other threads notice when they look again.
            if self._known.acquire(timeout=_RECHECK):
                self._known.release()
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value


class _Tasks:
    """The tasks of a pool; its threads refer to them, and not to the pool."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]
        self.queue = queue.SimpleQueue()
        self.dropped = False


_busy: dict[int, None] = {}  # the threads that are doing a task, or are within `busy`
_at_exit = threading.Event()
os.register_at_fork(after_in_child=_busy.clear)  # whose child has none of them


def ending() -> BaseException:
    """The error of a thread when Python ends: SystemExit, which only ends the thread silently."""
    in_main = threading.current_thread() is threading.main_thread()
    return WorkersEnded() if in_main else SystemExit()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Has the end of Python wait a little for a block of code in a thread of another library.

    Raises:
        SystemExit, WorkersEnded: If Python ends; see `ending`.
    """
    me = threading.get_ident()
    _busy[me] = None
    try:
        if _at_exit.is_set():
            raise ending()
        yield
    finally:
        _busy.pop(me, None)


class Workers:
    """Daemon threads that do tasks in order; they end when the pool is freed.

    Args:
        count: The number of threads.
        name: The beginning of their names.
    """

    def __init__(self, count: int, name: str):
        self._tasks = _Tasks()
        self._count = count
        for number in range(count):
            own = f"{name}_{number}"
            threading.Thread(target=_work, args=(self._tasks,), name=own, daemon=True).start()

    @property
    def dropped(self) -> bool:
        """Whether the threads were ended, and tasks that had not begun were dropped."""
        return self._tasks.dropped

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has a thread call a function, which handles its own errors.

        Raises:
            WorkersEnded: If the threads were ended.
        """
        if self._tasks.dropped:
            raise WorkersEnded
        self._tasks.queue.put((function, arguments))

    def call(self, function: Callable[..., T], *arguments: Any) -> Result[T]:
        """Has a thread call a function; returns its result at once.

        Raises:
            WorkersEnded: If the threads were ended.
        """
        result = Result[T]()
        self.submit(_call, result, function, arguments)
        return result

    def future(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Has a thread call a function; returns its result as the standard library's future."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.submit(_fulfil, future, function)
        return future

    def end(self, drop: bool = True) -> None:
        """Ends the threads after their present tasks, without waiting for them.

        It takes no lock, so that Python's cyclic garbage collector may call it anywhere.

        Args:
            drop: Whether the tasks that have not begun are dropped; else they are done first.
        """
        self._tasks.dropped = self._tasks.dropped or drop
        for _ in range(self._count):
            self._tasks.queue.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_count"):
            self.end()


def call_each(function: Callable[[S], T], items: Sequence[S], count: int, name: str) -> list[T]:
    """Calls a function for each item, in threads; returns the results in order.

    Args:
        function: The function.
        items: The items.
        count: The most threads.
        name: The beginning of their names.

    Raises:
        BaseException: The first error in the order of the items. Calls that have not begun are
            dropped, and nothing waits for the others.
    """
    workers = Workers(min(count, len(items)), name)
    try:
        results = [workers.call(function, item) for item in items]
        return [result.get() for result in results]
    finally:
        workers.end()


def _call(result: Result[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    try:
        value = function(*arguments)
    except BaseException as error:
        result.fail(error)
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
    me = threading.get_ident()
    while (task := tasks.queue.get()) is not None and not tasks.dropped:
        _busy[me] = None
        try:
            if _at_exit.is_set():  # looked at once this thread is counted
                return
            function, arguments = task
            function(*arguments)
        finally:
            del _busy[me]
        del task, function, arguments  # while the thread waits, they would not be freed


@atexit.register  # after DALI's own hook, and so before it
def _end_all() -> None:
    """Lets no task begin, and waits a little for those that have."""
    _at_exit.set()
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(KeyboardInterrupt):
        while _busy and time.monotonic() < end:
            time.sleep(0.002)
