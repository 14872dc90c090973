"""`ChainedStream`: a stream of batches after take, skip, repeat and enumerate."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.arguments import step_number
from ...core.errors import BatchError, StateError
from ...core.iterator.batch_stream import BatchStream, StreamMark
from ...core.pipeline.batch import Batch
from ...core.state import differences
from ...core.state.envelope import COUNT, Form
from .steps import INFINITE, UNKNOWN, Step, element, length

FORM = Form(
    kind="chain",
    owner="an iterator over a data set with take, skip or enumerate",
    shown={
        "element": int,
        "at": int,
        "end": range(UNKNOWN, len(COUNT)),
        "first_epoch": int,
        "stream": object,
    },
    packed={"steps": [str]},
)


def stream_length(stream: BatchStream) -> int:
    """Returns the number of batches of a whole stream, INFINITE or UNKNOWN."""
    if stream._num_epochs is None:
        return INFINITE
    try:
        return len(stream)
    except TypeError:
        return UNKNOWN


class _Place(NamedTuple):
    """A position in a chain.

    Attributes:
        element: Index of the next element.
        at: Index of the stream's next batch.
        end: Length of the stream, once its end was reached.
    """

    element: int = 0
    at: int = 0
    end: int | None = None


class ChainedStream:
    """The elements of a chain of steps over a stream.

    Without steps, its states are the stream's; otherwise they contain the stream's state.

    Args:
        stream: The batches, from the start; owned by the chain.
        chain: The steps; see `dalijax.adapters.tfdata.steps`.
    """

    def __init__(self, stream: BatchStream, chain: Sequence[Step]):
        self.stream = stream
        self.chain = tuple(chain)
        # Serializes calls of several threads; reentrant, because methods call each other.
        self._lock = threading.RLock()
        self._steps = [repr(step) for step in chain]  # as states contain them
        self._place = _Place()
        # The start of a running or interrupted call: the positions of the chain and the stream.
        self._before: tuple[_Place, StreamMark] | None = None

    def next(self) -> tuple[Batch, tuple[int, ...]]:
        """Returns the next batch, and its numbers by enumerate, starting with the last step's.

        Raises:
            StopIteration: After the last element, at each call.
            ValueError: If the stream is closed.
            Exception: Any error of ``next()`` of the stream. A failed batch counts as an element;
                after other errors, the following call tries again.
        """
        if not self.chain:
            return next(self.stream), ()
        with self._lock:
            self._begin()
            try:
                result = self._next()
            except (StopIteration, BatchError):
                self._before = None
                raise
            self._before = None
            return result

    def _next(self) -> tuple[Batch, tuple[int, ...]]:
        """Returns the next batch and its numbers, and moves the position; see `next`."""
        while True:
            index, _, end = self._place
            location = element(self.chain, self._total(), index)
            if location is None:
                raise StopIteration
            at, numbers = location
            self._move_to(at)
            if self._place.at == at:
                after = _Place(index + 1, at + 1, end)
                try:
                    batch = next(self.stream)
                except StopIteration:
                    pass
                except BatchError:
                    self._place = after
                    raise
                else:
                    self._place = after
                    return batch, numbers
            # The end reveals the length if it was unknown, or if failed batches are skipped.
            if end == self._place.at:
                raise StopIteration
            self._place = self._place._replace(end=self._place.at)

    def seek_step(self, step: int) -> None:
        """Moves to an element, counted from 0; see `BatchStream.seek_step`.

        Raises:
            ValueError: If the element does not exist, or can't be mapped to a position.
        """
        if not self.chain:
            self.stream.seek_step(step)
            return
        step = step_number(step, "elements")
        with self._lock:
            self._settle()
            total = self._total()
            count = length(self.chain, total)
            if 0 <= count < step:
                raise ValueError(f"seek_step({step}): the dataset has only {count} elements")
            at = self._batch_after(step, total)
            place = self._place._replace(element=step, at=at)
            self._begin()
            try:
                self.stream.seek_step(at)
            except Exception:  # the stream has not moved
                self._before = None
                raise
            self._place, self._before = place, None

    def _total(self) -> int:
        """Returns the number of batches of the stream, INFINITE or UNKNOWN."""
        return stream_length(self.stream) if self._place.end is None else self._place.end

    def _move_to(self, at: int) -> None:
        """Moves the stream to a batch, or to the end if there is no such batch.

        The stream is restarted to move backwards.
        """
        if at < self._place.at:
            self.stream.reset()
            self._place = self._place._replace(at=0)
        skipped = self._drop(at - self._place.at)
        self._place = self._place._replace(at=self._place.at + skipped)

    def _batch_after(self, index: int, total: int) -> int:
        """Returns the index of the stream's next batch after a number of elements."""
        last = element(self.chain, total, index - 1) if index else None
        return last[0] + 1 if last else 0

    def _drop(self, count: int) -> int:
        """Drops up to ``count`` batches of the stream, and returns how many were dropped.

        With ``on_error="skip"``, batches are taken one by one, because a source would otherwise
        count the batches that are to be skipped.
        """
        if self.stream._iterator._config.on_error != "skip":
            return self.stream._skip_at_most(count)
        for dropped in range(count):
            try:
                next(self.stream)
            except StopIteration:
                return dropped
        return count

    def _begin(self) -> None:
        """Saves the position, to return to it in the next call if this call is interrupted."""
        self._settle()
        self._before = self._place, self.stream._mark()

    def _settle(self) -> None:
        """Returns to the position before an interrupted call."""
        if self._before is None:
            return
        self._place, mark = self._before
        if not self.stream._go_back(mark):  # the pipelines have no states
            self.stream.reset()
            self._place = self._place._replace(at=0)
            self._move_to(self._batch_after(self._place.element, self._total()))
        self._before = None

    def get_state(self) -> dict[str, Any]:
        """Returns the consumer's position as a JSON value."""
        if not self.chain:
            return self.stream.get_state()
        with self._lock:
            self._settle()
            return FORM.encode(
                element=self._place.element,
                at=self._place.at,
                end=UNKNOWN if self._place.end is None else self._place.end,
                first_epoch=self.stream._first_epoch,
                stream=self.stream.get_state(),
                steps=self._steps,
            )

    def set_state(self, saved: Mapping[str, Any] | str | bytes) -> None:
        """Restores a position.

        Raises:
            StateError: If it is not a state, or a state of different data or steps; nothing
                changes.
        """
        if not self.chain:
            self.stream.set_state(saved)
            return
        state = FORM.decode(saved)
        differences.check({"steps": state["steps"]}, {"steps": self._steps})
        counts = [state[name] for name in ("element", "at", "end", "first_epoch")]
        element, at, end, first_epoch = counts
        with self._lock:
            self._settle()
            self._begin()
            try:
                self.stream.set_state(state["stream"])
            except Exception:  # the stream has not moved
                self._before = None
                raise
            if not self._fits(*counts):
                self._settle()
                raise StateError(
                    f"the state is damaged, or of another batch size: element {element} is not at "
                    f"batch {at} of {end} from epoch {first_epoch}. Create the dataset with its "
                    "original batch size (take, skip and enumerate count batches), or restore "
                    "an undamaged copy"
                )
            self.stream._first_epoch = first_epoch
            self._place, self._before = _Place(element, at, end if end >= 0 else None), None

    def _fits(self, index: int, at: int, end: int, first: int) -> bool:
        """Returns whether the stream's position is consistent with a state's counts."""
        iterator, total = self.stream._iterator, stream_length(self.stream)
        endless = self.stream._num_epochs is None
        if not 0 <= first <= iterator.epoch or not (endless or first == self.stream._first_epoch):
            return False
        if total == UNKNOWN:
            return True  # can't be checked
        num_before = iterator.total(iterator.epoch - first) + iterator.step
        # Skipped batches are before the stream's position, but not counted in `at`. Only states of
        # a reader contain their number.
        config = iterator._config
        skips_in_source = config.source is not None and config.on_error == "skip"
        missing = num_before if skips_in_source else iterator._left_out
        if not num_before - missing <= at <= num_before:
            return False
        if end != UNKNOWN and (total == INFINITE or not total - missing <= end <= total):
            return False
        return at in (total, end, self._batch_after(index, total if end == UNKNOWN else end))
