"""torchdata's StatefulDataLoader over a map-style dataset.

https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html ("Saving Custom State with
Map-Style Datasets"): the dataset has ``state_dict`` and ``load_state_dict`` for the state of
PyTorch's random generator in each worker. The sampler is `StatefulDistributedSampler`, also for a
single process, so that the states of both have the same fields.
"""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from loaders.protocol import Batch, Config, Loader, own


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    """Numbers of a list, and a random number; the generator's state is saved."""

    def __init__(self, numbers: Sequence[int], scale: float) -> None:
        self._numbers, self._scale = numbers, scale

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: int) -> tuple[int, float]:
        return self._numbers[at], float(torch.rand(())) * self._scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the worker's generator."""
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the worker's generator."""
        torch.set_rng_state(state["rng"])


class Adapter(Loader):
    """`StatefulDataLoader` with two worker processes."""

    title = "torchdata, StatefulDataLoader"
    packages = ("torchdata", "torch")
    augmentation = "`torch.rand`, saved"
    not_offered: ClassVar[Mapping[str, str]] = {
        "buffer": "samplers shuffle globally: docs.pytorch.org/data, stateful_dataloader_tutorial"
    }

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        numbers = [number for shard in shards for number in shard]
        (pathlib.Path(folder) / "numbers.json").write_text(json.dumps(numbers))

    def __init__(self, config: Config) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        numbers = json.loads((pathlib.Path(config.data) / "numbers.json").read_text())
        dataset = Numbers(numbers, config.scale)
        shuffle = config.shuffle != "none"
        self._sampler = StatefulDistributedSampler(
            dataset, config.processes, config.process, shuffle, config.seed
        )
        self._loader = StatefulDataLoader(
            dataset,
            batch_size=config.rows,
            sampler=self._sampler,
            num_workers=2,
            prefetch_factor=config.prefetch,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        for numbers, random in self._loader:
            yield numbers.tolist(), random.tolist()

    def state(self) -> bytes:
        packed = io.BytesIO()
        torch.save(self._loader.state_dict(), packed)
        return packed.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        state = torch.load(io.BytesIO(own(states, self._config)), weights_only=False)
        self._loader.load_state_dict(state)
