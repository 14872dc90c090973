"""A stream of batches behind take, skip, repeat and enumerate."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from . import state as state_lib
from .batches import Batch
from .chain import INFINITE, UNKNOWN, Step, element, length
from .fingerprint import StateError
from .stream import BatchStream

_FORMAT = "dalijax.chain"


def stream_length(stream: BatchStream) -> int:
    """Number of batches of a whole stream, INFINITE, or UNKNOWN where only its source knows."""
    if stream.num_epochs is None:
        return INFINITE
    try:
        return len(stream)
    except TypeError:
        return UNKNOWN


class ChainedStream:
    """The elements of a chain over a stream.

    Without steps, its states are those of the stream; else they have them within.

    Args:
        stream: The batches, from the start; it belongs to the chain.
        chain: What was applied to it; see `dalijax.core.chain`.
    """

    def __init__(self, stream: BatchStream, chain: Sequence[Step]):
        self.stream = stream
        self.chain = tuple(chain)
        self._lock = threading.RLock()
        self._index = 0  # of the next element
        self._at = 0  # of the stream's next batch
        self._total: int | None = None

    def next(self) -> tuple[Batch, tuple[int, ...]]:
        """The next batch, and the numbers that enumerations gave it, the last step's first.

        Raises:
            StopIteration: After the last one, on each call.
            ValueError: If the stream is closed.
            Exception: What ``next()`` of the stream raises.
        """
        if not self.chain:
            return next(self.stream), ()
        with self._lock:
            self.stream.iterator.opened()
            while True:
                if self._total is None:
                    self._total = stream_length(self.stream)
                found = element(self.chain, self._total, self._index)
                if found is None:
                    raise StopIteration
                at, numbers = found
                if at < self._at:
                    self.stream.reset()
                    self._at = 0
                # Reaching its end says how long the source is, where nobody knew.
                self._at += self.stream.skip(at - self._at)
                if self._at == at:
                    try:
                        batch = next(self.stream)
                    except StopIteration:
                        pass
                    else:
                        self._at += 1
                        self._index += 1
                        return batch, numbers
                if self._total != UNKNOWN:
                    raise StopIteration
                self._total = self._at

    def get_state(self) -> dict[str, Any]:
        """Where the consumer stands, as a JSON value."""
        if not self.chain:
            return self.stream.get_state()
        with self._lock:
            return {
                "format": _FORMAT,
                "index": self._index,
                "at": self._at,
                "total": UNKNOWN if self._total is None else self._total,
                "steps": [repr(step) for step in self.chain],
                "stream": self.stream.get_state(),
            }

    def set_state(self, saved: Mapping[str, Any] | str | bytes) -> None:
        """Goes on where a state says.

        Raises:
            StateError: If it is no state, or one of other data or steps; nothing has changed.
        """
        if not self.chain:
            self.stream.set_state(saved)
            return
        state = state_lib.parsed(saved)
        with self._lock:
            mine = isinstance(state, Mapping) and state.get("format") == _FORMAT
            if not mine or set(state) != set(self.get_state()):
                raise StateError(
                    f"no state of this dataset, which has {[repr(s) for s in self.chain]}: "
                    f"{str(state)[:80]}"
                )
            steps = [repr(step) for step in self.chain]
            if state["steps"] != steps:
                raise StateError.of_other_data([f"steps: {state['steps']} -> {steps}"])
            counts = [state[name] for name in ("index", "at", "total")]
            if any(type(count) is not int for count in counts) or min(counts[:2]) < 0:
                raise StateError(f"the state is damaged: its counts are {counts}")
            self.stream.set_state(state["stream"])
            self._index, self._at, total = counts
            # What was not known when it was saved is asked again.
            self._total = total if total >= 0 else None

    def __len__(self) -> int:
        """Number of elements from the start; see `cardinality`."""
        return max(0, self.cardinality())

    def cardinality(self) -> int:
        """Number of elements from the start, INFINITE, or UNKNOWN."""
        return length(self.chain, stream_length(self.stream))
