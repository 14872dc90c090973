"""Records in, batches out: pipelines that are fed, one for each data shard of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ..config import IteratorConfig
from ..errors import RecordError, StateError, UnfitRecordError
from ..pipeline.arrays import narrowed
from ..pipeline.bad_record import runs
from ..pipeline.batch import Batch, BatchMaker, choose_placement
from ..pipeline.deferred import FunctionError
from ..pipeline.lifetime import calls, check_process
from ..pipeline.record_pipelines import FedPipelines, Marks
from ..pipeline.record_queue import (
    Place,
    Pulled,
    ReadError,
    Tape,
    check_fed,
)
from ..pipeline.runner import Outputs, Runner, SourceEnded, SourceError
from ..pipeline.schema import described, stacked, values_of
from ..placement import GlobalPlacement
from ..state import random_state as randomness
from ..state.position import FailedBatch
from ..stats import InputStats

_log = logging.getLogger("dalijax")


class Decoder:
    """Feeds batches of records to pipelines and gives what they make of them.

    Args:
        pipeline_fn: The function of the graph; see `dalijax.core.pipeline.schema.learn`.
        config: The iterator's arguments; ``mask`` adds the rows that are valid.
        call: Arguments of the function and of ``nvidia.dali.pipeline_def``.
        each: What differs between the pipelines (device_id, seed).
        rows: Rows of each pipeline's batch.
        pull: Gives the records of the next batch, in the rows of all pipelines together;
            raises StopIteration at the end. A method, to which it refers weakly.
        seek: Called with a place: has ``pull`` go on there. As weak.
        on_error: What becomes of records that DALI can't decode: "raise", "skip" (the whole
            batch) or "mask" (a neighbour stands for them, masked out).
        spec: What a record looks like, where the first one doesn't say it.
        by_step: Whether the random state follows from the step alone, for whole batches.

    Attributes:
        errors: The batches that were skipped, and those with masked records.
    """

    def __init__(
        self,
        pipeline_fn: Callable[..., Any],
        config: IteratorConfig,
        call: Mapping[str, Any],
        each: Sequence[Mapping[str, Any]],
        rows: int,
        pull: Callable[[], Pulled],
        seek: Callable[[Place], None],
        on_error: str = "raise",
        spec: Any = None,
        by_step: bool = False,
    ):
        check_fed(pipeline_fn, config, on_error)
        self._lock = threading.RLock()
        self._calls = calls
        self._process = 0  # the one that built pipelines
        self.errors: list[FailedBatch] = []
        self.stats: InputStats | None = None
        self._place = self._entry = Place()
        self._unsure = False  # whether next() was broken off, by Ctrl-C say
        self._seek = weakref.WeakMethod(seek)
        self._rows = rows * len(each)
        self._on_error = on_error
        self._by_step = by_step
        self._layout = choose_placement(config)
        self._make = BatchMaker(config, self._layout)
        self._config = config
        self._tape = Tape(pull, len(each))
        self._fed = FedPipelines(pipeline_fn, config.output_map, call, each, rows, self._tape, spec)
        self._begin: Marks = ()  # where the pipelines stood when they were built
        self._wanted = ""  # the random state to start from, as text
        self._wanted_graph = ""
        self._allow = config.allow_changes

    @property
    def lock(self) -> threading.RLock:
        """Held by `next`; whoever moves what ``pull`` reads holds it, too.

        Raises:
            RuntimeError: In a child that was forked from the process with the pipelines.
        """
        check_process(self._process)  # whose threads may have held it
        return self._lock

    @property
    def place(self) -> Place:
        """Where the consumer stands; a snapshot, which any thread may take."""
        return self._entry if self._unsure else self._place

    # The pipelines

    def start(self) -> Runner:
        """The running pipelines, built to stand at the place where there are none.

        Raises:
            StopIteration: If there is no batch: the first one says the records' dtypes.
            StateError: If the place is of other pipelines.
        """
        with self.lock:
            fed = self._fed
            if fed.runner is not None:
                return fed.runner
            self._process = os.getpid()
            try:
                runner = fed.build()
                if runner.deferred is not None:
                    runner.deferred.check(self._config)
                self._check_graph(self._wanted_graph)
                self._wanted_graph = self._wanted_graph and fed.graph
                marks = self._place.marks or self._start_marks()
                # The first checkpoint had to be seen to know the others by their difference.
                if marks != fed.first:
                    runner = fed.stand(marks)
            except BaseException:  # refused, and so is the next call
                fed.stop()
                raise
            self._begin = marks
            return runner

    def start_prefetch(self) -> None:
        """Pulls the first records, builds the pipelines and schedules runs; waits for none."""
        with self.lock, contextlib.suppress(StopIteration, ReadError):  # said when it is due
            self.start().schedule()

    @property
    def _here(self) -> Marks | None:
        """Where the pipelines must stand for the batch that is delivered next."""
        return self._place.marks or self._begin or None

    def _start_marks(self) -> Marks:
        """The checkpoints that the pipelines start from."""
        fed, step = self._fed, self._place.step
        if fed.first and self._wanted:
            return tuple(randomness.applied(self._wanted, fed.first))
        if not (self._by_step and step and any(fed.operators.values())):
            return fed.first
        first = self._tape.first().padded(self._rows)
        sample = fed.prober.repaired(self._tape, first, fed.prober.undecodable(first))
        if sample is None:
            raise StateError(f"no record behind step {step} can be decoded: nothing goes on there")
        return fed.after(step, sample)

    # Batches

    def next(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: At the end.
            RecordError: If DALI can't decode a record; the next call gives the next batch.
            Exception: What ``pull`` raised.
        """
        with self.lock:
            if self.stats is None:
                return self._certain()
            with self.stats.waiting():
                return self._certain()

    def _certain(self) -> Batch:
        """The next batch, from where the consumer surely stands."""
        if self._unsure:  # nobody knows how far the last call came: go back to where it began
            self._fed.stop()
            self._tape.clear()
            self._place = self._entry
            seek = self._seek()
            if seek is not None:
                seek(self._place)
        self._entry = self._place
        self._unsure = True
        try:
            batch = self._next()
        except Exception:
            self._unsure = False
            raise
        self._unsure = False
        return batch

    def _next(self) -> Batch:
        while True:
            try:
                runner = self.start()
            except ReadError as error:
                self._pass_by(error)
                continue
            if runner.deferred is not None:
                runner.deferred.check_thread()
            try:
                batch = runner.take(self._convert)
            except SourceEnded:
                raise StopIteration from None
            except SourceError as error:
                if isinstance(error.__cause__, ReadError):
                    self._fed.stand(self._here)
                    self._pass_by(error.__cause__)
                unfit = self._fed.unfit(self._tape.batches)
                if not unfit:
                    self._fed.stand(self._here)
                    raise error.__cause__ or error from None
                self._failed(error.__cause__ or error, unfit)
                continue
            except FunctionError as error:
                self._function_failed(error)
                continue
            except RuntimeError as error:
                self._failed(error)
                continue
            except Exception:  # no array can be made of it: it is behind us
                self._delivered()
                raise
            self._delivered()
            return batch

    def _pass_by(self, error: ReadError) -> NoReturn:
        """Raises what the reading of a record raised; the consumer is behind that record."""
        self._tape.error = None
        self._place = dataclasses.replace(self._place, after=error.after)
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration):  # which would look like the end
            raise RuntimeError(f"the reading of a record raised StopIteration: {cause}") from cause
        raise cause from cause.__cause__

    def _delivered(self) -> None:
        """The first batch of the tape is behind the consumer."""
        pulled, runner = self._tape.batches[0], self._fed.runner
        if self.stats is not None:
            rows = len(pulled.records)
            valid = rows if pulled.valid is None else int(pulled.valid.sum())
            self.stats.delivered(0, self._place.step, valid, rows, len(self.errors))
        marks = runner.checkpoints() if runner else None
        self._tape.forget_first()
        self._place = Place(self._place.step + 1, pulled.after, marks)

    def _convert(self, outputs: Sequence[Outputs]) -> Batch:
        if self._tape.unread:
            raise ValueError(
                "the graph uses none of the records' arrays, so that nothing feeds it: have its "
                "outputs depend on one of its inputs"
            )
        pulled, runner = self._tape.batches[0], self._fed.runner
        lengths = [len(own[0]) for own in outputs]
        valid = np.ones(sum(lengths), bool) if pulled.valid is None else pulled.valid
        masks = np.split(valid, np.cumsum(lengths)[:-1])
        deferred = runner.deferred if runner else None
        batch = self._make(outputs, masks, not (runner and runner.dynamic), deferred)
        for name in self._fed.schema.passed if self._fed.schema else ():
            if name in batch:
                raise ValueError(
                    f"the record's key {name!r} passes the graph by, and an output or the mask "
                    "has that name, too: name the output otherwise"
                )
            values = stacked(values_of(pulled.records, name), name)
            batch[name] = self._placed(name, values, lengths)
        return batch

    def _placed(self, name: str, values: Any, lengths: Sequence[int]) -> Any:
        """What passed the graph by, beside its outputs; text and dicts stay on the host."""
        numeric = isinstance(values, np.ndarray) and values.dtype.kind in "biufc"
        if not numeric or not isinstance(self._layout, GlobalPlacement):
            return values
        values = narrowed(values, name)
        return self._layout.place_mask(name, np.split(values, np.cumsum(lengths)[:-1]))

    # Records that DALI can't decode

    def _failed(self, error: BaseException, unfit: Sequence[int] = ()) -> None:
        """Goes on behind a batch that failed, or, masked, before what was made of it.

        Args:
            error: What was raised.
            unfit: The rows that the graph can't even be given.

        Raises:
            RecordError: With ``on_error="raise"``.
        """
        pulled, fed = self._tape.batches[0], self._fed
        step = self._place.step
        bad = list(unfit) or fed.prober.undecodable(pulled)
        what = "; ".join(f"{pulled.name(i)} ({described(pulled.records[i])})" for i in bad[:5])
        text = (
            f"DALI can't {'take' if unfit else 'decode'} {what}" if bad else f"batch {step} failed"
        )
        text += f"{' and more' if len(bad) > 5 else ''}. {'' if unfit else 'DALI says: '}{error}"
        masks = self._on_error == "mask"
        repaired = fed.prober.repaired(self._tape, pulled, bad) if bad else None
        if repaired is not None:
            self._tape.batches[0] = repaired
            runner = fed.stand(self._here)
        if repaired is None or not (masks or runs(runner)):
            marks = self._passed(pulled)
            self._tape.forget_first()
            self._place = Place(step + 1, pulled.after, marks)
            fed.stop()
        elif not masks:  # it ran without them: the random state moved on as by any other batch
            self._delivered()
        if self._on_error == "raise":
            raise (UnfitRecordError if unfit else RecordError)(text) from error
        self.errors.append(FailedBatch(0, step, text))
        _log.warning("%s: %s", "masked" if masks and repaired else "skipped", text)

    def _function_failed(self, error: FunctionError) -> None:
        """Goes on behind a batch that DALI made, and a function of global arrays failed for.

        Raises:
            RecordError: Unless ``on_error="skip"``.
        """
        step = self._place.step
        text = f"batch {step} failed. {error}"
        self._delivered()
        if self._on_error != "skip":
            raise RecordError(text) from error.__cause__
        self.errors.append(FailedBatch(0, step, text))
        _log.warning("skipped: %s", text)

    def _passed(self, pulled: Pulled) -> Marks | None:
        """The checkpoints behind a batch that fails however often it is run.

        The random state moves on all the same: where it is what fails, the same numbers would
        fail in every batch that follows.
        """
        if self._by_step:
            return None
        try:
            return self._fed.after(1, pulled, self._here)
        except (StateError, RuntimeError, SourceError):  # it fails with other numbers, too
            return self._here

    # State and lifecycle

    def random_state(self, place: Place) -> str:
        """The random state at a place as a short text; "" before the pipelines were built.

        Raises:
            StateError: If the graph can't be resumed: the message says why.
        """
        self._fed.check_resumable()
        if not place.marks:
            return self._wanted
        return randomness.difference(place.marks, self._fed.first)

    def graph(self, place: Place) -> str:
        """A digest of the graph, the same for the first state before and after it was built."""
        return self._wanted_graph or (self._fed.graph if place.step else "")

    @property
    def pulled_next(self) -> int:
        """Number of the batch that is pulled next; by it ``pull`` may read anew."""
        return self._place.step + len(self._tape.batches)

    def stateful(self) -> list[str]:
        """Names of the operators that have a state, once the pipelines were built."""
        return [name for name, has in self._fed.operators.items() if has]

    @property
    def built(self) -> bool:
        """Whether the pipelines were ever built, of the seed that they have now."""
        return bool(self._fed.first)

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; until it is called nothing is counted."""
        self.stats = self.stats or InputStats()
        return self.stats

    def check(self, random_state: str, graph: str) -> None:
        """Raises StateError where a state is known to be of other pipelines."""
        self._check_graph(graph)
        if random_state and self._fed.first:
            randomness.applied(random_state, self._fed.first)

    def _check_graph(self, saved: str) -> None:
        now = self._fed.graph
        if saved and now not in ("", saved) and "graph" not in self._allow:
            told = f"graph: {saved} -> {now} (with allow_changes=['graph'] other arguments go on)"
            raise StateError.of_other_data([told])

    def set_seed(self, seed: int | None) -> int | None:
        """Has the pipelines, which are built again, have a seed of a state; None: the default.

        Returns:
            What was set before.
        """
        with self.lock:
            return self._fed.set_seed(seed)

    def restore(self, step: int, after: Any, random_state: str = "", graph: str = "") -> None:
        """Goes on behind a batch; the pipelines are built when they are next used."""
        with self.lock:
            self._fed.stop()
            self._tape.clear()
            self._wanted, self._wanted_graph = random_state, graph
            self._place = self._entry = Place(step, after)
            self._unsure = False

    def again(self) -> None:
        """Goes on after ``pull`` had no batch, where it may have one now."""
        if self._fed.runner is not None:
            self._fed.runner.restart()

    def close(self) -> None:
        """Frees the pipelines and what was pulled."""
        if self._calls.lost(self._process):  # whoever has the lock may never give it back
            return
        with self.lock:
            self._fed.stop()
            self._tape.clear()
