"""Buckets on a GPU: the crops of a CPU, within the rounding of decoders and of the resize."""

import io

import jax
import numpy as np
import pytest
from nvidia.dali import backend, fn
from PIL import Image

from dalijax import data_iterator, sources
from drawing import drawn_image

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
BUCKETS = [(64, 64), (48, 80), (80, 48)]


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def batches(device):
    sizes = np.random.default_rng(0).integers(30, 200, (60, 2)).tolist()
    records = [
        {"data": jpeg(drawn_image(k, *size)), "label": np.int32(k)} for k, size in enumerate(sizes)
    ]
    source = sources.Buckets(sources.Records(records), buckets=BUCKETS)

    @data_iterator(source=source, mask=True)
    def train(data, label, *, bucket):
        images = fn.decoders.image(data, device=device)
        window = bucket.window(images, flip=0.5)
        return {
            "image": window.image(images),
            "central": bucket.crop(images, random=False),
            "numbers": bucket.conditioning(window),
            "size": bucket.size(),
            "label": label,
        }

    return [
        {name: np.asarray(array) for name, array in batch.items()}
        for batch in train(batch_size=8, seed=3)
    ]


def test_batches_are_those_of_a_cpu():
    found, expected = batches("mixed"), batches("cpu")
    assert len(found) == len(expected)
    assert {batch["image"].shape[1:3] for batch in found} == {*BUCKETS}
    for batch, other in zip(found, expected):
        for name in ("numbers", "size", "label", "mask"):
            np.testing.assert_array_equal(batch[name], other[name])
        for name in ("image", "central"):
            difference = np.abs(batch[name].astype(int) - other[name].astype(int))
            assert batch[name].shape == other[name].shape and difference.mean() < 2
