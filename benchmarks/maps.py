"""Measures the cost of a Python function of each record: `Source.map` and Grain's `map`.

The records are in memory: five captions as numbers, and a palette mask of 256 x 256 pixels as a
PNG. Grain reads in threads, and in worker processes that make batches. All variants take turns in
one process, in a different order in each round. The CPU time includes all processes. Values are
medians over the rounds, and ratios compare with dalijax's variant in the same round::

    python benchmarks/maps.py --rounds 9
"""

from __future__ import annotations

import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import absl.flags
import grain
import numpy as np
from PIL import Image

import report
import turns
from dalijax import data_iterator, sources

Record = dict[str, Any]
SIZE, RECORDS, MASKS = 256, 2048, 64
OURS = "dalijax"
BUFFERED = 20  # batches, more than each loader makes ahead


def palette_mask(number: int) -> bytes:
    """Returns a PNG with 21 classes in diagonal stripes."""
    stripes = np.indices((SIZE, SIZE)).sum(0) // (16 + number % 7) % 21
    image = Image.fromarray(stripes.astype(np.uint8), "P")
    image.putpalette([(37 * k) % 256 for k in range(768)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def records() -> list[Record]:
    files = [palette_mask(number) for number in range(MASKS)]
    captions = np.arange(5, dtype=np.int32)
    return [
        {"mask": files[k % MASKS], "captions": captions, "label": np.int32(k)}
        for k in range(RECORDS)
    ]


def add_one(record: Record) -> Record:
    return {"label": record["label"] + np.int32(1)}


def choose_caption(record: Record, rng: np.random.Generator) -> Record:
    return {"caption": record["captions"][rng.integers(5)]}


def decode_mask(record: Record) -> Record:
    return {"mask": np.asarray(Image.open(io.BytesIO(record["mask"])))[..., None]}


def decode_in_python(record: Record) -> Record:
    """Counts the pixels of each class in a loop, so that the function holds the GIL."""
    mask = Image.open(io.BytesIO(record["mask"]))
    counts = [0] * 21
    for row in np.asarray(mask)[::8].tolist():
        for value in row:
            counts[value] += 1
    return {"counts": np.array(counts, np.int32)}


# By title: the function, its inputs, its output, and whether it takes random numbers.
FUNCTIONS: Mapping[str, tuple[Callable[..., Record], str, str, bool]] = {
    "add 1 to a number": (add_one, "label", "label", False),
    "choose a caption": (choose_caption, "captions", "caption", True),
    "decode a mask (Pillow)": (decode_mask, "mask", "mask", False),
    "count pixels in Python": (decode_in_python, "mask", "counts", False),
}


def over_dalijax(data: list[Record], title: str, batch: int) -> Iterator[Any]:
    function, given, output, is_random = FUNCTIONS[title]
    source: Any = sources.Records(data, {given: given}, identity="records")
    mapped = (source.random_map if is_random else source.map)(function, inputs=[given])
    graphs: dict[str, Callable[..., Any]] = {
        "label": lambda label: label,
        "caption": lambda caption: caption,
        "mask": lambda mask: mask,
        "counts": lambda counts: counts,
    }
    make = data_iterator(graphs[output], [output], shuffle=True, as_numpy=True)
    return turns.endless(make(source=mapped, batch_size=batch, seed=1, drop_remainder=True))


def over_grain(
    data: list[Record], title: str, batch: int, threads: int, workers: int
) -> Iterator[Any]:
    function, given, _, is_random = FUNCTIONS[title]
    ds: Any = grain.MapDataset.source([{given: record[given]} for record in data])
    ds = ds.seed(1).shuffle().repeat()
    ds = (ds.random_map if is_random else ds.map)(function).batch(batch, drop_remainder=True)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(4, threads))
    ds = ds.to_iter_dataset(options)
    if workers:
        ds = ds.mp_prefetch(grain.MultiprocessingOptions(workers, per_worker_buffer_size=2))
    return iter(ds)


def time_batches(batches: Iterator[Any], seconds: float) -> tuple[float, float]:
    """Takes batches for some seconds; returns microseconds of CPU and of time per batch."""
    count, busy, begin = 0, report.cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        next(batches)
        count += 1
    return (report.cpu_seconds() - busy) / count * 1e6, elapsed / count * 1e6


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each turn")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of Grain")
    options = parser.parse_args()
    absl.flags.FLAGS.mark_as_parsed()  # required by Grain's workers
    report.heading()
    data = records()
    results: dict[str, Any] = {}
    rows = []
    plot: dict[str, dict[str, float]] = {}
    for title in FUNCTIONS:
        variants = {
            OURS: over_dalijax(data, title, options.batch),
            "Grain, 2 threads": over_grain(data, title, options.batch, 2, 0),
            "Grain, 16 threads": over_grain(data, title, options.batch, 16, 0),
            f"Grain, {options.workers} processes": over_grain(
                data, title, options.batch, 1, options.workers
            ),
        }
        cpu: turns.Times = {name: [] for name in variants}
        wall: turns.Times = {name: [] for name in variants}
        for name in turns.in_turn(variants, options.rounds, title):
            for _ in itertools.islice(variants[name], BUFFERED):
                pass  # empties the buffers, so that the loader can't use batches made before
            micros = time_batches(variants[name], options.seconds)
            cpu[name].append(micros[0] / options.batch)
            wall[name].append(micros[1] / options.batch)
            time.sleep(turns.REST * micros[1] / 1e6)
        results[title] = {"cpu": cpu, "wall": wall}
        plot[title] = {name: statistics.median(values) for name, values in cpu.items()}
        for name in variants:
            rows.append(
                [
                    title,
                    name,
                    f"{statistics.median(cpu[name]):.0f}",
                    turns.share(cpu[name], cpu[OURS]) if name != OURS else "1",
                    f"{statistics.median(wall[name]):.0f}",
                    turns.share(wall[name], wall[OURS]) if name != OURS else "1",
                ]
            )
        variants.clear()  # ends the threads and the processes
    columns = ["function", "loader", "CPU us per record", "ratio of CPU time"]
    report.table([*columns, "us per record", "ratio of time"], rows)
    report.write(options.out, "maps", results, plot, "CPU us per record")


if __name__ == "__main__":
    main()
