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
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Seconds to wait for the others' rows. A batch that failed elsewhere never comes, and DALI does not
# say so before somebody takes it; filling a buffer of thousands of samples takes tens of seconds.
PATIENCE = 60.0
# Seconds without a function of this batch until one of the next is called before it: DALI may run
# that one first, and the other behind it.
STUCK = 0.2
Step = tuple[int, int]  # a source's epoch, and the batch in it


class Meeting:
    """Where the pipelines of one build meet, at one place of their graphs.

    Args:
        count: Number of pipelines.
        condition: What those that wait are told by; None: its own.
    """

    def __init__(self, count: int, condition: threading.Condition | None = None):
        self.count = count
        self.certain = True
        self.served = False  # whether another thread calls the function, by `serve`
        self._condition = condition or threading.Condition()
        self._closed = False
        self._brought: dict[Step, dict[int, Any]] = {}
        self._functions: dict[Step, Callable[[list[Any]], Any]] = {}
        self._made: dict[Step, tuple[Any, BaseException | None]] = {}
        self._taken: dict[Step, int] = {}
        self._at: dict[int, Step] = {}

    def call(self, index: int, step: Step, own: Any, function: Callable[[list[Any]], Any]) -> Any:
        """What a function makes of what all pipelines brought for a batch.

        Args:
            index: The pipeline's number.
            step: The batch.
            own: What it brings.
            function: Called once, with all of it in the pipelines' order.

        Raises:
            RuntimeError: If a pipeline does not come with this batch, since it failed there, or
                the pipelines are closed.
            Exception: What the function raised, in all pipelines.
        """
        with self._condition:
            self._at[index] = step
            brought = self._brought.setdefault(step, {})
            brought[index] = own
            self._functions[step] = function
            last = len(brought) == self.count and not self.served
            self._condition.notify_all()
            if not last:
                self._wait(step, brought)
        if last:
            self._make(step)
        return self._result(step)

    def ready(self) -> Step | None:
        """The first batch that all have brought their rows of, and that waits for `serve`."""
        full = [
            step
            for step, brought in self._brought.items()
            if len(brought) == self.count and step in self._functions
        ]
        return min(full, default=None)

    def serve(self, step: Step) -> None:
        """Calls the function for a batch that is ready.

        Raises:
            BaseException: What the function raised, where that is no Exception.
        """
        error = self._make(step)
        if error is not None and not isinstance(error, Exception):
            raise error

    def close(self) -> None:
        """Lets those go that wait for a call that does not come any more."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _make(self, step: Step) -> BaseException | None:
        function, brought = self._functions.pop(step), self._brought[step]
        made: tuple[Any, BaseException | None]
        try:
            made = function([brought[k] for k in range(self.count)]), None
        except BaseException as error:  # raised in all of them
            made = None, error
        with self._condition:
            self._made[step] = made
            self._condition.notify_all()
        return made[1]

    def _wait(self, step: Step, brought: dict[int, Any]) -> None:
        while len(brought) < self.count and not self._closed:
            gone = [k for k, at in self._at.items() if at > step and k not in brought]
            if gone or (not self._condition.wait(PATIENCE) and len(brought) < self.count):
                self._brought.pop(step, None)
                self._functions.pop(step, None)
                self._condition.notify_all()
                who = gone or sorted(set(range(self.count)) - set(brought))
                raise RuntimeError(
                    f"the pipelines {who} of this process did not bring their rows of the batch "
                    f"within {PATIENCE:.0f} s: it failed there"
                )
        while step not in self._made:  # it may be compiled meanwhile, which takes its time
            if self._closed:
                raise RuntimeError("the pipelines are closed")
            self._condition.wait()

    def _result(self, step: Step) -> Any:
        with self._condition:
            made, error = self._made[step]
            self._taken[step] = self._taken.get(step, 0) + 1
            if self._taken[step] == self.count:
                for kept in (self._made, self._taken, self._brought):
                    kept.pop(step, None)
        if error is not None:
            raise error
        return made


class Build:
    """The pipelines that are being built together.

    Args:
        count: Their number.
    """

    def __init__(self, count: int):
        self.count = count
        self.index = 0
        self._condition = threading.Condition()
        self._meetings: list[Meeting] = []
        self._next = 0
        self._served: list[Meeting] = []
        self._closed = False

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
            self._meetings.append(Meeting(self.count, self._condition))
        self._next += 1
        made = self._meetings[self._next - 1]
        made.certain = certain
        return made

    def attend(self) -> None:
        """From now on somebody calls `serve` for each batch that is taken."""
        _attended.add(self)
        self._served = [one for one in self._meetings if one.certain]
        for meeting in self._served:
            meeting.served = True

    def serve(self, take: Callable[[], None]) -> None:
        """Calls the functions while another thread takes a batch.

        Each is called once. Where the batch does not come then, since it wants one more of a batch
        that failed or was not asked for, whatever waits is called, too.

        Args:
            take: Waits for the batch. It must not raise.

        Raises:
            BaseException: What a function raised, where that is no Exception, and
                KeyboardInterrupt: as soon as the batch is taken; the second one closes this.
        """
        taken = threading.Event()

        def run() -> None:
            try:
                take()
            finally:
                with self._condition:
                    taken.set()
                    self._condition.notify_all()

        thread = threading.Thread(target=run, name="dalijax-take", daemon=True)
        thread.start()
        called: set[Meeting] = set()
        interrupt: BaseException | None = None
        while True:
            try:
                self._call_until(taken, called)
                break
            except BaseException as error:
                if interrupt is not None:
                    self.close()
                    raise
                interrupt = error
        thread.join()
        if interrupt is not None:
            raise interrupt

    def _call_until(self, taken: threading.Event, called: set[Meeting]) -> None:
        since = time.monotonic()
        while not self._closed or not taken.is_set():
            with self._condition:
                due = [one for one in self._served if one not in called]
                stuck = time.monotonic() - since > STUCK
                found = _earliest(due) or (_earliest(self._served) if stuck else None)
                if found is None or self._closed:
                    # Those whose outputs nobody waits for come a little later.
                    if taken.is_set() and (stuck or not due):
                        return
                    self._condition.wait(STUCK)
                    continue
            meeting, step = found
            called.add(meeting)
            meeting.serve(step)
            since = time.monotonic()

    def close(self) -> None:
        """Lets those go that wait for a call."""
        if self._closed:
            return  # as the interpreter ends this module's names may be gone
        _attended.discard(self)
        self._closed = True
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
