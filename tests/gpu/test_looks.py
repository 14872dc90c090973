"""`dalijax.show` with arrays on a GPU, and the GPU memory in `dalijax.tune`."""

import jax
import numpy as np
import pytest
from nvidia.dali import backend, fn

from dalijax import data_iterator
from dalijax.show import show
from dalijax.tune import tune
from photographs import graph, photos  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)


def test_arrays_on_a_gpu_are_drawn(photos, tmp_path):
    train = data_iterator(graph, ["image", "x"], reader_name="reader", mask="mask")
    with train(photos, True, batch_size=4) as iterator:
        state = iterator.get_state()
        page = show(iterator, batches=2)
        assert iterator.get_state() == state and len(page.batches) == 2
        image = page.batches[0].outputs[0]
        assert image.device == str(jax.devices()[0]) and image.sharding == "one device"
        drawn = np.stack(image.samples)
        np.testing.assert_array_equal(drawn, np.asarray(next(iterator)["image"]))
    page.save(tmp_path / "page.html")
    page.save(tmp_path / "sheet.png")
    assert page.failures == [] and (tmp_path / "sheet.png").stat().st_size > 1000


def test_the_memory_of_deeper_queues_is_the_gpus():
    def numbers():
        return fn.random.uniform(range=(0.0, 1.0), shape=[1 << 20], device="gpu")

    found = tune(
        data_iterator(numbers, ["x"], size=64),
        batch_size=16,  # 64 MiB
        seconds=0.2,
        max_seconds=float("inf"),
        num_threads=[4],
        prefetch_queue_depth=[1, 8],
        progress=None,
    )
    memory = {value: one.gpu for value, one in found.memory["prefetch_queue_depth"].items()}
    assert memory[8] > memory[1] + 3 * 64 and memory[8] < 64 * 64
