"""Draws the picture of the README: augmented photographs, and figures of several loaders.

scikit-image's package contains the photographs. The bars show the newest runs of
benchmarks/throughput.py on one H200 and benchmarks/cores.py on one H100 in benchmarks/results::

    pip install scikit-image
    python docs/drawings/readme.py
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from nvidia.dali import fn

from dalijax import augment, data_iterator, sources
from legible import save

ROOT = pathlib.Path(__file__).resolve().parents[2]
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
COLUMNS, SIZE = 5, 160
RATES = {  # the variants of a benchmark, and their labels
    "raw DALI loop": "DALI's own loop",
    "DALI's JAX plugin": "DALI's JAX plugin",
    "dalijax.sources.Files": "dalijax, Files",
    "dalijax.sources.Tar": "dalijax, Tar",
    "DALITransform, 16 workers, packed bytes": "dalijax after Grain's workers",
    "Grain + OpenCV, 16 workers": "Grain and OpenCV",
}
CORES = {
    "dalijax, Files": "dalijax",
    "DALI's JAX plugin": "DALI's JAX plugin",
    "tf.data": "tf.data",
    "Grain and OpenCV": "Grain and OpenCV",
    "torchvision and DataLoader": "torchvision",
}


@data_iterator(output_map=["images"], as_numpy=True)
def photographs(data, *, draw):
    """Augments images for a training step."""
    images = fn.decoders.image(data, device="cpu")
    images = augment.random_resized_crop(images, size=SIZE, draw=draw, scale=(0.3, 1.0))
    images = augment.color_jitter(images, brightness=0.3, contrast=0.3, saturation=0.3, draw=draw)
    return augment.flip(images, draw=draw)


def newest(name: str) -> dict[str, Any]:
    """Returns the newest run with a name."""
    path = max((ROOT / "benchmarks" / "results").glob(f"????-??-??-{name}.json"))
    return json.loads(path.read_text())


def augmented() -> NDArray[np.uint8]:
    """Returns the images: a row of variants of each photograph."""
    import skimage

    folder = pathlib.Path(skimage.__file__).parent / "data"
    paths = [str(folder / name) for name in PHOTOGRAPHS for _ in range(COLUMNS)]
    with photographs(
        source=sources.Files(paths=paths), batch_size=len(paths), shuffle=False, seed=3
    ) as iterator:
        return np.array(next(iterator)["images"])


def draw_bars(panel: Any, values: Mapping[str, float], digits: int, title: str) -> None:
    """Draws bars, those of dalijax in green."""
    # Above the names, too: the bars alone are narrower than a title.
    panel.suptitle(title, x=0.02, ha="left", fontsize=11)
    ax = panel.subplots()
    names = list(values)[::-1]
    colors = ["#76b900" if name.startswith("dalijax") else "#b0b0b0" for name in names]
    bars = ax.barh(names, [values[name] for name in names], color=colors)
    ax.bar_label(bars, fmt=f"{{:,.{digits}f}}", padding=3)
    ax.margins(x=0.15)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def draw(images: NDArray[np.uint8]) -> Figure:
    """Returns a figure of images, [rows * columns, height, width, 3], and of the benchmarks."""
    figure = Figure(figsize=(11, 4.1), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.12, 1))
    for ax, image in zip(left.subplots(len(PHOTOGRAPHS), COLUMNS).flat, images):
        ax.imshow(image)
        ax.axis("off")
    rates = newest("h200-throughput")["plot"]["groups"][""]
    cores = newest("h100-cores")["plot"]["groups"]["ResNet-50"]
    top, bottom = right.subfigures(2, 1, height_ratios=(len(RATES) + 1, len(CORES) + 1))
    draw_bars(top, {RATES[name]: rates[name] for name in RATES}, 0, "Images per second, one H200")
    draw_bars(
        bottom,
        {CORES[name]: cores[name] for name in CORES if name in cores},
        1,
        "CPU cores that feed a ResNet-50, one H100",
    )
    return figure


if __name__ == "__main__":
    save(draw(augmented()), ROOT / "docs" / "pictures" / "readme.png", dpi=110)
