"""`SourceEngine`: epochs, positions and states of pipelines that are fed by a record source."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from ..config import IteratorConfig
from ..errors import StateError
from ..messages.printable import printable_repr
from ..messages.redacted_errors import raise_redacted
from ..messages.user_warnings import warn_user
from ..order.epochs import EpochPlan, count_rows
from ..order.samples import SamplePlan, SamplePosition, TablePlan, pads_by_default
from ..order.shuffle import Indices
from ..pipeline.batch import Batch
from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.engine import EpochCursor, EpochEngine, Outcome
from ..pipeline.failure_errors import MOST_SKIPPED, can_skip
from ..pipeline.pipeline_factory import GraphPipelineFactory, check_functions, shard_pipelines
from ..pipeline.processes import is_one_of_several
from ..pipeline.runner import Runner
from ..random.seeds import ShardSeed
from ..sources import state as states
from ..sources.identity import (
    changing_record,
    compared_identity,
    mixture_state_of,
    stated_identity,
)
from ..sources.planned import PlannedSource
from ..sources.reuse import ReuseCheck
from ..sources.rows import RowSource
from ..sources.source import (
    Source,
    groups_of,
    mapped_fields,
    maps_of,
    mixture_of,
    order_of,
    read_ahead_of,
    record_count,
)
from ..state.agreement import Values
from ..stats import InputStats
from .fed_engine import FedEngine
from .graph import FedGraph
from .read_rows import ReadSettings
from .source_supply import RowRange, SourceRows, SourceSupply
from .stand_ins import BadSamples
from .supply import RowSupply

_READ_AHEAD = 2  # the number of runs to read before DALI asks for them


def _plan(
    source: Source,
    shuffle: bool,
    batch_size: int,
    policy: LastBatchPolicy,
    padded: bool,
    seed: Any,
) -> SamplePlan:
    """Returns the plan of the batches of a source's stream."""
    if isinstance(source, PlannedSource):
        return source.plan(seed, shuffle, batch_size, policy, padded)
    return SamplePlan(len(source), batch_size, policy, padded)


def _warn_of_repeats(plan: SamplePlan) -> None:
    """Warns if a batch has more than twice as many rows as the source has records."""
    if plan.batch_size > 2 * plan.num_samples:
        warn_user(
            f"batch_size={plan.batch_size} is more than twice the {plan.num_samples} records of "
            "the source: each batch reads and decodes records several times, for padding or for "
            f"further epochs. Pass batch_size={plan.num_samples} or less"
        )


def _mixed(plan: SamplePlan, position: SamplePosition) -> str:
    """Returns the warning about a last batch that also has records of the next epoch."""
    rows = position.sample - plan.end(position)
    return (
        f"the last batch of epoch {position.epoch} has {rows} records of the next epoch, since "
        f"batch_size={plan.batch_size} does not divide the {plan.num_samples} records, and the "
        "next epoch begins after them: an evaluation counts them wrongly. Pass mask=True to mark "
        "padding, last_batch_policy='partial' for a smaller batch, or drop_remainder=True to leave "
        "it out; to train without end, use stream(...)"
    )


@dataclasses.dataclass(frozen=True)
class SourceCursor(EpochCursor[SamplePosition]):
    """The cursor of a `SourceEngine`; see `EpochCursor`.

    Attributes:
        seed: The seed of the order, of the pipelines and of ``draw``.
        num_failed: The number of batches that failed or have masked records.
        graph_in_state: Whether states contain the operators. Without operators, the first state is
            the same before and after the pipelines are built.
        resumed: Whether a state or a seek set the position.
    """

    seed: Any = None
    num_failed: int = 0
    graph_in_state: bool = False
    resumed: bool = False


class SourceEngine(FedEngine[SamplePosition], EpochEngine[SamplePosition]):
    """Runs pipelines that are fed with the records of a record source; see `FedEngine`.

    The records of a batch depend only on its position: a `SamplePlan` determines the records and
    the padding (see `dalijax.core.order`). To move, the engine drops the batches that DALI has
    prepared, and feeds the records of the new position.

    Args:
        source: The record source.
        graph: The graph's function over the source's fields.
        call: Arguments of ``nvidia.dali.pipeline_def``. Their ``batch_size`` is the size of the
            global batch if there is a sharding, otherwise the size of this process's batch.
        config: The iterator's arguments; if each process makes a slice of the global batch, its
            ``hosts`` are the index of this process and the number of processes.
    """

    cursor: SourceCursor
    _graph: FedGraph

    def __init__(
        self,
        source: Source,
        graph: FedGraph,
        call: Mapping[str, Any],
        config: IteratorConfig,
    ):
        call, hosts = dict(call), config.hosts
        seed = ShardSeed.of(call.pop("seed", None), hosts[0])
        if isinstance(source, PlannedSource):
            self._num_shapes = source.num_shapes
        super().__init__(SourceCursor(SamplePosition(), seed=seed.seed), config)
        self.name = graph.__name__
        self._gradual = read_ahead_of(source) > 0  # the first batch need not wait for others
        if hosts[1] == 1 and not config.over_processes and is_one_of_several():
            warn_user(
                "several processes, but no sharding over them, so that each process reads all "
                "rows of the source. For global batches, pass a sharding of a mesh over all "
                "devices, jax.sharding.Mesh(...)"
            )
        shards = self._data_shards
        differing = shard_pipelines(shards, call["batch_size"], call)
        rows = differing[0]["batch_size"]
        for name in differing[0]:
            call.pop(name, None)
        call["exec_dynamic"] = True  # other executors can't run after a record that fails
        if shards:
            parts = [RowRange(s.shard_id * rows, (s.shard_id + 1) * rows) for s in shards]
            batch_size = rows * shards[0].num_shards
        else:
            if hosts[1] > 1 and config.last_batch_policy is LastBatchPolicy.PARTIAL:
                raise ValueError(
                    f"last_batch_policy='partial' over {hosts[1]} shards of the batch: some shards "
                    "could be empty. Use 'fill' and a mask (pad='mask'), or 'drop'"
                )
            parts = [RowRange(hosts[0] * rows, (hosts[0] + 1) * rows)]
            batch_size = rows * hosts[1]
        padded = config.last_batch_padded
        if padded is None:
            padded = pads_by_default(config.last_batch_policy, config.mask)
        elif not padded and isinstance(source, PlannedSource):
            raise ValueError(
                f"last_batch_padded=False: a batch of {type(source).__name__} has no records of "
                "the next epoch. Omit the argument"
            )
        rules = config.last_batch_policy, padded
        self._row_source = source if isinstance(source, RowSource) else None
        self._plan_of = functools.lru_cache(maxsize=1)(
            functools.partial(_plan, source, bool(config.shuffle), batch_size, *rules)
        )
        if self._row_source is None:  # blank rows cost no decoding
            _warn_of_repeats(self._samples)
        self._may_mix_epochs = not (padded or config.shuffle or config.epochs is None)
        self.batch_size, self.shards = rows, (0,)
        if not isinstance(source, PlannedSource):  # whose epochs may differ in length
            self.plan = EpochPlan(len(source), 1, batch_size, *rules)
        if self._row_source is not None:  # DALI's batches are of records
            for arguments in differing:
                arguments["batch_size"] *= self._row_source.most
        self.device_ids = tuple(
            arguments.get("device_id", call.get("device_id")) for arguments in differing
        )
        self._source = source
        self._maps = maps_of(source)
        self._mixture, groups = mixture_of(source), groups_of(source)
        self._windows = "" if groups is None else f" in {groups}"
        self._parts = parts
        self._seeded = not seed.is_default
        numbers = [shard.shard_id for shard in shards] or [hosts[0]]
        pipeline_arguments = [
            {**arguments, "seed": ShardSeed.of(seed, number)}
            for arguments, number in zip(differing, numbers, strict=True)
        ]
        self.feed_by(graph.function, graph, call, pipeline_arguments)
        self._bad_samples = BadSamples()
        self._changing: str | None = None  # a record that changes; None: not checked yet
        self.compare_processes(graph.__name__, self._outline())

    def _outline(self) -> dict[str, Any]:
        """Returns values that must be equal in all processes; reads no record."""
        config, plan = self._config, self._samples
        return {
            "function": self.name,
            "outputs": ", ".join(config.output_map),
            "source": type(self._source).__name__,
            **({} if self._mixture is None else {"weights": self._mixture._shown_weights()}),
            "number of records": plan.num_samples,
            "global batch": plan.batch_size,
            "batches per epoch": plan.remaining(SamplePosition()),
            "seed": self._seed,
            "shuffle": str(config.shuffle),
            "last batch": plan.policy.name,
            "padding": "padded" if plan.padded else "unpadded",
            "mask": str(config.mask),
            "on_error": config.on_error,
        }

    def _shared_values(self) -> Values:
        """Returns the values that must be equal in all processes; see `Engine`."""
        self.prepare()
        identity = compared_identity(self._source)
        if changing := self._changing_record():
            identity = f"{identity} ({changing} changes at each read)"
        position = self.position
        return {
            **self._outline(),
            "records (names, sizes, bytes)": identity,
            "bypassing the graph": ", ".join(sorted(self._passed_names)),
            "operators": list(self._lines()),
            "position": f"epoch {position.epoch}, sample {position.sample}",
        }

    # The consumer's position

    @property
    def _seed(self) -> Any:
        return self.cursor.seed

    @property
    def _samples(self) -> SamplePlan:
        """The plan of the batches; that of a `PlannedSource` depends on the seed."""
        return self._plan_of(self._seed)

    @property
    def epoch(self) -> int:
        """The number of the consumer's epoch, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """The number of batches before the position in its epoch, in batches of this size."""
        return self._samples.step(self.position)

    @property
    def num_failed(self) -> int:
        """The number of batches of this process that failed or have masked records."""
        return self.cursor.num_failed

    def length(self) -> int:
        """Returns the number of batches of the epoch."""
        return self._samples.length(self.position)

    def total_length(self, num_epochs: int) -> int:
        """Returns the number of batches of the first epochs together."""
        plan = self._samples
        if isinstance(plan, TablePlan):
            return sum(map(plan.batches, range(num_epochs)))
        return super().total_length(num_epochs)

    def following_epoch(self) -> int:
        """Returns the number of the next epoch with a batch."""
        end = self._samples.skip(self.position, self._samples.remaining(self.position))
        return self._samples.next_epoch(end).epoch

    def skip(self, batches: int) -> int:
        """Skips batches, at most to the end of the epoch; returns the number of skipped batches."""
        count = min(batches, self._samples.remaining(self.position))
        self.go_to(self._samples.skip(self.position, count))
        return count

    def at_end(self) -> bool:
        """Returns whether the position is at the end of the epoch."""
        return self._samples.remaining(self.position) == 0

    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next epoch."""
        self.go_to(self._samples.next_epoch(self.position))

    def rewind(self) -> None:
        """Moves back to the start of the epoch."""
        self.go_to(dataclasses.replace(self.position, sample=self.position.start))

    def locate(self, batch: int) -> tuple[int, int]:
        """Returns the epoch and the step of a batch, given its number over all epochs.

        Raises:
            ValueError: If batches before it may have been skipped, because ``on_error`` is "skip".
        """
        if batch and self._config.on_error == "skip":
            raise ValueError(
                f"seek_step({batch}) with on_error='skip': a step counts delivered batches, and "
                "the number of batches that were skipped before it is not known. Restore a state "
                "by set_state(), or use on_error='mask', which delivers every batch"
            )
        return self._samples.locate(batch)

    def seek(self, epoch: int, step: int, first: int = 0) -> None:
        """Moves to a batch of an epoch.

        Assumes that all earlier batches, from the start of the stream, have the current size.

        Args:
            epoch: The number of the epoch.
            step: The index of the batch in the epoch.
            first: The number of the epoch with which the stream begins.

        Raises:
            ValueError: If there is no such batch.
            StateError: If the graph draws numbers by ``fn.random``, or a function keeps state, and
                the batch is neither the next batch nor the first batch.
        """
        position = self._samples.seek(epoch, step, first)
        runs = [self._samples.run_from(position) for position in (self._beginning, self.position)]
        self.change(resumed=self._samples.run_from(position) != runs[0])
        if self._samples.run_from(position) not in runs:
            self._check_resumable()
        self.go_to(position)

    def begin_with(self, epoch: int) -> None:
        """Makes an epoch the first epoch of the stream, and moves to its start."""
        self._beginning = self._samples.seek(epoch, first=epoch)
        self.go_to(self._beginning)

    def go_to(self, position: SamplePosition) -> None:
        """Moves to a position."""
        graph_in_state = self.cursor.graph_in_state
        if position != self.position:
            self._outcome, graph_in_state = None, bool(self._operators())
        resumed = self.cursor.resumed and position != self._beginning
        self.change(position=position, graph_in_state=graph_in_state, resumed=resumed)

    def advance(self) -> None:
        """Moves past the batch that `peek` returns."""
        outcome = self.peek()
        if self._may_mix_epochs and self._samples.mixes_epochs(outcome.after):
            self._may_mix_epochs = False  # before the warning, which may be raised as an error
            warn_user(_mixed(self._samples, outcome.after))
        super().advance()

    def _cursor_after(self, outcome: Outcome[SamplePosition]) -> SourceCursor:
        cursor = self.cursor.at(outcome.after)
        if cursor.graph_in_state and not outcome.failures:
            return cursor
        num_failed = cursor.num_failed + outcome.failures
        return dataclasses.replace(cursor, num_failed=num_failed, graph_in_state=True)

    # States

    def get_state(self) -> dict[str, Any]:
        """Returns the state, with the position and the stream, as a JSON value.

        Raises:
            StateError: If the graph draws numbers by ``fn.random``, a function keeps state, or
                records change when they are read again.
        """
        self._check_resumable()
        self._check_records()
        stream = self._stream()
        if not self.cursor.graph_in_state:
            stream = dataclasses.replace(stream, operators=(), outputs=self._given_names)
        return states.encode(self.position, stream)

    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state; see `Engine`."""
        position, stream = states.read(state)
        if stream.operators and not self._operators():
            self.prepare()
        self._check_resumable()
        self._check_records()
        records = 0
        if self._mixture is not None:  # a plan may count several samples for each record
            samples = self._samples.samples_before(position)
            records = samples * len(self._mixture) // self._samples.num_samples
        states.check(stream, self._stream(), self._seeded, allow, named, records)
        if stream.seed != self._seed:
            self.drop()
        self.go_to(position)
        self.change(
            seed=stream.seed,
            graph_in_state=bool(stream.operators),
            resumed=position != self._beginning,
        )

    def checkpoints(self) -> list[bytes]:
        """Returns the state as JSON bytes, in a list of length 1, since it covers all pipelines."""
        return [json.dumps(self.get_state()).encode()]

    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves to the position of a result of `checkpoints`; see `Engine`."""
        if len(pieces) != 1:
            raise StateError(
                f"{len(pieces)} checkpoints, but an iterator over a source has a single one: pass "
                "the result of checkpoints()"
            )
        self.set_state(pieces[0], allow, ())

    def adopt_seed(self, other: SourceEngine) -> None:
        """Adopts the restored seed of another engine, without building pipelines."""
        self.change(seed=other._seed)

    def _stream(self) -> states.Stream:
        policy = self._config.last_batch_policy.name
        order = "shuffled" if self._config.shuffle else "sequential"
        plan = self._samples
        padded = "padded" if plan.padded else "unpadded"
        batches = f" in batches of {plan.batch_size}" if plan.keeps_batch_size else ""
        return states.Stream(
            seed=self._seed,
            identity=stated_identity(self._source),
            order=f"{order} {policy} {padded} {plan.num_samples}{batches}{self._windows}",
            outputs=tuple(self._config.output_map),
            operators=self._lines(),
            mixture=None if self._mixture is None else mixture_state_of(self._source),
        )

    def _lines(self) -> tuple[str, ...]:
        """Returns the lines of the source's maps and of the graph; empty before the first build."""
        operators = self._operators()
        maps = [function.line(part) for part, function in self._maps]
        return (*maps, *operators) if operators else ()

    # Pipelines

    @contextlib.contextmanager
    def replicas(self) -> Iterator[tuple[list[Pipeline], str]]:
        """Returns a context of further pipelines of the graph, and their source; see `Engine`."""
        supply = self._open_supply()
        supply.seek(self._samples.run_from(self.position))
        latest = [0 for _ in self._parts]  # the run that each pipeline has asked for
        depth = 1  # of the queues of the pipelines, whose inputs may be of different runs

        def rows_of(run: int, part: int) -> SourceRows:
            """Returns the rows of a run; forgets runs that every pipeline has taken."""
            latest[part] = max(latest[part], run)
            supply.forget(max(min(latest) - depth - 1, -1))  # which also reads later runs ahead
            return supply.rows(run, part)

        try:
            source = self._pipelines(rows_of, self._pipeline_arguments)
            pipelines = [define(None) for define in source.definitions()]
            depth = max(map(queue_depth, pipelines))
            yield pipelines, f"source {type(self._source).__name__}"
        finally:
            supply.close()

    def _sample(self) -> Batch:
        """Returns the next epoch's first good batch, which DALI prepares anyway."""
        return self._first_good(self._samples.next_epoch(self.position)).unwrap()

    @property
    def _full_size(self) -> int:
        return self.batch_size

    def _first_good(self, position: SamplePosition) -> Outcome[SamplePosition]:
        """Returns the outcome of the first good batch from a position on.

        If too many batches fail, returns the outcome of the last failed batch.
        """
        outcome = self._outcome_at(self._samples.run_from(position))
        for _ in range(MOST_SKIPPED - 1):
            if not can_skip(outcome.error):
                break
            outcome = self._outcome_at(self._samples.run_from(outcome.after))
        return outcome

    def _number(self, outcome: Outcome[SamplePosition]) -> tuple[int, int]:
        return self._epoch_and_step(self._samples.skip(outcome.after, -1))

    def _seed_of_keys(self) -> int:
        return int(self._seed)

    def count(self, stats: InputStats, outcome: Outcome[SamplePosition]) -> None:
        """Adds a delivered batch to the counters."""
        position = self._samples.skip(outcome.after, -1)
        parts = [self._samples.rows(position, part.first, part.last) for part in self._parts]
        rows = sum(len(part.valid) for part in parts if part.layout is None or part.valid.any())
        valid = sum(int(part.valid.sum()) for part in parts)
        counts = count_rows(rows, valid, self._samples.policy, self._samples.padded)
        errors = self.num_failed + outcome.failures
        stats._delivered(*self._number(outcome), *counts, errors)

    def record(self, number: int, epoch: int | None) -> Batch:
        """Returns one record, by its number in the source; see `EpochEngine.record`."""
        epoch = self.epoch if epoch is None else epoch
        count = record_count(self._source)
        if number >= count:
            raise ValueError(
                f"record({number}): the source has {count:,} records, from 0 to {count - 1:,}"
            )
        if not self._learned:
            self.prepare()
        self._check_resumable()
        settings = self._read_settings()
        stream_order = settings.order

        def order(samples: Indices) -> tuple[Indices, Indices]:
            """Puts the record in place of sample 0. Other samples may stand in for the record."""
            records, epochs = stream_order(samples)
            is_first = samples == 0
            return np.where(is_first, number, records), np.where(is_first, epoch, epochs)

        settings = dataclasses.replace(settings, order=order, bad_samples=BadSamples())
        supply = SourceSupply(settings, self._samples, self._parts, 0)
        try:
            rows = supply.alone(np.zeros(1, np.int64))
            batch = self._batch_alone(f"record {number} in epoch {epoch}", rows)
        except Exception as error:
            raise_redacted(error)
            raise
        finally:
            supply.close()
        # Not values[0], which would transfer the index to the device.
        return {
            name: values.reshape(values.shape[1:]) if isinstance(values, jax.Array) else values[0]
            for name, values in batch.items()
        }

    @property
    def _passed_names(self) -> Sequence[str]:
        names = super()._passed_names
        return names if self._row_source is None else [*names, *self._row_source.row_fields]

    # Positions, supply and graph

    def _open(self) -> tuple[SourceSupply, GraphPipelineFactory]:
        supply = self._open_supply()
        return supply, self._pipelines(supply.rows, self._pipeline_arguments)

    def _open_supply(self) -> SourceSupply:
        return SourceSupply(self._read_settings(), self._samples, self._parts, _READ_AHEAD)

    def _read_settings(self) -> ReadSettings:
        """Returns the settings of the reading threads of a new supply."""
        graph = self._graph
        gives_new_arrays = getattr(self._source, "_gives_new_arrays", False)
        return ReadSettings(
            self._source,
            tuple(graph.names),
            self._seed,
            self._samples.num_samples,
            self._bad_samples,
            order_of(self._source, self._seed, self._config.shuffle),
            None if gives_new_arrays else ReuseCheck(self._source),
            graph.file_inputs,
            graph.lost_numbers,
            passed=frozenset(graph.passed),
            unfed=graph.unfed,
            mapped=mapped_fields(self._source),
            has_random_maps=any(function.is_random for _, function in self._maps),
            row_source=self._row_source,
        )

    def _is_end(self, position: SamplePosition) -> bool:
        return self._samples.remaining(position) == 0

    def _run_of(self, position: SamplePosition) -> SamplePosition:
        return self._samples.run_from(position)

    def _after(
        self,
        position: SamplePosition,
        supply: RowSupply[SamplePosition],
        run: int,
        runner: Runner | None,
    ) -> SamplePosition:
        return self._samples.skip(position, 1)

    def _epoch_and_step(self, position: SamplePosition) -> tuple[int, int]:
        return position.epoch, self._samples.step(position)

    def _check_first(self) -> None:
        if self.cursor.resumed:
            self._check_resumable()

    def _check_resumable(self) -> None:
        """Raises a StateError if batches depend on earlier batches, so that none can be resumed."""
        for _, function in self._maps:
            if reason := function.kept_state():
                raise StateError(
                    f"the state can't be saved: {function.label} of the source keeps state: "
                    f"{reason}. If no result depends on it, as on a cache, pass stateful=False. "
                    "Draw random numbers from rng of random_map()"
                )
        if self._supply is not None:  # the pipelines were defined
            check_functions(self._factory)
        if self._random():
            raise StateError(
                f"the graph draws random numbers by {self._random()}, DALI's own operators, whose "
                "numbers depend on the batches before and are in no state of a source. Draw them "
                "for each record: draw.uniform() and the like (docs/randomness.md)"
            )

    def _check_records(self) -> None:
        """Raises a StateError if records change when they are read again."""
        if changing := self._changing_record():
            raise StateError(
                f"{changing} changes at each read, so that no state can restore its batches: "
                f"{printable_repr(self._source)} draws random numbers, or depends on the time or "
                "on earlier reads. Draw random numbers in the graph instead, by draw.uniform() or "
                "dalijax.augment. To resume only the order of the records, save the step and call "
                "seek_step(step)"
            )

    def _changing_record(self) -> str:
        """Returns the result of `changing_record`, which is called once."""
        if self._changing is None:
            self._changing = changing_record(self._source)
        return self._changing

    def _stop_waiting(self) -> None:
        supply = self._supply
        if supply is not None:
            supply.close()

    def __del__(self) -> None:
        # DALI's operators refer to each other and to the supply, so that the threads of the supply
        # would otherwise run until Python's cyclic gc frees the operators.
        supply = getattr(self, "_supply", None)
        if supply is not None:
            supply.close()
