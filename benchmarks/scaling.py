"""Images per second of one and of several GPUs, in one run: raw DALI, this package, the plugin.

Every variant is made once and then measured in turn, so that what disturbs the machine
disturbs all of them; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types

import photos
from dalijax import data_iterator

Step = Callable[[], Any]


def graph(files: list[str], load: float, shard_id: int = 0, num_shards: int = 1) -> Any:
    """JPEG to a random resized crop of 224, mirrored, normalised, f16."""
    data, label = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        name="reader",
        shard_id=shard_id,
        num_shards=num_shards,
        random_shuffle=True,
        pad_last_batch=True,
    )
    images = fn.decoders.image(data, device="mixed", hw_decoder_load=load)
    images = fn.random_resized_crop(images, size=(224, 224))
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16,
        output_layout="HWC",
        mean=[123.7, 116.3, 103.5],
        std=[58.4, 57.1, 57.4],
        mirror=fn.random.coin_flip(),
    )
    return images, label.gpu()


def raw(files: list[str], load: float, batch: int, threads: int, gpus: int) -> Step:
    """DALI's own loop over one pipeline for each GPU, in one thread."""
    pipelines = [
        pipeline_def(graph)(
            files, load, i, gpus, batch_size=batch, num_threads=threads, device_id=i, seed=i
        )
        for i in range(gpus)
    ]
    for pipeline in pipelines:
        pipeline.build()
        pipeline.schedule_run()

    def step() -> None:
        for pipeline in pipelines:
            pipeline.share_outputs()
        for pipeline in pipelines:
            pipeline.release_outputs()
            pipeline.schedule_run()

    return step


def raw_threads(files: list[str], load: float, batch: int, threads: int, gpus: int) -> Step:
    """The same with a Python thread for each GPU that runs free: the most that DALI gives."""
    steps = []
    for i in range(gpus):
        pipeline = pipeline_def(graph)(
            files, load, i, gpus, batch_size=batch, num_threads=threads, device_id=i, seed=i
        )
        pipeline.build()
        pipeline.schedule_run()
        steps.append(pipeline)

    def run(pipeline: Any, count: int) -> None:
        for _ in range(count):
            pipeline.share_outputs()
            pipeline.release_outputs()
            pipeline.schedule_run()

    def many(count: int) -> None:
        workers = [threading.Thread(target=run, args=(p, count)) for p in steps]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    many.many = True  # type: ignore[attr-defined]
    return many  # type: ignore[return-value]


def ours(
    files: list[str], load: float, batch: int, threads: int, gpus: int, mesh_shape: Any = None
) -> Step:
    """This package, over a NamedSharding where there are several GPUs."""
    config: dict[str, Any] = {"reader_name": "reader", "auto_reset": True}
    if gpus > 1 or mesh_shape:
        grid = np.array(jax.devices()[: int(np.prod(mesh_shape or gpus))])
        mesh = Mesh(grid.reshape(mesh_shape or (gpus, 1)), ("data", "model"))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    iterator = data_iterator(graph, ["images", "labels"], **config)(
        files, load, batch_size=batch * gpus, num_threads=threads
    )
    return lambda: next(iterator, None) or next(iterator)


def plugin(files: list[str], load: float, batch: int, threads: int, gpus: int) -> Step:
    """DALI's own JAX plugin; it takes all devices or one."""
    from nvidia.dali.plugin.jax import data_iterator as dali_data_iterator

    config: dict[str, Any] = {"reader_name": "reader", "auto_reset": True}
    if gpus > 1:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    iterator = dali_data_iterator(graph, ["images", "labels"], **config)(
        files, load, batch_size=batch * gpus, num_threads=threads
    )
    return lambda: next(iterator, None) or next(iterator)


def measure(step: Step, batches: int) -> float:
    """Seconds for so many batches, the last of them there."""
    start = time.perf_counter()
    if getattr(step, "many", False):
        step(batches)  # type: ignore[call-arg]
    else:
        last = None
        for _ in range(batches):
            last = step()
        if last is not None:
            jax.block_until_ready(last)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256, help="for each GPU")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.9, help="hw_decoder_load")
    parser.add_argument("--threads", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("scaling.json"))
    args = parser.parse_args()
    gpus = len(jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        files = photos.make(pathlib.Path(folder), args.files)
        rows = []
        for threads in args.threads:
            made = (files, args.load, args.batch, threads)
            variants: dict[str, tuple[int, Step]] = {
                "raw DALI, 1 GPU": (1, raw(*made, 1)),
                "dalijax, 1 GPU": (1, ours(*made, 1)),
                "DALI's plugin, 1 GPU": (1, plugin(*made, 1)),
            }
            if gpus > 1:
                variants |= {
                    f"raw DALI, {gpus} GPUs, one thread": (gpus, raw(*made, gpus)),
                    f"raw DALI, {gpus} GPUs, a thread each": (gpus, raw_threads(*made, gpus)),
                    f"dalijax, {gpus} GPUs": (gpus, ours(*made, gpus)),
                    f"DALI's plugin, {gpus} GPUs": (gpus, plugin(*made, gpus)),
                    f"dalijax, mesh (1, {gpus}), replicas": (1, ours(*made, 1, (1, gpus))),
                }
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(args.rounds + 1):
                for name, (_, step) in variants.items():
                    seconds[name].append(measure(step, args.batches))
            for name, (count, _) in variants.items():
                kept = seconds[name][1:]  # the first round warms up
                rate = [count * args.batch * args.batches / s for s in kept]
                rows.append(
                    {
                        "variant": name,
                        "threads": threads,
                        "images_per_s": statistics.median(rate),
                        "least": min(rate),
                        "most": max(rate),
                    }
                )
                print(
                    f"{name:42s} threads {threads:3d}  {statistics.median(rate):9,.0f} images/s"
                    f"  ({min(rate):,.0f} to {max(rate):,.0f})",
                    flush=True,
                )
            del variants
    args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
