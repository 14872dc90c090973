"""Trains an image encoder and a text encoder, as CLIP does, on images with several captions.

    python examples/image_text.py

Kill it and run it again: it resumes from its last checkpoint, with the same batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from nvidia.dali import backend, fn
from PIL import Image, ImageDraw
from trainer import Batch, parse_arguments, train

from dalijax import augment, data_iterator, sources
from dalijax import fn as jax_fn
from dalijax.show import show

SIDE, ROOM = 48, 48  # pixels of an image, bytes of a caption
DEVICE = "mixed" if backend.GetCUDADeviceCount() and jax.default_backend() == "gpu" else "cpu"
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # of images and captions
COLORS = ("red", "green", "blue", "orange", "purple", "black")
KINDS = ("disc", "square", "triangle", "ring")
PLACES = {"top left": (24, 24), "top right": (72, 24), "center": (48, 48)}
PLACES |= {"bottom left": (24, 72), "bottom right": (72, 72)}


def draw_pairs(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes images of one shape each, and captions.json: three captions for each file name.

    A folder that is complete is not written again.
    """
    if (folder / "captions.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    captions = {}
    for number in range(count):
        color, kind, place = (str(rng.choice([*words])) for words in (COLORS, KINDS, PLACES))
        size, radius = (("small", 9), ("large", 20))[rng.integers(2)]
        x, y = rng.integers(-3, 4, 2) + PLACES[place]
        left, top, right, bottom = box = x - radius, y - radius, x + radius, y + radius
        gray = int(rng.integers(150, 231))
        pen = ImageDraw.Draw(image := Image.new("RGB", (96, 96), (gray, gray, gray)))
        if kind == "square":
            pen.rectangle(box, color)
        elif kind == "triangle":
            pen.polygon([(left, bottom), (right, bottom), (x, top)], color)
        else:
            pen.ellipse(box, color if kind == "disc" else None, color, width=radius // 2)
        image.save(folder / f"{number:04d}.png")
        captions[f"{number:04d}.png"] = [
            f"a {size} {color} {kind}, {place}",
            f"{place}: {kind}, {size} and {color}",
            f"in {color}, a {size} {kind} at the {place}",
        ]
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def tokens(text: str) -> dict[str, np.ndarray]:
    """Returns the first bytes of a caption, padded with zeros."""
    return {"caption": np.frombuffer(text.encode()[:ROOM].ljust(ROOM, b"\0"), np.uint8)}


def choose(record: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns a random caption of an image."""
    return tokens(rng.choice(record["captions"]))


def first(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the first caption of an image."""
    return tokens(record["captions"][0])


# No flips, since captions contain "left" and "right", and no changes of the hue.
@data_iterator(sharding=SHARDING)
def training_data(image: Any, caption: Any, *, draw: Any) -> Any:
    images = fn.decoders.image(jax_fn.read_file(image), device=DEVICE)
    images = augment.random_resized_crop(images, SIDE, draw=draw, scale=(0.8, 1))
    images = augment.color_jitter(images, draw=draw, brightness=0.2, contrast=0.2)
    return {"image": images, "caption": caption}


@data_iterator(mask=True, shuffle=False, sharding=SHARDING)
def evaluation_data(image: Any, caption: Any) -> Any:
    images = fn.decoders.image(jax_fn.read_file(image), device=DEVICE)
    return {"image": fn.resize(images, size=(SIDE, SIDE)), "caption": caption}


class Encoders(nnx.Module):
    """Encodes images and captions to vectors of length 1, by convolutions over pixels and bytes."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = [(3, 48, 4), (48, 64, 2)]  # channels before and after, and the stride
        self.convolutions = nnx.List(
            nnx.Conv(i, o, (4, 4), strides=stride, rngs=rngs) for i, o, stride in sizes
        )
        self.norms = nnx.List(nnx.LayerNorm(o, rngs=rngs) for _, o, _ in sizes)
        self.image_head = nnx.Linear((SIDE // 8) ** 2 * 64, 64, rngs=rngs)
        self.bytes = nnx.Embed(256, 32, rngs=rngs)
        self.words = nnx.Conv(32, 128, 7, rngs=rngs)
        self.text_head = nnx.Linear(128, 64, rngs=rngs)
        self.scale = nnx.Param(jnp.log(10.0))  # logarithm of the inverse temperature

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns vectors of the images and of the captions, [batch, 64]."""
        x = batch["image"].astype("float32") / 127.5 - 1
        for convolution, norm in zip(self.convolutions, self.norms):
            x = nnx.relu(norm(convolution(x)))
        images = self.image_head(x.reshape(len(x), -1))
        texts = self.text_head(nnx.relu(self.words(self.bytes(batch["caption"]))).max(axis=1))
        return tuple(v / jnp.linalg.norm(v, axis=1, keepdims=True) for v in (images, texts))


def loss_of(model: Encoders, batch: Batch) -> jax.Array:
    """Returns CLIP's loss: each image must find its caption, and each caption its image."""
    images, texts = model(batch)
    scores, pairs = jnp.exp(model.scale[...]) * images @ texts.T, jnp.arange(len(images))
    losses = [optax.softmax_cross_entropy_with_integer_labels(s, pairs) for s in (scores, scores.T)]
    return (losses[0] + losses[1]).mean() / 2


def evaluate(model: Encoders, source: Any) -> float:
    """Returns the share of images whose nearest caption, among those of all images, is theirs."""
    encode = nnx.jit(lambda model, batch: model(batch))
    rows = []
    for batch in evaluation_data(source=source.map(first, inputs=["captions"]), batch_size=64):
        found = (*encode(model, batch), batch["caption"])
        rows.append([np.asarray(x)[np.asarray(batch["mask"])] for x in found])
    images, texts, captions = map(np.concatenate, zip(*rows))
    assert len(images) == len(source)
    nearest = captions[(images @ texts.T).argmax(axis=1)]
    return float((nearest == captions).all(axis=1).mean())  # images may share a caption


def main() -> None:
    options = parse_arguments("image_text", "Trains an image encoder and a text encoder.", 250)
    folder = draw_pairs(options.out / "pairs", 900)
    captions = json.loads((folder / "captions.json").read_text())
    pairs = [
        {"image": str(folder / name).encode(), "captions": texts}
        for name, texts in captions.items()
    ]
    held_out, source = sources.Records(pairs[:150]), sources.Records(pairs[150:])
    chosen = source.random_map(choose, inputs=["captions"])
    stream = training_data.stream(source=chosen, batch_size=64, seed=1)
    show(stream, samples=16).save(options.out / "batch.png")
    model = Encoders(nnx.Rngs(0))
    before = evaluate(model, held_out)
    train(model, loss_of, stream, options, rate=2e-3)
    after = evaluate(model, held_out)
    print(f"retrieval among {len(held_out)} captions: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
