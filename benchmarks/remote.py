"""Measures a data set of many tars on a server, at several latencies, and in a local cache.

The server runs on this machine, in some processes, and waits before each response. Each variant
runs in a separate process for some seconds, in turn, for several rounds. DALI reads each byte of
the images once, on the CPU::

    python benchmarks/remote.py --latencies 1 20 50 100 --seconds 10

The CPU time is that of the training process: reading, checks and placement, without the server.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
from nvidia.dali import fn

import photos
import report
from dalijax import data_iterator, sources

SERVER = pathlib.Path(__file__).resolve().parent.parent / "tests/support/range_server.py"
LOCAL, CACHED = "local files", "second epoch from the cache"


def largest_byte(data: Any) -> Any:
    """Defines the largest byte of each encoded image, for which DALI reads all its bytes."""
    return fn.reductions.max(data, axes=[0])


def worker(args: argparse.Namespace) -> None:
    """Measures a variant in this process and prints the result as JSON."""
    start = time.perf_counter()
    cache = {"cache": args.cache} if args.cache else {}
    tar = sources.Tar(args.urls, {"data": "jpg"}, read_ahead=args.read_ahead, **cache)
    opening = time.perf_counter() - start
    iterator = data_iterator(largest_byte, ["largest"], source=tar, as_numpy=True)
    call = {"batch_size": args.batch, "num_threads": args.threads, "seed": args.seed}
    process = psutil.Process()
    with iterator.stream(None, device_id=None, **call) as stream:
        base, start = process.memory_info().rss, time.perf_counter()
        next(stream)
        first = time.perf_counter() - start
        for _ in range(len(tar) // args.batch if args.cache else 10):
            next(stream)  # the first epoch fills the cache
        busy, start, count, memory = time.process_time(), time.perf_counter(), 0, base
        while time.perf_counter() - start < args.seconds:
            next(stream)
            count += args.batch
            memory = max(memory, process.memory_info().rss)
        seconds = time.perf_counter() - start
        busy = time.process_time() - busy
    result = {
        "images_per_s": count / seconds,
        "cpu_us": 1e6 * busy / count,
        "first_s": first,
        "opening_s": opening,
        "memory_mb": (memory - base) / 1e6,
    }
    print(json.dumps(result), flush=True)


def start_servers(
    folder: pathlib.Path, count: int, latency: float, faults: float = 0.0
) -> tuple[list[Any], list[str]]:
    """Starts servers of a folder, with a share of 503s; returns their processes and URLs."""
    processes, urls = [], []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, str(SERVER), str(folder), *map(str, (port, latency, faults))]
        processes.append(subprocess.Popen(command))
        urls.append(f"http://127.0.0.1:{port}")
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
    return processes, urls


def run(
    args: argparse.Namespace, tars: list[pathlib.Path], latency: float | None, cache: str, seed: int
) -> dict[str, float]:
    """Measures a variant in a separate process; a latency of None: local files."""
    processes: list[Any] = []
    paths = list(map(str, tars))
    if latency is not None:
        processes, urls = start_servers(tars[0].parent, args.servers, latency, args.faults)
        paths = [f"{urls[k % len(urls)]}/{tar.name}" for k, tar in enumerate(tars)]
    try:
        command = [sys.executable, __file__, "--urls", *paths, "--cache", cache]
        for option in ("batch", "threads", "seconds", "read_ahead"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        command += ["--seed", str(seed)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        result: dict[str, float] = json.loads(printed.splitlines()[-1])
        return result
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=int, default=8192)
    parser.add_argument("--tars", type=int, default=1024)
    parser.add_argument("--latencies", type=float, nargs="+", default=[1, 20, 50, 100], help="ms")
    parser.add_argument("--faults", type=float, default=0, help="share of responses that are 503")
    parser.add_argument("--servers", type=int, default=2, help="processes of the server")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=4, help="DALI's threads")
    parser.add_argument("--read-ahead", default="64MB")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    parser.add_argument("--urls", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.urls:
        worker(args)
        return
    report.heading()
    with tempfile.TemporaryDirectory() as spare:
        os.environ["XDG_CACHE_HOME"] = spare
        folder = args.folder or pathlib.Path(spare)
        files = photos.make(folder, args.files)
        names = photos.tars(folder / f"packed-{args.tars}", files, args.tars)
        tars = list(map(pathlib.Path, names))
        size = sum(tar.stat().st_size for tar in tars) / len(files)
        variants: dict[str, tuple[float | None, str]] = {LOCAL: (None, "")}
        variants |= {f"{latency:g} ms": (latency / 1e3, "") for latency in args.latencies}
        variants[CACHED] = (args.latencies[-1] / 1e3, f"{spare}/ranges")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for number in range(args.rounds):
            for name, (latency, cache) in variants.items():
                results[name].append(run(args, tars, latency, cache, number))
                print(f"  {name}: {results[name][-1]}", flush=True)
    report.table(
        ("", "images/s", "MB/s", "CPU us per image", "first batch, s", "more memory, MB"),
        [
            (
                name,
                report.spread([run["images_per_s"] for run in runs]),
                f"{statistics.median(run['images_per_s'] for run in runs) * size / 1e6:,.0f}",
                *(
                    report.spread([run[key] for run in runs], digits)
                    for key, digits in (("cpu_us", 0), ("first_s", 2), ("memory_mb", 0))
                ),
            )
            for name, runs in results.items()
        ],
    )
    medians = {
        name: statistics.median(run["images_per_s"] for run in runs)
        for name, runs in results.items()
    }
    report.write(args.out, "remote", results, {"": medians}, "images/s")


if __name__ == "__main__":
    main()
