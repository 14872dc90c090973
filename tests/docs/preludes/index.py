"""The data set and the training step."""

import pathlib

from pictures import make_pictures

pathlib.Path("imagenet").mkdir()
make_pictures(pathlib.Path("drawn"), count=300).rename("imagenet/train")
steps = []


def step(images, labels, mask):
    assert images.shape == (256, 224, 224, 3) and labels.shape == mask.shape == (256,)
    steps.append(int(mask.sum()))
    assert steps in ([256], [256, 44])
