"""Measures the host time of a batch of dalijax and of DALI's plugin, compared with a DALI loop.

Before each batch Python spins until DALI has prepared it, so that only the work of the host is
timed, with warm caches. The variants take turns. Values are medians over all batches of a round,
and differences are differences of the medians of a round::

    python benchmarks/overhead.py
"""

from __future__ import annotations

import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin import jax as dax

import report
import turns
from dalijax import data_iterator
from report import GPU

SIZES = {"tiny": (32, [1]), "128x224x224x3": (128, [224, 224, 3])}


def graph(files: list[str], shape: list[int], outputs: int) -> Any:
    """Defines the number of a file, and constant arrays."""
    label = fn.readers.file(
        files=files, labels=list(range(len(files))), name="reader", pad_last_batch=True
    )[1]
    numbers = [
        fn.constant(idata=[k], shape=shape, dtype=types.UINT8, device="gpu" if GPU else "cpu")
        for k in range(outputs - 1)
    ]
    return (label.gpu() if GPU else label, *numbers)


def raw(call: dict[str, Any], batch: int) -> Iterator[Any]:
    pipeline = pipeline_def(graph)(
        **call, batch_size=batch, num_threads=2, device_id=0 if GPU else None
    )
    return turns.raw_loop(pipeline)


def plugin(call: dict[str, Any], names: list[str], batch: int) -> Iterator[Any]:
    pipeline = pipeline_def(graph)(
        **call, batch_size=batch, num_threads=2, device_id=0 if GPU else None
    )
    iterator = dax.DALIGenericIterator([pipeline], names, reader_name="reader", auto_reset=True)
    return turns.endless(iterator)


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=60, help="batches per round")
    arguments = parser.parse_args()
    report.heading()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = turns.small_files(folder, 4096)
        for size, (batch, shape) in SIZES.items():
            for outputs in (1, 2, 4):
                call = {"files": files, "shape": shape, "outputs": outputs}
                names = [f"o{k}" for k in range(outputs)]
                function = data_iterator(graph, names, reader_name="reader")
                options = {**call, "batch_size": batch, "num_threads": 2}
                iterators: dict[str, Iterator[Any]] = {"raw": raw(call, batch)}
                if not GPU:
                    iterators["as_numpy"] = function.stream(None, as_numpy=True, **options)
                iterators["jax.Array"] = function.stream(None, **options)
                iterators["DALI's plugin"] = plugin(call, names, batch)
                rest = 0.001 if batch == 32 else 0.003 if GPU else 0.03
                times = turns.time_iterators(
                    iterators, arguments.rounds, arguments.batches, functools.partial(spin, rest)
                )
                over = {
                    name: statistics.median(values)
                    for name, values in turns.over(times, "raw").items()
                }
                result[f"{size}, {outputs}"] = {
                    "raw": statistics.median(times["raw"]),
                    "over": over,
                }
                print(f"  {size}, {outputs} outputs", flush=True)
                del iterators
                gc.collect()
    names = list(next(iter(result.values()))["over"])[1:]
    report.table(
        ("us per batch", "raw", *(f"{name}, more than raw" for name in names)),
        [
            (key, f"{row['raw']:.0f}", *(f"{row['over'][name]:+.0f}" for name in names))
            for key, row in result.items()
        ],
    )
    over = {key: {name: row["over"][name] for name in names} for key, row in result.items()}
    groups = {
        size: {
            f"{n}, outputs: {k.split(', ')[1]}": v
            for k, values in over.items()
            if k.startswith(size)
            for n, v in values.items()
        }
        for size in SIZES
    }
    report.write(arguments.out, "overhead", result, groups, "us per batch, more than a raw loop")


if __name__ == "__main__":
    main()
