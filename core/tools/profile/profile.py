"""`profile`: a block in which a training loop runs, and what it waited for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from ...iterator.iterator import DALIGenericIterator
from ...pipeline.engine import NoReplica
from .loop import LoopTimes, loop_times
from .replay import Replay, replay
from .verdict import Verdict, verdict


class Report:
    """What `profile` found; ``str()`` of it says it in words, once the block was left.

    Attributes:
        input_bound: Whether the loop waits for its input: ``next()`` takes a tenth of its time, or
            more. None where it took no batch.
        input: The part of the input that it waits for: an operator ("fn.decoders.image"), a source
            ("source Files"), "placing" or "function NAME"; "" where that is not known.
        steps: Number of the steps that count: the first ones, which compile, do not.
        steps_per_second: Of these steps.
        loop_rate: Samples per second of the loop, in this process.
        unblocked_rate: Samples per second that it would take if ``next()`` took no time.
        wait_share: Share of the loop's time that ``next()`` took.
        waits: The same by what it was for: "pipelines", "placing", "function NAME" (of the placed
            batch).
        pipeline_rate: Samples per second of the graph alone; None where it could not be replayed.
        stages: Share of the graph's time by its operators, in order; empty where it could not be
            replayed.
        unknown: Why it could not be; "" where it was.
    """

    def __init__(self) -> None:
        self._set(LoopTimes(0, 0.0, 0.0, {}), None, "the block has not ended", None)

    def _set(
        self, loop: LoopTimes, alone: Replay | None, unknown: str, said: Verdict | None
    ) -> None:
        self.input_bound = said.input_bound if said else None
        self.input = said.input if said else ""
        self.steps = loop.steps
        self.steps_per_second = loop.steps / loop.seconds if loop.seconds else 0.0
        self.loop_rate = loop.rate
        self.unblocked_rate = loop.unblocked_rate
        self.wait_share = loop.wait_share
        self.waits = {k: seconds / loop.seconds for k, seconds in loop.waits.items() if seconds}
        self.pipeline_rate = loop.samples / alone.seconds if alone else None
        self.stages = alone.shares if alone else {}
        self.unknown = unknown
        self._text = said.text if said else f"no verdict: {unknown}"

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Report: {self._text}>"


@contextlib.contextmanager
def profile(iterator: Any, *, seconds: float = 4.0) -> Iterator[Report]:
    """Says whether a training loop waits for its input, and for which part of it.

        with profile(iterator) as report:
            for batch in itertools.islice(iterator, 100):
                step(batch)
        print(report)    # input-bound: ...; input: fn.decoders.image takes 71 % of ...

    Once the block was left, pipelines of the same graph run without the loop, whole and cut behind
    their operators, which says how fast the graph is and which part takes how long. They are
    pipelines of their own: the iterator stays where it is. Let the block have twenty steps or more;
    a loop that never waits for its results measures how fast it starts them.

    Args:
        iterator: An iterator of `dalijax.data_iterator` or `DALIGenericIterator`, or that of a
            ``DALIDatasetIterator`` of CLU, a ``DALIDataset`` or a ``DALIIterDataset``. Of any other
            that has ``watch()``, as a ``DALITransform``'s, the loop's times are known, and not
            which part of the graph takes how long.
        seconds: About as long the graph runs alone; building its pipelines comes on top. 0: it
            does not run.

    Yields:
        A `Report`, which has all numbers once the block was left.

    Raises:
        TypeError: If it is no such iterator.
        RuntimeError: If it is profiled already.
    """
    if not hasattr(iterator, "watch"):
        raise TypeError(
            f"{iterator!r:.80} does not count its batches: pass the iterator of "
            "dalijax.data_iterator, or of an adapter, that the loop takes its batches of, not the "
            "dataset, and nothing that goes around it"
        )
    report = Report()
    core = _core(iterator)
    unwatched = core is not None and core._stats is None
    stats = iterator.watch()
    before = stats.copy()
    try:
        with stats.logging() as calls:
            yield report
            end = time.perf_counter()
    finally:
        core = _core(iterator)  # another one, where a stream began again
        if core is not None and unwatched:
            core._stats = None
    counted = stats.since(before)
    samples = (counted.examples + counted.padding) / max(1, counted.batches)
    loop = loop_times(list(calls), end, samples)
    alone: Replay | None = None
    unknown = ""
    if core is None:
        unknown = "its records come from outside of the graph (a trace of jax.profiler shows both)"
    elif not seconds:
        unknown = "seconds=0 was passed"
    elif loop.steps:
        try:
            alone = replay(core, seconds)
        except NoReplica as error:
            unknown = str(error)
    cores = len(os.sched_getaffinity(0))
    report._set(loop, alone, unknown, verdict(loop, alone, unknown, cores))


def _core(iterator: Any) -> DALIGenericIterator | None:
    """The core's iterator of an adapter's, where it has one."""
    if not isinstance(iterator, DALIGenericIterator):
        iterator = getattr(iterator, "_core", None)
    return iterator if isinstance(iterator, DALIGenericIterator) else None
