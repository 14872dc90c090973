"""Draws images of discs, squares and triangles, with their masks and boxes.

`draw_scenes` writes a folder like that of a public data set: images, masks of class numbers as PNG,
and annotations in COCO's format.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("disc", "square", "triangle")  # mostly red, green and blue, so that they learn quickly


def _corners(kind: str, center: np.ndarray, radius: float, turn: float) -> np.ndarray:
    count = {"disc": 40, "square": 4, "triangle": 3}[kind]
    angles = turn + 2 * np.pi * np.arange(count) / count
    return center + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def draw_scenes(folder: Path, count: int, seed: int = 0, least: int = 0) -> Path:
    """Writes images with up to four shapes, which may cover parts of each other.

    Args:
        folder: The folder; a folder that is complete is not written again.
        count: The number of images.
        seed: The seed of the random numbers.
        least: The least number of shapes in an image.

    Returns:
        The folder, with ``images/0000.jpg``, ``masks/0000.png`` (0 is the background, and k + 1 is
        the class k) and ``annotations.json``.
    """
    if (folder / "annotations.json").exists():
        return folder
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    images, annotations = [], []
    for number in range(count):
        width, height = (int(side) for side in rng.integers(96, 161, 2))
        noise = rng.integers(0, 90, (height // 8, width // 8, 3), np.uint8)
        image = Image.fromarray(noise).resize((width, height))
        mask = Image.new("L", (width, height))
        for _ in range(rng.integers(least, 5)):
            label, radius = int(rng.integers(3)), rng.uniform(12, 30)
            center = rng.uniform(radius, np.array([width, height]) - radius)
            corners = _corners(CLASSES[label], center, radius, rng.uniform(0, 6))
            points = [tuple(point) for point in corners]
            color = np.roll([230, 130, 60], label) + rng.integers(-60, 26, 3)
            ImageDraw.Draw(image).polygon(points, fill=tuple(color.tolist()))
            ImageDraw.Draw(mask).polygon(points, fill=label + 1)
            low, high = corners.min(axis=0), corners.max(axis=0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label + 1,
                    "bbox": [*low.tolist(), *(high - low).tolist()],
                    "area": float(np.prod(high - low)),
                    "segmentation": [corners.ravel().tolist()],
                    "iscrowd": 0,
                }
            )
        name = f"{number:04d}.jpg"
        image.save(folder / "images" / name, quality=92)
        mask.save(folder / "masks" / f"{number:04d}.png")
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    categories = [{"id": k, "name": name} for k, name in enumerate(CLASSES, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))
    return folder
