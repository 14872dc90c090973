"""Compares ways to read a Parquet data set of images from a server, before decoding.

A local HTTP server with latency stands in for the HuggingFace Hub. The data set has 8 files, each
with 5 row groups of 200 images of 50 kB: 400 MB. The contenders are `sources.Parquet`, and Grain's
``ParquetIterDataset`` as MaxText uses it, with 8 interleaved files and a shuffled window of as many
records, before `DALITransform`. By default, fsspec reads 5 MB ahead; a user may disable it, and
have pyarrow request the columns of a row group together. Each run is a process of its own; runs of
the contenders alternate. The columns are medians of:

- the seconds until the first batch, and the records per second of an epoch in batches of 64,
- the bytes that the server has sent in the epoch, relative to the size of the data set,
- the seconds until a batch in the middle of the epoch, from its state, and the bytes,
- the largest memory of the process,
- the bytes that each of four processes reads in an epoch, relative to the size of the data set.

Prints a table::

    python benchmarks/parquet.py --latency 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES, GROUPS, ROWS, SIZE = 8, 5, 200, 50_000
COUNT = FILES * GROUPS * ROWS
BATCH, PROCESSES = 64, 4
WINDOW = 1600  # records
CONTENDERS = ("Parquet", "Parquet, parts=4", "Grain", "Grain without read-ahead")


def write(folder: pathlib.Path) -> None:
    """Writes the files, as ``Dataset.to_parquet`` of HuggingFace does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for file in range(FILES):
        labels = range(file * GROUPS * ROWS, (file + 1) * GROUPS * ROWS)
        images = [{"bytes": rng.bytes(SIZE), "path": None} for _ in labels]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({"image": pa.array(images, kind), "label": pa.array(labels)})
        options = {"compression": "none", "use_dictionary": False, "write_page_index": True}
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=ROWS, **options)


def serve(folder: str, port: int, latency: float) -> None:
    """Serves the files; the path ``sent`` returns and resets the number of sent bytes."""
    sys.path.append(str(ROOT / "tests/support"))
    from range_server import RangeServer

    class Counting(RangeServer):
        sent = 0

        async def _respond(self, head: str, body: bytes, writer: Any) -> bool:
            if head.startswith("GET /sent "):
                sent, self.sent = self.sent, 0
                return bool(super()._send(writer, 200, str(sent).encode()))
            return bool(await super()._respond(head, body, writer))

        def _send(
            self, writer: Any, status: int, body: Any, lines: str = "", is_head: bool = False
        ) -> bool:
            # fsspec asks for whole files to see if they exist, and does not read the answer.
            self.sent += len(body) * (status == 206)
            return bool(super()._send(writer, status, body, lines, is_head))

    async def run() -> None:
        server = Counting(folder, latency)
        await (await asyncio.start_server(server.respond, "127.0.0.1", port)).serve_forever()

    asyncio.run(run())


def sent(url: str) -> float:
    """Returns the bytes that were sent since the last call, relative to the data set."""
    with urllib.request.urlopen(f"{url}/sent") as response:
        return int(response.read()) / (COUNT * SIZE)


def parquet(urls: list[str], contender: str) -> Any:
    """Returns a source."""
    from dalijax import sources

    options = {"parts": PROCESSES, "batch_size": BATCH} if "parts" in contender else {}
    fields = {"image": "image/bytes", "label": "label"}
    return sources.Parquet(urls, fields, window=WINDOW * SIZE, **options)


def records_of(urls: list[str], contender: str, process: int = 0, processes: int = 1) -> Any:
    """Returns Grain's data set of a process, in MaxText's order of transformations."""
    import fsspec
    import grain

    options: dict[str, Any] = {"filesystem": fsspec.filesystem("http")}
    if "without" in contender:
        options = {"filesystem": fsspec.filesystem("http", cache_type="none"), "pre_buffer": True}
    files = grain.MapDataset.source(urls).shuffle(seed=1)[process::processes]
    records = files.map(functools.partial(grain.experimental.ParquetIterDataset, **options))
    records = grain.experimental.InterleaveIterDataset(records, cycle_length=len(files))
    window = WINDOW // processes
    return grain.experimental.WindowShuffleIterDataset(records, window_size=window, seed=1)


def batches(urls: list[str], contender: str) -> Any:
    """Returns an iterator of batches that DALI has received."""
    from nvidia.dali import fn, types

    import dalijax

    def graph(image: Any, label: Any) -> Any:
        return fn.cast(fn.shapes(image), dtype=types.INT32), label

    if "Grain" not in contender:
        make = dalijax.data_iterator(graph, output_map=["size", "label"])
        return make(source=parquet(urls, contender), batch_size=BATCH, seed=1)
    from dalijax.adapters.grain import DALITransform

    records = records_of(urls, contender).map(
        lambda r: {"image": r["image"]["bytes"], "label": r["label"]}
    )
    transform = DALITransform(graph, batch_size=BATCH, output_map=["size", "label"])
    return iter(records.pipe(transform))


def labels_of(urls: list[str], contender: str, process: int) -> Iterator[int]:
    """Yields the labels of the records of one of several processes, in an epoch."""
    if "Grain" in contender:
        yield from (
            int(record["label"]) for record in records_of(urls, contender, process, PROCESSES)
        )
        return
    from dalijax.core.sources.source import order_of

    source = parquet(urls, contender)
    records, _ = order_of(source, 1, True)(np.arange(COUNT // BATCH * BATCH))
    rows = BATCH // PROCESSES
    for batch in records.reshape(-1, PROCESSES, rows):
        yield from np.asarray(source.read(batch[process], ["image", "label"])["label"]).tolist()


def _warm_up() -> None:
    """Imports the libraries, and runs a pipeline."""
    from dalijax import data_iterator, sources
    from dalijax.adapters import grain  # noqa: F401

    numbers = sources.Arrays({"x": np.arange(8, dtype=np.int32)})
    next(data_iterator(lambda x: x, output_map=["x"])(source=numbers, batch_size=4))


def measure(url: str, contender: str) -> None:
    """Prints the measurements of a contender as JSON."""
    urls = [f"{url}/{number}.parquet" for number in range(FILES)]
    _warm_up()
    sent(url)
    begin = time.perf_counter()
    iterator = batches(urls, contender)
    labels = np.asarray(next(iterator)["label"]).tolist()
    first = time.perf_counter() - begin
    state, middle = None, []
    for step in range(1, COUNT // BATCH):
        batch = np.asarray(next(iterator)["label"]).tolist()
        labels += batch
        if step == COUNT // BATCH // 2:
            state = iterator.get_state()
        middle = middle or (batch if state is not None and step > COUNT // BATCH // 2 else [])
    rate = len(labels) / (time.perf_counter() - begin)
    assert len(set(labels)) == len(labels)
    iterator.close()
    read, memory = sent(url), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    begin = time.perf_counter()
    iterator = batches(urls, contender)
    iterator.set_state(state)
    assert np.asarray(next(iterator)["label"]).tolist() == middle
    resumed, again = time.perf_counter() - begin, sent(url)
    iterator.close()
    time.sleep(1)  # requests in flight
    sent(url)
    labels = [label for k in range(PROCESSES) for label in labels_of(urls, contender, k)]
    assert len(set(labels)) == len(labels)
    share = sent(url) / PROCESSES
    print(json.dumps([first, rate, read, resumed, again, memory, share]))


def main() -> None:
    """Runs the contenders in turn, and prints a table of medians."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--latency", type=float, default=0.05, help="in seconds")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.worker:
        return measure(*args.worker)
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = multiprocessing.Process(target=serve, args=(folder, port, args.latency))
        server.start()
        results: dict[str, list[list[float]]] = {contender: [] for contender in CONTENDERS}
        try:
            for _ in range(args.rounds):
                for contender in CONTENDERS:
                    command = [sys.executable, __file__, "--worker"]
                    command += [f"http://127.0.0.1:{port}", contender]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    results[contender].append(json.loads(done.stdout.splitlines()[-1]))
                    print(contender, results[contender][-1], file=sys.stderr, flush=True)
        finally:
            server.terminate()
            server.join()
    print("| | first batch, s | records/s | bytes read | resume, s | bytes | MB | each of 4 |")
    print("|---|---|---|---|---|---|---|---|")
    for contender, rows in results.items():
        values = [statistics.median(column) for column in zip(*rows)]
        print("|", contender, "|", " | ".join(f"{value:,.2f}" for value in values), "|")
    return None


if __name__ == "__main__":
    main()
