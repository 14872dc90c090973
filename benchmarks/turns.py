"""Measuring in turn: all variants in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import gc
import importlib
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from report import GPU, cpu_seconds

WARM = 4  # batches of a pipeline before it is timed: more than DALI prefetches
REST = 3  # batches for whose time it rests then, so that no work ahead disturbs the next one
Times = dict[str, list[float]]  # of each variant, a time for each round


class Turns(NamedTuple):
    """What batches took, in microseconds, and how many cores were busy meanwhile."""

    micros: Times
    cores: Times


def small_files(folder: str, count: int) -> list[str]:
    """Writes so many files of one byte, which nobody decodes, and returns their paths."""
    files = [f"{folder}/{number}.jpg" for number in range(count)]
    for file in files:
        pathlib.Path(file).write_bytes(b"x")
    return files


def raw_loop(pipeline: Any) -> Iterator[Any]:
    """DALI's own loop over a pipeline; its outputs are valid until the next are asked for."""
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
    """Each name once a round, in another order each time; from the second on until it is over.

    Args:
        names: Those that are left as a round begins.
        rounds: Number of rounds.
        seed: Of the orders.
        is_over: Says whether the time is over.
    """
    for turn in range(rounds):
        for name in random.Random(f"{seed} {turn}").sample(list(names), len(names)):
            if turn and is_over():
                return
            yield name


def endless(iterator: Iterator[Any]) -> Iterator[Any]:
    """One epoch after the other of an iterator that goes on after StopIteration."""
    while True:
        yield from iterator


def time_iterators(
    iterators: Mapping[str, Iterator[Any]], rounds: int, batches: int, wait: Callable[[], object]
) -> Times:
    """Medians over the batches of each round, in microseconds of ``next()``.

    Args:
        iterators: Endless ones, by name.
        rounds: Number of rounds.
        batches: Batches of each iterator in a round.
        wait: Called before each batch, until DALI has it ready: then only the host's work counts.
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
                del taken  # freeing it is part of its cost, whoever does it
                micros.append((time.perf_counter() - begin) * 1e6)
            times[name].append(statistics.median(micros))
    return times


def time_pipelines(
    pipelines: Mapping[str, Any], rounds: int, batches: int, to_host: bool = False
) -> Turns:
    """Microseconds of a batch of each pipeline, for each round; in another order in each.

    Args:
        pipelines: Built pipelines of DALI, by name.
        rounds: Number of rounds.
        batches: Batches of each pipeline in a round.
        to_host: Whether to wait for the last batch of a GPU, by copying it.
    """
    micros: Times = {name: [] for name in pipelines}
    cores: Times = {name: [] for name in pipelines}
    cuda: Any = importlib.import_module("numba.cuda") if GPU else None
    gc.collect()
    gc.freeze()  # or each collection looks through all modules, for a tenth of a second
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


def over(times: Times, base: str) -> Times:
    """What each variant takes over one of them in the same round."""
    return {name: [a - b for a, b in zip(values, times[base])] for name, values in times.items()}


def share(times: Sequence[float], base: Sequence[float]) -> str:
    """Of the times in the same rounds: the median, and the quartiles."""
    ratios = [a / b for a, b in zip(times, base) if b > 0]
    if len(ratios) < 2:
        return ""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
