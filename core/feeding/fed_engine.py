"""`FedEngine`: runs pipelines that are fed with records, and handles bad records."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from nvidia.dali.pipeline import do_not_convert

from ..errors import BatchError, GraphError, RaggedError, RecordError
from ..order.packing import RowLayout
from ..order.shuffle import Indices
from ..pipeline import advice
from ..pipeline.alternatives import description_of
from ..pipeline.batch import Batch, BatchMaker, choose_placement
from ..pipeline.engine import CLOSED, Engine, Outcome
from ..pipeline.failing_rows import failure_alone, find_bad
from ..pipeline.failure import (
    Cause,
    EnvironmentFailure,
    Failure,
    can_open_files,
    cause_of,
    failure_of,
)
from ..pipeline.failure_errors import describe, first_names, with_dali
from ..pipeline.pipeline_factory import GraphPipelineFactory
from ..pipeline.runner import Outputs, Runner, SourceEnded, SourceError
from ..random.draw import DrawnRows, described_draws
from ..sources.rows import RowSource
from ..sources.source import is_of_record
from ..state import random_state
from ..state.position import FailedBatch
from ..threads.workers import WorkersEnded
from .graph import FedGraph, description
from .read_rows import concatenated
from .stand_ins import NoStandIn, UnusableRecord
from .supply import RowBatch, RowSupply

P = TypeVar("P")
# Returns the rows of a run of a pipeline, given the run's number and the pipeline's number.
RowsOf = Callable[[int, int], RowBatch]
Bad = Sequence[tuple[str, Exception]]  # the names of bad records, and their errors
_FAILED = "failed, and counts as delivered"
_MOST_REASONS = 5  # that an error about a batch contains
_MOST_PROBED = 24  # the number of records that must fail before the graph is considered at fault


def sample_numbers(parts: Sequence[RowBatch]) -> Indices:
    """Returns the numbers of the samples in all rows, sorted and without repetitions."""
    return np.unique(np.concatenate([rows.samples for rows in parts]))


def _unknown_graph(*sources: Any) -> Any:
    """Raises ValueError; takes the place of the graph until the first record is read."""
    raise ValueError("the inputs of the graph are unknown, because no record was read")


def _unchanged(column: Any, name: str) -> Any:
    """Returns a column that is an array already."""
    return column


def _by_row(
    source: RowSource,
    columns: Mapping[str, Any],
    column_of: Callable[[Any, str], Any],
    masks: Sequence[NDArray[np.bool_]],
    layouts: Sequence[RowLayout],
) -> dict[str, Any]:
    """Returns values that bypass the graph for rows that contain several records.

    Args:
        source: The source.
        columns: A value for each record, by name.
        column_of: Returns the values of a column as an array.
        masks: For each pipeline, False for records that are not delivered. Their values become 0
            or None.
        layouts: The layout of each pipeline's rows.
    """
    is_valid, ends = np.concatenate(masks), np.cumsum([*map(len, masks)])[:-1]
    result = {}
    for name, column in columns.items():
        values = column_of(column, name)
        if not is_valid.all():
            values = values.copy()
            values[~is_valid] = None if values.dtype == object else 0
        pieces = map(source.column_of_rows, layouts, np.split(values, ends))
        result[name] = np.concatenate([*pieces])
    return result


class _BadRecords(Exception):
    """Raised for a batch with records that can't be read or processed."""

    def __init__(self, bad: Bad):
        super().__init__()
        self.bad = bad


class FedEngine(Engine[P]):
    """Base class of engines whose pipelines are fed with records; see `Engine`.

    A run of the pipelines makes one batch. A `RowSupply` reads the records of each run. If a run
    fails, the engine runs parts of its records again, to find the bad records. As ``on_error``
    requires, it then raises an error, skips the batch or replaces the bad records. Subclasses
    define positions, supplies and states, and call `feed_by` once.
    """

    # Whether to take the first batch before DALI requests further records; see `Runner`.
    _gradual = False
    _unfit_text = "{names} can't be read. {kind}: {error}"
    # Whether positions contain the states of DALI's random operators.
    _keeps_checkpoints = False
    # The source, if rows of batches contain several of its records.
    _row_source: RowSource | None = None

    def feed_by(
        self,
        function: Callable[..., Any],
        graph: FedGraph | None,
        call: Mapping[str, Any],
        differing: Sequence[Mapping[str, Any]],
    ) -> None:
        """Sets the graph and the arguments of the pipelines.

        Args:
            function: The user's graph function.
            graph: The graph; None if it is unknown before the first record is read.
            call: Arguments of ``nvidia.dali.pipeline_def``.
            differing: For each pipeline, the arguments that differ between the pipelines.
        """
        self._function, self._graph = function, graph
        # Defines the graph of a pipeline; see `FedGraph`.
        self._define: Callable[..., Any] = _unknown_graph if graph is None else graph
        self._call = dict(call)
        self._pipeline_arguments = [
            {**arguments, "part": part} for part, arguments in enumerate(differing)
        ]
        self._learned = False  # whether the first pipelines were inspected
        self._supply: RowSupply[P] | None = None
        self._factory: GraphPipelineFactory
        self._runs_taken = 0  # the number of runs taken from the current pipelines
        # Both functions return nothing before the first build, and are called to save a state.
        self._random: Callable[[], list[str]] = list  # names of the operators of ``fn.random``
        self._operators: Callable[[], tuple[str, ...]] = tuple  # a line for each operator

    # Methods that subclasses define

    @property
    @abc.abstractmethod
    def _seed(self) -> Any:
        """The seed of the pipelines; None for the seeds in the argument ``differing``."""

    @abc.abstractmethod
    def _open(self) -> tuple[RowSupply[P], GraphPipelineFactory]:
        """Returns a supply, and the factory of the pipelines that it feeds."""

    @abc.abstractmethod
    def _after(self, position: P, supply: RowSupply[P], run: int, runner: Runner | None) -> P:
        """Returns the position after the run at ``position``; ``runner`` is None if it failed."""

    @abc.abstractmethod
    def _check_first(self) -> None:
        """Raises an error if the first pipelines can't be used; called before their first run."""

    def _run_of(self, position: P) -> P:
        """Returns the position of the next run at or after a position."""
        return position

    def _exhausted_retries(self, position: P, failed: EnvironmentFailure) -> RuntimeError:
        return RuntimeError(
            f"{self._label(position)} failed because of the machine or the network, not because of "
            f"its records. The next call tries again. {failed}"
        )

    def _not_fed(
        self, position: P, supply: RowSupply[P], run: int, error: BaseException
    ) -> Outcome[P]:
        """Returns the outcome of a run whose rows the supply could not provide.

        Raises:
            RuntimeError: If an ``external_source`` of the graph has ended.
            Exception: The error of the supply, if the next call must try the same batch again.
        """
        self._stop()
        if isinstance(error, SourceEnded):
            raise RuntimeError(
                f"{self._label(position)} can't be read: an external_source of the graph has ended "
                "before the records. Pass cycle=True to it, or a source that does not end"
            )
        if not isinstance(error, NoStandIn):
            raise error from None
        bad_records = self._bad_records(self._label(position), error.errors)
        return self._without_batch(position, supply, run, bad_records)

    # Pipelines

    def drop(self) -> None:
        """Frees the pipelines, the supply and the peeked batch; the next use builds pipelines."""
        supply, self._supply = self._supply, None
        super().drop()
        if supply is not None:
            supply.close()

    def _runner_at(self, position: P) -> Runner:
        return self._pipelines_at(position)[0]

    def _pipelines_at(self, position: P) -> tuple[Runner, RowSupply[P]]:
        """Returns the pipelines, moved to a position or built at it, and their supply."""
        if self.closed:
            raise ValueError(CLOSED)
        position = self._run_of(position)
        if self._runner is None or self._supply is None:
            return self._build(position)
        if not self._supply.is_at(self._runs_taken, position):
            self._move_to(self._runner, self._supply, position)
        return self._runner, self._supply

    def _move_to(self, runner: Runner, supply: RowSupply[P], position: P) -> None:
        """Moves the next run to a position, and drops the batches that DALI has prefetched."""
        if runner.source_failed():  # for a prefetched run
            self._stop()
            self._build(position)
            return
        runner.drain()
        self._runs_taken = supply.next_run
        supply.seek(position)

    def _build(self, position: P) -> tuple[Runner, RowSupply[P]]:
        """Builds pipelines at a position; returns the pipelines and their supply."""
        self.process = os.getpid()
        if self._supply is None:
            self._supply, self._factory = self._open()
        supply = self._supply
        supply.next_run = self._runs_taken = 0
        try:
            supply.seek(position)
            runner = self._runner = self._started(position)
        except BaseException:
            self._stop()
            raise
        return runner, supply

    def _started(self, position: P) -> Runner:
        """Returns new pipelines at a position; the supply has already moved there."""
        return self._first_look(self._new_runner())

    def _new_runner(self, checkpoints: Sequence[bytes] | None = None) -> Runner:
        """Returns new pipelines, restored from DALI's checkpoints if checkpoints are given."""
        self._factory.set_seed(self._seed)
        return Runner(self._factory.build(checkpoints), gradual=self._gradual)

    def _first_look(self, runner: Runner) -> Runner:
        """Learns the outputs and operators of the first pipelines; returns the given pipelines."""
        if self._learned:
            return runner
        self.learn_outputs(runner.pipelines[0], self._factory.name)
        first, described = (runner.checkpoints() or ())[:1], description_of(runner.pipelines[0])
        self._random = functools.cache(lambda: random_state.stateful(*first))
        if self._graph is not None:
            self._graph.read_operators(described.operators)
        self._check_first()
        inputs = {} if self._graph is None else self._graph.inputs
        self._operators = description(runner.pipelines[0], described, self._batch_map_names, inputs)
        self._learned = True
        return runner

    def draws_numbers(self) -> bool:
        """Returns whether the graph draws random numbers; False before pipelines are built."""
        runner = self._runner
        drawn = runner is not None and described_draws(runner.pipelines[0])
        return bool(drawn) or super().draws_numbers()

    def _pipelines(
        self, rows_of: RowsOf, differing: Sequence[Mapping[str, Any]], **options: Any
    ) -> GraphPipelineFactory:
        """Returns a factory of pipelines that are fed with the rows that ``rows_of`` returns.

        A pipeline is defined by `graph` below, which calls `FedGraph`, which calls the user's
        function. When the pipeline runs, DALI calls `inputs_of` and `draws_of` for the values.

        Args:
            rows_of: Returns the rows of a pipeline in a run.
            differing: For each pipeline, the arguments that differ between the pipelines.
            **options: Arguments of ``nvidia.dali.pipeline_def`` that override `feed_by`'s.
        """
        define = self._define

        # With enable_conditionals=True, DALI rewrites `graph` and the functions that it calls,
        # except functions with this decorator.
        @do_not_convert
        def inputs_of(run: int, part: int, name: str) -> Any:
            return rows_of(run, part).inputs(name)

        @do_not_convert
        def draws_of(run: int, part: int) -> DrawnRows:
            return rows_of(run, part)

        def graph(part: int) -> Any:
            def input_of(name: str) -> Callable[[int], Any]:
                return lambda run: inputs_of(run, part, name)

            return define(input_of, lambda run: draws_of(run, part))

        graph.__name__ = getattr(self._function, "__name__", repr(self._function))  # for errors
        call = {**self._call, **options}
        factory = GraphPipelineFactory(
            graph, (), call, differing, self._config.on_host, self._function
        )
        factory.set_seed(self._seed)
        return factory

    # Batches

    @property
    def _passed_names(self) -> Sequence[str]:
        return () if self._graph is None else self._graph.passed

    def _run_at(self, position: P) -> Outcome[P] | None:
        runner, supply = self._pipelines_at(position)
        batch: Batch | None = None
        error: Exception | None = None
        run = self._runs_taken
        self._runs_taken += 1  # a failed run counts as well
        try:
            batch = runner.take(lambda outputs: self._batch(outputs, runner, supply, run))
        except (SourceError, SourceEnded) as failed:
            return self._not_fed(position, supply, run, failed.__cause__ or failed)
        except _BadRecords as failed:
            error = self._bad_records(self._label(position), failed.bad, with_dali_text=True)
        except RuntimeError as failed:
            return self._failed(position, supply, run, failed)
        except RaggedError as failed:
            rows = supply.rows(run, failed.pipeline)
            error = failed.named({row: rows.name(row) for row in failed.rows})
        except Exception as failed:  # the outputs can't be converted to arrays
            error = failed
        masked: FailedBatch | None = None
        may_have_masked = error is None and self._config.on_error == "mask"
        if may_have_masked and (bad := self._bad_of(supply, run, valid=True)):
            named = self._bad_records(self._label(position), bad, outcome="has bad records")
            masked = FailedBatch(*self._epoch_and_step(position), str(named), named.files)
        after = self._after(position, supply, run, runner)
        if self._supply is supply:  # another thread may have closed the supply
            supply.forget(run)
        failures = int(isinstance(error, (BatchError, RecordError)))
        return Outcome(after, batch, error, masked=masked, failures=failures)

    def advance(self) -> None:
        """Moves past the batch that `peek` returns."""
        if self._graph is not None and self._graph.lost_numbers:
            self._graph.warn_of_lost_numbers()
        super().advance()

    def _all_rows(self, supply: RowSupply[P], run: int) -> list[RowBatch]:
        """Returns the rows of each pipeline in a run."""
        return [supply.rows(run, part) for part in range(len(self._pipeline_arguments))]

    def _batch(
        self, outputs: Sequence[Outputs], runner: Runner, supply: RowSupply[P], run: int
    ) -> Batch:
        """Returns the batch of a run: DALI's outputs, masks, and values that bypass the graph.

        Raises:
            _BadRecords: If the run has bad records, unless ``on_error`` is "mask".
        """
        if self._config.on_error != "mask" and (bad := self._bad_of(supply, run)):
            raise _BadRecords(bad)
        parts = self._all_rows(supply, run)
        return self._batch_of(self.make_batch, outputs, parts, not runner.dynamic)

    def _batch_of(
        self,
        make_batch: BatchMaker,
        outputs: Sequence[Outputs],
        parts: Sequence[RowBatch],
        copy: bool,
    ) -> Batch:
        """Returns a batch: DALI's outputs, masks, and values that bypass the graph.

        Args:
            make_batch: Creates the batch.
            outputs: The outputs of each pipeline.
            parts: The rows of each pipeline.
            copy: Whether arrays are copies, because DALI reuses the buffers of the outputs.
        """
        masks = []
        for rows in parts:
            valid = rows.valid.copy()
            valid[list(rows.errors)] = False
            masks.append(valid)
        graph = self._graph
        if graph is None:
            return make_batch(outputs, masks, copy)
        columns: dict[str, Any] = {
            name: concatenated([rows.column(name) for rows in parts]) for name in graph.passed
        }
        source, column_of = self._row_source, graph.stacked
        layouts = [rows.layout for rows in parts if rows.layout is not None]
        row_values: dict[str, list[NDArray[Any]]] = {}
        if source is not None and layouts:
            masks = [*map(source.mask_of_records, layouts, masks)]
            if columns:
                columns = _by_row(source, columns, column_of, masks, layouts)
                column_of = _unchanged
            masks = [*map(source.column_of_rows, layouts, masks)]
            values_of_parts = [rows.row_values() for rows in parts]
            row_values = {k: [values[k] for values in values_of_parts] for k in source.row_fields}
        batch = make_batch(outputs, masks, copy, layouts, row_values)
        make_batch.add_columns(batch, columns, [*map(len, masks)], column_of)
        return batch

    # Records that can't be read or processed

    def _bad_of(self, supply: RowSupply[P], run: int, valid: bool = False) -> Bad:
        """Returns the name and error of each bad record of a run; ``valid`` leaves out padding."""
        return [
            (rows.name(row), error)
            for rows in self._all_rows(supply, run)
            for row, error in sorted(rows.errors.items())
            if rows.valid[row] or not valid
        ]

    def _bad_records(
        self, label: str, bad: Bad, with_dali_text: bool = False, outcome: str = _FAILED
    ) -> BatchError | RecordError:
        """Returns an error that names the bad records of a batch.

        Args:
            label: The name of the batch; see `_label`.
            bad: The name and the error of each bad record.
            with_dali_text: Whether to include DALI's full message.
            outcome: The words of the message about the batch, such as "has bad records".
        """
        groups: dict[str, list[tuple[str, Exception]]] = {}
        for name, reason in bad:
            unusable = isinstance(reason, UnusableRecord)
            kind = reason.failure.operator if isinstance(reason, UnusableRecord) else str(reason)
            groups.setdefault(f"{unusable} {kind}", []).append((name, reason))
        texts, dali_text = [], ""
        for group in groups.values():
            names, first = list(dict.fromkeys(name for name, _ in group)), group[0][1]
            if isinstance(first, UnusableRecord):
                texts.append(describe(first.failure, names, every=False))
                dali_text = dali_text or first.text
            else:
                texts.append(
                    self._unfit_text.format(
                        names=first_names(names), kind=type(first).__name__, error=first
                    )
                )
        files = tuple(dict.fromkeys(name for group in groups.values() for name, _ in group))
        if len(texts) > _MOST_REASONS:
            texts[_MOST_REASONS:] = [f"{len(texts) - _MOST_REASONS} further reasons"]
        text = "; ".join(texts)
        if with_dali_text:
            text = with_dali(text, dali_text, files)
        unfit = not any(isinstance(reason, UnusableRecord) for _, reason in bad)
        error = self._batch_error(label, text, unfit=unfit, outcome=outcome)
        error.files = files
        error.__cause__ = bad[0][1]
        return error

    def _batch_error(
        self,
        label: str,
        text: str,
        is_graph_error: bool = False,
        unfit: bool = False,
        outcome: str = _FAILED,
    ) -> BatchError | RecordError:
        """Returns the error of a failed batch; its message begins with the batch's name."""
        kind = GraphError if is_graph_error else self._error_kind(unfit)
        return kind(f"{label} {outcome}: {text}")

    def _error_kind(self, unfit: bool) -> type[BatchError] | type[RecordError]:
        """Returns the class of the error of a batch with bad records.

        Args:
            unfit: True if all bad records can't be read, or don't fit the graph's inputs; False if
                DALI failed to process some of the bad records.
        """
        return BatchError

    def _failed(
        self, position: P, supply: RowSupply[P], run: int, error: RuntimeError
    ) -> Outcome[P] | None:
        """Finds the records that made a run fail, and returns the outcome of the run.

        Returns:
            The outcome, or None if the run must be repeated, with stand-ins for the bad records.

        Raises:
            EnvironmentFailure: If the machine or the network caused the failure.
        """
        failure = failure_of(error)
        if failure.environment or (failure.is_read and not can_open_files()):
            raise EnvironmentFailure(failure.message) from error
        used = sample_numbers(self._all_rows(supply, run))
        samples = self._find_bad(supply, used, failure)
        unread = self._bad_of(supply, run)
        cause = cause_of(
            failure,
            len(samples),
            len(used),
            bool(unread),
            lambda: self._works_elsewhere(supply, run),
        )
        text = advice.run_message(error)
        batch_error: BatchError | RecordError
        if cause is Cause.ENVIRONMENT:
            raise EnvironmentFailure(failure.message) from error
        if cause is Cause.RECORDS:
            reason = UnusableRecord(failure, text)
            # With stand-ins, random operators advance as in any other run.
            replace = self._config.on_error == "mask" or self._keeps_checkpoints
            replace = replace and bool(samples)
            bad = [*unread, *((name, reason) for name in self._names(supply, run, samples))]
            for sample in samples:
                supply.remember(sample, reason, replace)
            if replace and self._has_stand_in(supply, run, failure):
                self._stop()  # an operator may have kept data of a bad record
                return None
            batch_error = self._bad_records(self._label(position), bad, with_dali_text=True)
        else:
            every = cause is Cause.GRAPH
            message = with_dali(describe(failure, (), every), text)
            batch_error = self._batch_error(self._label(position), message, every)
            batch_error.unexplained = not failure.reads_file
        batch_error.__cause__ = error
        outcome = self._without_batch(position, supply, run, batch_error)
        # New pipelines would draw the first random numbers again.
        if not self._random() or self._keeps_checkpoints:
            self._stop()
        return outcome

    def _without_batch(
        self, position: P, supply: RowSupply[P], run: int, error: BatchError | RecordError
    ) -> Outcome[P]:
        """Returns the outcome of a run that failed, and forgets the run."""
        after = self._after(position, supply, run, None)
        supply.forget(run)
        return Outcome(after, error=error, failures=1)

    def _find_bad(self, supply: RowSupply[P], used: Indices, failure: Failure) -> list[int]:
        """Returns the samples of a failed batch that fail alone; runs parts of the batch again."""

        def run_alone(indices: Sequence[int]) -> Failure | None:
            return self._run_alone(supply.alone(used[list(indices)]))

        return [int(used[index]) for index in find_bad(len(used), run_alone, failure)]

    def _names(self, supply: RowSupply[P], run: int, samples: Sequence[int]) -> Iterator[str]:
        """Yields the name of each record of some samples in a run, except of stand-ins."""
        for rows in self._all_rows(supply, run):
            for row in np.flatnonzero(np.isin(rows.samples, samples)).tolist():
                if row not in rows.errors:
                    yield rows.name(row)

    def _works_elsewhere(self, supply: RowSupply[P], run: int) -> bool:
        """Returns whether the graph can process any record; tries some records of other runs."""
        if not self._works:
            probes = itertools.islice(supply.probes(run), _MOST_PROBED)
            self._works = any(self._is_good(supply, sample) for sample in probes)
        return self._works

    def _has_stand_in(self, supply: RowSupply[P], run: int, failure: Failure) -> bool:
        """Returns whether a record can replace a run's bad records; remembers samples that fail."""
        for sample in supply.stand_ins(run):
            rows = self._readable(supply, sample)
            if rows is None:
                continue
            if self._run_alone(rows) is None:
                return True
            supply.remember(sample, UnusableRecord(failure), True)
        return False

    def _is_good(self, supply: RowSupply[P], sample: int) -> bool:
        """Returns whether a sample can be read and processed."""
        rows = self._readable(supply, sample)
        return rows is not None and self._run_alone(rows) is None

    def _readable(self, supply: RowSupply[P], sample: int) -> RowBatch | None:
        """Returns the row of a sample alone; None if its record can't be read, or is bad."""
        try:
            rows = supply.alone(np.array([sample], np.int64))
            return None if rows.errors else rows
        except Exception as error:
            if isinstance(error, WorkersEnded) or not is_of_record(error):
                raise
            return None

    def _run_alone(self, rows: RowBatch) -> Failure | None:
        """Runs some rows in a separate pipeline; returns the failure, or None if the run succeeds.

        Raises:
            EnvironmentFailure: If the machine or the network caused the failure.
        """
        failure = failure_alone(self._runner_of(rows))
        if failure is not None and failure.environment:
            raise EnvironmentFailure(failure.message)
        return failure

    def _runner_of(self, rows: RowBatch) -> Runner:
        """Returns a separate pipeline that makes a batch of some rows."""
        differing = {**self._pipeline_arguments[0], "batch_size": len(rows.valid)}
        factory = self._pipelines(lambda run, part: rows, [differing], prefetch_queue_depth=1)
        return Runner(factory.build())

    def _batch_alone(self, label: str, rows: RowBatch) -> Batch:
        """Returns the batch of some rows, made by a separate pipeline, on the pipeline's device.

        Args:
            label: The name of the batch, for errors.
            rows: The rows.

        Raises:
            BatchError: If a record is bad.
            Exception: An error of the source or of the machine.
        """
        config = dataclasses.replace(
            self._config, sharding=None, devices=None, pmap_compatible=False
        )
        make_batch = BatchMaker(config, choose_placement(config))
        make_batch.names, make_batch.bfloat16 = self.make_batch.names, self.make_batch.bfloat16
        bad: list[tuple[str, Exception]] = []
        batch: Batch = {}
        try:
            if not rows.errors:
                runner = self._runner_of(rows)
                try:
                    batch = runner.take(
                        lambda outputs: self._batch_of(
                            make_batch, outputs, [rows], not runner.dynamic
                        )
                    )
                finally:
                    runner.close()
        except NoStandIn as error:
            bad += error.errors
        except SourceError as error:
            raise error.original() from None
        except RuntimeError as error:
            failure = failure_of(error)
            if failure.environment:
                raise
            reason = UnusableRecord(failure, advice.run_message(error))
            bad += [(rows.name(row), reason) for row in range(len(rows.valid))]
        # Draws may have refused rows.
        bad = [(rows.name(row), error) for row, error in sorted(rows.errors.items())] or bad
        if bad:
            raise self._bad_records(label, bad, with_dali_text=True, outcome="failed")
        return batch
