"""The graph of docs/pax.md, whose block needs another environment, and its folder of images."""

import pathlib

from nvidia.dali import fn

from dalijax import data_iterator

TRAIN = pathlib.Path("imagenet/train")


@data_iterator(output_map=["images", "labels"], reader_name="reader", mask="mask")
def train(data_dir, shard_id=0, num_shards=1):
    """Returns small images and their labels from DALI's reader."""
    jpegs, labels = fn.readers.file(
        file_root=data_dir, name="reader", shard_id=shard_id, num_shards=num_shards
    )
    images = fn.decoders.image(jpegs, device="cpu")
    return fn.resize(images, size=(32, 32)), fn.squeeze(labels, axes=0)
