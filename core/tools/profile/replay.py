"""Measures the speed of a graph without the training loop, and the time of its operators.

DALI does not report times of operators. So pipelines of the same graph are built with the outputs
of the first operators only, and the time of an operator is the difference that it makes. The
pipelines run one batch at a time, because operators of overlapping batches hide each other. There
is a pause before each batch, in which readers read ahead, so that reading does not count; it takes
twice as long as reading a batch, because some batches take longer to read. Readers are measured
alone.
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

from ...iterator.iterator import BatchIterator
from ...pipeline.calls import calls
from ...pipeline.dali_pipeline import build_pipeline, operator_name, queue_depth
from ...pipeline.engine import NoReplica
from ...pipeline.runner import Runner, SourceEnded, SourceError, discard
from ...state.operators import kind_of, operator_inputs, operators

_CONSTANT = "fn.constant"  # created by DALI, e.g. from an argument; takes no time
_INPUT, _CPU, _GPU = "input", "cpu", "gpu"
_SMALLEST = 0.05  # parts with a smaller share of the graph's time are not divided further
_FEWEST, _MOST = 4, 50  # batches of a measurement


@dataclasses.dataclass(frozen=True)
class Stage:
    """An operator of a graph, or several successive operators.

    Attributes:
        name: Name as users write it: "fn.decoders.image", "function flip".
        lane: "input", "cpu" or "gpu". The lanes process different batches at the same time.
        seconds: Time for a batch.
    """

    name: str
    lane: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """The speed of a graph that runs without the training loop.

    Attributes:
        seconds: Time for a batch, with the same prefetching as in the loop.
        stages: The operators of the graph, or groups of operators, with their times; empty if the
            operators were not measured.
        num_threads: Number of DALI threads of each pipeline.
        pipelines: Number of pipelines.
    """

    seconds: float
    stages: tuple[Stage, ...] = ()
    num_threads: int = 0
    pipelines: int = 1

    @property
    def shares(self) -> dict[str, float]:
        """Returns the share of each stage in the total time of all stages, by name."""
        total = sum(stage.seconds for stage in self.stages)
        return {stage.name: stage.seconds / total for stage in self.stages} if total else {}

    @property
    def slowest(self) -> Stage | None:
        """Returns the longest stage of the slowest lane; None if no stage was measured."""
        lanes: Counter[str] = Counter()
        for stage in self.stages:
            lanes[stage.lane] += stage.seconds  # type: ignore[assignment]
        if not lanes:
            return None
        lane = max(lanes, key=lambda name: lanes[name])
        lane_stages = [stage for stage in self.stages if stage.lane == lane]
        return max(lane_stages, key=lambda stage: stage.seconds)


def replay(iterator: BatchIterator, seconds: float) -> Replay:
    """Measures and returns the speed of an iterator's graph, without moving the iterator.

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
                return _latency(runner, 2 * read, seconds / 12)

        cuts = _cuts(names, inputs)
        latencies = measured(cuts, latency, lambda: time.perf_counter() < end)
    except NoReplica:
        raise
    except (Exception, SourceError) as error:
        cause = error.__cause__ if isinstance(error, SourceError) else None
        raise NoReplica(f"its graph fails when it runs alone: {cause or error}") from error
    stages = [Stage(_stage_name(names[:inputs]), _INPUT, read)] if inputs else []
    for (start, before), (stop, after) in pairwise(sorted(latencies.items())):
        costly = _costly(names, start, stop) or [start]
        name = _stage_name([names[k] for k in costly])
        stages.append(Stage(name, lanes[costly[-1]], after - before))
    return dataclasses.replace(alone, stages=tuple(_distinct(stages)))


def measured(
    cuts: Sequence[int], latency: Callable[[int], float], going_on: Callable[[], bool]
) -> dict[int, float]:
    """Returns the times of a graph that is truncated after some of its operators.

    The slowest part between two truncations is divided first.

    Args:
        cuts: Increasing numbers of operators after which the graph may be truncated. The first is
            the number of inputs, the last the number of all operators.
        latency: Returns the seconds for a batch of the graph with the given number of operators;
            raises RuntimeError if the graph can't be truncated there.
        going_on: Returns whether there is time left. If not, only the slowest part is divided.

    Returns:
        Seconds for a batch, by number of operators.
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
    """Returns the numbers of operators after which to truncate a graph, in increasing order.

    Each part between two truncations has an operator that takes time.
    """
    costly = _costly(names, inputs, len(names))
    return sorted({inputs, *(k + 1 for k in costly[:-1]), len(names)})


def _costly(names: Sequence[str], start: int, stop: int) -> list[int]:
    """Returns the indices, from ``start`` up to ``stop``, of operators that are not constants."""
    return [k for k in range(start, stop) if names[k] != _CONSTANT]


@contextlib.contextmanager
def _running(
    iterator: BatchIterator, cut: int | None = None
) -> Iterator[tuple[Runner, list[str], list[str]]]:
    """Builds pipelines of an iterator's graph, and closes the pipelines after the block.

    Args:
        iterator: The iterator.
        cut: Number of operators after which the graph is truncated; None: the whole graph runs,
            with prefetching.

    Yields:
        The runner of the pipelines, and the names and lanes of the operators, inputs first.
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
    """Truncates an unbuilt pipeline to its first ``count`` operators."""
    remaining = _ordered(pipeline)[:count]
    used = {id(node.source) for operator in remaining for node in operator_inputs(operator)}
    outputs = [
        node for operator in remaining if id(operator) not in used for node in operator.outputs
    ]
    remaining_ids = {id(operator) for operator in remaining}
    # `_sinks` is private in DALI: operators without outputs.
    sinks = [sink for sink in getattr(pipeline, "_sinks", ()) if id(sink.source) in remaining_ids]
    pipeline._sinks = sinks
    pipeline.set_outputs(
        *(outputs or [node for operator in remaining for node in operator.outputs])
    )


def _throughput(runner: Runner, seconds: float) -> float:
    """Returns the measured seconds per batch, not counting prefetched batches."""
    for _ in range(1 + max(map(queue_depth, runner.pipelines))):
        _run_batch(runner, lambda: runner.take(discard))
    start = now = time.perf_counter()
    count = 0
    while (now - start < seconds or count < 2) and count < 10 * _MOST:
        _run_batch(runner, lambda: runner.take(discard))
        count, now = count + 1, time.perf_counter()
    return (now - start) / count


def _latency(runner: Runner, pause: float, seconds: float) -> float:
    """Returns the median time of a batch that runs alone, after a pause to read ahead."""
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


def _stage_name(names: Sequence[str]) -> str:
    """Returns the name of a stage: its one or two operators, or its first and last operator."""
    distinct = list(dict.fromkeys(names))
    return " and ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"


def _distinct(stages: Sequence[Stage]) -> Iterator[Stage]:
    """Yields the stages, with numbers appended to repeated names."""
    seen: Counter[str] = Counter()
    for stage in stages:
        seen[stage.name] += 1
        number = seen[stage.name]
        yield dataclasses.replace(stage, name=f"{stage.name} ({number})") if number > 1 else stage
