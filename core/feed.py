"""Pipelines at a position: which batch is next, how it is taken, and how to stand there again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nvidia.dali import Pipeline

from .callbacks import advised
from .config import IteratorConfig
from .deferred import FunctionError
from .epochs import EpochPlan
from .fingerprint import (
    Fingerprint,
    StateError,
    check_names,
    fingerprint,
    not_allowed,
    renamed,
    unknown,
)
from .pipelines import check_outputs, of_mapping
from .placement import DataShard
from .position import Mark, Position
from .randomness import check_form, grafted
from .reader_files import READERS, reader_of
from .readers import check_epochs, check_shards, epochs_of
from .runner import BatchError, NoBatch, Outputs, Runner, SourceEnded, SourceError
from .source import PipelineSource
from .state import Saved

_READER = re.compile(r"operator `[\w.]*readers\.")
# A checkpoint costs 10 to 30 us: it is taken when a state is asked for (`Feed.pin`), and after so
# many batches, which are at most run again where DALI has none: after a failed batch, or Ctrl-C.
_MOST_LAG = 8
# The readers whose states are known; those of videos need a GPU, and are DALI's to judge.
_KNOWN_STATES = READERS.keys() - {"video", "video_resize"}
_MOST_SAMPLES = 1 << 31  # of a reader's pass, where nothing says how many it has
CLOSED = "the iterator is closed: make a new one"


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a run gave: a value or an error, and the position after it."""

    value: Any
    error: Exception | None
    after: Position


def _check_forms(saved: Saved, reader: str | None) -> None:
    """Raises StateError where DALI's checkpoints are none that a pipeline gives.

    Args:
        saved: What has them.
        reader: Name of the reader whose epochs the fingerprint has.
    """
    own, position = saved.fingerprint, saved.position
    kinds = dict(text.split(" ", 2)[1::-1] for text in own["operators"] if " " in text)
    known = {name for name, kind in kinds.items() if reader_of(kind) in _KNOWN_STATES}
    readers = dict.fromkeys(known, _MOST_SAMPLES)
    if reader in readers and min(own["epoch_size"], own["num_shards"], own["batch_size"]) > 0:
        # Of a pass over its shard, which is filled up to whole batches.
        readers[reader] = own["epoch_size"] // own["num_shards"] + 1 + own["batch_size"]
    marks = [mark.checkpoints or () for mark in (position.mark, position.epoch_mark) if mark]
    names = [[check_form(one, readers) for one in own] for own in marks]
    if len(names) == 2 and names[1] and names[0] != names[1]:
        raise StateError("DALI's parts of the state are of different graphs")


class Feed:
    """The pipelines of one iterator and the position of their next run; not thread-safe.

    Args:
        source: Where the pipelines come from.
        config: The iterator's arguments.
        shards: The data shard of each pipeline, where batches are placed by shards.

    Attributes:
        position: The position of the next run. `take` doesn't move it: the caller does, by
            setting it to what `Taken.after` says.
        batch_size: Batch size of each pipeline; 0 until they are built.
        plan: The epochs; None where only the source knows their end, and until then.
        streams: The shard of each pipeline in epoch 0.
        device_ids: The GPU of each pipeline, None for the CPU; none until they are built.
        closed: Whether `close` was called.
        process: The process that built pipelines; 0 until one has.
    """

    def __init__(
        self, source: PipelineSource, config: IteratorConfig, shards: Sequence[DataShard] = ()
    ):
        self.source = source
        self.position = Position()
        self.batch_size = 0
        self.plan: EpochPlan | None = None
        self.streams: tuple[int, ...] = ()
        self.device_ids: tuple[int | None, ...] = ()
        self.closed = False
        self.process = 0
        self._config = config
        self._shards = tuple(shards)
        self._runner: Runner | None = None
        self._fingerprint: Fingerprint | None = None
        self._exact: Position | None = None  # of the batch taken last, unless it failed
        self._most_lag = _MOST_LAG

    def fingerprint(self) -> Fingerprint:
        """What identifies the data; blank until the pipelines were built."""
        if self._fingerprint is None:
            if not self.batch_size:  # never built
                return unknown()
            self._fingerprint = fingerprint(
                self.runner().pipelines, self.plan, self.streams, self.source.serialized
            )
            if self.source.seed is not None:  # that of all shards, not the first one's here
                self._fingerprint["seed"] = self.source.seed
        return self._fingerprint

    def restore(self, saved: Saved, allow: Sequence[str] = (), named: Sequence[str] = ()) -> None:
        """Moves to a saved position, with new pipelines that stand there.

        Args:
            saved: The position, and what it belongs to.
            allow: Names of differences to go on with.
            named: More of them, which must be names of something.

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
        if not 0 <= seed < 1 << 63 or not self.source.takes_seed():
            yield
            return
        before = self.source.set_seed(seed)
        self._fingerprint = known and known | {"seed": seed}
        try:
            yield
        except BaseException:
            self.source.set_seed(before)
            self._fingerprint = known
            raise

    def _restore(self, saved: Saved, allow: Sequence[str], named: Sequence[str]) -> None:
        position, before = saved.position, self.position
        if self.batch_size or position.mark is None:
            self._check(saved, allow, named)
        if self.streams:
            self._check_reach(position)
        if position == before or position.mark is None:  # nothing is to be built
            if position != before:
                self.drop()
                self.position = position
            return
        if not self.source.rebuildable:
            raise StateError(
                "these pipelines can't be built again, and so not at a state: DALI does not "
                "serialise their Python sources or functions. Use dalijax.data_iterator, which "
                "builds pipelines from their function"
            )
        self.drop()
        try:
            self.position = self._arrived(saved, position.mark, allow, named)
        except BaseException:
            self.drop()
            self.position = before
            raise

    def _arrived(
        self, saved: Saved, mark: Mark, allow: Sequence[str], named: Sequence[str]
    ) -> Position:
        """The saved position, where new pipelines stand then; see `restore`."""
        refusal: Exception | None = None
        try:
            _check_forms(saved, self._config.reader_name)
            self._opened(mark)
        except RuntimeError as error:
            refusal = error
        except (ValueError, LookupError, TypeError) as error:  # DALI reads its texts in Python, too
            refusal = error
            if not isinstance(error, StateError):
                refusal = StateError(f"DALI can't read its part of the state: {error!r}")
                refusal.__cause__ = error
        if refusal is not None:
            self._opened(Mark())  # what differs says more
        self._check(saved, allow, named)
        self._check_reach(saved.position)
        names = renamed(saved.fingerprint, self.fingerprint())
        if names is None:
            if refusal is not None:
                raise refusal
            return saved.position
        # Operators come, go, or have other names: each state goes to the operator that it is of.
        if refusal is None:
            self.drop()
        begun = self._opened(Mark()).checkpoints() or ()
        self.drop()

        def moved(mark: Mark | None) -> Mark | None:
            if mark is None or mark.checkpoints is None:
                return mark
            pairs = zip(mark.checkpoints, begun, strict=True)
            return Mark(tuple(grafted(own, start, names) for own, start in pairs), mark.lag)

        position = saved.position
        position = dataclasses.replace(
            position, mark=moved(position.mark), epoch_mark=moved(position.epoch_mark)
        )
        self._opened(position.mark or Mark())
        return position

    def _check(self, saved: Saved, allow: Sequence[str], named: Sequence[str]) -> None:
        """Raises StateError where what a state belongs to differs, as far as it is known."""
        now = self.fingerprint()
        found = saved.differences(self._config.output_map, now)
        if left := not_allowed(found, (*allow, *named)):
            raise StateError.of_other_data(left, allowed=True)
        if named:
            check_names(named, found, saved.fingerprint, now)

    def _check_reach(self, position: Position) -> None:
        """Raises StateError where no iterator over these epochs ever stands at a position."""
        mark, start, plan = position.mark or Mark(), position.epoch_mark or Mark(), self.plan
        counts = {len(own.checkpoints) for own in (mark, start) if own.checkpoints is not None}
        wrong = [f"{count} pipelines" for count in counts if count != len(self.streams)]
        least, most = 0, _MOST_LAG + position.errors
        if plan is not None:
            delivered = plan.delivered(position.epoch, self.streams[0])
            if position.step > delivered:
                wrong.append(f"step {position.step} of {delivered}")
            if position.step == delivered:  # DALI's own DROP is behind what it drops
                least = min(0, delivered - plan.consumed(position.epoch))
            # Between epochs, and those that fail do not end a lag.
            most += (1 + position.errors) * plan.gap(position.epoch)
        for lag, lowest in ((mark.lag, least), (start.lag, 0)):
            if not lowest <= lag <= most:
                wrong.append(f"a lag of {lag} batches")
        if wrong:
            raise StateError(
                f"the state is damaged: no iterator over these data has {' or '.join(wrong)} in "
                f"epoch {position.epoch}, after {position.errors} errors"
            )

    def runner(self) -> Runner:
        """The running pipelines, built to stand at the position where there are none."""
        if self.closed:
            raise ValueError(CLOSED)
        if (runner := self._runner) is None:
            runner = self._opened(self.position.mark or Mark())
            if self.position.mark is None:
                start = Mark(runner.checkpoints())
                self.position = dataclasses.replace(self.position, mark=start, epoch_mark=start)
        return runner

    def _opened(self, mark: Mark) -> Runner:
        self.process = os.getpid()
        built = self.source.build(mark.checkpoints)
        self._read_plan(built)
        runner = Runner(built, mark.lag, self.source.owned)
        if runner.deferred is not None:
            runner.deferred.check(self._config)
        self._runner = runner
        return runner

    def adopt(self, position: Position) -> None:
        """Takes a position for the one that the pipelines, built but not run, stand at.

        Raises:
            StateError: If no iterator over these data ever stands there.
        """
        runner = self.runner()
        self._check_reach(position)
        self.position = position
        runner.lag = position.mark.lag if position.mark else 0

    def settle(self, position: Position) -> bool:
        """Goes back to a position, whose pipelines are built anew; False where they can't be."""
        mark = position.mark
        exact = mark is None or mark.checkpoints is not None
        if not exact or not self.source.rebuildable or self.source.unresumable:
            return False
        self.drop()
        self.position = position
        return True

    def close(self) -> None:
        """Frees the pipelines for good."""
        self.closed = True
        self.drop()

    def drop(self) -> None:
        """Frees the pipelines; the next use builds them again, at the position."""
        runner, self._runner, self._exact = self._runner, None, None
        if runner is not None:
            runner.close()

    def _read_plan(self, built: Sequence[Pipeline]) -> None:
        config = self._config
        check_outputs(built[0], config.output_map)
        plan, streams = epochs_of(built, config, self._shards)
        if not self.streams:  # what is built later is of the same source
            check_shards(built, config, self._shards, self.source)
            if plan is None:
                check_epochs(built, config, self.source)
        self.batch_size, self.plan, self.streams = built[0].max_batch_size, plan, streams
        self.device_ids = tuple(pipeline.device_id for pipeline in built)

    # Position

    def pin(self) -> Position:
        """The position, with checkpoints of its own where DALI can still say them."""
        here = self.position
        if here is self._exact and here.mark and here.mark.lag:
            self.position = dataclasses.replace(here, mark=Mark(self.runner().checkpoints()))
        return self.position

    def delivered(self) -> int | None:
        """Number of batches that the current epoch delivers; None where it can't be known."""
        self.runner()
        if self.plan is None:
            return None
        return self.plan.delivered(self.position.epoch, self.streams[0])

    def at_end(self) -> bool:
        """Whether every batch of the current epoch is behind the position."""
        total = self.delivered()
        if total is not None:
            return self.position.step >= total
        # An ended source at the start of an epoch is one to restart, or an error.
        return self.position.step > 0 and self.runner().ended()

    def _valid(self, outputs: Sequence[Outputs]) -> list[int]:
        """Samples of each pipeline's batch that belong to the epoch, once sizes are checked."""
        lengths = [len(own[0]) for own in outputs]
        here, plan = self.position, self.plan
        if plan is None:
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
        return [plan.valid(here.epoch, here.step, stream) for stream in self.streams]

    def next_epoch(self) -> None:
        """Moves from the end of an epoch to the start of the next one."""
        here = self.pin()
        mark, epoch = here.mark or Mark(), here.epoch + 1
        if self.plan is not None:
            epoch = self.plan.next_epoch(here.epoch)
            behind = self.plan.first_batch(here.epoch) + here.step
            skipped = self.plan.first_batch(epoch) - behind
            mark = mark.later(skipped)
            self.runner().lag += skipped
        else:
            self.runner().restart()
            mark = Mark(self.runner().checkpoints())
        self.position = Position(epoch, 0, mark, mark, here.errors)

    def rewind(self) -> None:
        """Moves back to the start of the current epoch.

        Raises:
            RuntimeError: If nothing says how the pipelines stood there.
        """
        here = self.position
        if here.step == 0:
            return
        start = here.epoch_mark or Mark()
        exact = start.checkpoints is not None and not self.source.unresumable
        if not self.source.rebuildable or not (exact or here.epoch == 0):
            why = self.source.unresumable or "the pipelines can't be built again"
            raise RuntimeError(
                f"reset() at batch {here.step} of epoch {here.epoch} can't go back to the "
                f"epoch's start: {why}. Finish the epoch first, or use dalijax.data_iterator "
                "over a source that DALI can checkpoint"
            )
        self.drop()
        again = start if exact else None
        self.position = Position(here.epoch, 0, again, again, here.errors)

    # Batches

    def take(self, make: Callable[..., Any]) -> Taken:
        """Takes the batch at the position.

        Args:
            make: Makes the value to deliver: of each pipeline's outputs, of the number of
                their samples that belong to the epoch, of whether to copy, and of what the
                graph leaves to be called on the batch.

        Raises:
            SourceEnded: If the source turns out to have ended, which is the epoch's end.
            Exception: What the pipelines' own source raised; its batch stays the next one.
            RuntimeError: If the source has no batch although the epoch has one.
        """
        here, exact = self.position, self._exact
        self._exact = None  # a call that is broken off may have taken a batch
        value, error = None, None
        try:
            value = self._run(
                lambda outputs: make(
                    outputs, self._valid(outputs), not self.runner().dynamic, self.runner().deferred
                )
            )
        except SourceEnded:
            self._exact = exact  # nothing was taken
            raise
        except (NoBatch, SourceError) as failed:
            if isinstance(failed, SourceError):
                self.settle(here)
            raise failed.__cause__ or failed from None
        except Exception as failed:
            of_reader = _READER.search(str(failed)) and not isinstance(failed, FunctionError)
            if of_reader and isinstance(failed, RuntimeError):
                # DALI's readers never run again after an error: new ones stand there again.
                settled = self.settle(here)
                cure = ""
                if of_mapping(failed):
                    if settled and self.source.unmap():
                        return self.take(make)  # it fails alone now, and not those before it
                    cure = "; pass dont_use_mmap=True to its reader, and an empty file fails alone"
                what = f"can't be read{cure}; the next call tries it again"
                raise self._told(failed, what) from failed
            error = failed
            if isinstance(failed, RuntimeError):
                counts = "failed, and counts as delivered; the next call goes on with the next one"
                error = self._told(failed, counts, BatchError)
        except BaseException:
            # Ctrl-C, say: the batch may be lost on the way, so stand before it again.
            self.settle(here)
            raise
        mark = (here.mark or Mark()).later(1)
        if error is not None:
            self._most_lag = 0  # others may fail, too
        elif not self._can_lag(mark):
            mark = Mark(self.runner().checkpoints())
        errors = here.errors + (error is not None)
        after = Position(here.epoch, here.step + 1, mark, here.epoch_mark, errors)
        self._exact = after if error is None else None
        try:
            return Taken(value, error, after)
        finally:
            del error  # its traceback has this frame: together they would keep the batch

    def _can_lag(self, mark: Mark) -> bool:
        """Whether pipelines that are built anew may run the batches since an older checkpoint.

        Those of a reader may; other sources may end in between, or can't be built again.
        """
        known = self._config.reader_name is not None and self.source.rebuildable
        begun = self.position.step == 0 or mark.checkpoints is None
        return known and not begun and mark.lag < self._most_lag

    def sample(self, make: Callable[..., Any]) -> Any:
        """A first batch of new pipelines; the position and its pipelines stay as they are."""
        runner = Runner(self.source.build())
        try:
            return runner.take(
                lambda outputs: make(
                    outputs, [len(own[0]) for own in outputs], True, runner.deferred
                )
            )
        finally:
            runner.close()

    def _run(self, convert: Callable[[Sequence[Outputs]], Any]) -> Any:
        here, runner = self.position, self.runner()
        try:
            return runner.take(convert)
        except SourceEnded:
            again = min(runner.lag, here.step)
            if again and self.plan is not None:
                # Its epoch ended before the first batch of this one; those are dropped again.
                runner.restart(again)
                with contextlib.suppress(SourceEnded):
                    return runner.take(convert)
            if here.step > 0 and self.plan is None:
                raise
            if here.step > 0:
                raise NoBatch(
                    f"the pipeline's source ended after {here.step} of {self.delivered()} "
                    f"batches of epoch {here.epoch}: it gives fewer samples than the epoch's "
                    f"size. Pass the size that it really has, a multiple of the batch size "
                    f"{self.batch_size} where it drops the rest"
                ) from None
        if self.plan is not None:
            # The source's epoch ended with ours; that of a source without a plan was
            # started by next_epoch().
            runner.restart()
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        if self.source.rebuildable:
            # An iterable is used up, but its pipeline's function makes it anew.
            checkpoints = runner.checkpoints()
            self.drop()
            runner = self._runner = Runner(self.source.build(checkpoints))
            with contextlib.suppress(SourceEnded):
                return runner.take(convert)
        raise NoBatch(
            f"the pipeline's source gives no batch in epoch {here.epoch}: it is used up. Let "
            "fn.external_source start again by cycle='raise' (an iterable or a generator "
            "function), or create the iterator that it reads inside the pipeline function"
        )

    def _told(
        self, error: RuntimeError, what: str, kind: type[RuntimeError] = RuntimeError
    ) -> RuntimeError:
        """DALI's error with the batch that it is about and what becomes of it."""
        here, of_function = self.position, isinstance(error, FunctionError)
        said = str(error) if of_function else f"DALI says: {advised(error)}"
        told = kind(f"batch {here.step} of epoch {here.epoch} {what}. {said}")
        told.__cause__ = error.__cause__ if of_function else error
        return told
