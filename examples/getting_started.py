"""The steps of DALI's tutorial 'Getting started with JAX and DALI', with dalijax.

    python examples/getting_started.py

Each step prints its results and writes a picture to examples/out/getting_started. Without a GPU,
steps that need a GPU are skipped, and two CPU devices replace two GPUs. The tutorial is
jax-getting_started.html in
https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/frameworks/jax/
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import nvidia.dali.fn as fn
from images import CACHE, SHAPES, make_images
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from nvidia.dali import backend, pipeline_def

from dalijax import DALIGenericIterator, data_iterator
from dalijax.show import show

NAMES = sorted(SHAPES)  # the reader's labels are indices of this list
SIDE = 256


@functools.cache
def num_gpus() -> int:
    """Returns the number of GPUs that both DALI and JAX can use."""
    return min(backend.GetCUDADeviceCount(), len(jax.devices())) * (jax.default_backend() == "gpu")


def best_decoder() -> str:
    """Returns the device of the decoder: the GPU, if there is one."""
    return "mixed" if num_gpus() else "cpu"


def show_images(images: Any, titles: Sequence[str], path: Path) -> None:
    """Writes the images of a batch to a PNG."""
    # np.asarray copies the pixels from all devices to the host.
    show({"images": np.asarray(images), "title": list(titles)}, samples=len(images)).save(path)
    print(f"Picture: {path.name}")


def names_of(labels: Any) -> list[str]:
    """Returns the class names of labels of shape [batch, 1]."""
    return [NAMES[label] for label in np.asarray(labels)[:, 0]]


def quick_start(image_dir: str, picture: Path) -> None:
    """Quick start: a complete example, which the next steps explain."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs, device=best_decoder())
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    iterator = iterator_fn(batch_size=8)
    batch = next(iterator)  # ready to be used by JAX
    print(f"A batch: images of shape {batch['images'].shape}, labels {batch['labels'].shape}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


def plain_call(image_dir: str, picture: Path) -> None:
    """Running DALI with JAX: data_iterator, called with a pipeline function."""

    # The function defines a graph of operators. It runs once, when the iterator is created.
    def simple_pipeline() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    # The reader with the name reader_name determines the number of samples of an epoch.
    iterator_fn = data_iterator(
        simple_pipeline, output_map=["images", "labels"], reader_name="image_reader"
    )
    iterator = iterator_fn(batch_size=1)

    output = next(iterator)
    print(output.keys())
    for name, array in output.items():
        print(f"{name}: {type(array)} {array.shape} {array.dtype}")
    second = next(iterator)
    both = np.concatenate([output["images"], second["images"]])
    labels = [f"Label = {batch['labels'][0]}" for batch in (output, second)]
    show_images(both, labels, picture)


def decorator(image_dir: str, picture: Path) -> None:
    """The decorator: the same in a shorter form, which the next steps use."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    iterator = iterator_fn(batch_size=1)
    output = next(iterator)
    print(f"{iterator_fn} returns images of shape {output['images'].shape}")
    show_images(output["images"], names_of(output["labels"]), picture)


def length_and_loops(image_dir: str, picture: Path) -> None:
    """Loops: len() is the number of batches, and each loop is one epoch."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    iterator = iterator_fn(batch_size=1)
    print(f"Iterator size: {len(iterator)}")
    images = []
    for batch_id, batch in enumerate(iterator):
        print(batch_id, end=" ")
        images.append(batch["images"][0])
    # A second loop does not need reset().
    print(f"\nBatches in the next loop: {sum(1 for _ in iterator)}")
    show_images(images, [f"batch {k}" for k in range(len(images))], picture)


def batching(image_dir: str, picture: Path) -> None:
    """Batching: several samples in a batch."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    # data_iterator adds the argument batch_size to the function.
    batch = next(iterator_fn(batch_size=8))
    print(f"images: {batch['images'].shape}, labels: {batch['labels'].shape}")
    print(f"Images backing device: {batch['images'].devices()}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


def gpu_acceleration(image_dir: str, picture: Path) -> None:
    """GPU acceleration: .gpu() copies the images, and later operators run on the GPU."""
    if not num_gpus():
        print("Skipped: this step needs a GPU.")
        return

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = images.gpu()
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    batch = next(iterator_fn(batch_size=8))
    print(f"Images backing device: {batch['images'].devices()}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


def another_gpu(image_dir: str, picture: Path) -> None:
    """device_id: selects the GPU of the pipeline."""
    if num_gpus() < 2:
        print("Skipped: this step needs two GPUs.")
        return

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs)
        images = images.gpu()
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    batch = next(iterator_fn(batch_size=1, device_id=1))
    print(f"Images backing device: {batch['images'].devices()}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


def mixed_decoding(image_dir: str, picture: Path) -> None:
    """Hardware accelerated decoding: device="mixed" decodes on the GPU."""
    if not num_gpus():
        print("Skipped: this step needs a GPU.")
        return

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        # The decoded images are on the GPU, so .gpu() is not needed.
        images = fn.decoders.image(jpegs, device="mixed")
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    batch = next(iterator_fn(batch_size=8))
    print(f"Images backing device: {batch['images'].devices()}")
    print(f"Labels backing device: {batch['labels'].devices()}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


def random_shuffling(image_dir: str, picture: Path) -> None:
    """Random shuffling: the order depends only on the seed."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(
            file_root=image_dir, name="image_reader", random_shuffle=True
        )
        images = fn.decoders.image(jpegs, device=best_decoder())
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    for seed in (0, 0, 1):
        batch = next(iterator_fn(batch_size=8, seed=seed))
        print(f"seed={seed}: labels {np.asarray(batch['labels'])[:, 0]}")
    batch = next(iterator_fn(batch_size=8, seed=0))
    show_images(batch["images"], names_of(batch["labels"]), picture)


def augmentations(image_dir: str, picture: Path) -> None:
    """Augmentations: each image is rotated by a different angle."""

    @data_iterator(output_map=["images", "labels", "angles"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(
            file_root=image_dir, name="image_reader", random_shuffle=True
        )
        images = fn.decoders.image(jpegs, device=best_decoder())
        angle = fn.random.uniform(range=(-10.0, 10.0))
        images = fn.rotate(images, angle=angle, fill_value=0)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels, angle

    batch = next(iterator_fn(batch_size=8, seed=0))
    titles = [f"{angle:+.1f} degrees" for angle in np.asarray(batch["angles"])]
    print("Angles:", ", ".join(titles))
    show_images(batch["images"], titles, picture)


def multiple_devices(image_dir: str, picture: Path) -> None:
    """Multiple GPUs: a pipeline for each GPU, and batches that are split over the GPUs."""
    mesh = Mesh(jax.devices(), axis_names=("batch",))
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    print(sharding)

    # data_iterator passes shard_id and num_shards, so that each pipeline reads a different part
    # of the files. The sharding replaces device_id.
    @data_iterator(output_map=["images", "labels"], reader_name="image_reader", sharding=sharding)
    def iterator_fn(shard_id: int = 0, num_shards: int = 1) -> Any:
        jpegs, labels = fn.readers.file(
            file_root=image_dir, name="image_reader", shard_id=shard_id, num_shards=num_shards
        )
        images = fn.decoders.image(jpegs, device=best_decoder())
        angle = fn.random.uniform(range=(-10.0, 10.0))
        images = fn.rotate(images, angle=angle, fill_value=0)
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels.gpu() if num_gpus() else labels

    # batch_size is the size of the global batch, over all devices.
    batch = next(iterator_fn(batch_size=4 * len(jax.devices())))
    images = batch["images"]
    print(f"Images shape: {images.shape}")
    print(f"Images backing device: {images.devices()}")
    print(f"Images sharding: {images.sharding}")
    jax.debug.visualize_array_sharding(images.ravel())
    holders: list[str] = []
    for k, shard in enumerate(images.addressable_shards):
        print(f"Shard {k}: device {shard.device}, rows {shard.index[0]}, {shard.data.shape}")
        holders += [str(shard.device)] * len(shard.data)
    titles = [f"{name}, {device}" for name, device in zip(names_of(batch["labels"]), holders)]
    show_images(images, titles, picture)


def num_threads(image_dir: str, picture: Path) -> None:
    """num_threads: the number of CPU threads of a pipeline, and its effect on the speed."""

    @data_iterator(output_map=["images", "labels"], reader_name="image_reader")
    def iterator_fn() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs, device=best_decoder())
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    def run_iterator(iterator: DALIGenericIterator, num_epochs: int) -> int:
        return sum(len(batch["labels"]) for _ in range(num_epochs) for batch in iterator)

    print(f"This machine has {os.cpu_count()} CPU cores.")
    print(f"{'num_threads':>11} {'images/s':>9}")
    speeds: dict[str, float] = {}
    for threads in (1, 2, 4, 8):
        iterator = iterator_fn(batch_size=12, num_threads=threads)
        run_iterator(iterator, num_epochs=2)  # the first batches are slow because DALI starts
        start = time.perf_counter()
        num_images = run_iterator(iterator, num_epochs=10)
        speeds[str(threads)] = num_images / (time.perf_counter() - start)
        print(f"{threads:>11} {speeds[str(threads)]:>9,.0f}")
    figure = Figure(figsize=(6, 4))
    ax = figure.subplots()
    ax.bar(list(speeds), list(speeds.values()))
    ax.set(xlabel="num_threads", ylabel="images/s")
    figure.tight_layout()
    figure.savefig(picture)
    print(f"Picture: {picture.name}")


def handmade_pipeline(image_dir: str, picture: Path) -> None:
    """Internals: an iterator over a pipeline of pipeline_def."""

    @pipeline_def
    def simple_pipeline() -> Any:
        jpegs, labels = fn.readers.file(file_root=image_dir, name="image_reader")
        images = fn.decoders.image(jpegs, device=best_decoder())
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        return images, labels

    # pipeline_def has no defaults for these arguments. device_id=None selects the CPU.
    pipeline = simple_pipeline(batch_size=8, num_threads=1, device_id=0 if num_gpus() else None)
    print(type(pipeline))
    iterator = DALIGenericIterator(
        pipeline, output_map=["images", "labels"], reader_name="image_reader"
    )
    print(type(iterator))
    batch = next(iterator)
    print(f"Images backing device: {batch['images'].devices()}")
    print(f"Labels backing device: {batch['labels'].devices()}")
    show_images(batch["images"], names_of(batch["labels"]), picture)


STEPS: list[Callable[[str, Path], None]] = [
    quick_start,
    plain_call,
    decorator,
    length_and_loops,
    batching,
    gpu_acceleration,
    another_gpu,
    mixed_decoding,
    random_shuffling,
    augmentations,
    multiple_devices,
    num_threads,
    handmade_pipeline,
]


def main() -> None:
    parser = argparse.ArgumentParser(description="DALI's JAX tutorial, with dalijax.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    out = Path(__file__).resolve().parent / "out" / "getting_started"
    parser.add_argument("--out", type=Path, default=out, help="directory of the pictures")
    arguments = parser.parse_args()

    # CPU devices for the step `multiple_devices`. This must be set before JAX initializes its
    # devices, and does not affect GPUs.
    jax.config.update("jax_num_cpu_devices", 2)
    image_dir = str(make_images(arguments.cache, count=36, sides=(160, 400)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(STEPS, 1):
        print(f"\n{number}. {(step.__doc__ or step.__name__).splitlines()[0]}\n")
        step(image_dir, arguments.out / f"{number:02d}_{step.__name__}.png")
    print(f"\nThe pictures are in {arguments.out}")


if __name__ == "__main__":
    main()
