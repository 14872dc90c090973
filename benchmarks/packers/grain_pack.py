"""Grain's packing: first fit, best fit, and concatenation.

`grain.experimental` documents ``FirstFitPackIterDataset``, ``BestFitPackIterDataset`` and
``ConcatThenSplitIterDataset``. The images of a `MapDataset` are shuffled and split between the
processes by ``dataset[process::processes]``. The state of the iterator is written as JSON. Each
token is one int32; reading images without packing is subtracted from the CPU time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from packers import protocol
from packers.protocol import Packing, Row, packing_of, parts_of


class Images:
    """Images whose tokens contain their number + 1; counts the images that were read."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def __len__(self) -> int:
        return len(self._packer.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._packer.reads += 1
        return {"tokens": np.full(self._packer.lengths[number], number + 1, np.int32)}


class Packer(protocol.Packer):
    """A packing transformation of Grain: "first", "best" or "concat"."""

    packages = ("grain",)

    def __init__(self, job: protocol.Job, **options: Any) -> None:
        super().__init__(job, **options)
        self._iterator = iter(self.dataset())

    def images(self) -> Any:
        """Returns the images of an epoch, without threads."""
        ds = grain.MapDataset.source(Images(self)).seed(self.job.seed).shuffle()
        ds = ds[self.job.process :: self.job.processes]
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return ds.to_iter_dataset(options)

    def dataset(self) -> Any:
        """Returns the rows of an epoch."""
        length = {"tokens": self.job.row}
        if self.options["kind"] == "concat":
            return grain.experimental.ConcatThenSplitIterDataset(
                self.images(), length_struct=length
            )
        kinds = {
            "first": grain.experimental.FirstFitPackIterDataset,
            "best": grain.experimental.BestFitPackIterDataset,
        }
        return kinds[self.options["kind"]](
            self.images(), length_struct=length, num_packing_bins=self.options["bins"]
        )

    def work(self) -> list[Any]:
        return [row["tokens"] for row in iter(self.dataset())]

    def without(self) -> None:
        for _ in iter(self.images()):
            pass

    def packing(self, result: list[Any]) -> Packing:
        return packing_of(result, self.lengths)

    def batches(self) -> Iterator[list[Row]]:
        while rows := [
            parts_of(row["tokens"]) for _, row in zip(range(self.job.rows), self._iterator)
        ]:
            yield rows

    def state(self) -> str:
        return json.dumps(self._iterator.get_state())

    def load(self, states: Sequence[str]) -> None:
        self._iterator.set_state(json.loads(states[self.job.process % len(states)]))

    def elastic(self) -> str:
        """Returns the error of Grain's ElasticIterator over packed rows; empty if it has none."""
        shard = grain.sharding.ShardOptions(self.job.process, self.job.processes)
        try:
            next(iter(grain.experimental.ElasticIterator(self.dataset(), self.job.batch, shard)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
