"""The states of an iterator: where its consumer stands, told and taken up again."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from . import checkpoints as checkpoints_lib
from . import state as state_lib
from .config import IteratorConfig
from .feed import CLOSED, Feed, Taken
from .fingerprint import unknown
from .pipelines import check_resumable
from .position import Position


class Resumable:
    """What `dalijax.core.iterator.BatchIterator` can say of its position; not used by itself."""

    _config: IteratorConfig
    _feed: Feed
    _lock: threading.RLock
    _peeked: Taken | None
    _position: Position
    _stays: bool
    _stopped: bool
    _unsure: bool
    _before: Position

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
            # A lazy iterator's first state stays what it was before the pipelines were built.
            known = self._position.mark is not None
            own = self._feed.expected or self._feed.fingerprint() if known else unknown()
            return state_lib.encode(self._position, self._config.output_map, own)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state says; the pipelines are built again when they are next used.

        Args:
            state: What `get_state` of an iterator over the same data gave. It is neither
                kept nor changed.

        Raises:
            ValueError: If it is no state, or one of other data; nothing has changed.
        """
        with self.opened():
            self._settle()
            check_resumable(self._feed.source)
            feed = self._feed
            now = feed.fingerprint()
            position, saved = state_lib.decode(state, self._config.output_map, now)
            if position != self._position or position != feed.position:
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
