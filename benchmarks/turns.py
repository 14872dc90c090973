"""Measures variants in turn in one process, so that a disturbance affects all of them."""

from __future__ import annotations

import gc
import importlib
import math
import pathlib
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from report import GPU, cpu_seconds

WARM = 4  # untimed batches of a pipeline, more than DALI prefetches
REST = 3  # pause after a turn, in batches, so that prefetching does not disturb the next turn
Times = dict[str, list[float]]  # a time for each round, by variant


class Steps(NamedTuple):
    """Milliseconds of a training step, of its ``next()``, and of its wait for the batch."""

    step: float
    next: float
    waiting: float


class Turns(NamedTuple):
    """Microseconds per batch, and the number of busy cores."""

    micros: Times
    cores: Times


def small_files(folder: str, count: int) -> list[str]:
    """Writes `count` files of one byte, which are not decoded, and returns their paths."""
    files = [f"{folder}/{number}.jpg" for number in range(count)]
    for file in files:
        pathlib.Path(file).write_bytes(b"x")
    return files


def raw_loop(pipeline: Any) -> Iterator[Any]:
    """Yields outputs of a pipeline in DALI's own loop. They are valid until the next step."""
    pipeline.build()
    pipeline.schedule_run()
    while True:
        outputs = pipeline.share_outputs()
        yield outputs
        del outputs
        pipeline.release_outputs()
        pipeline.schedule_run()


def in_turn(
    names: Collection[str],
    rounds: int,
    seed: str = "",
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Yields each name once per round, in a different order in each round.

    Args:
        names: The names, which may be removed during a round.
        rounds: Number of rounds.
        seed: Seed of the orders.
        is_over: Returns whether to stop. It is ignored in the first round.
    """
    for turn in range(rounds):
        for name in random.Random(f"{seed} {turn}").sample(list(names), len(names)):
            if turn and is_over():
                return
            yield name


def endless(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields all epochs of an iterator that continues after StopIteration."""
    while True:
        yield from iterator


def time_iterators(
    iterators: Mapping[str, Iterator[Any]], rounds: int, batches: int, wait: Callable[[], object]
) -> Times:
    """Measures ``next()``: medians over the batches of each round, in microseconds.

    Args:
        iterators: Endless iterators by name.
        rounds: Number of rounds.
        batches: Batches per iterator and round.
        wait: Waits until DALI has prepared the next batch, so that only host work is timed.
    """
    times: Times = {name: [] for name in iterators}
    gc.collect()
    for _ in range(rounds):
        for name, iterator in iterators.items():
            micros = []
            for _ in range(batches):
                wait()
                begin = time.perf_counter()
                taken = next(iterator)
                del taken  # the time includes freeing the batch
                micros.append((time.perf_counter() - begin) * 1e6)
            times[name].append(statistics.median(micros))
    return times


def time_pipelines(
    pipelines: Mapping[str, Any], rounds: int, batches: int, to_host: bool = False
) -> Turns:
    """Measures pipelines in microseconds per batch, in a different order in each round.

    Args:
        pipelines: Built DALI pipelines by name.
        rounds: Number of rounds.
        batches: Batches per pipeline and round.
        to_host: Whether to copy the last batch from the GPU, to wait for it.
    """
    micros: Times = {name: [] for name in pipelines}
    cores: Times = {name: [] for name in pipelines}
    cuda: Any = importlib.import_module("numba.cuda") if GPU else None
    gc.collect()
    gc.freeze()  # otherwise each collection scans all modules, which takes 0.1 s
    for name in in_turn(pipelines, rounds):
        gc.collect()
        for _ in range(WARM):
            pipelines[name].run()
        if GPU:
            cuda.synchronize()
        busy = cpu_seconds()
        begin = time.perf_counter()
        for _ in range(batches):
            outputs = pipelines[name].run()
        if GPU and to_host:
            outputs[0].as_cpu()
        seconds = time.perf_counter() - begin
        cores[name].append((cpu_seconds() - busy) / seconds)
        micros[name].append(seconds / batches * 1e6)
        time.sleep(REST * seconds / batches)
    gc.unfreeze()
    return Turns(micros, cores)


def time_steps(train: Callable[[Any], Any], batches: Iterator[Any], count: int) -> Steps:
    """Times training steps, at most two at a time, and returns their means.

    A step waits from the end of the previous step until its batch has arrived. While the device
    still computes the previous steps, the time in ``next()`` costs nothing.

    Args:
        train: Starts the step of a batch, and returns its loss without waiting for it.
        batches: The batches.
        count: Number of steps.

    Raises:
        RuntimeError: If the last loss is not finite.
    """
    ends: list[float] = []
    losses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room = threading.Semaphore(2)

    def watch() -> None:
        for _ in range(count):
            losses.get().block_until_ready()
            ends.append(time.perf_counter())
            room.release()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    in_next, arrivals = 0.0, []
    begin = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        batch = next(batches)
        arrivals.append(time.perf_counter())
        in_next += arrivals[-1] - start
        loss = train(batch)
        losses.put(loss)
        room.acquire()
    watcher.join()
    if not math.isfinite(float(loss)):
        raise RuntimeError("the loss is not finite")
    waiting = sum(max(0.0, arrival - end) for arrival, end in zip(arrivals[1:], ends))
    total = time.perf_counter() - begin
    return Steps(*(1e3 * seconds / count for seconds in (total, in_next, waiting)))


def over(times: Times, base: str) -> Times:
    """Returns the differences from a variant in the same round."""
    return {name: [a - b for a, b in zip(values, times[base])] for name, values in times.items()}


def share(times: Sequence[float], base: Sequence[float]) -> str:
    """Formats the ratio of times in the same round: the median and the quartiles."""
    ratios = [a / b for a, b in zip(times, base) if b > 0]
    if len(ratios) < 2:
        return ""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
