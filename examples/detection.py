"""Trains a small network to detect objects, and evaluates it with pycocotools.

    python examples/detection.py

Kill it and run it again: it resumes from its last checkpoint, with the same batches.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from nvidia.dali import backend, fn
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import CLASSES, draw_scenes
from trainer import Batch, parse_arguments, train

from dalijax import augment, data_iterator, sources
from dalijax.show import show

SIDE, STRIDE, MOST = 96, 4, 16  # pixels of an image and of a cell; detections of an image
DEVICE = "mixed" if backend.GetCUDADeviceCount() and jax.default_backend() == "gpu" else "cpu"

_middles = np.arange(STRIDE / 2, SIDE, STRIDE, np.float32)
CELLS = np.stack(np.meshgrid(_middles, _middles), axis=-1).reshape(-1, 2)  # centers (x, y)


@data_iterator
def training_data(data: Any, boxes: Any, labels: Any, *, draw: Any) -> Any:
    images = fn.decoders.image(data, device=DEVICE)
    window = augment.scale_window(images, SIDE, draw=draw, scale=(0.7, 1.6), flip=0.5)
    boxes, labels, count = window.boxes(boxes, labels, min_size=4, max_boxes=8)
    pixels = augment.color_jitter(window.image(images), draw=draw, brightness=0.3)
    return {"image": pixels, "boxes": boxes, "labels": labels, "count": count}


@data_iterator(mask=True, shuffle=False)
def evaluation_data(data: Any, image_id: Any) -> Any:
    images = fn.decoders.image(data, device=DEVICE)
    window = augment.fit_window(images, SIDE)
    return {"image": window.image(images), "image_id": image_id, "matrix": window.matrix()}


class Network(nnx.Module):
    """Scores and a box for each cell of a grid."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.down = nnx.Conv(32, 64, (STRIDE, STRIDE), strides=STRIDE, rngs=rngs)
        self.blocks = nnx.List(
            nnx.Conv(64, 64, (3, 3), kernel_dilation=dilation, rngs=rngs)
            for dilation in (1, 2, 4, 2, 1)
        )
        self.norms = nnx.List(nnx.LayerNorm(64, rngs=rngs) for _ in self.blocks)
        self.head = nnx.Conv(64, len(CLASSES) + 4, (1, 1), rngs=rngs)

    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits [batch, cells, classes], and corners [batch, cells, 4] in pixels."""
        x = nnx.relu(self.stem(images.astype("float32") / 127.5 - 1))
        x = nnx.relu(self.down(x))
        for convolution, norm in zip(self.blocks, self.norms):
            x = x + nnx.relu(convolution(norm(x)))
        x = self.head(x).reshape(len(images), len(CELLS), -1)
        lengths = 16 * jnp.exp(jnp.clip(x[..., -4:], -4, 2))  # from the cell's center to the edges
        boxes = jnp.concatenate([CELLS - lengths[..., :2], CELLS + lengths[..., 2:]], axis=-1)
        return x[..., :-4] - 3, boxes


def overlap(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the intersection over union of boxes [..., 4]."""

    def area(low: jax.Array, high: jax.Array) -> jax.Array:
        return jnp.maximum(high - low, 0).prod(axis=-1)

    low, high = jnp.maximum(a[..., :2], b[..., :2]), jnp.minimum(a[..., 2:], b[..., 2:])
    common, areas = area(low, high), area(a[..., :2], a[..., 2:]) + area(b[..., :2], b[..., 2:])
    return common / jnp.maximum(areas - common, 1e-6)


def loss_of(model: Network, batch: Batch) -> jax.Array:
    """Returns a loss like CenterNet's: the score of a class is highest at the center of a box."""
    scores, found = model(batch["image"])
    boxes, labels = batch["boxes"], batch["labels"]
    exists = jnp.arange(boxes.shape[1]) < batch["count"][:, None]  # the other rows are padding
    centers, sizes = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    away = (CELLS[:, None] - centers[:, None]) / jnp.maximum(sizes, 1)[:, None]
    heat = jnp.exp(-25 * (away**2).sum(axis=-1)) * exists[:, None]  # [batch, cells, boxes]
    goal = (heat[..., None] * jax.nn.one_hot(labels, len(CLASSES))[:, None]).max(axis=2)
    classification = optax.sigmoid_binary_cross_entropy(scores, goal).sum()
    nearest = jnp.take_along_axis(boxes, heat.argmax(axis=2)[..., None], axis=1)
    localization = ((1 - overlap(found, nearest)) * heat.max(axis=2)).sum()
    return (classification + 2 * localization) / jnp.maximum(exists.sum(), 1)


@nnx.jit
def detect(model: Network, images: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the scores, labels and boxes of the highest local maxima of images."""
    scores, boxes = model(images)
    scores = nnx.sigmoid(scores)
    grid = scores.reshape(len(images), SIDE // STRIDE, SIDE // STRIDE, -1)
    peaks = nnx.max_pool(grid, (3, 3), padding="SAME").reshape(scores.shape)
    scores = jnp.where(scores == peaks, scores, 0).reshape(len(images), -1)
    best, places = jax.lax.top_k(scores, MOST)
    cells, labels = places // len(CLASSES), places % len(CLASSES)
    return best, labels, jnp.take_along_axis(boxes, cells[..., None], axis=1)


def evaluate(model: Network, source: Any, annotations: Path, category_ids: Any) -> float:
    """Returns COCO's average precision at an overlap of 0.5. Each image is evaluated once."""
    results, image_ids = [], []
    for batch in evaluation_data(source=source, batch_size=16):
        scores, labels, boxes = map(np.asarray, detect(model, batch["image"]))
        for row in np.flatnonzero(batch["mask"]):
            back = np.linalg.inv(batch["matrix"][row])
            corners = boxes[row].reshape(-1, 2, 2) @ back[:2, :2].T + back[:2, 2]
            xywh = np.concatenate([corners[:, 0], corners[:, 1] - corners[:, 0]], axis=1)
            image_ids.append(int(batch["image_id"][row]))
            results += [
                {"image_id": image_ids[-1], "category_id": int(k), "bbox": box, "score": float(s)}
                for k, box, s in zip(category_ids[labels[row]], xywh.tolist(), scores[row])
            ]
    assert len(image_ids) == len({*image_ids}) == len(source)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def main() -> None:
    options = parse_arguments("detection", "Trains a network that detects objects.", 200)
    folder = draw_scenes(options.out / "scenes", 400)
    annotations = folder / "annotations.json"
    scenes = sources.Coco(annotations, folder / "images")
    is_held_out = np.arange(len(scenes)) % 5 == 0
    held_out = sources.Selection(scenes, is_held_out)
    stream = training_data.stream(
        source=sources.Selection(scenes, ~is_held_out), batch_size=16, seed=1
    )
    show(stream, samples=10, classes=scenes.classes).save(options.out / "batch.png")
    model = Network(nnx.Rngs(0))
    before = evaluate(model, held_out, annotations, scenes.category_ids)
    train(model, loss_of, stream, options)
    after = evaluate(model, held_out, annotations, scenes.category_ids)
    print(f"average precision of {len(held_out)} images: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
