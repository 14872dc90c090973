"""Grain's MapDataset.

https://google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html: the global
shuffle for ArrayRecord, the hierarchical shuffle with a window, and the state of the iterator,
which `grain.checkpoint` writes as JSON. ``random_map`` takes Grain's random generator. Records are
split between the processes by ``dataset[process::processes]``, and an evaluation pads with
`batch_and_pad`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from loaders.protocol import Batch, Config, Loader, own


def write_array_records(folder: str, shards: Sequence[Sequence[int]]) -> None:
    """Writes an ArrayRecord file for each shard."""
    from array_record.python.array_record_module import ArrayRecordWriter

    for index, shard in enumerate(shards):
        path = pathlib.Path(folder) / f"{index:03d}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for number in shard:
            writer.write(str(number).encode())
        writer.close()


def open_source(config: Config) -> Any:
    """Returns the data source over all files."""
    files = sorted(map(str, pathlib.Path(config.data).glob("*.array_record")))
    return grain.sources.ArrayRecordDataSource(files)


class Augment(grain.transforms.RandomMap):
    """Adds a random number to the number of a record."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def random_map(self, element: bytes, rng: np.random.Generator) -> dict[str, Any]:
        return {"id": np.int64(element), "random": rng.uniform() * self._scale}


def rows(batch: dict[str, Any]) -> Batch:
    """Returns a batch without padded rows, whose number is -1."""
    keep = batch["id"] >= 0
    return batch["id"][keep].tolist(), batch["random"][keep].tolist()


class Adapter(Loader):
    """`MapDataset` with Grain's threads, and batches of the `IterDataset`."""

    title = "Grain, IterDataset.batch"
    packages = ("grain",)
    stream = True
    augmentation = "`random_map`"

    write = staticmethod(write_array_records)

    def __init__(self, config: Config) -> None:
        self._config = config
        ds = grain.MapDataset.source(open_source(config)).seed(config.seed)
        if config.shuffle == "full":
            ds = ds.shuffle()
        if not config.evaluation:
            ds = ds.repeat()
        ds = ds.random_map(Augment(config.scale))[config.process :: config.processes]
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=config.prefetch)
        self._iterator = iter(self.batched(ds, config, options))

    @staticmethod
    def batched(ds: Any, config: Config, options: Any) -> Any:
        """Returns an IterDataset of batches, with a window if the configuration has one."""
        ds = ds.to_iter_dataset(options)
        if config.shuffle == "buffer":
            ds = grain.experimental.WindowShuffleIterDataset(
                ds, window_size=config.window, seed=config.seed
            )
        return ds.batch(config.rows)

    def batches(self, epoch: int) -> Iterator[Batch]:
        yield from map(rows, self._iterator)

    def state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator.set_state(json.loads(own(states, self._config)))
