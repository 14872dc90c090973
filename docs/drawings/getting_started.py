"""Creates the pictures of docs/dali-readers.md by running the example of the tutorial::

python docs/drawings/getting_started.py
"""

from __future__ import annotations

import pathlib
import runpy
import sys
import tempfile

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 1000
# The other steps draw the same images, or speeds of this machine.
STEPS = ("quick_start", "plain_call", "length_and_loops", "random_shuffling", "augmentations")
STEPS += ("multiple_devices",)


def main() -> None:
    """Runs examples/getting_started.py, and saves its pictures with 128 colors."""
    sys.path.insert(0, str(ROOT / "examples"))
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["getting_started.py", "--out", folder]
        runpy.run_path(str(ROOT / "examples" / "getting_started.py"), run_name="__main__")
        for step in STEPS:
            (path,) = pathlib.Path(folder).glob(f"[0-9][0-9]_{step}.png")
            picture = Image.open(path).convert("RGB")
            if picture.width > WIDTH:
                picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)))
            name = step.replace("_", "-")
            picture.quantize(128).save(PICTURES / f"getting-started-{name}.png", optimize=True)


if __name__ == "__main__":
    main()
