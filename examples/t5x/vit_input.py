"""The input of vit.py: images that DALI decodes and augments."""

from __future__ import annotations

from typing import Any

import nvidia.dali.fn as dali_fn
from nvidia.dali import backend

from dalijax import augment, data_iterator, sources
from dalijax.adapters.t5x import eval_get_dataset_fn, get_dataset_fn

GPU = backend.GetCUDADeviceCount() > 0


@data_iterator(output_map=["images", "labels"])
def train(data: Any, label: Any, *, draw: Any, side: int = 64) -> Any:
    """Defines training images, uint8 [side, side, 3], augmented as in examples/imagenet."""
    images = dali_fn.decoders.image(data, device="mixed" if GPU else "cpu")
    images = augment.random_resized_crop(images, side, flip=0.5, draw=draw)
    images = augment.color_jitter(images, brightness=0.3, contrast=0.3, saturation=0.3, draw=draw)
    images = augment.rand_augment(images, magnitude=9, draw=draw)
    return images, label.gpu() if GPU else label


@data_iterator(output_map=["images", "labels"])
def evaluation(data: Any, label: Any, *, draw: Any, side: int = 64) -> Any:
    """Defines evaluation images: center crops without augmentation."""
    images = dali_fn.decoders.image(data, device="mixed" if GPU else "cpu")
    images = augment.center_crop(images, side, resize=side * 8 // 7, draw=draw)
    return images, label.gpu() if GPU else label


def train_data(folder: str, partitioner: Any = None) -> Any:
    return get_dataset_fn(train, partitioner=partitioner, source=sources.Files(folder))


def evaluation_data(folder: str) -> Any:
    # The loss multiplies by "weights", which is 0 for padding, so no other output is masked.
    return eval_get_dataset_fn(evaluation, masked=(), source=sources.Files(folder), shuffle=False)
