"""Where the pipelines of a process wait for each other, to call one function together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# Seconds to wait for the others' rows. A batch that failed elsewhere never comes, and DALI does not
# say so before somebody takes it; filling a buffer of thousands of samples takes tens of seconds.
PATIENCE = 60.0
Step = tuple[int, int]  # a source's epoch, and the batch in it


class Meeting:
    """Where the pipelines of one build meet, at one place of their graphs.

    Args:
        count: Number of pipelines.
        condition: What those that wait are told by; None: its own.
        waiting: The batches of those that wait, in all meetings of the build; None: its own.
    """

    def __init__(
        self,
        count: int,
        condition: threading.Condition | None = None,
        waiting: list[Step] | None = None,
    ):
        self.count = count
        self.certain = True
        self.served = False  # whether another thread calls the function, by `make`
        self.called: Step = (-1, 0)  # the latest batch that it was called for so
        self._condition = condition or threading.Condition()
        self._waiting: list[Step] = [] if waiting is None else waiting
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
            self.make(step)
        return self._result(step)

    def ready(self) -> Step | None:
        """The first batch that all have brought their rows of, and that waits for `make`."""
        full = [
            step
            for step, brought in self._brought.items()
            if len(brought) == self.count and step in self._functions
        ]
        return min(full, default=None)

    def close(self) -> None:
        """Lets those go that wait for a call that does not come any more."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def make(self, step: Step) -> BaseException | None:
        """Calls the function for a batch that is ready, and returns what it raised."""
        self.called = max(self.called, step)
        function, brought = self._functions.pop(step), self._brought[step]
        made: tuple[Any, BaseException | None]
        try:
            made = function([brought[k] for k in range(self.count)]), None
        except BaseException as error:  # raised in all of them
            made = None, error
        try:
            with self._condition:
                self._made[step] = made
                self._condition.notify_all()
            return made[1]
        finally:
            # The error's traceback has this frame: together they would keep the batch in memory.
            del made, function, brought

    def give_up(self, error: BaseException) -> None:
        """Raises an error in those that wait for a call that Ctrl-C has broken off in `make`."""
        with self._condition:
            for step, brought in self._brought.items():
                begun = len(brought) == self.count and step not in self._functions
                if begun and step not in self._made:
                    self._made[step] = None, error
            self._condition.notify_all()

    def open(self) -> None:
        """Begins anew: whoever waited has gone."""
        with self._condition:
            for kept in (self._brought, self._functions, self._made, self._taken, self._at):
                kept.clear()
            self._closed = False

    def _wait(self, step: Step, brought: dict[int, Any]) -> None:
        self._waiting.append(step)
        try:
            while len(brought) < self.count and not self._closed:
                gone = [k for k, at in self._at.items() if at > step and k not in brought]
                # Those of a later batch wait on: it may be what this one holds up elsewhere.
                late = not gone and not self._condition.wait(PATIENCE)
                if gone or (late and len(brought) < self.count and step == min(self._waiting)):
                    self._brought.pop(step, None)
                    self._functions.pop(step, None)
                    self._condition.notify_all()
                    who = gone or sorted(set(range(self.count)) - set(brought))
                    raise RuntimeError(
                        f"the pipelines {who} of this process did not bring their rows of the "
                        f"batch within {PATIENCE:.0f} s: it failed there"
                    )
        finally:
            self._waiting.remove(step)
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
        try:
            if error is not None:
                raise error
            return made
        finally:
            del error  # as in `make`
