"""`RecordIterator`: the common part of Grain's iterators over pipelines fed with records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain

from ...core.feeding.stream_engine import StreamEngine
from ...core.pipeline.batch import Batch
from ...core.stats import InputStats

__all__: list[str] = []


class RecordIterator(grain.DatasetIterator):
    """Delivers the batches of an engine; subclasses have the states.

    Attributes:
        _engine: The pipelines; set by subclasses.
        _deliver: A function of the engine's batch to the delivered one; set by subclasses.
    """

    _engine: StreamEngine
    _deliver: Callable[[Batch], Batch]

    def __next__(self) -> Any:
        self._assert_not_closed()
        return self._deliver(self._engine.next())

    @property
    def errors(self) -> tuple[Any, ...]:
        """The batches of this process that were skipped, or that have masked records."""
        return tuple(self._engine.errors)

    def _get_next_index(self) -> int:
        return self._engine.snapshot().step

    def start_prefetch(self) -> None:
        """Reads the first records, builds the pipelines and schedules batches."""
        with self._engine.lock:  # the parents' iterators belong to the call that is under way
            self._assert_not_closed()
            super().start_prefetch()
            self._engine.schedule()

    def watch(self) -> InputStats:
        """Counts batches from now on; `dalijax.adapters.clu.ReportInput` reads the counters."""
        return self._engine.watch()

    def close(self) -> None:
        """Frees the pipelines; ``next()`` then raises ValueError."""
        super().close()
        self._engine.close()
