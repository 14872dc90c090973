"""Measures the memory of the process and of the GPU over many batches, states and restores.

::

    python benchmarks/memory.py --batches 20000
"""

from __future__ import annotations

import gc
import pathlib
import tempfile
import time
from typing import Any

import jax
import psutil
from nvidia.dali import fn, types

import photos
import report
from dalijax import data_iterator
from report import GPU

MEBIBYTE = 2**20


def graph(files: list[str]) -> Any:
    """Defines small images with noise, and their numbers."""
    encoded, label = fn.readers.file(
        files=files, labels=list(range(len(files))), name="reader", random_shuffle=True,
        pad_last_batch=True,
    )  # fmt: skip
    images = fn.decoders.image(encoded, device="mixed" if GPU else "cpu")
    images = fn.resize(images, size=(64, 64), dtype=types.FLOAT)
    return fn.noise.gaussian(images, stddev=3.0), label.gpu() if GPU else label


def device_memory() -> float:
    """Returns the MiB in use on the GPU by all processes; JAX does not count DALI's memory."""
    if not GPU:
        return 0.0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return (total - free) / MEBIBYTE


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=100, help="batches between states")
    parser.add_argument("--rebuild", type=int, default=2_000, help="batches between restores")
    args = parser.parse_args()
    report.heading()
    process, seen = psutil.Process(), []
    with tempfile.TemporaryDirectory() as folder:
        files = photos.make(pathlib.Path(folder), 256)
        function = data_iterator(graph, ["images", "label"], reader_name="reader", mask="mask")
        call = {"batch_size": args.batch, "num_threads": 4}
        stream = function.stream(None, files, **call)
        step = jax.jit(lambda x, mask: (x.mean((1, 2, 3)) * mask).sum())
        batch = next(stream)
        total = step(batch["images"], batch["mask"])
        begin = time.perf_counter()
        for number in range(1, args.batches + 1):
            batch = next(stream)
            total = total + step(batch["images"], batch["mask"])
            if number % args.every == 0:
                state = stream.get_state()
            if number % args.rebuild == 0:
                stream.set_state(state)
                total.block_until_ready()
                gc.collect()
            if number % (args.batches // 20) == 0:
                memory = process.memory_info().rss / MEBIBYTE
                seen.append((number, memory, device_memory(), process.num_threads()))
        seconds = time.perf_counter() - begin
        stream.close()
    report.table(
        ("batches", "resident, MiB", "GPU, MiB", "threads"),
        [(f"{n:,}", f"{host:,.1f}", f"{gpu:,.0f}", threads) for n, host, gpu, threads in seen],
    )
    print(f"{args.batches:,} batches of {args.batch} in {seconds:,.0f} s")
    groups = {"": {f"{n:,} batches": host for n, host, *_ in seen}}
    report.write(args.out, "memory", seen, groups, "resident, MiB")


if __name__ == "__main__":
    main()
