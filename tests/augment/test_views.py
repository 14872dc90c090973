"""Views of SimCLR, BYOL and DINO compared with NumPy and Pillow."""

import numpy as np
import pytest
from PIL import Image, ImageOps
from plain_colors import plain_blur, plain_jitter
from views import VIEWS, view

from dalijax.core.augment import windows
from drawing import drawn_image, numbers, run

COUNT = 12
ORIGINALS = [drawn_image(k, 120 + k % 3, 160) for k in range(COUNT)]
Resampling, Transpose = Image.Resampling, Image.Transpose


def plain_view(record, settings, name):
    """Computes a view from the numbers that the graph draws."""

    def drawn(part, columns):
        return numbers([record], f"{name}.{part}", columns)

    u = drawn("crop", windows.COLUMNS + 1).astype(np.float32)
    sizes = np.array([ORIGINALS[record].shape[:2]], np.int32)
    (start,), (end,) = windows.resized_crops(u, sizes, settings.scale, (3 / 4, 4 / 3))
    image = Image.fromarray(ORIGINALS[record]).resize(
        (settings.size, settings.size), Resampling.BILINEAR, box=(*start[::-1], *end[::-1])
    )
    if u[0, -1] < 0.5:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    *factors, coin = drawn("jitter", 5)[0]
    if coin < 0.8:
        *widths, hue = settings.jitter.values()
        ranges = [*((1 - width, 1 + width) for width in widths), (-hue, hue)]
        values = [low + u * (high - low) for u, (low, high) in zip(factors, ranges)]
        jittered = plain_jitter(np.asarray(image, float), *values)
        image = Image.fromarray(np.rint(jittered).astype(np.uint8))
    if drawn("gray", 1) < 0.2:
        image = image.convert("L").convert("RGB")
    sigma, coin = drawn("blur", 2)[0]
    if coin < settings.blur:
        blurred = plain_blur(np.asarray(image), settings.kernel_size, 0.1 + 1.9 * sigma)
        image = Image.fromarray(np.rint(blurred).astype(np.uint8))
    if drawn("solarize", 1) < settings.solarize:
        image = ImageOps.solarize(image, 128)
    return np.asarray(image)


@pytest.mark.parametrize("method", VIEWS)
def test_views_against_numpy(method):
    names = [f"view{k}" for k in range(len(VIEWS[method]))]

    def graph(images, draw):
        return tuple(view(images, draw, *each) for each in zip(VIEWS[method], names))

    for views, settings, name in zip(run(graph, ORIGINALS), VIEWS[method], names):
        for record, image in enumerate(views):
            assert image.dtype == np.uint8 and image.shape == (settings.size, settings.size, 3)
            levels = np.abs(image - plain_view(record, settings, name).astype(float))
            assert np.median(levels) <= 1 and np.quantile(levels, 0.99) <= 4
