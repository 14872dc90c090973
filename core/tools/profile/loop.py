"""Time of a training loop: inside ``next()``, by purpose, and outside."""

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
    """The time of the steps of a loop.

    Attributes:
        steps: Number of steps.
        samples: Samples of a step in this process, including padding.
        seconds: Total time of the steps.
        waits: Seconds in ``next()`` by purpose: `PIPELINES` (DALI, and the sources that it reads),
            `PLACING`, "function NAME" (of the placed batch).
    """

    steps: int
    samples: float
    seconds: float
    waits: dict[str, float]

    @property
    def wait_share(self) -> float:
        """Share of the time spent in ``next()``."""
        return min(1.0, sum(self.waits.values()) / self.seconds) if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples * self.steps / self.seconds if self.seconds else 0.0

    @property
    def unblocked_rate(self) -> float:
        """Samples per second if ``next()`` took no time."""
        compute_seconds = self.seconds * (1 - self.wait_share)
        return self.samples * self.steps / compute_seconds if compute_seconds else float("inf")


def loop_times(calls: Sequence[Call], end: float, samples: float) -> LoopTimes:
    """Computes the times of a loop's steps, without the first three steps.

    If there are fewer than six calls, the first half of them is left out instead. A step is a call
    of ``next()`` that returns a batch, and everything up to the next call.

    Args:
        calls: The calls of ``next()``, in order.
        end: End of the loop, by `time.perf_counter`.
        samples: Samples of a step.
    """
    calls = calls[min(_FIRST_STEPS, len(calls) // 2) :]
    waits = {PIPELINES: 0.0}
    for call in calls:
        unassigned = call.end - call.start
        for label, seconds in call.spans.items():
            name = _LABELS.get(label) or f"function {label.rpartition('<locals>.')[2]}"
            waits[name] = waits.get(name, 0.0) + seconds
            unassigned -= seconds
        waits[PIPELINES] += max(0.0, unassigned)  # mainly passing data of the caller's sources
    steps = sum(call.delivered for call in calls)
    return LoopTimes(steps, samples, end - calls[0].start if steps else 0.0, waits)
