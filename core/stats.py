"""What an input pipeline did: counters that cost nothing until somebody asks for them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from jax.profiler import TraceAnnotation

_MOST_CALLS = 10_000  # of next() that are logged: the last ones


@dataclasses.dataclass
class Call:
    """One call of ``next()``, by `time.perf_counter`.

    Attributes:
        start: When it began, in seconds.
        end: When it ended.
        spans: Seconds of the spans within it that this thread was in, by their labels, less those
            of spans within them.
        delivered: Whether it gave a batch, or a failed one: not the end of an epoch.
    """

    start: float
    end: float = 0.0
    spans: dict[str, float] = dataclasses.field(default_factory=dict)
    delivered: bool = False


# What stands for an annotation while no trace runs; making one costs a microsecond.
UNTRACED = contextlib.nullcontext()


class _Thread(threading.local):
    """What a thread is in: a call that is logged, and a span of it."""

    call: Call | None = None
    span: _LoggedSpan | None = None


_thread = _Thread()


class _LoggedSpan:
    """A span within a call that is logged; see `span`."""

    def __init__(self, call: Call, label: str, annotation: TraceAnnotation):
        self._call, self._label, self._annotation = call, label, annotation
        self._outer = _thread.span
        self._within = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        _thread.span = self
        self._annotation.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        seconds = time.perf_counter() - self._start
        self._annotation.__exit__(*error)
        spans = self._call.spans
        spans[self._label] = spans.get(self._label, 0.0) + seconds - self._within
        if self._outer is not None:
            self._outer._within += seconds
        _thread.span = self._outer


def span(name: str, **arguments: Any) -> contextlib.AbstractContextManager[Any]:
    """A part of a batch's making: in traces of `jax.profiler`, and in calls that are logged.

    Args:
        name: Its name in traces.
        **arguments: Its arguments there; ``function`` labels it in calls, else the name does.
    """
    call = _thread.call
    if call is None:
        return TraceAnnotation(name, **arguments) if TraceAnnotation.is_enabled() else UNTRACED
    annotation = TraceAnnotation(name, **arguments)
    return _LoggedSpan(call, arguments.get("function", name), annotation)


@dataclasses.dataclass
class InputStats:
    """Counters of one iterator since it was watched first.

    Attributes:
        batches: Number of batches that were delivered, failed ones included.
        examples: Number of their samples that are no padding, in this process. Those of the next
            epoch, which fill the last batch of an unpadded reader, are examples, too.
        padding: Number of their samples that repeat another, to fill a padded reader's last batch.
        errors: Number of batches that failed since the iterator's start, a resumed run's
            earlier ones included.
        wait_seconds: Seconds that ``next()`` took, all together: the caller's waiting.
        wait_counts: How many calls of ``next()`` took less than 2**k nanoseconds, and not less than
            half of it, for each k.
        epoch: Epoch of the last batch.
        step: Number of the last batch in it, from 0.
        calls: The last calls of ``next()``, while somebody profiles; else None.
    """

    batches: int = 0
    examples: int = 0
    padding: int = 0
    errors: int = 0
    wait_seconds: float = 0.0
    wait_counts: list[int] = dataclasses.field(default_factory=lambda: [0] * 65)
    epoch: int = 0
    step: int = 0
    calls: deque[Call] | None = dataclasses.field(default=None, repr=False, compare=False)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds of a block as waiting."""
        start = time.perf_counter_ns()
        if self.calls is not None:
            _thread.call = Call(1e-9 * start)
        try:
            yield
        finally:
            duration = time.perf_counter_ns() - start
            call, _thread.call = _thread.call, None
            if call is not None and self.calls is not None:
                call.end = call.start + 1e-9 * duration
                self.calls.append(call)
            self.wait_seconds += 1e-9 * duration
            self.wait_counts[duration.bit_length()] += 1

    def delivered(self, epoch: int, step: int, examples: int, padding: int, errors: int) -> None:
        """Counts a batch of so many examples, beside so much padding."""
        self.batches += 1
        if _thread.call is not None:
            _thread.call.delivered = True
        self.examples += examples
        self.padding += padding
        self.errors, self.epoch, self.step = errors, epoch, step

    @contextlib.contextmanager
    def logging(self) -> Iterator[deque[Call]]:
        """Logs the calls of ``next()`` while a block runs, the last ten thousand.

        Raises:
            RuntimeError: If they are logged already.
        """
        if self.calls is not None:
            raise RuntimeError("the iterator is profiled already: leave that block first")
        self.calls = calls = deque[Call](maxlen=_MOST_CALLS)
        try:
            yield calls
        finally:
            self.calls = None

    def copy(self) -> InputStats:
        """The counters as they are now."""
        return dataclasses.replace(self, wait_counts=self.wait_counts.copy())

    def since(self, earlier: InputStats) -> InputStats:
        """What was counted since a copy of it was made; epoch, step and errors stay totals."""
        return dataclasses.replace(
            self,
            batches=self.batches - earlier.batches,
            examples=self.examples - earlier.examples,
            padding=self.padding - earlier.padding,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            wait_counts=[new - old for new, old in zip(self.wait_counts, earlier.wait_counts)],
        )


class Watched(Protocol):
    """An iterator that counts: one of the core, or of an adapter."""

    def watch(self) -> InputStats:
        """The counters."""
        ...
