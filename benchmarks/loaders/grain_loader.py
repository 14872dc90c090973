"""Grain's DataLoader.

https://google-grain.readthedocs.io/en/latest/tutorials/data_loader_tutorial.html: an
`IndexSampler` with `ShardOptions`, and the state of the iterator, which is the
content of the file that `GrainCheckpointSave` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import grain

from loaders.grain_map import Augment, open_source, rows, write_array_records
from loaders.protocol import Batch, Config, Loader, own


class Adapter(Loader):
    """`DataLoader` with Grain's threads; starting worker processes would take most of the time."""

    title = "Grain, DataLoader"
    packages = ("grain",)
    stream = True
    augmentation = "`RandomMap`"
    not_offered: ClassVar[Mapping[str, str]] = {
        "buffer": "samplers shuffle globally: google-grain.readthedocs.io, data_loader/samplers"
    }

    write = staticmethod(write_array_records)

    def __init__(self, config: Config) -> None:
        self._config = config
        source = open_source(config)
        sampler = grain.samplers.IndexSampler(
            num_records=len(source),
            num_epochs=1 if config.evaluation else None,
            shard_options=grain.sharding.ShardOptions(
                shard_index=config.process,
                shard_count=config.processes,
                drop_remainder=not config.evaluation,
            ),
            shuffle=config.shuffle == "full",
            seed=config.seed,
        )
        loader = grain.DataLoader(
            data_source=source,
            sampler=sampler,
            operations=[
                Augment(config.scale),
                grain.transforms.Batch(config.rows, drop_remainder=False),
            ],
            worker_count=0,
            read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=config.prefetch),
        )
        self._iterator = iter(loader)

    def batches(self, epoch: int) -> Iterator[Batch]:
        yield from map(rows, self._iterator)

    def state(self) -> bytes:
        return bytes(self._iterator.get_state())

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator.set_state(own(states, self._config))
