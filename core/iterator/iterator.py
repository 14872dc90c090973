"""`DALIGenericIterator`, the public iterator over the batches of an engine, and its base class."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from nvidia.dali import Pipeline

from ..arguments import difference_names, step_number, whole_number, without_fraction
from ..config import IteratorConfig, PipelineIteratorArguments, takes
from ..messages import replacements
from ..order.epochs import EpochPlan
from ..order.samples import MOST_SAMPLES
from ..pipeline.batch import Batch
from ..pipeline.engine import CLOSED, COUNT, EpochEngine, MakeEngine
from ..pipeline.handmade_pipelines import HandmadePipelineFactory
from ..pipeline.pipeline_factory import PipelineFactory
from ..state.position import FailedBatch
from ..stats import InputStats
from .reader_engine import ReaderEngine

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

Self = TypeVar("Self", bound="BatchIterator")  # typing.Self requires Python 3.11
_MOST_TO_SKIP = 1 << 53  # exceeds the number of batches of any epoch


def make_engine(factory: PipelineFactory | MakeEngine, config: IteratorConfig) -> EpochEngine[Any]:
    """Returns the engine of a factory's pipelines, or the engine that a function creates."""
    if isinstance(factory, PipelineFactory):
        return ReaderEngine(factory, config)
    return factory(config)


class BatchIterator:
    """Base class of iterators over the batches of an engine: position, states and lifecycle.

    Subclasses define ``next()``, and what happens at the end of an epoch.

    Args:
        engine: The engine, which the iterator owns and closes.
    """

    def __init__(self, engine: EpochEngine[Any]):
        self._engine = engine
        self._spec: dict[str, jax.ShapeDtypeStruct] | None = None
        self._stats: InputStats | None = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        return f"<{type(self).__name__} of {self._description()}>"

    def _description(self) -> str:
        """Returns a description of the position; neither builds pipelines nor waits."""
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
        names = [*engine.output_names, *([self._config.mask] if self._config.mask else [])]
        parts.append(f"outputs {names}")
        parts += ["closed"] * engine.closed
        return f"{engine.name}: {', '.join(parts)}"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be pickled or copied, because its pipelines run in this process. "
            "Pickle the iterator function, its arguments and get_state(), create an iterator from "
            "them, and call its set_state()"
        )

    @property
    def _config(self) -> IteratorConfig:
        """The arguments of the iterator."""
        return self._engine._config

    @property
    def closed(self) -> bool:
        """Whether the iterator was closed."""
        return self._engine.closed

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self._engine.epoch

    @property
    def step(self) -> int:
        """Number of batches of the epoch before the position, including failed batches."""
        return self._engine.step

    @property
    def errors(self) -> tuple[FailedBatch, ...]:
        """The batches of this process that were skipped, or have masked records.

        Contains the first 500 and the last 500.
        """
        return tuple(self._engine.errors)

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of a batch; under PARTIAL, of a full batch.

        With sharding or devices, shapes are global and shardings are included. Produces at most one
        batch, which ``next()`` then delivers. At the end of an epoch, the batch is dropped instead;
        over a reader, temporary pipelines produce it.

        Raises:
            Exception: The error that ``next()`` would raise.
        """
        with self._opened():
            if self._spec is None:
                with self._engine.interruptible():
                    self._engine.checkpoint()
                    self._spec = self._engine.spec()
            return dict(self._spec)

    @property
    def _plan(self) -> EpochPlan | None:
        """The plan of the epochs; None if the end of an epoch is unknown."""
        with self._opened():
            self._engine.prepare()
            return self._engine.plan

    @property
    def _shards(self) -> tuple[int, ...]:
        """The index of the shard that each pipeline reads in epoch 0."""
        with self._opened():
            self._engine.prepare()
            return self._engine.shards

    def _length(self) -> int | None:
        """Returns the number of batches of the epoch, None if unknown; may build the pipelines."""
        if self._engine.length() is None:
            self._engine.prepare()
        return self._engine.length()

    def _num_batches(self, num_epochs: int | None = None) -> int:
        """Returns the number of batches of the current epoch, or of the first epochs together.

        Args:
            num_epochs: Number of epochs from the start; None: the current epoch.

        Raises:
            TypeError: If the end of an epoch is unknown.
        """
        with self._opened():
            length = self._length()
            if length is None:
                raise TypeError(
                    "the length is unknown, because the epoch ends when an external_source of the "
                    "pipeline ends. Pass size or reader_name for an iterator with a length"
                )
            if num_epochs is None:
                return length
            return self._engine.total_length(num_epochs)

    def peek(self) -> Batch:
        """Returns the batch that the following ``next()`` will return.

        Raises:
            StopIteration: At the end of an epoch; the iterator does not move.
            Exception: The error that ``next()`` would raise, and will raise again.
        """
        with self._opened(), self._engine.interruptible():
            self._engine.checkpoint()
            return dict(self._engine.peek_mapped().unwrap())

    def record(self, number: int, epoch: int | None = None) -> Batch:
        """Returns one record of a source as the loop gets it, e.g. to look at it.

        The random numbers are the same as in the loop's batch of this epoch. The position and the
        batches of the iterator do not change. Each call reads the record, and builds a pipeline.

        Args:
            number: The number of the record in the source, from 0, as in ``Named(index=...)``.
            epoch: The epoch, from 0; None: the iterator's epoch. In a `Mixture`, the epoch of the
                record's source.

        Returns:
            An array for each name of a batch, without the dimension of the batch, and without
            sharding. ``batch_map`` is not applied, since its functions take whole batches.

        Raises:
            TypeError: If the iterator is over DALI's readers.
            ValueError: If there is no such record or epoch.
            BatchError: If the record is bad.
            StateError: If the graph depends on earlier batches, as with ``fn.random``.
        """
        expected = "a whole number, 0 or more"
        number = whole_number("number", without_fraction(number), expected, 0)
        if epoch is not None:
            epoch = whole_number("epoch", without_fraction(epoch), expected, 0, MOST_SAMPLES)
        with self._opened():
            self._engine.roll_back()
            return self._engine.record(number, epoch)

    def watch(self) -> InputStats:
        """Returns the counters of delivered batches, which start at the first call."""
        if self._stats is None:
            self._stats = InputStats()
        return self._stats

    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position as a JSON value.

        This is the position after the last batch that ``next()`` returned, independent of peeked
        and scheduled batches. The keys and types of the value never change.

        Raises:
            ValueError: If the state of the pipelines can't be saved.
        """
        with self._opened():
            self._engine.roll_back()
            return self._engine.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Moves to the position of a state.

        Over a DALI reader, this builds new pipelines, unless the position does not change.

        Args:
            state: Result of `get_state` of an iterator over the same data, or of any adapter with
                the same function and arguments; also as JSON text or bytes. The object is neither
                stored nor changed.
            allow: Names of differences to ignore, as in errors: "operators.resize.size" for an
                argument, "operators.resize" for an operator that was added, removed or changed,
                "reader.files". Differences that change positions can't be ignored: batch size,
                shards, epoch size, policy and padding.

        Raises:
            ValueError: If the value is not a state or a state of different data, if DALI rejects
                its checkpoints in the state, or if a name in ``allow`` does not exist. The iterator
                does not change.
            Exception: If the pipelines can't be built. The iterator does not change.
        """
        with self._opened():
            self._restore(self._engine, state, allow)

    def _restore(
        self,
        engine: EpochEngine[Any],
        state: Mapping[str, Any] | str | bytes,
        allow: Sequence[str],
    ) -> None:
        """Moves an engine of this iterator to the position of a state; see `set_state`."""
        names = difference_names(allow, "allow")
        with engine.interruptible():
            engine.set_state(state, self._config.allow_changes, names)
            engine.note_jump()

    def _next_epoch(self) -> None:
        self._engine.next_epoch()
        self._engine.change(stopped=False)

    def _skip_in_epoch(self, count: int) -> int:
        """Skips batches, at most up to the end of the epoch; returns the number of batches."""
        with self._opened(), self._engine.interruptible():
            self._engine.change(stays=False)
            return self._skip(count)

    def _skip(self, count: int) -> int:
        """Skips batches like `_skip_in_epoch`, within an interruptible call."""
        skipped = self._engine.skip(count)
        if skipped:
            self._engine.moved()
        return skipped

    def _seek_step(self, step: int, first_epoch: int) -> None:
        """Moves to a global step; see `DALIGenericIterator.seek_step`."""
        with self._opened(), self._engine.interruptible():
            epoch_and_step = self._engine.locate(step)
            if epoch_and_step is None:
                raise ValueError(
                    f"seek_step({step}): DALI's readers read sequentially. Use a stream, "
                    f"iterator_fn.stream(...), whose seek_step({step}) runs through the batches "
                    "before it, or restore a state by set_state()"
                )
            self._engine.seek(first_epoch + epoch_and_step[0], epoch_and_step[1], first_epoch)
            self._engine.note_jump()

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs, without waiting for the batches."""
        with self._opened(), self._engine.interruptible():
            self._engine.schedule()

    def _opened(self) -> threading.RLock:
        """Returns the engine's lock, which callers hold during a call.

        Raises:
            ValueError: If the iterator is closed.
            RuntimeError: If this process was forked from the process with the pipelines.
        """
        if self._engine.closed:
            raise ValueError(CLOSED)
        return self._engine.lock

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError. May be called again."""
        self._engine.close()


class DALIGenericIterator(BatchIterator):
    """Iterates over DALI pipelines; each batch is a dict of arrays.

    Takes the arguments of ``nvidia.dali.plugin.jax.DALIGenericIterator`` in the same order, and
    further arguments. Existing code only changes its import.

    A batch that can't be read is never skipped or counted: an exception of an ``external_source``
    of the pipeline, or a RuntimeError of a reader (e.g. a missing file), is raised at each call
    until the batch can be read.

    States are JSON values: `get_state` returns the consumer's position, independent of peeked and
    scheduled batches, and `set_state` resumes from it bit for bit, in this iterator, a new
    iterator, or another process. All methods are thread-safe.

    Args:
        pipelines: A Pipeline or a list of Pipelines, all with the same batch size.
        output_map: A name for each output of the pipeline, in order. If its graph function returns
            a dict, the keys are the names; output_map may then be omitted, or list the same names.
            Outputs of a dict are in alphabetical order.
        size: Number of samples in an epoch (over all pipelines), if there is no ``reader_name``.
            -1: the epoch ends when an ``external_source`` raises StopIteration, and
            ``last_batch_policy`` has no effect.
        reader_name: Name of the reader that determines the epoch's size, its shards and padding.
        auto_reset: "yes" or True: raising StopIteration starts the next epoch. "no", False or
            None: ``reset()``, or ``iter()`` at the end of an epoch, starts the next epoch.
        last_batch_padded: Whether the last batch is padded with repetitions of the last sample
            (True), or filled with samples of the next epoch (False). With ``reader_name``, the
            reader determines it. None: False as in DALI, but True over a ``source`` of
            `dalijax.data_iterator`, except for FILL without a mask, because rows of the next epoch
            that are cut off, dropped or masked would be lost.
        last_batch_policy: "fill" delivers only full batches; "drop" drops an incomplete last batch;
            "partial" cuts it to the samples of the epoch. A `dalijax.LastBatchPolicy` is accepted,
            too.
        drop_remainder: True for ``last_batch_policy="drop"``, as in Grain and tf.data.
        prepare_first_batch: Whether to schedule the first batches immediately.
        sharding: Placement of the batches over devices; a PartitionSpec uses the mesh of
            `jax.set_mesh`. In a dict of output names, None keeps an output on the host.
        pmap_compatible: Whether arrays have a leading device axis.
        mask: True or a name: adds a bool array [batch] of this name ("mask" for True), which is
            True for samples of the epoch and False for padding.
        as_numpy: True: CPU outputs are NumPy arrays instead of jax.Arrays: read-only views of
            DALI's buffers, which stay valid while they are referenced. GPU outputs are jax.Arrays
            in any case.
        on_error: Handling of a batch that DALI fails to produce, e.g. because of a corrupt file.
            "raise": raises a RuntimeError with DALI's message; the following call returns the next
            batch. "skip": logs the error, adds it to ``errors``, and returns the next batch. In
            both cases the failed batch counts as a batch of the epoch. DALI fails whole batches, so
            "skip" also loses the good samples of the batch. The first eight errors of an iterator
            of `data_iterator` name the bad files (``files``). To find them, the reader runs again
            alone, which takes as long as a restore, and images are decoded one by one.
        check_processes: Whether processes that form global batches compare their pipelines before
            the first batch; see `dalijax.data_iterator`.
        batch_map: A function of (batch, key), or a list of functions, applied to each placed batch;
            see `dalijax.data_iterator`.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value is invalid or two arguments exclude each other.
        RuntimeError: If the pipelines can't be built.
    """

    @takes(PipelineIteratorArguments)
    def __init__(
        self,
        pipelines: Pipeline | Sequence[Pipeline],
        output_map: Iterable[str] = (),
        *in_dalis_order: Any,  # empty: `takes` gives them their names
        **arguments: Unpack[PipelineIteratorArguments],
    ):
        config = IteratorConfig(
            output_map,  # type: ignore[arg-type] # it becomes a tuple
            **arguments,  # type: ignore[arg-type] # the policy and the mask are parsed
        ).placed()
        self._open(ReaderEngine(HandmadePipelineFactory(pipelines), config))

    @classmethod
    def _from_factory(
        cls,
        factory: PipelineFactory | MakeEngine,
        config: IteratorConfig,
        checkpoints: Sequence[bytes] | None = None,
    ) -> DALIGenericIterator:
        """Creates an iterator whose pipelines are built by a factory.

        Args:
            factory: The factory of the pipelines, or a function that creates an engine.
            config: Arguments of the iterator.
            checkpoints: Result of `checkpoints` of an iterator, to resume from.
        """
        iterator = cls.__new__(cls)
        iterator._open(make_engine(factory, config), checkpoints)
        return iterator

    def _open(
        self,
        engine: EpochEngine[Any],
        checkpoints: Sequence[bytes] | None = None,
    ) -> None:
        """Initializes the iterator with an engine; see `_from_factory` for the other arguments."""
        super().__init__(engine)
        if checkpoints is not None:
            self._restore_checkpoints(checkpoints)
        engine.start()
        if checkpoints is None and engine.adopt_restored():
            engine.change(stays=True)
        if self._config.prepare_first_batch:
            self.start_prefetch()

    # The protocol of an iterator

    def __iter__(self: Self) -> Self:
        """Returns the iterator itself; first starts the next epoch if this epoch was delivered.

        Within an epoch, and right after `set_state`, the position does not change. With
        ``auto_reset`` it never changes, because raising StopIteration has started the next epoch.
        """
        with self._opened(), self._engine.interruptible():
            stays = self._config.auto_reset or self._engine.cursor.stays
            has_begun = self.step > 0 or self._engine.cursor.stopped  # an epoch may have no batch
            if not stays and has_begun and self._engine.at_end():
                self._next_epoch()
            return self

    def __next__(self) -> Batch:
        """Returns the next batch: a dict of arrays [batch, ...] by output name.

        Raises:
            StopIteration: At the end of an epoch, at each call until ``reset()``; with
                ``auto_reset`` only once, and the next epoch begins.
            ValueError: If an output is ragged, or the iterator is closed.
            TypeError: If JAX would narrow an output's 64-bit dtype.
            RuntimeError: If DALI failed to produce the batch.
        """
        with self._opened(), self._engine.interruptible():
            if self._engine.cursor.stays:
                self._engine.change(stays=False)
            return self._engine.deliver(self._stats, self._finish_epoch).unwrap()

    next = __next__  # as in DALI

    def _finish_epoch(self) -> None:
        """Records the end of an epoch; with auto_reset, starts the next epoch."""
        self._engine.change(stopped=True)
        if self._config.auto_reset:
            self._next_epoch()

    def __len__(self) -> int:
        """Returns the number of batches that the current epoch delivers.

        Raises:
            TypeError: If the end of the epoch is unknown.
        """
        return self._num_batches()

    @property
    def size(self) -> int:
        """Number of samples of the current epoch for each shard; -1 if it is unknown.

        As in DALI, this is the ``size`` argument, or the reader determines it: the size of the
        smallest shard under DROP, of the largest shard if the reader pads, otherwise the number of
        rows of all batches.
        """
        plan = self._plan
        if plan is None or self._config.size > 0:
            return self._config.size
        return plan.size(self.epoch)

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of each pipeline."""
        with self._opened():
            self._engine.prepare()
            return self._engine.batch_size

    @property
    def num_errors(self) -> int:
        """Number of batches of this process that were skipped, or have masked records.

        Unlike `errors`, it counts all of them.
        """
        return self._engine.errors.total

    def total(self, num_epochs: int) -> int:
        """Returns the number of batches of the first ``num_epochs`` epochs together.

        Raises:
            TypeError: If the end of an epoch is unknown.
        """
        return self._num_batches(num_epochs)

    # Position and lifecycle

    def reset(self) -> None:
        """Starts the next epoch at the end of an epoch; otherwise moves to the epoch's start.

        Raises:
            RuntimeError: If the pipelines can't be rebuilt at the epoch's start; the message
                explains the alternatives.
        """
        with self._opened(), self._engine.interruptible():
            self._engine.change(stays=False)
            if self._engine.at_end():
                self._next_epoch()
            else:
                self._engine.rewind()
            self._engine.moved()

    def skip(self, batches: int) -> int:
        """Skips batches of the current epoch, without crossing its end.

        With a source, no batch is produced. DALI's readers produce the batches (images are
        decoded), and the results are dropped. With ``on_error="raise"``, failed batches count, as
        in ``next()``. ``auto_reset`` has no effect: after the last batch of an epoch was skipped,
        ``next()`` raises StopIteration as if the batch had been delivered.

        Args:
            batches: The number of batches to skip.

        Returns:
            ``batches``, as an int.

        Raises:
            ValueError: If the number is negative, or the epoch has fewer batches left. The iterator
                does not move, unless its pipelines can't be rebuilt. In this case, the message
                states that the iterator is at the end of the epoch.
            Exception: Any error of the pipelines' own ``external_source`` or reader.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._opened(), self._engine.interruptible():
            length, step = self._length() if count else None, self.step
            if length is not None and step + count > length:
                raise self._end_error(count, length - step)
            skipped = self._skip(count)
            if skipped < count:  # the length was unknown, or failed batches were skipped
                self._engine.roll_back()
                raise self._end_error(count, skipped, moved=self.step != step)
            self._engine.moved()  # even for 0, because other processes may skip some
            if count:
                self._engine.change(stays=False)
            return count

    def _end_error(self, count: int, remaining: int, moved: bool = False) -> ValueError:
        """Returns the error of a request to skip beyond the end of the epoch."""
        batches = f"{remaining} batch is" if remaining == 1 else f"{remaining} batches are"
        return ValueError(
            f"skip({count}): only {batches} left in epoch {self.epoch}, and an iterator "
            "does not skip into the next epoch. Use a stream, iterator_fn.stream(...), which "
            "continues across epochs" + ". The iterator is now at the end of the epoch" * moved
        )

    def seek(self, epoch: int, step: int = 0) -> None:
        """Moves an iterator over a source to a batch, in constant time.

        Args:
            epoch: The epoch, from 0.
            step: Index of the batch in the epoch, from 0. Epochs and steps are counted from the
                start of the data, in batches of the current size.

        Raises:
            ValueError: If there is no such batch, or the iterator is over a DALI reader, which can
                only move to a saved state.
        """
        expected = "a whole number, 0 or more"
        epoch = whole_number("epoch", without_fraction(epoch), expected, 0)
        step = whole_number("step", without_fraction(step), expected, 0)
        with self._opened(), self._engine.interruptible():
            self._engine.seek(epoch, step)
            self._engine.note_jump()

    def seek_step(self, step: int, first_epoch: int = 0) -> None:
        """Moves an iterator over a source to a global step, in constant time.

        ``next()`` then returns the batch that a new iterator returns after ``step`` batches, over
        as many epochs as necessary. Use it to resume a training loop that saves only the step.

        Args:
            step: Number of batches from the start of ``first_epoch`` to the new position, in
                batches of the current size.
            first_epoch: The epoch of step 0.

        Raises:
            ValueError: If the step is negative; with ``on_error="skip"``, for any step but 0,
                because the number of skipped batches is unknown; or over a DALI reader. A reader
                needs a stream: `BatchStream.seek_step` runs through its batches.
        """
        self._seek_step(step_number(step), first_epoch)

    def epochs(self, num_epochs: int | None = None) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Iterates over the epochs of a training loop, from the position to the last epoch.

            for epoch, batches in iterator.epochs(90):
                for batch in batches:
                    state = step(state, batch)
                evaluate(state, epoch)

        The loop is correct after `set_state` and `seek_step`, with and without ``auto_reset``: the
        first pass has the remaining batches of the epoch; at the end of an epoch, it is the next
        epoch. After the last epoch, the loop ends. If you leave the inner loop early, the remaining
        batches are skipped (a reader produces them). If you leave both loops, a new call continues
        in the same epoch.

        Args:
            num_epochs: Number of epochs of the whole training, including epochs before the
                position; None: no end.

        Returns:
            An iterator of pairs: the number of the epoch, from 0, and an iterator over its
            remaining batches.

        Raises:
            ValueError: If num_epochs is less than 1.
        """
        if num_epochs is not None:
            expected = "a whole number of epochs, 1 or more, or None for no end"
            num_epochs = whole_number("num_epochs", num_epochs, expected, 1)
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int | None) -> Iterator[tuple[int, Iterator[Batch]]]:
        while self._begin_epoch(num_epochs):
            epoch = self.epoch
            yield epoch, _EpochBatches(self, epoch)
            with self._opened():
                if self.epoch == epoch:
                    while self._skip_in_epoch(_MOST_TO_SKIP):
                        pass

    def _begin_epoch(self, num_epochs: int | None) -> bool:
        """Starts the next epoch at the end of an epoch; returns False after the last epoch."""
        with self._opened(), self._engine.interruptible():
            engine = self._engine
            has_begun = self.step > 0 or engine.cursor.stopped
            engine.checkpoint()
            # Peeks, because failed batches may be skipped before the end.
            if has_begun and engine.peek().ended:
                if num_epochs is not None and engine.following_epoch() >= num_epochs:
                    return False
                engine.advance()
                self._next_epoch()
                self._engine.change(stays=False)
            return num_epochs is None or self.epoch < num_epochs

    def checkpoints(self) -> list[bytes]:
        """Returns the state as one bytes object for each pipeline, for ``checkpoints=``.

        Raises:
            ValueError: If the state of the pipelines can't be saved.
        """
        with self._opened():
            self._engine.roll_back()
            return self._engine.checkpoints()

    def _restore_checkpoints(self, pieces: Sequence[bytes]) -> None:
        """Moves to the position of `checkpoints`, or of checkpoints of DALI's plugin."""
        if isinstance(pieces, (bytes, bytearray, str, Mapping)):
            raise TypeError(
                "checkpoints must be a list of bytes, one for each pipeline, as returned by "
                f"checkpoints() of an iterator, not {str(pieces)[:40]!r}. Pass a state to "
                "set_state()"
            )
        self._engine.set_checkpoints(pieces, self._config.allow_changes)
        self._engine.note_jump()


class _EpochBatches(Iterator[Batch]):
    """Iterates over the remaining batches of an epoch; ends if the iterator is in another epoch.

    This is a class, because an error would end a generator, although a batch may follow.

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
