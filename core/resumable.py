"""The states of an iterator: where its consumer stands, told and taken up again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from . import checkpoints as checkpoints_lib
from . import state as state_lib
from .arguments import whole_number
from .config import IteratorConfig, difference_names
from .feed import CLOSED, Feed, Taken
from .fingerprint import unknown
from .lifetime import check_process
from .position import Position
from .skipping import COUNT, Skipper
from .source import check_resumable

T = TypeVar("T")


class Resumable:
    """What `dalijax.core.iterator.BatchIterator` can say of its position; not used by itself."""

    _config: IteratorConfig
    _feed: Feed
    _lock: threading.RLock
    _peeked: Taken | None
    _position: Position
    _skipper: Skipper
    _stays: bool
    _stopped: bool
    _unsure: bool
    _before: Position

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be pickled or copied: its pipelines run in this process. Pickle "
            "the iterator function, its arguments and get_state(), and call set_state() of the "
            "iterator that they make there"
        )

    def _take(self) -> Taken | None:
        raise NotImplementedError

    def opened(self) -> threading.RLock:
        """The lock, of an iterator that is not closed, nor of a parent process."""
        if self._feed.closed:
            raise ValueError(CLOSED)
        check_process(self._feed.process)  # whose threads may have held the lock, too
        return self._lock

    def _settle(self) -> None:
        """Goes back to where a call began that was broken off, wherever it had come to."""
        if self._unsure:
            self._unsure = False
            if self._feed.settle(self._before):
                self._position = self._before
                self._peeked = None

    def _pin(self) -> None:
        """Takes DALI's checkpoint of the position, while it can be had."""
        if self._position is self._feed.position:
            self._position = self._feed.pin()

    def _surely(self, call: Callable[[], T]) -> T:
        """A call that moves on, and that leaves no doubt where it was broken off, by Ctrl-C say."""
        self._settle()
        self._before = self._position
        self._unsure = True
        try:
            made = call()
        except Exception:
            self._unsure = False
            raise
        self._unsure = False
        return made

    def get_state(self) -> dict[str, Any]:
        """Where the consumer stands, as a plain JSON value (dict of str, int, list and dict).

        It is the position after the last batch that ``next()`` delivered, whatever was
        peeked or scheduled since; its keys and types never change.

        Raises:
            ValueError: If the pipelines can't be resumed: the message says why.
        """
        with self.opened():
            self._settle()
            check_resumable(self._feed.source)
            self._pin()
            # A lazy iterator's first state stays what it was before the pipelines were built.
            known = self._position.mark is not None
            own = self._feed.fingerprint() if known else unknown()
            return state_lib.encode(self._position, self._config.output_map, own)

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
        with self.opened():
            self._settle()
            check_resumable(self._feed.source)
            self._pin()
            self._go_to(state_lib.read(state), difference_names(allow, "allow"))

    def _go_to(self, saved: state_lib.Saved, named: Sequence[str] = ()) -> None:
        self._feed.restore(saved, self._config.allow_changes, named)
        if self._position is not self._feed.position:
            self._position, self._peeked = self._feed.position, None
        self._stays, self._stopped = True, False

    def keep_seed(self, other: Resumable) -> None:
        """Has pipelines, which are not built yet, the seed that a state brought to another's."""
        self._feed.source.set_seed(other._feed.source.set_seed(None))

    def checkpoints(self) -> list[bytes]:
        """The state as one piece of bytes for each pipeline, for ``checkpoints=``.

        Raises:
            ValueError: If the pipelines can't be resumed: the message says why.
        """
        return checkpoints_lib.to_bytes(self.get_state())

    def _restore_checkpoints(self, pieces: Sequence[bytes], stand_there: bool = False) -> None:
        """Goes on where checkpoints say, this package's or those of DALI's plugin.

        Args:
            pieces: One for each pipeline.
            stand_there: Whether the pipelines were built at them already.
        """
        if isinstance(pieces, (bytes, bytearray, str, Mapping)):
            raise TypeError(
                "checkpoints must be a list of bytes, one for each pipeline, as checkpoints() of "
                f"an iterator gives it, not {str(pieces)[:40]!r}; a state is for set_state()"
            )
        feed, outputs = self._feed, self._config.output_map
        if stand_there:
            feed.runner()
            check_resumable(feed.source)
            feed.adopt(
                checkpoints_lib.position(
                    pieces, outputs, feed.fingerprint(), feed.plan, feed.streams
                )
            )
            self._position = feed.position
            self._stays = True
            return
        state = checkpoints_lib.from_bytes(pieces)
        if state is not None:
            saved = state_lib.read(state)
        else:  # DALI's counters say nothing without the epochs
            feed.runner()
            position = checkpoints_lib.of_dali(pieces, feed.plan, feed.streams)
            saved = state_lib.Saved(position, list(outputs), feed.fingerprint())
        check_resumable(feed.source)
        self._go_to(saved)

    def skip(self, batches: int) -> int:
        """Moves past so many batches of the current epoch, or to its end.

        Few of them are produced where the states of the pipelines' operators can be counted
        on, all of them where not, and with ``on_error="skip"``. A batch that would fail counts as
        one with ``on_error="raise"``, since ``next()`` would raise for it; that it would have kept
        random operators behind the one that fails from moving on, is not seen.

        Returns:
            The number of batches that were skipped.

        Raises:
            ValueError: If the number is less than 0.
            Exception: What the pipelines' own source raised, or its reader.
        """
        count = whole_number("skip()'s argument", batches, COUNT, 0)
        with self.opened():
            return self._surely(lambda: self._skip(count))

    def _skip(self, batches: int) -> int:
        if batches < 1:
            return 0
        self._stays = False
        done = 0
        try:
            # Where failed batches are left out, only producing them tells which they are.
            while self._config.on_error == "skip" or self._peeked is not None:
                taken = self._take() if done < batches else None
                if taken is None:
                    return done
                self._peeked = None
                self._feed.position = taken.after
                done += 1
            return done + self._skipper.skip(batches - done)
        finally:
            self._position = self._feed.position
