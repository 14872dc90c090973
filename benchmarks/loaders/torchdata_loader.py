"""torchdata's StatefulDataLoader over a map-style dataset.

https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html: ``state_dict`` and
``load_state_dict`` of the loader. The sampler is `StatefulDistributedSampler`, also for a single
process, so that the states of both have the same fields. torchdata has no random numbers for
transforms. The page saves PyTorch's generator of each worker; here they are drawn from the seed,
the epoch and the index, so that they do not depend on the batch.
"""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from loaders.protocol import Batch, Config, Loader, own


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    """Numbers of a list, and a random number.

    Attributes:
        epoch: Set by the trainer before each epoch, for whose worker processes it is copied.
    """

    def __init__(self, numbers: Sequence[int], seed: int, scale: float) -> None:
        self._numbers, self._seed, self._scale, self.epoch = numbers, seed, scale, 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: int) -> tuple[int, float]:
        generator = np.random.default_rng([self._seed, self.epoch, at])
        return self._numbers[at], generator.uniform() * self._scale


class Adapter(Loader):
    """`StatefulDataLoader` with two worker processes."""

    title = "torchdata, StatefulDataLoader"
    packages = ("torchdata", "torch")
    augmentation = "of seed, epoch and index"
    not_offered: ClassVar[Mapping[str, str]] = {
        "buffer": "samplers shuffle globally: docs.pytorch.org/data, stateful_dataloader_tutorial"
    }

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        numbers = [number for shard in shards for number in shard]
        (pathlib.Path(folder) / "numbers.json").write_text(json.dumps(numbers))

    def __init__(self, config: Config) -> None:
        self._config = config
        numbers = json.loads((pathlib.Path(config.data) / "numbers.json").read_text())
        self._dataset = Numbers(numbers, config.seed, config.scale)
        shuffle = config.shuffle != "none"
        self._sampler = StatefulDistributedSampler(
            self._dataset, config.processes, config.process, shuffle, config.seed
        )
        self._loader = StatefulDataLoader(
            self._dataset,
            batch_size=config.rows,
            sampler=self._sampler,
            num_workers=2,
            prefetch_factor=config.prefetch,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        self._dataset.epoch = epoch
        for numbers, random in self._loader:
            yield numbers.tolist(), random.tolist()

    def state(self) -> bytes:
        packed = io.BytesIO()
        torch.save(self._loader.state_dict(), packed)
        return packed.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        state = torch.load(io.BytesIO(own(states, self._config)), weights_only=False)
        self._loader.load_state_dict(state)
