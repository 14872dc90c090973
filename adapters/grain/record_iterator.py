"""`RecordIterator`: base class of Grain's iterators over pipelines that are fed with records."""

from __future__ import annotations

from typing import Any

import grain

from ...core.feeding.stream_engine import StreamEngine
from ...core.pipeline.batch import writable
from ...core.stats import InputStats

__all__: list[str] = []


class RecordIterator(grain.DatasetIterator):
    """Iterates over the batches of an engine; subclasses implement get_state and set_state.

    Attributes:
        _engine: The engine; set by subclasses.
        _writable: Whether NumPy arrays of batches are writable copies; set by subclasses.
    """

    _engine: StreamEngine
    _writable: bool

    def __next__(self) -> Any:
        self._assert_not_closed()
        return writable(self._engine.next(), self._writable)

    def __reduce__(self) -> Any:
        # A copy would share the pipelines, and close them when it is freed.
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied, because its pipelines run in this "
            "process. Pickle the dataset and get_state(), create an iterator of the dataset, and "
            "call its set_state()"
        )

    @property
    def errors(self) -> tuple[Any, ...]:
        """The batches of this process that were skipped, or have masked records."""
        return tuple(self._engine.errors)

    def _get_next_index(self) -> int:
        return self._engine.snapshot().step

    def start_prefetch(self) -> None:
        """Reads the first records, builds the pipelines and schedules batches.

        Does not wait for the batches.
        """
        with self._engine.lock:  # a running call of next() uses the parents' iterators
            self._assert_not_closed()
            super().start_prefetch()
            self._engine.schedule()

    def watch(self) -> InputStats:
        """Returns the counters of the batches delivered since the first call of `watch`.

        `dalijax.adapters.clu.ReportInput` writes the counters as metrics.
        """
        return self._engine.watch()

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        super().close()
        self._engine.close()
