"""LanceDB's StreamingDataset.

https://docs.lancedb.com/training/resuming: a dataset for each epoch, the same ``num_splits`` for
all numbers of processes, and ``merge_state_dicts`` of the states of all processes. As
checkpointing and distributed-training recommend, the global batch is a multiple of ``num_splits``.
The dataset reads in its own threads, without worker processes. Windows are ``shuffle_clump_size``.
LanceDB has no random numbers for transforms; they are drawn from the seed, the epoch and the
record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from loaders.protocol import Batch, Config, Loader

SPLITS = 4  # the global batches of 1, 2 and 4 processes are equal


class Adapter(Loader):
    """A local table with a row for each record."""

    title = "LanceDB, StreamingDataset"
    packages = ("lancedb", "torch")
    augmentation = "of seed, epoch and record"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        table = None
        for shard in shards:
            rows = pa.table({"id": pa.array(shard, pa.int64())})
            if table is None:
                table = lancedb.connect(folder).create_table("records", rows)
            else:
                table.add(rows)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._table = lancedb.connect(config.data).open_table("records")
        self._dataset: Any = None
        self._saved: Any = {}

    def _transform(self, epoch: int, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        numbers = rows.column("id").to_pylist()
        seeds = ([self._config.seed, epoch, number] for number in numbers)
        random = (np.random.default_rng(seed).uniform() * self._config.scale for seed in seeds)
        return [{"id": number, "random": value} for number, value in zip(numbers, random)]

    def batches(self, epoch: int) -> Iterator[Batch]:
        config = self._config
        self._dataset = StreamingDataset(
            self._table,
            num_splits=config.processes if config.evaluation else SPLITS,
            shuffle=config.shuffle != "none",
            shuffle_seed=config.seed,
            shuffle_clump_size=config.window // 10 if config.shuffle == "buffer" else None,
            epoch=epoch,
            rank=config.process,
            world_size=config.processes,
            io_queue_depth=config.prefetch,
            transform=lambda rows: self._transform(epoch, rows),
        )
        if self._saved.get("epoch") == epoch:
            self._dataset.load_state_dict(self._saved)
        for batch in StreamingDataLoader(self._dataset, batch_size=config.rows):
            yield batch["id"].tolist(), batch["random"].tolist()

    def state(self) -> bytes:
        return json.dumps(self._dataset.state_dict()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._saved = StreamingDataset.merge_state_dicts([json.loads(state) for state in states])
