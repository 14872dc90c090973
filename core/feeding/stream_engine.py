"""Runs pipelines over a stream of records that is read in order, such as Grain's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments import function_parameters, is_pipeline_def
from ..config import IteratorConfig
from ..errors import BatchError, RecordError, StateError, UnfitRecordError
from ..messages.printable import printable_repr
from ..pipeline.engine import Cursor, Outcome
from ..pipeline.failure import failure_of
from ..pipeline.failure_errors import MOST_SKIPPED
from ..pipeline.pipeline_factory import GraphPipelineFactory, check_resumable
from ..pipeline.processes import Agreement
from ..pipeline.runner import Runner, SourceEnded, SourceError, discard
from ..state import differences, random_state
from ..state.agreement import Values
from ..state.fingerprint import Fingerprint
from ..stats import InputStats
from .fed_engine import FedEngine, sample_numbers
from .graph import record_graph
from .record_reader import Numbers, ReadError, RecordBatch, RecordPosition, RecordReader, Restored
from .record_supply import RecordRows, RecordSupply, ReplayQueue
from .stand_ins import NoStandIn, UnusableRecord
from .stream_part import PartReader, StreamPart
from .supply import RowSupply

# The number of batches that a process reads before it tells the others how many batches it has, if
# the number isn't known without reading.
_HELD = 2


def check_record_graph(pipeline_fn: Callable[..., Any]) -> None:
    """Raises TypeError if the function of a graph can't be fed with records."""
    if is_pipeline_def(pipeline_fn):
        raise TypeError(
            f"{pipeline_fn!r} is decorated with pipeline_def. Pass the undecorated function, "
            "whose parameters are the records' keys"
        )
    if isinstance(getattr(pipeline_fn, "_config", None), IteratorConfig):
        raise TypeError(
            f"{pipeline_fn!r} is an iterator function of dalijax.data_iterator, which "
            "reads data itself. Pass the undecorated function, whose parameters are the records' "
            "keys"
        )
    if not callable(pipeline_fn):
        raise TypeError(
            f"pipeline_fn must be a function of a DALI graph, not {printable_repr(pipeline_fn)}"
        )


@dataclasses.dataclass(frozen=True)
class StreamCursor(Cursor[RecordPosition]):
    """The cursor of a `StreamEngine`; see `Cursor`.

    Attributes:
        compared: Whether the processes have compared their graphs and positions.
    """

    compared: bool = False


class StreamEngine(FedEngine[RecordPosition]):
    """Runs pipelines that are fed with a stream of records read in order; see `FedEngine`.

    Args:
        pipeline_fn: The graph's function. Its parameters are keys of the records, or its only
            parameter is the record; see `dalijax.core.feeding.schema.schema_of`.
        config: The iterator's arguments; ``mask`` adds an output that marks valid rows, and
            ``on_error`` is the handling of bad records: "raise", "skip" (the whole batch) or "mask"
            (another record replaces the bad record, and its row is masked).
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        differing: The arguments that differ between the pipelines (device_id, seed).
        rows: The number of rows of each pipeline's batch.
        reader: Reads the records. It must not refer to the engine.
        numbers: The index in the stream of each row, for ``draw``; see `RecordSupply`.
        draw_seed: The seed of ``draw``.
        spec: The structure of a record, if the first record doesn't show it.
        by_step: Whether the random state is computed from the step, assuming full batches;
            otherwise it is part of the position.
        part: This process's part of the stream, if several processes make its batches together.
    """

    cursor: StreamCursor
    _most_skipped = 16 * MOST_SKIPPED  # a limit, since a stream may be infinite
    _gradual = True
    _unfit_text = "DALI can't take {names}. {error}"

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        config: IteratorConfig,
        call: Mapping[str, Any],
        differing: Sequence[Mapping[str, Any]],
        rows: int,
        reader: RecordReader,
        numbers: Numbers | None,
        draw_seed: int,
        spec: Any = None,
        by_step: bool = False,
        part: StreamPart | None = None,
    ):
        super().__init__(StreamCursor(RecordPosition()), config)
        self._part: PartReader | None = None  # if several processes read the stream
        self._by_step = by_step
        if part is not None:
            self.compare_processes(getattr(pipeline_fn, "__name__", "the graph"), part.values)
            if self._agreement is not None:
                reader = self._part = PartReader(reader, part, self._agreement)
        self._draw_seed = draw_seed
        # DALI's checkpoint of each pipeline before its first run, by the pipelines' seed.
        self._first_checkpoints: dict[int | None, tuple[bytes, ...]] = {}
        self._peeked: RecordBatch | None = None  # the records of the outcome
        parameters = function_parameters(pipeline_fn)
        settings = {k: v for k, v in call.items() if k in parameters}
        self._queue = ReplayQueue(reader)
        self._records = RecordSupply(
            self._queue,
            len(differing),
            rows,
            numbers,
            draw_seed,
            lambda record, further: record_graph(pipeline_fn, record, spec, settings, further),
        )
        options = {k: v for k, v in call.items() if k not in parameters}
        self.feed_by(pipeline_fn, None, options, differing)
        self._factory = self._pipelines(self._records.rows, self._pipeline_arguments)

    @property
    def epoch(self) -> int:
        """Always 0: the reader counts the epochs."""
        return 0

    @property
    def step(self) -> int:
        """The number of batches before the consumer's position."""
        return self.position.step

    # Several processes

    def moved(self) -> None:
        """Requests a new comparison of the processes' positions before the next batch."""
        if self._part is not None:
            self._part.moved()
        self.change(compared=False)
        super().moved()

    def advance(self) -> None:
        """Moves past the batch that `peek` returns."""
        super().advance()
        if self._part is not None and self._part.must_agree(self.position.step):
            self.change(must_agree=True)

    def _agree(self, agreement: Agreement) -> None:
        """Compares the numbers of batches and the graphs of all processes, as far as necessary."""
        # A ReadError is raised when its batch is due, and the next call compares.
        with contextlib.suppress(ReadError):
            if self._part is not None and self._part.must_agree(self.step):
                self._part.agree(self.step, lambda: self._queue.read_ahead(self.position, _HELD))
            if not self.cursor.compared:
                super()._agree(agreement)
            self.change(compared=True, must_agree=False)

    def _shared_values(self) -> Values:
        """Returns the values that must be equal in all processes; see `Engine`."""
        graph, operators = "no record", list[str]()
        if not self._is_end(self.position):
            with contextlib.suppress(StopIteration):
                self.prepare()
                graph, operators = "known", list(self._operators())
        return {"graph": graph, "operators": operators, "position": f"step {self.step}"}

    # Batches

    def _number(self, outcome: Outcome[RecordPosition]) -> tuple[int, int]:
        return 0, outcome.after.step - 1  # not the position's step: batches may have been skipped

    def _seed_of_keys(self) -> int:
        restored = self.position.restored
        seeds = [restored.draw_seed, restored.seed, self._draw_seed]
        return next(int(seed) for seed in seeds if seed is not None)

    def count(self, stats: InputStats, outcome: Outcome[RecordPosition]) -> None:
        """Adds a delivered batch to the counters."""
        batch = self._peeked
        if batch is None:  # a ReadError
            return
        rows = len(batch.records)
        valid = rows if batch.valid is None else int(batch.valid.sum())
        stats._delivered(*self._number(outcome), valid, rows - valid, self.errors.total)

    # Positions, supply and graph

    @property
    def _seed(self) -> int | None:
        return self.position.restored.seed

    def _open(self) -> tuple[RecordSupply, GraphPipelineFactory]:
        return self._records, self._factory

    def _is_end(self, position: RecordPosition) -> bool:
        return self._part is not None and self._part.is_behind_end(position.step)

    def _epoch_and_step(self, position: RecordPosition) -> tuple[int, int]:
        return 0, position.step

    def _label(self, position: RecordPosition) -> str:
        return f"batch {position.step}"

    def _error_kind(self, unfit: bool) -> type[BatchError] | type[RecordError]:
        return UnfitRecordError if unfit else RecordError

    def _check_first(self) -> None:
        graph = self._graph
        self._records.inputs.check_types()
        if graph is not None and not graph.used and not graph.draws:
            raise ValueError(
                "the graph does not use any array of the records, so that it can't be fed. Make "
                "its outputs depend on an input"
            )
        self._keeps_checkpoints = bool(self._random()) and not self._by_step

    def _after(
        self,
        position: RecordPosition,
        supply: RowSupply[RecordPosition],
        run: int,
        runner: Runner | None,
    ) -> RecordPosition:
        self._peeked = self._queue.read(position.step)
        step, after = position.step + 1, self._peeked.after
        checkpoints = self._after_failure(position) if runner is None else runner.checkpoints()
        return dataclasses.replace(position, step=step, after=after, checkpoints=checkpoints)

    def _run_at(self, position: RecordPosition) -> Outcome[RecordPosition] | None:
        self._peeked = None
        try:
            return super()._run_at(position)
        except ReadError as raised:
            return self._unread(position, raised)
        except StopIteration:  # raised before the first record
            return self._ended(position)

    def _not_fed(
        self,
        position: RecordPosition,
        supply: RowSupply[RecordPosition],
        run: int,
        error: BaseException,
    ) -> Outcome[RecordPosition]:
        if isinstance(error, SourceEnded) and not supply.has(run):
            self._runs_taken = run  # the run wasn't used
            return self._ended(position)
        if isinstance(error, ReadError):
            self._stop()
            return self._unread(position, error)
        return super()._not_fed(position, supply, run, error)

    def _ended(self, position: RecordPosition) -> Outcome[RecordPosition]:
        """Returns the outcome after the last record.

        Raises:
            ProcessError: If other processes have more batches.
        """
        if self._part is not None:
            self._part.check_end(position.step)
        return Outcome(position, ended=True)

    def _unread(self, position: RecordPosition, error: ReadError) -> Outcome[RecordPosition]:
        """Returns the outcome if reading a record raised; the next batch skips the record."""
        self._queue.pass_over(error)
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration):  # callers would take it for the end
            stop = cause
            cause = RuntimeError(f"the reading of a record raised StopIteration: {stop}")
            cause.__cause__ = stop
        after = dataclasses.replace(position, after=error.after)
        return Outcome(after, error=cause if isinstance(cause, Exception) else error)

    # Pipelines

    def schedule(self) -> None:
        """Builds the pipelines if necessary, and schedules runs without waiting for batches."""
        with contextlib.suppress(StopIteration, ReadError):  # which next() raises
            super().schedule()

    def restart(self) -> None:
        """Lets the pipelines run again after the reader's end, since it may have a batch now."""
        if self._runner is not None and self._queue.ended:
            self._runner.restart()  # DALI numbers the runs from 0 again
            self._runs_taken = self._records.next_run = 0
            self._records.seek(self.position)

    def drop(self) -> None:
        """Frees the pipelines and the records that were read; the next use builds new pipelines."""
        self._records.close()  # first, in case of an interrupt
        self._peeked = None
        super().drop()

    def _started(self, position: RecordPosition) -> Runner:
        """Returns new pipelines at a position.

        Raises:
            StopIteration: If there is no batch; the first batch determines the records' dtypes.
            ReadError: If the reading of the first record raised.
            StateError: If the position belongs to a state of other pipelines.
        """
        if self._graph is None:
            graph = self._define = self._records.bind_first_record()
            self._factory = self._pipelines(self._records.rows, self._pipeline_arguments)
            self._graph = graph  # last, so that an interrupted call is repeated
        restored = position.restored
        drawn = restored.seed if restored.draw_seed is None else restored.draw_seed
        self._records.seed = self._draw_seed if drawn is None else drawn
        runner: Runner | None = None
        try:
            if self._seed not in self._first_checkpoints:
                # States contain the other checkpoints as differences from the first.
                runner = self._new_runner()
                self._first_look(runner)
                self._first_checkpoints[self._seed] = runner.checkpoints() or ()
            self._check_graph(restored.operators)
            first = self._first_checkpoints[self._seed]
            # If the checkpoint contained a count of runs, DALI would not number the runs from 0.
            start, checkpoints = (
                tuple(map(random_state.without_counts, pieces, first))
                for pieces in (first, self._checkpoints_at(position))
            )
            if runner is None or checkpoints != start:
                if runner is not None:
                    runner.close()
                runner = self._new_runner(checkpoints)
        except BaseException:
            if runner is not None:
                runner.close()
            raise
        return runner

    def _checkpoints_at(self, position: RecordPosition) -> tuple[bytes, ...]:
        """Returns DALI's checkpoint of each pipeline at a position."""
        first = self._first_checkpoints[self._seed]
        if position.checkpoints:
            return position.checkpoints
        if first and position.restored.random:
            return tuple(random_state.expand(position.restored.random, first))
        if not (self._by_step and position.step and self._random()):
            return first
        return self._after_steps(position.step)

    def _after_steps(self, steps: int) -> tuple[bytes, ...]:
        """Returns the checkpoints after some steps, extrapolated from two runs of the next batch.

        Raises:
            StateError: If no record can be decoded, or runs don't change the operators' states by
                equal steps.
        """
        with contextlib.suppress(NoStandIn):
            while True:
                rows = self._records.whole_rows()
                try:
                    return self._moved_on(steps, rows)
                except RuntimeError as error:
                    failure = failure_of(error)
                bad = self._find_bad(self._records, sample_numbers(rows), failure)
                for sample in bad:
                    self._records.remember(sample, UnusableRecord(failure), True)
                if not bad or not self._has_stand_in(self._records, 0, failure):
                    break
        raise StateError(
            f"no record after step {steps} can be decoded, so that the run can't be resumed there"
        )

    def _after_failure(self, position: RecordPosition) -> tuple[bytes, ...] | None:
        """Returns the checkpoints after a batch that failed; None if positions have no checkpoints.

        The random state advances although the batch failed. Otherwise, random numbers that make a
        batch fail would be drawn again for each following batch.
        """
        if not self._keeps_checkpoints:
            return None
        start = self._checkpoints_at(position)
        try:
            return self._moved_on(1, self._records.whole_rows(), start)
        # The graph may fail with any random numbers.
        except (StateError, RuntimeError, SourceError, NoStandIn):
            return start

    def _moved_on(
        self, runs: int, rows: Sequence[RecordRows], start: Sequence[bytes] | None = None
    ) -> tuple[bytes, ...]:
        """Returns the checkpoints after a number of runs.

        Args:
            runs: The number of runs.
            rows: The rows to run, to find out by how much a run changes the checkpoints.
            start: The checkpoints before the runs; by default the checkpoints of new pipelines.

        Raises:
            StateError: If the runs don't change the operators' states by equal steps.
            RuntimeError: If the rows don't run.
        """
        runner = Runner(
            self._pipelines(lambda run, part: rows[part], self._pipeline_arguments).build()
        )
        try:
            pieces = [runner.checkpoints() or ()]
            for _ in range(2):
                runner.take(discard)
                pieces.append(runner.checkpoints() or ())
        finally:
            runner.close()
        return tuple(
            random_state.after_runs(runs, first, second, third, base)
            for (first, second, third), base in zip(zip(*pieces), start or pieces[0], strict=True)
        )

    # States

    def random_state(self, position: RecordPosition) -> str:
        """Returns the random state at a position as text.

        The text is "" if no operator has a random state. At a position without checkpoints, it is
        the text of the state that was restored last, or "".

        Raises:
            StateError: If the graph can't be resumed.
        """
        check_resumable(self._factory)
        if not position.checkpoints:
            return position.restored.random
        if not self.stateful():  # the state does not depend on the devices
            return ""
        first = self._first_checkpoints.get(position.restored.seed, ())
        pieces = map(random_state.without_counts, position.checkpoints, first)
        return random_state.compress([*pieces], first)

    def operators(self, position: RecordPosition) -> tuple[str, ...]:
        """Returns a line of text for each operator of the graph, for a state at a position.

        At the start there are no lines, so that states before and after the first build are equal.
        """
        saved, present = position.restored.operators, self._operators()
        return (present or saved) if saved or position.step else ()

    def stateful(self) -> list[str]:
        """Returns the names of the operators with a random state; empty before the first build."""
        return self._random()

    def was_built(self, position: RecordPosition) -> bool:
        """Returns whether pipelines were built with the seed of a position."""
        return bool(self._first_checkpoints.get(position.restored.seed))

    def check(self, state: Mapping[str, Any], current: Fingerprint, restored: Restored) -> None:
        """Checks a state before it is restored.

        Args:
            state: The state.
            current: The iterator's values to compare, including the seed, without operators.
            restored: The parts of the state for `restore`.

        Raises:
            StateError: If the state belongs to other data, or to pipelines with other operators.
        """
        operators = restored.operators and self._operators()  # unknown before the first build
        saved = {**{name: state[name] for name in current}, "seed": str(state["seed"])}
        saved["operators"] = list(restored.operators)
        current = {**current, "operators": list(operators)}
        if saved != current:
            differences.check(saved, current, self._config.allow_changes)
        first = self._first_checkpoints.get(restored.seed)
        if restored.random and first:
            random_state.expand(restored.random, first)

    def _check_graph(self, saved: Sequence[str]) -> None:
        current = {"operators": list(self._operators())}
        differences.check({"operators": list(saved)}, current, self._config.allow_changes)

    def restore(self, position: RecordPosition, move: Callable[[], object] | None = None) -> None:
        """Moves to a restored position; the next use builds the pipelines.

        Args:
            position: The position.
            move: Moves the reader to the position, for readers that may fail to move. If the
                function raises, the engine keeps its position, and moves the reader back at the
                next use.
        """
        self.drop()
        if move is not None:
            move()
            if self._part is not None:
                self._part.start_at(position.step)
            self._queue.moved_to(position)
        self.change(position=position)
        self._interrupted = None
        self.moved()
