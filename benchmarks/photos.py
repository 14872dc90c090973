"""JPEGs for benchmarks: real photographs where scikit-image is installed, else drawn ones."""

from __future__ import annotations

import pathlib

import numpy as np
from PIL import Image

SIZE = (500, 375)


def photographs() -> list[Image.Image]:
    """Pictures to cut samples from."""
    try:
        from skimage import data
    except ImportError:
        rng = np.random.default_rng(0)
        noise = [rng.integers(0, 256, (24, 32, 3), np.uint8) for _ in range(4)]
        return [Image.fromarray(n).resize((1000, 750), Image.Resampling.BICUBIC) for n in noise]
    names = ("astronaut", "coffee", "chelsea", "rocket")
    return [Image.fromarray(getattr(data, name)()).convert("RGB") for name in names]


def make(folder: pathlib.Path, count: int) -> list[str]:
    """Writes so many JPEGs of 500 x 375 pixels (about 50 kB each) and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    sources, rng, files = photographs(), np.random.default_rng(0), []
    for i in range(count):
        path = folder / f"{i:06d}.jpg"
        files.append(str(path))
        if path.exists():
            continue
        picture = sources[i % len(sources)]
        width, height = picture.size
        left, top = rng.uniform(0, 0.3, 2) * (width, height)
        box = (left, top, left + 0.7 * width, top + 0.7 * height)
        picture.resize(SIZE, Image.Resampling.BICUBIC, box=box).save(path, quality=92)
    return files
