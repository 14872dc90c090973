"""Moving past batches of an epoch without producing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .feed import Feed
from .fingerprint import StateError
from .position import Mark
from .randomness import advanced
from .runner import Outputs, SourceEnded

# What skip() takes.
COUNT = "a whole number of batches, 0 or more (reset() and set_state() go back)"
# New pipelines cost more than this many batches, where so few are to be skipped.
_WORTHWHILE = 4


def _nothing(outputs: Sequence[Outputs], valid: Sequence[int], *_: Any) -> Any:
    """The value of a batch that nobody wants."""


class Skipper:
    """Moves a feed on, by counting where DALI's checkpoints can be counted on.

    Two batches are produced to learn how far each operator's state moves on with a batch; then
    new pipelines are built with the states that they would have further on. That
    goes as far as a pass of the reader over its data, whose last batch is produced, since only
    DALI knows how its reader shuffles next. Where a state does not move evenly, or there is no
    reader that tells its epochs, each batch is produced and dropped.

    Args:
        feed: The pipelines and their position.
        reader: Name of their reader, or None.
    """

    def __init__(self, feed: Feed, reader: str | None):
        self._feed = feed
        self._reader = reader
        # Checkpoints of three batches that followed one another, once they were seen.
        self._seen: list[tuple[bytes, ...]] = []
        self._even = True

    def skip(self, batches: int) -> int:
        """Moves on by so many batches, or to the end of the epoch.

        Returns:
            The number of batches that were skipped.

        Raises:
            Exception: What the pipelines' own source raised, or its reader; the batches
                before it are skipped.
        """
        done, seen = 0, list(self._seen)
        while done < batches and not self._feed.at_end():
            jumped = self._jump(batches - done, seen)
            if not jumped:
                try:
                    self._feed.position = self._feed.take(_nothing).after
                except SourceEnded:
                    break
            done += jumped or 1
        return done

    def _jump(self, most: int, seen: list[tuple[bytes, ...]]) -> int:
        """Moves on without producing anything; returns by how many batches, or 0.

        Args:
            most: The most batches to move on by.
            seen: Checkpoints of batches that followed one another in this call, or before.
        """
        feed, here = self._feed, self._feed.pin()
        source, mark = feed.source, here.mark or Mark()
        if feed.plan is None or source.unresumable or not source.rebuildable or not self._even:
            return 0
        if here.step == 0 and here.epoch > 0 and not self._reader:
            return 0  # its source begins anew, which no checkpoint tells
        unbroken = [feed.plan.unbroken(here.epoch, here.step, s) for s in feed.streams]
        count = min(most, *unbroken)
        if mark.lag or mark.checkpoints is None or count < 1:
            if len(seen) < 3:
                seen.clear()  # the next batch does not follow on it
            return 0
        if len(seen) < 3:
            seen.append(mark.checkpoints)
            self._seen = seen if len(seen) == 3 else []
        if len(seen) < 3 or count < _WORTHWHILE:
            return 0
        try:
            own = zip(*seen, mark.checkpoints)
            moved = [advanced(count, self._reader, *checkpoints) for checkpoints in own]
        except StateError:
            self._even = False
            return 0
        feed.drop()
        feed.position = dataclasses.replace(here, step=here.step + count, mark=Mark(tuple(moved)))
        return count
