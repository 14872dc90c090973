"""DALI's JAX plugin with DALI's checkpoints.

https://docs.nvidia.com/deeplearning/dali/user-guide/docs/advanced_topics_checkpointing.html
describes ``enable_checkpointing`` and ``checkpoints()``, and advanced_topics_sharding.html the
shards and ``pad_last_batch``. ``reset()`` follows each epoch, since a checkpoint after the last
batch of an epoch with ``auto_reset`` belongs to the next epoch. The iterator does not support
PARTIAL and has no mask. As the pages recommend for an evaluation, the last batch is padded.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.plugin.jax import data_iterator

from loaders.protocol import Batch, Config, Loader, own


def write_files(folder: str, shards: Sequence[Sequence[int]]) -> None:
    """Writes a file for each record, and the list of the files."""
    root = pathlib.Path(folder)
    numbers = [number for shard in shards for number in shard]
    for number in numbers:
        (root / f"{number:06d}.txt").write_text(str(number))
    (root / "numbers.json").write_text(json.dumps(numbers))


def graph(
    files: Sequence[str],
    labels: Sequence[int],
    shuffle: int,
    scale: float,
    shard_id: int = 0,
    num_shards: int = 1,
) -> Any:
    """Returns the number of a record, and a random number."""
    _, label = fn.readers.file(
        files=files,
        labels=labels,
        name="reader",
        random_shuffle=shuffle > 0,
        initial_fill=max(1, shuffle),
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=True,
    )
    random = fn.random.uniform(range=[0.0, scale], dtype=types.FLOAT)
    return label, random


def arguments(config: Config) -> dict[str, Any]:
    """Returns the arguments of the graph and of the pipeline."""
    root = pathlib.Path(config.data)
    numbers = json.loads((root / "numbers.json").read_text())
    size = {"full": len(numbers), "buffer": config.window, "none": 0}[config.shuffle]
    return {
        "files": [str(root / f"{number:06d}.txt") for number in numbers],
        "labels": numbers,
        "shuffle": size,
        "scale": config.scale,
        "seed": config.seed,
        "num_threads": 1,
        "prefetch_queue_depth": config.prefetch,
    }


class Adapter(Loader):
    """`nvidia.dali.plugin.jax.data_iterator` over `fn.readers.file`, a shard for each process."""

    title = "DALI's JAX plugin"
    packages = ("nvidia-dali-cuda120", "jax")
    augmentation = "`fn.random`"

    write = staticmethod(write_files)

    def __init__(self, config: Config) -> None:
        self._config, self._iterator = config, None

    def _open(self, checkpoints: Any = None) -> Any:
        jax.config.update("jax_platforms", "cpu")
        create = data_iterator(graph, output_map=["label", "random"], reader_name="reader")
        return create(
            **arguments(self._config),
            batch_size=self._config.rows,
            shard_id=self._config.process,
            num_shards=self._config.processes,
            device_id=None,
            enable_checkpointing=True,
            checkpoints=checkpoints,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        self._iterator = self._iterator or self._open()
        for batch in self._iterator:
            yield (
                np.asarray(batch["label"]).ravel().tolist(),
                np.asarray(batch["random"]).ravel().tolist(),
            )
        self._iterator.reset()

    def state(self) -> bytes:
        assert self._iterator is not None
        return bytes(self._iterator.checkpoints()[0])

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator = self._open([own(states, self._config)])
