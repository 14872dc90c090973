"""Expresses the times of a training loop and of its graph in words, as a pure function."""

from __future__ import annotations

import dataclasses

from .loop import PIPELINES, PLACING, LoopTimes
from .replay import Replay, Stage

BOUND, NOT_BOUND = "input-bound", "not input-bound"
_LEAST = 0.1  # minimum share of next() in the time of an input-bound loop
_ALIKE = 1.5  # above this speed-up of the graph alone, the machine is busy in the loop
_TUNE = "python -m dalijax.tune"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The conclusion about a training loop.

    Attributes:
        input_bound: Whether the loop waits for its input; None if the loop took no batch.
        input: The part of the input that the loop waits for: "fn.decoders.image", "placing",
            "function flip"; "" if the part is unknown, or the loop does not wait.
        text: The conclusion in words.
    """

    input_bound: bool | None
    input: str
    text: str


def verdict(loop: LoopTimes, replay: Replay | None, unknown: str, cores: int) -> Verdict:
    """Returns whether a loop waits for its input, and for which part, as a `Verdict`.

    The times of the loop decide; the replay explains the times.

    Args:
        loop: The times of the loop.
        replay: The speed of the graph alone; None if the graph could not be replayed.
        unknown: The reason why the graph could not be replayed.
        cores: Number of cores that this process may use.
    """
    if not loop.steps:
        return Verdict(None, "", "no verdict: the loop took no batch while it was profiled")
    bound = loop.wait_share >= _LEAST
    graph = f"the graph alone produces {_rate(loop.samples / replay.seconds)}" if replay else ""
    spent = f"next() takes {_percent(loop.wait_share)} of the loop's time"
    if not bound:
        return Verdict(
            False, "", _sentence(f"{NOT_BOUND}: {spent}", f"it takes {_rate(loop.rate)}", graph)
        )
    purpose = max(loop.waits, key=lambda name: loop.waits[name])
    unblocked = f"and would take {_rate(loop.unblocked_rate)} without waiting"
    parts = [f"{BOUND}: {spent}", f"the loop takes {_rate(loop.rate)}, {unblocked}", graph]
    if purpose != PIPELINES:
        share = _percent(loop.waits[purpose] / loop.seconds)
        parts += [
            f"input: {purpose} takes {share} of the loop's time",
            _PLACING_CURE if purpose == PLACING else _BATCH_MAP_CURE,
        ]
        return Verdict(True, purpose, _sentence(*parts))
    stage = replay.slowest if replay else None
    if replay is None or stage is None:
        reason = unknown or "there was no time to replay its parts. Pass more seconds"
        parts.append(f"input: the pipelines, but the part is unknown: {reason}")
        return Verdict(True, "", _sentence(*parts))
    faster = loop.samples / replay.seconds / loop.rate
    if faster > _ALIKE:
        parts.append(
            f"in the loop it reaches 1/{faster:.1f} of that: the loop uses cores that the graph "
            "needs, or files were cached when the graph ran alone"
        )
    parts += [
        f"input: {stage.name} takes {_percent(replay.shares[stage.name])} of the graph's time",
        _cure(stage, replay, cores),
    ]
    return Verdict(True, stage.name, _sentence(*parts))


_PLACING_CURE = "smaller arrays are placed faster: use uint8 or float16"
_FUNCTION_CURE = "batches wait for each other in it: compile it with jit, or call it in the step"
_BATCH_MAP_CURE = "batch_map runs before each step: apply it in the training step"
_INPUT_CURE = "reading is slow: use local files, or fewer and larger files"


def _cure(stage: Stage, replay: Replay, cores: int) -> str:
    if stage.name.startswith("function "):
        return _FUNCTION_CURE
    if stage.lane == "input":
        return _INPUT_CURE
    threads = max(1, cores // replay.pipelines)
    if stage.lane == "cpu" and replay.num_threads < threads:
        return f"try num_threads={threads} ({_TUNE})"
    return f"{_TUNE} tries other settings"


def _sentence(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else f"{100 * share:.1g} %"


def _rate(rate: float) -> str:
    if rate == float("inf"):
        return "any number of samples/s"
    number = f"{rate / 1000:.1f} k" if rate >= 10_000 else f"{rate:,.0f}" if rate >= 10 else None
    return f"{number or f'{rate:.1f}'} samples/s"
