"""Grids and pixels of images that are cut into patches, in Python and NumPy."""

import math

import numpy as np


def grid_of(height, width, patch, tokens, number=float):
    """The bisection of SigLIP 2 in Python (float) or of big_vision in TensorFlow (float32)."""

    def cells(scale):
        sides = (number(side) * scale for side in (height, width))
        return [max(math.ceil(side / number(patch)), 1) for side in sides]

    low, high = number(1e-6), number(100)
    while high - low >= number(1e-5):
        middle = (low + high) / number(2)
        if middle in (low, high):  # float32 is not precise enough
            break
        low, high = (middle, high) if math.prod(cells(middle)) <= tokens else (low, middle)
    return cells(low)


def resized(pixels, size):
    """Resizes with a triangular filter, antialiased; the pixels at the edges are repeated."""
    result = pixels.astype(float)
    for axis, length in enumerate(size):
        count = result.shape[axis]
        step = count / length
        radius = max(step, 1.0)
        weights = np.zeros((length, count))
        for k in range(length):
            center = (k + 0.5) * step
            for at in range(math.floor(center - radius), math.ceil(center + radius) + 1):
                weight = max(0.0, 1 - abs(at + 0.5 - center) / radius)
                weights[k, min(max(at, 0), count - 1)] += weight
        weights /= weights.sum(axis=1, keepdims=True)
        result = np.moveaxis(np.tensordot(weights, result, axes=(1, axis)), 0, axis)
    return result
