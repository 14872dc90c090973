"""Packs captions into rows with Grain. DALI decodes their images.

A row has ROOM tokens and up to SLOTS captions with their images:

    tokens    a small red disc|a large blue square|......    segments  1 1 1 1 2 2 2 2 2 2 0 0 0
    images    [disc]           [square]  [none]  [none]      used      yes yes no no

It prints the captions of a batch, and writes its images to examples/out/packing.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

import grain
import numpy as np
import nvidia.dali.fn as fn
from grain.experimental import FirstFitPackIterDataset, FlatMapIterDataset, FlatMapTransform
from image_text import draw_pairs
from nvidia.dali import backend
from PIL import Image

from dalijax import augment
from dalijax import fn as jax_fn
from dalijax.adapters.grain import DALITransform
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "packing"
SIDE, ROOM, SLOTS, ROWS = 48, 96, 4, 4  # pixels, tokens and images per row, rows per batch


def captions_of(batch: dict[str, Any], row: int) -> list[str]:
    """Returns the captions of a row in the order of its images, without truncated characters."""
    tokens, segments = (np.asarray(batch[key][row]) for key in ("tokens", "segments"))
    numbers = range(1, segments.max() + 1)
    return [bytes(tokens[segments == k].tolist()).decode(errors="ignore") for k in numbers]


def choose(pair: tuple[int, list[str]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the tokens, which are bytes, of a random caption, and the number of its image."""
    number, texts = pair
    text = texts[rng.integers(len(texts))].encode()[:ROOM]
    return {"tokens": np.array([*text], np.int32), "number": np.array([number], np.int32)}


class Slots(FlatMapTransform):
    """Splits a packed row into SLOTS records, each with an image and a part of the tokens."""

    max_fan_out = SLOTS

    def __init__(self, paths: list[Path]):
        self._paths = [*map(str, paths)]

    def flat_map(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        texts, segments = (np.split(row[k], SLOTS) for k in ("tokens", "tokens_segment_ids"))
        return [
            {"image": self._paths[k], "used": np.bool_(k > 0), "tokens": text, "segments": ids}
            for k, text, ids in zip(row["number"].tolist(), texts, segments)
        ]


def decode(image: Any, *, draw: Any) -> Any:
    """Defines the graph. The keys `used`, `tokens` and `segments` bypass it."""
    device = "mixed" if backend.GetCUDADeviceCount() else "cpu"
    images = fn.decoders.image(jax_fn.read_file(image), device=device)
    return augment.random_resized_crop(images, SIDE, draw=draw, scale=(0.8, 1))


def as_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Groups a batch of slots into rows: tokens [rows, ROOM], images [rows, SLOTS, ...]."""
    shapes = {"image": (ROWS, SLOTS, SIDE, SIDE, 3), "used": (ROWS, SLOTS)}
    shapes |= {"tokens": (ROWS, ROOM), "segments": (ROWS, ROOM)}
    return {key: batch[key].reshape(shape) for key, shape in shapes.items()}


def dataset(folder: Path, epochs: int | None = None, seed: int = 1) -> grain.IterDataset:
    """Returns shuffled batches of rows. An incomplete last batch is dropped."""
    captions = json.loads((folder / "captions.json").read_text())
    if bad := [name for name, texts in captions.items() if not (texts and all(texts))]:
        raise ValueError(f"captions.json has no text for {bad}: add captions, or remove the files")
    pairs = [*enumerate(captions.values(), 1)]  # number 0 means no image
    ds = grain.MapDataset.source(pairs).seed(seed).shuffle().repeat(epochs).random_map(choose)
    room = {"tokens": ROOM, "number": SLOTS}
    rows = FirstFitPackIterDataset(
        ds.to_iter_dataset(), length_struct=room, num_packing_bins=8, seed=seed
    )
    Image.new("RGB", (SIDE, SIDE)).save(blank := folder / "blank.png")
    slots = FlatMapIterDataset(rows, Slots([blank, *(folder / name for name in captions)]))
    call = {"batch_size": ROWS * SLOTS, "drop_remainder": True, "output_map": ["image"]}
    return slots.pipe(DALITransform(decode, **call)).map(as_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs captions and their images into rows.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    batch = next(iterator := iter(dataset(draw_pairs(out / "data", 100))))
    captions = [captions_of(batch, row) for row in range(ROWS)]
    print(*captions, sep="\n")
    images = np.asarray(batch["image"])[np.asarray(batch["used"])]
    show({"image": images, "caption": [*chain(*captions)]}).save(out / "batch.png")
    iterator.close()


if __name__ == "__main__":
    main()
