"""`BatchStream`: a stream of batches over several epochs, for loops that count steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..arguments import step_number, whole_number
from ..errors import EpochError
from ..pipeline.batch import Batch
from ..pipeline.engine import COUNT, Cursor, EpochEngine
from ..pipeline.failure_errors import MOST_SKIPPED
from .iterator import BatchIterator


class StreamMark(NamedTuple):
    """A position of a stream, for `BatchStream._go_back`.

    Attributes:
        cursor: The cursor of the stream's engine.
        first_epoch: The first epoch of the stream.
        number: The number of the pass over the data set, from 0, for adapters with several passes.
    """

    cursor: Cursor[Any]
    first_epoch: int
    number: int = 0


class BatchStream(BatchIterator):
    """Iterates over the batches of successive epochs, without an end between them.

    Args:
        make: A function that creates an engine at the start of the data, without building
            pipelines.
        num_epochs: Number of epochs; None: no end.

    Raises:
        ValueError: If num_epochs is less than 1.
    """

    def __init__(self, make: Callable[[], EpochEngine[Any]], num_epochs: int | None):
        if num_epochs is not None:
            expected = "at least 1, a whole number, or None for no end"
            if isinstance(num_epochs, str):  # an argument of the graph function
                expected += " (pass arguments of the graph function after it, or by keyword)"
            num_epochs = whole_number("num_epochs", num_epochs, expected, 1)
        super().__init__(make())
        self._make = make
        self._num_epochs = num_epochs
        self._first_epoch = 0
        self._before_peek: dict[str, Any] | None = None  # the state before peek() changed the epoch

    def _begin_with(self, epoch: int) -> None:
        """Makes an epoch of a source the first epoch of the stream, and moves to its start."""
        with self._opened(), self._engine.interruptible():
            self._engine.begin_with(epoch)
        self._first_epoch = epoch

    def __repr__(self) -> str:
        epochs = "no end" if self._num_epochs is None else f"{self._num_epochs} epochs"
        return f"<{type(self).__name__} of {epochs} over {self._description()}>"

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
        with self._opened():
            self._before_peek = None
            return self._in_some_epoch(self._next_of_epoch)

    def _next_of_epoch(self) -> Batch:
        with self._opened(), self._engine.interruptible():
            return self._engine.deliver(self._stats).unwrap()

    def peek(self) -> Batch:
        """Returns the batch that the following ``next()`` will return.

        States describe the last batch that ``next()`` returned, even if the peeked batch
        belongs to another epoch.

        Raises:
            StopIteration: After the last epoch.
            Exception: The error that ``next()`` would raise.
        """
        return self._in_some_epoch(super().peek, self._note_position)

    def _note_position(self) -> None:
        """Saves the state before `peek` moves the stream to another epoch."""
        if self._before_peek is None:
            with contextlib.suppress(ValueError):  # pipelines without states
                self._before_peek = super().get_state()

    def skip(self, batches: int) -> int:
        """Skips batches across epochs; see `DALIGenericIterator.skip` for the cost.

        Returns:
            ``batches``, as an int.

        Raises:
            ValueError: If ``batches`` is negative, or the stream has fewer batches left. The stream
                does not move.
            EpochError: As in ``next()``.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._opened(), self._moving():
            remaining = self._remaining() if count else None
            if remaining is None or count <= remaining:
                remaining = self._skip_at_most(count)
            if remaining < count:
                raise ValueError(
                    f"skip({count}): only {remaining} batches are left in the {self._num_epochs} "
                    "epochs of the stream. Omit num_epochs for an endless stream"
                )
            self._engine.moved()  # even for 0, because other processes may skip some
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
            ValueError: If the step is negative or exceeds the stream; over a source with
                ``on_error="skip"``, for any step but 0, because the number of skipped batches is
                unknown. The stream does not move, unless its pipelines have no states.
            EpochError: If the stream is endless, and ``on_error="skip"`` skipped every batch of
                many successive epochs.
        """
        step = step_number(step)
        with self._opened(), self._moving():
            total = self._total()
            if total is not None and step > total:
                raise self._end_error(step, total)
            if not self._seeks():
                self._run_to(step)
                self._engine.moved()
            elif step == total:  # the end of the last epoch, instead of the start of another epoch
                self._seek_step(step - 1, self._first_epoch)
                self._skip_in_epoch(1)
            else:
                self._seek_step(step, self._first_epoch)

    def _seeks(self) -> bool:
        """Returns whether the stream moves without running batches: over a source."""
        return self._engine.locate(0) is not None

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Returns a context manager that tries to restore the position if its block raises."""
        self._engine.roll_back()
        self._engine.checkpoint()
        cursor, before = self._engine.cursor, self._before_peek
        try:
            self._before_peek = None
            yield
        except BaseException:
            self._before_peek = before
            self._engine.go_back(cursor)
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
            with self._engine.interruptible():
                self._engine.restart()
                self._engine.moved()
            at = 0
        if (moved := self._skip_at_most(step - at)) < step - at:
            raise self._end_error(step, at + moved)

    def _remaining(self) -> int | None:
        """Returns the number of remaining batches of a stream over a reader; None if unknown."""
        if self._seeks():  # skipping is free, so no check is needed in advance
            return None
        total, delivered = self._total(), self._delivered()
        return None if total is None or delivered is None else total - delivered

    def _delivered(self) -> int | None:
        """Returns the number of batches of the stream before the position; None if unknown."""
        if self.epoch == self.step == 0:
            return 0
        if self._left_out:
            return None
        try:
            return self._num_batches(self.epoch) + self.step
        except TypeError:  # the lengths of epochs are unknown
            return None

    @property
    def _left_out(self) -> int:
        """Number of batches before the position that ``on_error="skip"`` skipped."""
        return self._engine.num_failed if self._config.on_error == "skip" else 0

    def _skip_at_most(self, count: int) -> int:
        """Skips batches up to the end of the stream; returns the number of skipped batches."""
        skipped = 0
        with self._opened():
            if count:
                self._before_peek = None
            errors = self._engine.errors.total
            while skipped < count:
                moved = self._skip_in_epoch(count - skipped)
                skipped += moved
                if moved:
                    errors = self._engine.errors.total
                elif not self._start_next_epoch(errors, None):
                    break
        return skipped

    def _in_some_epoch(
        self, call: Callable[[], Batch], before_move: Callable[[], None] = lambda: None
    ) -> Batch:
        """Returns a function's batch of this epoch, or of the next epoch that has a batch.

        Other threads see no state between the two epochs.

        Args:
            call: A function that returns a batch of the current epoch, or raises
                StopIteration at its end.
            before_move: A function that is called before the stream moves to another epoch.
        """
        with self._opened():
            errors = self._engine.errors.total
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
        """Returns whether the stream has a further epoch.

        Raises:
            ValueError: If the stream is endless and its epochs have no batch.
        """
        self._engine.prepare()
        if self._num_epochs is not None:
            return self._engine.following_epoch() < self._first_epoch + self._num_epochs
        plan = self._engine.plan
        if plan is not None and self._engine.length() == 0:
            size = self._config.size if self._config.size > 0 else plan.size(self.epoch)
            raise ValueError(
                f"no epoch has a batch: batch_size {self._engine.batch_size} is more than the "
                f"{size} samples of an epoch, and incomplete batches are dropped. Use a "
                "smaller batch_size, or a last_batch_policy that keeps incomplete batches"
            )
        return True

    def _start_next_epoch(self, errors: int, failed: EpochError | None) -> bool:
        """Starts the next epoch, if the stream has a next epoch; returns whether it has.

        Args:
            errors: The total number of errors after the last batch that did not fail. The
                difference from the present total counts the failures in a row.
            failed: The error of the ending epoch, if all of its batches were skipped.

        Raises:
            EpochError: If an endless stream skipped every batch of many successive epochs.
            ValueError: See `_has_next_epoch`.
        """
        if not self._has_next_epoch():
            return False
        try:
            self._pass_end()
        except EpochError as error:
            failed = error
        # A short epoch may fail as a whole, although the next epoch, in another order, does not.
        many = self._engine.errors.total - errors >= MOST_SKIPPED
        if failed is not None and self._num_epochs is None and many:
            raise failed
        self._enter_next_epoch()
        return True

    def _pass_end(self) -> None:
        """Moves past the end of an epoch, and past batches that are skipped before the end.

        Raises:
            EpochError: If all batches of the epoch were skipped.
        """
        with self._engine.interruptible():
            outcome = self._engine.peek()
            self._engine.advance()
            if outcome.error is not None:
                outcome.unwrap()

    def _enter_next_epoch(self) -> None:
        """Starts the next epoch. All processes do so, and do not compare their positions again."""
        with self._engine.interruptible():
            self._next_epoch()

    def __len__(self) -> int:
        """Returns the number of batches of the whole stream, from its start.

        Raises:
            TypeError: If the stream is endless, or the end of an epoch is unknown.
        """
        if self._num_epochs is None:
            raise TypeError("the stream is endless, so it has no length. Pass num_epochs")
        return self._num_batches(self._num_epochs)

    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position; see `DALIGenericIterator.get_state`."""
        with self._opened():
            before = self._before_peek
            return super().get_state() if before is None else copy.deepcopy(before)

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Restores a state; see `DALIGenericIterator.set_state`."""
        with self._opened():
            super().set_state(state, allow)
            self._before_peek = None

    def _start(self) -> None:
        """Builds the pipelines, so that the first state contains the fingerprint of their data."""
        with self._opened():
            self._engine.roll_back()
            self._engine.start()

    def _mark(self) -> StreamMark:
        """Returns the engine's cursor and the first epoch, for `_go_back`."""
        with self._opened():
            self._engine.roll_back()
            return StreamMark(self._engine.cursor, self._first_epoch)

    def _go_back(self, mark: StreamMark) -> bool:
        """Moves back to a mark of this stream, even if `reset` was called since.

        Returns:
            False if the pipelines can't be rebuilt there, so that the position did not change.
        """
        with self._opened():
            moved = self._engine.go_back(mark.cursor)
            if moved:
                self._first_epoch, self._before_peek = mark.first_epoch, None
            return moved

    def reset(self) -> None:
        """Moves to the start of the first epoch, by creating a new engine."""
        with self._opened():
            fresh = self._make()  # if this call is interrupted, the old engine stays
            fresh.adopt_seed(self._engine)
            if self._first_epoch:
                fresh.begin_with(self._first_epoch)
            self._continue_with(fresh)

    def _continue_with(self, engine: EpochEngine[Any]) -> None:
        """Replaces the engine by another engine of the same function, and closes the old engine."""
        before = self._engine
        engine.continue_from(before)
        self._engine, self._before_peek, self._spec = engine, None, None
        before.close()
