"""Functions of global arrays: the pipelines of a process meet to call one together.

Each pipeline of a sharded iterator runs its own graph, in threads of its own. A function that
is to see the global batch waits until all of them have brought their rows of one batch; the last
one calls it, and each takes its rows of the results along.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Seconds to wait for the others' rows. A batch that failed elsewhere never comes, and DALI does not
# say so before somebody takes it; filling a buffer of thousands of samples takes tens of seconds.
PATIENCE = 60.0
Step = tuple[int, int]  # a source's epoch, and the batch in it


class Meeting:
    """Where the pipelines of one build meet, at one place of their graphs.

    Args:
        count: Number of pipelines.
    """

    def __init__(self, count: int):
        self.count = count
        self._condition = threading.Condition()
        self._brought: dict[Step, dict[int, Any]] = {}
        self._made: dict[Step, tuple[Any, BaseException | None]] = {}
        self._taken: dict[Step, int] = {}
        self._at: dict[int, Step] = {}

    def call(self, index: int, step: Step, own: Any, function: Callable[[list[Any]], Any]) -> Any:
        """What a function makes of what all pipelines brought for a batch.

        Args:
            index: The pipeline's number.
            step: The batch.
            own: What it brings.
            function: Called by one of them, with all of it in the pipelines' order.

        Raises:
            RuntimeError: If a pipeline does not come with this batch, since it failed there.
            Exception: What the function raised, in all pipelines.
        """
        with self._condition:
            self._at[index] = step
            brought = self._brought.setdefault(step, {})
            brought[index] = own
            last = len(brought) == self.count
            self._condition.notify_all()
            if not last:
                self._wait(step, brought)
        if last:
            made: tuple[Any, BaseException | None]
            try:
                made = function([brought[k] for k in range(self.count)]), None
            except BaseException as error:  # raised in all of them
                made = None, error
            with self._condition:
                self._made[step] = made
                self._condition.notify_all()
        return self._result(step)

    def _wait(self, step: Step, brought: dict[int, Any]) -> None:
        while len(brought) < self.count:
            gone = [k for k, at in self._at.items() if at > step and k not in brought]
            if gone or not self._condition.wait(PATIENCE):
                self._brought.pop(step, None)
                who = gone or sorted(set(range(self.count)) - set(brought))
                raise RuntimeError(
                    f"the pipelines {who} of this process did not bring their rows of the batch "
                    f"within {PATIENCE:.0f} s: it failed there"
                )
        while step not in self._made:  # it may be compiled meanwhile, which takes its time
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
        self._meetings: list[Meeting] = []
        self._next = 0

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

    def meeting(self) -> Meeting:
        """The meeting of the next function of this pipeline, the same in each of them."""
        if self._next == len(self._meetings):
            self._meetings.append(Meeting(self.count))
        self._next += 1
        return self._meetings[self._next - 1]


_current: contextvars.ContextVar[Build | None] = contextvars.ContextVar("build", default=None)


def current() -> Build:
    """The build that a pipeline is defined in; one of its own, where it is made by hand."""
    return _current.get() or Build(1)
