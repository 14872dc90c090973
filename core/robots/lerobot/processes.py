"""Calls a function in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")
_PATIENCE = 5.0  # seconds until a process that does not end is killed
_ADVANCE, _RESULT, _ERROR = "advance", "result", "error"


def call_in_processes(
    function: Callable[[T, Callable[[int], object]], R],
    items: Sequence[T],
    count: int,
    advance: Callable[[int], object],
) -> Iterator[R]:
    """Calls a function for each item, and yields the results as they arrive.

    The processes end with the caller, also if it is killed.

    Args:
        function: Is called with an item and a function that reports progress.
        items: The items; like the function, they must be picklable.
        count: Number of processes; 1: the function runs in this process.
        advance: Is called in this process with each number that ``function`` reports as progress.

    Raises:
        BaseException: The first error of a call. The other processes are then ended.
        RuntimeError: If a process was killed.
    """
    count = min(count, len(items))
    if count <= 1:
        for item in items:
            yield function(item, advance)
        return
    # Not forked, since JAX and DALI have threads.
    context = multiprocessing.get_context("spawn")
    pending, processes = iter(items), dict[Connection, Any]()
    try:
        for _ in range(count):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, function), daemon=True)
            process.start()
            other.close()
            processes[own] = process
        idle, busy = list(processes), set[Connection]()
        while True:
            for connection, item in zip(idle, pending):
                with _living(processes[connection]):
                    connection.send(item)
                busy.add(connection)
            idle = []
            if not busy:
                return
            for connection in cast("list[Connection]", wait(list(busy))):
                with _living(processes[connection]):
                    kind, value = connection.recv()
                if kind == _ERROR:
                    raise value
                if kind == _ADVANCE:
                    advance(value)
                    continue
                busy.remove(connection)
                idle.append(connection)
                yield value
    finally:
        _end(processes)


@contextlib.contextmanager
def _living(process: Any) -> Iterator[None]:
    """Context manager that replaces errors of the connection to a process.

    Raises:
        RuntimeError: If the process has ended.
    """
    try:
        yield
    except (EOFError, ConnectionError):
        process.join(_PATIENCE)
        raise RuntimeError(
            f"a process ended with the exit code {process.exitcode}, e.g. because the memory was "
            "exhausted. Pass fewer --workers"
        ) from None


def _end(processes: dict[Connection, Any]) -> None:
    for connection, process in processes.items():
        connection.close()
        process.terminate()
    for process in processes.values():
        process.join(_PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    """Calls the function for each item that a connection receives, and sends the results.

    Returns when the connection is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                value = function(item, lambda number: connection.send((_ADVANCE, number)))
            except (OSError, ValueError, ImportError) as error:
                # A new exception, since those of libraries may not be picklable.
                kinds = (OSError, ValueError, ImportError)
                kind = next(kind for kind in kinds if isinstance(error, kind))
                connection.send((_ERROR, kind(str(error))))
            except Exception:
                connection.send((_ERROR, RuntimeError(traceback.format_exc())))
            else:
                connection.send((_RESULT, value))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
