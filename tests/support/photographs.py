"""Photographs, and the pipeline of the GPU tests."""

from __future__ import annotations

import numpy as np
import pytest
from nvidia.dali import fn, types
from PIL import Image

from numbered import read_files

COUNT, BATCH = 20, 6


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Smooth JPEGs of various sizes; the red of image i is about 10 * i."""
    folder = tmp_path_factory.mktemp("photos")
    rng, files = np.random.default_rng(0), []
    for i in range(COUNT):
        height, width = rng.integers(80, 200, 2)
        rows = np.linspace(0, 255, height)[:, None]
        cols = np.linspace(0, 255, width)[None]
        red = np.full((height, width), 10 * i)
        image = np.stack([red, rows + 0 * cols, cols + 0 * rows], -1).astype(np.uint8)
        files.append(str(folder / f"{i:03d}.jpg"))
        Image.fromarray(image).save(files[-1], quality=95, subsampling=0)
    return files


def graph(files, augment=False, shard_id=0, num_shards=1):
    data, label = read_files(
        files, pad_last_batch=True, stick_to_shard=True, shard_id=shard_id, num_shards=num_shards
    )
    if augment:
        image = fn.decoders.image_random_crop(data, device="mixed")
        image = fn.resize(image, size=(64, 64))
        image = fn.crop_mirror_normalize(image, mirror=fn.random.coin_flip(), dtype=types.FLOAT)
    else:
        image = fn.resize(fn.decoders.image(data, device="mixed"), size=(64, 64))
    return image, label.gpu()
