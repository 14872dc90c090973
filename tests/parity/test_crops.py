"""Windows: distributions and pixels compared with torchvision."""

import numpy as np
import pytest
import torch
from nvidia.dali import types
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from dalijax import augment
from dalijax.core.augment import windows
from drawing import numbers, run
from parity import DRAWS, check_windows, differences, pixels, tensor

SIZES = [(375, 500), (500, 375), (64, 640)]


def draws(transform, size):
    """Returns the draws of torchvision's transform for an image size, by name."""
    torch.manual_seed(0)
    image = torch.empty((3, *size), dtype=torch.uint8)
    params = [transform.make_params([image]) for _ in range(DRAWS)]
    names = [name for name in params[0] if name != "v"]
    return {name: np.array([one[name] for one in params], float) for name in names}


@pytest.mark.parametrize("size", SIZES)
def test_resized_crops_have_torchvisions_distribution(size):
    u = numbers(range(DRAWS), "crop", windows.COLUMNS).astype(np.float32)
    sizes = np.full((DRAWS, 2), size, np.int32)
    start, end = windows.resized_crops(u, sizes, (0.08, 1.0), (3 / 4, 4 / 3))
    drawn = draws(v2.RandomResizedCrop(224), size)
    theirs = [drawn[name] for name in ("top", "left", "height", "width")]
    check_windows("resized crop", [*start.T, *(end - start).T], theirs, size)


@pytest.mark.parametrize("ratio", [(0.3, 3.3), (1.0, 4.0)])
@pytest.mark.parametrize("size", SIZES)
def test_erased_windows_have_torchvisions_distribution(size, ratio):
    u = numbers(range(DRAWS), "erase", windows.COLUMNS + 1).astype(np.float32)
    sizes = np.full((DRAWS, 2), size, np.int32)
    start, extent = windows.erased(u, sizes, 1.0, (0.02, 0.33), ratio)
    theirs = np.array([*draws(v2.RandomErasing(ratio=ratio), size).values()])
    ours, some = (
        np.array([*start.T, *extent.T]),
        theirs[2] < size[0],
    )  # if any is erased
    assert abs(np.mean(extent[:, 0] > 0) - np.mean(some)) < 0.01
    ours, theirs = ours[:, extent[:, 0] > 0], theirs[:, some]
    check_windows("erased", ours, theirs, size)


# Bicubic pixels differ more at sharp edges, also from torchvision's floats.
@pytest.mark.parametrize(
    ("mode", "antialias", "most"),
    [("bilinear", True, 2), ("bilinear", False, 2), ("bicubic", True, 12)],
)
@pytest.mark.parametrize("side", [64, 224])
def test_a_resized_crop_has_torchvisions_pixels_but_at_its_edge(
    photos, side, mode, antialias, most
):
    images = photos * 4
    interp_type = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[mode]
    (ours,) = run(
        lambda x, draw: augment.random_resized_crop(
            x, side, interp_type=interp_type, antialias=antialias, draw=draw, name="crop"
        ),
        images,
    )
    u = numbers(range(len(images)), "crop", windows.COLUMNS).astype(np.float32)
    sizes = np.array([one.shape[:2] for one in images], np.int32)
    start, end = windows.resized_crops(u, sizes, (0.08, 1.0), (3 / 4, 4 / 3))
    theirs = [
        pixels(
            F.resized_crop(
                tensor(one),
                *window,
                [side, side],
                interpolation=InterpolationMode(mode),
                antialias=antialias,
            )
        )
        for one, window in zip(images, np.hstack([start, end - start]).astype(int).tolist())
    ]
    within = np.s_[2:-2, 2:-2]
    piece = f"{mode} crop to {side}{'' if antialias else ' without antialias'}"
    inner = differences(
        f"{piece}, without 2 pixels of edge",
        [one[within] for one in ours],
        [one[within] for one in theirs],
    )
    assert np.median(inner) == 0 and inner.max() <= most and np.mean(inner > 2) < 0.001
    whole = differences(piece, ours, theirs)  # torchvision cuts the neighbors off before resizing
    assert np.median(whole) == 0 and np.mean(whole > 2) < 0.02


@pytest.mark.parametrize(("side", "shorter"), [(224, 256), (192, 224), (64, 72), (224, None)])
def test_evaluations_resize_and_crop(photos, side, shorter):
    (ours,) = run(lambda x, draw: augment.center_crop(x, side, resize=shorter, draw=draw), photos)
    resize = v2.Resize(shorter) if shorter else v2.Identity()
    theirs = [pixels(v2.CenterCrop(side)(resize(tensor(one)))) for one in photos]
    levels = differences(f"center crop of {side}, resized to {shorter}", ours, theirs)
    assert np.median(levels) == 0 and levels.max() <= (1 if shorter else 0)


@pytest.mark.parametrize("padding", [0, (3, 5, 7, 9)])
def test_a_padded_crop_is_torchvisions(photos, padding):
    (ours,) = run(
        lambda x, draw: augment.random_crop(x, (200, 210), padding=padding, draw=draw, name="crop"),
        photos,
    )
    u = numbers(range(len(photos)), "crop", 2).astype(np.float32)
    sizes = np.array([one.shape[:2] for one in photos], np.int32)
    sides = padding or (0,) * 4
    start = windows.crops(u, sizes, (200, 210), sides)
    start += np.array([sides[1], sides[0]], np.int32)
    for one, image, (top, left) in zip(ours, photos, start.tolist()):
        theirs = F.crop(F.pad(tensor(image), list(sides)), top, left, 200, 210)
        np.testing.assert_array_equal(one, pixels(theirs))


@pytest.mark.parametrize("vertical", [False, True])
def test_a_flip_is_torchvisions(photos, vertical):
    (ours,) = run(
        lambda x, draw: augment.flip(x, probability=1, vertical=vertical, draw=draw), photos
    )
    flip = F.vertical_flip if vertical else F.horizontal_flip
    for one, image in zip(ours, photos):
        np.testing.assert_array_equal(one, pixels(flip(tensor(image))))


def test_erased_pixels_are_torchvisions(photos):
    images = photos * 2
    (ours,) = run(
        lambda x, draw: augment.random_erasing(
            x, probability=1, value=(124, 116, 104), draw=draw, name="erase"
        ),
        images,
    )
    u = numbers(range(len(images)), "erase", windows.COLUMNS + 1).astype(np.float32)
    sizes = np.array([one.shape[:2] for one in images], np.int32)
    start, extent = windows.erased(u, sizes, 1.0, (0.02, 0.33), (0.3, 3.3))
    value = torch.tensor((124, 116, 104), dtype=torch.uint8)[:, None, None]
    for one, image, place, shape in zip(ours, images, start.astype(int), extent.astype(int)):
        theirs = F.erase(tensor(image), *place.tolist(), *shape.tolist(), value)
        np.testing.assert_array_equal(one, pixels(theirs))
