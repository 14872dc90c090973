"""The iterator: the protocol that JAX code sees over pipelines at a position."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import TypeVar

import jax

from .batches import Batch, BatchMaker, choose_layout
from .config import IteratorConfig
from .culprits import Culprits
from .epochs import EpochPlan
from .feed import Feed, Taken
from .lifetime import calls
from .position import FailedBatch
from .resumable import Resumable
from .runner import BatchError, SourceEnded
from .skipping import Skipper
from .source import PipelineSource
from .stats import InputStats

_log = logging.getLogger("dalijax")
Self = TypeVar("Self", bound="BatchIterator")  # typing has one from Python 3.11 on


class BatchIterator(Resumable):
    """An iterator over the pipelines of a source; see `dalijax.DALIGenericIterator`.

    Its pipelines are those of the process that built them: in a child that is forked from it,
    whatever needs them raises RuntimeError. `close` and the end of the child wait for nothing.

    Args:
        source: Where the pipelines come from.
        config: The iterator's arguments.
        lazy: Whether to build the pipelines only when they are first used.
        checkpoints: What `checkpoints` of an iterator gave, to go on from.
    """

    def __init__(
        self,
        source: PipelineSource,
        config: IteratorConfig,
        lazy: bool = False,
        checkpoints: Sequence[bytes] | None = None,
    ):
        self._config = config
        self._lock = threading.RLock()
        self._calls = calls
        layout = choose_layout(config)
        self._feed = Feed(source, config, layout.shards)
        self._skipper = Skipper(self._feed, config.reader_name)
        self._make_batch = BatchMaker(config, layout)
        self._culprits = Culprits(source, config.reader_name)
        # The consumer's position; the feed's is further on by a peeked batch.
        self._position = self._feed.position
        self._peeked: Taken | None = None
        self._stays = False  # set_state() came last, after which iter() does not move
        self._stopped = False  # StopIteration was raised in this epoch
        self._errors: list[FailedBatch] = []
        self.stats: InputStats | None = None
        self._unsure = False  # whether a call was broken off, which began at
        self._before = self._position
        if lazy:
            return
        if checkpoints is not None:
            self._restore_checkpoints(checkpoints)
        self._feed.runner()
        self._position = self._feed.position
        if checkpoints is None and source.restored:
            self._restore_checkpoints(source.restored, stand_there=True)
        if config.prepare_first_batch:
            self.start_prefetch()

    # The protocol of an iterator

    def __iter__(self: Self) -> Self:
        """Itself, in the next epoch where every batch of this one has been delivered.

        In mid-epoch, and just after `set_state`, it goes on where it is. With ``auto_reset``
        it never moves: raising StopIteration does.
        """
        with self.opened():
            stays = self._config.auto_reset or self._stays
            begun = self._position.step > 0 or self._stopped  # an epoch may have no batch
            if not stays and begun and self._at_end():
                self._next_epoch()
            return self

    def __next__(self) -> Batch:
        """The next batch: a dict of arrays of shape [batch, ...], by the outputs' names.

        Raises:
            StopIteration: At the end of an epoch, on each call until ``reset()``; with
                ``auto_reset`` only once, and the next epoch has begun.
            ValueError: If an output is ragged, or the iterator is closed.
            TypeError: If JAX would narrow an output's 64-bit dtype.
            RuntimeError: If DALI failed to produce the batch.
        """
        with self.opened():
            if self.stats is None:
                return self._surely(self._next)
            with self.stats.waiting():
                return self._surely(self._next)

    def _next(self) -> Batch:
        self._stays = False
        taken = self._take()
        self._peeked = None
        if taken is None:
            self._position = self._feed.position
            self._stopped = True
            if self._config.auto_reset:
                self._next_epoch()
            raise StopIteration
        if self.stats is not None:
            self._count(taken)
        self._position = self._feed.position = taken.after
        if taken.error is not None:
            error = taken.error
            del taken
            try:
                raise error
            finally:
                del error  # as in `Feed.take`
        return taken.value

    next = __next__  # as in DALI

    def peek(self) -> Batch:
        """The batch that ``next()`` will deliver, which stays the next one.

        Raises:
            StopIteration: At the end of an epoch; nothing moves to the next one.
            Exception: What ``next()`` would raise, which it then raises too.
        """
        with self.opened():
            return self._surely(self._look)

    def _look(self) -> Batch:
        self._pin()
        taken = self._take()
        if taken is None:
            raise StopIteration
        if taken.error is not None:
            raise taken.error
        return dict(taken.value)

    def _take(self) -> Taken | None:
        """The batch after the position, taken once; None at the end of the epoch."""
        feed = self._feed
        while self._peeked is None and not feed.at_end():
            self._check_thread()
            try:
                # Not a local: an error's traceback has this frame, as in `Feed.take`.
                self._peeked = feed.take(self._make_batch)
            except SourceEnded:
                return None
            error = self._peeked.error
            if isinstance(error, BatchError):
                self._peeked = self._failed(self._peeked, error)
            del error
        return self._peeked

    def _failed(self, taken: Taken, error: BatchError) -> Taken | None:
        """A batch that failed, whose files are named; None where it is skipped."""
        here = self._feed.position
        named = self._culprits.named(error, here.mark)
        if self._config.on_error != "skip":
            return dataclasses.replace(taken, error=named)
        failed = FailedBatch(here.epoch, here.step, str(named), named.files)
        _log.warning("skipped: %s", failed.message)
        self._errors.append(failed)
        self._feed.position = taken.after
        return None

    def _check_thread(self) -> None:
        """Raises RuntimeError where a function of the graph can't be called in this thread."""
        deferred = self._feed.runner().deferred
        if deferred is not None:
            deferred.check_thread()

    def __len__(self) -> int:
        """Number of batches that the current epoch delivers.

        Raises:
            TypeError: If only the source knows where its epoch ends.
        """
        with self.opened():
            total = self._feed.delivered()
            if total is None:
                raise TypeError(
                    "the length is unknown: only the pipeline's source knows where its epoch "
                    "ends. Pass size or reader_name for an iterator with a length"
                )
            return total

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        """Where it stands; it builds nothing, and waits for nobody."""
        feed, here = self._feed, self._position
        step = f"step {here.step}"
        if feed.plan is not None:
            step += f" of {feed.plan.delivered(here.epoch, feed.streams[0])}"
        told = [f"epoch {here.epoch}", step]
        if feed.batch_size:
            lanes = len(feed.device_ids)
            devices = dict.fromkeys("cpu" if k is None else f"gpu:{k}" for k in feed.device_ids)
            told.append(f"batch {feed.batch_size}" + f" x {lanes} pipelines" * (lanes > 1))
            told.append(f"device {', '.join(devices)}")
        elif not feed.closed:
            told.append("not built yet")
        told.append(f"outputs {list(self._config.output_map)}")
        told += ["closed"] * feed.closed
        return f"<{type(self).__name__} of {feed.source.name}: {', '.join(told)}>"

    @property
    def size(self) -> int:
        """Number of samples of the current epoch for each shard; -1 where it is unknown.

        As in DALI: the size passed in, or what the reader says: the smallest shard's under
        DROP, the largest's over a padded reader, else the samples of the epoch's batches.
        """
        with self.opened():
            self._feed.runner()
            plan = self._feed.plan
            if plan is None or self._config.size > 0:
                return self._config.size
            return plan.size(self._position.epoch)

    @property
    def plan(self) -> EpochPlan | None:
        """The reader's epochs; None where only the source knows their end."""
        with self.opened():
            self._feed.runner()
            return self._feed.plan

    @property
    def shards(self) -> tuple[int, ...]:
        """The shard that each pipeline reads in epoch 0."""
        with self.opened():
            self._feed.runner()
            return self._feed.streams

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._feed.closed

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self._position.epoch

    @property
    def following_epoch(self) -> int:
        """Number of the epoch after the consumer's: of the next one that has a batch of its own."""
        epoch, plan = self.epoch, self.plan
        return epoch + 1 if plan is None else plan.next_epoch(epoch)

    @property
    def step(self) -> int:
        """Number of batches of the epoch that are behind the consumer, failed ones included."""
        return self._position.step

    def total(self, num_epochs: int) -> int:
        """Number of batches of the first epochs together.

        Raises:
            TypeError: If only the source knows where its epoch ends.
        """
        with self.opened():
            total = len(self)
            plan, stream = self._feed.plan, self._feed.streams[0]
            return num_epochs * total if plan is None else plan.total(num_epochs, stream)

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of each pipeline."""
        with self.opened():
            self._feed.runner()
            return self._feed.batch_size

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of a batch, under PARTIAL those of a whole one.

        With sharding or devices, shapes are global and the sharding is there, too.

        Takes at most one batch, which ``next()`` then delivers; at the end of an epoch, where
        there is none, one of pipelines that are built for it and freed again.

        Raises:
            Exception: What ``next()`` would raise.
        """
        with self.opened():
            if self._spec is None:
                try:
                    batch = self.peek()
                except StopIteration:
                    self._check_thread()
                    batch = self._feed.sample(self._make_batch)
                self._spec = self._make_batch.spec(batch, self._feed.batch_size, self._feed.plan)
            return dict(self._spec)

    _spec: dict[str, jax.ShapeDtypeStruct] | None = None

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; until it is called nothing is counted."""
        if self.stats is None:
            self.stats = InputStats()
        return self.stats

    def _count(self, taken: Taken) -> None:
        here, feed = self._feed.position, self._feed
        rows = feed.batch_size * len(feed.streams)
        valid = rows
        if feed.plan is not None:
            valid = sum(feed.plan.valid(here.epoch, here.step, s) for s in feed.streams)
        self.watch().delivered(here.epoch, here.step, valid, rows, taken.after.errors)

    @property
    def errors(self) -> tuple[FailedBatch, ...]:
        """The batches that ``on_error="skip"`` skipped in this process."""
        return tuple(self._errors)

    @property
    def left_out(self) -> int:
        """Number of batches behind the consumer that ``on_error="skip"`` left out."""
        return self._position.errors if self._config.on_error == "skip" else 0

    # Position and lifecycle

    def reset(self) -> None:
        """Starts the next epoch at the end of one, else goes back to the epoch's start.

        Raises:
            RuntimeError: If the pipelines can't go back: the message says the way out.
        """
        with self.opened():
            self._settle()
            self._stays = False
            if self._at_end():
                self._next_epoch()
            elif self._position.step > 0:
                looked, self._feed.position = self._feed.position, self._position
                try:
                    self._feed.rewind()
                except RuntimeError:
                    self._feed.position = looked
                    raise
                self._peeked = None
                self._position = self._feed.position

    def _at_end(self) -> bool:
        """Whether the consumer, who may stand before what was peeked, is at an epoch's end."""
        same = self._peeked is None and self._position == self._feed.position
        return same and self._feed.at_end()

    def _next_epoch(self) -> None:
        self._feed.next_epoch()
        self._position = self._feed.position
        self._stopped = False

    def start_prefetch(self) -> None:
        """Builds the pipelines where they are not, and schedules runs; waits for none."""
        with self.opened():
            self._feed.runner().schedule()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError. May be called again."""
        if self._calls.lost(self._feed.process):  # whoever has the lock may never give it back
            self._feed.closed = True
            return
        with self._lock:
            self._peeked = None
            self._feed.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
