"""Megatron-Energon's savable data loader.

docs/source/basic/save_restore.md of https://github.com/NVIDIA/Megatron-Energon: each process saves
its own state, which ``energon checkpoint redist`` redistributes for another number of processes. As
docs/source/advanced/repro_scaling.md requires, the number of workers of all processes is constant,
and a global batch consists of micro-batches of each worker. A full shuffle is
``max_samples_per_sequence=1``, and a buffer is ``shuffle_buffer_size``. ``restore_seeds=True``
seeds Python's random numbers for each sample.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import random
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.tools.checkpoint import command_redist

from loaders.protocol import Batch, Config, Loader

WORKERS = 4  # of all processes
MICRO_BATCH = 5
DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@edataclass
class Number(Sample):
    """A record, and its random number."""

    number: int
    random: float = 0.0


@stateless
def cook(sample: dict[str, Any]) -> Number:
    """Returns the record of an entry of a tar."""
    return Number(**basic_sample_keys(sample), number=int(sample["txt"]))


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Adds a random number to each record, and makes lists of batches."""

    cookers = (Cooker(cook),)
    decoder = None

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Number) -> Number:
        return dataclasses.replace(sample, random=random.random() * self._scale)

    @stateless
    def batch(self, samples: list[Number]) -> list[Number]:
        return samples

    @stateless
    def encode_batch(self, batch: list[Number]) -> list[Number]:
        return batch


class Adapter(Loader):
    """Tars of WebDataset, with four worker processes."""

    title = "Megatron-Energon"
    packages = ("megatron-energon", "torch")
    stream = True
    augmentation = "`random`, seeded for each sample"

    @staticmethod
    def write(folder: str, shards: Sequence[Sequence[int]]) -> None:
        names = [f"{index:03d}.tar" for index in range(len(shards))]
        for name, shard in zip(names, shards):
            with tarfile.open(pathlib.Path(folder) / name, "w") as tar:
                for number in shard:
                    entry = tarfile.TarInfo(f"{number:06d}.txt")
                    entry.size = len(str(number))
                    tar.addfile(entry, io.BytesIO(str(number).encode()))
        path = pathlib.Path(folder)
        BaseWebdatasetFactory.prepare_dataset(
            path, names, split_parts_patterns=[("train", ".*"), ("val", ".*")], workers=1
        )
        (path / ".nv-meta" / "dataset.yaml").write_text(DATASET)

    def __init__(self, config: Config) -> None:
        self._config = config
        workers = WorkerConfig(
            rank=config.process,
            world_size=config.processes,
            num_workers=1 if config.evaluation else WORKERS // config.processes,
            seed_offset=config.seed,
        )
        if config.evaluation:
            dataset = get_val_dataset(
                config.data,
                worker_config=workers,
                batch_size=config.rows,
                task_encoder=Encoder(config.scale),
            )
        else:
            dataset = get_train_dataset(
                config.data,
                worker_config=workers,
                batch_size=MICRO_BATCH,
                shuffle_buffer_size=config.window if config.shuffle == "buffer" else None,
                max_samples_per_sequence=None if config.shuffle == "buffer" else 1,
                task_encoder=Encoder(config.scale),
            )
        self._loader = get_savable_loader(dataset, prefetch_factor=config.prefetch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        samples: list[Number] = []
        for micro_batch in self._loader:
            samples += micro_batch
            if len(samples) == self._config.rows or self._config.evaluation:
                yield [s.number for s in samples], [s.random for s in samples]
                samples = []

    def state(self) -> bytes:
        packed = io.BytesIO()
        torch.save(self._loader.save_state_rank(), packed)
        return packed.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        processes, process = self._config.processes, self._config.process
        with tempfile.TemporaryDirectory() as name:
            old, new = pathlib.Path(name, "old"), pathlib.Path(name, "new")
            old.mkdir(), new.mkdir()
            files = [old / f"rank{number}.pth" for number in range(len(states))]
            for path, state in zip(files, states):
                path.write_bytes(state)
            if len(states) != processes:
                command_redist.callback([EPath(path) for path in files], EPath(new), processes)
                files = [new / f"rank{number}.pth" for number in range(processes)]
            state = torch.load(files[process], weights_only=False)
        self._loader.restore_state_rank(state)
