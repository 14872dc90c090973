"""Measures how the cost of an iterator grows from a thousand files to a million.

Only names and labels of empty files are read, so that decoding is not timed. The calls are:
creating the iterator, the first batch, len(), get_state(), set_state(), and the first batch after
it, which builds pipelines again. DALI's build and first batch are measured, too. Each size runs in
a separate process::

    python benchmarks/files.py --files 1000 10000 100000 1000000
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
from nvidia.dali import fn, pipeline_def

import report
from dalijax import data_iterator

BATCH = 64


def graph(file_list: str) -> Any:
    """Defines the labels of shuffled files."""
    return fn.readers.file(
        file_list=file_list, name="reader", random_shuffle=True, pad_last_batch=True
    )[1]


def measure(file_list: str, rounds: int) -> dict[str, float]:
    """Returns milliseconds of each call, the bytes of a state, and MiB of the process."""
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
        return result

    call = {"batch_size": BATCH, "num_threads": 2, "device_id": None}
    iterator_fn = data_iterator(graph, ["label"], reader_name="reader", prepare_first_batch=False)
    size = 0
    for _ in range(rounds):

        def build() -> Any:
            pipeline = pipeline_def(graph)(file_list, **call)
            pipeline.build()
            return pipeline

        pipeline = timed("DALI: build", build)
        timed("DALI: first batch", lambda p=pipeline: p.run())
        del pipeline
        iterator = timed("build", lambda: iterator_fn(file_list, **call))
        timed("first batch", lambda i=iterator: next(i))
        timed("len()", lambda i=iterator: len(i))
        for _ in range(3):
            next(iterator)
        timed("first get_state()", lambda i=iterator: i.get_state())
        next(iterator)
        state = timed("get_state()", lambda i=iterator: i.get_state())
        size = len(json.dumps(state))
        next(iterator)
        timed("set_state()", lambda i=iterator, s=state: i.set_state(s))
        timed("first batch after it", lambda i=iterator: next(i))
        iterator.close()
    row = {name: statistics.median(values) for name, values in times.items()}
    row["bytes of a state"] = size
    row["MiB of the process"] = psutil.Process().memory_info().rss / 2**20
    return row


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=pathlib.Path, help="measure this file list, and print JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(str(args.only), args.rounds)))
        return
    report.heading()
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        image = pathlib.Path(folder) / "empty.jpg"
        image.write_bytes(b"x")
        for count in args.files:
            listed = pathlib.Path(folder) / f"{count}.txt"
            # The list has a single file many times: DALI opens files only when it reads them.
            listed.write_text("".join(f"{image} {k}\n" for k in range(count)))
            command = [sys.executable, __file__, "--only", str(listed)]
            command += ["--rounds", str(args.rounds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[count] = json.loads(done.stdout.splitlines()[-1])
    names = list(next(iter(results.values())))
    report.table(
        ("ms, median", *(f"{count:,} files" for count in results)),
        [(name, *(f"{row[name]:,.2f}" for row in results.values())) for name in names],
    )
    groups = {
        f"{count:,} files": {name: row[name] for name in names[:-2]}
        for count, row in results.items()
    }
    report.write(args.out, "files", results, groups, "ms")


if __name__ == "__main__":
    main()
