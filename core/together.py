"""Functions of global arrays: the pipelines of a process meet to call one together.

Each pipeline of a sharded iterator runs its own graph, in threads of its own. A function that
is to see the global batch waits until all of them have brought their rows of one batch; it is
called once, and each takes its rows of the results along.

Where an iterator takes the batches, its caller's thread calls the function, while it waits for the
batch: computations over several devices must be started in one order on all of them, and in
all processes (https://docs.jax.dev/en/latest/multi_process.html), and a train step is one, too.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import meeting as meetings
from .meeting import Meeting, Step

# Seconds without a function of this batch that is due until one of the next is called before it:
# DALI may run that one first, and the other behind it.
STUCK = 0.2


@dataclasses.dataclass
class _Job:
    """A batch that is to be taken, and how far that is."""

    take: Callable[[], bool]
    step: Step | None
    begun: bool = False
    ended: bool = False
    came: bool = False  # the batch, which did not fail


class Build:
    """The pipelines that are being built together.

    Args:
        count: Their number.
    """

    def __init__(self, count: int):
        self.count = count
        self.index = 0
        self._condition = threading.Condition()
        self._waiting: list[Step] = []
        self._meetings: list[Meeting] = []
        self._next = 0
        self._served: list[Meeting] = []
        self._announced: deque[Step] = deque()  # the batches of what is scheduled, in order
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self.closed = False

    @contextlib.contextmanager
    def pipeline(self, index: int) -> Iterator[None]:
        """While the pipeline of a number is defined."""
        self.index, self._next = index, 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def again(self) -> None:
        """Begins this pipeline's definition anew: it may be defined more than once."""
        self._next = 0

    def meeting(self, pipeline: Any, certain: bool = True) -> Meeting:
        """The meeting of the next function of this pipeline, the same in each of them.

        Args:
            pipeline: The one that is being defined.
            certain: Whether its function is called for each batch: DALI may leave others out.
        """
        pipeline.meets_in = self
        if self._next == len(self._meetings):
            self._meetings.append(Meeting(self.count, self._condition, self._waiting))
        self._next += 1
        made = self._meetings[self._next - 1]
        made.certain = certain
        return made

    def announce(self, meeting: Meeting, index: int, step: Step) -> None:
        """Says that a run was scheduled, of which batch; of each function, and each pipeline."""
        if index == 0 and self._served[:1] == [meeting]:
            self._announced.append(step)

    @contextlib.contextmanager
    def restart(self) -> Iterator[None]:
        """While what is left of an epoch is dropped, with nothing called; then all is forgotten."""
        for meeting in self._meetings:
            meeting.close()
        try:
            yield
        finally:
            self._announced.clear()
            for meeting in self._meetings if not self.closed else ():
                meeting.open()

    def attend(self) -> None:
        """From now on somebody calls `serve` for each batch that is taken.

        Raises:
            RuntimeError: If there can be no further thread.
        """
        _attended.add(self)
        self._served = [one for one in self._meetings if one.certain]
        if self._served:
            self._thread = threading.Thread(target=self._work, name="dalijax-take", daemon=True)
            self._thread.start()
        for meeting in self._served:
            meeting.served = True

    def serve(self, take: Callable[[], bool]) -> None:
        """Calls the functions of a batch, while another thread takes it.

        Functions of later batches wait for those, so that they have the same place among the
        caller's own computations in all processes. Only where one of this batch does not come,
        since it failed or DALI runs the other before it, they are called, too.

        Args:
            take: Waits for the batch, and says whether it came. It must not raise.

        Raises:
            BaseException: What a function raised, where that is no Exception, and
                KeyboardInterrupt: as soon as the batch is taken. The second one closes this, and
                lets those go that wait for a call; the third one is raised at once.
        """
        if not self._served or self.closed:
            take()
            return
        job = _Job(take, self._announced[0] if self._announced else None)
        interrupts: list[BaseException] = []
        while True:
            try:
                self._hand_over(job)
                self._call_until_taken(job)
                break
            except BaseException as error:
                for meeting in self._served:
                    meeting.give_up(error)
                interrupts.append(error)
                if len(interrupts) > 1:
                    self.close()
                if len(interrupts) > 2:
                    raise
        try:
            if interrupts:
                raise interrupts[0]
        finally:
            del interrupts  # whose tracebacks have this frame

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._job is not None or self.closed)
                job, self._job = self._job, None
                if job is None:
                    return
                job.begun = True
            self._run(job)
            del job  # it has the batch

    def _run(self, job: _Job) -> None:
        try:
            job.came = job.take()
        finally:
            with self._condition:  # so that the next one does not begin before
                job.ended = True
                self._pass(job)
                self._condition.notify_all()

    def _pass(self, job: _Job) -> None:
        # What was announced for a run that a source broke off is none of the batches: what came
        # then was a later one, and all functions were called for that.
        came = min(one.called for one in self._served) if job.came else (-1, 0)
        while job.step and self._announced and self._announced[0] <= max(job.step, came):
            self._announced.popleft()

    def _hand_over(self, job: _Job) -> None:
        with self._condition:
            if job.begun or self._job is job:  # Ctrl-C came then
                return
            if not self.closed and self._thread is not None and self._thread.is_alive():
                self._job = job
                self._condition.notify_all()
                return
            job.begun = True
        self._run(job)

    def _call_until_taken(self, job: _Job) -> None:
        since, now = time.monotonic(), job.step
        while True:
            with self._condition:
                waited = time.monotonic() - since
                due = [one for one in self._served if now is not None and one.called < now]
                # Where a batch failed, DALI may never ask for its functions.
                early = not job.ended and waited > (STUCK if due else meetings.PATIENCE)
                found = None if self.closed else _earliest(self._served)
                if found is None or not (now is None or found[1] <= now or early):
                    # Those whose outputs nobody waits for come a little later, and those of a
                    # batch that failed with the next one, if at all.
                    if job.ended and (waited > STUCK or not (due and job.came) or self.closed):
                        return
                    self._condition.wait(STUCK)
                    continue
            meeting, step = found
            error = meeting.make(step)
            try:
                if error is not None and not isinstance(error, Exception):
                    raise error
            finally:
                del error
            since = time.monotonic()

    def close(self) -> None:
        """Lets those go that wait for a call."""
        if self.closed:
            return  # as the interpreter ends this module's names may be gone
        _attended.discard(self)
        self.closed = True
        for meeting in self._meetings:
            meeting.close()


def _earliest(meetings: Sequence[Meeting]) -> tuple[Meeting, Step] | None:
    """The meeting of the earliest batch that is ready, and that."""
    found = [(step, k) for k, one in enumerate(meetings) if (step := one.ready()) is not None]
    return (meetings[min(found)[1]], min(found)[0]) if found else None


def attended(pipelines: Sequence[Any]) -> Build | None:
    """The build of pipelines whose batches somebody takes; None without such functions.

    Args:
        pipelines: Those of `dalijax.core.pipelines`, which let go who waits when they end; the
            functions of others are called in DALI's threads.
    """
    found: Build | None = getattr(pipelines[0], "meets_in", None) if pipelines else None
    # One that does not run ahead would wait in schedule_run for what is called behind it.
    if found is None or not all(
        getattr(one, "lets_go", False) and one.exec_async and one.exec_pipelined
        for one in pipelines
    ):
        return None
    found.attend()
    return found


_attended: weakref.WeakSet[Build] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Threads of DALI's that wait here could not be joined.
    for build in list(_attended):
        build.close()


_current: contextvars.ContextVar[Build | None] = contextvars.ContextVar("build", default=None)


def current() -> Build:
    """The build that a pipeline is defined in; one of its own, where it is made by hand."""
    return _current.get() or Build(1)
