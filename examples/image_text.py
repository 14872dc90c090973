"""Images and captions in a batch: DALI decodes images, and Grain packs the tokens into rows.

A row has ROOM tokens and up to SLOTS captions with their images:

    tokens    a red disc.|a small blue square.|.......    segments  1 1 1 1 2 2 2 2 2 2 0 0 0
    images    [disc]      [square]  [none]  [none]        used      yes yes no no

It prints the captions of a batch, and writes its images to examples/out/image_text.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import grain
import numpy as np
import nvidia.dali.fn as fn
from grain.experimental import FirstFitPackIterDataset, FlatMapIterDataset, FlatMapTransform
from nvidia.dali import backend
from PIL import Image, ImageDraw

from dalijax.adapters.grain import DALITransform
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "image_text"
SIDE, ROOM, SLOTS, ROWS = 48, 96, 4, 4  # pixels, tokens and images per row, rows per batch
COLORS = ("red", "green", "blue", "orange")


def draw_pairs(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes images of discs and squares, and their captions as captions.json."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for number in range(count):
        radius, color = int(rng.integers(8, 28)), COLORS[rng.integers(4)]
        kind, size = ("disc", "square")[rng.integers(2)], "small " if radius < 16 else ""
        pen = ImageDraw.Draw(image := Image.new("RGB", (64, 64), "white"))
        box = [32 - radius] * 2 + [32 + radius] * 2
        (pen.ellipse if kind == "disc" else pen.rectangle)(box, fill=color)
        image.save(folder / f"{number:04d}.png")
        captions[f"{number:04d}.png"] = f"a {size}{color} {kind}{', at last' * (number % 3)}."
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def captions_of(batch: dict[str, Any], row: int) -> list[str]:
    """Returns the captions of a row in the order of its images, without truncated characters."""
    tokens, segments = (np.asarray(batch[key][row]) for key in ("tokens", "segments"))
    numbers = range(1, segments.max() + 1)
    return [bytes(tokens[segments == k].tolist()).decode(errors="ignore") for k in numbers]


class Slots(FlatMapTransform):
    """Splits a packed row into SLOTS records, each with an image and a part of the tokens."""

    max_fan_out = SLOTS

    def __init__(self, folder: Path, names: list[str]):
        blank = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE)).save(blank, "PNG")
        self._folder, self._names, self._blank = folder, names, blank.getvalue()

    def flat_map(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        texts, segments = (np.split(row[k], SLOTS) for k in ("tokens", "tokens_segment_ids"))
        records = []
        for text, segment, number in zip(texts, segments, row["number"].tolist()):
            name = self._names[number - 1] if number else ""  # shown in errors
            image = (self._folder / name).read_bytes() if number else self._blank
            record = {"image": image, "name": name, "used": np.bool_(number > 0)}
            records.append(record | {"tokens": text, "segments": segment})
        return records


def decode(image: Any, *, draw: Any) -> Any:
    """Defines the graph. The keys `used`, `tokens` and `segments` bypass it."""
    device = "mixed" if backend.GetCUDADeviceCount() else "cpu"
    images = fn.decoders.image(image, device=device)
    return fn.flip(fn.resize(images, size=(SIDE, SIDE)), horizontal=draw.coin_flip())


def as_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Groups a batch of slots into rows: tokens [rows, ROOM], images [rows, SLOTS, ...]."""
    shapes = {"image": (ROWS, SLOTS, SIDE, SIDE, 3), "used": (ROWS, SLOTS)}
    shapes |= {"tokens": (ROWS, ROOM), "segments": (ROWS, ROOM)}
    return {key: batch[key].reshape(shape) for key, shape in shapes.items()}


def dataset(folder: Path, epochs: int | None = None, seed: int = 1) -> grain.IterDataset:
    """Returns shuffled batches of rows. An incomplete last batch is dropped."""
    captions = json.loads((folder / "captions.json").read_text())
    if bad := [name for name, text in captions.items() if not (isinstance(text, str) and text)]:
        raise ValueError(f"captions.json has no text for {bad}: add captions, or remove the files")
    pairs = [  # the tokens are bytes; number 0 means no image
        {"tokens": np.array([*text.encode()[:ROOM]], np.int32), "number": np.array([k], np.int32)}
        for k, text in enumerate(captions.values(), 1)
    ]
    ds = grain.MapDataset.source(pairs).seed(seed).shuffle().repeat(epochs).to_iter_dataset()
    room = {"tokens": ROOM, "number": SLOTS}
    rows = FirstFitPackIterDataset(ds, length_struct=room, num_packing_bins=8, seed=seed)
    slots = FlatMapIterDataset(rows, Slots(folder, list(captions)))
    call = {"batch_size": ROWS * SLOTS, "drop_remainder": True, "output_map": ["image"]}
    return slots.pipe(DALITransform(decode, **call)).map(as_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs captions and their images into rows.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    batch = next(iterator := iter(dataset(draw_pairs(out / "data", 100))))
    print(*(captions_of(batch, row) for row in range(ROWS)), sep="\n")
    show({"image": np.concatenate(batch["image"])}).save(out / "batch.png")
    iterator.close()


if __name__ == "__main__":
    main()
