"""Compares sources of many small records with DALI's readers: first batch, memory, and rate.

The data are class folders, tars and TFRecords with a thousand to a million records of 100 bytes,
which are not decoded. "Again" is a new process that uses the stored index. Each row is measured in
a separate process::

    python benchmarks/opening.py --records 1000 10000 100000 1000000
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from nvidia.dali import fn, pipeline_def, tfrecord

import photos
import report
import turns
from dalijax import data_iterator, sources

BATCH = 256
SIZE = 100  # bytes of a record
FEATURES = {
    "image": tfrecord.FixedLenFeature((), tfrecord.string, ""),
    "label": tfrecord.FixedLenFeature([1], tfrecord.int64, 0),
}


def make(kind: str, path: pathlib.Path, count: int) -> None:
    """Writes records that contain their number as text, padded with blanks."""
    contents = [b"%d" % k for k in range(count)]
    if kind == "folder":
        for start in range(0, count, 1000):
            folder = path / f"{start // 1000:04}"
            folder.mkdir(parents=True)
            for k in range(start, min(start + 1000, count)):
                (folder / f"{k:07}.jpg").write_bytes(contents[k].ljust(SIZE))
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for k, content in enumerate(contents):
                for name, data in (("jpg", content.ljust(SIZE)), ("cls", content)):
                    member = tarfile.TarInfo(f"{k:07}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    else:
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record"
            record.write_bytes(bytes(SIZE))
            photos.tfrecord(path, [str(record)] * count)


def raw(graph: Callable[[], Any]) -> Iterator[Any]:
    """Returns DALI's own loop over a reader."""
    options = {"batch_size": BATCH, "num_threads": 2, "device_id": None}
    return turns.raw_loop(pipeline_def(graph)(**options))


def over(source: Any) -> Iterator[Any]:
    """Returns batches of a source."""

    def graph(data: Any, label: Any) -> Any:
        return data, label

    iterator_fn = data_iterator(graph, ["data", "label"], source=source, as_numpy=True)
    return iterator_fn.stream(None, batch_size=BATCH, num_threads=2, device_id=None)


def readers(kind: str, path: str) -> Iterator[Any]:
    """Returns batches of DALI's reader."""
    if kind == "folder":
        return raw(lambda: tuple(fn.readers.file(file_root=path, random_shuffle=True)))
    if kind == "tar":
        return raw(
            lambda: tuple(
                fn.readers.webdataset(paths=[path], ext=["jpg", "cls"], random_shuffle=True)
            )
        )

    def of_features() -> Any:
        read = fn.readers.tfrecord(
            path=[path], index_path=[path + ".idx"], features=FEATURES, random_shuffle=True
        )
        return read["image"], read["label"]

    return raw(of_features)


def open_source(kind: str, path: str) -> Any:
    """Returns a source of the records."""
    if kind == "folder":
        return sources.Files(path)
    if kind == "tar":
        return sources.Tar([path], {"data": "jpg", "label": "cls"})
    return sources.TFRecord([path], fields={"data": "image", "label": "label"})


def measure(kind: str, path: str, variant: str, seconds: float) -> dict[str, float]:
    """Returns seconds until the first batch, records per second, and added MiB."""
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    iterator = readers(kind, path) if variant == "DALI" else over(open_source(kind, path))
    next(iterator)
    first = time.perf_counter() - start
    for _ in range(8):
        next(iterator)
    begin, batches = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or batches < 3:
        next(iterator)
        batches += 1
    rate = BATCH * batches / (time.perf_counter() - begin)
    added = (process.memory_info().rss - before) / 2**20
    return {"first": first, "rate": rate, "MiB": added}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--kinds", nargs="+", default=["folder", "tar", "tfrecord"])
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each measurement")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(*args.only, args.seconds)))
        return
    report.heading()
    results, rates = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            for count in args.records:
                path = pathlib.Path(folder) / f"{kind}-{count}"
                make(kind, path, count)
                if kind == "tfrecord":  # DALI's reader wants an index, by a script of its own
                    subprocess.run(
                        [
                            pathlib.Path(sys.executable).with_name("tfrecord2idx"),
                            path,
                            f"{path}.idx",
                        ],
                        check=True,
                    )
                environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
                for variant in ("DALI", "source", "source, again"):
                    command = [sys.executable, __file__, "--seconds", str(args.seconds)]
                    command += ["--only", kind, str(path), variant]
                    done = subprocess.run(
                        command, stdout=subprocess.PIPE, text=True, check=True, env=environment
                    )
                    row = json.loads(done.stdout.splitlines()[-1])
                    results.append({"kind": kind, "records": count, "variant": variant, **row})
                    rates[f"{kind}, {count:,}, {variant}"] = row["rate"]
                    print(results[-1], flush=True)
    report.table(
        ("", "records", "", "first batch, s", "records/s", "MiB"),
        [
            (
                row["kind"],
                f"{row['records']:,}",
                row["variant"],
                f"{row['first']:.2f}",
                f"{row['rate']:,.0f}",
                f"{row['MiB']:,.0f}",
            )
            for row in results
        ],
    )
    report.write(args.out, "opening", results, {"": rates}, "records/s")


if __name__ == "__main__":
    main()
