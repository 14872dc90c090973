"""Grain's MapDataset with batches of the MapDataset.

https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html has batches in
the `MapDataset`, so that the position counts batches. The window is that of
`WindowShuffleMapDataset`.
"""

from __future__ import annotations

from typing import Any

import grain

from loaders import grain_map
from loaders.protocol import Config


class Adapter(grain_map.Adapter):
    """`MapDataset` with Grain's threads, and batches of the `MapDataset`."""

    title = "Grain, MapDataset.batch"

    @staticmethod
    def batched(ds: Any, config: Config, options: Any) -> Any:
        """Returns an IterDataset of batches, with a window if the configuration has one."""
        if config.shuffle == "buffer":
            ds = grain.experimental.WindowShuffleMapDataset(
                ds, window_size=config.window, seed=config.seed
            )
        return ds.batch(config.rows).to_iter_dataset(options)
