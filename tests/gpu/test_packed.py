"""Packed rows on a GPU: DALI's buffers are the rows of a CPU, within the rounding of the resize."""

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


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def records(count):
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 120, (count, 2)).tolist()
    return [
        {
            "data": jpeg(drawn_image(k, *size)),
            "label": np.int32(k),
            "text": np.arange(1, 1 + k % 4, dtype=np.int32),
        }
        for k, size in enumerate(sizes)
    ]


def batches(count, rows=4, device="mixed"):
    source = sources.Packed(
        sources.Records(records(count)), length=64, images=6, patch=8, tokens=40, text="text"
    )

    @data_iterator(source=source, mask=True)
    def train(data, label, text, *, pack):
        images = fn.decoders.image(data, device=device)
        return {
            "patches": pack.patches(images),
            "label": pack.per_image(label),
            "label_on_gpu": pack.per_image(label.gpu()),
            "tokens": pack.tokens(text.gpu()),
        }

    return [
        {name: np.asarray(array) for name, array in batch.items()}
        for batch in train(batch_size=rows, seed=3)
    ]


@pytest.mark.parametrize("count", (3, 100))
def test_rows_on_a_gpu_are_those_of_a_cpu(count):
    on_gpu, on_cpu = batches(count), batches(count, device="cpu")
    assert len(on_gpu) == len(on_cpu) > 0
    for first, second in zip(on_gpu, on_cpu):
        for name in ("label", "label_on_gpu", "tokens", "mask", "segment_ids", "positions"):
            np.testing.assert_array_equal(first[name], second[name], name)
        np.testing.assert_array_equal(first["label"], first["label_on_gpu"])
        is_patch = (first["segment_ids"] > 0) & (first["positions"][..., 0] >= 0)
        assert not first["patches"][~is_patch].any()
        difference = np.abs(first["patches"].astype(int) - second["patches"])
        assert difference.mean() < 4  # the decoders of a CPU and of a GPU differ


def test_images_are_decoded_on_the_gpu():
    source = sources.Packed(sources.Records(records(9)), length=64, images=6, patch=8, tokens=40)

    @data_iterator(source=source)
    def train(data, *, pack):
        return {"patches": pack.patches(fn.decoders.image(data, device="mixed"))}

    batch = next(iter(train(batch_size=8)))
    assert {device.platform for device in batch["patches"].devices()} == {"gpu"}
