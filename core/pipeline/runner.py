"""Runs several pipelines in step: schedules runs ahead, and takes a batch from each pipeline."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.profiler import TraceAnnotation
from nvidia.dali import Pipeline
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from ..stats import UNTRACED, logged, span
from .calls import calls
from .dali_pipeline import can_checkpoint, free, kept_to_the_end, queue_depth

T = TypeVar("T")
TensorList = TensorListCPU | TensorListGPU
Outputs = Sequence[TensorList]
_ALL = 1 << 30


def discard(outputs: Sequence[Outputs]) -> None:
    """Discards the outputs of a run; an argument of `Runner.take`."""


def _span(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that marks a part of a batch's work, if a trace or log is recorded."""
    return span(name) if logged.call is not None or TraceAnnotation.is_enabled() else UNTRACED


class SourceEnded(Exception):
    """Raised if an ``external_source`` raised StopIteration: there is no further batch."""


class SourceError(Exception):
    """Raised if an ``external_source`` raised another exception, so that a batch is missing.

    The attribute ``__cause__`` is the exception of the user's function.
    """

    def original(self) -> BaseException:
        """Returns the exception of the user's function, and removes it from this error.

        If the caller raises the exception while handling this error, Python makes the exception
        refer to this error. The reference cycle would keep the caller's variables until Python's
        garbage collection.
        """
        cause, self.__cause__ = self.__cause__, None
        return cause or self


class _PipelineQueue:
    """Schedules the runs of a pipeline, and takes their outputs."""

    def __init__(self, pipeline: Pipeline, gradual: bool):
        self.pipeline = pipeline
        self.depth = queue_depth(pipeline)
        # Private in DALI: without it, DALI fills the queue at its first run.
        self._gradual = gradual and hasattr(pipeline, "_first_iter")
        self._scheduled = 0
        self._fresh = True
        self.error: Exception | None = None

    def schedule(self, most: int = _ALL, up_to: int = _ALL) -> None:
        """Schedules runs without waiting for them.

        Args:
            most: The most runs to schedule.
            up_to: The most runs in the queue afterwards; the queue's depth is a limit, too.
        """
        while self._scheduled < min(up_to, self.depth) and most > 0 and self.error is None:
            if self._fresh and self._gradual:
                self.pipeline._first_iter, self._fresh = False, False
            # DALI's first run after a build or reset fills the whole queue.
            runs, self._fresh = (self.depth if self._fresh else 1), False
            try:
                self.pipeline.schedule_run()
            except Exception as error:  # of the source; raised for its batch
                self.error = error
                return
            # If the source has ended, nothing more is scheduled, which empty() shows.
            self._scheduled += runs
            most -= 1

    def empty(self) -> bool:
        """Returns whether there is no scheduled batch to take."""
        return self.pipeline.empty()

    def require(self) -> None:
        """Raises SourceEnded or SourceError if there is no batch to take."""
        if self.empty():
            if self.error is not None:
                error, self.error = self.error, None
                self._scheduled = 0
                try:
                    raise SourceError(str(error)) from error
                finally:
                    del error  # the traceback refers to this frame
            raise SourceEnded

    def share(self) -> Outputs:
        """Returns the outputs of the next run, which must be scheduled.

        DALI does not reuse their buffers before `release` is called. With the dynamic executor, it
        does not reuse them while the outputs are referenced.
        """
        self._scheduled -= 1
        with _span("dalijax.wait"):
            try:
                return self.pipeline.share_outputs()
            except UnicodeDecodeError as error:  # DALI's error names a file that is not UTF-8
                raise RuntimeError(os.fsdecode(error.object)) from None
            except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                raise RuntimeError(str(error)) from error  # of an operator; most are RuntimeErrors

    def release(self, runs: int) -> None:
        """Gives the buffers of the last outputs back to DALI; schedules at most ``runs`` runs."""
        self.pipeline.release_outputs()
        self.schedule(runs)

    def drain(self) -> None:
        """Drops the scheduled batches."""
        while not self.empty():
            with contextlib.suppress(Exception):  # failed batches are dropped, too
                self.share()
            self.release(0)

    def restart(self) -> None:
        """Starts the next epoch of an ``external_source`` that has ended."""
        self.pipeline.reset()
        self._scheduled = 0
        self._fresh = True


class Runner:
    """Runs built pipelines together: each call of `take` takes one batch from every pipeline.

    Args:
        pipelines: Built pipelines without scheduled runs.
        to_drop: Number of batches to drop before the first batch that is taken.
        owned: Whether `close` may free the pipelines; otherwise the caller does.
        gradual: Whether to take the first batch before DALI requests further records, and to fill
            the queue during later calls; for records that are slow to read.

    Attributes:
        dynamic: Whether all pipelines have ``exec_dynamic``.
        stopped: Whether a run has failed after which no other can run: DALI's older executor,
            without ``exec_dynamic``, never continues.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        to_drop: int = 0,
        owned: bool = True,
        gradual: bool = False,
    ):
        self._owned = owned
        self._first_ahead = 0 if gradual else _ALL
        self._ahead = self._first_ahead  # batches to schedule after the taken batch
        self.pipelines: tuple[Pipeline, ...] = tuple(pipelines)
        self.dynamic = all(pipeline.exec_dynamic for pipeline in pipelines)
        self.to_drop = to_drop
        self.stopped = False
        self._queues = [_PipelineQueue(pipeline, gradual) for pipeline in pipelines]
        self._depth = max((queue.depth for queue in self._queues), default=0)
        # References, because at exit module globals may be gone before the last iterators.
        self._process, self._calls, self._kept_to_the_end = os.getpid(), calls, kept_to_the_end
        self._can_checkpoint = all(can_checkpoint(pipeline) for pipeline in pipelines)

    def schedule(self, most: int = _ALL) -> None:
        """Schedules at most ``most`` runs of each pipeline, without waiting for the batches."""
        with self._calls:
            for queue in self._queues:
                queue.schedule(most)

    def ended(self) -> bool:
        """Returns whether an ``external_source`` has no further batch in this epoch.

        Waits for no batch, except for batches that are to be dropped.
        """
        with self._calls:
            self.schedule()
            if self.to_drop:
                with contextlib.suppress(SourceEnded, SourceError):
                    self._drop_batches()
                self._schedule_if_empty()
            return any(queue.empty() and queue.error is None for queue in self._queues)

    def restart(self, to_drop: int = 0) -> None:
        """Starts the next epoch of an ended ``external_source``; readers continue by themselves.

        Args:
            to_drop: Number of batches to drop at the start of the epoch.
        """
        self.to_drop = to_drop
        with self._calls:
            for queue in self._queues:
                queue.drain()  # may have batches left, if the source of another pipeline ended
            for queue in self._queues:
                queue.restart()

    def source_failed(self) -> bool:
        """Returns whether an ``external_source`` raised an exception, which `take` will raise."""
        return any(queue.error is not None for queue in self._queues)

    def drain(self) -> None:
        """Drops the scheduled batches of all pipelines."""
        self._ahead = self._first_ahead
        with self._calls:
            for queue in self._queues:
                queue.drain()

    def take(self, convert: Callable[[Sequence[Outputs]], T]) -> T:
        """Returns one converted batch, after dropping ``to_drop`` batches; schedules further runs.

        Args:
            convert: A function of the outputs of all pipelines, whose result is returned. DALI does
                not reuse their buffers before it returns.

        Raises:
            SourceEnded: If an ``external_source`` has no further batch; no batch was taken.
            SourceError: If an ``external_source`` raised; no batch was taken.
            RuntimeError, SystemExit: If Python exits; see `dalijax.core.pipeline.calls.Calls`.
            Exception: Any error of DALI or ``convert``. All pipelines have moved past the batch,
                and the following call takes the next batch.
        """
        with self._calls:
            for queue in self._queues:
                queue.schedule(up_to=1 + self._ahead)
            dropped = self.to_drop > 0
            self._drop_batches()
            runs = _ALL if self._ahead >= self._depth else 0
            self._ahead += 1
            # One run for each taken batch. Dropped batches are replaced by the next call, so that
            # a restore runs no more than the queue and one batch.
            return self._share(convert, 1 - self._schedule_if_empty() if dropped else runs)

    def run_alone(self) -> None:
        """Runs a single batch and discards its outputs; for gradual runners, instead of `take`.

        Raises:
            SourceEnded, SourceError, Exception: As in `take`.
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
        """Schedules a run of each pipeline if a queue is empty; returns 1, otherwise 0."""
        if not any(queue.empty() for queue in self._queues):
            return 0
        self.schedule(1)
        return 1

    def _share(self, convert: Callable[[Sequence[Outputs]], T], runs: int = 0) -> T:
        """Returns one converted batch, and schedules at most ``runs`` runs of each pipeline."""
        for queue in self._queues:  # checked before any of them returns its batch
            queue.require()
        outputs: list[Outputs] = []
        failure: Exception | None = None
        shared: list[_PipelineQueue] = []
        try:
            for queue in self._queues:  # all of them, so that they stay in step after a failure
                shared.append(queue)
                try:
                    outputs.append(queue.share())
                except Exception as error:
                    failure = failure or error
                    self.stopped = not self.dynamic
                    continue
                if self.dynamic:
                    # With the dynamic executor, outputs stay valid while they are referenced. The
                    # pipeline continues while the others are awaited and the batch is placed.
                    shared.pop().release(runs)
            if failure is not None:
                raise failure
            with _span("dalijax.place"):
                return convert(outputs)
        finally:
            failure = None  # its traceback refers to this frame: the cycle would keep the batch
            for queue in shared:
                queue.release(runs)

    def close(self) -> None:
        """Frees the pipelines and their threads; arrays of their outputs stay valid."""
        if self._calls.ended:  # a destructor would wait for threads that need the GIL
            self._kept_to_the_end.extend(self.pipelines)
        if self._calls.lost(self._process):  # DALI or the process that built them frees them
            return
        with self._calls:
            for pipeline in self.pipelines if self._owned else ():
                free(pipeline)
            self.pipelines = ()
            self._queues.clear()

    def __del__(self) -> None:
        if hasattr(self, "_can_checkpoint"):
            self.close()

    def checkpoints(self) -> tuple[bytes, ...] | None:
        """Returns DALI's checkpoint of each pipeline after the last batch; None if disabled."""
        if not self._can_checkpoint:
            return None
        with self._calls:
            return tuple(queue.pipeline.checkpoint() for queue in self._queues)
