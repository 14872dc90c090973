"""`BatchStream`: a stream of batches over several epochs, for loops that count steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ..arguments import step_number, whole_number
from ..errors import EpochError
from ..pipeline.batch import Batch
from ..pipeline.engine import COUNT, Cursor
from ..pipeline.failure_errors import MOST_SKIPPED
from ..state.position import FailedBatch
from ..stats import InputStats
from .iterator import DALIGenericIterator


class StreamMark(NamedTuple):
    """A position of a stream, for `BatchStream._go_back`.

    Attributes:
        position: The position of the stream's iterator.
        first_epoch: The first epoch of the stream.
        number: The number of the pass over the data set, from 0, for adapters with several passes.
    """

    position: Cursor[Any]
    first_epoch: int
    number: int = 0


class BatchStream:
    """Iterates over the batches of successive epochs, without an end between them.

    Args:
        make: A function that creates an iterator without auto_reset, which may be lazy. The stream
            owns and closes the iterator.
        num_epochs: Number of epochs; None: no end.

    Raises:
        ValueError: If num_epochs is less than 1.
    """

    def __init__(self, make: Callable[[], DALIGenericIterator], num_epochs: int | None):
        if num_epochs is not None:
            expected = "at least 1, a whole number, or None for no end"
            if isinstance(num_epochs, str):  # an argument of the graph function
                expected += " (pass arguments of the graph function after it, or by keyword)"
            num_epochs = whole_number("num_epochs", num_epochs, expected, 1)
        self._make = make
        self._iterator = make()
        self._num_epochs = num_epochs
        self._first_epoch = 0
        self._before_peek: dict[str, Any] | None = None  # the state before peek() changed the epoch

    def _begin_with(self, epoch: int) -> None:
        """Makes an epoch of a source the first epoch of the stream, and moves to its start."""
        self._iterator._begin_with(epoch)
        self._first_epoch = epoch

    def __repr__(self) -> str:
        epochs = "no end" if self._num_epochs is None else f"{self._num_epochs} epochs"
        return f"<{type(self).__name__} of {epochs} over {self._iterator!r}>"

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """Number of the consumer's epoch, from 0."""
        return self._iterator.epoch

    @property
    def step(self) -> int:
        """Number of batches of the epoch that were delivered or failed."""
        return self._iterator.step

    @property
    def errors(self) -> tuple[FailedBatch, ...]:
        """The batches of this process that were skipped, or have masked records."""
        return self._iterator.errors

    @property
    def closed(self) -> bool:
        """Whether the stream was closed."""
        return self._iterator.closed

    def __reduce__(self) -> Any:
        return self._iterator.__reduce__()  # raises an error that tells what to pickle instead

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch.

        Raises:
            StopIteration: After the last epoch, at each call.
            EpochError: If ``on_error="skip"`` skipped every batch of the last epoch, or of many
                successive epochs of an endless stream.
            ValueError: If the stream has no end and its epochs have no batch.
            Exception: Any error of `DALIGenericIterator.__next__`.
        """
        with self._iterator._opened():
            self._before_peek = None
            return self._in_some_epoch(lambda: next(self._iterator))

    def peek(self) -> Batch:
        """Returns the batch that the following ``next()`` will return.

        States describe the last batch that ``next()`` returned, even if the peeked batch
        belongs to another epoch.

        Raises:
            StopIteration: After the last epoch.
            Exception: The error that ``next()`` would raise.
        """
        return self._in_some_epoch(lambda: self._iterator.peek(), self._note_position)

    def _note_position(self) -> None:
        """Saves the state before `peek` moves the iterator to another epoch."""
        if self._before_peek is None:
            with contextlib.suppress(ValueError):  # pipelines without states
                self._before_peek = self._iterator.get_state()

    def skip(self, batches: int) -> int:
        """Skips batches across epochs; see `DALIGenericIterator.skip` for the cost.

        Returns:
            ``batches``, as an int.

        Raises:
            ValueError: If ``batches`` is negative, or the stream has fewer batches left. The stream
                does not move then.
            EpochError: As in ``next()``.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._iterator._opened(), self._moving():
            remaining = self._remaining() if count else None
            if remaining is None or count <= remaining:
                remaining = self._skip_at_most(count)
            if remaining < count:
                raise ValueError(
                    f"skip({count}): only {remaining} batches are left in the {self._num_epochs} "
                    "epochs of the stream. Omit num_epochs for an endless stream"
                )
            self._iterator._engine.moved()  # even for 0, because other processes may skip some
        return count

    def seek_step(self, step: int) -> None:
        """Moves to a global step, so that ``next()`` returns batch ``step`` of a new stream.

        Use it to resume a training loop that saves only the step::

            stream = train.stream(source=source, batch_size=256)
            stream.seek_step(start)
            for step, batch in zip(range(start, num_steps), stream):
                ...

        Over a source, the move takes constant time. DALI's readers read sequentially: all batches
        before the step are produced (images are decoded) and dropped, from the beginning of the
        stream if the step is before the position. `set_state` avoids this.

        Args:
            step: Number of batches from the start of the stream to the new position, in batches of
                the current size. Counts delivered batches, and with ``on_error="raise"`` also
                failed batches.

        Raises:
            ValueError: If the step is negative or exceeds the stream. Also over a source with
                ``on_error="skip"``, because the number of skipped batches is unknown. The stream
                does not move then.
            EpochError: If the stream is endless, and ``on_error="skip"`` skipped every batch of
                many successive epochs.
        """
        step = step_number(step)
        with self._iterator._opened(), self._moving():
            total = self._total()
            if total is not None and step > total:
                raise self._end_error(step, total)
            if not self._iterator._seeks:
                self._run_to(step)
                self._iterator._engine.moved()
            elif step == total:  # the end of the last epoch, instead of the start of another epoch
                self._iterator.seek_step(step - 1, self._first_epoch)
                self._iterator.skip(1)
            else:
                self._iterator.seek_step(step, self._first_epoch)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Returns a context manager that restores the position if its block raises."""
        before, self._before_peek = self._before_peek, None
        try:
            with self._iterator._returning():
                yield
        except BaseException:
            self._before_peek = before
            raise

    def _end_error(self, step: int, total: int) -> ValueError:
        return ValueError(
            f"seek_step({step}): with num_epochs={self._num_epochs} the stream has only {total} "
            "batches. Omit num_epochs for an endless stream"
        )

    def _total(self) -> int | None:
        """Returns the number of batches of the stream; None if it is endless or unknown."""
        try:
            return len(self)
        except TypeError:
            return None

    def _run_to(self, step: int) -> None:
        """Moves to a global step, by running the pipelines of a reader up to it."""
        at = self._delivered()
        if at is None or at > step:
            self._iterator._restart()
            at = 0
        if (moved := self._skip_at_most(step - at)) < step - at:
            raise self._end_error(step, at + moved)

    def _remaining(self) -> int | None:
        """Returns the number of remaining batches of a stream over a reader; None if unknown."""
        if self._iterator._seeks:  # skipping is free, so that no check is needed in advance
            return None
        total, delivered = self._total(), self._delivered()
        return None if total is None or delivered is None else total - delivered

    def _delivered(self) -> int | None:
        """Returns the number of batches of the stream before the position; None if unknown."""
        iterator = self._iterator
        if iterator.epoch == iterator.step == 0:
            return 0
        if iterator._left_out:
            return None
        try:
            return iterator.total(iterator.epoch) + iterator.step
        except TypeError:  # the lengths of epochs are unknown
            return None

    def _skip_at_most(self, batches: int) -> int:
        """Skips batches up to the end of the stream; returns the number of skipped batches."""
        count, skipped = whole_number("skip()'s argument", batches, COUNT, 0), 0
        with self._iterator._opened():
            if count:
                self._before_peek = None
            errors = self._iterator.num_errors
            while skipped < count:
                moved = self._iterator._skip_at_most(count - skipped)
                skipped += moved
                if moved:
                    errors = self._iterator.num_errors
                elif not self._start_next_epoch(errors, None):
                    break
        return skipped

    def _in_some_epoch(
        self, call: Callable[[], Batch], before_move: Callable[[], None] = lambda: None
    ) -> Batch:
        """Returns a function's batch of this epoch, or of the next epoch that has a batch.

        Other threads see no state between the two epochs.

        Args:
            call: A function that returns a batch of the iterator's current epoch, or raises
                StopIteration at its end.
            before_move: A function that is called before the iterator moves to another epoch.
        """
        with self._iterator._opened():
            errors = self._iterator.num_errors
            while True:
                failed: EpochError | None = None
                try:
                    return call()
                except StopIteration:
                    if not self._has_next_epoch():
                        raise
                except EpochError as error:
                    failed = error
                    if not self._has_next_epoch():
                        raise
                before_move()
                self._start_next_epoch(errors, failed)

    def _has_next_epoch(self) -> bool:
        """Returns whether the stream has an epoch after this one.

        Raises:
            ValueError: If the stream is endless and its epochs have no batch.
        """
        iterator = self._iterator
        if self._num_epochs is not None:
            return iterator._following_epoch < self._first_epoch + self._num_epochs
        if iterator._plan is not None and len(iterator) == 0:
            raise ValueError(
                f"no epoch has a batch: batch_size {iterator.batch_size} is more than the "
                f"{iterator.size} samples of an epoch, and incomplete batches are dropped. Use a "
                "smaller batch_size, or a last_batch_policy that keeps incomplete batches"
            )
        return True

    def _start_next_epoch(self, errors: int, failed: EpochError | None) -> bool:
        """Starts the next epoch, if the stream has a next epoch; returns whether it has.

        Args:
            errors: The iterator's ``num_errors`` after the last batch that did not fail. The
                difference from the present ``num_errors`` counts the failures in a row.
            failed: The error of the ending epoch, if all of its batches were skipped.

        Raises:
            EpochError: If an endless stream skipped every batch of many successive epochs.
            ValueError: See `_has_next_epoch`.
        """
        if not self._has_next_epoch():
            return False
        try:
            self._iterator._pass_end()
        except EpochError as error:
            failed = error
        # A short epoch may fail as a whole while the next one, in another order, does not.
        many = self._iterator.num_errors - errors >= MOST_SKIPPED
        if failed is not None and self._num_epochs is None and many:
            raise failed
        self._iterator._enter_next_epoch()
        return True

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # type checkers report names that do not exist
        __getattr__ = DALIGenericIterator.__getattr__

    def __len__(self) -> int:
        """Returns the number of batches of the whole stream, from its start.

        Raises:
            TypeError: If the stream is endless, or the end of an epoch is unknown.
        """
        if self._num_epochs is None:
            raise TypeError("the stream is endless, so it has no length. Pass num_epochs")
        return self._iterator.total(self._num_epochs)

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array; see `DALIGenericIterator.element_spec`."""
        return self._iterator.element_spec

    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position; see `DALIGenericIterator.get_state`."""
        with self._iterator._opened():
            before = self._before_peek
            return self._iterator.get_state() if before is None else copy.deepcopy(before)

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Restores a state; see `DALIGenericIterator.set_state`."""
        with self._iterator._opened():
            self._iterator.set_state(state, allow)
            self._before_peek = None

    def _mark(self) -> StreamMark:
        """Returns the position of the iterator and the first epoch, for `_go_back`."""
        return StreamMark(self._iterator._mark(), self._first_epoch)

    def _go_back(self, mark: StreamMark) -> bool:
        """Moves back to a mark; returns False if the pipelines can't be rebuilt there."""
        self._first_epoch, self._before_peek = mark.first_epoch, None
        return self._iterator._go_back(mark.position)

    def reset(self) -> None:
        """Moves to the start of the first epoch, by creating a new iterator."""
        before = self._iterator
        with before._opened():
            fresh = self._make()  # lazy: if the call is interrupted, the old iterator stays
            fresh._stats = before._stats
            fresh._engine.adopt_seed(before._engine)
            if self._first_epoch:
                fresh._begin_with(self._first_epoch)
            fresh._engine.continue_from(before._engine)
            self._iterator, self._before_peek = fresh, None
            before.close()

    @property
    def _core(self) -> DALIGenericIterator:
        """The iterator of the stream, which `dalijax.profile` measures."""
        return self._iterator

    def watch(self) -> InputStats:
        """Returns the counters of delivered batches; see `DALIGenericIterator.watch`."""
        return self._iterator.watch()

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs, without waiting for the batches."""
        self._iterator.start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        self._iterator.close()
