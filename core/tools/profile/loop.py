"""Computes the time that a training loop spends in ``next()``, by purpose, and outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...stats import Call

PIPELINES = "pipelines"
PLACING = "placing"
_LABELS = {"dalijax.wait": PIPELINES, "dalijax.place": PLACING}
# The first steps compile, and take batches that were prepared before the block.
_FIRST_STEPS = 3


@dataclasses.dataclass(frozen=True)
class LoopTimes:
    """The times of the steps of a training loop.

    Attributes:
        steps: Number of steps.
        samples: Average number of samples of a step in this process, including padding.
        seconds: Total time of the steps.
        waits: Seconds in ``next()`` by purpose: `PIPELINES` (DALI, and the sources that it reads),
            `PLACING` (of batches on devices), "function NAME" (which ``batch_map`` calls).
    """

    steps: int
    samples: float
    seconds: float
    waits: dict[str, float]

    @property
    def wait_share(self) -> float:
        """Returns the share of the loop's time that is spent in ``next()``, 0 to 1."""
        return min(1.0, sum(self.waits.values()) / self.seconds) if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Returns the samples per second of the loop."""
        return self.samples * self.steps / self.seconds if self.seconds else 0.0

    @property
    def unblocked_rate(self) -> float:
        """Returns the samples per second that the loop would have if ``next()`` took no time."""
        compute_seconds = self.seconds * (1 - self.wait_share)
        return self.samples * self.steps / compute_seconds if compute_seconds else float("inf")


def loop_times(calls: Sequence[Call], end: float, samples: float) -> LoopTimes:
    """Returns the times of a loop's steps, without the first three steps.

    If there are fewer than six calls, the first half of them is left out instead. A step is a call
    of ``next()`` that returns a batch, and everything up to the next call.

    Args:
        calls: The calls of ``next()``, in order.
        end: End of the loop, by `time.perf_counter`.
        samples: Average number of samples of a step.
    """
    calls = calls[min(_FIRST_STEPS, len(calls) // 2) :]
    waits = {PIPELINES: 0.0}
    steps = sum(call.delivered for call in calls)
    if not steps:
        return LoopTimes(0, samples, 0.0, waits)
    for call in calls:
        unassigned = call.end - call.start
        for label, seconds in call.spans.items():
            name = _LABELS.get(label) or f"function {label.rpartition('<locals>.')[2]}"
            waits[name] = waits.get(name, 0.0) + seconds
            unassigned -= seconds
        waits[PIPELINES] += max(0.0, unassigned)  # mainly passing data of the caller's sources
    return LoopTimes(steps, samples, end - calls[0].start, waits)
