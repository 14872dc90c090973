"""`Engine` and `EpochEngine`: base classes that run pipelines and hold a consumer's position."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
from jax.profiler import TraceAnnotation
from nvidia.dali import Pipeline

from ..arrays.placement import DataShard, GlobalPlacement
from ..config import IteratorConfig
from ..errors import BatchError, GraphError, ProcessError, RecordError
from ..messages.redacted_errors import raise_redacted, redacted_error
from ..order.epochs import EpochPlan
from ..state import random_state
from ..state.agreement import Values
from ..state.position import FailedBatch, FailedBatches
from ..stats import UNTRACED, InputStats
from ..threads.workers import WorkersEnded
from .batch import Batch, BatchMaker, choose_placement
from .calls import calls
from .failure import RETRY_DELAYS, EnvironmentFailure, strip_tracebacks
from .failure_errors import (
    MOST_UNEXPLAINED,
    can_skip,
    every_batch_failed,
    graph_error,
    too_many_skipped,
)
from .output_notes import check_outputs, notes_of
from .processes import Agreement, agreement_of
from .runner import Runner
from .traced import check_not_traced, trace_state_clean

_log = logging.getLogger("dalijax")
P = TypeVar("P")
C = TypeVar("C", bound="Cursor[Any]")  # typing.Self requires Python 3.11
# Description of the argument of skip(), for errors.
COUNT = "a whole number of batches, 0 or more (reset() and set_state() go back)"
_UNCOUNTED = contextlib.nullcontext()
CLOSED = "the iterator is closed. Create a new iterator"
# Seconds that close() waits for a call in another thread.
_PATIENCE = 5.0
_MOST_MASKED = 1000  # the number of batches whose masked records are remembered, to log them once


class NoReplica(Exception):
    """Raised if the graph can't be replicated for profiling; the message tells why."""


@dataclasses.dataclass(frozen=True)
class Cursor(Generic[P]):
    """The position of an engine, and everything else that an interrupted call must not change.

    Cursors never change: a method replaces the cursor of its engine. To roll back an interrupted
    call, the engine restores the cursor from the start of the call.

    Attributes:
        position: The position of the next batch to deliver.
        must_agree: Whether the processes compare their iterators before the next batch.
        num_compared: Number of batches delivered since several processes were compared.
    """

    position: P
    must_agree: bool = False
    num_compared: int = 0

    def at(self: C, position: Any) -> C:
        """Returns the cursor at another position; six times as fast as `dataclasses.replace`."""
        cursor = object.__new__(self.__class__)
        values = cursor.__dict__
        values.update(self.__dict__)
        values["position"] = position
        return cursor


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[P]):
    """The result of running the batch at a position, and the position after the batch.

    Attributes:
        after: The position after the batch; if the epoch has ended, the end of the epoch.
        batch: The batch; None if there is an error, or the epoch has ended.
        error: An error that counts as a batch. Its traceback is replaced by notes.
        ended: Whether the epoch has no further batch.
        mapped: The result of ``batch_map``; None until it is computed.
        masked: Describes the masked records of the batch, if any.
        failures: Number of batches that failed or have masked records: this batch, and the batches
            that were skipped before it.
    """

    after: P
    batch: Batch | None = None
    error: Exception | None = None
    ended: bool = False
    mapped: Batch | None = None
    masked: FailedBatch | None = None
    failures: int = 0

    def __post_init__(self) -> None:
        if self.error is not None:
            error = redacted_error(self.error)
            strip_tracebacks(error)
            object.__setattr__(self, "error", error)  # the class is frozen

    def unwrap(self) -> Batch:
        """Returns the batch, or the result of ``batch_map`` for it.

        Raises:
            StopIteration: If the epoch has no further batch.
            Exception: The error that counts as a batch.
        """
        if self.error is not None:
            error = self.error.with_traceback(None)  # without the lines of an earlier call
            try:
                raise error
            finally:
                del self, error  # the traceback refers to this frame
        if self.ended or self.batch is None:
            raise StopIteration
        return self.batch if self.mapped is None else self.mapped


def log_failure(verb: str, failed: FailedBatch) -> FailedBatch:
    """Logs a failed batch as a warning, and returns ``failed``.

    Args:
        verb: "skipped", or "masked" if only the batch's bad records were masked.
        failed: The description of the batch.
    """
    _log.warning("%s: %s", verb, failed.message)
    return failed


class Engine(abc.ABC, Generic[P]):
    """Base class of engines: runs the pipelines of one iterator, and holds its position.

    The position refers to the next batch to deliver. A peeked batch is stored separately, together
    with the position after the batch, so that peeking does not move the engine. Callers must hold
    `lock`.

    Args:
        cursor: The cursor at the first batch.
        config: Arguments of the iterator.

    Raises:
        ValueError: If ``on_error`` is "skip" and several processes or hosts share the batches.

    Attributes:
        cursor: The position, and everything else that an interrupted call must not change.
        make_batch: Creates batches from the pipelines' outputs.
        errors: The batches that were skipped by ``on_error="skip"``, or have masked records.
        closed: Whether `close` was called.
        process: Identifier of the process that built the pipelines; 0 before the first build.
    """

    # The number of skipped batches in a row after which the engine raises an error.
    _most_skipped: float = float("inf")

    _num_shapes = 1  # that samples of an output are expected to have

    def __init__(self, cursor: Cursor[P], config: IteratorConfig):
        config.check_skip()
        self.cursor = cursor
        self._beginning = cursor.position
        # The shard of each pipeline, if a sharding places the batches; otherwise empty.
        self._data_shards = self._configure(config)
        self._given_names = tuple(config.output_map)  # the only names before the first build
        self._batch_map_names = () if config.batch_map is None else config.batch_map.names
        self.errors = FailedBatches()
        self.closed = False
        self.process = 0
        self._works = False  # whether a batch succeeded, so that the graph can't be at fault
        self._unexplained = 0  # number of batches that failed because of an operator
        self._outcome: Outcome[P] | None = None
        self._runner: Runner | None = None
        # The names of masked records by epoch and step, for the last batches with any.
        self._masked: dict[tuple[int, int], set[str]] = {}
        self._interrupted: Cursor[P] | None = None  # at the start of an interrupted call
        # Serializes calls of several threads. Reentrant, because methods call each other.
        self._lock = threading.RLock()
        self._agreement: Agreement | None = None
        self._end_cure = ""  # if the number of batches is unknown: the fix if processes differ
        self._end: tuple[int, int] | None = None  # epoch and step of an end that was agreed on
        self._calls = calls  # a reference, because at exit module globals may be gone
        self._one_call = _Interruptible(self)

    @property
    def lock(self) -> threading.RLock:
        """The lock that callers hold during each call.

        Raises:
            RuntimeError: In a child that was forked from the process with the pipelines.
        """
        if self.process not in (0, os.getpid()):  # a thread of the parent may have held the lock
            raise RuntimeError(
                f"the iterator's pipelines belong to process {self.process}, from which process "
                f"{os.getpid()} was forked without their threads. Create the iterator in the child "
                "(for a GPU, in a process that was not forked), start workers by 'spawn' or "
                "'forkserver', or let Grain start them: ds.mp_prefetch(...)"
            )
        return self._lock

    @property
    def position(self) -> P:
        """The position of the next batch to deliver."""
        return self.cursor.position

    def change(self, **changes: Any) -> None:
        """Replaces the cursor by a copy with changed attributes."""
        self.cursor = dataclasses.replace(self.cursor, **changes)

    def _configure(self, config: IteratorConfig) -> tuple[DataShard, ...]:
        """Sets the placement of batches by a configuration; returns its shards, if it has any."""
        placement = choose_placement(config)
        self._placement = placement if isinstance(placement, GlobalPlacement) else None
        self.make_batch = BatchMaker(config, placement, self._num_shapes)
        self._config = config
        return placement.shards

    def learn_outputs(self, pipeline: Pipeline, name: str) -> None:
        """Sets the names of the outputs, and which are bfloat16, from a built pipeline.

        Args:
            pipeline: The pipeline.
            name: Name of its graph function, for errors.

        Raises:
            ValueError: If the outputs do not agree with the iterator's arguments.
        """
        names = check_outputs(pipeline, self._config.output_map, name)
        if not self._config.output_map:  # the function returned a dict
            self._configure(dataclasses.replace(self._config, output_map=names))
        self.make_batch.names, self.make_batch.bfloat16 = names, notes_of(pipeline).bfloat16
        if self._placement is not None:
            mask = () if self._config.mask is None else (self._config.mask,)
            self._placement.check_names([*names, *self._passed_names, *mask])

    @property
    def _passed_names(self) -> Sequence[str]:
        """The names of values of records that bypass the graph; empty with DALI's readers."""
        return ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs; empty until they are known."""
        return tuple(self._config.output_map)

    def peek(self) -> Outcome[P]:
        """Returns the next outcome: a batch, an error that counts as a batch, or the epoch's end.

        The position does not change.

        Raises:
            Exception: Any error of the pipelines' own Python source (an ``external_source`` of the
                graph); its batch stays the next batch.
        """
        if self._outcome is None:
            try:
                self._outcome = self._next_outcome()
            except Exception as error:  # it may be of a user's source
                raise_redacted(error)
                raise
        return self._outcome

    def peek_mapped(self) -> Outcome[P]:
        """Returns the outcome of `peek`, after applying ``batch_map`` to its batch.

        Raises:
            BatchMapError: If a function of ``batch_map`` failed; the batch stays the next batch.
            Exception: As for `peek`.
        """
        outcome, batch_map = self.peek(), self._config.batch_map
        if batch_map is None or outcome.batch is None or outcome.mapped is not None:
            return outcome
        mapped = batch_map(
            outcome.batch,
            self._seed_of_keys(),
            *self._number(outcome),
            mask=self._config.mask,
            placement=self._placement,
            as_numpy=bool(self._config.as_numpy),
        )
        self._outcome = outcome = dataclasses.replace(outcome, mapped=mapped)
        return outcome

    @abc.abstractmethod
    def _number(self, outcome: Outcome[P]) -> tuple[int, int]:
        """Returns epoch and step of the batch of an outcome."""

    @abc.abstractmethod
    def _seed_of_keys(self) -> int:
        """Returns the seed of the random keys of ``batch_map``, equal in all processes."""

    def advance(self) -> None:
        """Moves the position past the batch that `peek` returns."""
        self.cursor = self._cursor_after(self._outcome or self.peek())
        self._outcome = None

    def _cursor_after(self, outcome: Outcome[P]) -> Cursor[P]:
        """Returns the cursor after the batch of an outcome."""
        return self.cursor.at(outcome.after)

    def deliver(
        self, stats: InputStats | None, at_end: Callable[[], object] | None = None
    ) -> Outcome[P]:
        """Returns the outcome of the next batch, counts the batch, and moves past it.

        Args:
            stats: The counters of delivered batches, if any.
            at_end: Called at the end of an epoch, before the outcome is returned. A caller that did
                this itself would store the outcome in a variable, and the traceback of an error of
                `Outcome.unwrap` would keep the batch.

        Raises:
            ProcessError: If the iterators of several processes differ; no position changes.
            RuntimeError: If JAX traces the caller.
        """
        if not trace_state_clean():
            check_not_traced()
        if self._agreement is not None:
            if self.cursor.must_agree:
                self._agree_or_tell(self._agreement)
            if not self.cursor.must_agree and not self.peek().ended:
                self._agreement.check_moves(self.cursor.num_compared)
        with _UNCOUNTED if stats is None else stats._waiting():
            annotation: Any = UNTRACED
            if TraceAnnotation.is_enabled():
                annotation = TraceAnnotation("dalijax.next", epoch=self.epoch, step=self.step)
            with annotation:
                outcome = self.peek() if self._config.batch_map is None else self.peek_mapped()
            if outcome.ended and self._agreement is not None:
                self._agree_on_end(self._agreement)
            if stats is not None and not outcome.ended:
                self.count(stats, outcome)
            self.advance()
            if self._agreement is not None and not outcome.ended:
                self.change(num_compared=self.cursor.num_compared + 1)
            if outcome.ended and at_end is not None:
                at_end()
            return outcome

    # Several processes

    def compare_processes(self, name: str, outline: Values) -> None:
        """Requests that the processes of a global batch compare iterators before the first batch.

        The comparison takes place in `deliver`, which every process calls for each global batch. A
        single process may peek or request element_spec without waiting for the others.

        Args:
            name: Name of the iterator, for errors.
            outline: Values to compare that are known without reading and without pipelines.
        """
        if self._config.sharding is not None or self._config.hosts[1] > 1:
            self._agreement = agreement_of(self._config, name, outline)
        self.moved()

    def moved(self) -> None:
        """Requests a new comparison of the processes' positions before the next batch."""
        if self._agreement is not None:
            self.change(must_agree=True)
            position = f"epoch {self.epoch}, step {self.step}"
            self._agreement.tell_move(self.cursor.num_compared, position)

    def continue_from(self, other: Engine[P]) -> None:
        """Takes the place of another engine of the same function; the processes then compare again.

        Calls that wait for the lock of the other engine can then use this engine.
        """
        self._lock = other._lock
        if self._agreement is not None and other._agreement is not None:
            self._agreement.continue_round(other._agreement)
            self.change(num_compared=other.cursor.num_compared)
            self.moved()

    def _agree_or_tell(self, agreement: Agreement) -> None:
        """Compares the processes; notifies the others if this process can't take part."""
        try:
            self._agree(agreement)
        except ProcessError:
            raise
        except BaseException as error:
            agreement.tell(error)
            raise

    def _agree(self, agreement: Agreement) -> None:
        """Compares this process's iterator with the iterators of the other processes."""
        agreement.agree(self._shared_values())
        agreement.begin_round()
        self.change(must_agree=False, num_compared=0)

    def _agree_on_end(self, agreement: Agreement) -> None:
        """Checks that all processes end after the same batch, if the end is unknown in advance.

        A process with further batches would wait forever for this process in its training step.
        """
        end = self.epoch, self.step
        if self._end_cure and self._end != end:
            values = {"batches": f"{self.step} in epoch {self.epoch}"}
            agreement.agree(values, f"the end after {self.step} batches", cure=self._end_cure)
            self._end = end

    def _shared_values(self) -> Values:
        """Returns the values, by name, that must be equal in all processes; may build pipelines."""
        return {}

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that rolls back the position if the call is interrupted.

        The position is rolled back at the next call, because a second Ctrl-C may interrupt any
        handler. The contexts can't be nested.
        """
        return self._one_call

    def go_back(self, cursor: Cursor[P]) -> bool:
        """Moves back to an earlier cursor, possibly of an engine that this engine has replaced.

        Returns:
            False if the pipelines can't be rebuilt there, so that the position did not change.
        """
        self.roll_back()
        if self.cursor == cursor:
            return True
        possible = self._can_build_at(cursor.position)
        if possible:
            self._interrupted = cursor
            self.roll_back()
        return possible

    def roll_back(self) -> None:
        """Moves back to the position before an interrupted call, if a call was interrupted."""
        before = self._interrupted
        if before is None:
            return
        if self._can_build_at(before.position):
            self._return_to(before)
        if self._agreement is not None and not self.cursor.must_agree:
            self._agreement.retract_move()
        self._interrupted = None  # last, so that an interrupted roll-back is repeated

    def _return_to(self, cursor: Cursor[P]) -> None:
        self.drop()
        self.cursor = cursor

    def snapshot(self) -> P:
        """Returns the position, or during a call, the position before the call; needs no lock."""
        return (self._interrupted or self.cursor).position

    def close(self) -> None:
        """Frees the pipelines permanently. May be called again, and without the lock.

        A call in another thread may be waiting for a disk or a network. If the call does not end
        within five seconds, it frees the pipelines once it ends.
        """
        self.closed = True
        if self._calls.lost(self.process):  # the lock may never be released
            return
        self._stop_waiting()
        if self._lock.acquire(timeout=_PATIENCE):
            try:
                self.drop()
            finally:
                self._lock.release()

    def _stop_waiting(self) -> None:
        """Makes a call that waits for records raise an error, if possible."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Number of batches of the epoch before the position, including failed batches."""

    # Pipelines

    @abc.abstractmethod
    def _runner_at(self, position: P) -> Runner:
        """Returns a runner of pipelines that next produce the batch at a position.

        Builds the pipelines if necessary. If pipelines of a reader are built already, ``position``
        must be the position that they have reached, because they can't move.

        Raises:
            ValueError: If the engine is closed.
        """

    def prepare(self) -> Runner:
        """Returns the runner of the pipelines at the position; builds them if necessary."""
        return self._runner_at(self.position)

    def draws_numbers(self) -> bool:
        """Returns whether the graph draws random numbers; False before pipelines are built."""
        if (runner := self._runner) is None:
            return False
        pipeline = runner.pipelines[0]
        stateful = random_state.stateful(*(runner.checkpoints() or ())[:1])
        return bool(set(stateful) - set(pipeline.reader_meta()))

    def schedule(self) -> None:
        """Builds the pipelines and schedules runs, without waiting for the batches."""
        self.prepare().schedule()

    def drop(self) -> None:
        """Frees the pipelines and a peeked batch; the next use builds pipelines at the position."""
        self._outcome = None
        self._stop()

    def _stop(self) -> None:
        """Frees the pipelines; the next use builds pipelines that read the same data again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _can_build_at(self, position: P) -> bool:
        """Returns whether new pipelines can be built at a position."""
        return True

    # Batches

    @abc.abstractmethod
    def _is_end(self, position: P) -> bool:
        """Returns whether a position is at the end of its epoch, as far as the end is known."""

    @abc.abstractmethod
    def _run_at(self, position: P) -> Outcome[P] | None:
        """Runs the batch at a position once, and returns the outcome.

        Returns:
            The outcome; None if the caller has to run the batch again, because the pipelines or the
            records were replaced.

        Raises:
            EnvironmentFailure: If a retry may succeed. The pipelines can be rebuilt.
            Exception: An error after which the batch stays the next batch.
        """

    @abc.abstractmethod
    def _epoch_and_step(self, position: P) -> tuple[int, int]:
        """Returns the epoch and the step of the batch at a position."""

    @abc.abstractmethod
    def _exhausted_retries(self, position: P, failed: EnvironmentFailure) -> RuntimeError:
        """Returns the error of a batch for which all retries failed."""

    def _label(self, position: P) -> str:
        """Returns how errors name the batch at a position: "batch 3 of epoch 0"."""
        epoch, step = self._epoch_and_step(position)
        return f"batch {step} of epoch {epoch}"

    def _first_position(self) -> P:
        """Returns the position at which `_next_outcome` begins."""
        return self.position

    def _next_outcome(self) -> Outcome[P]:
        """Returns the first outcome, from the position on, that ``on_error`` does not skip."""
        start = position = self._first_position()
        skipped: list[FailedBatch] = []
        try:
            while True:
                outcome = self._outcome_at(position)
                if outcome.masked is not None:
                    outcome = self._noted(outcome, outcome.masked)
                error = outcome.error
                if self._config.on_error != "skip" or error is None or not can_skip(error):
                    return self._after_skipped(outcome, start, skipped) if skipped else outcome
                fault: Exception | None = self._fault_of_graph(error)
                if fault is None:
                    skipped.append(self._note_skipped(*self._epoch_and_step(position), error))
                    if len(skipped) >= self._most_skipped:
                        fault = too_many_skipped(skipped)
                if fault is not None:
                    return self._after_skipped(
                        dataclasses.replace(outcome, error=fault), start, skipped
                    )
                position = outcome.after
        except BaseException:
            if position is not start and self._can_build_at(start):
                self.drop()  # so that the next call repeats the skipped batches
            raise

    def _outcome_at(self, position: P) -> Outcome[P]:
        """Returns the outcome of the batch at a position, after a few retries if necessary.

        The batch is run again if the machine or the network fails.

        Raises:
            Exception: An error after which the batch stays the next batch.
        """
        if self._is_end(position):
            return Outcome(position, ended=True)
        delays = iter(RETRY_DELAYS)
        while True:
            try:
                outcome = self._run_at(position)
            except WorkersEnded:
                if self.closed:  # another thread closed it during this call
                    raise ValueError(CLOSED) from None
                raise
            except EnvironmentFailure as failed:
                self._stop()
                delay = next(delays, None)
                if delay is None:
                    raise self._exhausted_retries(position, failed) from failed.__cause__
                time.sleep(delay)
                continue
            if outcome is not None:
                self._works = self._works or (outcome.error is None and not outcome.ended)
                return outcome

    def _noted(self, outcome: Outcome[P], masked: FailedBatch) -> Outcome[P]:
        """Logs the masked records of a batch; returns the outcome with its ``failures``.

        ``failures`` is 1. If the batch is run again, it is 0, and only further bad records are
        logged.
        """
        key = masked.epoch, masked.step
        failures = int(key not in self._masked)
        logged = self._masked.setdefault(key, set())
        if not logged.issuperset(masked.files):
            logged.update(masked.files)
            self.errors.append(log_failure("masked", masked))
        if len(self._masked) > _MOST_MASKED:
            self._masked.pop(next(iter(self._masked)))
        return dataclasses.replace(outcome, failures=failures)

    @abc.abstractmethod
    def count(self, stats: InputStats, outcome: Outcome[P]) -> None:
        """Counts a delivered batch in ``stats``."""

    def _fault_of_graph(self, error: Exception) -> GraphError | None:
        """Returns an error that blames the graph, if all of the first batches failed in operators.

        Counts the failures for which no bad record is known. Returns None for other failures, for
        the first few failures, and once a batch has succeeded.
        """
        if not isinstance(error, (BatchError, RecordError)) or not error.unexplained:
            return None
        self._unexplained += 1
        if self._works or self._unexplained < MOST_UNEXPLAINED:
            return None
        return graph_error(error, self._unexplained)

    def _note_skipped(self, epoch: int, step: int, error: Exception) -> FailedBatch:
        """Logs a batch that ``on_error="skip"`` skips; returns its description."""
        files = error.files if isinstance(error, (BatchError, RecordError)) else ()
        return log_failure("skipped", FailedBatch(epoch, step, str(error), files))

    def _after_skipped(
        self, outcome: Outcome[P], start: P, skipped: Sequence[FailedBatch]
    ) -> Outcome[P]:
        """Adds skipped batches to `errors`; returns the outcome that counts them as failures.

        Args:
            outcome: The outcome after the skipped batches. If it is the end of an epoch, and every
                batch of the epoch was skipped, the result contains an error.
            start: The position of the first skipped batch.
            skipped: The skipped batches.
        """
        self.errors.extend(skipped)
        outcome = dataclasses.replace(outcome, failures=outcome.failures + len(skipped))
        if outcome.ended and outcome.error is None and self._epoch_and_step(start)[1] == 0:
            return dataclasses.replace(outcome, error=every_batch_failed(skipped))
        return outcome


@dataclasses.dataclass(frozen=True)
class EpochCursor(Cursor[P]):
    """The cursor of an `EpochEngine`; see `Cursor`.

    Attributes:
        stays: Whether the position was just set, so that ``iter()`` must not start an epoch.
        stopped: Whether StopIteration was raised in this epoch.
    """

    stays: bool = False
    stopped: bool = False


class EpochEngine(Engine[P]):
    """Base class of engines whose batches are grouped in epochs.

    `dalijax.DALIGenericIterator` uses an `EpochEngine` without knowing whether the engine runs
    DALI's readers or a record source.

    Args:
        cursor, config: As for `Engine`.

    Attributes:
        name: The name of the pipelines, for messages.
        batch_size: Batch size of each pipeline; 0 until it is known.
        plan: The epochs; None if their end is unknown, and before the first build.
        shards: The index of the shard of each pipeline in epoch 0.
        device_ids: The GPU of each pipeline, None for the CPU; empty until they are known.
    """

    cursor: EpochCursor[P]

    def __init__(self, cursor: EpochCursor[P], config: IteratorConfig):
        super().__init__(cursor, config)
        self.name = ""
        self.batch_size: int = 0
        self.plan: EpochPlan | None = None
        self.shards: tuple[int, ...] = ()
        self.device_ids: tuple[int | None, ...] = ()

    @property
    @abc.abstractmethod
    def num_failed(self) -> int:
        """Number of failed batches before the position."""

    @abc.abstractmethod
    def length(self) -> int | None:
        """Returns the number of batches that the epoch delivers, if known; builds no pipelines."""

    def total_length(self, num_epochs: int) -> int:
        """Returns the number of batches of the first epochs together; their lengths are known."""
        if self.plan is None:
            return num_epochs * (self.length() or 0)
        return self.plan.total(num_epochs, self.shards[0])

    @abc.abstractmethod
    def following_epoch(self) -> int:
        """Returns the number of the next epoch that has a batch; it skips empty epochs."""

    @abc.abstractmethod
    def at_end(self) -> bool:
        """Returns whether all batches of the epoch are before the position."""

    @abc.abstractmethod
    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next epoch."""

    @abc.abstractmethod
    def rewind(self) -> None:
        """Moves back to the start of the epoch.

        Raises:
            RuntimeError: If the pipelines can't be rebuilt at the start of the epoch.
        """

    @abc.abstractmethod
    def skip(self, batches: int) -> int:
        """Moves past up to ``batches`` batches of the epoch; returns the number of batches."""

    @abc.abstractmethod
    def go_to(self, position: P) -> None:
        """Moves to a position of this engine."""

    def restart(self) -> None:
        """Moves to the first batch of the first epoch; for a reader, builds new pipelines."""
        self.go_to(self._beginning)

    def begin_with(self, epoch: int) -> None:
        """Makes an epoch the first epoch, and moves to its start; only over a record source.

        Raises:
            ValueError: If the pipelines can only read sequentially.
        """
        self.seek(epoch, 0)

    def locate(self, batch: int) -> tuple[int, int] | None:
        """Returns epoch and step of a batch counted over all epochs; None over a reader.

        Raises:
            ValueError: If ``on_error="skip"`` makes the number of earlier batches unknown.
        """
        return None

    def seek(self, epoch: int, step: int, first: int = 0) -> None:
        """Moves to a batch, counted from the stream's start in batches of the current size.

        Args:
            epoch: The epoch.
            step: The index of the batch in the epoch.
            first: The epoch with which the stream begins.

        Raises:
            ValueError: If there is no such batch, or the pipelines can only read sequentially.
        """
        raise ValueError(
            f"seek({epoch}, {step}): a reader can only move to a saved state. Use set_state(), or "
            "a source of dalijax.sources, which can move anywhere"
        )

    def record(self, number: int, epoch: int | None) -> Batch:
        """Returns one record, without the dimension of the batch.

        Args:
            number: The number of the record in the source.
            epoch: The epoch of its random numbers; None: the epoch of the position.

        Raises:
            TypeError: If the pipelines read sequentially.
            ValueError: If there is no such record.
            BatchError: If the record is bad.
            StateError: If the graph depends on earlier batches.
        """
        raise TypeError(
            f"record({number}): DALI's readers read sequentially, so that records have no numbers. "
            "Use a source, such as sources.Files instead of fn.readers.file"
        )

    def note_jump(self) -> None:
        """Notes that the caller set the position, after which ``iter()`` starts no epoch."""
        self.moved()
        self.change(stays=True, stopped=False)

    # States

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position as a JSON value.

        Raises:
            StateError: If the state of the pipelines can't be saved.
        """

    @abc.abstractmethod
    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state.

        Args:
            state: Result of `get_state`.
            allow: Names of differences to ignore.
            named: Further names of ignored differences; each must exist in a fingerprint.

        Raises:
            StateError: If ``state`` is not a state, or a state of different data. The position does
                not change.
            Exception: If no pipelines can be built. The position does not change.
        """

    def checkpoint(self) -> None:
        """Stores the checkpoint that a state needs, before peeking advances the pipelines."""

    def adopt_restored(self) -> bool:
        """Moves to the checkpoints of the caller's pipelines; returns whether there are any."""
        return False

    @abc.abstractmethod
    def checkpoints(self) -> list[bytes]:
        """Returns the state as one bytes object for each pipeline.

        Raises:
            StateError: If the state of the pipelines can't be saved.
        """

    @abc.abstractmethod
    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves to the position of `checkpoints`; raises the errors of `set_state`."""

    @abc.abstractmethod
    def adopt_seed(self, other: Any) -> None:
        """Uses the seed that another engine of the same kind restored from a state."""

    # Pipelines

    def start(self) -> None:
        """Builds the pipelines, so that the first state contains the fingerprint of their data."""
        self.prepare()

    @abc.abstractmethod
    def replicas(self) -> contextlib.AbstractContextManager[tuple[list[Pipeline], str]]:
        """Returns a context with further pipelines of the same graph, which do not move the engine.

        Returns:
            A context manager of a pair: the unbuilt pipelines, which may only run within the
            context, and a description of the source whose records are fed to them ("" if they read
            data themselves).

        Raises:
            NoReplica: If the graph can't be replicated; the message tells why.
        """

    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of each array of a full batch, by name; peeks at one batch."""
        if self.peek().ended:
            batch = self._sample()
        else:
            batch = dataclasses.replace(self.peek(), mapped=None).unwrap()
        specs = self.make_batch.spec(batch, self._full_size)
        if self._config.batch_map is None:
            return specs
        return self._config.batch_map.specs(specs, self._config.mask, self._placement)

    @property
    def _full_size(self) -> int | None:
        """The number of rows of each pipeline's full batches; None if the last may have fewer."""
        return None if self.plan is None else self.batch_size

    @abc.abstractmethod
    def _sample(self) -> Batch:
        """Returns a batch for `spec` at the end of an epoch; the position does not change."""


class _Interruptible:
    """The context manager of `Engine.interruptible`.

    This is a class, because a generator would cost 3 us for each batch.
    """

    def __init__(self, engine: Engine[Any]):
        # Weak, so that engines and their pipelines are freed without the garbage collector.
        self._engine = weakref.ref(engine)

    def __enter__(self) -> None:
        engine = self._engine()
        if engine is not None:
            if engine._interrupted is not None:
                engine.roll_back()
            engine._interrupted = engine.cursor

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        engine = self._engine()
        if engine is None:
            return
        if kind is None or issubclass(kind, Exception):
            engine._interrupted = None
        if engine.closed:  # by another thread, which did not wait for this call
            engine.drop()


# A function that creates the engine of a new iterator over a record source.
MakeEngine = Callable[[IteratorConfig], EpochEngine[Any]]
