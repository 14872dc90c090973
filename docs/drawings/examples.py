"""Creates pictures of pages by running the examples::

python docs/drawings/examples.py
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
BATCHES = ("arrays", "audio", "image_text", "robot", "video")
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


def main() -> None:
    """Draws the pictures of the examples, and of docs/dali-readers.md."""
    with tempfile.TemporaryDirectory() as folder:
        for example in BATCHES:
            save(run(example, folder) / "batch.png", example)
        tutorial = run("getting_started", folder)
        for step in STEPS:
            (path,) = tutorial.glob(f"[0-9][0-9]_{step}.png")
            save(path, f"getting_started_{step}")


if __name__ == "__main__":
    main()
