"""A stream of batches over several epochs, for ecosystems whose iterators have none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..arguments import whole_number
from ..pipeline.batch import Batch
from ..pipeline.engine import CLOSED, COUNT
from ..stats import InputStats
from .iterator import DALIGenericIterator


class BatchStream:
    """The batches of some epochs, one epoch after the other, and then the end.

    Args:
        make: Makes a fresh iterator without auto_reset, with an epoch's end that is known (a
            reader, or size); it may be lazy. It belongs to the stream.
        num_epochs: Number of epochs; None for no end.

    Attributes:
        iterator: The iterator.

    Raises:
        ValueError: If num_epochs is less than 1.
    """

    def __init__(self, make: Callable[[], DALIGenericIterator], num_epochs: int | None):
        if num_epochs is not None:
            what = "at least 1, a whole number, or None for no end"
            num_epochs = whole_number("num_epochs", num_epochs, what, 1)
        self._make = make
        self.iterator = make()
        self.num_epochs = num_epochs

    def __reduce__(self) -> Any:
        return self.iterator.__reduce__()  # which says what to pickle instead

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: After the last epoch, on each call.
            ValueError: If the stream has no end and its epochs have no batch.
            Exception: What `DALIGenericIterator.__next__` raises.
        """
        return self._in_some_epoch(lambda: next(self.iterator))

    def peek(self) -> Batch:
        """The batch that ``next()`` will deliver, which stays the next one.

        Raises:
            StopIteration: After the last epoch.
            Exception: What ``next()`` would raise.
        """
        return self._in_some_epoch(lambda: self.iterator.peek())

    def skip(self, batches: int) -> int:
        """Moves past so many batches, or to the end; see `DALIGenericIterator.skip`.

        Returns:
            The number of batches that were skipped.

        Raises:
            ValueError: If it is less than 0, or the stream has no end and no batch.
            RuntimeError: If every batch of an epoch fails, and the stream has no end.
        """
        count, done = whole_number("skip()'s argument", batches, COUNT, 0), 0
        with self.iterator.opened():
            failed = None
            while done < count:
                moved = self.iterator.skip(count - done)
                done += moved
                if moved:
                    failed = None
                elif (failed := self._behind_end(failed)) is None:
                    break
        return done

    def _in_some_epoch(self, call: Callable[[], Batch]) -> Batch:
        """The batch that a call gives in this epoch, or in the next one that has a batch.

        Other threads see no state between the two epochs.
        """
        with self.iterator.opened():
            failed = None
            while True:
                try:
                    return call()
                except StopIteration:
                    failed = self._behind_end(failed)
                    if failed is None:
                        raise

    def _behind_end(self, failed: int | None) -> int | None:
        """Starts the next epoch, unless the one that ended shows that none will have a batch.

        Args:
            failed: The number that it returned, if the epoch that ended had no batch; else None.

        Returns:
            The number of batches that failed before; None where there is no next epoch.

        Raises:
            RuntimeError: If all batches of the epoch failed, and the stream has no end.
        """
        errors = self.iterator.errors
        if self.num_epochs is None and failed not in (None, len(errors)):
            raise RuntimeError(
                f"every batch of epoch {self.iterator.epoch} failed, and on_error='skip' left all "
                f"of them out. The last one: {errors[-1].message}"
            ) from None
        return len(errors) if self._go_on() else None

    def _go_on(self) -> bool:
        """Starts the next epoch, where there is one."""
        following = self.iterator.following_epoch
        if self.num_epochs is not None and following >= self.num_epochs:
            return False
        if self.num_epochs is None and self.iterator.plan is not None and len(self.iterator) == 0:
            raise ValueError(
                f"no epoch has a batch: batch_size {self.iterator.batch_size} is more than the "
                f"{self.iterator.size} samples of an epoch, and the rest is dropped. Use a "
                "smaller batch, or keep the rest"
            )
        with contextlib.suppress(StopIteration):
            next(self.iterator)  # peek() does not move behind what was left out before the end
        self.iterator.reset()
        return True

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Number of batches of the whole stream, from its start.

        Raises:
            TypeError: If it has no end.
        """
        if self.num_epochs is None:
            raise TypeError("the stream has no end: it has no length. Pass num_epochs")
        return self.iterator.total(self.num_epochs)

    @property
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array; see `DALIGenericIterator.element_spec`."""
        return self.iterator.element_spec

    def get_state(self) -> dict[str, Any]:
        """Where the consumer stands; see `DALIGenericIterator.get_state`."""
        return self.iterator.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Goes on where a state says; see `DALIGenericIterator.set_state`."""
        self.iterator.set_state(state, allow)

    def reset(self) -> None:
        """Goes back to the start of the first epoch, by a fresh iterator."""
        if self.iterator.closed:
            raise ValueError(CLOSED)
        before = self.iterator
        before.close()
        self.iterator = self._make()
        self.iterator.stats = before.stats
        self.iterator.keep_seed(before)

    @property
    def core(self) -> DALIGenericIterator:
        """The iterator, as `dalijax.profile` wants it."""
        return self.iterator

    def watch(self) -> InputStats:
        """Counts what is delivered from now on; see `DALIGenericIterator.watch`."""
        return self.iterator.watch()

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules runs; waits for none."""
        self.iterator.start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        self.iterator.close()
