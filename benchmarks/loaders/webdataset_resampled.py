"""WebDataset, which saves no state.

For long runs, its authors recommend ``resampled=True``: shards are drawn with replacement, and a
restart draws new shards (https://github.com/webdataset/webdataset, issues 234 and 271, and README).
A pass has a nominal length, ``with_epoch``. An evaluation reads each shard once, with
``split_by_node`` and ``split_by_worker``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import webdataset as wds

from loaders.protocol import Batch, Config, Loader


class Adapter(Loader):
    """Tars, with a shuffle buffer and two worker processes."""

    title = "WebDataset, resampled"
    packages = ("webdataset", "torch")
    augmentation = "`torch.rand`"
    not_offered: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("middle", "twice", "end", "after", "prefetch", "buffer", "2to2", "2to1", "2to4"),
            *("batch", "file", "order", "seed", "transform"),
        ),
        "no state; resampling instead: github.com/webdataset/webdataset/issues/234",
    )

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        for index, shard in enumerate(shards):
            with wds.TarWriter(f"{folder}/{index:03d}.tar") as writer:
                for number in shard:
                    writer.write({"__key__": f"{number:06d}", "cls": number})

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        files = sorted(map(str, pathlib.Path(config.data).glob("*.tar")))

        def split(sources: Any) -> Any:
            for index, source in enumerate(sources):
                if index % config.processes == config.process:
                    yield source

        def augment(sample: Any) -> tuple[int, float]:
            return sample["cls"], float(torch.rand(())) * config.scale

        ds = wds.WebDataset(
            files,
            resampled=not config.evaluation,
            shardshuffle=False,
            nodesplitter=split,
            seed=config.seed,
        )
        if config.shuffle != "none":
            ds = ds.shuffle(config.window)
        ds = ds.decode().map(augment).batched(config.rows, partial=config.evaluation)
        workers = min(2, len(files) // config.processes)
        loader = wds.WebLoader(
            ds, batch_size=None, num_workers=workers, prefetch_factor=config.prefetch
        )
        if not config.evaluation:
            loader = loader.with_epoch(config.records // config.batch)
        self._loader = loader

    def batches(self, epoch: int) -> Iterator[Batch]:
        for numbers, random in self._loader:
            yield list(numbers), list(random)

    def state(self) -> bytes:
        return b""

    def load(self, states: Sequence[bytes]) -> None:
        """Restarts without a state."""
