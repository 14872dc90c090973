"""`ReaderEngine`: runs pipelines with DALI readers, or with the user's ``external_source``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvidia.dali import Pipeline

from ..config import IteratorConfig
from ..errors import BatchError, StateError
from ..order.epochs import count_rows
from ..pipeline import advice
from ..pipeline.batch import Batch
from ..pipeline.dali_pipeline import is_unmappable, operator_name, runs_python
from ..pipeline.engine import CLOSED, Cursor, EpochCursor, EpochEngine, NoReplica, Outcome
from ..pipeline.failure import EnvironmentFailure, failure_of
from ..pipeline.failure_errors import MOST_SKIPPED
from ..pipeline.pipeline_factory import PipelineFactory, check_resumable
from ..pipeline.reader import (
    check_epochs,
    check_orders,
    check_shards,
    epochs_of,
    graph_operators,
    warn_of_rotated_videos,
)
from ..pipeline.runner import (
    Outputs,
    Runner,
    SourceEnded,
    SourceError,
    discard,
)
from ..state import dali_checkpoints, reader_state
from ..state.agreement import Values, without_seeds
from ..state.differences import check, differences, different_data_error
from ..state.fingerprint import Fingerprint, fingerprint, unknown
from ..state.operators import operators
from ..state.position import Checkpoints, ReaderPosition
from ..state.reader_state import ReaderState
from ..stats import InputStats
from .bad_files import name_codec, name_files, with_description
from .reader_errors import counted_failure, exhausted_retries, stopped, unread
from .restoring import restored

# Taking a checkpoint of DALI costs 7 to 38 us. A checkpoint is taken when a state is requested
# (`EpochEngine.checkpoint`), and otherwise after this number of batches. After a failed batch or
# Ctrl-C, DALI has no checkpoint, and the batches since the last checkpoint run again.
_MOST_TO_DROP = 8
_MOST_NAMED = 8  # the most failed batches whose files are named: each needs new pipelines


class _NoBatch(RuntimeError):
    """Raised if an ``external_source`` ends before the epoch does."""


@dataclasses.dataclass(frozen=True)
class ReaderCursor(EpochCursor[ReaderPosition]):
    """The cursor of a `ReaderEngine`; see `EpochCursor`.

    Attributes:
        seed: The seed of a restored state; None: the seed of the iterator's arguments.
    """

    seed: int | None = None


class ReaderEngine(EpochEngine[ReaderPosition]):
    """Runs pipelines that read data themselves, by DALI readers or ``external_source``.

    See `EpochEngine`.

    Args:
        factory: The factory of the pipelines.
        config: Arguments of the iterator.
    """

    cursor: ReaderCursor

    def __init__(self, factory: PipelineFactory, config: IteratorConfig):
        if config.on_error == "mask":
            raise ValueError(
                "on_error='mask' requires a source, whose records are known. A reader's batch "
                "fails as a whole: use on_error='skip'"
            )
        super().__init__(ReaderCursor(ReaderPosition()), config)
        self.name = factory.name
        self._factory = factory
        self._fingerprint: Fingerprint | None = None  # except for the seed; see `fingerprint`
        self._start = Checkpoints()  # checkpoints of the first batch, once pipelines were built
        # Current epoch, its number of batches, and its number of leading batches without padding.
        self._epoch_length = (-1, 0, 0)
        # Position of the pipelines; None if a batch failed.
        self._exact: ReaderPosition | None = None
        self._discards = False  # whether batches are skipped, without conversion to arrays
        self._most_to_drop = _MOST_TO_DROP
        self._failures_to_name = _MOST_NAMED
        self.compare_processes(factory.name, self._outline())

    def _outline(self) -> dict[str, Any]:
        """Returns the values of `_shared_values`, by name, that are known without pipelines."""
        config = self._config
        return {
            "function": self._factory.name,
            "outputs": ", ".join(config.output_map),
            "reader": str(config.reader_name),
            "size": config.size,
            "last batch": config.last_batch_policy.name,
            "mask": str(config.mask),
            "on_error": config.on_error,
        }

    def _shared_values(self) -> Values:
        """Returns the values, by name, that must be equal in all processes; may build pipelines."""
        self.prepare()
        if self.plan is None:
            self._end_cure = (
                "End the source of every process after the same number of batches, or pass size, "
                "the number of samples of an epoch"
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
        if plan is None or plan.num_shards == shards:  # otherwise each shard has its own files
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
        """Number of batches of the epoch before the position, including failed batches."""
        return self.position.step

    @property
    def num_failed(self) -> int:
        """Number of failed batches before the position."""
        return self.position.errors

    def skip(self, batches: int) -> int:
        """Moves past up to ``batches`` batches of the epoch; returns the number of batches."""
        skipped = 0
        self._discards = True
        try:
            while skipped < batches and not self.peek().ended:
                self.advance()
                skipped += 1
        finally:
            self._discards = False
        return skipped

    def at_end(self) -> bool:
        """Returns whether all batches of the epoch are before the position."""
        peeked = self._outcome
        if peeked is not None:  # failed batches, which are still to be skipped, may precede the end
            return peeked.ended and peeked.after.step == self.position.step
        return self._is_end(self.position)

    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next epoch."""
        if self._outcome is not None:
            self.advance()
        self.prepare()
        self.checkpoint()
        position = self._with_start(self.position)
        start, epoch = position.checkpoints or Checkpoints(), position.epoch + 1
        if self.plan is not None:
            epoch = self.plan.next_epoch(position.epoch)
            num_run = self.plan.first_batch(position.epoch) + position.step
            skipped = self.plan.first_batch(epoch) - num_run
            start = start.later(skipped)
            self.prepare().to_drop += skipped
        else:
            self.prepare().restart()
            start = Checkpoints(self.prepare().checkpoints())
        self.change(position=ReaderPosition(epoch, 0, start, start, position.errors))

    def rewind(self) -> None:
        """Moves back to the start of the epoch.

        Raises:
            RuntimeError: If the pipelines' state at the start is unknown.
        """
        position = self.position
        if position.step == 0:
            return
        start = position.epoch_start or Checkpoints()
        exact = start.data is not None and not self._factory.unresumable
        if not self._factory.rebuildable or not (exact or position.epoch == 0):
            reason = self._factory.unresumable or "the pipelines can't be rebuilt"
            raise RuntimeError(
                f"reset() at batch {position.step} of epoch {position.epoch} can't return to the "
                f"start of the epoch: {reason}. Finish the epoch first, or use "
                "dalijax.data_iterator over a reader that DALI can checkpoint"
            )
        checkpoints = start if exact else None
        self.go_to(ReaderPosition(position.epoch, 0, checkpoints, checkpoints, position.errors))

    def go_to(self, position: ReaderPosition) -> None:
        """Moves to a position, and frees the pipelines; their next use builds them there."""
        self.drop()
        self.change(position=position)

    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position as a JSON value; see `EpochEngine`."""
        check_resumable(self._factory)
        self.checkpoint()
        # The first state of a lazy iterator does not change when the pipelines are built.
        is_built = self.position.checkpoints is not None
        data = self.fingerprint() if is_built else self._unknown()
        return reader_state.encode(self.position, data)

    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state; see `EpochEngine`.

        `state.reader_state` decodes the state, by the rules of `state.envelope`. `restore` compares
        the state's fingerprint with this iterator's fingerprint (`state.differences`), and the
        position with the epochs (`order.epochs`). The factory then builds pipelines from DALI's
        checkpoints (`pipeline.pipeline_factory`, `pipeline.dali_pipeline`), and `pipeline.reader`
        derives the epochs of these pipelines. If a step fails, the engine moves back to its
        previous position.
        """
        check_resumable(self._factory)
        self.checkpoint()
        self.restore(reader_state.decode(state), allow, named)

    def adopt_seed(self, other: ReaderEngine) -> None:
        """Uses the seed that another engine restored from a state; builds no pipelines."""
        self._set_seed(other.cursor.seed)

    def _set_seed(self, seed: int | None) -> None:
        """Sets the seed of the next pipelines to a state's seed; None: the default."""
        self.change(seed=seed)
        self._factory.set_seed(seed)

    def checkpoints(self) -> list[bytes]:
        """Returns the state as one bytes object for each pipeline; see `EpochEngine`."""
        return dali_checkpoints.to_bytes(self.get_state())

    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves to the position of checkpoints of this package or of DALI's plugin."""
        saved = self._read_checkpoints(pieces)
        check_resumable(self._factory)
        self.restore(saved, allow)

    def _read_checkpoints(self, pieces: Sequence[bytes]) -> ReaderState:
        """Returns the position and fingerprint in checkpoints of this package or DALI's plugin."""
        saved = dali_checkpoints.read(pieces)
        if saved is not None:
            return saved
        self.prepare()  # DALI's counters can only be interpreted with the epochs
        position = dali_checkpoints.plugin_position(pieces, self.plan, self.shards)
        return ReaderState(position, self.fingerprint())

    def adopt_restored(self) -> bool:
        """Moves to the checkpoints with which the caller created the pipelines.

        Returns:
            Whether the pipelines were created with checkpoints.

        Raises:
            StateError: If the checkpoints belong to different data, or no iterator over these data
                can reach their position.
        """
        if not self._factory.restored:
            return False
        runner = self.prepare()
        saved = self._read_checkpoints(self._factory.restored)
        check_resumable(self._factory)
        if changes := differences(saved.fingerprint, self.fingerprint()):
            raise different_data_error(changes)
        self.change(position=saved.position)
        checkpoints = saved.position.checkpoints
        runner.to_drop = checkpoints.to_drop if checkpoints else 0
        return True

    def restore(
        self, saved: ReaderState, allow: Sequence[str] = (), named: Sequence[str] = ()
    ) -> None:
        """Moves to a saved position; builds new pipelines there if it has checkpoints.

        If the saved position is the current position, the pipelines stay.

        Args:
            saved: The saved position and the fingerprint of its data.
            allow: Names of differences to ignore.
            named: Further names of ignored differences; each must exist in a fingerprint.

        Raises:
            StateError: If the saved position belongs to different data, or DALI rejects its
                checkpoints. The position of the engine does not change.
            Exception: If no pipelines can be built. The position of the engine does not change.
        """
        with self._with_seed_of(saved.fingerprint):
            position, before = saved.position, self.position
            if self.batch_size or position.checkpoints is None:
                check(saved.fingerprint, self.fingerprint(), allow, named)
            if position == before:
                return
            if position.checkpoints is None:
                self.go_to(position)
                return
            if not self._factory.rebuildable:
                raise StateError(
                    "these pipelines can't be rebuilt, so set_state() can't restore them: DALI "
                    "does not serialize Python functions and sources of fn.external_source. Use "
                    "dalijax.data_iterator with their function, which can restore this state, or "
                    "create them from checkpoints() of an iterator"
                )
            try:
                position = restored(saved, self._build_anew, self.fingerprint, allow, named)
                self.change(position=position)
            except BaseException:
                self.go_to(before)
                raise

    @contextlib.contextmanager
    def _with_seed_of(self, saved: Fingerprint) -> Iterator[None]:
        """Context manager that adopts a state's seed, unless the caller gave a seed.

        If the block raises, the previous seed is set again.
        """
        seed, before = saved["seed"], self.cursor.seed
        is_same = self._fingerprint is not None and self.fingerprint()["seed"] == seed
        if is_same or not 0 <= seed < 1 << 63 or not self._factory.has_default_seed():
            yield
            return
        self._set_seed(seed)
        try:
            yield
        except BaseException:
            self._set_seed(before)
            raise

    def _return_to(self, cursor: Cursor[ReaderPosition]) -> None:
        super()._return_to(cursor)
        self._factory.set_seed(self.cursor.seed)

    def _number(self, outcome: Outcome[ReaderPosition]) -> tuple[int, int]:
        return outcome.after.epoch, outcome.after.step - 1  # skipped batches may precede it

    def _seed_of_keys(self) -> int:
        seed: int = self.fingerprint()["seed"]
        return seed

    def count(self, stats: InputStats, outcome: Outcome[ReaderPosition]) -> None:
        """Counts a delivered batch, its samples and its padding in ``stats``."""
        epoch, step = self._number(outcome)
        plan, rows = self.plan, self.batch_size * len(self.shards)
        examples, padding = rows, 0
        if plan is not None:
            valid = sum(plan.valid(epoch, step, shard) for shard in self.shards)
            examples, padding = count_rows(rows, valid, plan.policy, plan.padded)
        stats._delivered(epoch, step, examples, padding, outcome.after.errors)

    def checkpoint(self) -> None:
        """Stores DALI's checkpoint of the position, before the next run replaces the checkpoint."""
        position = self.position
        if position is self._exact and position.checkpoints and position.checkpoints.to_drop:
            exact = Checkpoints(self.prepare().checkpoints())
            self._exact = dataclasses.replace(position, checkpoints=exact)
            self.change(position=self._exact)

    # The pipelines

    def start(self) -> None:
        """Builds the pipelines; the position of the start gets their first checkpoints."""
        self.prepare()
        self.change(position=self._with_start(self.position))

    @contextlib.contextmanager
    def replicas(self) -> Iterator[tuple[list[Pipeline], str]]:
        """Creates pipelines of the same graph, to run in addition; see `EpochEngine`."""
        pipelines = [define(None) for define in self._factory.definitions()]
        if not pipelines:
            raise NoReplica(
                "the graph of handmade pipelines can't be replicated. Use dalijax.data_iterator, "
                "which calls the function that defines the graph"
            )
        # Running replicas would advance a Python source, or the state of a function.
        reason = self._factory.unresumable
        python = [operator for operator in operators(pipelines[0]) if runs_python(operator)]
        # Private in DALI: the group of an external source.
        if any(
            getattr(getattr(operator, "_group", None), "parallel", False) for operator in python
        ):
            reason = "parallel=True has its own worker processes"
        if reason and python:
            names = ", ".join(dict.fromkeys(map(operator_name, python)))
            raise NoReplica(f"{names} can't run a second time in parallel: {reason}")
        yield pipelines, ""

    def _with_start(self, position: ReaderPosition) -> ReaderPosition:
        """Returns a position with checkpoints; the start gets the pipelines' first checkpoints.

        The position of a lazy engine stays without checkpoints until it moves, so that the first
        state does not change when the pipelines are built.
        """
        if position.checkpoints is not None:
            return position
        return dataclasses.replace(position, checkpoints=self._start, epoch_start=self._start)

    def _runner_at(self, position: ReaderPosition) -> Runner:
        if self.closed:
            raise ValueError(CLOSED)
        if (runner := self._runner) is None:
            runner = self._build(position.checkpoints or Checkpoints())
            if position.checkpoints is None:
                self._start = Checkpoints(runner.checkpoints())
        return runner

    def _build(self, checkpoints: Checkpoints) -> Runner:
        self.process = os.getpid()
        pipelines = self._factory.build(checkpoints.data)
        self._read_plan(pipelines)
        runner = Runner(pipelines, checkpoints.to_drop, self._factory.owned)
        self._runner = runner
        return runner

    def _build_anew(self, checkpoints: Checkpoints) -> Runner:
        """Replaces the pipelines by pipelines at checkpoints."""
        self.drop()
        return self._build(checkpoints)

    def _read_plan(self, pipelines: Sequence[Pipeline]) -> None:
        """Sets the names of outputs, the epochs, shards and devices from built pipelines.

        Raises:
            ValueError: If the arguments do not match the pipelines or the reader.
            StateError: If the number of samples has changed since the first build.
        """
        config, factory = self._config, self._factory
        self.learn_outputs(pipelines[0], factory.name)
        plan, shards = epochs_of(pipelines, config, self._data_shards)
        if not self.shards:
            check_shards(pipelines, config, self._data_shards, factory)
            check_orders(pipelines, factory)
            warn_of_rotated_videos(pipelines[0])
            if plan is None:
                check_epochs(pipelines, config, factory)
        elif plan and self.plan and plan.num_samples != self.plan.num_samples:
            # DALI would continue with other files, without a warning.
            raise StateError(
                f"the data of {self.name}() have changed since the iterator was created: "
                f"{self.plan.num_samples} -> {plan.num_samples} samples (then -> now). Restore the "
                "original files, or create a new iterator"
            )
        self.batch_size, self.plan, self.shards = pipelines[0].max_batch_size, plan, shards
        self._epoch_length = (-1, 0, 0)
        self.device_ids = tuple(pipeline.device_id for pipeline in pipelines)

    def fingerprint(self) -> Fingerprint:
        """Returns the fingerprint of the data, which states contain.

        The fingerprint describes the graph, the files of its readers, and the epochs. Its fields
        are empty until the pipelines are built for the first time.
        """
        if self._fingerprint is None:
            if not self.batch_size:  # never built
                return self._unknown()
            outputs = {"outputs": list(self._config.output_map)}
            self._fingerprint = (
                unknown()
                | outputs
                | fingerprint(
                    self.prepare().pipelines,
                    self.plan,
                    self.shards,
                    self._factory.serialized,
                    batch_map=self._batch_map_names,
                    bfloat16=self.make_batch.bfloat16,
                )
            )
        seed = self._factory.seed  # the common seed, instead of the first shard's
        if seed is None or seed < 0:  # for a negative seed, DALI draws a seed
            return self._fingerprint
        return self._fingerprint | {"seed": seed}

    def _unknown(self) -> Fingerprint:
        """Returns the fingerprint before the first build, whose fields about the data are empty."""
        return unknown() | {"outputs": list(self._given_names)}

    def _can_build_at(self, position: ReaderPosition) -> bool:
        checkpoints = position.checkpoints
        exact = checkpoints is None or checkpoints.data is not None
        return exact and self._factory.rebuildable and not self._factory.unresumable

    def _rebuild_at(self, position: ReaderPosition) -> bool:
        """Frees the pipelines if they can be rebuilt at a position; returns whether they can."""
        is_possible = self._can_build_at(position)
        if is_possible:
            self._stop()
        return is_possible

    def _stop(self) -> None:
        super()._stop()
        self._exact = None

    # Epochs

    def length(self) -> int | None:
        """Returns the number of batches that the epoch delivers, if known; builds no pipelines."""
        return self._length_of(self.epoch)

    def _length_of(self, epoch: int) -> int | None:
        if self.plan is None:
            return None
        if self._epoch_length[0] != epoch:
            delivered = self.plan.delivered(epoch, self.shards[0])
            num_full = min(self.plan.num_full(epoch, shard_id) for shard_id in self.shards)
            self._epoch_length = epoch, delivered, num_full
        return self._epoch_length[1]

    def following_epoch(self) -> int:
        """Returns the number of the next epoch that has a batch; it skips empty epochs."""
        return self.epoch + 1 if self.plan is None else self.plan.next_epoch(self.epoch)

    def _is_end(self, position: ReaderPosition) -> bool:
        runner = self._runner_at(position)
        total = self._length_of(position.epoch)
        if total is not None:
            return position.step >= total
        # If the source ended at the start of an epoch, it is restarted or an error is raised.
        return position.step > 0 and runner.ended()

    def _valid(self, outputs: Sequence[Outputs], position: ReaderPosition) -> list[int]:
        """Checks the size of each pipeline's batch; returns how many rows belong to the epoch."""
        lengths = [len(tensors[0]) for tensors in outputs]
        if self.plan is None:
            if self._config.over_processes and lengths != [self.batch_size]:
                raise ValueError(
                    f"the pipeline returned a batch of {lengths[0]} samples instead of "
                    f"{self.batch_size}. Over several processes each batch must be full, because "
                    "no process knows the batches of the others. Drop the remaining samples in the "
                    "external_source"
                )
            return lengths
        if lengths != [self.batch_size] * len(lengths):
            raise ValueError(
                f"the pipelines returned batches of {lengths} samples instead of "
                f"{self.batch_size}: with size or reader_name each batch must be full. For an "
                "external_source with smaller batches, omit size (-1)"
            )
        if self._epoch_length[0] == position.epoch and position.step < self._epoch_length[2]:
            return lengths
        return [self.plan.valid(position.epoch, position.step, shard) for shard in self.shards]

    # Batches

    def _first_position(self) -> ReaderPosition:
        self.prepare()
        return self._with_start(self.position)

    def _epoch_and_step(self, position: ReaderPosition) -> tuple[int, int]:
        return position.epoch, position.step

    def _with_files(self, error: BatchError, checkpoints: Checkpoints | None) -> BatchError:
        """Returns the error of a failed batch with names of files, for the first few failures."""
        is_named = self._failures_to_name > 0
        self._failures_to_name -= is_named
        if checkpoints is None or checkpoints.data is None:
            error = name_codec(error)
        elif is_named:
            place = checkpoints.data, checkpoints.to_drop
            error = name_files(error, self._factory, self._config.reader_name, *place)
        return with_description(error, self._pointer()) if is_named and not error.files else error

    def _pointer(self) -> str:
        """Returns the fix if a file of the pipelines' readers is a git-lfs pointer, or ""."""
        if self._runner is None:
            return ""
        return advice.pointer_cure(graph_operators(self._runner.pipelines[0], self._factory, 0))

    def _run_at(self, position: ReaderPosition) -> Outcome[ReaderPosition] | None:
        """Runs the batch at a position once, and returns the outcome; see `Engine`.

        Raises:
            EnvironmentFailure, RuntimeError: See `_can_run_again`.
            RuntimeError: If an ``external_source`` ends before the epoch does.
            Exception: Any error of an ``external_source``; its batch stays the next batch.
        """
        exact, self._exact = self._exact, None  # an interrupted run may have taken a batch
        batch: Any = None
        error: Exception | None = None

        def to_batch(outputs: Sequence[Outputs]) -> Batch:
            return self.make_batch(outputs, self._valid(outputs, position), not runner.dynamic)

        try:
            runner = self._runner_at(position)
            batch = self._run(runner, position, discard if self._discards else to_batch)
        except SourceEnded:
            self._exact = exact  # no batch was taken
            return Outcome(position, ended=True)
        except _NoBatch:
            raise
        except SourceError as failed:
            self._rebuild_at(position)
            raise failed.original() from None
        except RuntimeError as failed:
            if self._can_run_again(failed, position):
                return None
            counted = counted_failure(failed, self._label(position))
            error = self._with_files(counted, position.checkpoints)
        except Exception as failed:  # of converting the outputs to arrays
            error = failed
        after = ReaderPosition(
            position.epoch,
            position.step + 1,
            self._checkpoints_after(position, error is not None),
            position.epoch_start,
            position.errors + (error is not None),
        )
        self._exact = after if error is None else None
        return Outcome(after, batch, error)

    def _can_run_again(self, failed: RuntimeError, position: ReaderPosition) -> bool:
        """Returns whether to run a failed batch again in new pipelines.

        Otherwise, the batch counts as delivered.

        Raises:
            EnvironmentFailure: If the environment failed, and the pipelines can be rebuilt.
            RuntimeError: If the batch stays the next batch, because its reader failed, or the
                pipelines stopped.
        """
        failure = failure_of(failed)
        if failure.environment and self._rebuild_at(position):
            raise EnvironmentFailure(failure.message) from failed
        if failure.stops_reader:
            pointer = self._pointer()  # before the pipelines are freed
            # DALI's readers can't continue after an error: new pipelines are built at the position.
            stands = self._rebuild_at(position)
            if is_unmappable(failed) and stands and self._factory.unmap():
                return True  # now an empty file fails alone, without the batches before it
            skips = self._config.on_error == "skip"
            raise unread(failed, self._label(position), skips, pointer) from failed
        if self.prepare().stopped:  # after this batch, or a prefetched later batch, failed
            self._rebuild_at(position)
            raise stopped(failed, self._label(position)) from failed
        return False

    def _exhausted_retries(
        self, position: ReaderPosition, failed: EnvironmentFailure
    ) -> RuntimeError:
        return exhausted_retries(failed, self._label(position), self._config.on_error == "skip")

    def _checkpoints_after(self, position: ReaderPosition, failed: bool) -> Checkpoints:
        """Returns the checkpoints after the batch at a position, which was run."""
        before = position.checkpoints or Checkpoints()
        later = Checkpoints(before.data, before.to_drop + 1)
        if failed:  # DALI's checkpoint is incomplete, and other batches may fail, too
            self._most_to_drop = 0
            return later
        # Batches of a reader can run again; other sources may have ended, or can't be rebuilt.
        can_rerun = self._config.reader_name is not None and self._factory.rebuildable
        is_first = position.step == 0 or later.data is None
        if can_rerun and not is_first and later.to_drop < self._most_to_drop:
            return later
        return Checkpoints(self.prepare().checkpoints())

    def _sample(self) -> Batch:
        """Returns the first batch that new pipelines produce; the engine's pipelines don't move."""
        runner = Runner(self._factory.build())

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

    def _run(
        self, runner: Runner, position: ReaderPosition, convert: Callable[[Sequence[Outputs]], Any]
    ) -> Any:
        """Takes the batch at a position, and returns its converted outputs.

        If an ``external_source`` ended together with the previous epoch, it is restarted.

        Args:
            runner: The pipelines at the position.
            position: The position of the batch.
            convert: Converts the outputs of the pipelines; see `Runner.take`.

        Raises:
            SourceEnded: If the source ends the epoch.
            _NoBatch: If the source has ended before the epoch did.
            Exception: As `Runner.take`.
        """
        try:
            return runner.take(convert)
        except SourceEnded:
            if position.step > 0 and self.plan is None:
                raise
        if position.step == 0:
            return self._run_first(runner, position, convert)
        if num_dropped := min(runner.to_drop, position.step):
            # The source ended before the first batch of this epoch; drops these batches again.
            runner.restart(num_dropped)
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        raise _NoBatch(
            f"the pipeline's external_source ended after {position.step} of "
            f"{self._length_of(position.epoch)} batches of epoch {position.epoch}, because it has "
            "fewer samples than the epoch's size. Pass its true size, a multiple of the batch size "
            f"{self.batch_size} if it drops incomplete batches"
        )

    def _run_first(
        self, runner: Runner, position: ReaderPosition, convert: Callable[[Sequence[Outputs]], Any]
    ) -> Any:
        """Takes the first batch of an epoch if an ``external_source`` has ended; see `_run`."""
        if self.plan is not None:
            # The source's epoch ended together with ours. (Without a plan, next_epoch() has
            # already restarted the source.)
            runner.restart()
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        if self._factory.rebuildable:
            # An iterable is exhausted, but the pipeline's function creates a new iterable.
            checkpoints = runner.checkpoints()
            self.drop()
            runner = self._runner = Runner(self._factory.build(checkpoints))
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        raise _NoBatch(
            f"the pipeline's external_source is exhausted in epoch {position.epoch}. Pass "
            "cycle='raise' to it, so that it starts again (an iterable or a generator function), "
            "or create the iterator that it reads inside the graph function"
        )
