"""Grids of patches at the aspect ratio of an image, with a budget of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PRECISION = 1e-5  # of the scale, as in SigLIP 2
_LARGEST_SCALE = 100.0


def grids(sizes: Any, patch: int, tokens: Any, enlarge: bool = True) -> NDArray[np.int64]:
    """Returns the height and width, in patches, of the largest grids of at most ``tokens`` patches.

    The scale of each image is found by bisection, with the steps of SigLIP 2's processor in
    Transformers and in float64 as there, so that the grids are the same. big_vision computes in
    float32, which gives another grid for a few sizes, mostly with simple aspect ratios: an image of
    452 x 339 (height x width), with 1,024 tokens, has 36 x 28 patches of 16 there, and 36 x 27
    here.

    Args:
        sizes: Image sizes in pixels, [images, 2].
        patch: Height and width of a patch, in pixels.
        tokens: The largest number of patches, one number or [images].
        enlarge: Whether small images are enlarged. Otherwise, height and width are only rounded up
            to whole patches.
    """

    def grid_of(scale: Any) -> NDArray[np.int64]:
        return np.maximum(np.ceil(sizes * scale / patch), 1).astype(np.int64)

    low = np.full(len(sizes), _PRECISION / 10)
    high = np.full(len(sizes), _LARGEST_SCALE)
    while (high[:1] - low[:1] >= _PRECISION).any():  # all intervals have the same length
        middle = (low + high) / 2
        fits = grid_of(middle[:, np.newaxis]).prod(axis=1) <= tokens
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    largest = grid_of(low[:, np.newaxis])
    if enlarge:
        return largest
    native = grid_of(1)
    fits = native.prod(axis=1) <= tokens
    return np.where(fits[:, np.newaxis], native, largest)
