"""Trains a small network to segment images. Each mask follows the window of its image.

    python examples/segmentation.py

Kill it and run it again: it resumes from its last checkpoint, with the same batches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from nvidia.dali import backend, fn, types
from scenes import CLASSES, draw_scenes
from trainer import Batch, parse_arguments, train

from dalijax import augment, data_iterator, sources
from dalijax import fn as jax_fn
from dalijax.show import show

SIDE, IGNORED = 96, 255  # pixels; a class number that the loss and the metric ignore
DEVICE = "mixed" if backend.GetCUDADeviceCount() and jax.default_backend() == "gpu" else "cpu"


def decoded(image: Any, mask: Any) -> tuple[Any, Any]:
    """Reads and decodes images and masks, given their paths."""
    images = fn.decoders.image(jax_fn.read_file(image), device=DEVICE)
    masks = jax_fn.read_file(mask)
    return images, fn.decoders.image(masks, device=DEVICE, output_type=types.GRAY)


@data_iterator
def training_data(image: Any, mask: Any, *, draw: Any) -> Any:
    images, masks = decoded(image, mask)
    window = augment.scale_window(images, SIDE, draw=draw, scale=(0.7, 1.6), flip=0.5)
    pixels = augment.color_jitter(window.image(images), draw=draw, brightness=0.3)
    return {"image": pixels, "mask": window.mask(masks, fill=IGNORED)}


# An output is named "mask", so that the mask of the rows needs another name.
@data_iterator(mask="valid", shuffle=False)
def evaluation_data(image: Any, mask: Any) -> Any:
    images, masks = decoded(image, mask)
    window = augment.fit_window(images, SIDE)
    return {"image": window.image(images), "mask": window.mask(masks, fill=IGNORED)}


class Network(nnx.Module):
    """Convolutions at a quarter of the size, with growing dilation, then a class for each pixel."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.down = nnx.Conv(32, 64, (4, 4), strides=4, rngs=rngs)
        self.blocks = nnx.List(
            nnx.Conv(64, 64, (3, 3), kernel_dilation=dilation, rngs=rngs)
            for dilation in (1, 2, 4, 8, 1)
        )
        self.norms = nnx.List(nnx.LayerNorm(64, rngs=rngs) for _ in self.blocks)
        self.head = nnx.Conv(64 + 32, len(CLASSES) + 1, (3, 3), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        fine = nnx.relu(self.stem(images.astype("float32") / 127.5 - 1))
        x = nnx.relu(self.down(fine))
        for convolution, norm in zip(self.blocks, self.norms):
            x = x + nnx.relu(convolution(norm(x)))
        x = jax.image.resize(x, (*fine.shape[:3], x.shape[-1]), "linear")
        return self.head(jnp.concatenate([x, fine], axis=-1))


def loss_of(model: Network, batch: Batch) -> jax.Array:
    labels = batch["mask"][..., 0].astype("int32")
    counted = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), jnp.where(counted, labels, 0)
    )
    return losses.mean(where=counted)


@nnx.jit
def confusion(model: Network, batch: Batch) -> jax.Array:
    """Returns the number of pixels of each pair of a true and a predicted class."""
    labels = batch["mask"][..., 0].astype("int32")
    counted = (labels != IGNORED) & batch["valid"][:, None, None]
    pairs = labels * (len(CLASSES) + 1) + model(batch["image"]).argmax(axis=-1)
    return jnp.bincount(jnp.where(counted, pairs, 16).ravel(), length=17)[:16].reshape(4, 4)


def evaluate(model: Network, source: Any) -> float:
    """Returns the mean intersection over union of the classes. Each image is evaluated once."""
    total, images = np.zeros((4, 4)), 0
    for batch in evaluation_data(source=source, batch_size=16):
        total += np.asarray(confusion(model, batch))
        images += int(batch["valid"].sum())
    assert images == len(source)
    hits = np.diag(total)
    return float((hits / (total.sum(axis=0) + total.sum(axis=1) - hits)).mean())


def main() -> None:
    options = parse_arguments("segmentation", "Trains a network that segments images.", 150)
    folder = draw_scenes(options.out / "scenes", 400)
    paths = [
        {"image": str(path).encode(), "mask": str(folder / "masks" / f"{path.stem}.png").encode()}
        for path in sorted((folder / "images").glob("*.jpg"))
    ]
    held_out = sources.Records(paths[:80])
    stream = training_data.stream(source=sources.Records(paths[80:]), batch_size=16, seed=1)
    show(stream, samples=6).save(options.out / "batch.png")
    model = Network(nnx.Rngs(0))
    before = evaluate(model, held_out)
    train(model, loss_of, stream, options)
    after = evaluate(model, held_out)
    print(f"mean IoU of {len(held_out)} images: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
