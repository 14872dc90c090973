"""Trains a small network to caption images of many sizes, packed into rows of tokens.

    python examples/native_resolution.py

Kill it and run it again: it resumes from its last checkpoint, with the same batches.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from nvidia.dali import backend, fn
from PIL import Image, ImageDraw, ImageFont
from trainer import Batch, parse_arguments, train

from dalijax import augment, data_iterator, sources

PATCH, LENGTH, IMAGES, ROWS = 8, 128, 10, 12  # pixels; tokens and images of a row; rows of a batch
DEVICE = "mixed" if backend.GetCUDADeviceCount() and jax.default_backend() == "gpu" else "cpu"
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # of patches and tokens
COLORS = ("red", "green", "blue", "yellow", "purple", "black")
KINDS = ("disc", "square", "triangle", "ring")
END = "."
WORDS = ("", END, "a", "left", "of", "above", *COLORS, *KINDS)  # token 0 is no word
# Colors of patches, words and padding in pictures; neighboring images have different shades.
SHADES = (("#8fb8de", "#1f5f99", "#bbbbbb"), ("#9ed0a5", "#2f7d3b", "#bbbbbb"))


def draw_images(folder: Path, count: int, seed: int = 0) -> Path:
    """Writes images of one to four objects, and captions.json: a caption for each file name.

    Objects are side by side in wide images, and below each other in tall images. A folder that is
    complete is not written again.
    """
    if (folder / "captions.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    captions = {}
    for number in range(count):
        num_objects, is_wide = int(rng.integers(1, 5)), bool(rng.integers(2))
        side = int(rng.integers(20, 33))  # pixels for each object
        size = (num_objects * side, side) if is_wide else (side, num_objects * side)
        gray = int(rng.integers(120, 201))
        pen = ImageDraw.Draw(image := Image.new("RGB", size, (gray, gray, gray)))
        objects = []
        for k in range(num_objects):
            color, kind = (str(rng.choice(words)) for words in (COLORS, KINDS))
            low, high = rng.integers(1, 4, 2), side - rng.integers(1, 4, 2)
            start = np.array([k * side, 0] if is_wide else [0, k * side])
            draw_object(pen, kind, color, (*(start + low).tolist(), *(start + high).tolist()))
            objects.append(f"a {color} {kind}")
        image.save(folder / f"{number:04d}.png")
        captions[f"{number:04d}.png"] = (" left of " if is_wide else " above ").join(objects)
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def draw_object(pen: ImageDraw.ImageDraw, kind: str, color: str, box: tuple[int, ...]) -> None:
    """Draws an object that fills a box (left, top, right, bottom)."""
    left, top, right, bottom = box
    if kind == "square":
        pen.rectangle(box, color)
    elif kind == "triangle":
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], color)
    else:
        pen.ellipse(box, color if kind == "disc" else None, color, width=(right - left) // 4)


def tokens(caption: str) -> np.ndarray:
    """Returns the numbers of a caption's words, and of the end."""
    return np.array([WORDS.index(word) for word in [*caption.split(), END]], np.int32)


def packed(records: list[dict[str, Any]]) -> sources.Packed:
    """Returns a source of rows of images and their captions."""
    path = sources.Field(np.uint8, 1, is_path=True)  # the graph gets the bytes of the file
    source = sources.Records(records, kinds={"image": path})
    return sources.Packed(
        source, "image", length=LENGTH, images=IMAGES, patch=PATCH, text="caption"
    )


# No flips, since captions contain "left", and no changes of the hue.
@data_iterator(sharding=SHARDING)
def training_data(image: Any, caption: Any, *, draw: Any, pack: Any) -> Any:
    images = fn.decoders.image(image, device=DEVICE)
    images = augment.color_jitter(images, draw=draw, brightness=0.2, contrast=0.2)
    return {"patches": pack.patches(images), "tokens": pack.tokens(caption)}


@data_iterator(mask=True, shuffle=False, sharding=SHARDING)
def evaluation_data(image: Any, caption: Any, *, pack: Any) -> Any:
    images = fn.decoders.image(image, device=DEVICE)
    return {"patches": pack.patches(images), "tokens": pack.tokens(caption)}


class Block(nnx.Module):
    """Attention and a hidden layer."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.heads = nnx.Linear(width, 3 * width, rngs=rngs)
        self.join = nnx.Linear(width, width, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, attends: jax.Array) -> jax.Array:
        split = self.heads(self.norms[0](x)).reshape(*x.shape[:2], 3, 4, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(split, 2, 0), mask=attends)
        x = x + self.join(mixed.reshape(x.shape))
        return x + self.out(nnx.gelu(self.hidden(self.norms[1](x))))


class Captioner(nnx.Module):
    """Predicts the next word at each token of packed rows."""

    def __init__(self, rngs: nnx.Rngs, width: int = 96, depth: int = 3):
        self.patches = nnx.Linear(PATCH * PATCH * 3, width, rngs=rngs)
        self.words, self.rows, self.columns = (
            nnx.Embed(count, width, embedding_init=nnx.initializers.normal(0.5), rngs=rngs)
            for count in (len(WORDS), LENGTH + 1, 2 * LENGTH)
        )
        self.blocks = nnx.List(Block(width, rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, len(WORDS), rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits [rows, length, words]."""
        segments, (y, x) = batch["segment_ids"], jnp.moveaxis(batch["positions"], -1, 0)
        is_word = y < 0
        pixels = self.patches(batch["patches"].astype("float32") / 127.5 - 1)
        z = jnp.where(is_word[..., None], self.words(batch["tokens"]), pixels)
        z = z + self.rows(y + 1) + self.columns(x + LENGTH * is_word)
        is_own = segments[:, :, None] == segments[:, None]  # [rows, queries, keys]
        attends = is_own & (jnp.tri(LENGTH, dtype=bool) | ~is_word[:, None])
        for block in self.blocks:
            z = block(z, attends[:, None])
        return self.head(self.norm(z))


def next_words(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the next word of each token, and whether the token has a next word."""
    words = jnp.pad(batch["tokens"][:, 1:], [(0, 0), (0, 1)])
    return words, words > 0


def loss_of(model: Captioner, batch: Batch) -> jax.Array:
    """Returns the mean cross-entropy of words. The last patch predicts the first word."""
    words, exists = next_words(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), words)
    return (losses * exists).sum() / jnp.maximum(exists.sum(), 1)


@nnx.jit
def count_mistakes(model: Captioner, batch: Batch) -> jax.Array:
    """Returns the number of wrong words for each image, [rows, images].

    If it is 0, the model generates the caption: it predicts each word from the words before.
    """
    words, exists = next_words(batch)
    is_wrong = exists & (model(batch).argmax(axis=-1) != words)
    is_of_image = batch["segment_ids"][:, None] == jnp.arange(1, IMAGES + 1)[:, None]
    return (is_of_image & is_wrong[:, None]).sum(axis=-1)


def evaluate(model: Captioner, source: sources.Packed) -> float:
    """Returns the share of images whose caption the model generates without a mistake."""
    mistakes = []
    for batch in evaluation_data(source=source, batch_size=ROWS):
        counts = np.asarray(count_mistakes(model, batch))
        mistakes += counts[np.asarray(batch["mask"])].tolist()
    assert len(mistakes) == len(source)  # each image once
    return float(np.mean(np.array(mistakes) == 0))


def image_and_caption(batch: Batch, row: int, segment: int) -> tuple[Image.Image, str]:
    """Returns an image of a row, assembled from its patches in twice its size, and its caption."""
    is_own = batch["segment_ids"][row] == segment
    is_patch = is_own & (batch["positions"][row, :, 0] >= 0)
    y, x = batch["positions"][row, is_patch].T
    pixels = np.zeros((*batch["grids"][row, segment - 1], PATCH, PATCH, 3), np.uint8)
    pixels[y, x] = batch["patches"][row, is_patch].reshape(-1, PATCH, PATCH, 3)
    height, width = pixels.shape[0] * PATCH, pixels.shape[1] * PATCH
    image = Image.fromarray(pixels.swapaxes(1, 2).reshape(height, width, 3))
    words = [WORDS[k] for k in batch["tokens"][row, is_own & ~is_patch]]
    return image.resize((2 * width, 2 * height)), " ".join(words[:-1])


def draw_row(batch: Batch, row: int) -> Image.Image:
    """Draws the images and captions of a row above a bar of its tokens."""
    segments, places = batch["segment_ids"][row], batch["positions"][row]
    font, unit = ImageFont.load_default(12), 9  # pixels of a token
    tall = 2 * PATCH * int(batch["grids"][row, :, 0].max())
    bar = tall + 40  # below two lines of text
    pen = ImageDraw.Draw(picture := Image.new("RGB", (unit * LENGTH, bar + 32), "white"))
    for segment in range(1, segments.max() + 1):
        image, caption = image_and_caption(batch, row, segment)
        (own,) = np.nonzero(segments == segment)
        left = unit * int(own[0])
        picture.paste(image, (left, tall - image.height))
        text = textwrap.fill(caption, unit * len(own) // 6)  # 5 pixels per letter
        pen.multiline_text((left, tall + 4), text, "black", font)
    for token, (segment, (y, _)) in enumerate(zip(segments, places)):
        left, right = unit * token, unit * token + unit - 2
        kind = 2 if segment == 0 else int(y < 0)
        pen.rectangle((left, bar, right, bar + 14), SHADES[segment % 2][kind])
    return picture


def draw_rows(batch: Batch, count: int = 5) -> Image.Image:
    """Draws packed rows, and a legend."""
    batch = {name: np.asarray(array) for name, array in batch.items()}
    rows = [draw_row(batch, row) for row in range(count)]
    edge, legend = 12, 24
    size = rows[0].width + 2 * edge, sum(row.height for row in rows) + edge + legend
    pen = ImageDraw.Draw(picture := Image.new("RGB", size, "white"))
    top = edge
    for row in rows:
        picture.paste(row, (edge, top))
        top += row.height
    for k, name in enumerate(("a patch", "a word", "padding")):
        left = edge + 100 * k
        for number, shades in enumerate(SHADES):
            x = left + 9 * number
            pen.rectangle((x, top, x + 7, top + 14), shades[k])
        pen.text((left + 22, top), name, "black", ImageFont.load_default(12))
    return picture


def main() -> None:
    options = parse_arguments("native_resolution", "Trains a network that captions images.", 600)
    folder = draw_images(options.out / "images", 6200)
    captions = json.loads((folder / "captions.json").read_text())
    records = [
        {"image": str(folder / name).encode(), "caption": tokens(caption)}
        for name, caption in captions.items()
    ]
    held_out, source = packed(records[:200]), packed(records[200:])
    stream = training_data.stream(source=source, batch_size=ROWS, seed=1)
    draw_rows(stream.peek()).save(options.out / "batch.png")
    model = Captioner(nnx.Rngs(0))
    before = evaluate(model, held_out)
    train(model, loss_of, stream, options, rate=3e-3)
    after = evaluate(model, held_out)
    print(f"captions of {len(held_out)} images: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
