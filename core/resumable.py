"""The states of an iterator: where its consumer stands, told and taken up again."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from . import checkpoints as checkpoints_lib
from . import state as state_lib
from .config import IteratorConfig
from .feed import CLOSED, Feed, Taken
from .fingerprint import unknown
from .pipelines import check_resumable
from .position import Position
from .skipping import Skipper

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
        """The lock, of an iterator that is not closed."""
        if self._feed.closed:
            raise ValueError(CLOSED)
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
            own = self._feed.expected or self._feed.fingerprint() if known else unknown()
            return state_lib.encode(self._position, self._config.output_map, own)

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Goes on where a state says; the pipelines are built again when they are next used.

        Args:
            state: What `get_state` of an iterator over the same data gave, or any adapter's
                of the same function and arguments; JSON text and bytes of it, too. It is
                neither kept nor changed.

        Raises:
            ValueError: If it is no state, or one of other data; nothing has changed. Where no
                pipelines were built yet the data are compared once they are, and where DALI
                itself refuses its part of a state, it says so then: the next call raises, until
                another state is set.
        """
        with self.opened():
            self._settle()
            check_resumable(self._feed.source)
            self._pin()
            feed = self._feed
            now = feed.fingerprint()
            position, saved = state_lib.decode(state, self._config.output_map, now)
            here = position == self._position == feed.position
            if not here or feed.expected not in (None, saved):
                feed.restore(position, saved)
                self._position = position
                self._peeked = None
            self._stays, self._stopped = True, False

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
        feed = self._feed
        feed.runner()
        check_resumable(self._feed.source)
        position = checkpoints_lib.position(
            pieces, self._config.output_map, feed.fingerprint(), feed.plan, feed.streams
        )
        if stand_there:
            feed.adopt(position)
        else:
            feed.restore(position)
        self._position = position
        self._stays = True

    def skip(self, batches: int) -> int:
        """Moves past so many batches of the current epoch, or to its end.

        Few of them are produced where the states of the pipelines' operators can be counted
        on, all of them where not, and with ``on_error="skip"``. A batch that would fail counts as
        one with ``on_error="raise"``, since ``next()`` would raise for it; that it would have kept
        random operators behind the one that fails from moving on, is not seen.

        Returns:
            The number of batches that were skipped.

        Raises:
            Exception: What the pipelines' own source raised, or its reader.
        """
        count = operator.index(batches)
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
