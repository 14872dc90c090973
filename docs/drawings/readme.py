"""Draws the picture of the README: a batch, and images per second of several loaders.

examples/images.py draws the images of the batch. The bars show the newest run of
benchmarks/throughput.py on one H200 in benchmarks/results::

    python docs/drawings/readme.py
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from matplotlib.figure import Figure
from nvidia.dali import fn

from dalijax import augment, data_iterator, sources

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import images as drawn_images  # noqa: E402 - a module of the examples

ROWS, COLUMNS, SIZE = 4, 5, 96
BARS = {  # beginnings of the names of the benchmark's variants, and their labels
    "raw DALI loop": "DALI's own loop",
    "DALI's JAX plugin": "DALI's JAX plugin",
    "dalijax.sources.Files": "dalijax, Files",
    "dalijax.sources.Tar": "dalijax, Tar",
    "DALIIterDataset": "dalijax, DALI's reader in Grain",
    "DALITransform, 16 workers, packed bytes": "dalijax after Grain's workers",
    "Grain + OpenCV, 16 workers": "Grain and OpenCV, 16 workers",
}


@data_iterator(output_map=["images", "labels"], as_numpy=True)
def batch_of(data, label, *, draw):
    """Augments images for a training step."""
    images = fn.decoders.image(data, device="cpu")
    images = augment.random_resized_crop(images, size=SIZE, draw=draw, scale=(0.35, 1.0))
    images = augment.color_jitter(images, brightness=0.3, contrast=0.3, saturation=0.3, draw=draw)
    return augment.flip(images, draw=draw), label


def main() -> None:
    """Draws docs/pictures/readme.png."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.12))
    with tempfile.TemporaryDirectory() as folder:
        drawn = drawn_images.make_images(pathlib.Path(folder), 120)
        iterator = batch_of(source=sources.Files(drawn), batch_size=ROWS * COLUMNS, seed=3)
        batch = next(iterator)
        iterator.close()
    for ax, image in zip(left.subplots(ROWS, COLUMNS).flat, batch["images"]):
        ax.imshow(image)
        ax.axis("off")

    newest = sorted((ROOT / "benchmarks" / "results").glob("*-h200-throughput.json"))[-1]
    run = json.loads(newest.read_text())
    rates = run["plot"]["groups"][""]
    medians = {
        label: next(rate for name, rate in rates.items() if name.startswith(start))
        for start, label in BARS.items()
        if any(name.startswith(start) for name in rates)
    }
    ax = right.subplots()
    names = list(medians)[::-1]
    colors = ["#76b900" if name.startswith("dalijax") else "#b0b0b0" for name in names]
    bars = ax.barh(names, [medians[name] for name in names], color=colors)
    ax.bar_label(bars, fmt="{:,.0f}", padding=3)
    ax.margins(x=0.15)
    ax.set_title("images per second, one H200, 16 CPU cores")
    ax.set_xticks([])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "pictures" / "readme.png", dpi=110)


if __name__ == "__main__":
    main()
