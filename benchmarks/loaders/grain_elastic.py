"""Grain's ElasticIterator.

Its docstring in grain.experimental: the dataset is neither batched nor sharded, and the state of
any shard restores all shards after a change of the number of shards or of the global batch size.
"""

from __future__ import annotations

import grain

from loaders import grain_map
from loaders.grain_map import Augment, open_source
from loaders.protocol import Config


class Adapter(grain_map.Adapter):
    """`ElasticIterator` over a `MapDataset`."""

    title = "Grain, ElasticIterator"

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
