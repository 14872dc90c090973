"""Augmentation on a GPU: the numbers of a CPU, and its pixels within the operators' rounding."""

import jax
import numpy as np
import pytest
from nvidia.dali import backend

from dalijax import augment
from drawing import FUNCTIONS, drawn_image, run

pytestmark = pytest.mark.skipif(
    backend.GetCUDADeviceCount() == 0 or jax.default_backend() != "gpu",
    reason="needs a GPU that DALI and JAX see, and DALIJAX_TEST_GPU=1",
)
ALL = FUNCTIONS | {
    "center_crop": lambda x, d: augment.center_crop(x, (24, 20), draw=d, resize=26),
    "auto_augment cifar10": lambda x, d: augment.auto_augment(x, draw=d, policy="cifar10"),
    "auto_augment svhn": lambda x, d: augment.auto_augment(x, draw=d, policy="svhn"),
    "chain": lambda x, d: augment.random_erasing(
        augment.rand_augment(
            augment.flip(augment.random_resized_crop(x, 32, draw=d, flip=0.5), draw=d), draw=d
        ),
        draw=d,
    ),
}


@pytest.mark.parametrize("function", ALL)
def test_a_gpu_has_the_numbers_of_a_cpu_and_its_pixels(function):
    def graph(images, draw):
        return ALL[function](images, draw), *draw.drawn

    given = [drawn_image(k, 40 + k % 3, 60 + k % 5) for k in range(96)]
    images, *drawn = run(graph, given)
    others, *again = run(graph, given, gpu=True)
    assert len(drawn) == len(again) > 0
    for one, two in zip(drawn, again):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(images, others):
        assert one.shape == two.shape and one.dtype == two.dtype
        difference = np.abs(one.astype(int) - two).max(axis=-1)
        # A pixel of a warped image that lies between two may be either, and equalizing, or a
        # threshold, amplifies rounding.
        assert np.mean(difference > 3) < 0.05
        assert difference.mean() < 3


def test_a_record_is_augmented_equally_in_every_batch_on_a_gpu():
    given = [drawn_image(k) for k in range(24)]
    (together,) = run(ALL["chain"], given, gpu=True)
    for start, stop in ((0, 1), (1, 9), (9, 24)):
        records = range(start, stop)
        (images,) = run(ALL["chain"], given[start:stop], records, gpu=True, conditionals=True)
        for one, two in zip(images, together[start:stop]):
            # The order in which a GPU sums a mean may depend on the batch.
            assert one.shape == two.shape and np.mean(one != two) < 1e-3


@pytest.mark.parametrize(
    "function",
    (
        lambda x, d: augment.color_jitter(
            x, draw=d, brightness=0.8, contrast=0.8, hue=0.5, probability=0.0
        ),
        lambda x, d: augment.grayscale(x, draw=d, probability=0.0),
        lambda x, d: augment.solarize(x, 128, draw=d, probability=0.0),
        lambda x, d: augment.gaussian_blur(x, 23, draw=d, probability=0.0),
    ),
)
def test_images_are_unchanged_with_probability_0_on_a_gpu(function):
    given = [drawn_image(k) for k in range(24)]
    (images,) = run(function, given, gpu=True)
    for one, two in zip(images, given):
        np.testing.assert_array_equal(one, two)


def test_a_flipped_crop_is_the_crop_turned_on_a_gpu():
    def cropped(flip):
        (images,) = run(
            lambda x, d: augment.random_resized_crop(x, 32, flip=flip, draw=d, name="crop"),
            [drawn_image(k, 40 + k, 60) for k in range(24)],
            gpu=True,
        )
        return images

    for one, two in zip(cropped(1.0), cropped(0.0)):
        difference = np.abs(one.astype(int) - two[:, ::-1])
        assert difference.max() <= 1 and np.mean(difference) < 0.01
