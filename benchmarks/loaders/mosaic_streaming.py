"""MosaicML streaming: StreamingDataset with StreamingDataLoader.

https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/fast_resumption.html:
``state_dict`` and ``load_state_dict`` of the loader, whose state is that of rank 0. As
elastic_determinism.html requires, ``num_canonical_nodes`` is set, and the global batch size is
constant over all numbers of processes. getting_started/faqs_and_tips.html removes the shared memory
of killed processes. Windows are ``shuffle_block_size`` of dataset_configuration/shuffling.html.
streaming has no random numbers for transforms; they are drawn from the seed, the epoch and the
index. A state after an epoch has an empty remainder, which the trainer takes before the next epoch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from loaders.protocol import Batch, Config, Loader


class Numbers(StreamingDataset):  # type: ignore[misc]
    """Samples with their number, and a random number.

    Attributes:
        epoch: Set by the trainer before each epoch, for whose worker processes it is copied.
    """

    def __init__(self, seed: int, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self._seed, self._scale, self.epoch = seed, scale, 0

    def __getitem__(self, at: int) -> Any:
        generator = np.random.default_rng([self._seed, self.epoch, at])
        return super().__getitem__(at)["id"], generator.uniform() * self._scale


class Adapter(Loader):
    """A local data set in MDS format, with two worker processes."""

    title = "MosaicML streaming"
    packages = ("mosaicml-streaming", "torch")
    augmentation = "of seed, epoch and index"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        size = 100 * len(shards[0])  # bytes of a shard
        with MDSWriter(out=folder, columns={"id": "int"}, size_limit=size, exist_ok=True) as writer:
            for shard in shards:
                for number in shard:
                    writer.write({"id": number})

    def __init__(self, config: Config) -> None:
        os.environ |= {
            "RANK": str(config.process),
            "LOCAL_RANK": str(config.process),
            "WORLD_SIZE": str(config.processes),
            "LOCAL_WORLD_SIZE": str(config.processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(config.port),
        }
        if config.processes > 1:
            torch.distributed.init_process_group("gloo")
        clean_stale_shared_memory()  # of processes that were killed
        self._saved_epoch: int | None = None
        self._dataset = Numbers(
            config.seed,
            config.scale,
            local=config.data,
            shuffle=config.shuffle != "none",
            shuffle_seed=config.seed,
            shuffle_block_size=config.window if config.shuffle == "buffer" else None,
            num_canonical_nodes=1,
            batch_size=config.rows,
        )
        self._loader = StreamingDataLoader(
            self._dataset,
            batch_size=config.rows,
            num_workers=2,
            prefetch_factor=config.prefetch,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        if self._saved_epoch is not None and self._saved_epoch < epoch:
            assert not list(self._loader)
        self._saved_epoch, self._dataset.epoch = None, epoch
        for numbers, random in self._loader:
            yield numbers.tolist(), random.tolist()

    def state(self) -> bytes:
        return json.dumps(self._loader.state_dict()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        state = json.loads(states[0])
        self._saved_epoch = state["epoch"]
        self._loader.load_state_dict(state)
