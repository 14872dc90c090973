"""A stream of batches behind take, skip, repeat and enumerate."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.config import whole_number
from ...core.errors import BatchError, StateError
from ...core.iterator.epoch_stream import BatchStream, StreamMark
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
    """Number of batches of a whole stream, INFINITE, or UNKNOWN where only its source knows."""
    if stream._num_epochs is None:
        return INFINITE
    try:
        return len(stream)
    except TypeError:
        return UNKNOWN


class _Place(NamedTuple):
    """A position in a chain.

    Attributes:
        element: Number of the next element.
        at: Number of the stream's next batch.
        end: Length of the stream, once its end was seen.
    """

    element: int = 0
    at: int = 0
    end: int | None = None


class ChainedStream:
    """The elements of a chain over a stream.

    Without steps, its states are the stream's; else they contain the stream's.

    Args:
        stream: The batches, from the start; it belongs to the chain.
        chain: The steps applied to it; see `dalijax.adapters.tfdata.steps`.
    """

    def __init__(self, stream: BatchStream, chain: Sequence[Step]):
        self.stream = stream
        self.chain = tuple(chain)
        self._lock = threading.RLock()
        self._steps = [repr(step) for step in chain]  # as states have them
        self._place = _Place()
        # The start of a call that has not ended: the chain's position, and the stream's.
        self._before: tuple[_Place, StreamMark] | None = None

    def next(self) -> tuple[Batch, tuple[int, ...]]:
        """The next batch and its numbers by enumerate, the last step's first.

        Raises:
            StopIteration: After the last one, on each call.
            ValueError: If the stream is closed.
            Exception: What ``next()`` of the stream raises. A batch that failed counts as an
                element; anything else is tried again by the next call.
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
        while True:
            index, _, end = self._place
            found = element(self.chain, self._total(), index)
            if found is None:
                raise StopIteration
            at, numbers = found
            self._move_to(at)
            if self._place.at == at:
                behind = _Place(index + 1, at + 1, end)
                try:
                    batch = next(self.stream)
                except StopIteration:
                    pass
                except BatchError:
                    self._place = behind
                    raise
                else:
                    self._place = behind
                    return batch, numbers
            # The end shows the length if it was unknown, or if failed batches are left out.
            if end == self._place.at:
                raise StopIteration
            self._place = self._place._replace(end=self._place.at)

    def seek_step(self, step: int) -> None:
        """Moves to an element, counted from 0; see `BatchStream.seek_step`.

        Raises:
            ValueError: If there is no such element, or the batches before it are not known.
        """
        if not self.chain:
            self.stream.seek_step(step)
            return
        step = whole_number("step", step, "a whole number of elements, 0 or more", 0)
        with self._lock:
            self._settle()
            total = self._total()
            count = length(self.chain, total)
            if 0 <= count < step:
                raise ValueError(f"seek_step({step}): the dataset has only {count} elements")
            at = self._behind(step, total)
            place = self._place._replace(element=step, at=at)
            self._begin()
            try:
                self.stream.seek_step(at)
            except Exception:  # nothing has changed
                self._before = None
                raise
            self._place, self._before = place, None

    def _total(self) -> int:
        return stream_length(self.stream) if self._place.end is None else self._place.end

    def _move_to(self, at: int) -> None:
        """Moves the stream to a batch, or to its end; backwards from its start."""
        if at < self._place.at:
            self.stream.reset()
            self._place = self._place._replace(at=0)
        skipped = self._drop(at - self._place.at)
        self._place = self._place._replace(at=self._place.at + skipped)

    def _behind(self, index: int, total: int) -> int:
        """The number of the stream's next batch behind so many elements."""
        last = element(self.chain, total, index - 1) if index else None
        return last[0] + 1 if last else 0

    def _drop(self, count: int) -> int:
        """Drops some batches of the stream; returns how many there were.

        A source moves past batches without making them, and with ``on_error="skip"`` it would
        count those that are left out.
        """
        if self.stream._iterator._config.on_error != "skip":
            return self.stream._skip_at_most(count)
        for done in range(count):
            try:
                next(self.stream)
            except StopIteration:
                return done
        return count

    def _begin(self) -> None:
        """Notes the position, to which the next call returns if this one is interrupted."""
        self._settle()
        self._before = self._place, self.stream._mark()

    def _settle(self) -> None:
        """Returns to the position before an interrupted call."""
        if self._before is None:
            return
        self._place, mark = self._before
        if not self.stream._go_back(mark):  # there is no state of these pipelines
            self.stream.reset()
            self._place = self._place._replace(at=0)
            self._move_to(self._behind(self._place.element, self._total()))
        self._before = None

    def get_state(self) -> dict[str, Any]:
        """The consumer's position, as a JSON value."""
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
        """Continues at a saved position.

        Raises:
            StateError: If it is no state, or one of other data or steps; nothing has changed.
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
            except Exception:  # nothing has changed
                self._before = None
                raise
            if not self._fits(*counts):
                self._settle()
                raise StateError(
                    f"the state is damaged, or of another batch size: element {element} is not at "
                    f"batch {at} of {end} from epoch {first_epoch}. Make the dataset with the "
                    "batch size that it had (take, skip and enumerate count batches), or restore "
                    "an undamaged copy"
                )
            self.stream._first_epoch = first_epoch
            self._place, self._before = _Place(element, at, end if end >= 0 else None), None

    def _fits(self, index: int, at: int, end: int, first: int) -> bool:
        """Whether the stream's position agrees with a state's counts."""
        iterator, total = self.stream._iterator, stream_length(self.stream)
        endless = self.stream._num_epochs is None
        if not 0 <= first <= iterator.epoch or not (endless or first == self.stream._first_epoch):
            return False
        if total == UNKNOWN:
            return True  # only the source knows
        behind = iterator.total(iterator.epoch - first) + iterator.step
        # Batches that were left out are behind the stream, and not counted here. Only a reader's
        # states say how many.
        config = iterator._config
        of_source = config.source is not None and config.on_error == "skip"
        missing = behind if of_source else iterator._left_out
        if not behind - missing <= at <= behind:
            return False
        if end != UNKNOWN and (total == INFINITE or not total - missing <= end <= total):
            return False
        return at in (total, end, self._behind(index, total if end == UNKNOWN else end))
