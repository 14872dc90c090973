"""Trains a small image classifier. DALI reads, decodes and augments the images.

Run it on generated images, or on a folder with one folder of images for each class::

    python examples/quickstart.py
    python examples/quickstart.py --data path/to/images --epochs 20

No GPU is needed. If there is a GPU, the same pipelines decode and augment on it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import nvidia.dali.fn as fn
import optax
from flax import nnx
from images import CACHE, make_images, split
from nvidia.dali import backend, types
from tqdm import tqdm

from dalijax import DALIGenericIterator, data_iterator
from dalijax.show import show

SIDE = 64  # height and width of the network's input
GOAL = 0.85  # minimum accuracy on generated held-out images


# The function defines a graph of DALI operators. It runs once, and DALI's threads then run the
# graph for each batch. `data_iterator` converts it to a function that creates iterators.
@data_iterator(output_map=["images", "labels"], reader_name="train")
def training_data(files: list[str], classes: list[int], gpu: bool) -> Any:
    """Defines shuffled and augmented training images, with new random numbers in each epoch."""
    encoded, labels = fn.readers.file(
        files=files, labels=classes, random_shuffle=True, name="train"
    )
    # "mixed" decodes bytes in host memory to pixels in GPU memory. Later operators run on the
    # device of the pixels.
    images = fn.decoders.image(encoded, device="mixed" if gpu else "cpu")
    images = fn.random_resized_crop(images, size=(SIDE, SIDE), random_area=(0.8, 1.0))
    angle = fn.random.uniform(range=(-20, 20))
    images = fn.rotate(images, angle=angle, keep_size=True, fill_value=0)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    images = fn.color_twist(
        images,
        hue=fn.random.uniform(range=(-30, 30)),
        brightness=fn.random.uniform(range=(0.7, 1.3)),
        contrast=fn.random.uniform(range=(0.7, 1.3)),
    )
    # The reader returns labels of shape [batch, 1], which would broadcast with losses and masks of
    # shape [batch] to [batch, batch].
    labels = fn.squeeze(labels, axes=0)
    # A jitted step needs all inputs on the same device.
    return images, labels.gpu() if gpu else labels


# The last batch is usually incomplete. With a padded reader it is padded with copies of the last
# image, so that the jitted step compiles for a single shape. The mask is False for them.
@data_iterator(
    output_map=["images", "labels"],
    reader_name="held_out",
    mask=True,
)
def held_out_data(files: list[str], classes: list[int], gpu: bool) -> Any:
    """Defines evaluation images: each image once, in order, without augmentation."""
    encoded, labels = fn.readers.file(
        files=files, labels=classes, pad_last_batch=True, name="held_out"
    )
    images = fn.decoders.image(encoded, device="mixed" if gpu else "cpu")
    images = fn.resize(images, size=(SIDE, SIDE), interp_type=types.INTERP_TRIANGULAR)
    labels = fn.squeeze(labels, axes=0)
    return images, labels.gpu() if gpu else labels


class Network(nnx.Module):
    """Four convolutions with a stride of 2, and a linear layer."""

    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        widths = [3, 16, 32, 64, 128]
        self.convolutions = nnx.List(
            nnx.Conv(i, o, (3, 3), strides=2, rngs=rngs) for i, o in itertools.pairwise(widths)
        )
        self.head = nnx.Linear(widths[-1], num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        # Images are bytes, a quarter of the size of floats.
        x = images.astype("float32") / 127.5 - 1
        for convolution in self.convolutions:
            x = nnx.relu(convolution(x))
        return self.head(x.max(axis=(1, 2)))


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def loss_fn(model: Network) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def count_right(model: Network, images: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return (mask & (model(images).argmax(axis=-1) == labels)).sum()


def evaluate(model: Network, iterator: DALIGenericIterator) -> tuple[int, int]:
    """Returns the number of correctly classified images, and the number of images."""
    right = seen = 0
    for batch in iterator:
        mask = batch["mask"]
        right += int(count_right(model, batch["images"], batch["labels"], mask))
        seen += int(mask.sum())
    return right, seen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains an image classifier with DALI.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    out = Path(__file__).resolve().parent / "out" / "quickstart.png"
    parser.add_argument(
        "--out", type=Path, default=out, help="picture of an augmented batch, .png or .html"
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # DALI's threads sometimes wait for the whole GPU, which disturbs XLA's recording of CUDA
    # graphs. This turns the recording off. XLA reads it at the first use of a device.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {os.environ.get('XLA_FLAGS', '')}"
    names, train_files, held_out_files = split(
        arguments.data or make_images(arguments.cache, count=2000)
    )
    # Both DALI and JAX must be able to use the GPU.
    gpu = backend.GetCUDADeviceCount() > 0 and jax.default_backend() == "gpu"
    print(
        f"{len(train_files[0])} training images, {len(held_out_files[0])} held-out images, "
        f"{len(names)} classes, decoding on the {'GPU' if gpu else 'CPU'}"
    )
    # Both iterators prepare batches in the background while JAX computes.
    train = training_data(*train_files, gpu, batch_size=arguments.batch_size)
    held_out = held_out_data(*held_out_files, gpu, batch_size=arguments.batch_size)
    show(train, classes={"labels": names}).save(arguments.out)  # does not change the position
    print(f"One augmented batch: {arguments.out}")

    # The last batch of a training epoch is filled with images of the next epoch.
    steps = math.ceil(arguments.epochs * max(1, len(train_files[0]) / arguments.batch_size))
    model = Network(len(names), rngs=nnx.Rngs(0))
    schedule = optax.cosine_onecycle_schedule(steps, peak_value=4e-3)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    with tqdm(total=steps, desc="Training", unit="batch") as progress:
        for epoch, batches in train.epochs(arguments.epochs):
            trained, start = 0, time.perf_counter()
            for batch in batches:
                loss = train_step(model, optimizer, batch["images"], batch["labels"])
                trained += len(batch["labels"])
                progress.update()
            loss.block_until_ready()  # JAX computes asynchronously
            train_speed = trained / (time.perf_counter() - start)

            start = time.perf_counter()
            right, seen = evaluate(model, held_out)
            test_speed = seen / (time.perf_counter() - start)
            if seen != len(held_out_files[0]):
                raise SystemExit(f"evaluated {seen} images of {len(held_out_files[0])} files")
            progress.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}", right=f"{right / seen:.1%}")

    # The speeds of the last epoch, since the first epoch includes compilation.
    accuracy = right / seen
    print(f"Training:   {train_speed:,.0f} images/s")
    print(f"Evaluation: {test_speed:,.0f} images/s, each of {seen} images once")
    print(f"Accuracy on held-out images: {accuracy:.1%}")
    if accuracy < GOAL and not arguments.data:
        raise SystemExit(f"The accuracy is below {GOAL:.0%}: try more --epochs")


if __name__ == "__main__":
    main()
