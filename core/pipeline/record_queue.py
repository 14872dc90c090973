"""Batches of records on their way into pipelines, and where their consumer stands."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..config import IteratorConfig
from .lifetime import calls

ON_ERROR = ("raise", "skip", "mask")


class ReadError(Exception):
    """A record whose reading raised; ``__cause__`` is what. The next pull goes on behind it.

    Args:
        after: As `Pulled.after`, behind the record.
    """

    def __init__(self, after: Any):
        super().__init__("the reading of a record raised")
        self.after = after


@dataclasses.dataclass(frozen=True)
class Pulled:
    """The records of one batch.

    Attributes:
        records: One for each row.
        after: What the feeder wants to know of the position behind them.
        name: What the record of a row is called in errors, e.g. its index and key.
        valid: Which rows are no padding; None for all.
    """

    records: Sequence[Any]
    after: Any
    name: Callable[[int], str]
    valid: np.ndarray | None = None

    def padded(self, rows: int) -> Pulled:
        """With its last record repeated up to so many rows."""
        missing = rows - len(self.records)
        if missing <= 0:
            return self
        return dataclasses.replace(
            self,
            records=[*self.records, *[self.records[-1]] * missing],
            valid=np.arange(rows) < len(self.records),
        )

    def without(self, bad: Sequence[int], spare: Any) -> Pulled:
        """With another record, not valid, in place of the bad ones."""
        records = list(self.records)
        valid = np.ones(len(records), bool) if self.valid is None else self.valid.copy()
        good = [i for i in range(len(records)) if i not in set(bad)]
        for i in bad:
            records[i] = records[min(good, key=lambda k: abs(k - i))] if good else spare
            valid[i] = False
        return dataclasses.replace(self, records=records, valid=valid)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the consumer of a decoder stands.

    Attributes:
        step: Number of batches behind it.
        after: What the last batch that was pulled for it says; None at the start.
        marks: DALI's checkpoint of each pipeline; None before a batch was delivered.
    """

    step: int = 0
    after: Any = None
    marks: tuple[bytes, ...] | None = None


class Tape:
    """Batches that were pulled and are not behind the consumer; each pipeline reads along it.

    Args:
        pull: Gives the next batch; raises StopIteration at the end.
        lanes: Number of pipelines.
        batches: What it starts with.

    Attributes:
        batches: What was pulled and is not behind the consumer.
        error: What the next pull raised, until the consumer comes to it: all pipelines that read
            along here must meet it, and it must be said once.
    """

    def __init__(self, pull: Callable[[], Pulled], lanes: int, batches: Sequence[Pulled] = ()):
        self.batches = collections.deque(batches)
        self.error: ReadError | None = None
        # Weak where it can be: what pulls holds the pipelines that read along here.
        self._pull = weakref.WeakMethod(pull) if inspect.ismethod(pull) else lambda: pull
        self._at = [0] * lanes

    def first(self) -> Pulled:
        """The batch that is delivered next."""
        return self.at(0)

    @property
    def unread(self) -> bool:
        """Whether a pipeline was fed nothing yet."""
        return 0 in self._at

    def at(self, place: int) -> Pulled:
        """The batch so many behind the one that is delivered next.

        Raises:
            StopIteration: If there are not so many.
            ReadError: If the reading of a record raised before.
        """
        while len(self.batches) <= place:
            if self.error is not None:
                raise self.error
            pull = self._pull()
            try:
                with calls.suspended():
                    self.batches.append(no_more() if pull is None else pull())
            except ReadError as error:
                self.error = error
                raise
        return self.batches[place]

    def read(self, lane: int) -> Pulled:
        """The batch that one pipeline is fed next."""
        batch = self.at(self._at[lane])
        self._at[lane] += 1
        return batch

    def forget_first(self) -> None:
        """Drops the batch that was delivered."""
        self.batches.popleft()
        self._at = [at - 1 for at in self._at]

    def clear(self) -> None:
        """Drops all that was pulled."""
        self.batches.clear()
        self.error = None

    def rewind(self) -> None:
        """Has all pipelines start over at the first batch."""
        self._at = [0] * len(self._at)


def no_more() -> Pulled:
    """The ``pull`` of a tape that has an end."""
    raise StopIteration


def check_fed(pipeline_fn: Callable[..., Any], config: IteratorConfig, on_error: str) -> None:
    """Raises TypeError or ValueError where a graph or its arguments can't be fed with records."""
    if getattr(pipeline_fn, "_is_pipeline_def", False):
        raise TypeError(
            f"{pipeline_fn!r} is decorated with pipeline_def, which makes whole pipelines: "
            "pass the plain function, whose parameters are fed"
        )
    if isinstance(getattr(pipeline_fn, "config", None), IteratorConfig):
        raise TypeError(
            f"{pipeline_fn!r} is an iterator function of dalijax.data_iterator, which reads by "
            "itself: pass the plain function, undecorated, whose parameters are the records' keys"
        )
    if not callable(pipeline_fn):
        raise TypeError(f"pipeline_fn must be a function of a DALI graph, not {pipeline_fn!r}")
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {ON_ERROR}, not {on_error!r}")
    if on_error == "mask" and config.mask is None:
        raise ValueError("on_error='mask' needs a mask to say which records are bad: pad='mask'")
    if on_error == "skip" and config.over_processes:
        raise ValueError(
            "on_error='skip' over several processes, one of which would then be a batch ahead of "
            "the others: use 'mask'"
        )
