"""dalijax over a source, as its pages on sources, states and elastic runs recommend.

docs/sources.md, docs/states.md, docs/epochs.md and docs/elastic.md: a tar, a `draw`, a JSON state,
``epochs``, and a sharding over all processes.
"""

from __future__ import annotations

import io
import json
import pathlib
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from dalijax import data_iterator, sources
from loaders.protocol import Batch, Config, Loader, own


def write_tars(folder: str, shards: Sequence[Sequence[int]]) -> None:
    """Writes a tar for each shard, with a member ``NUMBER.cls`` for each record."""
    for index, shard in enumerate(shards):
        with tarfile.open(pathlib.Path(folder) / f"{index:03d}.tar", "w") as tar:
            for number in shard:
                member, content = tarfile.TarInfo(f"{number:06d}.cls"), str(number).encode()
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def sharding_of(config: Config) -> Any:
    """Connects the processes, and returns the sharding of a batch; None for a single process."""
    jax.config.update("jax_platforms", "cpu")
    if config.processes == 1:
        return None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{config.port}", config.processes, config.process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def rows(batch: dict[str, Any]) -> Batch:
    """Returns the rows of this process that the mask keeps."""

    def local(array: Any) -> Any:
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data).reshape(-1) for shard in shards])

    mask = local(batch["mask"])
    return local(batch["label"])[mask].tolist(), local(batch["random"])[mask].tolist()


class Adapter(Loader):
    """An iterator over `dalijax.sources.Tar`."""

    title = "dalijax, source"
    packages = ("dalijax", "nvidia-dali-cuda120", "jax")
    augmentation = "`draw`"
    not_offered: ClassVar[Mapping[str, str]] = {
        "buffer": "sources shuffle without a buffer: docs/index.md"
    }

    write = staticmethod(write_tars)

    def __init__(self, config: Config) -> None:
        self._config = config

        def graph(label: Any, *, draw: Any) -> Any:
            return label + 0, draw.uniform() * np.float32(config.scale)

        sharding = sharding_of(config)
        self._iterator = data_iterator(graph, ["label", "random"], mask="mask")(
            source=sources.Tar(
                sorted(map(str, pathlib.Path(config.data).glob("*.tar"))), fields={"label": "cls"}
            ),
            batch_size=config.batch,
            seed=config.seed,
            shuffle=config.shuffle != "none",
            sharding=sharding,
            num_threads=1,
            prefetch_queue_depth=config.prefetch,
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        for _, batches in self._iterator.epochs(epoch + 1):
            yield from map(rows, batches)

    def state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def load(self, states: Sequence[bytes]) -> None:
        self._iterator.set_state(json.loads(own(states, self._config)))

    def close(self) -> None:
        self._iterator.close()
        if self._config.processes > 1:
            jax.distributed.shutdown()
