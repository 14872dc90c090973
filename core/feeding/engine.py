"""The engine of fed pipelines: runs, retries, and bad records, over any supply of rows."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..errors import BatchError, GraphError, RaggedError, RecordError
from ..order.shuffle import Indices
from ..pipeline import advice
from ..pipeline.bad_record import (
    can_skip,
    describe,
    every_batch_failed,
    failure_alone,
    find_bad,
    listed,
    with_printable,
)
from ..pipeline.batch import Batch
from ..pipeline.dali_pipeline import check_outputs, graph_lines
from ..pipeline.engine import CLOSED, Engine, Outcome, log_failure
from ..pipeline.failure import RETRY_DELAYS, EnvironmentFailure, Failure, failure_of, is_environment
from ..pipeline.pipeline_source import FunctionSource
from ..pipeline.runner import Outputs, Runner, SourceEnded, SourceError
from ..state import random_state
from ..state.operators import operators_of
from ..state.position import FailedBatch
from ..workers import WorkersEnded
from .graph import FedGraph, RowsOf
from .stand_ins import NoStandIn, UnusableRecord
from .supply import RowBatch, RowSupply

P = TypeVar("P")
Bad = Sequence[tuple[str, Exception]]  # names of records, and their errors

_MOST_MASKED = 1000  # batches whose masked records are remembered, to log them once
_MOST_PROBED = 24  # records that are tried before the graph is at fault


class _BadRecords(Exception):
    """Records of a batch can't be read or processed."""

    def __init__(self, bad: Bad):
        super().__init__()
        self.bad = bad


class FedEngine(Engine[P]):
    """Pipelines that are fed with the rows of a supply; see `Engine`.

    Subclasses know positions, supplies and states. They call `feed_by` once.
    """

    _most_skipped: float = float("inf")  # batches that are left out in a row
    _gradual = False  # whether the first batch is taken before the supply is asked for the second
    _unfit_text = "{names} can't be read. {kind}: {error}"
    _keeps_checkpoints = False  # whether positions have the states of DALI's random operators

    def feed_by(
        self,
        function: Callable[..., Any],
        define: Callable[..., Any],
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        seed: int | None,
    ) -> None:
        """Sets the parts of the pipelines.

        Args:
            function: The caller's function of the graph.
            define: Defines the graph of a pipeline, by its rows and ``part``.
            call: Arguments of ``nvidia.dali.pipeline_def``.
            each: The arguments in which the pipelines differ.
            seed: The seed of the pipelines; None for that in ``each``.
        """
        self._function, self._define = function, define
        self._call = dict(call)
        self._each = [{**own, "part": part} for part, own in enumerate(each)]
        self._seed: Any = seed
        self._graph: FedGraph | None = None
        self._learned = False  # whether the first pipelines were looked at
        self._feed: RowSupply[P] | None = None
        self._runner: Runner | None = None
        self._made: tuple[RowSupply[P], FunctionSource] | None = None
        self._taken = 0  # runs of the present pipelines
        # The last batches with masked records: the names by epoch and step.
        self._masked: dict[tuple[int, int], set[str]] = {}
        # Operators of ``fn.random``, once pipelines were built.
        self._random: list[str] = []

    # Positions, supplies and graphs of subclasses

    @abc.abstractmethod
    def _open_supply(self) -> RowSupply[P]:
        """Returns the supply of new pipelines."""

    @abc.abstractmethod
    def _is_end(self, here: P) -> bool:
        """Returns whether no batch is left, as far as the position alone tells."""

    @abc.abstractmethod
    def _after(self, here: P, feed: RowSupply[P], run: int, runner: Runner | None) -> P:
        """Returns the position after a run; without a runner the run failed."""

    @abc.abstractmethod
    def _place(self, here: P) -> tuple[int, int]:
        """Returns epoch and step of the batch at a position."""

    @abc.abstractmethod
    def _learn(self, lines: tuple[str, ...]) -> None:
        """Notes the lines of the operators of the first pipelines that were built."""

    def _run_of(self, here: P) -> P:
        """Returns the position of the next run from a position on."""
        return here

    def _label(self, here: P) -> str:
        """Returns the name of the batch at a position, for errors."""
        return f"batch {self._place(here)[1]}"

    def _not_fed(self, here: P, feed: RowSupply[P], run: int, error: BaseException) -> Outcome[P]:
        """Returns the outcome of a run for which the supply has raised an error.

        Raises:
            Exception: The error, if the batch stays the next one.
        """
        self._stop()
        if not isinstance(error, NoStandIn):
            raise error from None
        after = self._after(here, feed, run, None)
        feed.forget(run)
        return Outcome(after, error=self._bad_records(here, error.errors), failures=1)

    # Pipelines

    def prepare(self) -> None:
        """Builds the pipelines at the position, unless they are built."""
        self._runner_at(self.position)

    def schedule(self) -> None:
        """Builds the pipelines, unless they are built, and schedules runs without waiting."""
        self._runner_at(self.position)[0].schedule()

    def drop(self) -> None:
        """Frees the pipelines and what was peeked; the next use builds them, at the position."""
        feed, self._feed = self._feed, None
        self._outcome = None
        self._stop()
        if feed is not None:
            feed.close()

    def _stop(self) -> None:
        """Frees the pipelines; the next ones read the same rows again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _runner_at(self, here: P) -> tuple[Runner, RowSupply[P]]:
        """Returns pipelines whose next run is that of a position, and their supply."""
        if self.closed:
            raise ValueError(CLOSED)
        here = self._run_of(here)
        if self._runner is None or self._feed is None:
            return self._build(here)
        if not self._feed.is_at(self._taken, here):
            self._go_back(self._runner, self._feed, here)
        return self._runner, self._feed

    def _go_back(self, runner: Runner, feed: RowSupply[P], here: P) -> None:
        """Begins the next run at a position, and drops the batches that DALI has prepared."""
        if runner.source_failed():  # for a run that is not taken
            self._stop()
            self._build(here)
            return
        runner.drain()
        self._taken = feed.next_run
        feed.seek(here)

    def _build(self, here: P) -> tuple[Runner, RowSupply[P]]:
        self.process = os.getpid()
        feed = self._feed = self._feed or self._open_supply()
        feed.next_run = self._taken = 0
        try:
            feed.seek(here)
            runner = self._runner = self._started(feed, here)
        except BaseException:
            self._stop()
            raise
        return runner, feed

    def _started(self, feed: RowSupply[P], here: P) -> Runner:
        """Builds pipelines that begin at a position, at which the supply is."""
        return self._first_look(self._new_runner(feed))

    def _new_runner(self, feed: RowSupply[P], checkpoints: Sequence[bytes] | None = None) -> Runner:
        if self._made is None or self._made[0] is not feed:
            self._made = feed, self._pipelines(feed.rows, self._each)
        source = self._made[1]
        source.set_seed(self._seed)
        return Runner(source.build(checkpoints), gradual=self._gradual)

    def _first_look(self, runner: Runner) -> Runner:
        """Looks at the first pipelines before their first run; returns the pipelines."""
        if self._learned:
            return runner
        check_outputs(runner.pipelines[0], self._config.output_map)
        checkpoints = runner.checkpoints() or ()
        stateful = [random_state.operators(checkpoint) for checkpoint in checkpoints[:1]]
        self._random = [name for operators in stateful for name, has in operators.items() if has]
        if self._graph is not None:
            self._graph.learn(operators_of(runner.pipelines[0]))
        self._learn(tuple(graph_lines(runner.pipelines, self._batch_map_names)))
        self._learned = True
        return runner

    def _pipelines(
        self, rows_of: RowsOf, each: Sequence[Mapping[str, Any]], **options: Any
    ) -> FunctionSource:
        """Returns the factory of pipelines that are fed with some rows."""
        graph: Any = functools.partial(self._define, rows_of)
        graph.__name__ = getattr(self._function, "__name__", repr(self._function))  # for errors
        call = {**self._call, **options}
        source = FunctionSource(graph, (), call, each, self._config.on_host, self._function)
        source.set_seed(self._seed)
        return source

    # Batches

    def _next_outcome(self) -> Outcome[P]:
        here, skipped = self.position, list[FailedBatch]()
        from_start = self.step == 0
        try:
            while True:
                outcome = self._outcome_at(here)
                if outcome.masked is not None:
                    outcome = self._noted(outcome, outcome.masked)
                error = outcome.error
                if self._config.on_error != "skip" or error is None or not can_skip(error):
                    return self._after_skipped(outcome, skipped, from_start)
                fault: Exception | None = self._fault_of_graph(error)
                if fault is None:
                    skipped.append(self._note_skipped(*self._place(here), error))
                    if len(skipped) >= self._most_skipped:
                        fault = every_batch_failed(skipped)
                if fault is not None:
                    outcome = dataclasses.replace(outcome, error=fault)
                    return self._after_skipped(outcome, skipped, from_start=False)
                here = outcome.after
        except BaseException:
            if here is not self.position:  # the next call delivers skipped batches again
                self.drop()
            raise

    def _outcome_at(self, here: P) -> Outcome[P]:
        """Runs the batch at a position, again a few times if the environment fails.

        Raises:
            Exception: The supply's error, if no record can be read; the environment's, if retries
                failed. Nothing has moved.
        """
        if self._is_end(here):
            return Outcome(here, ended=True)
        delays = iter(RETRY_DELAYS)
        while True:
            try:
                outcome = self._run_at(here)
            except WorkersEnded:
                if self.closed:  # by another thread, during this call
                    raise ValueError(CLOSED) from None
                raise
            except EnvironmentFailure as failed:
                self._stop()
                delay = next(delays, None)
                if delay is None:
                    raise RuntimeError(
                        f"{self._label(here)} can't be made, and not because of its records; the "
                        f"next call tries it again: {failed}"
                    ) from failed.__cause__
                time.sleep(delay)
                continue
            if outcome is not None:
                return outcome

    def _run_at(self, here: P) -> Outcome[P] | None:
        """As `_outcome_at`; None if the run must be repeated with stand-ins in some rows."""
        runner, feed = self._runner_at(here)
        batch: Batch | None = None
        error: Exception | None = None
        run, self._taken = self._taken, self._taken + 1  # used up, also if it fails
        try:
            batch = runner.take(lambda outputs: self._batch(outputs, runner, feed, run))
        except (SourceError, SourceEnded) as failed:
            return self._not_fed(here, feed, run, failed.__cause__ or failed)
        except _BadRecords as failed:
            error = self._bad_records(here, failed.bad, whole=True)
        except RuntimeError as failed:
            return self._failed(here, runner, feed, run, failed)
        except RaggedError as failed:
            rows = feed.rows(run, failed.pipeline)
            error = failed.named({row: rows.name(row) for row in failed.rows})
        except Exception as failed:  # the outputs don't fit into arrays
            error = failed
        masked: FailedBatch | None = None
        if error is None:
            self._works = True
            if self._config.on_error == "mask" and (bad := self._bad_of(feed, run, valid=True)):
                named = self._bad_records(here, bad)
                masked = FailedBatch(*self._place(here), str(named), named.files)
                del named  # as below
        after = self._after(here, feed, run, runner)
        if self._feed is feed:  # not closed by another thread
            feed.forget(run)
        try:
            failures = int(isinstance(error, (BatchError, RecordError)))
            return Outcome(after, batch, error, masked=masked, failures=failures)
        finally:
            del error  # its traceback has this frame: together they would keep the batch

    def _all_rows(self, feed: RowSupply[P], run: int) -> list[RowBatch]:
        """Returns the rows of all pipelines in a run."""
        return [feed.rows(run, part) for part in range(len(self._each))]

    def _batch(
        self, outputs: Sequence[Outputs], runner: Runner, feed: RowSupply[P], run: int
    ) -> Batch:
        """Makes the batch of a run."""
        if self._config.on_error != "mask" and (bad := self._bad_of(feed, run)):
            raise _BadRecords(bad)
        parts = self._all_rows(feed, run)
        masks = []
        for rows in parts:
            valid = rows.valid.copy()
            valid[list(rows.errors)] = False
            masks.append(valid)
        batch = self.make_batch(outputs, masks, not runner.dynamic)
        graph = self._graph
        if graph is not None and graph.passed:
            columns = {
                name: [value for rows in parts for value in rows.column(name)]
                for name in graph.passed
            }
            counts = [len(rows.valid) for rows in parts]
            self.make_batch.add_columns(batch, columns, counts, graph.stacked)
        return batch

    # Records that can't be read or processed

    def _bad_of(self, feed: RowSupply[P], run: int, valid: bool = False) -> Bad:
        """Returns the bad records of a run, of all pipelines; with ``valid`` without padding."""
        return [
            (rows.name(row), rows.errors[row])
            for rows in self._all_rows(feed, run)
            for row in sorted(rows.errors)
            if rows.valid[row] or not valid
        ]

    def _bad_records(self, here: P, bad: Bad, whole: bool = False) -> BatchError | RecordError:
        """Returns the error of a batch with bad records, which it names.

        Args:
            here: The position of the batch.
            bad: The bad records.
            whole: Whether the message has DALI's whole error, too.
        """
        groups: dict[str, list[tuple[str, Exception]]] = {}
        for name, reason in bad:
            unusable = isinstance(reason, UnusableRecord)
            kind = reason.failure.operator if isinstance(reason, UnusableRecord) else "read"
            groups.setdefault(f"{unusable} {kind}", []).append((name, reason))
        texts, said = [], ""
        for group in groups.values():
            names, first = list(dict.fromkeys(name for name, _ in group)), group[0][1]
            if isinstance(first, UnusableRecord):
                texts.append(describe(first.failure, names, every=False))
                said = said or first.text
            else:
                texts.append(
                    self._unfit_text.format(
                        names=listed(names), kind=type(first).__name__, error=first
                    )
                )
        files = tuple(dict.fromkeys(name for group in groups.values() for name, _ in group))
        dali = f"\nDALI says: {with_printable(said, files)}" if whole and said else ""
        unfit = not any(isinstance(reason, UnusableRecord) for _, reason in bad)
        error = self._described(here, "; ".join(texts) + dali, unfit=unfit)
        error.files = files
        error.__cause__ = bad[0][1]
        return error

    def _described(
        self, here: P, text: str, of_graph: bool = False, unfit: bool = False
    ) -> BatchError | RecordError:
        """Returns the error of a batch, with its number."""
        kind = GraphError if of_graph else self._error_kind(unfit)
        return kind(f"{self._label(here)} failed, and counts as delivered: {text}")

    def _error_kind(self, unfit: bool) -> type[BatchError] | type[RecordError]:
        """Returns the class of errors; ``unfit`` if DALI did not get the records."""
        return BatchError

    def _noted(self, outcome: Outcome[P], masked: FailedBatch) -> Outcome[P]:
        """Logs and counts the masked records of a batch; once, however often it is made."""
        key = masked.epoch, masked.step
        failures = int(key not in self._masked)
        logged = self._masked.setdefault(key, set())
        if not logged.issuperset(masked.files):
            logged.update(masked.files)
            self.errors.append(log_failure("masked", masked))
        if len(self._masked) > _MOST_MASKED:
            self._masked.pop(next(iter(self._masked)))
        return dataclasses.replace(outcome, failures=failures)

    def _failed(
        self, here: P, runner: Runner, feed: RowSupply[P], run: int, error: RuntimeError
    ) -> Outcome[P] | None:
        """Finds the records that made a run fail; see `_run_at`."""
        failure = failure_of(error)
        if failure.environment:
            raise EnvironmentFailure(failure.message) from error
        used = np.unique(np.concatenate([rows.samples for rows in self._all_rows(feed, run)]))

        def run_alone(places: Sequence[int]) -> Failure | None:
            return self._run_alone(feed, used[list(places)])

        samples = [int(used[k]) for k in find_bad(len(used), run_alone, failure)]
        text = advice.of_run(error)
        reason = UnusableRecord(failure, text)
        every = len(samples) == len(used) and not failure.reads_file
        every = every and not self._works_elsewhere(feed, run)
        unread = self._bad_of(feed, run)
        described: BatchError | RecordError
        if every or not (samples or unread or failure.reads_file):
            dali = f"\nDALI says: {text}"
            described = self._described(here, describe(failure, (), every) + dali, every)
            described.unexplained = True
        elif not samples and not unread:  # a file's, but not of any record alone
            described = self._described(here, f"{failure.message}\nDALI says: {text}")
        else:
            # With stand-ins the numbers of random operators move on as in any other run.
            again = self._config.on_error == "mask" or self._keeps_checkpoints
            again = again and bool(samples)
            bad = [*unread, *((name, reason) for name in self._names(feed, run, samples))]
            for sample in samples:
                feed.remember(sample, reason, again)
            if again and self._has_stand_in(feed, run, failure):
                self._stop()  # an operator may have learnt from a bad record what to expect
                return None
            described = self._bad_records(here, bad, whole=True)
        described.__cause__ = error
        after = self._after(here, feed, run, None)
        feed.forget(run)
        if not self._random or self._keeps_checkpoints:  # else they would draw the first numbers
            self._stop()
        return Outcome(after, error=described, failures=1)

    def _names(self, feed: RowSupply[P], run: int, samples: Sequence[int]) -> Iterator[str]:
        """Yields the names of samples' records, without those that stand in for others."""
        for rows in self._all_rows(feed, run):
            for row in np.flatnonzero(np.isin(rows.samples, samples)).tolist():
                if row not in rows.errors:
                    yield rows.name(row)

    def _works_elsewhere(self, feed: RowSupply[P], run: int) -> bool:
        """Returns whether the graph works for any record, trying some of other runs."""
        if not self._works:
            probes = itertools.islice(feed.probes(run), _MOST_PROBED)
            self._works = any(self._stands(feed, sample) for sample in probes)
        return self._works

    def _has_stand_in(self, feed: RowSupply[P], run: int, failure: Failure) -> bool:
        """Returns whether a record stands in for the bad ones of a batch; remembers bad ones."""
        for sample in feed.stand_ins(run):
            if self._stands(feed, sample):
                return True
            feed.remember(sample, UnusableRecord(failure), True)
        return False

    def _stands(self, feed: RowSupply[P], sample: int) -> bool:
        """Returns whether a sample can be read and processed."""
        try:
            rows = feed.alone(np.array([sample], np.int64))
            if rows.errors:
                return False
        except Exception as error:
            if isinstance(error, WorkersEnded) or is_environment(error):
                raise
            return False
        return self._run_alone(feed, np.array([sample], np.int64)) is None

    def _run_alone(self, feed: RowSupply[P], samples: Indices) -> Failure | None:
        """Runs some samples in a pipeline of their own; returns the failure.

        Raises:
            EnvironmentFailure: If the environment failed, and not the samples.
        """
        rows = feed.alone(samples)
        each = {**self._each[0], "batch_size": len(samples)}
        source = self._pipelines(lambda run, part: rows, [each], prefetch_queue_depth=1)
        failure = failure_alone(Runner(source.build()))
        if failure is not None and failure.environment:
            raise EnvironmentFailure(failure.message)
        return failure
