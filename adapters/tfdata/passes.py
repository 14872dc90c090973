"""Counts passes over a data set, and reshuffles each pass, like tf.data.

A *pass* consists of the elements of one ``iter()``, without the steps of the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.api import IteratorFunction
from ...core.arguments import function_parameters
from ...core.errors import EpochError, StateError
from ...core.iterator.batch_stream import BatchStream, StreamMark
from ...core.pipeline.engine import EpochEngine
from ...core.random.seeds import DEFAULT_SEED, ShardSeed, pass_of, pass_seed
from ...core.state import reader_state
from ...core.state.fingerprint import unknown

__all__: list[str] = []


class PassCounter:
    """Counts the passes over a data set and over the datasets derived from it.

    Over a source, pass p of E epochs consists of the epochs p * E to p * E + E - 1, so that a state
    determines its pass. A DALI reader can't start in a later epoch, so each pass has its own seed.

    Args:
        reshuffles: Whether passes differ. Otherwise, every pass has index 0.
    """

    def __init__(self, reshuffles: bool):
        self.reshuffles = reshuffles
        self._next = 0  # first epoch of a source that was not started; over a reader, the next pass

    def number(self, num_epochs: int | None) -> int:
        """Returns the index, from 0, of the next pass: the first pass without a started epoch.

        Args:
            num_epochs: Number of epochs of a pass over a source, None if it has no end; 1 over a
                reader.
        """
        return -(-self._next // (num_epochs or 1)) if self.reshuffles else 0

    def note(self, begun: int) -> None:
        """Notes that an epoch of a source, or a pass over a reader, has started.

        Args:
            begun: The index of the epoch or pass.
        """
        self._next = max(self._next, begun + 1)


class PassStream(BatchStream):
    """Iterates over the batches of one pass; `begin_next` moves to the next pass.

    Args:
        iterator_fn: The iterator function.
        call: Arguments of the iterator function.
        num_epochs: Number of epochs of a pass; None for an endless pass.
        counter: The counter of the data set's passes.
    """

    def __init__(
        self,
        iterator_fn: IteratorFunction,
        call: Mapping[str, Any],
        num_epochs: int | None,
        counter: PassCounter,
    ):
        self._counter = counter
        self._over_source = iterator_fn._has_source(call)
        self._own_seed = "seed" in function_parameters(iterator_fn.pipeline_fn)
        self._seed: int | None = call.get("seed")
        self._number = 0

        def make() -> EpochEngine[Any]:
            seed = self._seed_of_pass()
            seed_argument = {} if seed is None else {"seed": seed}
            return iterator_fn.stream(num_epochs, **{**call, **seed_argument})._engine

        super().__init__(make, num_epochs)

    def _seed_of_pass(self) -> int | None:
        """Returns the seed of the current pass; None to use the seed of the call.

        The seed of the call is used over a source, and for pass 0 over a reader.
        """
        if self._over_source or self._number == 0:
            return None
        seed = pass_seed(DEFAULT_SEED if self._seed is None else self._seed, self._number)
        return seed if self._own_seed else ShardSeed(seed, 0, is_default=self._seed is None)

    def begin_next(self) -> None:
        """Moves to the start of the next pass."""
        number = self._counter.number(self._num_epochs if self._over_source else 1)
        if self._over_source:
            if number or self._first_epoch:
                self._begin_with(number * (self._num_epochs or 1))
        elif number != self._number:
            self._number = number
            self.reset()
        self._note()

    def _note(self) -> None:
        self._counter.note(self.epoch if self._over_source else self._number)

    def _start_next_epoch(self, errors: int, failed: EpochError | None) -> bool:
        went = super()._start_next_epoch(errors, failed)
        self._note()
        return went

    def seek_step(self, step: int) -> None:
        super().seek_step(step)
        self._note()

    def _mark(self) -> StreamMark:
        return super()._mark()._replace(number=self._number)

    def _go_back(self, mark: StreamMark) -> bool:
        if mark.number != self._number:
            self._number = mark.number
            self.reset()
        return super()._go_back(mark)

    def get_state(self) -> dict[str, Any]:
        if self._number:  # builds the pipelines, so that the first state has the seed of the pass
            self._start()
        return super().get_state()

    def set_state(self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str] = ()) -> None:
        """Restores a position of this pass or of another pass."""
        if self._over_source:
            super().set_state(state, allow)
            if self._num_epochs is not None:
                self._first_epoch = self.epoch // self._num_epochs * self._num_epochs
        else:
            self._set_state_of_reader(state, allow)
        self._note()

    def _set_state_of_reader(
        self, state: Mapping[str, Any] | str | bytes, allow: Sequence[str]
    ) -> None:
        """Restores a state over a reader; for a state of another pass, creates a new engine."""
        before, number = self._number, self._pass_of(state)
        if number is None or number == before:
            super().set_state(state, allow)
            return
        # A new engine, with the seed of the state's pass, replaces the current engine unless it
        # rejects the state.
        with self._opened():
            self._number = number
            try:
                fresh = self._make()
                try:
                    self._restore(fresh, state, allow)
                except BaseException:
                    fresh.close()
                    raise
            except BaseException:
                self._number = before
                raise
            self._continue_with(fresh)

    def _pass_of(self, state: Mapping[str, Any] | str | bytes) -> int | None:
        """Returns the number of the pass of a reader's state; None if unknown."""
        try:
            saved = reader_state.decode(state).fingerprint["seed"]
        except StateError:  # the iterator raises the error when it restores the state
            return None
        if saved == unknown()["seed"]:  # before the first batch of pass 0
            return 0
        return pass_of(DEFAULT_SEED if self._seed is None else int(self._seed), saved)
