"""`ReportInput`: a periodic action that reports how long training waits for its input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ..core.environment.extras import extra
from ..core.messages.printable import printable_repr
from ..core.stats import InputStats, Watched

with extra("clu,tf", "dalijax.adapters.clu.ReportInput"):
    from clu import metric_writers, periodic_actions

__all__ = ["ReportInput"]


class ReportInput(periodic_actions.PeriodicAction):
    """Writes metrics of the input pipeline through a metric writer.

    For the steps since the last report (or since the first call):

    - ``input/wait_fraction``: share of the time spent in ``next()``, between 0 and 1.
    - ``input/wait_ms_per_batch``: mean number of milliseconds in ``next()`` per batch.
    - ``input/examples_per_sec``: samples of this process per second, without padding.
    - ``input/padding_fraction``: share of the samples that are padding.

    For the current step: ``input/epoch`` and ``input/step_in_epoch`` of the last batch, from 0, and
    ``input/errors``, the number of failed batches in the whole run, including the part before a
    restore.

    Only process 0 writes metrics, which describe its own input. As in clu's ReportProgress, the
    first call never writes, because no time has passed.

    Args:
        iterator: The iterator that the loop takes its batches from.
        writer: A clu.metric_writers.MetricWriter.
        num_train_steps: The last step; its metrics are always written.
        every_steps: Metrics are written at multiples of this number of steps.
        every_secs: Metrics are written whenever this number of seconds has passed.
        on_steps: Further steps whose metrics are written.
    """

    def __init__(
        self,
        iterator: Watched,
        *,
        writer: metric_writers.MetricWriter,
        num_train_steps: int | None = None,
        every_steps: int | None = None,
        every_secs: float | None = 60.0,
        on_steps: Iterable[int] | None = None,
    ):
        if not callable(getattr(iterator, "watch", None)):
            raise TypeError(
                f"ReportInput requires an iterator of dalijax, not {printable_repr(iterator, 60)}. "
                "Pass the iterator that the loop takes its batches from"
            )
        steps = set(on_steps or ())
        if num_train_steps is not None:
            steps.add(num_train_steps)
        super().__init__(every_steps=every_steps, every_secs=every_secs, on_steps=steps)
        self._writer = writer
        self._stats = iterator.watch()
        self._before: InputStats | None = None

    def _init_and_check(self, step: int, t: float) -> None:
        super()._init_and_check(step, t)
        if self._before is None:
            self._before = self._stats.copy()

    def _should_trigger(self, step: int, t: float) -> bool:
        # The first call sets the previous step and time, without a report.
        return step != self._previous_step and super()._should_trigger(step, t)

    def _apply(self, step: int, t: float) -> None:
        current = self._stats.copy()
        if jax.process_index() == 0:
            self._writer.write_scalars(
                step, scalars(current, self._before, t - self._previous_time)
            )
        self._before = current


def scalars(current: InputStats, before: InputStats | None, seconds: float) -> dict[str, Any]:
    """Returns the metrics of `ReportInput`, by name.

    Args:
        current: The current counters.
        before: The counters at the last report; None if all were zero.
        seconds: Seconds since the last report.
    """
    new = current.since(before or InputStats())
    rows = new.examples + new.padding
    return {
        "input/wait_fraction": min(1.0, new.wait_seconds / seconds) if seconds > 0 else 0.0,
        "input/wait_ms_per_batch": 1e3 * new.wait_seconds / max(1, new.batches),
        "input/examples_per_sec": new.examples / seconds if seconds > 0 else 0.0,
        "input/epoch": current.epoch,
        "input/step_in_epoch": current.step,
        "input/padding_fraction": new.padding / max(1, rows),
        "input/errors": current.errors,
    }
