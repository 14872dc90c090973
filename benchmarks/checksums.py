"""Measures the cost of verifying the checksums of TFRecords, on one thread.

The records have one image of 49 kB and a label, the episodes 400 steps with two such images. All
files are in the page cache. The runs with and without verification alternate. Prints medians::

    python benchmarks/checksums.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dalijax.core.formats.example_message import example_message, record_parts
from dalijax.sources import RLDS, TFRecord

RECORDS, STEPS, SIZE = 8000, 400, 49_000
TFRECORD = {"data": "image", "label": "label"}
EPISODE = {"left": "steps/left", "right": "steps/right", "number": "steps/number"}


def images(count: int, rng: np.random.Generator) -> list[bytes]:
    """Returns random bytes that begin like JPEGs."""
    return [b"\xff\xd8" + rng.bytes(SIZE - 2) for _ in range(count)]


def write(folder: pathlib.Path) -> None:
    """Writes the records, and as many bytes of episodes."""
    rng = np.random.default_rng(0)
    with open(folder / "records", "wb") as file:
        for number in range(RECORDS):
            features = {"image": images(1, rng), "label": np.array([number % 1000])}
            file.writelines(record_parts(example_message(features)))
    with open(folder / "episodes", "wb") as file:
        for _ in range(RECORDS // (2 * STEPS)):
            features = {f"steps/{name}": images(STEPS, rng) for name in ("left", "right")}
            features |= {"steps/number": np.arange(STEPS)}
            file.writelines(record_parts(example_message(features)))


def measure(name: str, run: Callable[[bool], Any], rounds: int) -> None:
    """Runs a function with and without verification, and prints the median CPU time and rate."""
    cpu: dict[bool, list[float]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _, verify in itertools.product(range(rounds), (True, False)):
        begin, busy = time.perf_counter(), time.process_time()
        run(verify)
        seconds[verify].append(time.perf_counter() - begin)
        cpu[verify].append(time.process_time() - busy)
    for verify in (True, False):
        time_each = statistics.median(cpu[verify]) / RECORDS * 1e6
        rate = RECORDS / statistics.median(seconds[verify])
        print(f"{name}, verify={verify}: {time_each:.1f} us of CPU, {rate:,.0f} per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    order = np.random.default_rng(0).permutation(RECORDS)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder)

        def index(kind: Any, path: pathlib.Path, fields: Any, verify: bool) -> None:
            with tempfile.TemporaryDirectory() as cache:
                kind(path, fields, cache_dir=cache, verify=verify)

        measure("index records", lambda v: index(TFRecord, folder / "records", TFRECORD, v), rounds)
        measure("index images", lambda v: index(RLDS, folder / "episodes", EPISODE, v), rounds)
        sources = {
            verify: TFRecord(folder / "records", TFRECORD, cache_dir=folder, verify=verify)
            for verify in (True, False)
        }

        def read(verify: bool) -> None:
            for start in range(0, RECORDS, 256):
                sources[verify].read(order[start : start + 256], ["data", "label"])

        measure("read records", read, rounds)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
