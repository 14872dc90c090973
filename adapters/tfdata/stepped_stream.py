"""`ChainedStream`: the elements of a stream of batches after take, skip, repeat and enumerate."""

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
from ..stream_adapter import StreamAdapter
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
    """Returns the number of batches of a stream from its start, or INFINITE or UNKNOWN."""
    if stream._num_epochs is None:
        return INFINITE
    try:
        return len(stream)
    except TypeError:
        return UNKNOWN


class _ChainPosition(NamedTuple):
    """A position in a `ChainedStream`.

    Attributes:
        element: Index of the next element.
        at: Index of the next batch of the stream.
        end: Number of batches of the stream; None before its end was reached.
    """

    element: int = 0
    at: int = 0
    end: int | None = None


class ChainedStream(StreamAdapter):
    """Applies a chain of steps to a stream of batches, and iterates over the resulting elements.

    Without steps, a state is a state of the stream. Otherwise, a state contains a state of the
    stream.

    Args:
        stream: The stream, at its start. The chained stream owns it.
        chain: The steps; see `dalijax.adapters.tfdata.steps`.
    """

    _stream: BatchStream

    def __init__(self, stream: BatchStream, chain: Sequence[Step]):
        self._stream = stream
        self.chain = tuple(chain)
        # Serializes calls of several threads; reentrant, because methods call each other.
        self._lock = threading.RLock()
        self._steps = [repr(step) for step in chain]  # the form of the steps in states
        self._position = _ChainPosition()
        # The positions of the chain and of the stream before a running or unfinished call.
        self._before: tuple[_ChainPosition, StreamMark] | None = None

    def __next__(self) -> tuple[Batch, tuple[int, ...]]:
        """Returns the next batch, and the number from each enumerate step, the last step first.

        Raises:
            StopIteration: After the last element, at each call.
            ValueError: If the stream is closed.
            Exception: Any error of ``next()`` of the stream. A failed batch counts as an element;
                after other errors, the following call tries again.
        """
        if not self.chain:
            return next(self._stream), ()
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
        """Returns the next batch and its numbers, and moves the position; see `__next__`."""
        while True:
            index, _, end = self._position
            location = element(self.chain, self._total(), index)
            if location is None:
                raise StopIteration
            at, numbers = location
            self._move_to(at)
            if self._position.at == at:
                after = _ChainPosition(index + 1, at + 1, end)
                try:
                    batch = next(self._stream)
                except StopIteration:
                    pass
                except BatchError:
                    self._position = after
                    raise
                else:
                    self._position = after
                    return batch, numbers
            # The length of a stream may be unknown before its end, or may shrink because failed
            # batches are skipped. The loop then searches for the element again.
            if end == self._position.at:
                raise StopIteration
            self._position = self._position._replace(end=self._position.at)

    def seek_step(self, step: int) -> None:
        """Moves to an element; see `BatchStream.seek_step`.

        Args:
            step: Number of elements before the position.

        Raises:
            ValueError: If ``step`` is negative or exceeds the number of elements; over a source
                with ``on_error="skip"``, because the number of skipped batches is unknown.
        """
        if not self.chain:
            self._stream.seek_step(step)
            return
        step = step_number(step, "elements")
        with self._lock:
            self._undo_unfinished()
            total = self._total()
            count = length(self.chain, total)
            if 0 <= count < step:
                raise ValueError(f"seek_step({step}): the dataset has only {count} elements")
            at = self._batch_after(step, total)
            position = self._position._replace(element=step, at=at)
            self._begin()
            self._stream.seek_step(at)
            self._position, self._before = position, None

    def _total(self) -> int:
        """Returns the number of batches of the stream, or INFINITE or UNKNOWN."""
        return stream_length(self._stream) if self._position.end is None else self._position.end

    def _move_to(self, at: int) -> None:
        """Moves the stream to batch ``at``, or to its end if it has fewer batches.

        To move backwards, the stream is restarted.
        """
        if at < self._position.at:
            self._stream.reset()
            self._position = self._position._replace(at=0)
        skipped = self._drop(at - self._position.at)
        self._position = self._position._replace(at=self._position.at + skipped)

    def _batch_after(self, index: int, total: int) -> int:
        """Returns the index of the stream's next batch after the first ``index`` elements.

        Args:
            index: Number of elements.
            total: Number of batches of the stream, or INFINITE or UNKNOWN.
        """
        last = element(self.chain, total, index - 1) if index else None
        return last[0] + 1 if last else 0

    def _drop(self, count: int) -> int:
        """Drops up to ``count`` batches of the stream, and returns how many were dropped.

        With ``on_error="skip"``, the batches are produced, because failed batches do not count.
        `BatchStream.skip` over a source counts batches without producing them.
        """
        if self._stream._config.on_error != "skip":
            return self._stream._skip_at_most(count)
        for dropped in range(count):
            try:
                next(self._stream)
            except StopIteration:
                return dropped
        return count

    def _begin(self) -> None:
        """Saves the position, to which the next call returns if this call does not finish."""
        self._undo_unfinished()
        self._before = self._position, self._stream._mark()

    def _undo_unfinished(self) -> None:
        """Moves back to the position before the last call, if the call did not finish."""
        if self._before is None:
            return
        self._position, mark = self._before
        if not self._stream._go_back(mark):  # the state of the pipelines can't be saved
            self._stream.reset()
            self._position = self._position._replace(at=0)
            self._move_to(self._batch_after(self._position.element, self._total()))
        self._before = None

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last delivered element, as a dict of JSON values."""
        if not self.chain:
            return self._stream.get_state()
        with self._lock:
            self._undo_unfinished()
            return FORM.encode(
                element=self._position.element,
                at=self._position.at,
                end=UNKNOWN if self._position.end is None else self._position.end,
                first_epoch=self._stream._first_epoch,
                stream=self._stream.get_state(),
                steps=self._steps,
            )

    def set_state(self, saved: Mapping[str, Any] | str | bytes) -> None:
        """Restores the position that a state describes.

        Raises:
            StateError: If ``saved`` is not a state, or a state of different data or steps; the
                position is unchanged.
        """
        if not self.chain:
            self._stream.set_state(saved)
            return
        state = FORM.decode(saved)
        differences.check({"steps": state["steps"]}, {"steps": self._steps})
        counts = [state[name] for name in ("element", "at", "end", "first_epoch")]
        element, at, end, first_epoch = counts
        with self._lock:
            self._undo_unfinished()
            self._begin()
            self._stream.set_state(state["stream"])
            if not self._fits(*counts):
                self._undo_unfinished()
                raise StateError(
                    f"the state is damaged, or of another batch size: element {element} is not at "
                    f"batch {at} of {end} from epoch {first_epoch}. Create the dataset with its "
                    "original batch size (take, skip and enumerate count batches), or restore "
                    "an undamaged copy"
                )
            self._stream._first_epoch = first_epoch
            position = _ChainPosition(element, at, end if end >= 0 else None)
            self._position, self._before = position, None

    def _fits(self, index: int, at: int, end: int, first: int) -> bool:
        """Returns whether the counts of a state are consistent with the restored stream.

        Args:
            index, at, end: The counts ``element``, ``at`` and ``end`` of the state.
            first: The first epoch of the stream in the state.
        """
        stream, total = self._stream, stream_length(self._stream)
        endless = stream._num_epochs is None
        if not 0 <= first <= stream.epoch or not (endless or first == stream._first_epoch):
            return False
        if total == UNKNOWN:
            return True  # the counts can't be checked
        num_before = stream._num_batches(stream.epoch - first) + stream.step
        # `at` does not count failed batches that the stream skipped before its position. Only
        # states over a reader contain the number of these batches.
        config = stream._config
        skips_in_source = config.source is not None and config.on_error == "skip"
        missing = num_before if skips_in_source else stream._left_out
        if not num_before - missing <= at <= num_before:
            return False
        if end != UNKNOWN and (total == INFINITE or not total - missing <= end <= total):
            return False
        return at in (total, end, self._batch_after(index, total if end == UNKNOWN else end))
