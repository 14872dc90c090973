"""Calls of DALI in this process, and their end: when Python ends, and in a forked child."""

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

# Seconds that the end of a process waits for calls of DALI, which last as long as a batch takes.
_PATIENCE = 20.0
_ENDED = "Python ends, and the pipelines with it: take batches before the end of the program"


class Calls:
    """The calls of DALI in this process: ``with calls:`` around each; they may be nested.

    When Python ends, DALI shuts down every pipeline, even one that a thread waits for; and a thread
    that returns from C++ after the interpreter is gone aborts the process. So no thread enters DALI
    once the end has begun, and the end waits for those inside. In a forked child the threads of a
    pipeline are missing, for which its destructor would wait.

    Modules lose their names before the last iterators are freed: objects that call DALI at their
    own end keep a reference to this.

    Attributes:
        ended: Whether Python ends, so that no thread may enter.

    Raises:
        RuntimeError: In the main thread, once Python ends.
        SystemExit: In any other thread, which it ends silently; it is no error of DALI's.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # how deep each thread is in calls
        self._left = threading.Event()
        self.ended = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._enter(me, self._inside.get(me, 0) + 1)

    def __exit__(self, *exception: object) -> None:
        self._leave(threading.get_ident(), 1)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leaves DALI while it runs Python code of the caller's, which may wait for anything.

        Raises:
            RuntimeError, SystemExit: Afterwards, as at its start.
        """
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        self._leave(me, depth)
        try:
            yield
        finally:
            if depth:
                self._enter(me, depth)

    def _enter(self, me: int, depth: int) -> None:
        self._inside[me] = depth
        if self.ended:  # looked at once this is counted: `end` does both the other way round
            self._leave(me, 1)
            main = me == threading.main_thread().ident
            raise RuntimeError(_ENDED) if main else SystemExit(_ENDED)

    def _leave(self, me: int, levels: int) -> None:
        depth = self._inside.pop(me, 0) - levels
        if depth > 0:
            self._inside[me] = depth
        elif self.ended:
            self._left.set()

    def end(self, patience: float) -> bool:
        """Lets no thread enter any more; whether all have left within ``patience`` seconds."""
        self.ended = True
        self._inside.pop(threading.get_ident(), None)  # Ctrl-C may have come as it entered
        end = time.monotonic() + patience
        while self._inside and (rest := end - time.monotonic()) > 0:
            self._left.wait(rest)
            self._left.clear()
        return not self._inside

    def lost(self, process: int) -> bool:
        """Whether pipelines are out of reach: Python ends, or this is a fork of their process.

        Args:
            process: The process that built them; 0 if none has.
        """
        return self.ended or process not in (0, os.getpid())

    def forked(self) -> None:
        """Begins anew in a child, where none of the other threads is."""
        self._inside.clear()
        self._left = threading.Event()


calls = Calls()


@atexit.register  # after DALI's own, which importing it has registered: so it runs before that
def _let_go() -> None:
    if not calls.end(_PATIENCE):
        _forget()  # to shut down a pipeline that does not answer would wait for it, too
        return
    for pipeline in _every_pipeline():
        pipeline._shutdown()  # not public, but DALI's own exit handler calls it
        pipeline._shutdown = _nothing


def _every_pipeline() -> list[Any]:
    """The pipelines of the process."""
    # Not public: where a DALI has none of it, it ends its pipelines as it does without us.
    references = list(getattr(Pipeline, "_pipes", ()))
    found = [pipeline for one in references if (pipeline := one()) is not None]
    return list(dict.fromkeys([*found, *kept_to_the_end]))


def _forget() -> None:
    """Keeps DALI and Python from ending any pipeline of the process: they end with it."""
    for pipeline in _every_pipeline():
        backend = getattr(pipeline, "_pipe", None)
        if backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # no destructor waits for threads
            pipeline._pipe = None
        pipeline._shutdown = _nothing
    getattr(Pipeline, "_pipes", set()).clear()


def _nothing() -> None:
    """Replaces `Pipeline._shutdown`, which needs modules that may be gone."""


def _after_fork() -> None:
    calls.forked()
    _forget()


os.register_at_fork(after_in_child=_after_fork)
