"""A training loop that waits for its input, and how to find and fix the reason.

    python examples/input_bound.py

The first loop decodes with one thread, and a step of its model takes three quarters of the time of
this thread. `dalijax.profile` reports the reason, and `dalijax.tune` finds the fastest settings,
which the second loop uses. It writes examples/out/input_bound.png. More threads do not help on a
single core.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
from images import CACHE, make_images
from matplotlib.figure import Figure

import dalijax
from dalijax.profile import Report, profile
from dalijax.tune import tune

BATCH_SIZE = 32


@dalijax.data_iterator(output_map=["images", "labels"], reader_name="reader", auto_reset=True)
def train(data_dir: str) -> Any:
    jpegs, labels = fn.readers.file(file_root=data_dir, random_shuffle=True, name="reader")
    return fn.resize(fn.decoders.image(jpegs), size=(96, 96)), labels


def batch_seconds(data_dir: str, batches: int = 40, **settings: Any) -> float:
    """Measures the time of the graph alone for a batch."""
    stream = train.stream(None, data_dir, batch_size=BATCH_SIZE, **settings)
    with contextlib.closing(stream):
        for _ in range(10):
            next(stream)
        start = time.perf_counter()
        for _ in range(batches):
            next(stream)
        return (time.perf_counter() - start) / batches


def profiled_loop(data_dir: str, steps: int, model_seconds: float, **settings: Any) -> Report:
    """Profiles a loop. The model is a sleep, so that it does not use the CPU."""
    iterator = train(data_dir, batch_size=BATCH_SIZE, **settings)
    with iterator, profile(iterator) as report:
        left = steps
        while left:
            for _ in itertools.islice(iterator, left):
                time.sleep(model_seconds)
                left -= 1
    print(f"\n{settings}\n{report}")
    return report


def verdict(report: Report) -> str:
    return "input-bound" if report.input_bound else "not input-bound"


def save_picture(reports: dict[str, Report], model_rate: float, path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rates, stages = figure.subplots(1, 2)
    for number, (name, report) in enumerate(reports.items()):
        bars = {"loop": report.loop_rate, "graph alone": report.pipeline_rate or 0.0}
        places = [k + 0.4 * number for k in range(len(bars))]
        rates.bar(places, list(bars.values()), width=0.36, label=name)
        rates.set_xticks([k + 0.2 for k in range(len(bars))], list(bars))
        stages.barh(
            [k + 0.4 * number for k in range(len(report.stages))],
            list(report.stages.values()),
            height=0.36,
            tick_label=list(report.stages),
        )
    rates.axhline(model_rate, color="black", linestyle="--", label="model alone")
    rates.set(ylabel="samples/s", title="Loop with the model, and graph alone")
    rates.set_ylim(top=1.4 * rates.get_ylim()[1])
    rates.legend(loc="upper left")
    stages.set_title("Time of the operators of the graph")
    stages.set(xlabel="share of the graph's time", xlim=(0, 1))
    figure.savefig(path)
    print(f"\nPicture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Profiles and tunes a loop that waits for its input."
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    out = Path(__file__).resolve().parent / "out"
    parser.add_argument("--out", type=Path, default=out, help="directory of the picture")
    parser.add_argument("--steps", type=int, default=60, help="steps per loop")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of tune")
    parser.add_argument("--model-ms", type=float, help="time of a step of the model")
    arguments = parser.parse_args()
    data_dir = str(make_images(arguments.cache, count=200, sides=(500, 900)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    model_ms = arguments.model_ms or 750 * batch_seconds(data_dir, num_threads=1)
    print(f"A step of the model takes {model_ms:.1f} ms.")
    loop = (data_dir, arguments.steps, 1e-3 * model_ms)

    before = profiled_loop(*loop, num_threads=1)
    tuned = tune(
        train,
        batch_size=BATCH_SIZE,
        seconds=arguments.seconds,
        num_threads=[1, 2, 4, 8],
        progress=None,
        data_dir=data_dir,
    )
    print(f"\n{tuned.summary}\n    {tuned.line}")
    settings = {name: value for name, value in tuned.settings.items() if name != "batch_size"}
    after = profiled_loop(*loop, **settings)
    reports = {
        f"{name}: {verdict(report)}": report
        for name, report in (("one thread", before), ("tuned", after))
    }
    save_picture(reports, 1e3 * BATCH_SIZE / model_ms, arguments.out / "input_bound.png")


if __name__ == "__main__":
    main()
