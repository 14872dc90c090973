"""Levanter's data loader over a cache.

Levanter's trainer (levanter/main/train_lm.py) saves its step and calls ``iter_from_step``. A batch
size that changes at a step is a schedule of ``train_batch_size``. Epochs come from
`MixtureDataset`, which restarts a data set at its end and shuffles its blocks. Windows are
``block_shuffle``. ``map`` with a key folds the index of the example into the key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils  # noqa: F401 - the loader needs it
from levanter.data.loader import DataLoader
from levanter.data.mixture import MixtureDataset
from levanter.schedule import ScheduleStep
from levanter.store.cache import SerialCacheWriter, TreeCache

from loaders.protocol import Batch, Config, Loader

EXAMPLE = {"id": np.zeros((1,), np.int32)}


def augment(example: dict[str, Any], scale: float, *, key: Any) -> dict[str, Any]:
    """Returns a record with a random number; "valid" is 0 in rows that the loader pads."""
    random = np.asarray(jax.random.uniform(key)) * np.float32(scale)
    number = np.asarray(example["id"], np.int32)[0]
    return {"id": number, "random": random, "valid": np.ones((), np.int32)}


class Adapter(Loader):
    """A cache in Levanter's format, read by the loader's own thread."""

    title = "Levanter"
    packages = ("marin-levanter",)
    stream = True
    augmentation = "`map` with a key"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        with SerialCacheWriter(folder, EXAMPLE) as writer:
            for shard in shards:
                writer.write_batch([{"id": np.asarray([number], np.int32)} for number in shard])

    def __init__(self, config: Config) -> None:
        self._config = config
        if config.processes > 1:
            jax.distributed.initialize(
                f"localhost:{config.port}", config.processes, config.process, [0]
            )
        # Warnings of slow reads, whose times differ between runs.
        logging.getLogger("levanter.data.loader").setLevel(logging.ERROR)
        self._step = 0
        self._schedule = [ScheduleStep(0, config.batch)]

    def batches(self, epoch: int) -> Iterator[Batch]:
        config = self._config
        order, mixture, random = jax.random.split(jax.random.key(config.seed), 3)
        data: Any = TreeCache.load(config.data, EXAMPLE)
        if config.shuffle == "full":
            data = data.shuffle(order)
        elif config.shuffle == "buffer":
            data = data.block_shuffle(
                io_block_size=config.window // 10, window_blocks=10, key=order
            )
        if not config.evaluation:
            block = config.window if config.shuffle == "buffer" else config.records
            data = MixtureDataset({"numbers": data}, {"numbers": 1.0}, block, key=mixture)
        loader = DataLoader(
            data.map(augment, config.scale, key=random),
            self._schedule,
            max_buffered_batches=config.prefetch,
            mesh=jax.sharding.Mesh(np.asarray(jax.devices()), ("data",)),
            axis_resources={"batch": "data"},
        )
        for batch in loader.iter_from_step(self._step):
            self._step += 1
            local = {
                name: np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])
                for name, array in batch.items()
            }
            valid = local["valid"] == 1
            yield local["id"][valid].tolist(), local["random"][valid].tolist()

    def state(self) -> bytes:
        schedule = [[step.start, step.value] for step in self._schedule]
        return json.dumps({"step": self._step, "batch_sizes": schedule}).encode()

    def load(self, states: Sequence[bytes]) -> None:
        state = json.loads(states[0])
        self._step = state["step"]
        schedule = [ScheduleStep(*step) for step in state["batch_sizes"]]
        if schedule[-1].value != self._config.batch:
            schedule.append(ScheduleStep(self._step, self._config.batch))
        self._schedule = schedule

    def close(self) -> None:
        if self._config.processes > 1:
            jax.distributed.shutdown()  # waits for the other processes
