"""The data set, the training step, Grain's records, and the function in a module."""

import pathlib

import grain
import jax
from page_data import draw_folder, read_records

draw_folder()
records = read_records()
valid = []


start, num_steps, num_epochs, state = 3, 5, 2, 0


def train_step(state, images, labels):
    assert images.shape[0] == labels.shape[0] == 256
    return state + 1


def step(images, labels, mask):
    assert images.shape == (256, 224, 224, 3) and labels.shape == mask.shape == (256,)
    valid.append(int(mask.sum()))
    assert valid in ([256], [256, 44])
    assert isinstance(images, jax.Array) and grain


pathlib.Path("my_data.py").write_text(
    """
from nvidia.dali import fn
from dalijax import augment, data_iterator

@data_iterator(output_map=["images", "labels"], mask="mask")
def train(data, label, *, draw):
    images = fn.decoders.image(data)
    return augment.random_resized_crop(images, size=224, flip=0.5, draw=draw), label
"""
)
