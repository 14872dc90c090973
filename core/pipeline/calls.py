"""Counts the threads inside DALI, so that the process can end and fork safely."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from nvidia.dali import Pipeline

from .dali_pipeline import kept_to_the_end

# The seconds that the end of the process waits for calls of DALI. A call lasts as long as a batch.
_PATIENCE = 20.0
_ENDED = "Python is shutting down: take all batches before the program ends"


class Calls:
    """Tracks the threads that are inside DALI: each call of DALI runs in ``with calls:``.

    These blocks may be nested. When Python ends, DALI shuts down every pipeline, even if a
    thread waits for it, and a thread that returns from C++ after the interpreter is gone aborts the
    process. Therefore no thread enters DALI once the shutdown has begun, and the shutdown waits
    for the threads inside. A forked child doesn't have a pipeline's threads, and the pipeline's
    destructor would wait for them.

    Modules lose their global names before the last iterators are freed. Objects that call DALI in
    their destructors therefore keep a reference to this object.

    Attributes:
        ended: Whether Python is shutting down, so that no thread may enter DALI.

    Raises:
        RuntimeError: In the main thread, if Python is shutting down.
        SystemExit: In any other thread, which it ends silently.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # the nesting depth of each thread
        self._call_ended = threading.Event()
        self.ended = False

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._enter(thread, self._inside.get(thread, 0) + 1)

    def __exit__(self, *exception: object) -> None:
        self._leave(threading.get_ident(), 1)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Counts the thread as outside DALI during a block that runs the user's Python code.

        Raises:
            RuntimeError, SystemExit: Afterwards, if Python is shutting down.
        """
        thread = threading.get_ident()
        depth = self._inside.get(thread, 0)
        self._leave(thread, depth)
        try:
            yield
        finally:
            if depth:
                self._enter(thread, depth)

    def _enter(self, thread: int, depth: int) -> None:
        self._inside[thread] = depth
        if self.ended:  # read after counting the thread: `end` sets it before it reads the counts
            self._leave(thread, 1)
            main = thread == threading.main_thread().ident
            raise RuntimeError(_ENDED) if main else SystemExit(_ENDED)

    def _leave(self, thread: int, levels: int) -> None:
        depth = self._inside.pop(thread, 0) - levels
        if depth > 0:
            self._inside[thread] = depth
        elif self.ended:
            self._call_ended.set()

    def end(self, patience: float) -> bool:
        """Prevents threads from entering DALI; returns whether all threads have left DALI in time.

        Args:
            patience: The longest time to wait for threads inside DALI, in seconds.
        """
        self.ended = True
        # Ctrl-C may have interrupted `__enter__`, so that this thread is still counted.
        self._inside.pop(threading.get_ident(), None)
        end = time.monotonic() + patience
        while self._inside and (remaining := end - time.monotonic()) > 0:
            self._call_ended.wait(remaining)
            self._call_ended.clear()
        return not self._inside

    def lost(self, process: int) -> bool:
        """Returns whether pipelines can't be used: Python ends, or this process was forked.

        Args:
            process: The ID of the process that built the pipelines; 0 if they aren't built.
        """
        return self.ended or process not in (0, os.getpid())

    def forked(self) -> None:
        """Resets the counts in a forked child, which has no other threads."""
        self._inside.clear()
        self._call_ended = threading.Event()


calls = Calls()


# Exit handlers run in reverse order: this one runs before DALI's, which its import registered.
@atexit.register
def _let_go() -> None:
    if not calls.end(_PATIENCE):
        _abandon_pipelines()  # shutting down a pipeline that doesn't respond would wait, too
        return
    for pipeline in _every_pipeline():
        pipeline._shutdown()  # a private method, but DALI's own exit handler calls it
        pipeline._shutdown = _nothing


def _every_pipeline() -> list[Any]:
    """Returns all pipelines of the process that were not freed."""
    # A private attribute. A DALI without it shuts down its pipelines as it does without dalijax.
    references = list(getattr(Pipeline, "_pipes", ()))
    pipelines = [pipeline for ref in references if (pipeline := ref()) is not None]
    return list(dict.fromkeys([*pipelines, *kept_to_the_end]))


def _abandon_pipelines() -> None:
    """Keeps all pipelines from being destroyed, since destructors would wait for threads."""
    for pipeline in _every_pipeline():
        backend = getattr(pipeline, "_pipe", None)
        if backend is not None:
            # The destructor, which waits for the pipeline's threads, must not run.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
            pipeline._pipe = None
        pipeline._shutdown = _nothing
    getattr(Pipeline, "_pipes", set()).clear()


def _nothing() -> None:
    """Does nothing. Replaces ``Pipeline._shutdown``, which needs modules that may be unloaded."""


def _after_fork() -> None:
    calls.forked()
    _abandon_pipelines()


os.register_at_fork(after_in_child=_after_fork)
