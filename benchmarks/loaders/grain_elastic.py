"""Grain's ElasticIterator.

Its docstring in grain.experimental: the dataset is neither batched nor sharded, and the state of
any shard restores all shards after a change of the number of shards or of the global batch size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import grain

from loaders.grain_map import Augment, open_source, rows, write_array_records
from loaders.protocol import Batch, Config, Loader, own


class Adapter(Loader):
    """`ElasticIterator` over a `MapDataset`."""

    title = "Grain, ElasticIterator"
    packages = ("grain",)
    stream = True
    augmentation = "`random_map`"

    write = staticmethod(write_array_records)

    def __init__(self, config: Config) -> None:
        self._config = config
        ds = grain.MapDataset.source(open_source(config)).seed(config.seed)
        if config.shuffle == "full":
            ds = ds.shuffle()
        elif config.shuffle == "buffer":
            ds = grain.experimental.WindowShuffleMapDataset(
                ds, window_size=config.window, seed=config.seed
            )
        if not config.evaluation:
            ds = ds.repeat()
        ds = ds.random_map(Augment(config.scale))
        self._iterator = iter(
            grain.experimental.ElasticIterator(
                ds,
                config.batch,
                grain.sharding.ShardOptions(config.process, config.processes),
                read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=config.prefetch),
            )
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        yield from map(rows, self._iterator)

    def state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator.set_state(json.loads(own(states, self._config)))
