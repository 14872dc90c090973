"""The engine of DALI's readers, and of other sources of a graph's own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nvidia.dali import Pipeline

from ..config import IteratorConfig
from ..errors import BatchError, StateError
from ..order.epochs import count_rows
from ..pipeline import advice
from ..pipeline.bad_files import name_files
from ..pipeline.bad_record import MOST_SKIPPED, can_skip, describe
from ..pipeline.batch import Batch
from ..pipeline.dali_pipeline import (
    check_outputs,
    is_unmappable,
    operator_name,
    operators,
    runs_python,
)
from ..pipeline.engine import CLOSED, EpochEngine, Mark, NoReplica, Outcome
from ..pipeline.failure import RETRY_DELAYS, failure_of
from ..pipeline.pipeline_source import PipelineSource, check_resumable
from ..pipeline.reader import check_epochs, check_shards, epochs_of
from ..pipeline.runner import (
    Outputs,
    Runner,
    SourceEnded,
    SourceError,
    discard,
)
from ..state import dali_checkpoints, reader_state
from ..state.agreement import Values, without_seeds
from ..state.differences import check, differences, renamed
from ..state.envelope import damaged
from ..state.fingerprint import Fingerprint, fingerprint, split_line, unknown
from ..state.position import Checkpoints, FailedBatch, Position
from ..state.random_state import check_form, for_operators
from ..state.reader_files import READERS, reader_of
from ..state.reader_state import ReaderState
from ..stats import InputStats

_Error = TypeVar("_Error", bound=RuntimeError)
_READER = re.compile(r"operator `[\w.]*readers\.")
# A checkpoint costs 7 to 38 us: it is taken when a state is asked for (`Engine.checkpoint`), and
# after so many batches, which are at most run again where DALI has none: after a failed batch, or
# Ctrl-C.
_MOST_TO_DROP = 8
_MOST_NAMED = 8  # failed batches whose files are named, which costs new pipelines
# The readers whose states are known; those of videos need a GPU, and are DALI's to judge.
_KNOWN_STATES = READERS - {"video", "video_resize"}
_MOST_SAMPLES = 1 << 31  # of a reader's pass, where nothing says how many it has
_COUNTS = "failed, and counts as delivered; the next call goes on with the next one"
_STOPPED = (
    "can't be produced: with exec_dynamic=False nothing runs after a failure, of this batch or of "
    "one prefetched behind it. Leave exec_dynamic=False out, and the next call goes on behind it"
)


class _NoBatch(RuntimeError):
    """The source has no batch where the epoch has one; it is no batch that failed."""


class ReaderEngine(EpochEngine[Position]):
    """Pipelines that read by themselves, at the consumer's position; see `Engine`.

    Args:
        source: Where the pipelines come from.
        config: The iterator's arguments.
    """

    _marked = (*EpochEngine._marked, "_seed", "_fingerprint")

    def __init__(self, source: PipelineSource, config: IteratorConfig):
        if config.on_error == "mask":
            raise ValueError(
                "on_error='mask' is for iterators over a source, which know their records: a "
                "reader's batch fails as a whole, and 'skip' leaves it out"
            )
        if config.on_error == "skip" and (config.over_processes or config.hosts[1] > 1):
            raise ValueError(
                "on_error='skip' over several processes, one of which would then be a batch ahead "
                "of the others: leave it out, or use a source of dalijax.sources with "
                "on_error='mask'"
            )
        super().__init__(Position(), config)
        self.name = source.name
        self._source = source
        self._runner: Runner | None = None
        self._fingerprint: Fingerprint | None = None
        self._seed: int | None = None  # that a state brought
        self._start = Checkpoints()  # of the first batch, once pipelines were built
        # The number of the present epoch, and of its batches, all and without padding.
        self._epoch_length = (-1, 0, 0)
        self._exact: Position | None = None  # where the pipelines stand, unless a batch failed
        self._most_to_drop = _MOST_TO_DROP
        self._failures_to_name = _MOST_NAMED
        self.compare_processes(source.name, self._outline())

    def _outline(self) -> dict[str, Any]:
        """What processes must have in common, as far as it is known without pipelines."""
        config = self._config
        return {
            "function": self._source.name,
            "outputs": ", ".join(config.output_map),
            "reader": str(config.reader_name),
            "size": config.size,
            "last batch": config.last_batch_policy.name,
            "mask": str(config.mask),
            "on_error": config.on_error,
        }

    def _shared_values(self) -> Values:
        """What must be equal in all processes; see `Engine`."""
        self.prepare()
        if self.plan is None:
            self._end_cure = (
                "Let the source of every process end after the same number of batches, or pass "
                "size, the number of samples of an epoch"
            )
        data, plan, shards = self.fingerprint(), self.plan, len(self.shards)
        if self._data_shards:
            shards = self._data_shards[0].num_shards
        elif self._config.hosts[1] > 1:
            shards *= self._config.hosts[1]
        values = {
            **self._outline(),
            "global batch": self.batch_size * shards,
            "seed": data["seed"],
            "operators": [without_seeds(line) for line in data["operators"]],
        }
        if plan is not None:
            values |= {
                "number of records": plan.num_samples,
                "shards": plan.num_shards,
                "batches of the epoch": plan.delivered(self.epoch),
                "padding": "padded" if plan.padded else "unpadded",
                "shards stay in place": str(plan.stick),
            }
        if plan is None or plan.num_shards == shards:  # else each shard has files of its own
            values["sources"] = [
                line for line in data["sources"] if not line.partition(":")[0].endswith(".seed")
            ]
        return values | {"position": f"epoch {self.epoch}, step {self.step}"}

    # The consumer's position

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Number of batches of the epoch that are behind the consumer, failed ones included."""
        return self.position.step

    @property
    def num_failed(self) -> int:
        """Number of batches behind the consumer that failed."""
        return self.position.errors

    def skip(self, batches: int) -> int:
        """Moves behind so many batches, or to the end of the epoch; returns their number."""
        done = 0
        while done < batches:
            self._outcome = self._outcome or self._next_outcome(discard)
            if self._outcome.ended:
                break
            self.advance()
            done += 1
        return done

    def at_end(self) -> bool:
        """Whether every batch of the epoch is behind the consumer."""
        peeked = self._outcome
        if peeked is not None:  # failed batches that are left out lie before an end behind them
            return peeked.ended and peeked.after.step == self.position.step
        return self._is_end(self.position)

    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next one."""
        if self._outcome is not None:
            self.advance()
        self.runner()
        self.checkpoint()
        here = self._with_start(self.position)
        start, epoch = here.checkpoints or Checkpoints(), here.epoch + 1
        if self.plan is not None:
            epoch = self.plan.next_epoch(here.epoch)
            behind = self.plan.first_batch(here.epoch) + here.step
            skipped = self.plan.first_batch(epoch) - behind
            start = start.later(skipped)
            self.runner().to_drop += skipped
        else:
            self.runner().restart()
            start = Checkpoints(self.runner().checkpoints())
        self.position = Position(epoch, 0, start, start, here.errors)

    def rewind(self) -> None:
        """Moves back to the start of the epoch.

        Raises:
            RuntimeError: If nothing says how the pipelines stood there.
        """
        here = self.position
        if here.step == 0:
            return
        start = here.epoch_start or Checkpoints()
        exact = start.data is not None and not self._source.unresumable
        if not self._source.rebuildable or not (exact or here.epoch == 0):
            why = self._source.unresumable or "the pipelines can't be built again"
            raise RuntimeError(
                f"reset() at batch {here.step} of epoch {here.epoch} can't go back to the "
                f"epoch's start: {why}. Finish the epoch first, or use dalijax.data_iterator "
                "over a source that DALI can checkpoint"
            )
        again = start if exact else None
        self.go_to(Position(here.epoch, 0, again, again, here.errors))

    def go_to(self, position: Position) -> None:
        """Moves to a position, whose pipelines are built when they are next used."""
        self.drop()
        self.position = position

    def get_state(self) -> dict[str, Any]:
        """The consumer's position, as a plain JSON value; see `Engine`."""
        check_resumable(self._source)
        self.checkpoint()
        # A lazy iterator's first state stays what it was before the pipelines were built.
        known = self.position.checkpoints is not None
        data = self.fingerprint() if known else self._unknown()
        return reader_state.encode(self.position, data)

    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state, with new pipelines; see `Engine`."""
        check_resumable(self._source)
        self.checkpoint()
        self.restore(reader_state.decode(state), allow, named)

    def keep_seed(self, other: ReaderEngine) -> None:
        """Takes the seed that a state brought to another engine; nothing is built yet."""
        self._seed = other._seed
        self._source.set_seed(self._seed)

    def checkpoints(self) -> list[bytes]:
        """The state as bytes for each pipeline; see `Engine`."""
        return dali_checkpoints.to_bytes(self.get_state())

    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves to the position of checkpoints, ours or DALI's plugin's; see `Engine`."""
        saved = self._read_checkpoints(pieces)
        check_resumable(self._source)
        self.restore(saved, allow)

    def _read_checkpoints(self, pieces: Sequence[bytes]) -> ReaderState:
        """Reads checkpoints of this package, or of DALI's plugin."""
        saved = dali_checkpoints.read(pieces)
        if saved is not None:
            return saved
        self.runner()  # DALI's counters say nothing without the epochs
        position = dali_checkpoints.of_dali(pieces, self.plan, self.shards)
        return ReaderState(position, self.fingerprint())

    def stands_restored(self) -> bool:
        """Takes the position of checkpoints that the pipelines were made at; False without any.

        Raises:
            StateError: If they are of other data, or no iterator over these ever stands there.
        """
        if not self._source.restored:
            return False
        runner = self.runner()
        saved = self._read_checkpoints(self._source.restored)
        check_resumable(self._source)
        if found := differences(saved.fingerprint, self.fingerprint()):
            raise StateError.of_other_data(found)
        self._check_reach(saved.position)
        self.position = saved.position
        here = saved.position.checkpoints
        runner.to_drop = here.to_drop if here else 0
        return True

    def restore(
        self, saved: ReaderState, allow: Sequence[str] = (), named: Sequence[str] = ()
    ) -> None:
        """Moves to a saved position, with new pipelines that stand there.

        Args:
            saved: The position, and what it belongs to.
            allow: Names of differences to go on with.
            named: Further ones, each of which must name something.

        Raises:
            StateError: If it is of other data, or DALI refuses its part; nothing has changed.
            Exception: If no pipelines can be built at all; nothing has changed.
        """
        with self._with_seed_of(saved.fingerprint):
            self._restore(saved, allow, named)

    @contextlib.contextmanager
    def _with_seed_of(self, saved: Fingerprint) -> Iterator[None]:
        """Has a saved seed stand for one that the caller left out, unless the state is refused."""
        seed, known = saved["seed"], self._fingerprint
        if not 0 <= seed < 1 << 63 or not self._source.takes_seed():
            yield
            return
        self._seed, before = seed, self._seed
        self._source.set_seed(seed)
        self._fingerprint = known and known | {"seed": seed}
        try:
            yield
        except BaseException:
            self._seed, self._fingerprint = before, known
            self._source.set_seed(before)
            raise

    def _return_to(self, mark: Mark) -> None:
        super()._return_to(mark)
        self._source.set_seed(self._seed)

    def _restore(self, saved: ReaderState, allow: Sequence[str], named: Sequence[str]) -> None:
        position, before = saved.position, self.position
        if self.batch_size or position.checkpoints is None:
            check(saved.fingerprint, self.fingerprint(), allow, named)
        if self.shards:
            self._check_reach(position)
        if position == before:
            return
        if position.checkpoints is None:
            self.go_to(position)
            return
        if not self._source.rebuildable:
            raise StateError(
                "these pipelines can't be built again, and so not at a state: DALI does not "
                "serialise their Python sources or functions. Use dalijax.data_iterator of their "
                "function, which restores this state; or make them at checkpoints() of an iterator"
            )
        self.drop()
        try:
            self.position = self._build_at(saved, position.checkpoints, allow, named)
        except BaseException:
            self.go_to(before)
            raise

    def _build_at(
        self,
        saved: ReaderState,
        checkpoints: Checkpoints,
        allow: Sequence[str],
        named: Sequence[str],
    ) -> Position:
        """Builds pipelines at a saved position; returns it, with their checkpoints."""
        refusal = self._try_to_build(saved, checkpoints)
        if refusal is not None:
            self._build(Checkpoints())  # what differs says more
        check(saved.fingerprint, self.fingerprint(), allow, named)
        self._check_reach(saved.position)
        names = renamed(saved.fingerprint, self.fingerprint())
        if names is not None:
            return self._build_renamed(saved.position, names)
        if refusal is not None:  # without the checkpoints the pipelines were built
            raise _refusal(refusal)
        return saved.position

    def _try_to_build(self, saved: ReaderState, checkpoints: Checkpoints) -> Exception | None:
        """Builds pipelines at checkpoints; the error where they refuse them."""
        try:
            _check_forms(saved, self._config.reader_name)
            self._build(checkpoints)
        except (RuntimeError, StateError) as error:
            return error
        except (ValueError, LookupError, TypeError) as error:  # DALI reads its texts in Python, too
            refusal = StateError(f"DALI can't read its part of the state: {error!r}")
            refusal.__cause__ = error
            return refusal
        return None

    def _build_renamed(self, position: Position, names: Mapping[str, str]) -> Position:
        """Builds pipelines whose operators came, went or were renamed, at a position before that.

        Args:
            position: The position; each state in it goes to the operator that it is of.
            names: The names of operators in it, by those that they have now.

        Returns:
            The position, with checkpoints of the new pipelines.
        """
        self.drop()
        start = self._build(Checkpoints()).checkpoints() or ()
        self.drop()

        def moved(one: Checkpoints | None) -> Checkpoints | None:
            if one is None or one.data is None:
                return one
            pairs = zip(one.data, start, strict=True)
            return Checkpoints(tuple(for_operators(*pair, names) for pair in pairs), one.to_drop)

        position = dataclasses.replace(
            position,
            checkpoints=moved(position.checkpoints),
            epoch_start=moved(position.epoch_start),
        )
        try:
            self._build(position.checkpoints or Checkpoints())
        except RuntimeError as error:
            raise _refusal(error) from error
        return position

    def _check_reach(self, position: Position) -> None:
        """Raises StateError where no iterator over these epochs ever stands at a position."""
        here, start = position.checkpoints or Checkpoints(), position.epoch_start or Checkpoints()
        counts = {len(one.data) for one in (here, start) if one.data is not None}
        wrong = [f"{count} pipelines" for count in counts if count != len(self.shards)]
        least, most = 0, _MOST_TO_DROP + position.errors
        if self.plan is not None:
            delivered = self.plan.delivered(position.epoch, self.shards[0])
            if position.step > delivered:
                wrong.append(f"step {position.step} of {delivered}")
            if position.step == delivered:  # DALI's own DROP is behind what it drops
                least = min(0, delivered - self.plan.consumed(position.epoch))
            # Between epochs, and failed batches do not end them.
            most += (1 + position.errors) * self.plan.gap(position.epoch)
            if not delivered:  # epochs without a batch add up
                most += self.plan.first_batch(position.epoch)
        for to_drop, lowest in ((here.to_drop, least), (start.to_drop, 0)):
            if not lowest <= to_drop <= most:
                wrong.append(f"{to_drop} batches to drop")
        if wrong:
            raise damaged(
                f"no iterator over these data has {' or '.join(wrong)} in epoch {position.epoch}, "
                f"after {position.errors} errors"
            )

    def _number(self, outcome: Outcome[Position]) -> tuple[int, int]:
        return outcome.after.epoch, outcome.after.step - 1  # others may have been left out before

    def _seed_of_keys(self) -> int:
        seed: int = self.fingerprint()["seed"]
        return seed

    def count(self, stats: InputStats, outcome: Outcome[Position]) -> None:
        """Counts a batch that is delivered."""
        epoch, step = self._number(outcome)
        plan, rows = self.plan, self.batch_size * len(self.shards)
        examples, padding = rows, 0
        if plan is not None:
            valid = sum(plan.valid(epoch, step, shard) for shard in self.shards)
            examples, padding = count_rows(rows, valid, plan.policy, plan.padded)
        stats.delivered(epoch, step, examples, padding, outcome.after.errors)

    def checkpoint(self) -> None:
        """Takes DALI's checkpoint of the position, while DALI can still give it."""
        here = self.position
        if here is self._exact and here.checkpoints and here.checkpoints.to_drop:
            exact = Checkpoints(self.runner().checkpoints())
            self.position = self._exact = dataclasses.replace(here, checkpoints=exact)

    # The pipelines

    def runner(self) -> Runner:
        """The running pipelines, built at the position if there are none."""
        return self._runner_at(self.position)

    def prepare(self) -> None:
        """Builds the pipelines at the position, unless they are built."""
        self.runner()

    def start(self) -> None:
        """Builds the pipelines, and takes the checkpoints of their start."""
        self.runner()
        self.position = self._with_start(self.position)

    def schedule(self) -> None:
        """Builds the pipelines, unless they are built, and schedules runs without waiting."""
        self.runner().schedule()

    @contextlib.contextmanager
    def replicas(self) -> Iterator[tuple[list[Pipeline], str]]:
        """Pipelines of the same graph, to run beside these; see `Engine`."""
        pipelines = [define(None) for define in self._source.definitions()]
        if not pipelines:
            raise NoReplica(
                "these pipelines were made by hand, and their graph can't be cut: use "
                "dalijax.data_iterator, which knows the function that defines it"
            )
        # What runs beside would move a Python source, or a function's state, on.
        why = self._source.unresumable
        python = [one for one in operators(pipelines[0]) if runs_python(one)]
        # Not public: what calls a source of fn.external_source.
        if any(getattr(getattr(one, "_group", None), "parallel", False) for one in python):
            why = "parallel=True has worker processes of its own"
        if why and python:
            names = ", ".join(dict.fromkeys(map(operator_name, python)))
            raise NoReplica(f"{names} can't run a second time beside itself: {why}")
        yield pipelines, ""

    def _with_start(self, position: Position) -> Position:
        """A position with checkpoints: one from before the first build gets those of the start.

        The consumer's own has none until it moves: a first state is the same before and after the
        pipelines were built.
        """
        if position.checkpoints is not None:
            return position
        return dataclasses.replace(position, checkpoints=self._start, epoch_start=self._start)

    def _runner_at(self, position: Position) -> Runner:
        if self.closed:
            raise ValueError(CLOSED)
        if (runner := self._runner) is None:
            runner = self._build(position.checkpoints or Checkpoints())
            if position.checkpoints is None:
                self._start = Checkpoints(runner.checkpoints())
        return runner

    def _build(self, checkpoints: Checkpoints) -> Runner:
        self.process = os.getpid()
        pipelines = self._source.build(checkpoints.data)
        self._read_plan(pipelines)
        runner = Runner(pipelines, checkpoints.to_drop, self._source.owned)
        self._runner = runner
        return runner

    def _read_plan(self, pipelines: Sequence[Pipeline]) -> None:
        config, source = self._config, self._source
        check_outputs(pipelines[0], config.output_map)
        plan, shards = epochs_of(pipelines, config, self._data_shards)
        if not self.shards:  # what is built later is of the same source
            check_shards(pipelines, config, self._data_shards, source)
            if plan is None:
                check_epochs(pipelines, config, source)
        self.batch_size, self.plan, self.shards = pipelines[0].max_batch_size, plan, shards
        self._epoch_length = (-1, 0, 0)
        self.device_ids = tuple(pipeline.device_id for pipeline in pipelines)

    def fingerprint(self) -> Fingerprint:
        """The identity of the data; blank before the first build."""
        if self._fingerprint is None:
            if not self.batch_size:  # never built
                return self._unknown()
            self._fingerprint = self._unknown() | fingerprint(
                self.runner().pipelines,
                self.plan,
                self.shards,
                self._source.serialized,
                batch_map=self._batch_map_names,
            )
            seed = self._source.seed  # that of all shards, not the first one's here
            if seed is not None and seed >= 0:  # DALI draws one instead of a negative one
                self._fingerprint["seed"] = seed
        return self._fingerprint

    def _unknown(self) -> Fingerprint:
        """The fingerprint before the first build."""
        return unknown() | {"outputs": list(self._config.output_map)}

    def _can_stand_at(self, position: Position) -> bool:
        """Whether new pipelines can be built to stand at a position."""
        checkpoints = position.checkpoints
        exact = checkpoints is None or checkpoints.data is not None
        return exact and self._source.rebuildable and not self._source.unresumable

    def _stand_again_at(self, position: Position) -> bool:
        """Drops the pipelines if new ones can stand at a position; returns whether they can."""
        can = self._can_stand_at(position)
        if can:
            self.drop()
        return can

    def drop(self) -> None:
        """Frees the pipelines and what was peeked; the next use builds them, at the position."""
        runner, self._runner = self._runner, None
        self._outcome = self._exact = None
        if runner is not None:
            runner.close()

    # Epochs

    def length(self) -> int | None:
        """Number of batches that the epoch delivers, if known; builds nothing."""
        return self._length_of(self.epoch)

    def _length_of(self, epoch: int) -> int | None:
        if self.plan is None:
            return None
        if self._epoch_length[0] != epoch:
            delivered = self.plan.delivered(epoch, self.shards[0])
            whole = min(self.plan.whole(epoch, shard_id) for shard_id in self.shards)
            self._epoch_length = epoch, delivered, whole
        return self._epoch_length[1]

    def following_epoch(self) -> int:
        """Number of the next epoch that has a batch of its own."""
        return self.epoch + 1 if self.plan is None else self.plan.next_epoch(self.epoch)

    def _is_end(self, here: Position) -> bool:
        runner = self._runner_at(here)
        total = self._length_of(here.epoch)
        if total is not None:
            return here.step >= total
        # An ended source at the start of an epoch is one to restart, or an error.
        return here.step > 0 and runner.ended()

    def _valid(self, outputs: Sequence[Outputs], here: Position) -> list[int]:
        """Checks the size of each pipeline's batch; returns how many samples are of the epoch."""
        lengths = [len(tensors[0]) for tensors in outputs]
        if self.plan is None:
            if self._config.over_processes and lengths != [self.batch_size]:
                raise ValueError(
                    f"the pipeline gave a batch of {lengths[0]} samples, not of "
                    f"{self.batch_size}: over several processes each batch must be whole, since "
                    "none knows how many samples the others have. Let the source drop the rest"
                )
            return lengths
        if lengths != [self.batch_size] * len(lengths):
            raise ValueError(
                f"the pipelines gave batches of {lengths} samples, not of {self.batch_size}: "
                "with size or reader_name each batch must be whole. Leave size out (-1) for a "
                "source of smaller batches"
            )
        if self._epoch_length[0] == here.epoch and here.step < self._epoch_length[2]:
            return lengths
        return [self.plan.valid(here.epoch, here.step, shard) for shard in self.shards]

    # Batches

    def _next_outcome(
        self, convert: Callable[[Sequence[Outputs]], Any] | None = None
    ) -> Outcome[Position]:
        """The first outcome from the position on that ``on_error`` does not leave out.

        Args:
            convert: Makes something else than a batch of the pipelines' outputs.
        """
        self.runner()
        here, skipped = self._with_start(self.position), list[FailedBatch]()
        from_start = here.step == 0
        outcome: Outcome[Position] | None
        named: BatchError | None
        while True:
            outcome = self._outcome_at(here, convert)
            try:
                if not isinstance(outcome.error, BatchError):
                    self._works = self._works or (outcome.error is None and not outcome.ended)
                    return self._behind_skipped(outcome, skipped, from_start)
                named = self._with_files(outcome.error, here.checkpoints)
                if self._config.on_error != "skip" or not can_skip(named):
                    return self._behind_skipped(
                        dataclasses.replace(outcome, error=named), skipped, from_start
                    )
                if (fault := self._fault_of_graph(named)) is not None:
                    return self._behind_skipped(
                        dataclasses.replace(outcome, error=fault), skipped, from_start
                    )
                skipped.append(self._left_out(here.epoch, here.step, named))
                here = outcome.after
            finally:
                outcome = named = None  # an error's traceback has this frame: see `_outcome_at`

    def _with_files(self, error: BatchError, checkpoints: Checkpoints | None) -> BatchError:
        """Adds its files to the error of a failed batch, for the first few of them."""
        if checkpoints is None or checkpoints.data is None or not self._failures_to_name:
            return error
        self._failures_to_name -= 1
        reader = self._config.reader_name
        return name_files(error, self._source, reader, checkpoints.data, checkpoints.to_drop)

    def _outcome_at(
        self,
        here: Position,
        convert: Callable[[Sequence[Outputs]], Any] | None,
        retries: int = 0,
    ) -> Outcome[Position]:
        """The outcome of the run at a position, where the pipelines stand.

        Args:
            here: The position.
            convert: See `_next_outcome`.
            retries: Number of retries so far.

        Raises:
            Exception: What the pipelines' own source raised; its batch stays the next one.
            RuntimeError: If the source has no batch although the epoch has one.
        """
        if self._is_end(here):
            return Outcome(here, ended=True)
        exact, self._exact = self._exact, None  # a call that is broken off may have taken a batch
        batch: Any = None
        error: Exception | None = None
        try:
            batch = self._run(here, convert or (lambda outputs: self._to_batch(outputs, here)))
        except SourceEnded:
            self._exact = exact  # nothing was taken
            return Outcome(here, ended=True)
        except _NoBatch:
            raise
        except SourceError as failed:
            self._stand_again_at(here)
            raise (failed.__cause__ or failed) from None
        except RuntimeError as failed:
            if self._can_retry(failed, here, retries):
                return self._outcome_at(here, convert, retries + 1)
            error = _batch_error(failed, here)
        except Exception as failed:  # no array can be made of it
            error = failed
        after = Position(
            here.epoch,
            here.step + 1,
            self._checkpoints_after(here, error is not None),
            here.epoch_start,
            here.errors + (error is not None),
        )
        self._exact = after if error is None else None
        try:
            return Outcome(after, batch, error)
        finally:
            del error  # its traceback has this frame: together they would keep the batch

    def _can_retry(self, failed: RuntimeError, here: Position, retries: int) -> bool:
        """Whether new pipelines may give a batch that failed; False if it counts as delivered.

        Raises:
            RuntimeError: If it stays the next one: its reader or the environment failed, or nothing
                runs any more.
        """
        environment, reads = failure_of(failed).environment, _READER.search(str(failed))
        if environment and retries < len(RETRY_DELAYS) and self._stand_again_at(here):
            time.sleep(RETRY_DELAYS[retries])
            return True
        if reads:
            # DALI's readers never run again after an error: new ones stand there again.
            stands = self._stand_again_at(here)
            cure = ""
            if is_unmappable(failed):
                if stands and self._source.unmap():
                    return True  # an empty file fails alone now, and not the batches before it
                cure = "; pass dont_use_mmap=True to its reader, and an empty file fails alone"
            what = f"can't be read{cure}; the next call tries it again"
            if self._config.on_error == "skip" and not environment:
                what += (
                    ". on_error='skip' can't leave it out: DALI's reader itself refuses the file, "
                    "and stops. Repair or remove the file, or use a source of dalijax.sources, "
                    "which leaves out single records"
                )
            raise _described(failed, here, what, RuntimeError) from failed
        if environment and self._stand_again_at(here):
            what = "can't be made, and not because of its files; the next call tries it again"
            raise _described(failed, here, what, RuntimeError) from failed
        if self.runner().stopped:  # by this batch, or by one prefetched behind it
            self._stand_again_at(here)
            raise _described(failed, here, _STOPPED, RuntimeError) from failed
        return False

    def _checkpoints_after(self, here: Position, failed: bool) -> Checkpoints:
        """Where the pipelines must stand for the batch behind a position."""
        before = here.checkpoints or Checkpoints()
        later = Checkpoints(before.data, before.to_drop + 1)
        if failed:  # DALI's checkpoint is incomplete then, and others may fail, too
            self._most_to_drop = 0
            return later
        # Batches of a reader may be run again; other sources may end in between, or can't be built.
        again = self._config.reader_name is not None and self._source.rebuildable
        begun = here.step == 0 or later.data is None
        if again and not begun and later.to_drop < self._most_to_drop:
            return later
        return Checkpoints(self.runner().checkpoints())

    def _to_batch(self, outputs: Sequence[Outputs], here: Position) -> Batch:
        runner = self._runner_at(here)
        return self.make_batch(outputs, self._valid(outputs, here), not runner.dynamic)

    def _sample(self) -> Batch:
        """A first batch of new pipelines; the position and its pipelines stay as they are."""
        runner = Runner(self._source.build())

        def batch(outputs: Sequence[Outputs]) -> Batch:
            valid = [len(tensors[0]) for tensors in outputs]
            return self.make_batch(outputs, valid, True)

        try:
            for _ in range(MOST_SKIPPED):
                with contextlib.suppress(RuntimeError):  # another batch has the same spec
                    return runner.take(batch)
            return runner.take(batch)
        finally:
            runner.close()

    def _run(self, here: Position, convert: Callable[[Sequence[Outputs]], Any]) -> Any:
        runner = self._runner_at(here)
        try:
            return runner.take(convert)
        except SourceEnded:
            if here.step > 0 and self.plan is None:
                raise
        if here.step == 0:
            return self._run_first(runner, here, convert)
        if again := min(runner.to_drop, here.step):
            # Its epoch ended before the first batch of this one; those are dropped again.
            runner.restart(again)
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        raise _NoBatch(
            f"the pipeline's source ended after {here.step} of {self._length_of(here.epoch)} "
            f"batches of epoch {here.epoch}: it gives fewer samples than the epoch's size. Pass "
            f"the size that it really has, a multiple of the batch size {self.batch_size} where "
            "it drops the rest"
        )

    def _run_first(
        self, runner: Runner, here: Position, convert: Callable[[Sequence[Outputs]], Any]
    ) -> Any:
        """Runs the first batch of an epoch, whose source has ended before it."""
        if self.plan is not None:
            # The source's epoch ended with ours; that of a source without a plan was
            # started by next_epoch().
            runner.restart()
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        if self._source.rebuildable:
            # An iterable is used up, but its pipeline's function makes it anew.
            checkpoints = runner.checkpoints()
            self.drop()
            runner = self._runner = Runner(self._source.build(checkpoints))
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        raise _NoBatch(
            f"the pipeline's source gives no batch in epoch {here.epoch}: it is used up. Let "
            "fn.external_source start again by cycle='raise' (an iterable or a generator "
            "function), or create the iterator that it reads inside the pipeline function"
        )


def _described(error: RuntimeError, here: Position, what: str, kind: type[_Error]) -> _Error:
    """Returns DALI's error with the number of its batch, and what happens to it."""
    why = f"{describe(failure_of(error), (), every=False)}\nDALI says: {advice.of_run(error)}"
    described = kind(f"batch {here.step} of epoch {here.epoch} {what}: {why}")
    described.__cause__ = error
    return described


def _batch_error(error: RuntimeError, here: Position) -> BatchError:
    """Returns the error of a batch that counts as delivered."""
    described = _described(error, here, _COUNTS, BatchError)
    described.unexplained = not failure_of(error).reads_file
    return described


def _refusal(error: Exception) -> Exception:
    """Returns a StateError if DALI refused checkpoints, and the error if the graph failed."""
    if isinstance(error, StateError) or not advice.is_of_dali(error):
        return error
    refusal = StateError(f"DALI refuses its part of the state: {error}")
    refusal.__cause__ = error
    return refusal


def _check_forms(saved: ReaderState, reader: str | None) -> None:
    """Raises StateError where saved checkpoints are none that DALI gives.

    Args:
        saved: The state.
        reader: Name of the reader whose epochs the fingerprint has.
    """
    data, position = saved.fingerprint, saved.position
    operators = [split_line(line) for line in data["operators"]]
    known = {name for kind, name, _ in operators if reader_of(kind) in _KNOWN_STATES}
    readers = dict.fromkeys(known, _MOST_SAMPLES)
    if reader in readers and min(data["epoch_size"], data["num_shards"], data["batch_size"]) > 0:
        # Of a pass over its shard, which is filled up to whole batches.
        readers[reader] = data["epoch_size"] // data["num_shards"] + 1 + data["batch_size"]
    pieces = [one.data or () for one in (position.checkpoints, position.epoch_start) if one]
    forms = [[check_form(piece, readers) for piece in group] for group in pieces]
    if len(forms) < 2 or not forms[1]:
        return
    # DALI reads the part of the epoch's start when the iterator is reset, long after this.
    differ = len(forms[0]) != len(forms[1])
    for here, start in zip(*forms):
        states = [(here[name], start[name]) for name in here.keys() & start.keys()]
        differ = differ or here.keys() != start.keys()
        differ = differ or any(a != b and None not in (a, b) for a, b in states)
    if differ:
        raise StateError("DALI's parts of the state are of different graphs")
