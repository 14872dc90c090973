"""The engine of an indexed source: pipelines that are fed with the rows of a position."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..config import IteratorConfig
from ..errors import BatchError, GraphError, RaggedError, StateError
from ..order.epochs import EpochPlan, count_rows
from ..order.samples import SamplePlan, SamplePosition, pads_by_default
from ..order.shuffle import Indices
from ..pipeline import advice
from ..pipeline.bad_record import (
    MOST_SKIPPED,
    can_skip,
    describe,
    failure_alone,
    find_bad,
    listed,
    with_printable,
)
from ..pipeline.batch import Batch
from ..pipeline.dali_pipeline import check_outputs, graph_lines, queue_depth
from ..pipeline.engine import CLOSED, EpochEngine, Outcome, log_failure
from ..pipeline.failure import RETRY_DELAYS, EnvironmentFailure, Failure, failure_of, is_environment
from ..pipeline.pipeline_source import FunctionSource
from ..pipeline.processes import is_one_of_several
from ..pipeline.runner import Outputs, Runner, SourceEnded, SourceError
from ..pipeline.schema import of_fields
from ..pipeline.shards import shard_pipelines
from ..random.seeds import ShardSeed
from ..sources import state as states
from ..sources.identity import stated_identity
from ..sources.source import Source
from ..state import random_state
from ..state.agreement import Values
from ..state.envelope import damaged
from ..state.operators import operators_of
from ..state.position import FailedBatch
from ..stats import InputStats
from ..workers import WorkersEnded
from .graph import FieldGraph
from .read_ahead import Feed, OnceRead, RowRange, Rows, SomeRows
from .stand_ins import (
    BadSamples,
    NoStandIn,
    UnusableRecord,
    across_epoch,
    digest_of,
    stand_ins,
)

_MOST_MASKED = 1000  # batches whose masked records are remembered, to log them once
_MOST_PROBED = 24  # records that are tried before the graph is at fault
_READ_AHEAD = 2  # runs that are read before DALI asks for them


_Bad = Sequence[tuple[int, Exception]]  # numbers of records, and their errors


class _BadRecords(Exception):
    """Records of a batch can't be read or processed."""

    def __init__(self, bad: _Bad):
        super().__init__()
        self.bad = bad


def _warn_of_repeats(plan: SamplePlan) -> None:
    """Warns of batches that have every record more than twice."""
    if plan.batch_size > 2 * plan.num_samples:
        warnings.warn(
            f"batch_size={plan.batch_size} is more than twice the {plan.num_samples} records of "
            "the source: each batch reads and decodes records several times, for padding or for "
            f"further epochs. Pass batch_size={plan.num_samples} or less",
            RuntimeWarning,
            stacklevel=2,
        )


def _mixed(plan: SamplePlan, position: SamplePosition) -> str:
    """The warning of a last batch with records of the next epoch, without shuffling."""
    rows = position.sample - plan.end(position)
    return (
        f"the last batch of epoch {position.epoch} has {rows} records of the next epoch, since "
        f"batch_size={plan.batch_size} does not divide the {plan.num_samples} records, and the "
        "next epoch begins after them: an evaluation counts them wrongly. Pass mask='mask' to mark "
        "padding, last_batch_policy=LastBatchPolicy.PARTIAL for a smaller batch, or "
        "LastBatchPolicy.DROP to leave it out; to train without end, use stream(...)"
    )


class SourceEngine(EpochEngine[SamplePosition]):
    """Pipelines that are fed with the rows of a position; see `Engine`.

    A run of the pipelines follows from its position alone, so that the pipelines go anywhere: the
    batches that DALI has prepared are dropped, and the next ones are those of the new position.

    Args:
        source: The source.
        graph: The graph's function over the source's fields.
        call: Arguments of ``nvidia.dali.pipeline_def``; ``batch_size`` is the global one with a
            sharding, else that of this process.
        hosts: Number of this process and of all, where each makes a slice of the global batch.
        config: The iterator's arguments.
    """

    _marked = (
        *EpochEngine._marked,
        *("_seed", "_graph_in_state", "_num_failed", "_resumed"),
    )

    def __init__(
        self,
        source: Source,
        graph: FieldGraph,
        call: Mapping[str, Any],
        hosts: tuple[int, int],
        config: IteratorConfig,
    ):
        call = dict(call)
        seed = ShardSeed.of(call.pop("seed", None), hosts[0])
        super().__init__(graph.__name__, SamplePosition(), config)
        if config.on_error == "skip" and (config.over_processes or hosts[1] > 1):
            raise ValueError(
                "on_error='skip' over several processes or hosts, one of which would then be a "
                "batch ahead of the others: use 'mask'"
            )
        if hosts[1] == 1 and not config.over_processes and is_one_of_several():
            warnings.warn(
                "several processes and no sharding over them: each gets all rows of the source. "
                "Pass a sharding of a mesh over all devices, jax.sharding.Mesh(...), for global "
                "batches of which each process makes its rows",
                RuntimeWarning,
                stacklevel=2,
            )
        shards = self._data_shards
        each = shard_pipelines(shards, call["batch_size"], call)
        rows = each[0]["batch_size"]
        for name in each[0]:
            call.pop(name, None)
        call["exec_dynamic"] = True  # others die for good with a record that fails, a batch early
        if shards:
            parts = [RowRange(s.shard_id * rows, (s.shard_id + 1) * rows) for s in shards]
            batch_size = rows * shards[0].num_shards
        else:
            if hosts[1] > 1 and config.last_batch_policy is LastBatchPolicy.PARTIAL:
                raise ValueError(
                    f"LastBatchPolicy.PARTIAL over {hosts[1]} shards of the batch, of which some "
                    "would have no sample: use FILL and a mask (pad='mask'), or DROP"
                )
            parts = [RowRange(hosts[0] * rows, (hosts[0] + 1) * rows)]
            batch_size = rows * hosts[1]
        padded = config.last_batch_padded
        if padded is None:
            padded = pads_by_default(config.last_batch_policy, config.mask)
        rules = config.last_batch_policy, padded
        self._samples = SamplePlan(len(source), batch_size, *rules)
        _warn_of_repeats(self._samples)
        self._may_mix_epochs = not (padded or config.shuffle or config.endless)
        self.plan = EpochPlan(len(source), 1, batch_size, *rules)
        self.batch_size, self.shards = rows, (0,)
        self.device_ids = tuple(one.get("device_id", call.get("device_id")) for one in each)
        self._source, self._graph = source, graph
        self._parts = parts
        self._seeded, self._seed = not seed.is_default, seed.seed
        self._call = call
        numbers = [shard.shard_id for shard in shards] or [hosts[0]]
        self._each = [
            {**one, "part": k, "seed": ShardSeed.of(seed, number)}
            for k, (one, number) in enumerate(zip(each, numbers, strict=True))
        ]
        self._feed: Feed | None = None
        self._runner: Runner | None = None
        self._taken = 0  # runs of the present pipelines
        self._num_failed = 0  # batches that were not delivered, or have masked records
        # The last batches with masked records: the names by epoch and step.
        self._masked: dict[tuple[int, int], set[str]] = {}
        self._known = BadSamples()
        self._operators: tuple[str, ...] = ()
        # A first state stays what it was before the pipelines were built.
        self._graph_in_state = False
        # Operators of ``fn.random``, whose numbers depend on the runs before: no state has them.
        self._random: list[str] = []
        self._resumed = False  # whether a state or a seek set the position
        self.compare_processes(graph.__name__, self._outline())

    def _outline(self) -> dict[str, Any]:
        """What processes must have in common, as far as it is known without a record."""
        config, plan = self._config, self._samples
        return {
            "function": self._graph.__name__,
            "outputs": ", ".join(config.output_map),
            "source": type(self._source).__name__,
            "number of records": plan.num_samples,
            "global batch": plan.batch_size,
            "batches per epoch": self.plan.delivered(0) if self.plan is not None else -1,
            "seed": self._seed,
            "shuffle": str(config.shuffle),
            "last batch": plan.policy.name,
            "padding": "padded" if plan.padded else "unpadded",
            "mask": str(config.mask),
            "on_error": config.on_error,
        }

    def _shared_values(self) -> Values:
        """What must be equal in all processes; see `Engine`."""
        self.prepare()
        try:
            identity = stated_identity(self._source)[:16]
        except StateError:  # a record can't be read, which is said when its batch is due
            identity = "unreadable"
        here = self.position
        return {
            **self._outline(),
            "records (names, sizes, bytes)": identity,
            "operators": list(self._operators),
            "position": f"epoch {here.epoch}, sample {here.sample}",
        }

    # The consumer's position

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Number of batches of the epoch behind the consumer, in batches of the present size."""
        return self._samples.step(self.position)

    @property
    def num_failed(self) -> int:
        """Number of batches of this process that failed, or have masked records."""
        return self._num_failed

    def length(self) -> int:
        """Number of batches of the epoch: those behind the consumer, and those to come."""
        return self._samples.length(self.position)

    def following_epoch(self) -> int:
        """Number of the next epoch that has a batch of its own."""
        end = self._samples.skip(self.position, self._samples.remaining(self.position))
        return self._samples.next_epoch(end).epoch

    def skip(self, batches: int) -> int:
        """Moves behind so many batches, or to the end of the epoch; returns their number."""
        count = min(batches, self._samples.remaining(self.position))
        self.go_to(self._samples.skip(self.position, count))
        return count

    def at_end(self) -> bool:
        """Whether every batch of the epoch is behind the consumer."""
        return self._samples.remaining(self.position) == 0

    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next one."""
        self.go_to(self._samples.next_epoch(self.position))

    def rewind(self) -> None:
        """Moves back to the start of the epoch."""
        self.go_to(dataclasses.replace(self.position, sample=self.position.start))

    def locate(self, batch: int) -> tuple[int, int]:
        """The epoch and the step of a batch counted over all epochs; see `EpochEngine`."""
        if batch and self._config.on_error == "skip":
            raise ValueError(
                f"seek_step({batch}) with on_error='skip': a step counts delivered batches, and "
                "the number of batches that were skipped before it is not known. Restore a state "
                "by set_state(), or use on_error='mask', which delivers every batch"
            )
        return self._samples.locate(batch)

    def seek(self, epoch: int, step: int, first: int = 0) -> None:
        """Moves to a batch, counted in batches of this size from the start of the first epoch.

        Raises:
            ValueError: If there is no such batch.
            StateError: If the graph draws numbers by ``fn.random``, and the batch is neither the
                next one nor the first one.
        """
        position = self._samples.seek(epoch, step, first)
        runs = [self._samples.run_from(here) for here in (self._beginning, self.position)]
        self._resumed = self._samples.run_from(position) != runs[0]
        if self._samples.run_from(position) not in runs:
            self._check_resumable()
        self.go_to(position)

    def begin_with(self, epoch: int) -> None:
        """Makes an epoch the first one, and moves to its start."""
        self._beginning = self._samples.seek(epoch, first=epoch)
        self.go_to(self._beginning)

    def go_to(self, position: SamplePosition) -> None:
        """Moves to a position."""
        self._resumed = self._resumed and position != self._beginning
        if position != self.position:
            self.position, self._outcome = position, None
            self._graph_in_state = bool(self._operators)

    def advance(self) -> None:
        """Moves behind the batch that `peek` gives."""
        outcome = self.peek()
        if self._may_mix_epochs and self._samples.mixes_epochs(outcome.after):
            self._may_mix_epochs = False  # before it, in case warnings are errors
            warnings.warn(_mixed(self._samples, outcome.after), RuntimeWarning, stacklevel=2)
        self._num_failed += outcome.failures
        super().advance()
        self._graph_in_state = True

    # States

    def get_state(self) -> dict[str, Any]:
        """The consumer's position, as a plain JSON value.

        Raises:
            StateError: If the graph draws numbers by ``fn.random``.
        """
        self._check_resumable()
        stream = self._stream()
        if not self._graph_in_state:
            stream = dataclasses.replace(stream, operators=())
        return states.encode(self.position, stream)

    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state; see `Engine`."""
        position, stream = states.read(state)
        if stream.operators and not self._operators:
            self.prepare()
        self._check_resumable()
        states.check(stream, self._stream(), self._seeded, allow, named)
        if not self._samples.has(position):
            raise damaged(f"no epoch of this stream has {position}")
        if stream.seed != self._seed:
            self._seed = stream.seed
            self.drop()
        self._resumed = position != self._beginning
        self.go_to(position)
        self._graph_in_state = bool(stream.operators)

    def checkpoints(self) -> list[bytes]:
        """The state as bytes, one piece for all pipelines."""
        return [json.dumps(self.get_state()).encode()]

    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves where `checkpoints` said; see `Engine`."""
        if len(pieces) != 1:
            raise StateError(
                f"{len(pieces)} checkpoints, where an iterator over a source has one: pass what "
                "checkpoints() of one gave"
            )
        self.set_state(pieces[0], allow, ())

    def keep_seed(self, other: SourceEngine) -> None:
        """Takes the seed that a state brought to another engine; nothing is built yet."""
        self._seed = other._seed

    def _stream(self) -> states.Stream:
        policy = self._config.last_batch_policy.name
        order = "shuffled" if self._config.shuffle else "sequential"
        padded = "padded" if self._samples.padded else "unpadded"
        return states.Stream(
            seed=self._seed,
            identity=stated_identity(self._source),
            order=f"{order} {policy} {padded} {self._samples.num_samples}",
            outputs=tuple(self._config.output_map),
            operators=self._operators,
        )

    # Pipelines

    def prepare(self) -> None:
        """Builds the pipelines where they are not, to stand at the position."""
        self._runner_at(self.position)

    def schedule(self) -> None:
        """Builds the pipelines where they are not, and schedules runs; waits for none."""
        self._runner_at(self.position)[0].schedule()

    @contextlib.contextmanager
    def replicas(self) -> Iterator[tuple[list[Pipeline], str]]:
        """Pipelines of the same graph, to run beside these; see `Engine`."""
        feed = self._new_feed()
        feed.start_at(self._samples.run_from(self.position))
        try:
            rows = OnceRead(feed)
            source = self._pipelines(rows, self._each)
            pipelines = [define(None) for define in source.definitions()]
            rows.kept = max(map(queue_depth, pipelines))
            yield pipelines, f"source {type(self._source).__name__}"
        finally:
            feed.close()

    def _new_feed(self) -> Feed:
        graph, shuffle = self._graph, self._config.shuffle
        return Feed(
            self._source,
            self._samples,
            self._parts,
            graph.names,
            self._seed,
            shuffle,
            _READ_AHEAD,
            graph.pictures,
            self._known,
        )

    def _sample(self) -> Batch:
        """The next epoch's first batch without an error, which is prepared anyway."""
        here = self._samples.next_epoch(self.position)
        for _ in range(MOST_SKIPPED):
            outcome = self._outcome_at(self._samples.run_from(here))
            if not can_skip(outcome.error):
                return outcome.unwrap()
            here = outcome.after
        return outcome.unwrap()

    def _number(self, outcome: Outcome[SamplePosition]) -> tuple[int, int]:
        here = self._samples.skip(outcome.after, -1)  # batches may have been left out before it
        return here.epoch, self._samples.step(here)

    def _seed_of_keys(self) -> int:
        return self._seed

    def count(self, stats: InputStats, outcome: Outcome[SamplePosition]) -> None:
        """Counts a batch that is delivered."""
        here = self._samples.skip(outcome.after, -1)
        parts = [self._samples.rows(here, part.first, part.last) for part in self._parts]
        rows = sum(len(part.valid) for part in parts)
        valid = sum(int(part.valid.sum()) for part in parts)
        counts = count_rows(rows, valid, self._samples.policy, self._samples.padded)
        errors = self.num_failed + outcome.failures
        stats.delivered(*self._number(outcome), *counts, errors)

    def _runner_at(self, here: SamplePosition) -> tuple[Runner, Feed]:
        if self.closed:
            raise ValueError(CLOSED)
        here = self._samples.run_from(here)
        if self._runner is None or self._feed is None:
            return self._build(here)
        if self._feed.position(self._taken) != here:
            self._go_back(self._runner, self._feed, here)
        return self._runner, self._feed

    def _go_back(
        self, runner: Runner, feed: Feed, here: SamplePosition, failed: bool = False
    ) -> None:
        """Has the next run be that of a position; what DALI has prepared is dropped."""
        # Pipelines whose source raised for a run that is not taken, or in which an operator may
        # have learnt from a bad record what all others must be like.
        if failed or runner.source_failed():
            runner.close()
            self._runner = None  # should building new ones fail
            feed.next_run = 0
            feed.start_at(here)
            self._runner, self._taken = self._started(feed), 0
            return
        runner.drain()
        self._taken = feed.next_run
        feed.start_at(here)

    def _build(self, here: SamplePosition) -> tuple[Runner, Feed]:
        self.process = os.getpid()
        feed = self._new_feed()
        feed.start_at(here)
        try:
            runner = self._started(feed)
        except BaseException:
            feed.close()
            raise
        self._runner, self._feed, self._taken = runner, feed, 0
        try:
            if not self._operators:
                self._learn(runner)
            if self._resumed:
                self._check_resumable()
        except BaseException:
            self.drop()
            raise
        return runner, feed

    def _started(self, feed: Feed) -> Runner:
        """Builds pipelines."""
        return Runner(self._pipelines(feed, self._each).build())

    def _learn(self, runner: Runner) -> None:
        """Looks at the first pipelines that were built."""
        check_outputs(runner.pipelines[0], self._config.output_map)
        checkpoints = runner.checkpoints() or ()
        stateful = [random_state.operators(one) for one in checkpoints[:1]]
        self._random = [name for operators in stateful for name, has in operators.items() if has]
        self._operators = tuple(graph_lines(runner.pipelines, self._batch_map_names))
        self._graph.learn(operators_of(runner.pipelines[0]))

    def _check_resumable(self) -> None:
        """Raises StateError if the graph draws numbers that depend on the runs before."""
        if self._random:
            raise StateError(
                f"the graph draws random numbers by {self._random}, DALI's own operators, whose "
                "numbers depend on the batches before and are in no state of a source. Draw them "
                "for each record: draw.uniform() and the like (docs/randomness.md)"
            )

    def _pipelines(
        self, feeder: Feed | OnceRead | SomeRows, each: Sequence[Mapping[str, Any]], **more: Any
    ) -> FunctionSource:
        """What builds pipelines that are fed with some rows."""
        graph: Any = functools.partial(self._graph, feeder)
        graph.__name__ = self._graph.__name__  # for errors
        call = {**self._call, **more}
        function = self._graph.function
        source = FunctionSource(graph, (), call, each, self._config.on_host, function)
        source.set_seed(self._seed)
        return source

    def drop(self) -> None:
        """Frees the pipelines and what was peeked; the next use builds them, at the position."""
        runner, self._runner = self._runner, None
        feed, self._feed = self._feed, None
        self._outcome = None
        if runner is not None:
            runner.close()
        if feed is not None:
            feed.close()

    def _stop_waiting(self) -> None:
        feed = self._feed
        if feed is not None:
            feed.close()

    def __del__(self) -> None:
        # Rows refer to their feed: its threads would stay until Python's cyclic gc runs.
        feed: Feed | None = getattr(self, "_feed", None)
        if feed is not None:
            feed.close()

    # Batches

    def _next_outcome(self) -> Outcome[SamplePosition]:
        here, skipped = self.position, list[FailedBatch]()
        while True:
            outcome = self._outcome_at(here)
            if outcome.masked is not None:
                outcome = self._noted(outcome, outcome.masked)
            error = outcome.error
            if self._config.on_error != "skip" or error is None or not can_skip(error):
                return self._behind_skipped(outcome, skipped, self.step == 0)
            if (fault := self._fault_of_graph(error)) is not None:
                outcome = dataclasses.replace(outcome, error=fault)
                return self._behind_skipped(outcome, skipped, from_start=False)
            skipped.append(self._left_out(here.epoch, self._samples.step(here), error))
            here = outcome.after

    def _outcome_at(self, here: SamplePosition) -> Outcome[SamplePosition]:
        """Runs the batch at a position.

        Raises:
            Exception: The source's error, if no record can be read; the environment's, if retries
                failed. Nothing has moved.
        """
        if self._samples.remaining(here) == 0:
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
                self.drop()
                delay = next(delays, None)
                if delay is None:
                    raise self._not_lost(here, failed) from failed.__cause__
                time.sleep(delay)
                continue
            if outcome is not None:
                return outcome

    def _run_at(self, here: SamplePosition) -> Outcome[SamplePosition] | None:
        """As `_outcome_at`; None if the run has to be repeated, with other records in some rows."""
        after = self._samples.skip(here, 1)
        batch: Batch | None = None
        error: Exception | None = None
        runner, feed = self._runner_at(here)
        run, self._taken = self._taken, self._taken + 1  # whatever comes of it, it is used up
        try:
            batch = runner.take(lambda outputs: self._batch(outputs, runner, feed, run))
        except (SourceError, SourceEnded) as failed:
            self.drop()
            cause = failed.__cause__ or failed
            if not isinstance(cause, NoStandIn):
                raise cause from None
            bad = [(int(cause.records[row]), cause.errors[row]) for row in sorted(cause.errors)]
            return Outcome(after, error=self._bad_records(here, bad), failures=1)
        except _BadRecords as failed:
            error = self._bad_records(here, failed.bad)
        except RuntimeError as failed:
            return self._failed(here, runner, feed, run, failed)
        except RaggedError as failed:
            rows = feed.rows(run, failed.pipeline).read
            error = failed.named([self._name(int(record)) for record in rows.own_records])
        except Exception as failed:  # no array can be made of it
            error = failed
        masked: FailedBatch | None = None
        if error is None:
            self._works = True
            if self._config.on_error == "mask" and (bad := self._bad_of(feed, run, valid=True)):
                named = self._bad_records(here, bad)
                step = self._samples.step(here)
                masked = FailedBatch(here.epoch, step, str(named), named.files)
                del named  # as below
        if self._feed is feed:
            feed.forget(run)
        try:
            failures = int(isinstance(error, BatchError))
            return Outcome(after, batch, error, masked=masked, failures=failures)
        finally:
            del error  # its traceback has this frame: together they would keep the batch

    def _batch(self, outputs: Sequence[Outputs], runner: Runner, feed: Feed, run: int) -> Batch:
        """Makes the batch of a run."""
        if self._config.on_error != "mask" and (bad := self._bad_of(feed, run)):
            raise _BadRecords(bad)
        parts = [feed.rows(run, part) for part in range(len(self._parts))]
        masks = []
        for rows in parts:
            valid = rows.valid.copy()
            valid[list(rows.read.errors)] = False
            masks.append(valid)
        batch = self.make_batch(outputs, masks, not runner.dynamic)
        columns = {
            name: [value for rows in parts for value in rows.read.column(name)]
            for name in self._graph.passed
        }
        rows_of_parts = [len(rows.valid) for rows in parts]
        self.make_batch.add_columns(batch, columns, rows_of_parts, of_fields)
        return batch

    # Records that can't be read or processed

    def _bad_of(self, feed: Feed, run: int, valid: bool = False) -> list[tuple[int, Exception]]:
        """Returns the bad records of a run, of all pipelines; with ``valid`` without padding."""
        bad = []
        for part in range(len(self._parts)):
            rows = feed.rows(run, part)
            for row in sorted(rows.read.errors):
                if rows.valid[row] or not valid:
                    bad.append((int(rows.read.own_records[row]), rows.read.errors[row]))
        return bad

    def _bad_records(self, here: SamplePosition, bad: _Bad) -> BatchError:
        """Returns the error of a batch with bad records, which it names."""
        groups: dict[str, list[tuple[str, Exception]]] = {}
        for record, reason in bad:
            unusable = isinstance(reason, UnusableRecord)
            kind = reason.failure.operator if isinstance(reason, UnusableRecord) else "read"
            groups.setdefault(f"{unusable} {kind}", []).append((self._name(record), reason))
        texts = []
        for group in groups.values():
            names, first = list(dict.fromkeys(name for name, _ in group)), group[0][1]
            if isinstance(first, UnusableRecord):
                texts.append(describe(first.failure, names, every=False))
            else:
                texts.append(f"{listed(names)} can't be read. {type(first).__name__}: {first}")
        error = self._described(here, "; ".join(texts))
        error.files = tuple(dict.fromkeys(name for group in groups.values() for name, _ in group))
        error.__cause__ = bad[0][1]
        return error

    def _noted(
        self, outcome: Outcome[SamplePosition], masked: FailedBatch
    ) -> Outcome[SamplePosition]:
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
        self, here: SamplePosition, runner: Runner, feed: Feed, run: int, error: RuntimeError
    ) -> Outcome[SamplePosition] | None:
        """Finds the records that made a run fail; see `_run_at`."""
        failure = failure_of(error)
        if failure.environment:
            raise EnvironmentFailure(failure.message) from error
        parts = [feed.rows(run, part) for part in range(len(self._parts))]
        used = np.unique(np.concatenate([rows.read.samples for rows in parts]))

        def run_alone(places: Sequence[int]) -> Failure | None:
            return self._run_alone(feed, used[list(places)])

        samples = [int(used[k]) for k in find_bad(len(used), run_alone, failure)]
        reason = UnusableRecord(failure)
        every = len(samples) == len(used) and not failure.reads_file
        every = every and not self._works_elsewhere(feed, here)
        unread = self._bad_of(feed, run)
        dali = f"\nDALI says: {advice.of_run(error)}"
        described: BatchError
        if every or not (samples or unread or failure.reads_file):
            kind = GraphError if every else BatchError
            described = self._described(here, describe(failure, (), every) + dali, kind)
            described.unexplained = True
        elif not samples and not unread:  # a file's, but not of any record alone
            described = self._described(here, failure.message + dali)
        else:
            for sample in samples:
                self._remember(feed, sample, reason)
            masks = self._config.on_error == "mask"
            if masks and samples and self._has_stand_in(feed, here, failure):
                self._go_back(runner, feed, here, failed=True)
                return None
            own = [int(record) for rows in parts for record in self._own(rows, samples)]
            bad = [*unread, *((record, reason) for record in own)]
            described = self._bad_records(here, bad)
            described.args = (f"{described}{with_printable(dali, described.files)}",)
        described.__cause__ = error
        if self._random:  # new pipelines would draw the first numbers again
            feed.forget(run)
        else:
            self.drop()
        return Outcome(self._samples.skip(here, 1), error=described, failures=1)

    def _own(self, rows: Rows, samples: Sequence[int]) -> Indices:
        """Returns the records of some samples, without those that stand in for others."""
        rows_of = np.isin(rows.read.samples, samples)
        rows_of[list(rows.read.errors)] = False
        return rows.read.own_records[rows_of]

    def _remember(self, feed: Feed, sample: int, reason: UnusableRecord) -> None:
        """Remembers a sample that fails, and its record if it will fail in each epoch."""
        if reason.failure.reads_file and not self._random:
            rows = feed.alone(np.array([sample], np.int64)).rows.read
            columns = {name: rows.column(name) for name in self._graph.taken}
            digest = digest_of(self._source, columns, 0)
            self._known.add_record(int(rows.own_records[0]), digest, reason)
        if self._config.on_error == "mask":  # last: now another sample stands in for it
            self._known.add_sample(self._seed, sample, reason)

    def _works_elsewhere(self, feed: Feed, here: SamplePosition) -> bool:
        """Returns whether the graph works for any record, trying some across the epoch."""
        if not self._works:
            epoch = (here.sample + self._samples.batch_size - 1) // self._samples.num_samples
            tried = across_epoch(epoch, self._samples.num_samples)
            self._works = any(
                self._stands(feed, sample)
                for sample in itertools.islice(dict.fromkeys(tried), _MOST_PROBED)
            )
        return self._works

    def _has_stand_in(self, feed: Feed, here: SamplePosition, failure: Failure) -> bool:
        """Returns whether a record stands in for the bad ones of a batch; remembers bad ones."""
        batch = self._samples.rows(here).samples.tolist()
        first = self._parts[0].first
        for sample in dict.fromkeys(stand_ins(batch, first, self._samples.num_samples)):
            if self._known.sample_error(self._seed, sample) is not None:
                continue
            if self._stands(feed, sample):
                return True
            self._remember(feed, sample, UnusableRecord(failure))
        return False

    def _stands(self, feed: Feed, sample: int) -> bool:
        """Returns whether a sample can be read and processed."""
        samples = np.array([sample], np.int64)
        try:
            rows = feed.alone(samples)
            if rows.rows.read.errors:
                return False
        except Exception as error:
            if isinstance(error, WorkersEnded) or is_environment(error):
                raise
            return False
        return self._run_alone(feed, samples) is None

    def _run_alone(self, feed: Feed, samples: Indices) -> Failure | None:
        """Runs some samples in a pipeline of their own; returns the failure.

        Raises:
            EnvironmentFailure: If it says nothing about the samples.
        """
        each = {**self._each[0], "batch_size": len(samples)}
        source = self._pipelines(feed.alone(samples), [each], prefetch_queue_depth=1)
        failure = failure_alone(Runner(source.build()))
        if failure is not None and failure.environment:
            raise EnvironmentFailure(failure.message)
        return failure

    def _described(
        self, here: SamplePosition, text: str, kind: type[BatchError] = BatchError
    ) -> BatchError:
        """Returns the error of a batch, with its number."""
        step = self._samples.step(here)
        return kind(f"batch {step} of epoch {here.epoch} failed, and counts as delivered: {text}")

    def _not_lost(self, here: SamplePosition, failed: EnvironmentFailure) -> RuntimeError:
        """Returns the error of a batch that the next call tries again."""
        step = self._samples.step(here)
        return RuntimeError(
            f"batch {step} of epoch {here.epoch} can't be made, and not because of its records; "
            f"the next call tries it again: {failed}"
        )

    def _name(self, record: int) -> str:
        """A record's name, even if its source looks into the record for it."""
        try:
            return self._source.name(record)
        except Exception:
            return f"record {record}"
