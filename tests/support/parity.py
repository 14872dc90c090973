"""Photographs, and differences of pixels and distributions from torchvision's."""

from __future__ import annotations

import numpy as np
import scipy.stats
import torch
from skimage import data

DRAWS = 20_000
# Two samples of n and m numbers from one distribution differ by more than
# UNLIKELY * sqrt(1 / n + 1 / m) once in a thousand times.
UNLIKELY = 1.95
FAR = UNLIKELY * (2 / DRAWS) ** 0.5
FIGURES: dict[str, tuple[float, ...]] = {}  # the largest difference that was seen, by test


def photographs() -> list[np.ndarray]:
    names = ("astronaut", "chelsea", "coffee", "rocket")
    return [np.ascontiguousarray(getattr(data, name)()[..., :3]) for name in names]


def tensor(pixels: np.ndarray) -> torch.Tensor:
    """Returns images [..., height, width, channels] as a tensor with the channels first."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, -3)))


def pixels(image: torch.Tensor) -> np.ndarray:
    return np.moveaxis(image.numpy(), -3, -1)


def differences(piece: str, ours: list, theirs: list) -> np.ndarray:
    """Returns flat absolute differences, and records median, 99th percentile and maximum."""
    found = [np.abs(np.asarray(a, float) - np.asarray(b, float)) for a, b in zip(ours, theirs)]
    levels = np.concatenate([one.ravel() for one in found])
    keep(piece, *np.quantile(levels, (0.5, 0.99, 1.0)))
    return levels


def distance(piece: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns and records the Kolmogorov-Smirnov distance of two samples."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    found = float(scipy.stats.ks_2samp(ours, theirs).statistic)
    keep(piece, found)
    return found


def check_windows(piece, ours, theirs, size):
    """Checks areas, ratios and centers of two samples of windows (top, left, height, width)."""
    for name, quantity in {
        "area": lambda y, x, h, w: h * w / np.prod(size),
        "ratio": lambda y, x, h, w: np.log(w / h),
        "center from the top": lambda y, x, h, w: y + h / 2,
        "center from the left": lambda y, x, h, w: x + w / 2,
    }.items():
        one, other = (quantity(*np.asarray(boxes, float)) for boxes in (ours, theirs))
        far = UNLIKELY * (1 / len(one) + 1 / len(other)) ** 0.5
        assert distance(f"{piece} of {size}, {name}", one, other) < far, name
        levels = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99]
        spread = other.max() - other.min()
        gaps = np.abs(np.quantile(one, levels) - np.quantile(other, levels))
        assert gaps.max() <= 0.04 * spread, name


def keep(piece: str, *figures: float) -> None:
    FIGURES[piece] = tuple(map(max, figures, FIGURES.get(piece, figures)))


def table() -> list[str]:
    """Formats the figures: medians, 99th percentiles and maxima; or distances, in percent."""
    return [
        f"{piece}: " + " / ".join(f"{one:.3g}" for one in figures)
        if len(figures) > 1
        else f"{piece}: {figures[0]:.2%}"
        for piece, figures in sorted(FIGURES.items())
    ]
