"""What a loop's times and the replay of its graph say, in words; a function of numbers alone."""

from __future__ import annotations

import dataclasses

from .loop import PIPELINES, PLACING, LoopTimes
from .replay import Replay, Stage

BOUND, NOT_BOUND = "input-bound", "not input-bound"
_LEAST = 0.1  # share of next() in the loop's time from which on the loop is input-bound
_ALIKE = 1.5  # times as fast alone as beside the loop: a busy machine
_TUNE = "python -m dalijax.tune"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is to be said of a loop.

    Attributes:
        input_bound: Whether it waits for its input; None where it took no batch.
        input: The part of the input that it waits for: "fn.decoders.image", "placing",
            "function flip"; "" where that is not known, and where it does not wait.
        text: The whole in words.
    """

    input_bound: bool | None
    input: str
    text: str


def verdict(loop: LoopTimes, replay: Replay | None, unknown: str, cores: int) -> Verdict:
    """Says whether a loop waits for its input, and for what.

    The loop's own times decide; the replay says why.

    Args:
        loop: The loop's times.
        replay: What its graph does alone; None where it could not be replayed.
        unknown: Why not.
        cores: Number of cores that this process may use.
    """
    if not loop.steps:
        return Verdict(None, "", "no verdict: the loop took no batch while it was profiled")
    bound = loop.wait_share >= _LEAST
    graph = f"the graph alone gives {_rate(loop.samples / replay.seconds)}" if replay else ""
    spent = f"next() takes {_percent(loop.wait_share)} of the loop's time"
    if not bound:
        return Verdict(
            False, "", _sentence(f"{NOT_BOUND}: {spent}", f"it takes {_rate(loop.rate)}", graph)
        )
    what = max(loop.waits, key=lambda name: loop.waits[name])
    unblocked = f"the loop takes {_rate(loop.rate)}, and {_rate(loop.unblocked_rate)} if it waited "
    parts = [f"{BOUND}: {spent}", f"{unblocked}for nothing", graph]
    if what != PIPELINES:
        share = _percent(loop.waits[what] / loop.seconds)
        parts += [
            f"input: {what} takes {share} of the loop's time",
            _OF_PLACING if what == PLACING else _OF_FUNCTIONS,
        ]
        return Verdict(True, what, _sentence(*parts))
    stage = replay.slowest if replay else None
    if replay is None or stage is None:
        why = unknown or "there was no time to replay its parts, pass more seconds"
        parts.append(f"input: the pipelines, of which no part can be named: {why}")
        return Verdict(True, "", _sentence(*parts))
    faster = loop.samples / replay.seconds / loop.rate
    if faster > _ALIKE:
        parts.append(
            f"beside the loop it gives 1/{faster:.1f} of that: the loop takes cores from it, or "
            "its files were in memory when it ran alone"
        )
    parts += [
        f"input: {stage.name} takes {_percent(replay.shares[stage.name])} of the graph's time",
        _cure(stage, replay, cores),
    ]
    return Verdict(True, stage.name, _sentence(*parts))


_OF_PLACING = "arrays of fewer bytes are placed faster: uint8, or float16"
_OF_FUNCTIONS = "it is called on one batch after the other: jit it, or do it in the training step"
_OF_INPUTS = "what is read takes its time: files nearby, or fewer and larger ones"


def _cure(stage: Stage, replay: Replay, cores: int) -> str:
    if stage.name.startswith("function "):
        return _OF_FUNCTIONS
    if stage.lane == "input":
        return _OF_INPUTS
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
