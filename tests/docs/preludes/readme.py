"""The data set, the training step, and Grain's records."""

import pathlib

import grain
import jax
import numpy as np
from pictures import make_pictures

pathlib.Path("imagenet").mkdir()
make_pictures(pathlib.Path("drawn"), count=300).rename("imagenet/train")
records = [
    {"image": np.fromfile(path, np.uint8), "label": np.int32(number)}
    for number, path in enumerate(sorted(pathlib.Path("imagenet/train").glob("*/*.jpg")))
]
valid = []


def step(images, labels, mask):
    assert images.shape == (256, 224, 224, 3) and labels.shape == mask.shape == (256,)
    valid.append(int(mask.sum()))
    assert valid in ([256], [256, 44])
    assert isinstance(images, jax.Array) and grain
