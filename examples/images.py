"""Generates a small set of labeled JPEGs, so that the examples need no download.

The images are in a folder with one folder for each class, and the examples read them with DALI.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"}
Files = tuple[list[str], list[int]]  # paths and labels
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "shapes"


def _polygon(corners: int, radius: float = 1.0) -> np.ndarray:
    turns = 2 * np.pi * np.arange(corners) / corners
    return radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)


def _bar(half_width: float, half_height: float, y: float = 0.0) -> np.ndarray:
    signs = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    return signs * [half_width, half_height] + [0.0, y]


# Each class is a list of polygons around (0, 0). True fills a polygon, and False cuts it out.
SHAPES: dict[str, list[tuple[np.ndarray, bool]]] = {
    "cross": [(_bar(1.0, 0.28), True), (_bar(0.28, 1.0), True)],
    "disc": [(_polygon(60), True)],
    "ring": [(_polygon(60), True), (_polygon(60, 0.6), False)],
    "square": [(_polygon(4), True)],
    "stripes": [(_bar(0.9, 0.13, y), True) for y in (-0.78, -0.26, 0.26, 0.78)],
    "triangle": [(_polygon(3), True)],
}


def draw(shape: str, sides: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Draws a shape with random colors, size, position, angle and background."""
    width = int(rng.integers(sides[0], sides[1] + 1))
    height = int(width * rng.uniform(0.75, 1.33))
    radius = min(width, height) * rng.uniform(0.25, 0.42)
    center = [rng.uniform(radius, side - radius) for side in (width, height)]
    turn = rng.uniform(0, 2 * np.pi)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    stencil = Image.new("L", (width, height))
    for points, paints in SHAPES[shape]:
        placed = points @ rotation * radius + center
        ImageDraw.Draw(stencil).polygon([tuple(p) for p in placed], fill=255 if paints else 0)
    # Bright shapes on a dark background can be learned in a few epochs. The background is a
    # gradient between two colors.
    ink = rng.uniform(140, 255, size=3)
    left, right = rng.uniform(0, 120, size=(2, 3))
    fade = np.linspace(0, 1, width)[None, :, None]
    background = np.broadcast_to(left * (1 - fade) + right * fade, (height, width, 3))
    pixels = np.where(np.asarray(stencil)[..., None] > 0, ink, background)
    pixels = pixels + rng.normal(0, rng.uniform(2, 15), size=pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_images(cache: Path, count: int, sides: tuple[int, int] = (80, 220), seed: int = 0) -> Path:
    """Returns a folder with one folder of JPEGs for each shape, and creates it if necessary.

    Args:
        cache: Parent directory of the folder.
        count: Number of images over all classes.
        sides: Minimum and maximum width in pixels. Heights are 3/4 to 4/3 of the width.
        seed: Seed of the random numbers.
    """
    folder = cache / f"{count}-of-{sides[0]}-to-{sides[1]}px-seed-{seed}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    names = list(SHAPES)
    # The folder is renamed when it is complete, so that an interrupted run leaves no partial data.
    with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished:
        drawn = Path(unfinished) / "images"
        for name in names:
            (drawn / name).mkdir(parents=True)
        for k in tqdm(range(count), desc="Drawing images", unit="image"):
            name = names[k % len(names)]
            quality = int(rng.integers(60, 96))
            draw(name, sides, rng).save(drawn / name / f"{k:05d}.jpg", quality=quality)
        try:
            drawn.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has created it
                raise
    return folder


def draw_folder(folder: str | Path, count: int = 300) -> None:
    """Draws a folder with one folder of JPEGs for each shape, such as imagenet/train."""
    shutil.copytree(make_images(CACHE, count), folder, dirs_exist_ok=True)


def split(folder: Path) -> tuple[list[str], Files, Files]:
    """Returns class names, training files, and held-out files: every fifth file of a class."""
    names: list[str] = []
    train: Files = ([], [])
    held_out: Files = ([], [])
    for class_folder in sorted(path for path in folder.glob("*") if path.is_dir()):
        files = sorted(p for p in class_folder.rglob("*") if p.suffix.lower() in SUFFIXES)
        for k, file in enumerate(files):
            paths, labels = held_out if k % 5 == 4 else train
            paths.append(str(file))
            labels.append(len(names))
        if files:
            names.append(class_folder.name)
    if len(names) < 2 or not held_out[0]:
        raise SystemExit(
            f"{folder} has {len(names)} folders of images: it needs at least two class folders, "
            "and five images in at least one class"
        )
    return names, train, held_out
