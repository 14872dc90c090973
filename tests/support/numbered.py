"""A graph of numbered samples, and the numbers in its batches."""

import numpy as np
from nvidia.dali import fn


def graph(files, shuffle=False, padded=True, stick=False, shard_id=0, num_shards=1, count=11):
    """The number of each of the first files, and a draw that shows the random state."""
    label = fn.readers.file(
        files=files[:count],
        labels=list(range(count)),
        name="reader",
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
