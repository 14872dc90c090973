"""Color jitter and blur in NumPy."""

import numpy as np

RGB_TO_YIQ = np.array(
    [[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]]
)


def plain_blur(pixels, kernel_size, sigma):
    """Correlates rows and columns with a Gaussian kernel, reflected at the edges."""
    radius = kernel_size // 2
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(pixels.astype(float), [(radius, radius)] * 2 + [(0, 0)], mode="reflect")
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis)
        padded = windows @ kernel
    return padded


def plain_jitter(pixels, brightness, contrast, saturation, hue):
    """Hue and saturation in YIQ, contrast around the mean gray, brightness; clipped once."""
    angle = 2 * np.pi * hue
    turn = np.eye(3)
    turn[1:, 1:] = saturation * np.array(
        [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    )
    colors = pixels @ (np.linalg.inv(RGB_TO_YIQ) @ turn @ RGB_TO_YIQ).T
    mean = (colors @ RGB_TO_YIQ[0]).mean(axis=(-2, -1), keepdims=True)[..., np.newaxis]
    return np.clip(brightness * (mean + contrast * (colors - mean)), 0, 255)
