"""DALI's file reader over numbered files, and the numbers in its batches."""

import numpy as np
from nvidia.dali import fn


def read_files(files, **options):
    """Returns each file and its number [1] from DALI's file reader, named "reader"."""
    return fn.readers.file(files=files, labels=list(range(len(files))), name="reader", **options)


def read_case(files, case, shard_id=0, num_shards=1, **options):
    """Returns the same for a `Case`, with its number of files, padding and shards."""
    return read_files(
        files[: case.n],
        shard_id=shard_id,
        num_shards=num_shards,
        stick_to_shard=case.stick,
        pad_last_batch=case.padded,
        **options,
    )


def graph(files, shuffle=False, padded=True, stick=False, shard_id=0, num_shards=1, count=11):
    """Defines the numbers of the first files, and a random number that shows the random state."""
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
