"""The views of SimCLR, BYOL and DINO, with the same numbers as torchvision's."""

import numpy as np
import pytest
from torchvision.transforms.v2 import functional as F
from views import VIEWS, crop, view

from drawing import numbers, run
from parity import differences, pixels, tensor

ADJUST = (F.adjust_hue, F.adjust_saturation, F.adjust_contrast, F.adjust_brightness)


def theirs_of(crop, record, settings, name):
    """Returns torchvision's view of a crop, and whether its colors are jittered."""
    image = tensor(crop)
    *factors, coin = numbers([record], f"{name}.jitter", 5)[0]
    is_jittered = coin < 0.8
    if is_jittered:
        *widths, hue = settings.jitter.values()
        ranges = [*((1 - width, 1 + width) for width in widths), (-hue, hue)]
        values = [low + u * (high - low) for u, (low, high) in zip(factors, ranges)]
        for adjust, value in zip(ADJUST, values[::-1]):
            image = adjust(image, value)
    if numbers([record], f"{name}.gray", 1) < 0.2:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    sigma, coin = numbers([record], f"{name}.blur", 2)[0]
    if coin < settings.blur:
        image = F.gaussian_blur(image, settings.kernel_size, 0.1 + 1.9 * sigma)
    if numbers([record], f"{name}.solarize", 1) < settings.solarize:
        image = F.solarize(image, 128)
    return pixels(image), is_jittered


@pytest.mark.parametrize("method", VIEWS)
def test_views_are_torchvisions(photos, method):
    images = photos * 8
    names = [f"view{k}" for k in range(len(VIEWS[method]))]

    def each(function):
        """Returns the results of a function for each view, a list of images for each."""
        settings = list(zip(VIEWS[method], names))
        return run(lambda x, d: tuple(function(x, d, *view) for view in settings), images)

    plain: tuple[list, list] = ([], [])
    jittered: tuple[list, list] = ([], [])
    for ours, crops, settings, name in zip(each(view), each(crop), VIEWS[method], names):
        for record, (image, cropped) in enumerate(zip(ours, crops)):
            expected, is_jittered = theirs_of(cropped, record, settings, name)
            for images_of, one in zip(jittered if is_jittered else plain, (image, expected)):
                images_of.append(one)
    assert len(plain[0]) > len(images) * len(names) / 10
    assert differences(f"{method}, views without jitter", *plain).max() <= 2
    levels = differences(f"{method}, views with jitter", *jittered)
    assert np.median(levels) < 12
