"""Data that the pages' blocks assume: a folder of images, a graph, records for Grain."""

import os
import pathlib
import shutil

import numpy as np
from images import make_images
from nvidia.dali import fn

from dalijax import data_iterator

TRAIN = pathlib.Path("imagenet/train")


def draw_folder(count=300):
    """Draws imagenet/train: a folder of images for each class.

    The pages of a test run copy the images that the first page drew.
    """
    drawn = pathlib.Path(os.environ.get("DRAWN_IMAGES", "drawn"))
    shutil.copytree(make_images(drawn, count=count), TRAIN)


def paths():
    """Returns the files of the folder, sorted."""
    return sorted(TRAIN.glob("*/*.jpg"))


def read_records():
    """Returns encoded images, uint8 [bytes], and their numbers."""
    return [
        {"image": np.fromfile(path, np.uint8), "label": np.int32(number)}
        for number, path in enumerate(paths())
    ]


@data_iterator(output_map=["images", "labels"], reader_name="reader", mask="mask")
def train(data_dir, shard_id=0, num_shards=1):
    """Returns small images and their labels from DALI's reader."""
    jpegs, labels = fn.readers.file(
        file_root=data_dir, name="reader", shard_id=shard_id, num_shards=num_shards
    )
    images = fn.decoders.image(jpegs, device="cpu")
    return fn.resize(images, size=(32, 32)), fn.squeeze(labels, axes=0)
