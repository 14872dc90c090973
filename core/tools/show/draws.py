"""The same records under several draws of the random numbers that augment them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...api import IteratorFunction
from ...iterator.iterator import DALIGenericIterator
from ...order.shuffle import Indices
from ...sources.source import Order, Source, Values, order_of
from ...state import reader_state
from ...state.position import Checkpoints, Position
from ...state.random_state import with_random_state
from .batches import Taken, described


class RepeatedRecords(Source):
    """Records of a source, each several times: as epoch 0, 1, ... draw its numbers.

    Args:
        source: The source.
        draws: How often a record comes.
    """

    def __init__(self, source: Source, draws: int):
        self.fields = source.fields
        self._source, self._draws = source, draws

    def __len__(self) -> int:
        return len(self._source) * self._draws

    def order(self, seed: int, shuffle: bool) -> Order:
        """The record of each sample, and its draw as the epoch."""
        of_source = order_of(self._source, seed, shuffle)

        def order(samples: Indices) -> tuple[Indices, Indices]:
            places, draws = np.divmod(samples, self._draws)
            return of_source(places)[0], draws

        return order

    def read(self, indices: Indices, names: Sequence[str]) -> Mapping[str, Values]:
        """See `dalijax.sources.Source`."""
        return self._source.read(indices, names)

    def sizes(self, indices: Indices, name: str, data: Values) -> Any:
        """See `dalijax.sources.Source`."""
        return self._source.sizes(indices, name, data)

    def name(self, index: int) -> str:
        """See `dalijax.sources.Source`."""
        return self._source.name(index)

    def identity(self) -> str:
        """See `dalijax.sources.Source`."""
        return f"{self._source.identity()} x {self._draws}"


def take_draws(
    iterator_fn: IteratorFunction, call: Mapping[str, Any], records: int, draws: int
) -> Taken:
    """The first records of an iterator function, each under several draws.

    Over a source the draws are those of its first epochs. Over a reader they are those of its first
    batches, whose random state the operators get while the reader stands at the first one.

    Args:
        iterator_fn: The function.
        call: Its arguments; a batch size is not needed.
        records: Number of records.
        draws: Number of draws of each.

    Returns:
        One batch of records * draws samples, those of a record in a row.

    Raises:
        StateError: If the reader's pipeline can't be resumed, and so not brought back.
        Exception: What the function raises when it is called.
    """
    taken = Taken(columns=draws)
    title = f"{records} records under {draws} draws, a record in a row"
    call = {name: value for name, value in call.items() if name != "batch_size"}
    if iterator_fn._has_source(call):
        source = call.pop("source", None) or iterator_fn._config.source
        config = dataclasses.replace(iterator_fn._config, source=None)
        repeated = RepeatedRecords(source, draws)
        again = type(iterator_fn)(iterator_fn.pipeline_fn, config)
        count = min(records, len(source)) * draws
        with again(**call, source=repeated, batch_size=count) as iterator:
            taken.take(iterator, 1, lambda: next(iterator))
            taken.learn(iterator)
    else:
        with iterator_fn(**call, batch_size=records) as iterator:
            _take_of_reader(taken, iterator, draws)
            taken.learn(iterator)
    taken.batches = [(title, batch) for _, batch in taken.batches]
    return taken


def _take_of_reader(taken: Taken, iterator: DALIGenericIterator, draws: int) -> None:
    """Takes the first batch under the random state of each of the first batches."""
    states = [reader_state.decode(iterator.get_state())]
    each = [dict(next(iterator))]
    try:
        for _ in range(1, draws):
            states.append(reader_state.decode(iterator.get_state()))
            if not iterator._skip_at_most(1):
                iterator.reset()
                iterator._skip_at_most(1)
        for later in states[1:]:
            iterator.set_state(_drawn(states[0], later))
            each.append(dict(next(iterator)))
    except Exception as error:  # what the graph raises of numbers that it drew
        taken.failures.append(described(error))
    taken.columns = len(each)
    rows = {name: np.stack([np.asarray(one[name]) for one in each], 1) for name in each[0]}
    batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in rows.items()}
    taken.batches.append(("", batch))


def _drawn(start: reader_state.ReaderState, later: reader_state.ReaderState) -> dict[str, Any]:
    """The state of the start, with the random numbers of a later one."""
    here, there = start.position.checkpoints, later.position.checkpoints
    if here is None or there is None or here.data is None or there.data is None:
        return reader_state.encode(start.position, start.fingerprint)
    data = tuple(with_random_state(*pair) for pair in zip(here.data, there.data))
    checkpoints = Checkpoints(data, here.to_drop)
    position = Position(0, 0, checkpoints, checkpoints)
    return reader_state.encode(position, start.fingerprint)
