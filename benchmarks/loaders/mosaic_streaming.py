"""MosaicML streaming: StreamingDataset with StreamingDataLoader.

https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/fast_resumption.html:
``state_dict`` and ``load_state_dict`` of the loader, whose state is that of rank 0. As
elastic_determinism.html requires, ``num_canonical_nodes`` is set, and the global batch size is
constant over all numbers of processes. getting_started/faqs_and_tips.html removes the shared memory
of killed processes. Windows are ``shuffle_block_size`` of
dataset_configuration/shuffling.html. streaming has no random numbers for transforms, so each sample
takes PyTorch's, as a transform of torchvision does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from loaders.protocol import Batch, Config, Loader


class Numbers(StreamingDataset):  # type: ignore[misc]
    """Samples with their number, and a random number."""

    def __init__(self, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self._scale = scale

    def __getitem__(self, at: int) -> Any:
        return super().__getitem__(at)["id"], float(torch.rand(())) * self._scale


class Adapter(Loader):
    """A local data set in MDS format, with two worker processes."""

    title = "MosaicML streaming"
    packages = ("mosaicml-streaming", "torch")
    augmentation = "`torch.rand`"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        size = 100 * len(shards[0])  # bytes of a shard
        with MDSWriter(out=folder, columns={"id": "int"}, size_limit=size) as writer:
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
        torch.manual_seed(config.seed)
        dataset = Numbers(
            config.scale,
            local=config.data,
            shuffle=config.shuffle != "none",
            shuffle_seed=config.seed,
            shuffle_block_size=config.window if config.shuffle == "buffer" else None,
            num_canonical_nodes=1,
            batch_size=config.rows,
        )
        self._loader = StreamingDataLoader(
            dataset,
            batch_size=config.rows,
            num_workers=2,
            prefetch_factor=config.prefetch,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        for numbers, random in self._loader:
            yield numbers.tolist(), random.tolist()

    def state(self) -> bytes:
        return json.dumps(self._loader.state_dict()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._loader.load_state_dict(json.loads(states[0]))
