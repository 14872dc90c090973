"""`profile`: measures whether a training loop waits for its input, and for which part of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from ...iterator.iterator import BatchIterator
from ...messages.printable import printable_repr
from ...pipeline.engine import NoReplica
from .loop import LoopTimes, loop_times
from .replay import Replay, replay
from .verdict import Verdict, verdict


class Report:
    """The result of `profile`, after the end of its block; ``str()`` describes it in words.

    Attributes:
        input_bound: Whether the loop waits for its input: ``next()`` takes at least a tenth of the
            loop's time. None if the loop took no batch.
        input: The part of the input that the loop waits for: an operator ("fn.decoders.image"), a
            source ("source Files"), "placing" or "function NAME"; "" if the part is unknown, or the
            loop does not wait.
        steps: Number of measured steps, without the first steps, which compile.
        steps_per_second: Measured steps per second.
        loop_rate: Samples per second of the loop, in this process.
        unblocked_rate: Samples per second of the loop if ``next()`` took no time.
        wait_share: Share of the loop's time spent in ``next()``.
        waits: `wait_share` by purpose: "pipelines", "placing", "function NAME" (of ``batch_map``).
        pipeline_rate: Samples per second of the graph alone; None if the graph was not replayed,
            i.e. run without the loop.
        stages: Share of the graph's time by operator, in the order of the graph; empty if the graph
            was not replayed.
        unknown: The reason why the graph was not replayed; "" if it was replayed.
    """

    def __init__(self) -> None:
        self._set(LoopTimes(0, 0.0, 0.0, {}), None, "the block has not ended", None)

    def _set(
        self, loop: LoopTimes, alone: Replay | None, unknown: str, outcome: Verdict | None
    ) -> None:
        """Sets all attributes from the measurements."""
        self.input_bound = outcome.input_bound if outcome else None
        self.input = outcome.input if outcome else ""
        self.steps = loop.steps
        self.steps_per_second = loop.steps / loop.seconds if loop.seconds else 0.0
        self.loop_rate = loop.rate
        self.unblocked_rate = loop.unblocked_rate
        self.wait_share = loop.wait_share
        self.waits = {k: seconds / loop.seconds for k, seconds in loop.waits.items() if seconds}
        self.pipeline_rate = loop.samples / alone.seconds if alone else None
        self.stages = alone.shares if alone else {}
        self.unknown = unknown
        self._text = outcome.text if outcome else f"no verdict: {unknown}"

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Report: {self._text}>"


@contextlib.contextmanager
def profile(iterator: Any, *, seconds: float = 4.0) -> Iterator[Report]:
    """Measures whether a training loop waits for its input, and for which part of it.

        with profile(iterator) as report:
            for batch in itertools.islice(iterator, 100):
                step(batch)
        print(report)    # input-bound: ...; input: fn.decoders.image takes 71 % of ...

    After the block, separate pipelines of the same graph run without the loop. They show the speed
    of the graph and, truncated after some of its operators, the speed of its parts. The iterator
    does not move. The block should have at least twenty steps. If a loop never waits for its
    results, only the dispatch of its steps is measured.

    Args:
        iterator: An iterator of `dalijax.data_iterator` or `DALIGenericIterator`, or of a CLU
            ``DALIDatasetIterator``, a ``DALIDataset`` or a ``DALIIterDataset``. For other iterators
            with ``watch()``, such as a ``DALITransform``'s, only the times of the loop are known.
        seconds: Approximate time of running the graph alone, in addition to building its pipelines.
            0: it does not run.

    Yields:
        A `Report`, which is complete after the block.

    Raises:
        TypeError: If ``iterator`` has no ``watch()``.
        RuntimeError: If ``iterator`` is already being profiled.
    """
    if not hasattr(iterator, "watch"):
        raise TypeError(
            f"{printable_repr(iterator)} does not count its batches. Pass the iterator of "
            "dalijax.data_iterator or of an adapter that the loop calls next() on, instead of the "
            "dataset or a wrapper"
        )
    report = Report()
    core = _core(iterator)
    unwatched = core is not None and core._stats is None
    stats = iterator.watch()
    before = stats.copy()
    try:
        with stats._logging() as calls:
            yield report
            end = time.perf_counter()
    finally:
        if core is not None and unwatched:
            core._stats = None
    counted = stats.since(before)
    samples = (counted.examples + counted.padding) / max(1, counted.batches)
    loop = loop_times(list(calls), end, samples)
    alone: Replay | None = None
    unknown = ""
    if core is None:
        unknown = "its records come from outside the graph (a trace of jax.profiler shows both)"
    elif not seconds:
        unknown = "seconds=0 was passed"
    elif loop.steps:
        try:
            alone = replay(core, seconds)
        except NoReplica as error:
            unknown = str(error)
    cores = len(os.sched_getaffinity(0))
    report._set(loop, alone, unknown, verdict(loop, alone, unknown, cores))


def _core(iterator: Any) -> BatchIterator | None:
    """Returns the core iterator of an adapter's iterator, if it has one."""
    if not isinstance(iterator, BatchIterator):
        iterator = getattr(iterator, "_core", None)
    return iterator if isinstance(iterator, BatchIterator) else None
