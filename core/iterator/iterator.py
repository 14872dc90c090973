"""`DALIGenericIterator`: the protocol that JAX code sees over pipelines at a position."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from nvidia.dali import Pipeline

from .. import replacements
from ..config import (
    IteratorConfig,
    PipelineIteratorArguments,
    difference_names,
    takes,
    whole_number,
    without_fraction,
)
from ..order.epochs import EpochPlan
from ..pipeline.batch import Batch
from ..pipeline.engine import CLOSED, COUNT, EpochEngine, MakeEngine, Mark
from ..pipeline.handmade_source import HandmadeSource
from ..pipeline.pipeline_source import PipelineSource
from ..state.position import FailedBatch
from ..stats import InputStats
from .engine import ReaderEngine
from .step_loops import steps_left, warn_of_early_end

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

Self = TypeVar("Self", bound="DALIGenericIterator")  # typing has one from Python 3.11 on
_MOST_TO_SKIP = 1 << 53  # more batches than any epoch has


class DALIGenericIterator:
    """Iterates over DALI pipelines; each batch is a dict of arrays.

    Takes the arguments of ``nvidia.dali.plugin.jax.DALIGenericIterator`` in their order, so
    that existing code changes its import line only, and ``mask`` and ``as_numpy``.

    Args:
        pipelines: A Pipeline or a list of them, all of one batch size.
        output_map: A name for each output of the pipeline, in order.
        size: Number of samples in an epoch (over all pipelines), where no reader says it.
            -1 without ``reader_name``: the epoch ends where the pipeline's source raises
            StopIteration; ``last_batch_policy`` then has no effect.
        reader_name: Name of the reader that says the epoch's size, its shards and padding.
        auto_reset: "yes" or True: raising StopIteration starts the next epoch. "no", False
            or None: ``reset()`` does, or ``iter()`` at the end of an epoch.
        last_batch_padded: Whether the source repeats its last sample to fill the last batch
            (True) or runs on into the next epoch. With ``reader_name`` the reader says it.
            None: False as in DALI; over ``source`` True, but for FILL without a mask, since rows
            that run on and are cut off, dropped or masked would be lost to the next epoch.
        last_batch_policy: FILL delivers every batch whole; DROP leaves out the last one
            where it is not whole; PARTIAL cuts it to the samples of the epoch.
        prepare_first_batch: Whether to schedule the first batches at once.
        sharding: How to place the batches over devices; a PartitionSpec is of the mesh that
            `jax.set_mesh` has set.
        pmap_compatible: Whether arrays have a leading device axis.
        mask: A name: each batch then has a bool array of that name, shape [batch], True
            where the sample belongs to the epoch and is no padding.
        as_numpy: True: CPU outputs are NumPy arrays instead of jax.Arrays: read-only views
            of DALI's buffers, valid for as long as they are referred to. GPU outputs are
            jax.Arrays all the same.
        on_error: What ``next()`` does with a batch that DALI fails to produce, at a corrupt
            file say. "raise": a RuntimeError with what DALI says; the next call goes on with
            the next batch. "skip": it is logged, listed in ``errors``, and the next batch is
            delivered. Either way it counts as a batch of the epoch. DALI fails a whole
            batch, never a single sample: "skip" loses the good samples beside a bad one.
            The files are named (``files`` of the error, and of what ``errors`` lists) for the
            first eight batches of an iterator of `data_iterator`: its reader is run again
            alone, which takes as long as a restore, and pictures are decoded one by one.
        check_processes: Whether processes that make a global batch together compare their
            pipelines before the first batch; see `dalijax.data_iterator`.
        batch_map: A function of (batch, key), or a list of them, applied to each placed batch; see
            `dalijax.data_iterator`.

    What a source can't give is never skipped nor counted: an exception of the pipeline's own
    Python source, or a RuntimeError of a reader (a missing file), is raised by each call until
    the source gives the batch.

    States are plain JSON values: `get_state` is where the consumer stands, whatever was
    peeked or scheduled, and `set_state` goes on from there bit for bit, on this iterator, a
    new one, or in another process. All methods may be called from any thread.

    Raises:
        ValueError, TypeError: For arguments that are wrong or exclude one another.
        RuntimeError: If the pipelines can't be built.
    """

    @takes(PipelineIteratorArguments)
    def __init__(
        self,
        pipelines: Pipeline | Sequence[Pipeline],
        output_map: Iterable[str],
        *in_dalis_order: Any,  # empty: `takes` gives them their names
        **arguments: Unpack[PipelineIteratorArguments],
    ):
        config = IteratorConfig(
            output_map,  # type: ignore[arg-type] # it becomes a tuple
            **arguments,
        ).placed()
        self._open(ReaderEngine(HandmadeSource(pipelines), config), config)

    @classmethod
    def _from_source(
        cls,
        source: PipelineSource | MakeEngine,
        config: IteratorConfig,
        lazy: bool = False,
        checkpoints: Sequence[bytes] | None = None,
    ) -> DALIGenericIterator:
        """An iterator whose pipelines are built by a source.

        Args:
            source: The source of the pipelines, or a function that makes another engine.
            config: The iterator's arguments.
            lazy: Whether to build the pipelines only when they are first used.
            checkpoints: What `checkpoints` of an iterator gave, to go on from.
        """
        iterator = cls.__new__(cls)
        engine: EpochEngine[Any]
        if isinstance(source, PipelineSource):
            engine = ReaderEngine(source, config)
        else:
            engine = source(config)
        iterator._open(engine, config, lazy, checkpoints)
        return iterator

    def _open(
        self,
        engine: EpochEngine[Any],
        config: IteratorConfig,
        lazy: bool = False,
        checkpoints: Sequence[bytes] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._spec: dict[str, jax.ShapeDtypeStruct] | None = None
        self._stats: InputStats | None = None
        self._has_ended = False  # once, with auto_reset
        self._early_end: weakref.finalize[Any, Any] | None = None  # gives a warning
        if lazy:
            return
        if checkpoints is not None:
            self._restore_checkpoints(checkpoints)
        engine.start()
        if checkpoints is None and engine.stands_restored():
            self._engine.stays = True
        if config.prepare_first_batch:
            self.start_prefetch()

    # The protocol of an iterator

    def __iter__(self: Self) -> Self:
        """Itself, in the next epoch where every batch of this one has been delivered.

        In mid-epoch, and just after `set_state`, it goes on where it is. With ``auto_reset``
        it never moves: raising StopIteration does.
        """
        with self._opened(), self._engine.interruptible():
            stays = self._config.auto_reset or self._engine.stays
            begun = self.step > 0 or self._engine.stopped  # an epoch may have no batch
            if not stays and begun and self._engine.at_end():
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
        with self._opened(), self._engine.interruptible():
            self._engine.stays = False
            if self._early_end is not None:  # another loop follows
                self._early_end.detach()
                self._early_end = None
            outcome = self._engine.deliver(self._stats)
            if outcome.ended:
                self._engine.stopped = True
                if self._config.auto_reset:
                    self._note_end()
                    self._next_epoch()
            try:
                return outcome.unwrap()
            finally:
                del outcome  # an error's traceback has this frame: they would keep the batch

    next = __next__  # as in DALI

    def _note_end(self) -> None:
        """Prepares a warning if the first end of an epoch ends a loop that counts steps.

        The warning is given when the iterator is closed or freed, unless it is used again: a loop
        may limit the steps of each epoch by a zip.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if left := steps_left(self):
            name, epoch = self._engine.name, self.epoch
            self._early_end = weakref.finalize(self, warn_of_early_end, name, epoch, left)

    def peek(self) -> Batch:
        """The batch that ``next()`` will deliver, which stays the next one.

        Raises:
            StopIteration: At the end of an epoch; nothing moves to the next one.
            Exception: What ``next()`` would raise, which it then raises too.
        """
        with self._opened(), self._engine.interruptible():
            self._engine.checkpoint()
            return dict(self._engine.peek_mapped().unwrap())

    def __len__(self) -> int:
        """Number of batches that the current epoch delivers.

        Raises:
            TypeError: If only the source knows where its epoch ends.
        """
        with self._opened():
            total = self._length()
            if total is None:
                raise TypeError(
                    "the length is unknown: only the pipeline's source knows where its epoch "
                    "ends. Pass size or reader_name for an iterator with a length"
                )
            return total

    def _length(self) -> int | None:
        """Number of batches of the epoch, if known; builds the pipelines only if it must."""
        if self._engine.length() is None:
            self._engine.prepare()
        return self._engine.length()

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError
                return object.__getattribute__(self, name)
            owner = type(self)
            raise replacements.no_attribute(
                f"{owner.__name__!r} object", name, dir(owner), replacements.ITERATOR
            )

    def __repr__(self) -> str:
        """Where the iterator stands; builds nothing, and waits for nothing."""
        engine = self._engine
        step = f"step {engine.step}"
        if (length := engine.length()) is not None:
            step += f" of {length}"
        parts = [f"epoch {engine.epoch}", step]
        if engine.batch_size:
            count = len(engine.device_ids)
            devices = dict.fromkeys("cpu" if k is None else f"gpu:{k}" for k in engine.device_ids)
            parts.append(f"batch {engine.batch_size}" + f" x {count} pipelines" * (count > 1))
            parts.append(f"device {', '.join(devices)}")
        elif not engine.closed:
            parts.append("not built yet")
        parts.append(f"outputs {list(self._config.output_map)}")
        parts += ["closed"] * engine.closed
        return f"<{type(self).__name__} of {engine.name}: {', '.join(parts)}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be pickled or copied: its pipelines run in this process. Pickle "
            "the iterator function, its arguments and get_state(), and call set_state() of the "
            "iterator that they make there"
        )

    @property
    def size(self) -> int:
        """Number of samples of the current epoch for each shard; -1 where it is unknown.

        As in DALI: the size passed in, or what the reader says: the smallest shard's under
        DROP, the largest's over a padded reader, else the samples of the epoch's batches.
        """
        plan = self._plan
        if plan is None or self._config.size > 0:
            return self._config.size
        return plan.size(self.epoch)

    @property
    def _plan(self) -> EpochPlan | None:
        """The reader's epochs; None where only the source knows their end."""
        with self._opened():
            self._engine.prepare()
            return self._engine.plan

    @property
    def _shards(self) -> tuple[int, ...]:
        """The shard that each pipeline reads in epoch 0."""
        with self._opened():
            self._engine.prepare()
            return self._engine.shards

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of each pipeline."""
        with self._opened():
            self._engine.prepare()
            return self._engine.batch_size

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._engine.closed

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self._engine.epoch

    @property
    def _following_epoch(self) -> int:
        """Number of the epoch after the consumer's: of the next one that has a batch of its own."""
        with self._opened():
            self._engine.prepare()
            return self._engine.following_epoch()

    @property
    def step(self) -> int:
        """Number of batches of the epoch that are behind the consumer, failed ones included."""
        return self._engine.step

    @property
    def errors(self) -> tuple[FailedBatch, ...]:
        """The batches that ``on_error`` skipped, or masked records of, in this process.

        These are the first 500 and the last 500; `num_errors` counts all of them.
        """
        return tuple(self._engine.errors)

    @property
    def num_errors(self) -> int:
        """Number of batches that ``on_error`` skipped, or masked records of, in this process."""
        return self._engine.errors.total

    @property
    def _left_out(self) -> int:
        """Number of batches behind the consumer that ``on_error="skip"`` left out."""
        return self._engine.num_failed if self._config.on_error == "skip" else 0

    def total(self, num_epochs: int) -> int:
        """Number of batches of the first epochs together.

        Raises:
            TypeError: If only the source knows where its epoch ends.
        """
        with self._opened():
            total = len(self)
            plan, shard = self._engine.plan, self._engine.shards[0]
            return num_epochs * total if plan is None else plan.total(num_epochs, shard)

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of a batch; under PARTIAL, of a whole one.

        With sharding or devices, shapes are global and the sharding is there, too.

        Takes at most one batch, which ``next()`` then delivers; at the end of an epoch, where
        there is none, one of pipelines that are built for it and freed again.

        Raises:
            Exception: What ``next()`` would raise.
        """
        with self._opened():
            if self._spec is None:
                with self._engine.interruptible():
                    self._engine.checkpoint()
                    self._spec = self._engine.spec()
            return dict(self._spec)

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; until it is called nothing is counted."""
        if self._stats is None:
            self._stats = InputStats()
        return self._stats

    # Position and lifecycle

    def reset(self) -> None:
        """Starts the next epoch at the end of one, else goes back to the epoch's start.

        Raises:
            RuntimeError: If the pipelines can't go back: the message says the way out.
        """
        with self._opened(), self._engine.interruptible():
            self._engine.stays = False
            if self._engine.at_end():
                self._next_epoch()
            else:
                self._engine.rewind()
            self._engine.moved()

    def _restart(self) -> None:
        """Moves to the first batch of epoch 0; pipelines that read in order are built again."""
        with self._opened(), self._engine.interruptible():
            self._engine.restart()
            self._engine.moved()
            self._engine.stays = self._engine.stopped = False

    @contextlib.contextmanager
    def _returning(self) -> Iterator[None]:
        """Returns to the position if the block fails or is interrupted, and pipelines can."""
        with self._opened():
            self._engine.roll_back()
            self._engine.checkpoint()
            mark = self._engine.mark()
            try:
                yield
            except BaseException:
                self._engine.go_back(mark)
                raise

    def _next_epoch(self) -> None:
        self._engine.next_epoch()
        self._engine.stopped = False

    def skip(self, batches: int) -> int:
        """Skips batches of the current epoch, and never crosses its end.

        Over a source no batch is produced for it. DALI's readers produce the batches, images are
        decoded, and the result is dropped. With ``on_error="raise"`` a batch that would fail
        counts, since ``next()`` would raise for it. ``auto_reset`` changes nothing: after the last
        batch of an epoch was skipped, ``next()`` raises StopIteration as if it was delivered.

        Args:
            batches: The number of batches.

        Returns:
            The number of batches.

        Raises:
            ValueError: If the number is less than 0, or the epoch has fewer batches. The iterator
                does not move, unless it can't return: the message then says so.
            Exception: What the pipelines' own source raised, or its reader.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._opened(), self._engine.interruptible():
            length, step = self._length() if count else None, self.step
            if length is not None and step + count > length:
                raise self._beyond(count, length - step)
            done = self._skip(count)
            if done < count:  # the length was unknown, or failed batches were left out
                self._engine.roll_back()
                raise self._beyond(count, done, moved=self.step != step)
            self._engine.moved()  # for 0, too: other processes may skip some
            self._engine.stays = self._engine.stays and count < 1
            return count

    def _beyond(self, count: int, left: int, moved: bool = False) -> ValueError:
        """The error of a skip beyond the end of the epoch."""
        batches = f"{left} batch is" if left == 1 else f"{left} batches are"
        return ValueError(
            f"skip({count}): only {batches} left in epoch {self.epoch}, and an iterator "
            "does not skip into the next epoch. Use a stream, iterator_fn.stream(...), which "
            "continues across epochs" + "; the iterator is at the end of the epoch now" * moved
        )

    def _skip_at_most(self, batches: int) -> int:
        """Skips batches, at most up to the end of the epoch; returns the number of batches."""
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._opened(), self._engine.interruptible():
            self._engine.stays = self._engine.stays and count < 1
            return self._skip(count)

    def _skip(self, count: int) -> int:
        done = self._engine.skip(count)
        if done:
            self._engine.moved()
        return done

    def seek(self, epoch: int, step: int = 0) -> None:
        """Goes to a batch of an iterator over a source, in constant time.

        Args:
            epoch: The epoch, from 0.
            step: The batch in it, from 0. Both are counted from the start, in batches of the
                present size.

        Raises:
            ValueError: If there is no such batch, or the iterator is over DALI's readers, which
                go only where a state says.
        """
        what = "a whole number, 0 or more"
        epoch = whole_number("epoch", without_fraction(epoch), what, 0)
        step = whole_number("step", without_fraction(step), what, 0)
        with self._opened(), self._engine.interruptible():
            self._engine.seek(epoch, step)
            self._engine.moved()
            self._engine.stays, self._engine.stopped = True, False

    @property
    def _seeks(self) -> bool:
        """Whether `seek` and `seek_step` move the iterator: over a source, and no reader."""
        return self._engine.locate(0) is not None

    def _begin_with(self, epoch: int) -> None:
        """Makes an epoch of an iterator over a source the first one, and moves to its start."""
        with self._opened(), self._engine.interruptible():
            self._engine.begin_with(epoch)
            self._engine.stays = self._engine.stopped = False

    def seek_step(self, step: int, first_epoch: int = 0) -> None:
        """Moves an iterator over a source to a global step, in constant time.

        ``next()`` then delivers the batch that a new iterator delivers after ``step`` batches, over
        as many epochs as that takes. Training loops that save only their step resume by it.

        Args:
            step: The number of batches before it, from 0, in batches of the present size.
            first_epoch: The epoch that step 0 begins.

        Raises:
            ValueError: If the number is less than 0; over DALI's readers, whose `stream` has a
                seek_step() that runs through the batches; with ``on_error="skip"``, since the
                number of batches that were skipped is not known.
        """
        step = whole_number(
            "step", without_fraction(step), "a whole number of batches, 0 or more", 0
        )
        with self._opened(), self._engine.interruptible():
            place = self._engine.locate(step)
            if place is None:
                raise ValueError(
                    f"seek_step({step}): DALI's readers read in order. Use a stream, "
                    f"iterator_fn.stream(...), whose seek_step({step}) runs through the batches "
                    "before it; or restore a state by set_state()"
                )
            self._engine.seek(first_epoch + place[0], place[1], first_epoch)
            self._engine.moved()
            self._engine.stays, self._engine.stopped = True, False

    def epochs(self, num_epochs: int | None = None) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Iterates over the epochs of a training loop, from the position to the last epoch.

            for epoch, batches in iterator.epochs(90):
                for batch in batches:
                    state = step(state, batch)
                evaluate(state, epoch)

        It continues correctly after `set_state` and `seek_step`, with and without ``auto_reset``:
        the first pass has the remaining batches of the epoch, no pass is empty at the end of an
        epoch, and there is no pass after the last epoch. If the loop over the batches is left
        early and the next epoch is requested, the remaining batches are skipped (a reader
        produces them). If both loops are left, a new call continues in the same epoch.

        Args:
            num_epochs: The number of epochs of the whole training, including the ones before the
                position; None for no end.

        Returns:
            An iterator of pairs: the number of the epoch, from 0, and an iterator over its
            remaining batches.

        Raises:
            ValueError: If num_epochs is less than 1.
        """
        if num_epochs is not None:
            what = "a whole number of epochs, 1 or more, or None for no end"
            num_epochs = whole_number("num_epochs", num_epochs, what, 1)
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int | None) -> Iterator[tuple[int, Iterator[Batch]]]:
        while self._begin_epoch(num_epochs):
            epoch = self.epoch
            yield epoch, _EpochBatches(self, epoch)
            with self._opened():
                if self.epoch == epoch:
                    while self._skip_at_most(_MOST_TO_SKIP):
                        pass

    def _begin_epoch(self, num_epochs: int | None) -> bool:
        """Starts the next epoch if the current one has no further batch; False after the last."""
        with self._opened(), self._engine.interruptible():
            engine = self._engine
            begun = self.step > 0 or engine.stopped
            engine.checkpoint()
            # A look at the next batch: failed batches may be left out before the end.
            if begun and engine.peek().ended:
                if num_epochs is not None and engine.following_epoch() >= num_epochs:
                    return False
                engine.advance()
                self._next_epoch()
                self._engine.stays = False
            return num_epochs is None or self.epoch < num_epochs

    def get_state(self) -> dict[str, Any]:
        """Where the consumer stands, as a plain JSON value (dict of str, int and list of str).

        It is the position behind the last batch that ``next()`` delivered, even if others were
        peeked or scheduled since; its keys and types never change.

        Raises:
            ValueError: If the pipelines can't be resumed: the message says why.
        """
        with self._opened():
            self._engine.roll_back()
            return self._engine.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Goes on where a state says, with new pipelines, which are built at once.

        Args:
            state: What `get_state` of an iterator over the same data gave, or any adapter's
                of the same function and arguments; JSON text and bytes of it, too. It is
                neither kept nor changed.
            allow: Names of differences to go on with, as errors have them: "operators.resize.size"
                for an argument, "operators.resize" for an operator that came, went or changed,
                "reader.files". What positions are counted in can't be waived: batch size, shards,
                the epoch's size, policy and padding.

        Raises:
            ValueError: If it is no state, one of other data, or one whose part DALI refuses; if
                ``allow`` has a name of nothing. Nothing has changed.
            Exception: If the pipelines can't be built. Nothing has changed.
        """
        names = difference_names(allow, "allow")
        with self._opened(), self._engine.interruptible():
            self._engine.set_state(state, self._config.allow_changes, names)
            self._engine.moved()
            self._engine.stays, self._engine.stopped = True, False

    def _mark(self) -> Mark:
        """The position, for `_go_back`."""
        with self._opened():
            self._engine.roll_back()
            return self._engine.mark()

    def _go_back(self, mark: Mark) -> bool:
        """Returns to a mark of this iterator, or of another one of the same function.

        Returns:
            False if the pipelines can't be built to stand there; nothing has changed then.
        """
        with self._opened():
            return self._engine.go_back(mark)

    def checkpoints(self) -> list[bytes]:
        """The state as one piece of bytes for each pipeline, for ``checkpoints=``.

        Raises:
            ValueError: If the pipelines can't be resumed: the message says why.
        """
        with self._opened():
            self._engine.roll_back()
            return self._engine.checkpoints()

    def _restore_checkpoints(self, pieces: Sequence[bytes]) -> None:
        """Goes on where checkpoints of this package or DALI's plugin say."""
        if isinstance(pieces, (bytes, bytearray, str, Mapping)):
            raise TypeError(
                "checkpoints must be a list of bytes, one for each pipeline, as checkpoints() of "
                f"an iterator gives it, not {str(pieces)[:40]!r}; a state is for set_state()"
            )
        self._engine.set_checkpoints(pieces, self._config.allow_changes)
        self._engine.moved()
        self._engine.stays, self._engine.stopped = True, False

    def _start(self) -> None:
        """Builds the pipelines, unless they are built: the first state says what they read."""
        with self._opened():
            self._engine.roll_back()
            self._engine.start()

    def start_prefetch(self) -> None:
        """Builds the pipelines, unless they are built, and schedules runs without waiting."""
        with self._opened(), self._engine.interruptible():
            self._engine.schedule()

    def _opened(self) -> threading.RLock:
        """The lock, of an iterator that is not closed, nor of a parent process."""
        if self._engine.closed:
            raise ValueError(CLOSED)
        return self._engine.lock

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError. May be called again."""
        self._engine.close()
        if self._early_end is not None:
            self._early_end()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _EpochBatches(Iterator[Batch]):
    """The remaining batches of an epoch; none once the iterator is in another epoch.

    It is no generator, which an error would end: after a batch that failed, the next one follows.

    Args:
        iterator: The iterator.
        epoch: The epoch.
    """

    def __init__(self, iterator: DALIGenericIterator, epoch: int):
        self._iterator = iterator
        self._epoch = epoch

    def __next__(self) -> Batch:
        if self._iterator.epoch != self._epoch:
            raise StopIteration
        return next(self._iterator)
