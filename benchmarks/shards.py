"""Measures how long many tars take to open, from a shared index and from a stored index.

A server on this machine simulates a bucket of S3, and waits before each response. Each tar is one
of 400 with different sizes and labels, which are linked many times. Every opening runs in a
separate process; the time excludes imports, and the CPU time is that of this process::

    python benchmarks/shards.py --tars 10000 --samples 128 --latency 50
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any

import remote

import report
from dalijax import sources

DIFFERENT = 400  # tars
FIELDS = {"data": "jpg", "label": "cls"}
KEYS = {"key": "a", "secret": "b", "region": "us-east-1"}


def make(folder: pathlib.Path, tars: int, samples: int) -> None:
    """Writes tars of random sizes and labels."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    for number in range(tars):
        path = folder / f"{number:06d}.tar"
        if number >= DIFFERENT:
            os.link(folder / f"{number % DIFFERENT:06d}.tar", path)
            continue
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for sample in range(samples):
                image = bytes(int(generator.lognormvariate(6, 0.4)))
                label = b"%d" % generator.randrange(1000)
                for name, content in (("jpg", image), ("cls", label)):
                    member = tarfile.TarInfo(f"{number * samples + sample:08d}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def opened(paths: str, options: dict[str, Any]) -> dict[str, float]:
    """Opens tars in this process, and returns the time."""
    import obstore  # noqa: F401  # is imported at the first request

    start, busy = time.perf_counter(), time.process_time()
    source = sources.Tar(paths, FIELDS, storage_options=options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - busy,
        "records": len(source),
    }


def measure(name: str, paths: str, options: dict[str, Any], cache: pathlib.Path) -> dict[str, Any]:
    """Opens tars in a new process, with a folder of stored indexes, and prints the result."""
    command = [sys.executable, __file__, "--only", paths, json.dumps(options)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result = {"name": name, "load": os.getloadavg()[0], **json.loads(done.stdout.splitlines()[-1])}
    print(result, flush=True)
    return result


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tars", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=128, help="of each tar")
    parser.add_argument("--latency", type=float, default=50, help="ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(opened(args.only[0], json.loads(args.only[1]))))
        return
    report.heading()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        shards = root / "files" / "bucket" / "train"
        make(shards, args.tars, args.samples)
        names = f"{{000000..{args.tars - 1:06d}}}.tar"
        index = [sys.executable, "-m", "dalijax.sources", "index"]
        (server,), (url,) = remote.start_servers(root / "files", 1, args.latency / 1e3)
        bucket, options = "s3://bucket/train", {**KEYS, "endpoint_url": url}
        try:
            start = time.perf_counter()
            arguments = [f"--storage-option={name}={value}" for name, value in options.items()]
            subprocess.run([*index, f"{bucket}/{names}", *arguments], check=True)
            print(f"indexing the bucket: {time.perf_counter() - start:.1f} s", flush=True)
            for number in range(args.rounds):
                for name, paths, cache in (
                    ("bucket, shared index", f"{bucket}/{names}", "names"),
                    ("bucket, stored index", f"{bucket}/{names}", "names"),
                    ("bucket, shared index, pattern", f"{bucket}/*.tar", "pattern"),
                    ("bucket, stored index, pattern", f"{bucket}/*.tar", "pattern"),
                ):
                    results.append(measure(name, paths, options, root / f"{cache}{number}"))
        finally:
            server.kill()
            server.wait()
        subprocess.run([*index, f"{shards}/{names}"], check=True)
        for number in range(args.rounds):
            for name in ("local, shared index", "local, stored index"):
                results.append(measure(name, f"{shards}/{names}", {}, root / f"local{number}"))
    rows, times = [], {}
    for name in dict.fromkeys(result["name"] for result in results):
        mine = [result for result in results if result["name"] == name]
        seconds, cpu = ([result[key] for result in mine] for key in ("seconds", "cpu"))
        times[name] = statistics.median(seconds)
        rows.append((name, report.spread(seconds, 2), report.spread(cpu, 2)))
    report.table(("", "seconds", "CPU seconds"), rows)
    report.write(args.out, "shards", results, {"": times}, "seconds")


if __name__ == "__main__":
    main()
