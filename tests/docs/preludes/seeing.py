"""An iterator, a training step, and a module with an iterator function of images."""

import pathlib

import numpy as np
from nvidia.dali import fn, types
from page_data import draw_folder

from dalijax import data_iterator, sources


@data_iterator(output_map=["x"], auto_reset=True)
def train(number):
    return fn.cast(number, dtype=types.FLOAT)


numbers = sources.Arrays({"number": np.arange(256, dtype=np.int32)[:, None]})
iterator = train(source=numbers, batch_size=4, device_id=None)


def step(batch):
    assert batch["x"].shape == (4, 1)


draw_folder(count=32)
pathlib.Path("my_data.py").write_text(
    """
from nvidia.dali import fn
from dalijax import data_iterator

@data_iterator(output_map=["images", "labels"], reader_name="reader")
def train(data_dir):
    data, label = fn.readers.file(file_root=data_dir, name="reader")
    return fn.resize(fn.decoders.image(data), size=(64, 64)), label
"""
)
