"""dalijax's rows: the plan of an epoch, and an iterator over `dalijax.sources.Packed`.

The tokens of an image are a text of its record, so that no image is decoded. The source reads the
lengths of all records first, which does not count, since the other packers are also given the
lengths of all images, or need none. Two processes share each batch by a sharding.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dalijax import data_iterator, sources
from dalijax.core.order.packing import packed_table
from dalijax.core.order.shuffle import shuffled
from loaders.dalijax_source import sharding_of
from loaders.protocol import Config
from packers import protocol
from packers.protocol import Ints, Job, Packing, Row, parts_of

MOST = 64  # images of a row


class Images:
    """Images whose tokens contain their number + 1; counts the images that were read."""

    def __init__(self, lengths: Any) -> None:
        self.reads = 0
        self._lengths, self._lock = lengths, threading.Lock()

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        with self._lock:
            self.reads += 1
        return {"tokens": np.full(self._lengths[number], number + 1, np.int32)}


def graph(tokens: Any, *, pack: Any) -> Any:
    """Packs the tokens."""
    return {"tokens": pack.tokens(tokens)}


class Packer(protocol.Packer):
    """The planned rows of dalijax."""

    packages = ("dalijax", "jax", "nvidia-dali-cuda120")

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self._epochs = itertools.count()
        self._iterator: Any = None
        self._images = Images(self.lengths)

    def work(self) -> tuple[Ints, Ints]:
        """Returns the order of the images [images], and where each row starts [rows + 1].

        Each call plans another epoch, because the order of an epoch is cached.
        """
        epoch, count = next(self._epochs), self.job.images
        order = shuffled(np.arange(count), count, self.job.seed, epoch)
        table = packed_table(self.lengths[order], self.job.row, MOST, epoch, self.job.seed, True)
        return order[table.positions], table.starts

    def packing(self, result: tuple[Ints, Ints]) -> Packing:
        order, starts = result
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        widths = np.full(len(starts) - 1, self.width)
        return Packing(order, rows, self.lengths[order], widths, self.lengths)

    @property
    def width(self) -> int:
        """Tokens of a row, with padding."""
        return self.job.row

    def iterator(self) -> Any:
        """Returns the iterator, which is made by the first call."""
        if self._iterator is None:
            job = self.job
            config = Config("", job.images, job.batch, job.processes, job.process, job.port)
            sharding = sharding_of(config)
            source = sources.Packed(
                sources.Records(self._images), None, text="tokens", length=job.row, images=MOST
            )
            self._images.reads = 0
            self._iterator = data_iterator(graph)(
                source=source,
                batch_size=job.batch,
                seed=job.seed,
                shuffle=True,
                sharding=sharding,
                num_threads=1,
                prefetch_queue_depth=1,
            )
        return self._iterator

    def batches(self) -> Iterator[list[Row]]:
        for batch in self.iterator():
            self.reads = self._images.reads
            shards = batch["tokens"].addressable_shards
            shards = sorted(shards, key=lambda shard: shard.index[0].start or 0)
            rows = [row for shard in shards for row in np.asarray(shard.data)]
            yield [images for row in rows if (images := parts_of(row))]

    def state(self) -> str:
        return json.dumps(self.iterator().get_state())

    def load(self, states: Sequence[str]) -> None:
        self.iterator().set_state(json.loads(states[self.job.process % len(states)]))

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            if self.job.processes > 1:
                jax.distributed.shutdown()


class Single(Packer):
    """One image per row, whose length is the largest number of tokens of an image."""

    @property
    def width(self) -> int:
        return self.job.tokens

    def work(self) -> tuple[Ints, Ints]:
        count = self.job.images
        order = shuffled(np.arange(count), count, self.job.seed, next(self._epochs))
        return order, np.arange(count + 1)
