"""LitData's StreamingDataset with StreamingDataLoader.

https://github.com/Lightning-AI/litData: ``optimize`` writes the chunks, and ``state_dict`` and
``load_state_dict`` of the loader resume it, with another number of processes, too. Windows are
``item_shuffle_window``. LitData has no random numbers for transforms; they are drawn from the seed,
the epoch and the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import litdata
import numpy as np
import torch

from loaders.protocol import Batch, Config, Loader, own


class Numbers(litdata.StreamingDataset):  # type: ignore[misc]
    """Samples with their number, and a random number."""

    def __init__(self, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self._scale = scale

    def __getitem__(self, at: Any) -> Any:
        number = super().__getitem__(at)["id"]
        generator = np.random.default_rng([self.seed, self.current_epoch, number])
        return number, generator.uniform() * self._scale


def numbered(number: int) -> dict[str, int]:
    """Returns a record."""
    return {"id": number}


class Adapter(Loader):
    """A local data set of chunks, with two worker processes."""

    title = "LitData"
    packages = ("litdata", "torch")
    augmentation = "of seed, epoch and record"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        numbers = [number for shard in shards for number in shard]
        litdata.optimize(
            fn=numbered,
            inputs=numbers,
            output_dir=folder,
            chunk_size=len(shards[0]),
            num_workers=1,
            keep_data_ordered=True,
        )

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.processes > 1:
            os.environ |= {
                "RANK": str(config.process),
                "WORLD_SIZE": str(config.processes),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(config.port),
            }
            torch.distributed.init_process_group("gloo")
        dataset = Numbers(
            config.scale,
            input_dir=config.data,
            shuffle=config.shuffle != "none",
            seed=config.seed,
            drop_last=False,
            item_shuffle_window=config.window if config.shuffle == "buffer" else None,
        )
        self._loader = litdata.StreamingDataLoader(
            dataset, batch_size=config.rows, num_workers=2, prefetch_factor=config.prefetch
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        for numbers, random in self._loader:
            yield numbers.tolist(), random.tolist()

    def state(self) -> bytes:
        return json.dumps(self._loader.state_dict()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._loader.load_state_dict(json.loads(own(states, self._config)))
