"""`StreamAdapter`: base class of the adapters' iterators over a stream of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..core.iterator.batch_stream import BatchStream
from ..core.stats import InputStats

__all__: list[str] = []


class StreamAdapter:
    """Forwards methods to a stream; subclasses override methods that their protocol changes.

    Attributes:
        _stream: The stream, which the adapter owns; set by subclasses.
    """

    _stream: BatchStream | StreamAdapter

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last delivered batch, as a dict of JSON values."""
        return self._stream.get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Restores the position that a state describes.

        Raises:
            ValueError: If ``state`` is not a state, or a state of different data; the position is
                unchanged.
        """
        with self._moving():
            self._stream.set_state(state)

    def seek_step(self, step: int) -> None:
        """Moves to a global step, for loops that save only the step; see `BatchStream.seek_step`.

        Args:
            step: Number of batches before the position.

        Raises:
            ValueError: If ``step`` is negative or exceeds the number of batches; over a source with
                ``on_error="skip"``, for any step but 0, because the number of skipped batches is
                unknown.
        """
        with self._moving():
            self._stream.seek_step(step)

    def _moving(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager for a move; subclasses update their own attributes in it."""
        return contextlib.nullcontext()

    def __reduce__(self) -> Any:
        return self._stream.__reduce__()  # raises an error that tells what to pickle instead

    @property
    def _core(self) -> BatchStream:
        """The underlying stream, which `dalijax.profile` measures."""
        stream = self._stream
        return stream._core if isinstance(stream, StreamAdapter) else stream

    def watch(self) -> InputStats:
        """Returns the counters of the batches delivered since the first call of `watch`.

        `dalijax.adapters.clu.ReportInput` writes the counters as metrics.
        """
        return self._stream.watch()

    def start_prefetch(self) -> None:
        """Builds the pipelines and schedules batches, without waiting for the batches."""
        self._stream.start_prefetch()

    def close(self) -> None:
        """Frees the pipelines; later calls of ``next()`` raise ValueError."""
        self._stream.close()
