"""The base of engines: pipelines at the position of an iterator's consumer."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jax.profiler import TraceAnnotation
from nvidia.dali import Pipeline

from ..config import IteratorConfig
from ..errors import BatchError, GraphError, ProcessError, RecordError
from ..order.epochs import EpochPlan
from ..placement import GlobalPlacement
from ..state.agreement import Values
from ..state.position import FailedBatch
from ..stats import UNTRACED, InputStats
from .bad_record import MOST_UNEXPLAINED, every_batch_failed, graph_error
from .batch import Batch, BatchMaker, choose_placement
from .calls import calls
from .failed_batches import FailedBatches
from .processes import Agreement, agreement_of
from .traced import check_not_traced, trace_state_clean

_log = logging.getLogger("dalijax")
P = TypeVar("P")
Mark = Mapping[str, Any]  # the attributes of an engine that make up its position, by name
# What skip() takes.
COUNT = "a whole number of batches, 0 or more (reset() and set_state() go back)"
_UNCOUNTED = contextlib.nullcontext()
CLOSED = "the iterator is closed: make a new one"
# Seconds that close() waits for a call in another thread.
_PATIENCE = 5.0


class NoReplica(Exception):
    """No pipelines of the same graph can run beside an engine's own; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[P]):
    """The result of a run, and the position behind it.

    Attributes:
        after: The position behind the run; at the end of an epoch, that end.
        batch: The batch, where there is one.
        error: An error that counts as a batch.
        ended: Whether the epoch has no further batch.
        mapped: The batch after ``batch_map``, once it was applied.
        masked: A note of the records that are masked in the batch, if any.
        failures: Number of batches that failed, those included that were left out before it.
    """

    after: P
    batch: Batch | None = None
    error: Exception | None = None
    ended: bool = False
    mapped: Batch | None = None
    masked: FailedBatch | None = None
    failures: int = 0

    def unwrap(self) -> Batch:
        """The batch.

        Raises:
            StopIteration: If the epoch has no further batch.
            Exception: The error that counts as a batch.
        """
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # the error's traceback has this frame: together they would stay
        if self.ended or self.batch is None:
            raise StopIteration
        return self.batch if self.mapped is None else self.mapped


def log_failure(verb: str, failed: FailedBatch) -> FailedBatch:
    """Warns of a batch that was skipped, or has masked records; returns it."""
    _log.warning("%s: %s", verb, failed.message)
    return failed


class Engine(abc.ABC, Generic[P]):
    """The pipelines of one iterator, at the consumer's position; who calls it holds its lock.

    There is one position. A batch that was looked at is kept beside it, with the position behind
    it, so that looking moves nothing.

    Args:
        start: The position of the first batch.
        config: The iterator's arguments.

    Attributes:
        position: The position of the next batch to deliver.
        make_batch: Makes the batches of the pipelines' outputs.
        errors: The batches that ``on_error="skip"`` left out, and those with masked records.
        closed: Whether `close` was called.
        process: The process that built pipelines; 0 until one has.
    """

    # The attributes that a call may change together with the position. They are replaced, never
    # changed in place, so that a mark stays what it was.
    _marked: ClassVar[tuple[str, ...]] = ("position", "_must_agree")

    def __init__(self, start: P, config: IteratorConfig):
        self.position = self._beginning = start
        placement = choose_placement(config)
        self._placement = placement if isinstance(placement, GlobalPlacement) else None
        self.make_batch = BatchMaker(config, placement)
        self._data_shards = placement.shards  # of each pipeline, where batches are placed by them
        self._config = config
        self._batch_map_names = () if config.batch_map is None else config.batch_map.names
        self.errors = FailedBatches()
        self.closed = False
        self.process = 0
        self._works = False  # whether a batch was made: the graph does not fail for every record
        self._unexplained = 0  # batches that an operator failed for
        self._outcome: Outcome[P] | None = None
        self._interrupted: Mark | None = None  # where an interrupted call began
        self._lock = threading.RLock()
        self._agreement: Agreement | None = None
        self._must_agree = False
        self._end_cure = ""  # if only the data tell where they end: the cure if ends differ
        self._end: tuple[int, int] | None = None  # epoch and step of an end that was agreed on
        self._calls = calls  # modules lose their names before the last iterators are freed
        self._one_call = _Interruptible(self)

    @property
    def lock(self) -> threading.RLock:
        """The lock of every call.

        Raises:
            RuntimeError: In a child that was forked from the process with the pipelines.
        """
        if self.process not in (0, os.getpid()):  # whose threads may have held it
            raise RuntimeError(
                f"the iterator's pipelines are those of process {self.process}, from which this "
                f"one, {os.getpid()}, was forked: their threads are not here. Make the iterator "
                "in the child (for a GPU, in a process that was not forked), start workers by "
                "'spawn' or 'forkserver', or have Grain start them: ds.mp_prefetch(...)"
            )
        return self._lock

    def peek(self) -> Outcome[P]:
        """The next batch, an error that counts as one, or the end of the epoch.

        Raises:
            Exception: What the pipelines' own source raised; its batch stays the next one.
        """
        if self._outcome is None:
            self._outcome = self._next_outcome()
        return self._outcome

    def peek_mapped(self) -> Outcome[P]:
        """The outcome of `peek`, with the batch that is delivered: after ``batch_map``.

        Raises:
            BatchMapError: If a function failed; the batch stays the next one.
            Exception: As `peek`.
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
        """Returns the seed of ``batch_map``'s keys, the same in all processes."""

    def advance(self) -> None:
        """Moves behind the batch that `peek` gives."""
        self.position = (self._outcome or self.peek()).after
        self._outcome = None

    def deliver(self, stats: InputStats | None) -> Outcome[P]:
        """Delivers the next batch: counts it, if there are counters, and moves past it.

        Raises:
            ProcessError: If the iterators of several processes differ; nothing has moved.
            RuntimeError: If JAX traces the caller.
        """
        if not trace_state_clean():
            check_not_traced()
        if self._must_agree:
            self._agree_or_tell()
        with _UNCOUNTED if stats is None else stats.waiting():
            annotation: Any = UNTRACED
            if TraceAnnotation.is_enabled():
                annotation = TraceAnnotation("dalijax.next", epoch=self.epoch, step=self.step)
            with annotation:
                outcome = self.peek_mapped()
            if outcome.ended and self._agreement is not None:
                self._agree_on_end(self._agreement)
            try:
                if stats is not None and not outcome.ended:
                    self.count(stats, outcome)
                self.advance()
                return outcome
            finally:
                del outcome  # an error's traceback leads to this frame: they would keep the batch

    # Several processes

    def compare_processes(self, name: str, outline: Values) -> None:
        """Has the first batch wait until all processes of the global batch have the same iterator.

        Only `deliver` waits: every process takes each batch of a global array, but one of them may
        peek, or ask for element_spec, alone.

        Args:
            name: Name of the iterator, for errors.
            outline: Those values that need no reading and no pipeline.
        """
        if self._config.sharding is not None or self._config.hosts[1] > 1:
            self._agreement = agreement_of(self._config, name, outline)
        self.moved()

    def moved(self) -> None:
        """Has the next batch wait until all processes stand at the same position."""
        self._must_agree = self._agreement is not None

    def _agree_or_tell(self) -> None:
        """As `_agree`; the other processes learn of an error at once."""
        try:
            self._agree()
        except ProcessError:
            raise
        except BaseException as error:
            if self._agreement is not None:
                self._agreement.tell(error)
            raise

    def _agree(self) -> None:
        """Compares this process's iterator with those of the others."""
        if self._agreement is not None:
            self._agreement.settle(self._shared_values())
        self._must_agree = False

    def _agree_on_end(self, agreement: Agreement) -> None:
        """Checks that all processes end after the same batch, if only the data tell the end.

        A process that has more batches waits for this one in its step, and never comes: better an
        error than a loop that waits for ever.
        """
        end = self.epoch, self.step
        if self._end_cure and self._end != end:
            values = {**agreement.outline, "batches": f"{self.step} in epoch {self.epoch}"}
            agreement.settle(values, f"the end after {self.step} batches", cure=self._end_cure)
            self._end = end

    def _shared_values(self) -> Values:
        """What must be equal in all processes; may build the pipelines."""
        return {}

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Context manager of a call that moves; a call that Ctrl-C interrupts moves nothing.

        The next call rolls the position back, since a second Ctrl-C may interrupt any handler.
        These contexts can't be nested.
        """
        return self._one_call

    def mark(self) -> Mark:
        """The position and everything that belongs to it, for `go_back`."""
        own = vars(self)
        return {name: own[name] for name in self._marked}

    def go_back(self, mark: Mark) -> bool:
        """Returns to a mark, which may be one of another engine of the same pipelines.

        Returns:
            False if the pipelines can't be built to stand there; nothing has changed then.
        """
        self.roll_back()
        if all(vars(self)[name] is value for name, value in mark.items()):
            return True
        possible = self._can_return_to(mark)
        if possible:
            self._interrupted = mark
            self.roll_back()
        return possible

    def roll_back(self) -> None:
        """Returns to the start of an interrupted call, if there is one."""
        before = self._interrupted
        if before is None:
            return
        if self._can_return_to(before):
            self._return_to(before)
        self._interrupted = None  # last: a roll-back that is interrupted itself begins again

    def _can_return_to(self, mark: Mark) -> bool:
        """Whether new pipelines can be built to stand at a mark."""
        return self._can_stand_at(mark["position"])

    def _return_to(self, mark: Mark) -> None:
        self.drop()
        vars(self).update(mark)

    def snapshot(self) -> P:
        """The position, for any thread; the one before a call that is under way or interrupted."""
        before = self._interrupted
        position: P = self.position if before is None else before["position"]
        return position

    def close(self) -> None:
        """Frees the pipelines for good; may be called again, and without the lock.

        A call in another thread may wait for a disk or a network. If it does not end within five
        seconds, it frees the pipelines when it ends.
        """
        self.closed = True
        if self._calls.lost(self.process):  # whoever has the lock may never give it back
            return
        self._stop_waiting()
        if self._lock.acquire(timeout=_PATIENCE):
            try:
                self.drop()
            finally:
                self._lock.release()

    def _stop_waiting(self) -> None:
        """Has a call that waits for a source raise an error, if that is possible."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Number of batches of the epoch that are behind the consumer, failed ones included."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Builds the pipelines at the position, unless they are built."""

    @abc.abstractmethod
    def schedule(self) -> None:
        """Builds the pipelines, unless they are built, and schedules runs without waiting."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Frees the pipelines and what was peeked; the next use builds them, at the position."""

    @abc.abstractmethod
    def count(self, stats: InputStats, outcome: Outcome[P]) -> None:
        """Counts a batch that is delivered."""

    def _fault_of_graph(self, error: Exception) -> GraphError | None:
        """Counts an error that ``on_error="skip"`` leaves out.

        Returns:
            An error to raise instead, if the graph has failed for every batch so far.
        """
        if not isinstance(error, (BatchError, RecordError)) or not error.unexplained:
            return None
        self._unexplained += 1
        if self._works or self._unexplained < MOST_UNEXPLAINED:
            return None
        return graph_error(error, self._unexplained)

    def _left_out(self, epoch: int, step: int, error: Exception) -> FailedBatch:
        """Logs and returns a batch that ``on_error="skip"`` leaves out."""
        files = error.files if isinstance(error, BatchError) else ()
        return log_failure("skipped", FailedBatch(epoch, step, str(error), files))

    def _behind_skipped(
        self, outcome: Outcome[P], skipped: Sequence[FailedBatch], from_start: bool
    ) -> Outcome[P]:
        """Returns the outcome after some batches that were left out, which `errors` then has.

        Args:
            outcome: The outcome.
            skipped: The batches.
            from_start: Whether they begin with the first batch of the epoch: if the epoch ends
                after them, every batch of it failed, and that is an error.
        """
        if not skipped:  # also for the speed of next()
            return outcome
        self.errors.extend(skipped)
        outcome = dataclasses.replace(outcome, failures=outcome.failures + len(skipped))
        if outcome.ended and from_start:
            return dataclasses.replace(outcome, error=every_batch_failed(skipped))
        return outcome

    @abc.abstractmethod
    def _next_outcome(self) -> Outcome[P]:
        """The first outcome from the position on that ``on_error`` does not leave out."""

    def _can_stand_at(self, position: P) -> bool:
        """Whether new pipelines can be built to stand at a position."""
        return True


class EpochEngine(Engine[P]):
    """An engine whose batches come in epochs, under an iterator of ours.

    DALI's readers and indexed sources are such engines; an iterator does not know which it has.

    Args:
        start, config: As for `Engine`.

    Attributes:
        name: The name of the pipelines.
        batch_size: Batch size of each pipeline; 0 until it is known.
        plan: The epochs; None where only the source knows their end, and before the first build.
        shards: The shard of each pipeline in epoch 0.
        device_ids: The GPU of each pipeline, None for the CPU; empty until they are known.
        stays: Whether the position was set last, so that ``iter()`` does not move.
        stopped: Whether StopIteration was raised in this epoch.
    """

    _marked = (*Engine._marked, "stays", "stopped")

    def __init__(self, start: P, config: IteratorConfig):
        super().__init__(start, config)
        self.name = ""
        self.batch_size = 0
        self.plan: EpochPlan | None = None
        self.shards: tuple[int, ...] = ()
        self.device_ids: tuple[int | None, ...] = ()
        self.stays = self.stopped = False

    @property
    @abc.abstractmethod
    def num_failed(self) -> int:
        """Number of batches behind the consumer that failed."""

    @abc.abstractmethod
    def length(self) -> int | None:
        """Number of batches that the epoch delivers, if known; builds nothing."""

    @abc.abstractmethod
    def following_epoch(self) -> int:
        """Number of the next epoch that has a batch of its own."""

    @abc.abstractmethod
    def at_end(self) -> bool:
        """Whether every batch of the epoch is behind the consumer."""

    @abc.abstractmethod
    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next one."""

    @abc.abstractmethod
    def rewind(self) -> None:
        """Moves back to the start of the epoch.

        Raises:
            RuntimeError: If the pipelines can't be built to stand there.
        """

    @abc.abstractmethod
    def skip(self, batches: int) -> int:
        """Moves behind so many batches, or to the end of the epoch; returns their number."""

    @abc.abstractmethod
    def go_to(self, position: P) -> None:
        """Moves to a position."""

    def restart(self) -> None:
        """Moves to the first batch of all, with new pipelines of a reader."""
        self.go_to(self._beginning)

    def begin_with(self, epoch: int) -> None:
        """Makes an epoch the first one, and moves to its start; over a source alone.

        Raises:
            ValueError: If the pipelines read in order alone.
        """
        self.seek(epoch, 0)

    def locate(self, batch: int) -> tuple[int, int] | None:
        """The epoch and the step of a batch counted over all epochs; None over a reader.

        Raises:
            ValueError: If the number does not determine the batch.
        """
        return None

    def seek(self, epoch: int, step: int, first: int = 0) -> None:
        """Moves to a batch of an epoch, counted from the start in batches of the present size.

        Raises:
            ValueError: If there is no such batch, or the pipelines read in order alone.
        """
        raise ValueError(
            f"seek({epoch}, {step}): a reader goes to where it has a state of alone. Use "
            "set_state(), or a source of dalijax.sources, which goes anywhere"
        )

    # States

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The consumer's position, as a plain JSON value.

        Raises:
            StateError: If the pipelines can't be resumed.
        """

    @abc.abstractmethod
    def set_state(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str], named: Sequence[str]
    ) -> None:
        """Moves to the position of a state.

        Args:
            state: What `get_state` gave.
            allow: Names of differences to go on with.
            named: Further ones, each of which must name something.

        Raises:
            StateError: If it is no state, or one of other data; nothing has changed.
            Exception: If no pipelines can be built at all; nothing has changed.
        """

    def checkpoint(self) -> None:
        """Notes what a state of the position needs, before peeking moves the pipelines on."""

    def stands_restored(self) -> bool:
        """Takes the position of checkpoints that the pipelines were made at; False without any."""
        return False

    @abc.abstractmethod
    def checkpoints(self) -> list[bytes]:
        """The state as bytes for each pipeline.

        Raises:
            StateError: If the pipelines can't be resumed.
        """

    @abc.abstractmethod
    def set_checkpoints(self, pieces: Sequence[bytes], allow: Sequence[str]) -> None:
        """Moves to the position of `checkpoints`; raises as `set_state`."""

    @abc.abstractmethod
    def keep_seed(self, other: Any) -> None:
        """Takes the seed that a state brought to another engine of the same kind."""

    # Pipelines

    def start(self) -> None:
        """Builds the pipelines at once, so that the first state says what they read."""
        self.prepare()

    @abc.abstractmethod
    def replicas(self) -> contextlib.AbstractContextManager[tuple[list[Pipeline], str]]:
        """Pipelines of the same graph, to run beside these, which stay as they are.

        Returns:
            A context with the pipelines, not built, and the name of what feeds them ("" where a
            reader or another operator of theirs does). They run within it alone.

        Raises:
            NoReplica: If there are none: the message says why.
        """

    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of a whole batch; takes at most one, which stays next."""
        outcome = self.peek()
        outcome = dataclasses.replace(outcome, mapped=None)
        batch = self._sample() if outcome.ended else outcome.unwrap()
        specs = self.make_batch.spec(batch, self.batch_size, self.plan)
        if self._config.batch_map is None:
            return specs
        return self._config.batch_map.specs(specs, self._config.mask, self._placement)

    @abc.abstractmethod
    def _sample(self) -> Batch:
        """A batch for `spec` at the end of an epoch; the position stays."""


class _Interruptible:
    """The context manager of `Engine.interruptible`.

    It is a class, since a generator costs 3 us for each batch.
    """

    def __init__(self, engine: Engine[Any]):
        # Weak: else engines, and their pipelines, would be freed by Python's cyclic gc alone.
        self._engine = weakref.ref(engine)

    def __enter__(self) -> None:
        engine = self._engine()
        if engine is not None:
            if engine._interrupted is not None:
                engine.roll_back()
            engine._interrupted = engine.mark()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        engine = self._engine()
        if engine is None:
            return
        if kind is None or issubclass(kind, Exception):
            engine._interrupted = None
        if engine.closed:  # by another thread, which did not wait for this call
            engine.drop()


# Makes the engine of a new iterator, if it is not that of DALI's readers.
MakeEngine = Callable[[IteratorConfig], EpochEngine[Any]]
