"""Python functions in a DALI graph: JAX, Numba, and NumPy (or CuPy, on a GPU).

    python examples/functions.py

It writes a picture of the result of each function to examples/out/functions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nvidia.dali.fn as dali_fn
from images import CACHE, make_images, split
from nvidia.dali import backend, types

from dalijax import data_iterator, fn
from dalijax.show import show

OUT = Path(__file__).resolve().parent / "out" / "functions"
SIDE, BATCH = 96, 8
GPU = backend.GetCUDADeviceCount() > 0


@fn.jax_function(num_outputs=2, output_layouts=["HWC", ""])
@jax.jit
def mixup(images: jax.Array, hot: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mixes each image and its label with another image (mixup, Zhang et al., 2018).

    The key depends only on the seed and the batch, so a resumed run mixes the same images.
    """
    share = jax.random.uniform(key, (images.shape[0],))
    other = jnp.roll(jnp.arange(images.shape[0]), 1)

    def mixed(x: jax.Array) -> jax.Array:
        weight = share.reshape((-1,) + (1,) * (x.ndim - 1))
        return weight * x + (1 - weight) * x[other]

    return mixed(images), mixed(hot)


@fn.jax_function(num_outputs=2, output_layouts=["HWC", ""])
@jax.jit
def cutmix(images: jax.Array, hot: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pastes a box of another image, and mixes the labels by its area (CutMix, Yun, 2019)."""
    where, size = jax.random.split(key)
    count, height, width, _ = images.shape
    center = jax.random.uniform(where, (count, 2)) * jnp.array([height, width], jnp.float32)
    half = jax.random.uniform(size, (count, 1), minval=0.15, maxval=0.35) * height
    rows, columns = jnp.arange(height)[None, :, None], jnp.arange(width)[None, None, :]
    inside = (jnp.abs(rows - center[:, :1, None]) < half[:, :, None]) & (
        jnp.abs(columns - center[:, 1:, None]) < half[:, :, None]
    )
    other = jnp.roll(jnp.arange(count), 1)
    share = 1 - inside.mean((1, 2))[:, None].astype(jnp.float32)
    pasted = jnp.where(inside[..., None], images[other], images)
    return pasted, share * hot + (1 - share) * hot[other]


def swirl(out: Any, image: Any, angle: Any) -> None:
    """Rotates pixels around the center, by larger angles near the center; compiled by Numba."""
    height, width, channels = image.shape
    for y in range(height):
        for x in range(width):
            dy, dx = y - height / 2, x - width / 2
            turn = angle[0] * np.exp(-(dy * dy + dx * dx) / (0.08 * height * height))
            sine, cosine = np.sin(turn), np.cos(turn)
            from_y = min(max(int(height / 2 + dy * cosine - dx * sine), 0), height - 1)
            from_x = min(max(int(width / 2 + dy * sine + dx * cosine), 0), width - 1)
            for channel in range(channels):
                out[y, x, channel] = image[from_y, from_x, channel]


def solarized(image: Any, *, rng: np.random.Generator) -> Any:
    """Inverts pixels above a random threshold, with CuPy on a GPU and NumPy otherwise."""
    threshold = rng.uniform(0.3, 0.7)
    if GPU:
        import cupy as xp

        image = xp.from_dlpack(image)
    else:
        xp = np
    return xp.where(image > threshold, 1 - image, image)


OUTPUTS = ["images", "mixup", "mixup labels", "cutmix", "cutmix labels", "swirl", "solarized"]


@data_iterator(output_map=OUTPUTS, reader_name="reader")
def batches(files: list[str], classes: list[int], num_classes: int) -> Any:
    """Defines images, and the results of the functions."""
    encoded, labels = dali_fn.readers.file(
        files=files, labels=classes, random_shuffle=True, name="reader"
    )
    images = dali_fn.decoders.image(encoded, device="mixed" if GPU else "cpu")
    images = dali_fn.resize(images, size=(SIDE, SIDE), dtype=types.FLOAT) / 255.0
    hot = dali_fn.one_hot(labels.gpu() if GPU else labels, num_classes=num_classes)
    mixed, mixed_labels = mixup(images, hot)
    pasted, pasted_labels = cutmix(images, hot)
    on_cpu = dali_fn.resize(dali_fn.decoders.image(encoded), size=(SIDE, SIDE), dtype=types.FLOAT)
    turned = fn.numba_function(
        on_cpu / 255.0,
        dali_fn.random.uniform(range=(2.0, 4.0), shape=[1]),
        run_fn=swirl,
        in_types=[np.float32, np.float32],
        ins_ndim=[3, 1],
        out_types=np.float32,
        outs_ndim=3,
    )
    inverted = fn.dl_tensor_python_function(images, function=solarized, batch_processing=False)
    return images, mixed, mixed_labels, pasted, pasted_labels, turned, inverted


def shares(labels: Any, names: list[str]) -> list[str]:
    """Describes mixed labels, with the largest weight first."""
    rows = [sorted(zip(row.tolist(), names), reverse=True) for row in np.asarray(labels)]
    return [" + ".join(f"{value:.2f} {name}" for value, name in row if value > 0) for row in rows]


def save(batch: dict[str, Any], name: str, out: Path, titles: list[str]) -> None:
    """Draws a batch: the originals at the top, and the results at the bottom."""
    drawn = {"decoded": batch["images"], name: batch[name]}
    show(drawn | ({"labels": titles} if titles else {})).save(out / f"{name}.png")
    print(f"{name}: {out / f'{name}.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the results of functions in a graph.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--count", type=int, default=120, help="number of generated images")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names, (files, classes), _ = split(
        arguments.data or make_images(arguments.cache, count=arguments.count)
    )
    call = {"files": files, "classes": classes, "num_classes": len(names)}
    iterator = batches(**call, batch_size=BATCH)
    next(iterator)
    state = iterator.get_state()
    batch = next(iterator)
    for name in ("mixup", "cutmix", "swirl", "solarized"):
        labels = batch.get(f"{name} labels", ())
        save(batch, name, arguments.out, shares(labels, names))
    again = batches(**call, batch_size=BATCH)
    again.set_state(state)
    resumed = next(again)
    same = all(np.array_equal(np.asarray(batch[k]), np.asarray(resumed[k])) for k in batch)
    print(f"A new iterator restores the state and returns the same batch: {same}")
    iterator.close()
    again.close()


if __name__ == "__main__":
    main()
