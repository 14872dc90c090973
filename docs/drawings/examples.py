"""Creates pictures of pages by running the examples::

python docs/drawings/examples.py
"""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from nvidia.dali import fn, types
from PIL import Image, ImageDraw

from dalijax import augment, data_iterator, sources
from dalijax.show import show

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
BATCHES = (
    *("arrays", "audio", "detection", "image_text", "native_resolution", "robot", "segmentation"),
    *("video", "views"),
)
# Steps of the tutorial. The other steps draw the same images, or speeds of this machine.
STEPS = ("random_shuffling", "augmentations", "multiple_devices")


def run(example: str, folder: str) -> pathlib.Path:
    """Runs an example, and returns the folder of its pictures."""
    out = pathlib.Path(folder, example)
    program = str(ROOT / "examples" / f"{example}.py")
    subprocess.run([sys.executable, program, "--out", str(out)], check=True)
    return out


def save(picture: pathlib.Path, name: str) -> None:
    """Saves a picture with 256 colors, in its size, since smaller text would be hard to read."""
    image = Image.open(picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, 5)
    image.save(PICTURES / f"{name.replace('_', '-')}.png", optimize=True)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _scene(rng: np.random.Generator) -> dict[str, object]:
    """Returns a record of overlapping shapes: an image, boxes, labels and a mask of classes."""
    x, y = np.meshgrid(np.linspace(0, 1, 320), np.linspace(0, 1, 240))
    shades = rng.uniform(40, 130, (3, 3)) @ [x.ravel(), y.ravel(), np.ones(x.size)] / 2
    image = Image.fromarray(shades.T.reshape(240, 320, 3).astype(np.uint8))
    mask = Image.new("L", image.size)
    boxes, labels = [], []
    for left, top in zip((10, 120, 220), rng.integers(20, 120, 3).tolist()):
        label = int(rng.integers(1, 4))
        right, bottom = left + int(rng.integers(60, 110)), top + int(rng.integers(60, 110))
        color = tuple(rng.integers(130, 255, 3).tolist())
        for canvas, fill in ((image, color), (mask, label)):
            pen = ImageDraw.Draw(canvas)
            if label == 1:
                pen.ellipse((left, top, right - 1, bottom - 1), fill)
            elif label == 2:
                pen.rectangle((left, top, right - 1, bottom - 1), fill)
            else:
                pen.polygon([(left, bottom - 1), (right - 1, bottom - 1), (right - 30, top)], fill)
        boxes.append((left, top, right, bottom))
        labels.append(label)
    return {
        "data": _png(image),
        "mask": _png(mask),
        "boxes": np.array(boxes, np.float32),
        "label": np.array(labels, np.int32),
    }


@data_iterator
def windows(data, mask, boxes, label, *, draw):
    """Crops images, masks and boxes."""
    images = fn.decoders.image(data)
    masks = fn.decoders.image(mask, output_type=types.GRAY)
    window = augment.random_window(images, (192, 256), draw=draw, flip=0.5, scale=(0.5, 1.0))
    boxes, labels, count = window.boxes(boxes, label, max_boxes=8)
    return {
        "image": window.image(images),
        "mask": window.mask(masks),
        "boxes": boxes,
        "labels": labels,
        "count": count,
    }


def draw_boxes(path: pathlib.Path) -> None:
    """Draws boxes and masks of random windows."""
    rng = np.random.default_rng(1)
    source = sources.Records([_scene(rng) for _ in range(6)])
    classes = ["background", "ellipse", "rectangle", "triangle"]
    with windows(source=source, batch_size=6, shuffle=False, seed=1) as iterator:
        show(iterator, samples=4, classes=classes).save(path)


def main() -> None:
    """Draws the pictures of the examples, and of other pages."""
    with tempfile.TemporaryDirectory() as folder:
        for example in BATCHES:
            save(run(example, folder) / "batch.png", example)
        tutorial = run("getting_started", folder)
        for step in STEPS:
            (path,) = tutorial.glob(f"[0-9][0-9]_{step}.png")
            save(path, f"getting_started_{step}")
        draw_boxes(pathlib.Path(folder, "boxes.png"))
        save(pathlib.Path(folder, "boxes.png"), "boxes")


if __name__ == "__main__":
    main()
