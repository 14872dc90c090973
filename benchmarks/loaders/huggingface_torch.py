"""HuggingFace datasets in torchdata's StatefulDataLoader.

https://huggingface.co/docs/datasets/use_with_pytorch#checkpoint-and-resume. The records are those
of `loaders.huggingface`, in eight shards, for two workers in each of up to four processes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from loaders.huggingface import dataset, write_json_lines
from loaders.protocol import Batch, Config, Loader, own

WORKERS, SHARDS = 2, 8


class Adapter(Loader):
    """`StatefulDataLoader` over an `IterableDataset`, with two worker processes."""

    title = "HuggingFace datasets, StatefulDataLoader"
    packages = ("datasets", "torchdata", "torch")
    augmentation = "of seed, epoch and index"

    write = staticmethod(write_json_lines)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loader: Any = None
        self._epoch = -1
        self._saved: Any = {}

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._loader = StatefulDataLoader(
            dataset(self._config, epoch, SHARDS),
            batch_size=self._config.rows,
            num_workers=WORKERS,
            prefetch_factor=self._config.prefetch,
        )
        self._epoch = epoch
        if self._saved.get("epoch") == epoch:
            self._loader.load_state_dict(self._saved["state"])
        for batch in self._loader:
            yield batch["id"].tolist(), batch["random"].tolist()

    def state(self) -> bytes:
        packed = io.BytesIO()
        torch.save({"epoch": self._epoch, "state": self._loader.state_dict()}, packed)
        return packed.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        self._saved = torch.load(io.BytesIO(own(states, self._config)), weights_only=False)
