"""Measures the graph alone, and truncated after its operators.

DALI does not report times of operators. So pipelines of the same graph are built with the outputs
of the first operators only, and the time of an operator is the difference that it makes. The
pipelines run one batch at a time, because operators of overlapping batches hide each other, with a
pause in which readers read ahead, so that reading does not count. Readers are measured alone.
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

_CONSTANT = "fn.constant"  # created by DALI, e.g. from an argument; takes no time
_INPUT, _CPU, _GPU = "input", "cpu", "gpu"
_SMALLEST = 0.05  # parts with a smaller share of the graph's time are not divided further
_FEWEST, _MOST = 4, 50  # batches of a measurement


@dataclasses.dataclass(frozen=True)
class Stage:
    """An operator of a graph, or several successive operators.

    Attributes:
        name: Name as users write it: "fn.decoders.image", "function flip".
        lane: "input", "cpu" or "gpu", each of which processes another batch at the same time.
        seconds: Time for a batch.
    """

    name: str
    lane: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """The speed of a graph that runs alone.

    Attributes:
        seconds: Time for a batch, with the same prefetching as in the loop.
        stages: Its operators, or groups of them, with their times; empty if there was no time to
            measure them.
        num_threads: Number of DALI threads of each pipeline.
        pipelines: Number of pipelines.
    """

    seconds: float
    stages: tuple[Stage, ...] = ()
    num_threads: int = 0
    pipelines: int = 1

    @property
    def shares(self) -> dict[str, float]:
        """Share of each stage in the total time."""
        total = sum(stage.seconds for stage in self.stages)
        return {stage.name: stage.seconds / total for stage in self.stages} if total else {}

    @property
    def slowest(self) -> Stage | None:
        """The longest stage of the slowest lane."""
        lanes: Counter[str] = Counter()
        for stage in self.stages:
            lanes[stage.lane] += stage.seconds  # type: ignore[assignment]
        if not lanes:
            return None
        lane = max(lanes, key=lambda name: lanes[name])
        lane_stages = [stage for stage in self.stages if stage.lane == lane]
        return max(lane_stages, key=lambda stage: stage.seconds)


def replay(iterator: DALIGenericIterator, seconds: float) -> Replay:
    """Measures the speed of an iterator's graph, without moving the iterator.

    Args:
        iterator: The iterator.
        seconds: Approximate duration, in addition to building pipelines.

    Raises:
        NoReplica: If the graph can't be replicated, or the pipelines fail.
    """
    end = time.perf_counter() + seconds
    try:
        with _running(iterator) as (runner, names, lanes):
            first, count = runner.pipelines[0], len(runner.pipelines)
            batch_seconds = _throughput(runner, seconds / 6)
            alone = Replay(batch_seconds, (), first.num_threads, count)
        inputs = lanes.count(_INPUT)
        read = 0.0
        if inputs:
            with _running(iterator, inputs) as (runner, *_):
                read = _throughput(runner, seconds / 12)

        def latency(cut: int) -> float:
            with _running(iterator, cut) as (runner, *_):
                return _latency(runner, read, seconds / 12)

        cuts = _cuts(names, inputs)
        latencies = measured(cuts, latency, lambda: time.perf_counter() < end)
    except NoReplica:
        raise
    except (Exception, SourceError) as error:
        cause = error.__cause__ if isinstance(error, SourceError) else None
        raise NoReplica(f"its graph fails when it runs alone: {cause or error}") from error
    stages = [Stage(_joined(names[:inputs]), _INPUT, read)] if inputs else []
    for (start, before), (stop, after) in pairwise(sorted(latencies.items())):
        costly = _costly(names, start, stop) or [start]
        name = _joined([names[k] for k in costly])
        stages.append(Stage(name, lanes[costly[-1]], after - before))
    return dataclasses.replace(alone, stages=tuple(_distinct(stages)))


def measured(
    cuts: Sequence[int], latency: Callable[[int], float], going_on: Callable[[], bool]
) -> dict[int, float]:
    """Measures a graph truncated after some of its operators; refines the slowest parts.

    Args:
        cuts: Increasing numbers of operators after which the graph may be truncated: first that of
            its inputs, last that of all operators.
        latency: Measures the graph with the given number of operators; raises RuntimeError if it
            can't be truncated there.
        going_on: Returns whether there is time left. Without it, only the slowest part is divided.

    Returns:
        Seconds by number of operators.
    """
    first, last = cuts[0], cuts[-1]
    latencies = {first: latency(first) if first else 0.0}
    if last > first:
        latencies[last] = max(latencies[first], latency(last))
    remaining = {*cuts[1:-1]}
    while True:
        parts = [
            (after - before, [cut for cut in remaining if start < cut < stop], before, after)
            for (start, before), (stop, after) in pairwise(sorted(latencies.items()))
        ]
        longest = max((part[0] for part in parts), default=0.0)
        parts = [part for part in parts if part[1]]
        if not parts or (max(parts, key=lambda part: part[0])[0] < longest and not going_on()):
            break
        seconds, within, before, after = max(parts, key=lambda part: part[0])
        if seconds < _SMALLEST * latencies[last]:
            break
        cut = sorted(within)[len(within) // 2]
        remaining.remove(cut)
        with contextlib.suppress(RuntimeError):
            latencies[cut] = min(max(latency(cut), before), after)
    return latencies


def _cuts(names: Sequence[str], inputs: int) -> list[int]:
    """Chooses where to truncate a graph, so that each part has an operator that takes time."""
    costly = _costly(names, inputs, len(names))
    return sorted({inputs, *(k + 1 for k in costly[:-1]), len(names)})


def _costly(names: Sequence[str], start: int, stop: int) -> list[int]:
    """Returns the indices from ``start`` to ``stop`` of operators that are not constants."""
    return [k for k in range(start, stop) if names[k] != _CONSTANT]


@contextlib.contextmanager
def _running(
    iterator: DALIGenericIterator, cut: int | None = None
) -> Iterator[tuple[Runner, list[str], list[str]]]:
    """Builds pipelines of an iterator's graph, and closes them after the block.

    Yields the runner of the pipelines, and the names and lanes of the operators, inputs first.

    Args:
        iterator: The iterator.
        cut: Number of operators; None: the whole graph, with prefetching.
    """
    with warnings.catch_warnings(), iterator._engine.replicas() as (pipelines, feeder):
        warnings.simplefilter("ignore")  # e.g. about unused fields of records
        ordered = _ordered(pipelines[0])
        names = [
            feeder if feeder and kind_of(operator) == "external_source" else operator_name(operator)
            for operator in ordered
        ]
        lanes = [_lane(operator) for operator in ordered]
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
    return sorted(operators(pipeline), key=lambda operator: _lane(operator) != _INPUT)


def _lane(operator: Any) -> str:
    kind = kind_of(operator)
    if not operator.inputs and ("reader" in kind or kind == "external_source"):
        return _INPUT
    return _CPU if getattr(operator._op, "device", _CPU) == _CPU else _GPU


def _cut(pipeline: Pipeline, count: int) -> None:
    """Truncates an unbuilt pipeline to its first operators."""
    remaining = _ordered(pipeline)[:count]
    used = {id(node.source) for operator in remaining for node in operator_inputs(operator)}
    outputs = [
        node for operator in remaining if id(operator) not in used for node in operator.outputs
    ]
    remaining_ids = {id(operator) for operator in remaining}
    # Private in DALI: operators without outputs.
    sinks = [sink for sink in getattr(pipeline, "_sinks", ()) if id(sink.source) in remaining_ids]
    pipeline._sinks = sinks
    pipeline.set_outputs(
        *(outputs or [node for operator in remaining for node in operator.outputs])
    )


def _throughput(runner: Runner, seconds: float) -> float:
    """Measures the seconds per batch, once prefetched batches are used up."""
    for _ in range(1 + max(map(queue_depth, runner.pipelines))):
        _run_batch(runner, lambda: runner.take(discard))
    start = now = time.perf_counter()
    count = 0
    while (now - start < seconds or count < 2) and count < 10 * _MOST:
        _run_batch(runner, lambda: runner.take(discard))
        count, now = count + 1, time.perf_counter()
    return (now - start) / count


def _latency(runner: Runner, pause: float, seconds: float) -> float:
    """Measures the seconds of a batch that runs alone, after a pause for readers to read ahead."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _FEWEST or (time.perf_counter() < end and len(times) < _MOST):
        time.sleep(pause)
        start = time.perf_counter()
        _run_batch(runner, runner.run_alone)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # during the first batch, the reader fills its buffer


def _run_batch(runner: Runner, run: Callable[[], Any]) -> None:
    """Runs a batch, in the next epoch if the source has ended."""
    try:
        run()
    except SourceEnded:
        runner.restart()
        run()


def _joined(names: Sequence[str]) -> str:
    """Names a stage of successive operators: by its one or two operators, or by first and last."""
    distinct = list(dict.fromkeys(names))
    return " and ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"


def _distinct(stages: Sequence[Stage]) -> Iterator[Stage]:
    """Appends numbers to repeated names of stages."""
    seen: Counter[str] = Counter()
    for stage in stages:
        seen[stage.name] += 1
        number = seen[stage.name]
        yield dataclasses.replace(stage, name=f"{stage.name} ({number})") if number > 1 else stage
