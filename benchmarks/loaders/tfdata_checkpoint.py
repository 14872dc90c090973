"""tf.data with iterator checkpoints.

https://www.tensorflow.org/guide/data#iterator_checkpointing: `tf.train.Checkpoint` saves the
iterator, whose shuffle buffers are part of the checkpoint. Stateful random ops are not, so the
random numbers are stateless, with a counter as their seed, as in
https://www.tensorflow.org/tutorials/images/data_augmentation (option 1). Each process takes
``shard(processes, process)`` of the shuffled records. The docstring of `tf.data.Dataset.shard`
recommends to shard before a shuffle, so that a process reads only its own records; then the order
depends on the number of processes.
"""

from __future__ import annotations

import io
import pathlib
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from loaders.protocol import Batch, Config, Loader, own

FULL = 2000  # records of a shuffle buffer that is larger than the data set


def write_tfrecords(folder: str, shards: Sequence[Sequence[int]]) -> None:
    """Writes a TFRecord for each shard."""
    for index, shard in enumerate(shards):
        with tf.io.TFRecordWriter(f"{folder}/{index:03d}.tfrecord") as writer:
            for number in shard:
                writer.write(str(number).encode())


def dataset(config: Config, skip: int = 0) -> Any:
    """Returns the batches of a process.

    Args:
        config: The configuration.
        skip: Number of records of all processes to skip.
    """
    tf.random.set_seed(config.seed)
    files = sorted(map(str, pathlib.Path(config.data).glob("*.tfrecord")))
    ds = tf.data.TFRecordDataset(files)
    if config.shuffle != "none":
        size = FULL if config.shuffle == "full" else config.window
        ds = ds.shuffle(size, seed=config.seed, reshuffle_each_iteration=True)
    if not config.evaluation:
        ds = ds.repeat()

    def augment(record: Any, counter: Any) -> Any:
        seed = tf.stack([tf.cast(config.seed, tf.int64), counter])
        number = tf.strings.to_number(record, tf.int64)
        return number, tf.random.stateless_uniform([], seed) * config.scale

    ds = tf.data.Dataset.zip((ds, tf.data.Dataset.counter())).skip(skip)
    ds = ds.shard(config.processes, config.process)
    ds = ds.map(augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return ds.batch(config.rows).prefetch(config.prefetch)


def rows(batch: Any) -> Batch:
    """Returns the numbers and random numbers of a batch."""
    numbers, random = batch
    return numbers.numpy().tolist(), random.numpy().tolist()


class Adapter(Loader):
    """A dataset whose iterator is in a `tf.train.Checkpoint`."""

    title = "tf.data, checkpoint"
    packages = ("tensorflow-cpu",)
    stream = True
    augmentation = "`stateless_uniform` of a counter"

    write = staticmethod(write_tfrecords)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._iterator = iter(dataset(config))
        self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)

    def batches(self, epoch: int) -> Iterator[Batch]:
        yield from map(rows, self._iterator)

    def state(self) -> bytes:
        packed = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            self._checkpoint.write(f"{folder}/checkpoint")
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(folder, ".")
        return packed.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(own(states, self._config))) as tar:
                tar.extractall(folder, filter="data")
            self._checkpoint.read(f"{folder}/checkpoint").assert_consumed()
