"""A stream of batches over several epochs, for ecosystems whose iterators have none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ..config import whole_number
from ..errors import EpochError
from ..pipeline.bad_record import MOST_SKIPPED
from ..pipeline.batch import Batch
from ..pipeline.engine import COUNT, Mark
from ..state.position import FailedBatch
from ..stats import InputStats
from .iterator import DALIGenericIterator


class StreamMark(NamedTuple):
    """A position of a stream.

    Attributes:
        position: The position of the iterator.
        first_epoch: The epoch that the stream begins with.
        number: The pass over the data set, if the stream has several.
    """

    position: Mark
    first_epoch: int
    number: int = 0


class BatchStream:
    """The batches of some epochs, one epoch after the other, and then the end.

    Args:
        make: Makes a fresh iterator without auto_reset, with an epoch's end that is known (a
            reader, or size); it may be lazy. It belongs to the stream.
        num_epochs: Number of epochs; None for no end.

    Raises:
        ValueError: If num_epochs is less than 1.
    """

    def __init__(self, make: Callable[[], DALIGenericIterator], num_epochs: int | None):
        if num_epochs is not None:
            what = "at least 1, a whole number, or None for no end"
            if isinstance(num_epochs, str):  # an argument of the graph function
                what += " (the graph function's arguments come after it, or by keyword)"
            num_epochs = whole_number("num_epochs", num_epochs, what, 1)
        self._make = make
        self._iterator = make()
        self._num_epochs = num_epochs
        self._first_epoch = 0
        self._before_peek: dict[str, Any] | None = None  # the state, if peek() left its epoch

    def _begin_with(self, epoch: int) -> None:
        """Makes an epoch of a source the first one, and moves to its start."""
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
        """The batches that were skipped, or that have masked records, in this process."""
        return self._iterator.errors

    @property
    def closed(self) -> bool:
        """Whether the stream was closed."""
        return self._iterator.closed

    def __reduce__(self) -> Any:
        return self._iterator.__reduce__()  # which says what to pickle instead

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: After the last epoch, on each call.
            EpochError: If ``on_error="skip"`` left out every batch of the last epoch, or of so many
                epochs of a stream without an end that none may follow.
            ValueError: If the stream has no end and its epochs have no batch.
            Exception: What `DALIGenericIterator.__next__` raises.
        """
        with self._iterator._opened():
            self._before_peek = None
            return self._in_some_epoch(lambda: next(self._iterator))

    def peek(self) -> Batch:
        """The batch that ``next()`` will deliver, which stays the next one.

        States stay those of the batch that ``next()`` delivered last, even if this one is in
        another epoch.

        Raises:
            StopIteration: After the last epoch.
            Exception: What ``next()`` would raise.
        """
        return self._in_some_epoch(lambda: self._iterator.peek(), self._note_position)

    def _note_position(self) -> None:
        """Notes the state before `peek` moves the iterator to another epoch."""
        if self._before_peek is None:
            with contextlib.suppress(ValueError):  # pipelines without states
                self._before_peek = self._iterator.get_state()

    def skip(self, batches: int) -> int:
        """Skips batches, from epoch to epoch; see `DALIGenericIterator.skip` for the cost.

        Returns:
            The number of batches.

        Raises:
            ValueError: If the number is less than 0, or the stream has fewer batches; it does not
                move then.
            EpochError: As ``next()``.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self._iterator._opened(), self._moving():
            left = self._left() if count else None
            if left is None or count <= left:
                left = self._skip_at_most(count)
            if left < count:
                raise ValueError(
                    f"skip({count}): only {left} batches are left in the {self._num_epochs} epochs "
                    "of the stream. Leave num_epochs out for a stream without an end"
                )
        return count

    def seek_step(self, step: int) -> None:
        """Moves to a global step: ``next()`` delivers what a new stream has after so many batches.

        It resumes training loops that save only their step::

            stream = train.stream(source=source, batch_size=256)
            stream.seek_step(start)
            for step, batch in zip(range(start, num_steps), stream):
                ...

        Over a source it takes constant time. DALI's readers read in order: every batch before the
        step is produced (images are decoded) and dropped, from the beginning of the stream if the
        step is behind the position. `set_state` takes no such time.

        Args:
            step: The number of batches before it, from 0: delivered ones, and with
                ``on_error="raise"`` also failed ones. They have the present batch size and begin
                with epoch 0.

        Raises:
            ValueError: If the number is less than 0, or more than the batches of the stream; over a
                source with ``on_error="skip"``, since the number of batches that were skipped is
                not known. The stream does not move then.
            RuntimeError: If every batch of an epoch fails, and the stream has no end.
        """
        step = whole_number("step", step, "a whole number of batches, 0 or more", 0)
        with self._iterator._opened(), self._moving():
            total = self._total()
            if total is not None and step > total:
                raise self._beyond(step, total)
            if not self._iterator._seeks:
                self._run_to(step)
            elif step == total:  # the end of the last epoch, not the start of another one
                self._iterator.seek_step(step - 1, self._first_epoch)
                self._iterator.skip(1)
            else:
                self._iterator.seek_step(step, self._first_epoch)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Returns to the position if the block fails; else the position is the iterator's."""
        before, self._before_peek = self._before_peek, None
        try:
            with self._iterator._returning():
                yield
        except BaseException:
            self._before_peek = before
            raise

    def _beyond(self, step: int, total: int) -> ValueError:
        return ValueError(
            f"seek_step({step}): with num_epochs={self._num_epochs} the stream has only {total} "
            "batches. Leave num_epochs out for a stream without an end"
        )

    def _total(self) -> int | None:
        """The stream's number of batches; None if it has no end, or only its source knows it."""
        try:
            return len(self)
        except TypeError:
            return None

    def _run_to(self, step: int) -> None:
        """Runs the pipelines of a reader up to a global step."""
        at = self._delivered()
        if at is None or at > step:
            self._iterator._restart()
            at = 0
        if (moved := self._skip_at_most(step - at)) < step - at:
            raise self._beyond(step, at + moved)

    def _left(self) -> int | None:
        """The number of batches of a finite stream over a reader that are left, if known."""
        if self._iterator._seeks:  # skipping costs nothing
            return None
        total, delivered = self._total(), self._delivered()
        return None if total is None or delivered is None else total - delivered

    def _delivered(self) -> int | None:
        """The number of batches before the position; None if it is not known."""
        iterator = self._iterator
        if iterator.epoch == iterator.step == 0:
            return 0
        if iterator._left_out:
            return None
        try:
            return iterator.total(iterator.epoch) + iterator.step
        except TypeError:  # only the source knows where its epochs end
            return None

    def _skip_at_most(self, batches: int) -> int:
        """Skips batches, at most up to the end; returns the number of batches."""
        count, done = whole_number("skip()'s argument", batches, COUNT, 0), 0
        with self._iterator._opened():
            if count:
                self._before_peek = None
            errors = self._iterator.num_errors
            while done < count:
                moved = self._iterator._skip_at_most(count - done)
                done += moved
                if moved:
                    errors = self._iterator.num_errors
                elif not self._go_on(errors, None):
                    break
        return done

    def _in_some_epoch(
        self, call: Callable[[], Batch], before_move: Callable[[], None] = lambda: None
    ) -> Batch:
        """Returns the batch that a call gives in this epoch, or in the next one that has a batch.

        Other threads see no state between the two epochs.

        Args:
            call: The call.
            before_move: Called before the iterator moves to another epoch.
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
                self._go_on(errors, failed)

    def _has_next_epoch(self) -> bool:
        """Returns whether the stream goes on after this epoch.

        Raises:
            ValueError: If the stream has no end and its epochs have no batch.
        """
        iterator = self._iterator
        if self._num_epochs is not None:
            return iterator._following_epoch < self._first_epoch + self._num_epochs
        if iterator._plan is not None and len(iterator) == 0:
            raise ValueError(
                f"no epoch has a batch: batch_size {iterator.batch_size} is more than the "
                f"{iterator.size} samples of an epoch, and the rest is dropped. Use a "
                "smaller batch, or keep the rest"
            )
        return True

    def _go_on(self, errors: int, failed: EpochError | None) -> bool:
        """Starts the next epoch; returns whether there is one.

        Args:
            errors: The number of errors after the last batch that was delivered.
            failed: The error of the epoch that ends, if all of its batches were left out.

        Raises:
            EpochError: If an infinite stream left out so many batches that none may follow.
            ValueError: See `_has_next_epoch`.
        """
        if not self._has_next_epoch():
            return False
        try:
            next(self._iterator)  # peek() does not move behind what was left out before the end
        except StopIteration:
            pass
        except EpochError as error:
            failed = error
        # An epoch of few batches may fail as a whole, and the next one, in another order, not.
        many = self._iterator.num_errors - errors >= MOST_SKIPPED
        if failed is not None and self._num_epochs is None and many:
            raise failed
        self._iterator.reset()
        return True

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # type checkers report names that do not exist
        __getattr__ = DALIGenericIterator.__getattr__

    def __len__(self) -> int:
        """Number of batches of the whole stream, from its start.

        Raises:
            TypeError: If it has no end.
        """
        if self._num_epochs is None:
            raise TypeError("the stream has no end: it has no length. Pass num_epochs")
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
        """The position and everything that belongs to it, for `_go_back`."""
        return StreamMark(self._iterator._mark(), self._first_epoch)

    def _go_back(self, mark: StreamMark) -> bool:
        """Returns to a mark; False if the pipelines can't be built to stand there."""
        self._first_epoch, self._before_peek = mark.first_epoch, None
        return self._iterator._go_back(mark.position)

    def reset(self) -> None:
        """Returns to the start of the first epoch, with a new iterator."""
        before = self._iterator
        with before._opened():
            fresh = self._make()  # which builds nothing yet: an interrupted call keeps the old one
            fresh._stats = before._stats
            fresh._engine.keep_seed(before._engine)
            if self._first_epoch:
                fresh._begin_with(self._first_epoch)
            self._iterator, self._before_peek = fresh, None
            before.close()

    @property
    def _core(self) -> DALIGenericIterator:
        """The iterator, which `dalijax.profile` measures."""
        return self._iterator

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; see `DALIGenericIterator.watch`."""
        return self._iterator.watch()

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs; waits for none."""
        self._iterator.start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        self._iterator.close()
