"""A loop that waits for its input, what it waits for, and the cure.

    python examples/input_bound.py

The first loop has one thread decode; `dalijax.profile` says what is wrong, `dalijax.tune` which
settings are fastest here, and the second loop takes them. It writes examples/out/input_bound.png.
On a machine of two cores the second loop may well be input-bound, too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
from matplotlib.figure import Figure
from pictures import CACHE, make_pictures

import dalijax
from dalijax.core.profiling.profile import Report
from dalijax.tune import tune

BATCH_SIZE = 32


@dalijax.data_iterator(output_map=["images", "labels"], reader_name="reader", auto_reset=True)
def train(data_dir: str) -> Any:
    jpegs, labels = fn.readers.file(file_root=data_dir, random_shuffle=True, name="reader")
    return fn.resize(fn.decoders.image(jpegs), size=(96, 96)), labels


def profiled_loop(data_dir: str, steps: int, model_seconds: float, **settings: Any) -> Report:
    """Trains for some steps; the model is a sleep, so that it takes nothing of the CPU."""
    iterator = train(data_dir, batch_size=BATCH_SIZE, **settings)
    with iterator, dalijax.profile(iterator) as report:
        left = steps
        while left:
            for _ in itertools.islice(iterator, left):
                time.sleep(model_seconds)
                left -= 1
    print(f"\n{settings}\n{report}")
    return report


def save_picture(reports: dict[str, Report], path: Path) -> None:
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
    rates.set(ylabel="samples/s")
    rates.legend(loc="lower center")
    stages.set(xlabel="share of the graph's time", xlim=(0, 1))
    figure.savefig(path)
    print(f"\nPicture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A loop that waits for its input, and the cure.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where drawn pictures are kept")
    out = Path(__file__).resolve().parent / "out"
    parser.add_argument("--out", type=Path, default=out, help="a folder for the picture")
    parser.add_argument("--steps", type=int, default=60, help="steps of each loop")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tune")
    parser.add_argument("--model-ms", type=float, default=2.0, help="a step of the model")
    arguments = parser.parse_args()
    data_dir = str(make_pictures(arguments.cache, count=200))
    arguments.out.mkdir(parents=True, exist_ok=True)
    loop = (data_dir, arguments.steps, 1e-3 * arguments.model_ms)

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
    save_picture({"num_threads=1": before, "as tuned": after}, arguments.out / "input_bound.png")


if __name__ == "__main__":
    main()
