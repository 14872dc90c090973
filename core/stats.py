"""Counters of an input pipeline, which cost nothing until they are requested."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from jax.profiler import TraceAnnotation

_MOST_CALLS = 10_000  # calls of next() in the log; older calls are dropped


@dataclasses.dataclass
class Call:
    """One call of ``next()``, timed by `time.perf_counter`.

    Attributes:
        start: Start time, in seconds.
        end: End time, in seconds.
        spans: Seconds that the thread spent in each span, by label, without nested spans.
        delivered: Whether the call returned a batch or counted a failed batch; False at the end of
            an epoch.
    """

    start: float
    end: float = 0.0
    spans: dict[str, float] = dataclasses.field(default_factory=dict)
    delivered: bool = False


# Replaces an annotation while no trace is active, because creating an annotation takes 1 us.
UNTRACED = contextlib.nullcontext()


class _Logged(threading.local):
    """Thread-local state, for `span`.

    Attributes:
        call: The call of ``next()`` that is being timed in this thread; None if calls are not
            logged.
        span: The innermost span that the thread is in; None outside of spans.
    """

    call: Call | None = None
    span: _LoggedSpan | None = None


logged = _Logged()


class _LoggedSpan:
    """A span within a logged call; see `span`."""

    def __init__(self, call: Call, label: str, annotation: TraceAnnotation):
        self._call, self._label, self._annotation = call, label, annotation
        self._outer = logged.span
        self._within = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        logged.span = self
        self._annotation.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        seconds = time.perf_counter() - self._start
        self._annotation.__exit__(*error)
        spans = self._call.spans
        spans[self._label] = spans.get(self._label, 0.0) + seconds - self._within
        if self._outer is not None:
            self._outer._within += seconds
        logged.span = self._outer


def span(name: str, **arguments: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that marks a span in `jax.profiler` traces and logged calls.

    A span is a part of the work for a batch. It costs 1 us, even without a trace or a log.

    Args:
        name: Name of the span in traces.
        **arguments: Arguments of the span in traces. ``function``, if given, is the label in logged
            calls; otherwise ``name`` is.
    """
    annotation, call = TraceAnnotation(name, **arguments), logged.call
    if call is None:
        return annotation
    return _LoggedSpan(call, arguments.get("function", name), annotation)


@dataclasses.dataclass
class InputStats:
    """Counters of one iterator since its first `Watched.watch`.

    Attributes:
        batches: Number of delivered batches, including failed batches.
        examples: Number of delivered samples in this process, without padding. Samples of the next
            epoch, which fill the last batch of an unpadded reader, count as examples.
        padding: Number of repeated samples that fill a padded reader's last batch.
        errors: Number of failed batches since the iterator's start, including the failed batches
            before a restored state.
        wait_seconds: Total seconds that callers waited in ``next()``.
        wait_counts: For each k, the number of calls of ``next()`` that took from 2**(k-1) to 2**k
            nanoseconds.
        epoch: Epoch of the last batch.
        step: Index of the last batch in its epoch, from 0.
    """

    batches: int = 0
    examples: int = 0
    padding: int = 0
    errors: int = 0
    wait_seconds: float = 0.0
    wait_counts: list[int] = dataclasses.field(default_factory=lambda: [0] * 65)
    epoch: int = 0
    step: int = 0
    # The last calls of next() while a profiler runs.
    _calls: deque[Call] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Adds the duration of a block to the waiting time, and logs the call for a profiler."""
        start = time.perf_counter_ns()
        if self._calls is not None:
            logged.call = Call(1e-9 * start)
        try:
            yield
        finally:
            duration = time.perf_counter_ns() - start
            call, logged.call = logged.call, None
            if call is not None and self._calls is not None:
                call.end = call.start + 1e-9 * duration
                self._calls.append(call)
            self.wait_seconds += 1e-9 * duration
            self.wait_counts[duration.bit_length()] += 1

    def _delivered(self, epoch: int, step: int, examples: int, padding: int, errors: int) -> None:
        """Counts a delivered batch.

        Args:
            epoch: Epoch of the batch.
            step: Index of the batch in its epoch.
            examples: Number of samples in the batch, without padding.
            padding: Number of padding samples in the batch.
            errors: Number of failed batches since the iterator's start.
        """
        self.batches += 1
        if logged.call is not None:
            logged.call.delivered = True
        self.examples += examples
        self.padding += padding
        self.errors, self.epoch, self.step = errors, epoch, step

    @contextlib.contextmanager
    def _logging(self) -> Iterator[deque[Call]]:
        """Logs the last 10,000 calls of ``next()`` during a block, and yields the log.

        Raises:
            RuntimeError: If calls are already being logged.
        """
        if self._calls is not None:
            raise RuntimeError(
                "the iterator is already being profiled: leave its `with` block first"
            )
        self._calls = calls = deque[Call](maxlen=_MOST_CALLS)
        try:
            yield calls
        finally:
            self._calls = None

    def copy(self) -> InputStats:
        """Returns a copy of the counters."""
        return dataclasses.replace(self, wait_counts=self.wait_counts.copy())

    def since(self, earlier: InputStats) -> InputStats:
        """Returns the counts since an earlier copy, with the current epoch, step and errors."""
        return dataclasses.replace(
            self,
            batches=self.batches - earlier.batches,
            examples=self.examples - earlier.examples,
            padding=self.padding - earlier.padding,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            wait_counts=[new - old for new, old in zip(self.wait_counts, earlier.wait_counts)],
        )


class Watched(Protocol):
    """An iterator of the core or of an adapter that counts its batches."""

    def watch(self) -> InputStats:
        """Returns the counters of delivered batches; counting starts at the first call of watch."""
        ...
