"""Volumes in .npy files with random crops and flips, and columns of a table.

    python examples/arrays.py                    # generated volumes
    python examples/arrays.py --data volumes     # a folder with one folder for each class

It trains a small classifier, and writes a picture of a batch to examples/out/arrays.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nvidia.dali.fn as dali_fn
from nvidia.dali import math as dali_math
from nvidia.dali import types

from dalijax import data_iterator, sources
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "arrays"
SIDE = 24  # side of a crop in voxels
KINDS = ("ball", "dots")


def draw_volumes(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes volumes of two classes and many sizes: float32 [depth, height, width]."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        kind = KINDS[number % 2]
        size = rng.integers(28, 40, 3)
        volume = rng.normal(0, 0.1, size)
        z, y, x = np.indices(size)
        balls, radius, spread = (1, 9, 0.15) if kind == "ball" else (60, 2, 0.5)
        for _ in range(balls):
            a, b, c = rng.uniform(0.5 - spread, 0.5 + spread, 3) * size
            volume += (z - a) ** 2 + (y - b) ** 2 + (x - c) ** 2 < radius**2
        (folder / kind).mkdir(parents=True, exist_ok=True)
        np.save(folder / kind / f"{number:04d}.npy", volume.astype(np.float32))
    return folder


def crop_and_flip(volume: Any, draw: Any) -> Any:
    """Crops a random cube of a volume [depth, height, width] and flips it at random."""
    room = volume.shape(dtype=types.INT32) - SIDE + 1  # a smaller volume is an error
    start = dali_math.floor(draw.uniform(shape=[3], name="crop") * room)
    start = dali_fn.cast(start, dtype=types.INT32)
    volume = dali_fn.slice(volume, start, [SIDE] * 3, axes=[0, 1, 2])
    volume = dali_fn.reshape(volume, shape=[SIDE, SIDE, SIDE, 1], layout="DHWC")
    flip = dali_fn.cast(draw.coin_flip(shape=[3], name="flip"), dtype=types.INT32)
    return dali_fn.flip(volume, depthwise=flip[0], vertical=flip[1], horizontal=flip[2])


@data_iterator(output_map=["volume", "label"], mask=True)
def volumes(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines crops of volumes in files, for `sources.Files`."""
    return crop_and_flip(dali_fn.decoders.numpy(data, dtype=types.FLOAT), draw), label


@data_iterator(output_map=["volume", "age", "dose", "label"], mask=True)
def patients(volume: Any, age: Any, dose: Any, label: Any, *, draw: Any) -> Any:
    """Defines crops of rows of a large array, and columns of a table, for `open_table`."""
    return crop_and_flip(volume, draw), age / 100.0, dose, label


def open_table(file: Path, count: int, seed: int = 0) -> sources.Arrays:
    """Creates a table whose volumes are rows of a .npy file; only rows of a batch are read."""
    rng, label = np.random.default_rng(seed), np.arange(count, dtype=np.int32) % 2
    rows = rng.normal(size=(count, SIDE + 8, SIDE + 8, SIDE + 8)) + label[:, None, None, None]
    np.save(file, rows.astype(np.float32))
    dose = rng.uniform(0, 1, count).astype(np.float32)
    columns = {"age": rng.integers(20, 90, count), "dose": dose, "label": label}
    return sources.Arrays({"volume": np.load(file, mmap_mode="r")} | columns)


@jax.jit
def step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Trains a linear classifier on the mean, the deviation and the edges of volumes."""
    volume = batch["volume"][..., 0]
    edges = jnp.abs(jnp.diff(volume, axis=1)).mean((1, 2, 3))
    x = [volume.mean((1, 2, 3)), volume.std((1, 2, 3)), edges, jnp.ones_like(edges)]

    def loss_of(weights: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(jnp.stack(x, 1) @ weights)
        loss = -jnp.take_along_axis(log, batch["label"][:, None], axis=1)[:, 0]
        return loss.mean(where=batch["mask"])

    loss, slope = jax.value_and_grad(loss_of)(weights)
    return weights - 2.0 * slope, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on crops of volumes.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--count", type=int, default=120, help="number of generated volumes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.data or draw_volumes(options.out / "data", options.count)
    source = sources.Files(folder, extensions=["npy"])
    weights = jnp.zeros((4, len(source.classes)))
    with volumes(source=source, batch_size=8, seed=1) as batches:
        show(batches, classes={"label": source.classes}).save(options.out / "batch.png")
        for epoch, epoch_batches in batches.epochs(options.epochs):
            for batch in epoch_batches:
                weights, loss = step(weights, batch)
            print(f"epoch {epoch}: loss {loss:.3f}")
    print(f"{source}; {options.out / 'batch.png'}; compiled {step._cache_size()} times")
    with patients(source=open_table(options.out / "table.npy", 24), batch_size=8) as batches:
        print({name: array.shape for name, array in next(batches).items()})


if __name__ == "__main__":
    main()
