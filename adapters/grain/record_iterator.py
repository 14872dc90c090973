"""Base classes of Grain's iterators over batches, and over batches of records."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import grain

from ...core.feeding.stream_engine import StreamEngine
from ...core.messages.user_warnings import warn_user
from ...core.pipeline.batch import Batch, writable
from ...core.stats import InputStats

__all__: list[str] = []


@dataclasses.dataclass
class Passes:
    """Warns once if a second pass over a dataset repeats the augmentation of the first.

    In Grain, the iterators of a dataset are equal: a loop over epochs that iterates over the
    dataset again in each epoch delivers the same batches, including their augmentation.

    Attributes:
        cure: How to iterate over several epochs, for the warning.
        repeats: Whether a pass has ended whose graph draws random numbers.
        warned: Whether the warning was issued.
    """

    cure: str
    repeats: bool = False
    warned: bool = False

    def begin(self) -> None:
        """Notes that a pass begins, and warns if it repeats the augmentation of an earlier pass."""
        if self.repeats and not self.warned:
            self.warned = True
            warn_user(
                "this dataset is iterated again after its end, and draws the same random numbers: "
                f"the augmentation of each epoch is that of the first. {self.cure}"
            )


class GrainIterator(grain.DatasetIterator):
    """Iterates over batches, and warns about equal passes over their dataset.

    Attributes:
        _passes: Warns about equal passes; shared by the iterators of a dataset. Set by subclasses.
        _writable: Whether NumPy arrays of batches are writable copies; set by subclasses.
        _starts: Whether the iterator is new: it delivered no batch, and was not moved.
    """

    _passes: Passes
    _writable: bool
    _starts = True

    @abc.abstractmethod
    def _next(self) -> Batch:
        """Returns the next batch, whose arrays may be views of DALI's buffers."""

    @abc.abstractmethod
    def _draws_numbers(self) -> bool:
        """Returns whether the graph draws random numbers."""

    def __next__(self) -> Any:
        self._assert_not_closed()
        if self._starts:
            self._starts = False
            self._passes.begin()
        try:
            return writable(self._next(), self._writable)
        except StopIteration:
            self._passes.repeats = self._passes.repeats or self._draws_numbers()
            raise


class RecordIterator(GrainIterator):
    """Iterates over the batches of an engine; subclasses implement get_state and set_state.

    Attributes:
        _engine: The engine; set by subclasses.
        _counters: The counters of delivered batches; None until `watch` is called. Grain keeps its
            own ``_stats``.
    """

    _engine: StreamEngine
    _counters: InputStats | None = None

    def _next(self) -> Batch:
        with self._engine.lock, self._engine.interruptible():
            return self._engine.deliver(self._counters).unwrap()

    def _draws_numbers(self) -> bool:
        return self._engine.draws_numbers()

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
            with self._engine.interruptible():
                self._engine.schedule()

    def watch(self) -> InputStats:
        """Returns the counters of the batches delivered since the first call of `watch`.

        `dalijax.adapters.clu.ReportInput` writes the counters as metrics.
        """
        if self._counters is None:
            self._counters = InputStats()
        return self._counters

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        super().close()
        self._engine.close()
