"""Learns features of images without their labels, by SimCLR, from two views of each image.

    python examples/views.py

Kill it and run it again: it resumes from its last checkpoint, with the same batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from nvidia.dali import backend, fn
from PIL import Image
from trainer import Batch, parse_arguments, train

from dalijax import augment, data_iterator, sources
from dalijax.show import show

SIDE, TEMPERATURE = 48, 0.2
DEVICE = "mixed" if backend.GetCUDADeviceCount() and jax.default_backend() == "gpu" else "cpu"


PATTERNS = {  # functions of the coordinates (x, y), in turns
    "rows": lambda x, y: np.sin(y),
    "columns": lambda x, y: np.sin(x),
    "diagonals": lambda x, y: np.sin((x + y) / 1.4),
    "checks": lambda x, y: np.sin(x) * np.sin(y),
    "dots": lambda x, y: np.maximum(np.sin(x), 0) * np.maximum(np.sin(y), 0) * 2 - 0.5,
    "rings": lambda x, y: np.sin(np.hypot(x - 8, y - 8)),
}


def draw_patterns(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes a folder with one folder of JPEGs for each pattern, in random colors."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        name = list(PATTERNS)[number % len(PATTERNS)]
        side, step = int(rng.integers(80, 129)), rng.uniform(0.35, 0.7)
        y, x = np.mgrid[:side, :side] * step + rng.uniform(0, 6, (2, 1, 1))
        share = PATTERNS[name](x, y)[..., None] / 2 + 0.5
        dark, light = rng.uniform([[0], [90]], [[120], [255]], (2, 3))
        pixels = dark + (light - dark) * share + rng.normal(0, 12, (side, side, 3))
        path = folder / name / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=92)
    return folder


def view(images: Any, draw: Any) -> Any:
    """Returns a view as SimCLR makes it: a crop, a flip, other colors and a blur."""
    x = augment.random_resized_crop(images, SIDE, draw=draw, scale=(0.3, 1), flip=0.5)
    colors = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
    x = augment.color_jitter(x, draw=draw, **colors, probability=0.8)
    x = augment.grayscale(x, draw=draw, probability=0.2)
    return augment.gaussian_blur(x, 3, draw=draw, probability=0.5)


# Draws without a name have the numbers of their place, so that the views differ.
@data_iterator
def training_data(data: Any, *, draw: Any) -> Any:
    images = fn.decoders.image(data, device=DEVICE)
    return {"first": view(images, draw), "second": view(images, draw)}


@data_iterator(mask=True, shuffle=False)
def evaluation_data(data: Any, label: Any) -> Any:
    images = fn.decoders.image(data, device=DEVICE)
    return {"image": augment.fit_window(images, SIDE).image(images), "label": label}


class Encoder(nnx.Module):
    """Four convolutions with a stride of 2, and a projection, which only the loss uses."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = [(3, 32), (32, 64), (64, 96), (96, 128)]
        self.convolutions = nnx.List(nnx.Conv(i, o, (3, 3), strides=2, rngs=rngs) for i, o in sizes)
        self.norms = nnx.List(nnx.LayerNorm(o, rngs=rngs) for _, o in sizes)
        self.projection = nnx.Sequential(
            nnx.Linear(128, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 64, rngs=rngs)
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.standardize(images.astype("float32"), axis=(1, 2, 3), epsilon=1.0)
        for convolution, norm in zip(self.convolutions, self.norms):
            x = nnx.relu(norm(convolution(x)))
        return x.mean(axis=(1, 2))


def loss_of(model: Encoder, batch: Batch) -> jax.Array:
    """Returns the loss of SimCLR: each view must find the other view of its image."""
    images = jnp.concatenate([batch["first"], batch["second"]])
    vectors = model.projection(model(images))
    vectors /= jnp.linalg.norm(vectors, axis=1, keepdims=True)
    scores = vectors @ vectors.T / TEMPERATURE - 1e9 * jnp.eye(len(vectors))
    others = jnp.roll(jnp.arange(len(vectors)), len(vectors) // 2)
    return -jax.nn.log_softmax(scores)[jnp.arange(len(vectors)), others].mean()


def features(model: Encoder, source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a vector of length 1 and the label of each image."""
    encode = nnx.jit(lambda model, images: model(images))
    vectors, labels = [], []
    for batch in evaluation_data(source=source, batch_size=64):
        valid = np.asarray(batch["mask"])
        vectors.append(np.asarray(encode(model, batch["image"]))[valid])
        labels.append(np.asarray(batch["label"])[valid])
    found = np.concatenate(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True), np.concatenate(labels)


def evaluate(model: Encoder, known: Any, held_out: Any) -> float:
    """Returns the share of images whose nearest known image has the same label."""
    vectors, labels = features(model, known)
    others, expected = features(model, held_out)
    assert len(others) == len(held_out)
    return float((labels[(others @ vectors.T).argmax(axis=1)] == expected).mean())


def main() -> None:
    options = parse_arguments("views", "Learns features of images without their labels.", 200)
    folder = draw_patterns(options.out / "patterns", 900)
    source = sources.Files(folder)
    is_held_out = np.arange(len(source)) % 5 == 0
    known = sources.Selection(source, ~is_held_out)
    held_out = sources.Selection(source, is_held_out)
    stream = training_data.stream(source=known, batch_size=64, seed=1)
    show(stream, samples=12).save(options.out / "batch.png")
    model = Encoder(nnx.Rngs(0))
    before = evaluate(model, known, held_out)
    train(model, loss_of, stream, options, rate=1e-3)
    after = evaluate(model, known, held_out)
    print(f"nearest neighbors of {len(held_out)} images: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
