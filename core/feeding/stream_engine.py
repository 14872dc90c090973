"""The engine of records: pipelines fed with the records of a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import IteratorConfig
from ..errors import GraphError, RaggedError, RecordError, StateError, UnfitRecordError
from ..pipeline import advice
from ..pipeline.bad_record import MOST_SKIPPED, can_skip, describe, every_batch_failed, runs
from ..pipeline.batch import Batch
from ..pipeline.engine import CLOSED, Engine, Outcome, log_failure
from ..pipeline.failure import RETRY_DELAYS, EnvironmentFailure, failure_of
from ..pipeline.runner import Outputs, Runner, SourceEnded, SourceError
from ..pipeline.schema import described, values_of
from ..printable import printable
from ..state import differences, random_state
from ..state.agreement import Batches, Values
from ..state.position import FailedBatch
from ..stats import InputStats
from .record_pipelines import RecordPipelines, check_record_graph
from .record_queue import (
    Numbers,
    ReadError,
    RecordBatch,
    RecordPosition,
    RecordQueue,
    RecordReader,
    Restored,
)
from .stream_part import PartReader, StreamPart

_MOST_SKIPPED = 16 * MOST_SKIPPED  # batches that are left out in a row: a stream may have no end
# Batches that processes hold, at least, when they exchange their numbers; DALI reads as many ahead.
_HELD = 2
_LOOK_AHEAD = 8  # batches that are searched for a record that can be decoded


class _RefusedRecords(Exception):
    """Records of a batch that the graph could not augment."""


class RecordEngine(Engine[RecordPosition]):
    """Pipelines fed with the records of a stream, at the consumer's position; see `Engine`.

    Args:
        pipeline_fn: The function of the graph; see `dalijax.core.pipeline.schema.learn`.
        config: The iterator's arguments; ``mask`` adds the rows that are valid.
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        each: What differs between the pipelines (device_id, seed).
        rows: Rows of each pipeline's batch.
        reader: Gives the records, and refers to no engine.
        numbers: Gives the numbers of the rows of a step, for ``draw``; see `RecordQueue`.
        draw_seed: The seed of ``draw``.
        on_error: What to do with records that DALI can't decode: "raise", "skip" (the whole
            batch) or "mask" (a neighbour stands for them, masked out).
        spec: The structure of a record, where the first one doesn't show it.
        by_step: Whether the random state follows from the step alone, for whole batches.
        part: This process's part of the stream, if several processes make its batches together.

    Attributes:
        stats: The counters of `next`, once `watch` was called.
    """

    _marked = (*Engine._marked, "_compared")

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        config: IteratorConfig,
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        rows: int,
        reader: RecordReader,
        numbers: Numbers | None,
        draw_seed: int,
        on_error: str = "raise",
        spec: Any = None,
        by_step: bool = False,
        part: StreamPart | None = None,
    ):
        check_record_graph(pipeline_fn, config, on_error)
        super().__init__(RecordPosition(), config)
        self.stats: InputStats | None = None
        self._part = part or StreamPart({})
        self._reader = PartReader(reader, self._part)
        self._draw_seed = draw_seed
        self._read_at_position = True  # whether the reader and the queue are where they must be
        self._rows, self._rows_each = rows * len(each), rows
        self._on_error = on_error
        self._by_step = by_step
        self._compared = False  # whether the processes have compared their graphs and positions
        self._queue = RecordQueue(self._reader.next_records, len(each), rows, numbers)
        self._pipelines = RecordPipelines(
            pipeline_fn,
            config,
            call,
            each,
            rows,
            self._queue,
            numbers,
            draw_seed,
            spec,
        )
        self._peeked: RecordBatch | None = None  # the records of the outcome
        if part is not None:
            self.compare_processes(getattr(pipeline_fn, "__name__", "the graph"), part.values)
            self._reader.agreement = self._agreement

    @property
    def epoch(self) -> int:
        """0: epochs are the reader's."""
        return 0

    @property
    def step(self) -> int:
        """Number of batches behind the consumer."""
        return self.position.step

    # Several processes

    def moved(self) -> None:
        """Has the next batch wait until all processes stand at the same position."""
        self._reader.moved()
        self._compared = False
        super().moved()

    def advance(self) -> None:
        """Moves behind the batch that `peek` gives."""
        super().advance()
        if self._reader.must_agree(self.position.step):
            self._must_agree = True

    def _agree(self) -> None:
        """Compares the number of batches, and then the graph, which needs a record."""
        with contextlib.suppress(ReadError):  # raised when it is due; the next call compares
            if self._reader.must_agree(self.step):
                self._reader.agree(self.step, self._batches())
            if not self._compared:
                super()._agree()
            self._compared, self._must_agree = True, False

    def _batches(self) -> Batches:
        """The batches that this process has.

        Raises:
            ReadError: If reading raised before the next batch.
        """
        if self._part.batches is None:
            self._go_to_records(self.position)
            try:
                self._queue.at(_HELD - 1)
            except StopIteration:
                pass
            except ReadError:
                if not self._queue.batches:
                    raise
        return self._reader.batches(self._queue.step + len(self._queue.batches))

    def _shared_values(self) -> Values:
        """What must be equal in all processes; see `Engine`."""
        graph, operators = "no record", list[str]()
        if not self._reader.is_behind_end(self.step):
            with contextlib.suppress(StopIteration):
                self.prepare()
                graph, operators = "known", list(self._pipelines.operators)
        values = {"graph": graph, "operators": operators, "position": f"step {self.step}"}
        return {**self._part.values, **values}

    # Batches

    def next(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: At the end.
            RecordError: If DALI can't decode a record; the next call gives the next batch.
            Exception: What the reader raised.
        """
        with self.lock, self.interruptible():
            outcome = self.deliver(self.stats)
            try:
                return outcome.unwrap()
            finally:
                del outcome  # an error's traceback has this frame: they would keep the batch

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; until it is called nothing is counted."""
        self.stats = self.stats or InputStats()
        return self.stats

    def _number(self, outcome: Outcome[RecordPosition]) -> tuple[int, int]:
        return 0, outcome.after.step - 1  # batches may have been left out before it

    def _seed_of_keys(self) -> int:
        restored = self.position.restored
        known = [restored.draw_seed, restored.seed, self._draw_seed]
        return next(int(seed) for seed in known if seed is not None)

    def count(self, stats: InputStats, outcome: Outcome[RecordPosition]) -> None:
        """Counts a batch that is delivered."""
        batch = self._peeked
        if batch is None:  # a record's reading raised: no batch is behind it
            return
        rows = len(batch.records)
        valid = rows if batch.valid is None else int(batch.valid.sum())
        stats.delivered(*self._number(outcome), valid, rows - valid, self.errors.total)

    def _next_outcome(self) -> Outcome[RecordPosition]:
        here, failed = self.position, list[FailedBatch]()
        try:
            while True:
                outcome = self._outcome_with_retries(here, failed)
                if self._on_error != "skip" or outcome.error is None or not can_skip(outcome.error):
                    return self._behind_skipped(outcome, failed, self.position.step == 0)
                error = outcome.error
                if (fault := self._fault_of_graph(error)) is not None:
                    outcome = dataclasses.replace(outcome, error=fault)
                    return self._behind_skipped(outcome, failed, from_start=False)
                failed.append(self._left_out(0, here.step, error))
                if len(failed) == _MOST_SKIPPED:
                    return self._behind_skipped(
                        dataclasses.replace(outcome, error=every_batch_failed(failed)),
                        failed,
                        False,
                    )
                here = outcome.after
        except BaseException:
            if here is not self.position:  # what was skipped comes again
                self.drop()
            raise

    def _outcome_with_retries(
        self, here: RecordPosition, failed: list[FailedBatch]
    ) -> Outcome[RecordPosition]:
        """As `_outcome_at`, again a few times if the environment fails."""
        for delay in RETRY_DELAYS:
            try:
                return self._outcome_at(here, failed)
            except EnvironmentFailure:
                time.sleep(delay)
        try:
            return self._outcome_at(here, failed)
        except EnvironmentFailure as raised:
            raise RuntimeError(
                f"batch {here.step} can't be made, and not because of its records; the next call "
                f"tries it again: {raised}"
            ) from raised.__cause__

    def _outcome_at(
        self, here: RecordPosition, failed: list[FailedBatch]
    ) -> Outcome[RecordPosition]:
        """The outcome of the run at a position, where the pipelines stand.

        Args:
            here: The position.
            failed: Where a batch with masked records is noted.

        Raises:
            Exception: What the reader raised where nothing was read; nothing has moved.
        """
        self._peeked = None
        if self._reader.is_behind_end(here.step):
            return Outcome(here, ended=True)
        try:
            runner = self._runner_at(here)
        except ReadError as raised:
            return self._unread(here, raised)
        except StopIteration:  # before the first record
            return self._ended(here)
        batch: Batch | None = None
        error: Exception | None = None
        try:
            batch = runner.take(functools.partial(self._convert, runner))
        except SourceEnded:
            return self._ended(here)
        except SourceError as raised:
            self._pipelines.stop()
            cause = raised.__cause__ or raised
            if isinstance(cause, ReadError):
                return self._unread(here, cause)
            unfit = self._pipelines.unfit(self._queue.batches[0]) if self._queue.batches else []
            if not unfit:
                raise cause from None
            return self._undecoded(here, cause, unfit, failed)
        except _RefusedRecords:
            refused = self._queue.batches[0].refused
            self._pipelines.stop()
            return self._undecoded(here, refused[min(refused)], sorted(refused), failed)
        except RuntimeError as raised:
            if failure_of(raised).environment:
                self._pipelines.stop()
                raise EnvironmentFailure(failure_of(raised).message) from raised
            return self._undecoded(here, raised, [], failed)
        except RaggedError as raised:
            rows = self._queue.batches[0]
            first = raised.pipeline * self._rows_each
            error = raised.named({row: rows.name(first + row) for row in raised.rows})
        except Exception as raised:  # no array can be made of it
            error = raised
        self._works = self._works or error is None
        try:
            return Outcome(self._pop(here, runner.checkpoints()), batch, error)
        finally:
            del error  # its traceback has this frame: together they would keep the batch

    def _ended(self, here: RecordPosition) -> Outcome[RecordPosition]:
        """The outcome after the last record.

        Raises:
            ProcessError: If other processes have more batches.
        """
        self._reader.check_end(here.step)
        return Outcome(here, ended=True)

    def _pop(self, here: RecordPosition, checkpoints: tuple[bytes, ...] | None) -> RecordPosition:
        """The position behind the first batch of the queue, which is taken."""
        self._peeked = self._queue.batches[0]
        self._queue.pop()
        step, after = here.step + 1, self._peeked.after
        return dataclasses.replace(here, step=step, after=after, checkpoints=checkpoints)

    def _unread(self, here: RecordPosition, error: ReadError) -> Outcome[RecordPosition]:
        """The outcome of a record whose reading raised; the next batch begins behind it."""
        self._queue.error = None
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration):  # which would look like the end
            stop = cause
            cause = RuntimeError(f"the reading of a record raised StopIteration: {stop}")
            cause.__cause__ = stop
        after = dataclasses.replace(here, after=error.after)
        return Outcome(after, error=cause if isinstance(cause, Exception) else error)

    def _convert(self, runner: Runner, outputs: Sequence[Outputs]) -> Batch:
        if self._queue.unread:
            raise ValueError(
                "the graph uses none of the records' arrays, so that nothing feeds it: have its "
                "outputs depend on one of its inputs"
            )
        records = self._queue.batches[0]
        if records.refused:
            raise _RefusedRecords
        rows = [len(tensors[0]) for tensors in outputs]
        valid = np.ones(sum(rows), bool) if records.valid is None else records.valid
        masks = np.split(valid, np.cumsum(rows)[:-1])
        batch = self.make_batch(outputs, masks, not runner.dynamic)
        columns = {name: values_of(records.records, name) for name in self._pipelines.passed}
        self.make_batch.add_columns(batch, columns, rows)
        return batch

    # Records that DALI can't decode

    def _undecoded(
        self,
        here: RecordPosition,
        error: BaseException,
        unfit: Sequence[int],
        failed: list[FailedBatch],
    ) -> Outcome[RecordPosition]:
        """The outcome of a batch that DALI can't make.

        Args:
            here: Its position.
            error: The error.
            unfit: The rows of which no inputs of the graph can be made.
            failed: Where a batch with masked records is noted.
        """
        batch = self._queue.batches[0]
        failure = failure_of(error)
        bad = list(unfit) or self._pipelines.undecodable(batch, here.step, failure)
        repaired = self._repaired(batch, bad, here.step) if bad else None
        unexplained = repaired is None and not unfit and not failure.reads_file
        of_graph = unexplained and bool(bad) and not self._works  # nor for the batches that follow
        names = [] if unexplained else bad
        text = _description(here, batch, names, bool(unfit), error, of_graph)
        after: RecordPosition | None = None
        if repaired is not None:
            self._queue.batches[0] = repaired
            runner = self._stand(here)
            if self._on_error == "mask":
                failed.append(log_failure("masked", FailedBatch(0, here.step, text)))
                return self._outcome_at(here, failed)
            if runs(runner):  # the random state moves on as by any other batch
                after = self._pop(here, runner.checkpoints())
        if after is None:
            checkpoints = self._behind_failure(here, batch)
            after = self._pop(here, checkpoints)
            self._pipelines.stop()
        kind = GraphError if of_graph else UnfitRecordError if unfit else RecordError
        described_error = kind(text)
        described_error.unexplained, described_error.__cause__ = unexplained, error
        return Outcome(after, error=described_error)

    def _repaired(self, batch: RecordBatch, bad: Sequence[int], step: int) -> RecordBatch | None:
        """The first batch of the queue with good records for bad ones, if there are any.

        They come from the batch itself, else from the batches behind it; not from those before it,
        which a resumed run never saw.
        """
        if len(bad) < len(batch.records):
            return batch.without(bad, None)
        for place in range(1, _LOOK_AHEAD + 1):
            try:
                later = self._queue.at(place)
            except (StopIteration, ReadError):
                break
            bad_later = self._pipelines.undecodable(later, step + place)
            good = sorted({*range(len(later.records))} - {*bad_later})
            if good:
                return batch.without(bad, later.records[good[0]])
        return None

    def _behind_failure(self, here: RecordPosition, batch: RecordBatch) -> tuple[bytes, ...] | None:
        """The checkpoints behind a batch that fails in every run.

        The random state moves on all the same: numbers that make a batch fail would make all that
        follow fail, too.
        """
        if self._by_step:
            return None
        start = self._checkpoints_at(here)
        try:
            return self._pipelines.after(1, batch, start)
        except (StateError, RuntimeError, SourceError):  # it fails with other numbers, too
            return start

    # Pipelines

    def prepare(self) -> None:
        """Builds the pipelines at the position, unless they are built.

        Raises:
            StopIteration: If there is no batch: the first one says the records' dtypes.
            ReadError: If the reading of its first record raised.
            StateError: If the position is of other pipelines.
        """
        with self.lock:
            self._runner_at(self.position)

    def schedule(self) -> None:
        """Builds the pipelines, unless they are built, and schedules runs without waiting."""
        unread = contextlib.suppress(StopIteration, ReadError)  # which next() raises
        with self.lock, self.interruptible(), unread:
            self._runner_at(self.position).schedule()

    def _runner_at(self, here: RecordPosition) -> Runner:
        if self.closed:
            raise ValueError(CLOSED)
        runner = self._pipelines.runner
        # Pipelines are only valid as long as the reader stands where they have read to.
        return runner if runner is not None and self._read_at_position else self._stand(here)

    def _stand(self, here: RecordPosition) -> Runner:
        """New pipelines at a position, which read from the start of the queue."""
        self.process = os.getpid()
        pipelines = self._pipelines
        try:
            self._go_to_records(here)
            restored = here.restored
            pipelines.set_seed(restored.seed, restored.draw_seed)
            runner = None
            if not pipelines.first:
                runner = pipelines.build()
            self._check_graph(restored.operators)
            checkpoints = self._checkpoints_at(here)
            # The first checkpoint had to be seen to know the others by their difference.
            if runner is None or checkpoints != pipelines.first:
                runner = pipelines.stand(checkpoints)
            return runner
        except BaseException:  # refused, and so is the next call
            pipelines.stop()
            raise

    def _go_to_records(self, here: RecordPosition) -> None:
        """Moves the reader and the queue to a position, unless they are there."""
        if not self._read_at_position:
            self._pipelines.stop()
            self._reader.seek(here)
            self._queue.clear(here.step)
            self._read_at_position = True

    def _checkpoints_at(self, here: RecordPosition) -> tuple[bytes, ...]:
        """Where the pipelines, which were built once, stand at a position."""
        pipelines = self._pipelines
        if here.checkpoints:
            return here.checkpoints
        if pipelines.first and here.restored.random:
            return tuple(random_state.expand(here.restored.random, pipelines.first))
        if not (self._by_step and here.step and pipelines.stateful):
            return pipelines.first
        first = self._queue.at(0).padded(self._rows)
        bad = pipelines.undecodable(first, here.step)
        sample = self._repaired(first, bad, here.step) if bad else first
        if sample is None:
            raise StateError(
                f"no record behind step {here.step} can be decoded: nothing goes on there"
            )
        return pipelines.after(here.step, sample)

    def restart(self) -> None:
        """Goes on after the reader had no batch, where it may have one now."""
        if self._pipelines.runner is not None:
            self._pipelines.runner.restart()

    def drop(self) -> None:
        """Frees the pipelines and what was read; the next use builds them, at the position."""
        self._read_at_position = False  # first: what is dropped can't be used any more
        self._outcome = self._peeked = None
        self._pipelines.stop()
        self._queue.clear(0)

    # States

    def random_state(self, position: RecordPosition) -> str:
        """The random state at a position as a short text; "" where no operator has one.

        It is "" before the pipelines were built, too.

        Raises:
            StateError: If the graph can't be resumed: the message says why.
        """
        self._pipelines.check_resumable()
        if not position.checkpoints:
            return position.restored.random
        if not self.stateful():  # nothing of the state belongs to these devices
            return ""
        first = self._pipelines.first_of(position.restored.seed)
        return random_state.compress(position.checkpoints, first)

    def operators(self, position: RecordPosition) -> tuple[str, ...]:
        """A line for each operator, the same for a first state before and after the first build."""
        saved, present = position.restored.operators, self._pipelines.operators
        return (present or saved) if saved or position.step else ()

    def stateful(self) -> list[str]:
        """Names of the operators that have a state, once the pipelines were built."""
        return self._pipelines.stateful

    def was_built(self, position: RecordPosition) -> bool:
        """Whether pipelines were ever built with the seed of a position."""
        return bool(self._pipelines.first_of(position.restored.seed))

    def check(self, restored: Restored) -> None:
        """Raises StateError if a state is known to belong to other pipelines."""
        self._check_graph(restored.operators)
        first = self._pipelines.first_of(restored.seed)
        if restored.random and first:
            random_state.expand(restored.random, first)

    def _check_graph(self, saved: Sequence[str]) -> None:
        before, now = list(saved), list(self._pipelines.operators)
        differences.check({"operators": before}, {"operators": now}, self._config.allow_changes)

    def restore(self, position: RecordPosition, move: Callable[[], object] | None = None) -> None:
        """Moves to a restored position; the next use builds the pipelines.

        Args:
            position: The position.
            move: Moves the reader there, for readers that only then show whether they can. If it
                raises, the position stays, and the reader is moved back when it is next used.
        """
        with self.lock:
            self.drop()
            if move is not None:
                move()
                self._queue.clear(position.step)
                self._reader.start_at(position.step)
            self.position, self._interrupted = position, None
            self._read_at_position = move is not None
            self.moved()


def _description(
    here: RecordPosition,
    batch: RecordBatch,
    bad: Sequence[int],
    unfit: bool,
    error: BaseException,
    of_graph: bool,
) -> str:
    """Describes a failed batch: its bad records, or the operator, and DALI's message."""
    names = [f"{printable(batch.name(row))} ({described(batch.records[row])})" for row in bad[:5]]
    more = " and more" if len(bad) > 5 else ""
    if unfit:
        return f"DALI can't take {'; '.join(names)}{more}. {error}"
    failure = failure_of(error)
    dali = f"\nDALI says: {advice.of_run(error)}" if isinstance(error, RuntimeError) else ""
    if failure.reads_file and names:
        return f"DALI can't decode {'; '.join(names)}{more}. {failure.message}{dali}"
    text = describe(failure, [f"{'; '.join(names)}{more}"] if names else (), of_graph)
    return f"batch {here.step} failed. {text}{dali}"
