"""The graph alone, and cut behind its operators: how fast it is, and which part takes how long.

DALI has no times of operators. So pipelines of the same graph are built with other outputs, those
of the first operators alone, and the difference that one more operator makes is its time. These
run one batch after the other, since operators of batches that overlap hide one another, with a
pause between them in which readers read ahead, which then don't count; what the readers take is
measured of them alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from nvidia.dali import Pipeline

from ...iterator.iterator import DALIGenericIterator
from ...pipeline.calls import calls
from ...pipeline.dali_pipeline import build_pipeline, operator_name, operators, queue_depth
from ...pipeline.engine import NoReplica
from ...pipeline.runner import Runner, SourceEnded, SourceError, discard
from ...state.operators import kind_of, operator_inputs

_CONSTANT = "fn.constant"  # which DALI makes of an argument, say, and takes no time
_INPUT, _CPU, _GPU = "input", "cpu", "gpu"
_SMALLEST = 0.05  # shares of the graph's time that are not looked into
_FEWEST, _MOST = 4, 50  # batches of a measurement


@dataclasses.dataclass(frozen=True)
class Stage:
    """An operator of a graph, or some that follow one another.

    Attributes:
        name: As users write it: "fn.decoders.image", "function flip".
        lane: "input", "cpu" or "gpu": each works on another batch at the same time.
        seconds: Of a batch.
    """

    name: str
    lane: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a graph does alone.

    Attributes:
        seconds: Of a batch, with as many prepared ahead as for the loop.
        stages: Its parts in order; none where the time was over.
        num_threads: DALI's threads for each pipeline.
        pipelines: Number of its pipelines.
    """

    seconds: float
    stages: tuple[Stage, ...] = ()
    num_threads: int = 0
    pipelines: int = 1

    @property
    def shares(self) -> dict[str, float]:
        """Share of each stage in the time of all."""
        total = sum(stage.seconds for stage in self.stages)
        return {stage.name: stage.seconds / total for stage in self.stages} if total else {}

    @property
    def slowest(self) -> Stage | None:
        """The longest stage of the lane that takes longest."""
        lanes: Counter[str] = Counter()
        for stage in self.stages:
            lanes[stage.lane] += stage.seconds  # type: ignore[assignment]
        if not lanes:
            return None
        lane = max(lanes, key=lambda name: lanes[name])
        own = [stage for stage in self.stages if stage.lane == lane]
        return max(own, key=lambda stage: stage.seconds)


def replay(iterator: DALIGenericIterator, seconds: float) -> Replay:
    """Runs pipelines of an iterator's graph, which stays where it is.

    Args:
        iterator: The iterator.
        seconds: About as long it takes; building pipelines comes on top.

    Raises:
        NoReplica: If there are no pipelines to run, or they fail.
    """
    end = time.perf_counter() + seconds
    try:
        with _running(iterator) as (runner, names, lanes):
            first, count = runner.pipelines[0], len(runner.pipelines)
            taken = _throughput(runner, seconds / 6)
            alone = Replay(taken, (), first.num_threads, count)
        inputs = lanes.count(_INPUT)
        read = 0.0
        if inputs:
            with _running(iterator, inputs) as (runner, *_):
                read = _throughput(runner, seconds / 12)

        def latency(cut: int) -> float:
            with _running(iterator, cut) as (runner, *_):
                return _latency(runner, read, seconds / 12)

        cuts = _cuts(names, inputs)
        known = measured(cuts, latency, lambda: time.perf_counter() < end)
    except NoReplica:
        raise
    except (Exception, SourceError) as error:
        cause = error.__cause__ if isinstance(error, SourceError) else None
        raise NoReplica(f"its graph fails where it runs alone: {cause or error}") from error
    stages = [Stage(_joined(names[:inputs]), _INPUT, read)] if inputs else []
    for (start, before), (stop, after) in pairwise(sorted(known.items())):
        costly = _costly(names, start, stop) or [start]
        name = _joined([names[k] for k in costly])
        stages.append(Stage(name, lanes[costly[-1]], after - before))
    return dataclasses.replace(alone, stages=tuple(_distinct(stages)))


def measured(
    cuts: Sequence[int], latency: Callable[[int], float], going_on: Callable[[], bool]
) -> dict[int, float]:
    """Seconds of a graph that is cut behind some of its operators, the slowest parts in detail.

    Args:
        cuts: Numbers of operators behind which it may be cut, in order: that of its inputs first,
            that of all last.
        latency: Measures the graph cut behind so many operators; raises RuntimeError where it
            can't be cut there.
        going_on: Whether there is time for more than the slowest part.
    """
    first, last = cuts[0], cuts[-1]
    known = {first: latency(first) if first else 0.0}
    if last > first:
        known[last] = max(known[first], latency(last))
    left = {*cuts[1:-1]}
    while True:
        parts = [
            (after - before, [cut for cut in left if start < cut < stop], before, after)
            for (start, before), (stop, after) in pairwise(sorted(known.items()))
        ]
        longest = max((part[0] for part in parts), default=0.0)
        parts = [part for part in parts if part[1]]
        if not parts or (max(parts, key=lambda part: part[0])[0] < longest and not going_on()):
            break
        seconds, within, before, after = max(parts, key=lambda part: part[0])
        if seconds < _SMALLEST * known[last]:
            break
        cut = sorted(within)[len(within) // 2]
        left.remove(cut)
        with contextlib.suppress(RuntimeError):
            known[cut] = min(max(latency(cut), before), after)
    return known


def _cuts(names: Sequence[str], inputs: int) -> list[int]:
    """Where to cut a graph, so that each part but the first has an operator that takes time."""
    costly = _costly(names, inputs, len(names))
    return sorted({inputs, *(k + 1 for k in costly[:-1]), len(names)})


def _costly(names: Sequence[str], start: int, stop: int) -> list[int]:
    """Which of some operators take time."""
    return [k for k in range(start, stop) if names[k] != _CONSTANT]


@contextlib.contextmanager
def _running(
    iterator: DALIGenericIterator, cut: int | None = None
) -> Iterator[tuple[Runner, list[str], list[str]]]:
    """Built pipelines, with the names and the lanes of their operators, inputs first.

    Args:
        iterator: The iterator.
        cut: Number of operators; None for the graph as it is, and batches ahead.
    """
    with warnings.catch_warnings(), iterator._engine.replicas() as (pipelines, feeder):
        warnings.simplefilter("ignore")  # of records' fields that nothing uses, say
        ordered = _ordered(pipelines[0])
        names = [
            feeder if feeder and kind_of(one) == "external_source" else operator_name(one)
            for one in ordered
        ]
        lanes = [_lane(one) for one in ordered]
        with calls:
            for pipeline in pipelines:
                if cut is not None:
                    _cut(pipeline, cut)
                build_pipeline(pipeline)
        runner = Runner(pipelines, gradual=cut is not None)
        try:
            yield runner, names, lanes
        finally:
            runner.close()


def _ordered(pipeline: Pipeline) -> list[Any]:
    return sorted(operators(pipeline), key=lambda one: _lane(one) != _INPUT)


def _lane(operator: Any) -> str:
    kind = kind_of(operator)
    if not operator.inputs and ("reader" in kind or kind == "external_source"):
        return _INPUT
    return _CPU if getattr(operator._op, "device", _CPU) == _CPU else _GPU


def _cut(pipeline: Pipeline, count: int) -> None:
    """Leaves the first operators of a pipeline that is not built."""
    kept = _ordered(pipeline)[:count]
    used = {id(node.source) for one in kept for node in operator_inputs(one)}
    outputs = [node for one in kept if id(one) not in used for node in one.outputs]
    kept_ids = {id(one) for one in kept}
    # Not public: operators without outputs.
    sinks = [sink for sink in getattr(pipeline, "_sinks", ()) if id(sink.source) in kept_ids]
    pipeline._sinks = sinks
    pipeline.set_outputs(*(outputs or [node for one in kept for node in one.outputs]))


def _throughput(runner: Runner, seconds: float) -> float:
    """Seconds of a batch, once those that were prepared ahead are used up."""
    for _ in range(1 + max(map(queue_depth, runner.pipelines))):
        _again(runner, lambda: runner.take(discard))
    begin = now = time.perf_counter()
    count = 0
    while (now - begin < seconds or count < 2) and count < 10 * _MOST:
        _again(runner, lambda: runner.take(discard))
        count, now = count + 1, time.perf_counter()
    return (now - begin) / count


def _latency(runner: Runner, pause: float, seconds: float) -> float:
    """Seconds of a batch that runs alone, after a pause in which readers read ahead."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _FEWEST or (time.perf_counter() < end and len(times) < _MOST):
        time.sleep(pause)
        start = time.perf_counter()
        _again(runner, runner.run_alone)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one has the reader fill its buffer


def _again(runner: Runner, run: Callable[[], Any]) -> None:
    """Runs a batch, of the next epoch where the source's has ended."""
    try:
        run()
    except SourceEnded:
        runner.restart()
        run()


def _joined(names: Sequence[str]) -> str:
    """The name of operators that follow one another."""
    each = list(dict.fromkeys(names))
    return " and ".join(each) if len(each) < 3 else f"{each[0]} to {each[-1]}"


def _distinct(stages: Sequence[Stage]) -> Iterator[Stage]:
    """The stages with numbers behind names that come again."""
    seen: Counter[str] = Counter()
    for stage in stages:
        seen[stage.name] += 1
        number = seen[stage.name]
        yield dataclasses.replace(stage, name=f"{stage.name} ({number})") if number > 1 else stage
