"""Measures the CPU cores that each loader needs to feed a ResNet-50 and a ViT-B/16 on one GPU.

All loaders crop at random to 224, flip, and change brightness, contrast and saturation. In each
round, both models train on a constant batch, and on the batches of each loader, in turn::

    python benchmarks/cores.py --seconds 240 --limit 240

``--small`` trains a tiny model, for a test on a CPU. Loaders that are not installed
are left out: OpenCV, TensorFlow, and PyTorch with torchvision are optional. ``--seconds`` is the
time of all timed steps; after ``--limit`` seconds, no turn begins, but each loader has at least one
turn.

The cores that a loader needs are the CPU time per image times the images per second of the model
alone. They contain the training loop, so the constant batch has about one core. The cost on the GPU
is how much longer the steps are, without the time in which the GPU waits for a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import other_inputs
import photos
import recipe
import report
from report import GPU

MODELS = {"resnet50": "ResNet-50", "vit_b16": "ViT-B/16"}  # the fastest first
SMALL = {"batch": 16, "files": 64, "threads": 2, "workers": 1, "rounds": 1, "seconds": 3}
TINY = {
    "side": other_inputs.SIDE,
    "patch": 32,
    "width": 16,
    "depths": (1,),
}  # changes of the smoke configuration
REQUIRED = {  # the optional packages of loaders
    "tf.data": ("tensorflow",),
    "Grain and OpenCV": ("cv2",),
    "torchvision and DataLoader": ("torch", "torchvision"),
}


def loaders(
    files: list[str], config: Any, sharding: Any, threads: int, workers: int, folder: pathlib.Path
) -> dict[str, Callable[[], Iterator[recipe.Batch]]]:
    """Returns functions that return an endless iterator, by the name of the loader."""
    names = importlib.import_module("input")
    labels = [number % recipe.CLASSES for number in range(len(files))]
    tars = names.sources.Tar(photos.tars(folder, files, classes=recipe.CLASSES), names.FIELDS)
    call, jitter = (files, labels, config.batch), config.jitter

    def dalijax(source: Any) -> Callable[[], Iterator[recipe.Batch]]:
        return functools.partial(recipe.recipe_batches, config, source, sharding, threads)

    others = {
        "DALI's JAX plugin": (other_inputs.plugin_batches, (threads, jitter, GPU)),
        "tf.data": (other_inputs.tensorflow_batches, (jitter, sharding)),
        "Grain and OpenCV": (other_inputs.grain_batches, (workers, jitter, sharding)),
        "torchvision and DataLoader": (
            other_inputs.torchvision_batches,
            (workers, jitter, sharding),
        ),
    }
    return {
        "dalijax, Files": dalijax(names.sources.Files(paths=files, labels=labels)),
        "dalijax, Tar": dalijax(tars),
        **{
            name: lambda make=make, options=options: recipe.with_soft_labels(
                make(*call, *options), sharding
            )
            for name, (make, options) in others.items()
        },
    }


def is_installed(loader: str) -> bool:
    """Returns whether the packages of a loader are installed, and prints the missing packages."""
    missing = [name for name in REQUIRED.get(loader, ()) if not importlib.util.find_spec(name)]
    if missing:
        print(f"  {loader} is left out: {', '.join(missing)} is not installed", flush=True)
    return not missing


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of a loader in a round, or the medians over the rounds.

    Attributes:
        rate: Images per second.
        share: Rate divided by the rate of the model alone, in percent.
        cores: CPU cores in use.
        needed: CPU cores at the rate of the model alone.
        cost: How much longer the steps are without the waits for batches, in percent.
        waiting: Waits for batches, in percent of the time.
    """

    rate: float
    share: float
    cores: float
    needed: float
    cost: float
    waiting: float


def load_of(run: recipe.Timing, alone: recipe.Timing, batch: int) -> Load:
    """Returns the load of a loader in a round, compared with the model alone."""
    return Load(
        rate=1e3 * batch / run.step,
        share=100 * alone.step / run.step,
        cores=run.cores,
        needed=run.cores * run.step / alone.step,
        cost=100 * ((run.step - run.waiting) / (alone.step - alone.waiting) - 1),
        waiting=100 * run.waiting / run.step,
    )


def loads(timings: recipe.Timings, batch: int) -> dict[str, Load]:
    """Returns the load of each loader: the medians over the rounds."""
    result = {}
    for name, runs in timings.items():
        rounds = [load_of(run, alone, batch) for run, alone in zip(runs, timings[recipe.MODEL])]
        result[name] = Load(*map(statistics.median, zip(*map(dataclasses.astuple, rounds))))
    return result


def tables(results: dict[str, dict[str, Load]]) -> None:
    """Prints a table of all models, and a table with all values for each model."""
    names = list(next(iter(results.values())))
    columns = ["loader"]
    rows = [[name] for name in names]
    for model, loads_of_model in results.items():
        columns += [f"{model}, {part}" for part in ("% of its rate", "cores", "cost, %")]
        for row, load in zip(rows, loads_of_model.values()):
            row += [f"{load.share:.0f}", f"{load.needed:.1f}", f"{load.cost:+.1f}"]
    report.table(columns, rows)
    for model, loads_of_model in results.items():
        report.table(
            (
                *(model, "images/s", "% of the model alone", "CPU cores in use"),
                *("cores for the model alone", "cost on the GPU, %", "waiting for batches, %"),
            ),
            [
                (
                    name,
                    f"{load.rate:,.0f}",
                    f"{load.share:.1f}",
                    f"{load.cores:.1f}",
                    f"{load.needed:.1f}",
                    f"{load.cost:+.1f}",
                    f"{load.waiting:.1f}",
                )
                for name, load in loads_of_model.items()
            ],
        )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--small", action="store_true", help="a tiny model, for a test on a CPU")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    parser.add_argument("--threads", type=int, default=8, help="DALI's threads")
    parser.add_argument(
        "--workers", type=int, default=recipe.default_workers(), help="workers of Grain and PyTorch"
    )
    parser.add_argument("--match", default="", help="pattern of names of loaders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="time of all timed steps")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no turn begins"
    )
    if parser.parse_args().small:
        parser.set_defaults(**SMALL)
    args = parser.parse_args()
    ends = time.monotonic() + args.limit
    report.heading()
    configs = {
        model: importlib.import_module(f"configs.{name}").config
        for name, model in ({"smoke": "tiny ViT"} if args.small else MODELS).items()
        if args.small or name in args.models
    }
    changes = {**recipe.JITTER, "batch": args.batch, **(TINY if args.small else {})}
    configs = {name: dataclasses.replace(config, **changes) for name, config in configs.items()}
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    rows, everything = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    with tempfile.TemporaryDirectory() as spare:
        files = photos.make(args.folder or pathlib.Path(spare) / "files", args.files)
        made = loaders(
            files,
            next(iter(configs.values())),
            rows,
            args.threads,
            args.workers,
            pathlib.Path(spare),
        )
        inputs = {
            name: make
            for name, make in made.items()
            if re.search(args.match, name) and is_installed(name)
        }
        stream = made["dalijax, Files"]()
        first = next(stream)
        stream.close()
        trainers = {
            name: recipe.Trainer(config, everything, first) for name, config in configs.items()
        }
        timings = recipe.measure(
            trainers,
            inputs,
            args.rounds,
            args.seconds,
            args.workers,
            "cores",
            lambda: time.monotonic() > ends,
        )
    results = {model: loads(runs, args.batch) for model, runs in timings.items()}
    tables(results)
    needed = {
        model: {name: load.needed for name, load in loads_of_model.items()}
        for model, loads_of_model in results.items()
    }
    values = {model: recipe.as_json(runs) for model, runs in timings.items()}
    report.write(args.out, "cores", values, needed, "CPU cores for the rate of the model alone")


if __name__ == "__main__":
    main()
