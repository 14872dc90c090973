"""Runs pipelines: schedules batches ahead, takes outputs in step, and raises errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from nvidia.dali import Pipeline
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from ..stats import span
from .calls import calls
from .dali_pipeline import can_checkpoint, kept_to_the_end, queue_depth
from .function_notes import release

T = TypeVar("T")
TensorList = TensorListCPU | TensorListGPU
Outputs = Sequence[TensorList]
_ALL = 1 << 30


def discard(outputs: Sequence[Outputs]) -> None:
    """Discards a batch."""


class SourceEnded(Exception):
    """The pipelines' own source raised StopIteration: there is no further batch."""


class SourceError(Exception):
    """The pipelines' own source raised ``__cause__``; its batch was not produced."""


class _PipelineQueue:
    """One pipeline and its scheduled runs."""

    def __init__(self, pipeline: Pipeline, gradual: bool):
        self.pipeline = pipeline
        self.depth = queue_depth(pipeline)
        # Not public: without it DALI fills the queue in its first run.
        self._gradual = gradual and hasattr(pipeline, "_first_iter")
        self._scheduled = 0
        self._fresh = True
        self.error: Exception | None = None

    def schedule(self, most: int = _ALL, up_to: int = _ALL) -> None:
        """Schedules runs, without waiting for any of them.

        Args:
            most: The most runs.
            up_to: The most batches scheduled afterwards; never more than the queue holds.
        """
        while self._scheduled < min(up_to, self.depth) and most > 0 and self.error is None:
            if self._fresh and self._gradual:
                self.pipeline._first_iter, self._fresh = False, False
            # DALI's first run after a build or a reset fills the whole queue by itself.
            runs, self._fresh = (self.depth if self._fresh else 1), False
            try:
                self.pipeline.schedule_run()
            except Exception as error:  # the source's own: said when its batch is due
                self.error = error
                return
            # Where the source has ended nothing more is scheduled: empty() tells the truth.
            self._scheduled += runs
            most -= 1

    def empty(self) -> bool:
        """Whether no scheduled batch is left to take."""
        return self.pipeline.empty()

    def require(self) -> None:
        """Raises SourceEnded or SourceError where there is no batch to take."""
        if self.empty():
            if self.error is not None:
                error, self.error = self.error, None
                self._scheduled = 0
                raise SourceError(str(error)) from error
            raise SourceEnded

    def share(self) -> Outputs:
        """The next outputs, which must be there; they belong to the caller until `release`."""
        self._scheduled -= 1
        with span("dalijax.wait"):
            try:
                return self.pipeline.share_outputs()
            except UnicodeDecodeError as error:  # DALI's error names a file that is not UTF-8
                raise RuntimeError(os.fsdecode(error.object)) from None

    def release(self, runs: int) -> None:
        """Gives the outputs back to DALI, and schedules at most so many runs."""
        self.pipeline.release_outputs()
        self.schedule(runs)

    def drain(self) -> None:
        """Drops the batches that are scheduled."""
        while not self.empty():
            with contextlib.suppress(Exception):  # a batch that failed is dropped, too
                self.share()
            self.release(0)

    def restart(self) -> None:
        """Starts the next epoch of a source that has ended."""
        self.pipeline.reset()
        self._scheduled = 0
        self._fresh = True


class Runner:
    """Built pipelines, run in step: batch k of all of them is taken together.

    Args:
        pipelines: Built pipelines, none of whose runs has been scheduled.
        to_drop: Number of batches to drop before the first that is taken.
        owned: Whether `close` may free the pipelines; else the caller does.
        gradual: Whether the first batch is taken before the source is asked for what comes next,
            and the queue is filled in the calls that follow: for sources that may be slow.

    Attributes:
        stopped: Whether a run has failed after which no other runs: DALI's older executor, without
            ``exec_dynamic``, never goes on.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        to_drop: int = 0,
        owned: bool = True,
        gradual: bool = False,
    ):
        self._owned = owned
        self._ahead = 0 if gradual else _ALL  # batches to schedule behind the one that is taken
        self.pipelines = tuple(pipelines)
        self.dynamic = all(pipeline.exec_dynamic for pipeline in pipelines)
        self.to_drop = to_drop
        self.stopped = False
        self._queues = [_PipelineQueue(pipeline, gradual) for pipeline in pipelines]
        self._depth = max((queue.depth for queue in self._queues), default=0)
        # Modules lose their names before the last iterators are freed.
        self._process, self._calls, self._kept = os.getpid(), calls, kept_to_the_end
        self._can_checkpoint = all(can_checkpoint(pipeline) for pipeline in pipelines)

    def schedule(self, most: int = _ALL) -> None:
        """Fills the queues by at most ``most`` runs, without waiting for a result."""
        with self._calls:
            for queue in self._queues:
                queue.schedule(most)

    def ended(self) -> bool:
        """Whether the source has no further batch in this epoch.

        Waits only for batches that are to be dropped.
        """
        with self._calls:
            self.schedule()
            if self.to_drop:
                with contextlib.suppress(SourceEnded, SourceError):
                    self._drop_batches()
                self._schedule_if_empty()
            return any(queue.empty() and queue.error is None for queue in self._queues)

    def restart(self, to_drop: int = 0) -> None:
        """Starts the next epoch of sources that have ended; readers run on by themselves.

        Args:
            to_drop: Number of its batches to drop.
        """
        self.to_drop = to_drop
        with self._calls:
            for queue in self._queues:
                queue.drain()  # it has more than another one, whose source has ended
            for queue in self._queues:
                queue.restart()

    def source_failed(self) -> bool:
        """Whether a pipeline's own source has raised, which is said when its batch is due."""
        return any(queue.error is not None for queue in self._queues)

    def drain(self) -> None:
        """Drops the batches that are scheduled, in all pipelines."""
        with self._calls:
            for queue in self._queues:
                queue.drain()

    def take(self, convert: Callable[[Sequence[Outputs]], T]) -> T:
        """Takes one batch, drops ``to_drop`` batches before it, and schedules what comes next.

        Args:
            convert: Makes the caller's value of the outputs of each pipeline, before their
                buffers are given back to DALI.

        Raises:
            SourceEnded: If the source has no further batch; nothing was taken.
            SourceError: If the source failed; nothing was taken.
            RuntimeError, SystemExit: If Python ends; see `dalijax.core.pipeline.calls.Calls`.
            Exception: What DALI or ``convert`` raised. The batch is then used up, in all
                pipelines, and the next call takes the next one.
        """
        with self._calls:
            for queue in self._queues:
                queue.schedule(up_to=1 + self._ahead)
            dropped = self.to_drop > 0
            self._drop_batches()
            behind = _ALL if self._ahead >= self._depth else 0
            self._ahead += 1
            # One run for each batch taken: what was dropped is made up by the next call, so that
            # no restore runs more than the queue and one batch.
            return self._share(convert, 1 - self._schedule_if_empty() if dropped else behind)

    def run_alone(self) -> None:
        """Runs one batch with none beside it, and discards it; for gradual runners without `take`.

        Raises:
            SourceEnded, SourceError, Exception: As `take`.
        """
        with self._calls:
            self.schedule(1)
            self._share(discard)

    def _drop_batches(self) -> None:
        while self.to_drop:
            self._schedule_if_empty()
            try:
                self._share(discard)
            except (SourceEnded, SourceError):
                raise
            except Exception:
                pass
            self.to_drop -= 1

    def _schedule_if_empty(self) -> int:
        """Schedules one run where nothing is left to take; returns how many it scheduled."""
        if not any(queue.empty() for queue in self._queues):
            return 0
        self.schedule(1)
        return 1

    def _share(self, convert: Callable[[Sequence[Outputs]], T], runs: int = 0) -> T:
        """Takes one batch and schedules at most so many runs of each pipeline after it."""
        for queue in self._queues:  # before any of them gives its batch away
            queue.require()
        outputs: list[Outputs] = []
        failure: Exception | None = None
        shared: list[_PipelineQueue] = []
        early = self.dynamic and len(self._queues) > 1
        try:
            for queue in self._queues:  # all of them, so that they stay in step after a failure
                shared.append(queue)
                try:
                    outputs.append(queue.share())
                except Exception as error:
                    failure = failure or error
                    self.stopped = not self.dynamic
                    continue
                if early:
                    # Its outputs stay valid for as long as they are referred to, so that it goes
                    # on while the others are waited for, and while the batch is placed. (A single
                    # one has further runs scheduled, and would only take the time of this
                    # thread's calls of CUDA.)
                    shared.pop().release(runs)
            if failure is not None:
                raise failure
            with span("dalijax.place"):
                return convert(outputs)
        finally:
            failure = None  # its traceback has this frame: together they would keep the batch
            for queue in shared:
                queue.release(runs)

    def close(self) -> None:
        """Frees the pipelines and their threads now; arrays made of their outputs stay valid."""
        if self._calls.ended:  # a destructor here would wait for threads that need Python
            self._kept.extend(self.pipelines)
        if self._calls.lost(self._process):  # DALI ends them, or the process that built them
            return
        with self._calls:
            for pipeline in self.pipelines if self._owned else ():
                # Not public: without it they are freed when Python collects their cycles.
                getattr(pipeline, "_shutdown", lambda: None)()
                release(pipeline)
            self.pipelines = ()
            self._queues.clear()

    def __del__(self) -> None:
        if hasattr(self, "_can_checkpoint"):
            self.close()

    def checkpoints(self) -> tuple[bytes, ...] | None:
        """DALI's checkpoint of each pipeline at the batch taken last; None if disabled."""
        if not self._can_checkpoint:
            return None
        with self._calls:
            return tuple(queue.pipeline.checkpoint() for queue in self._queues)
