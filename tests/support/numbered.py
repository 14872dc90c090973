"""DALI's file reader over numbered files, and the numbers in its batches."""

import numpy as np
from nvidia.dali import fn


def read_files(files, **options):
    """DALI's file reader, named "reader": each file and its number, [1], as its label."""
    return fn.readers.file(files=files, labels=list(range(len(files))), name="reader", **options)


def read_case(files, case, shard_id=0, num_shards=1, **options):
    """The same over as many of the files, with such padding and shards, as a `Case` says."""
    return read_files(
        files[: case.n],
        shard_id=shard_id,
        num_shards=num_shards,
        stick_to_shard=case.stick,
        pad_last_batch=case.padded,
        **options,
    )


def graph(files, shuffle=False, padded=True, stick=False, shard_id=0, num_shards=1, count=11):
    """The number of each of the first files, and a draw that shows the random state."""
    label = read_files(
        files[:count],
        random_shuffle=shuffle,
        pad_last_batch=padded,
        stick_to_shard=stick,
        shard_id=shard_id,
        num_shards=num_shards,
    )[1]
    return label, fn.random.uniform()


def numbers(batch):
    return np.asarray(batch["x"]).ravel().tolist()


def numbers_and_draws(batch):
    return numbers(batch), np.asarray(batch["u"]).tolist()
