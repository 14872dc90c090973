"""HuggingFace datasets: IterableDataset with its own state.

https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration:
``state_dict`` and ``load_state_dict``. The page warns that shuffle buffers are lost, so the best
shuffle is that of a map-style dataset, before ``to_iterable_dataset``
(https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable), with a new seed for each epoch.
Processes share the records by `split_dataset_by_node`. datasets has no random numbers for
transforms; they are drawn from the seed, the epoch and the index that ``map`` passes. The state
contains the epoch, since a state at the end of an epoch would make the next epoch empty.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node

from loaders.protocol import Batch, Config, Loader, own


def write_json_lines(folder: str, shards: Sequence[Sequence[int]]) -> None:
    """Writes a file of lines of JSON for each shard."""
    for index, shard in enumerate(shards):
        lines = "".join(json.dumps({"id": number}) + "\n" for number in shard)
        (pathlib.Path(folder) / f"{index:03d}.jsonl").write_text(lines)


def dataset(config: Config, epoch: int, shards: int = 1) -> Any:
    """Returns the records of a process in an epoch, with their random numbers."""
    files = sorted(map(str, pathlib.Path(config.data).glob("*.jsonl")))
    options = {"data_files": files, "split": "train", "cache_dir": f"{config.data}/cache"}
    if config.shuffle == "full":
        ds = datasets.load_dataset("json", **options).shuffle(seed=config.seed + epoch)
        ds = ds.to_iterable_dataset(num_shards=shards)
    else:
        ds = datasets.load_dataset("json", streaming=True, **options)
        if config.shuffle == "buffer":
            ds = ds.shuffle(seed=config.seed, buffer_size=config.window)
            ds.set_epoch(epoch)

    def augment(record: dict[str, Any], index: int) -> dict[str, Any]:
        generator = np.random.default_rng([config.seed, epoch, index])
        return {"id": record["id"], "random": generator.uniform() * config.scale}

    ds = ds.map(augment, with_indices=True)
    return split_dataset_by_node(ds, config.process, config.processes)


class Adapter(Loader):
    """`IterableDataset`, whose records the trainer combines into batches, without workers."""

    title = "HuggingFace datasets"
    packages = ("datasets",)
    augmentation = "of seed, epoch and index"

    write = staticmethod(write_json_lines)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._dataset: Any = None
        self._epoch = -1
        self._saved: Any = {}

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._dataset, self._epoch = dataset(self._config, epoch), epoch
        if self._saved.get("epoch") == epoch:
            self._dataset.load_state_dict(self._saved["state"])
        records = iter(self._dataset)
        while batch := list(itertools.islice(records, self._config.rows)):
            yield [record["id"] for record in batch], [record["random"] for record in batch]

    def state(self) -> bytes:
        return json.dumps({"epoch": self._epoch, "state": self._dataset.state_dict()}).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._saved = json.loads(own(states, self._config))
