"""Measures images per second with one GPU and with several: raw DALI, dalijax, and DALI's plugin.

Each variant runs in a separate process. The variants take turns for several rounds, so that a
disturbance affects all of them. Values are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import Pipeline, pipeline_def

import photos
import report
import throughput
from dalijax import data_iterator, sources

Step = Callable[[], Any]
Options = dict[str, Any]


def graph(files: list[str], shard_id: int = 0, num_shards: int = 1) -> Any:
    """Defines the graph of benchmarks/throughput.py, with labels on the GPU."""
    images, label = throughput.reading(files, shard_id, num_shards)
    return images, label.gpu()


def of_records(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines the same over a source."""
    images, label = throughput.of_source(data, label, draw=draw)
    return images, label.gpu()


def raw(files: list[str], batch: int, options: Options, gpus: int) -> Step:
    """Returns a step of DALI's own loop over one pipeline for each GPU, in one thread."""
    pipelines = [
        pipeline_def(graph)(files, i, gpus, batch_size=batch, device_id=i, seed=i, **options)
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


def raw_threads(files: list[str], batch: int, options: Options, gpus: int) -> Step:
    """Returns the same with an independent Python thread for each GPU: DALI's maximum speed."""
    steps = []
    for i in range(gpus):
        pipeline = pipeline_def(graph)(
            files, i, gpus, batch_size=batch, device_id=i, seed=i, **options
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


def ours(files: list[str], batch: int, options: Options, gpus: int) -> Step:
    """Returns a step of dalijax, over a NamedSharding if there are several GPUs."""
    config: dict[str, Any] = {"reader_name": "reader", "auto_reset": True}
    if gpus > 1:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    iterator = data_iterator(graph, ["images", "labels"], **config)(
        files, batch_size=batch * gpus, **options
    )
    return lambda: next(iterator, None) or next(iterator)


def over_source(files: list[str], batch: int, options: Options, gpus: int, shards: int = 1) -> Step:
    """Returns a step of dalijax over some tars, with a global shuffle."""
    folder = pathlib.Path(files[0]).parent / "packed"
    tars = sorted(map(str, folder.glob(f"*-of-{shards}.tar")))
    config: dict[str, Any] = {"auto_reset": True}
    if gpus > 1:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    tar = sources.Tar(tars, {"data": "jpg", "label": "cls"})
    iterator = data_iterator(of_records, ["images", "labels"], source=tar, **config)(
        batch_size=batch * gpus, **options
    )
    return lambda: next(iterator, None) or next(iterator)


def plugin(files: list[str], batch: int, options: Options, gpus: int) -> Step:
    """Returns a step of DALI's JAX plugin, over one device or all devices."""
    from nvidia.dali.plugin.jax import data_iterator as dali_data_iterator

    config: dict[str, Any] = {"reader_name": "reader", "auto_reset": True}
    if gpus > 1:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        config["sharding"] = NamedSharding(mesh, PartitionSpec("data"))
    iterator = dali_data_iterator(graph, ["images", "labels"], **config)(
        files, batch_size=batch * gpus, **options
    )
    return lambda: next(iterator, None) or next(iterator)


def with_checkpoints(
    make: Callable[..., Step],
    enabled: bool,
    files: list[str],
    batch: int,
    options: Options,
    gpus: int,
) -> Step:
    """Returns a step with or without DALI's checkpoints, which only dalijax enables by default."""
    return make(files, batch, options | {"enable_checkpointing": enabled}, gpus)


def measure(step: Step, batches: int) -> float:
    """Returns the seconds of some batches, until the last batch is complete."""
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


def variants(gpus: int, shards: int) -> dict[str, tuple[int, Callable[..., Step]]]:
    """Returns, by name, the number of GPUs with different batches, and a function of the step."""
    makers: dict[str, tuple[int, Callable[..., Step]]] = {
        "raw DALI, 1 GPU": (1, lambda *a: raw(*a, 1)),
        "dalijax, 1 GPU": (1, lambda *a: ours(*a, 1)),
        "dalijax, a Tar, 1 GPU": (1, lambda *a: over_source(*a, 1)),
        "DALI's plugin, 1 GPU": (1, lambda *a: plugin(*a, 1)),
        "DALI's plugin, checkpoints, 1 GPU": (1, lambda *a: with_checkpoints(plugin, True, *a, 1)),
    }
    if gpus > 1:
        makers |= {
            f"raw DALI, {gpus} GPUs, one thread": (gpus, lambda *a: raw(*a, gpus)),
            f"raw DALI, {gpus} GPUs, a thread each": (gpus, lambda *a: raw_threads(*a, gpus)),
            f"raw DALI, {gpus} GPUs, {PROCESSES}": (gpus, lambda *a: raw(*a, 1)),
            f"dalijax, {gpus} GPUs": (gpus, lambda *a: ours(*a, gpus)),
            f"dalijax, a Tar, {gpus} GPUs": (gpus, lambda *a: over_source(*a, gpus)),
            f"dalijax, {shards} Tars, {gpus} GPUs": (
                gpus,
                lambda *a: over_source(*a, gpus, shards),
            ),
            f"dalijax, a Tar, {gpus} GPUs, {PROCESSES}": (gpus, lambda *a: over_source(*a, 1)),
            f"DALI's plugin, {gpus} GPUs": (gpus, lambda *a: plugin(*a, gpus)),
            f"DALI's plugin, checkpoints, {gpus} GPUs": (
                gpus,
                lambda *a: with_checkpoints(plugin, True, *a, gpus),
            ),
            f"dalijax, no checkpoints, {gpus} GPUs": (
                gpus,
                lambda *a: with_checkpoints(ours, False, *a, gpus),
            ),
        }
    return makers


PROCESSES = "a process each"


def worker(args: argparse.Namespace) -> None:
    """Measures a variant in this process and prints the result as JSON."""
    waited = 0.0
    share = Pipeline.share_outputs

    def timed(self: Pipeline, *arguments: Any) -> Any:
        nonlocal waited
        start = time.perf_counter()
        try:
            return share(self, *arguments)
        finally:
            waited += time.perf_counter() - start

    Pipeline.share_outputs = timed
    files = sorted(str(path) for path in args.folder.glob("*.jpg"))
    count, make = variants(args.gpus, args.shards)[args.only]
    count = 1 if args.only.endswith(PROCESSES) else count
    step = make(files, args.batch, {"num_threads": args.threads})
    measure(step, 20)
    waited, before = 0.0, os.times()
    seconds = measure(step, args.batches)
    after = os.times()
    busy = after.user + after.system - before.user - before.system
    result = {
        "images_per_s": count * args.batch * args.batches / seconds,
        "wait_ms": 1e3 * waited / args.batches,
        "batch_ms": 1e3 * seconds / args.batches,
        "cores": busy / seconds,
    }
    print(json.dumps(result), flush=True)


def run(args: argparse.Namespace, name: str) -> dict[str, float]:
    """Measures a variant in a separate process, or in one process for each GPU."""
    many = args.gpus if name.endswith(PROCESSES) else 1
    command = [sys.executable, __file__, "--only", name, "--folder", str(args.folder)]
    for option in ("batch", "batches", "threads", "gpus", "shards"):
        command += [f"--{option}", str(getattr(args, option))]
    started = []
    for i in range(many):
        visible = {"CUDA_VISIBLE_DEVICES": str(i)} if many > 1 else {}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | visible)
        )
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    total = {k: statistics.mean(t[k] for t in results) for k in results[0]}
    for key in ("images_per_s", "cores"):
        total[key] = sum(t[key] for t in results)
    return total


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256, help="batch size per GPU")
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8, help="threads per pipeline")
    parser.add_argument("--shards", type=int, default=1024, help="number of tars of a variant")
    parser.add_argument("--match", default="", help="substrings of names of variants, as a|b")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, help="number of GPUs")
    args = parser.parse_args()
    if args.only:
        worker(args)
        return
    report.heading()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or pathlib.Path(folder)
        files = photos.make(args.folder, args.files)
        for count in (1, args.shards):
            photos.tars(args.folder / "packed", files, count)
        parts = args.match.split("|")
        names = [name for name in variants(args.gpus, args.shards) if any(p in name for p in parts)]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(args.rounds):  # in turn, so that a disturbance affects all variants
            for name in names:
                results[name].append(run(args, name))
    rows = []
    for name, runs in results.items():
        row = {k: statistics.median(result[k] for result in runs) for k in runs[0]}
        rates = [result["images_per_s"] for result in runs]
        rows.append({"variant": name, "threads": args.threads, "rates": rates, **row})
    report.table(
        ("", "threads", "images/s", "batch, ms", "waiting for DALI, ms", "cores"),
        [
            (
                row["variant"],
                row["threads"],
                report.spread(row["rates"]),
                f"{row['batch_ms']:.2f}",
                f"{row['wait_ms']:.2f}",
                f"{row['cores']:.1f}",
            )
            for row in rows
        ],
    )
    medians = {f"{row['variant']}, {row['threads']} threads": row["images_per_s"] for row in rows}
    report.write(args.out, "scaling", rows, {"": medians}, "images/s")


if __name__ == "__main__":
    main()
