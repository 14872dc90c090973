"""A source of numbers whose records can be recognized, and the expected content of its batches."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from dalijax.core.order.shuffle import shuffled
from dalijax.core.random.hashing import column_keys, fold, uniform
from dalijax.sources import Field, Source


class Numbers(Source):
    """A source whose record i contains the number i, a gray JPEG of value 3 * i, and a text.

    Args:
        count: Number of records.
        unreadable: Records that raise when they are read.
        undecodable: Records whose image is invalid.
    """

    fields = {
        "number": Field(np.dtype(np.int32)),
        "data": Field(np.dtype(np.uint8), 1),
        "text": Field(None),
    }

    def __init__(self, count, unreadable=(), undecodable=()):
        self.count, self.unreadable, self.undecodable = count, set(unreadable), set(undecodable)
        self.reads = []

    def __len__(self):
        return self.count

    def image(self, index):
        """Returns the encoded image of a record; its size depends on the record."""
        file = io.BytesIO()
        shape = (16 + index % 3, 16 + index % 2, 3)
        Image.fromarray(np.full(shape, 3 * index % 256, np.uint8)).save(file, "jpeg", quality=100)
        data = np.frombuffer(file.getvalue(), np.uint8).copy()
        if index in self.undecodable:
            data[60:] = 7
        return data

    def read(self, indices, names):
        indices = [int(i) for i in indices]
        self.reads.append(indices)
        for i in indices:
            if i in self.unreadable:
                raise OSError(f"number {i} is gone")
        every = {
            "number": np.array(indices, np.int32),
            "data": [self.image(i) for i in indices] if "data" in names else [],
            "text": [f"text {i}" for i in indices],
        }
        return {name: every[name] for name in names}

    def sizes(self, indices, name, data):
        return np.array([(16 + i % 3, 16 + i % 2) for i in indices], np.int32)

    def name(self, index):
        return f"number {index}"

    def identity(self):
        return f"numbers of {self.count}"


def expected(samples, count, seed, shuffle=True, draw="#0"):
    """Returns the numbers of some samples of the stream, and their first random draw."""
    numbers, draws = [], []
    for sample in samples:
        epoch, position = divmod(int(sample), count)
        record = int(shuffled([position], count, seed, epoch)[0]) if shuffle else position
        numbers.append(record)
        draws.append(uniform(fold(seed, epoch, np.array([record])), column_keys(draw, 1))[0, 0])
    return np.array(numbers, np.int32), np.array(draws, np.float32)
