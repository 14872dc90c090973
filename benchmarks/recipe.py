"""Measures the cost of the input of examples/imagenet for its training step.

In each round, the step runs with a constant batch on the devices, and with each input, in a
different order in each round::

    python benchmarks/recipe.py --config resnet50 --batch 256 --seconds 300

``--seconds`` is the time of all timed steps. Building pipelines, compiling, and untimed steps
before the timed steps take additional time. With ``--processes 2``, two processes of
``jax.distributed`` share the GPUs of this machine, and the results are those of the first process.
After ``--limit`` seconds, no turn begins, but each input has at least one turn.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ["XLA_FLAGS"] = " ".join(  # XLA uses the last value of a flag
    ("--xla_gpu_enable_command_buffer=FUSION", os.environ.get("XLA_FLAGS", ""))
)

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import backend

import other_inputs
import photos
import report
import turns
from report import cpu_seconds

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "imagenet"))
CLASSES = 1000
Batch = dict[str, Any]
PLAIN = {"jitter": 0.0, "policy": "none", "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
JITTER = {**PLAIN, "jitter": 0.3}
POLICY = {**JITTER, "policy": "rand"}
ALL = {**POLICY, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}
MODEL = "a batch on the devices"
PROCESS = "RECIPE_PROCESS"  # the setup of one of several processes, as JSON
TAR = "everything, from a tar"
OPENCV, TENSORFLOW = "Grain, OpenCV: crop, flip, jitter", "tf.data: crop, flip, jitter"
INPUTS = {
    "crop, flip": PLAIN,
    "+ jitter": JITTER,
    "+ RandAugment": POLICY,
    "+ erasing, mixing: everything": ALL,
    "everything, by AutoAugment": {**ALL, "policy": "auto"},
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, of its ``next()`` and of its wait, and the number of busy cores."""

    step: float
    next: float
    waiting: float
    cores: float


Timings = dict[str, list[Timing]]  # a timing for each round, by input


class Trainer:
    """A model of examples/imagenet, its optimizer, and its compiled step.

    Args:
        config: Configuration of the model.
        sharding: Sharding of the parameters.
        first: A batch on the devices.
    """

    def __init__(self, config: Any, sharding: Any, first: Batch):
        begin, self._step, _ = importlib.import_module("steps").steps_of(config, CLASSES, 1000)
        self._state = jax.device_put(begin(), sharding)
        self.first = first
        self.run(itertools.repeat(first), 3)  # compiles
        self.step_ms = self.run(itertools.repeat(first), 10).step

    def _train(self, batch: Batch) -> Any:
        self._state, loss = self._step(self._state, batch["images"], batch["labels"])
        return loss

    def run(self, batches: Iterator[Batch], count: int) -> Timing:
        """Trains some steps, and returns their timing."""
        begin, busy = time.perf_counter(), cpu_seconds()
        timing = turns.time_steps(self._train, batches, count)
        cores = (cpu_seconds() - busy) / (time.perf_counter() - begin)
        return Timing(*timing, float(np.sum(multihost_utils.process_allgather(cores))))


def measure(
    trainers: Mapping[str, Trainer],
    inputs: Mapping[str, Callable[[], Iterator[Batch]]],
    rounds: int,
    seconds: float,
    workers: int,
    seed: str,
    is_over: Callable[[], bool],
) -> dict[str, Timings]:
    """Times the steps of each model with a constant batch and with each input, in turn.

    Args:
        trainers: The models by name, the fastest first. They take batches of the same iterator.
        inputs: Functions that return an endless iterator, by name.
        rounds: Number of rounds.
        seconds: Time of all timed steps.
        workers: Number of Grain's workers.
        seed: Seed of the orders of the inputs.
        is_over: Returns whether no turn may begin after the first round.
    """
    turn_seconds = seconds / rounds / (1 + len(inputs)) / len(trainers)
    timings: dict[str, Timings] = {
        model: {name: [] for name in (MODEL, *inputs)} for model in trainers
    }
    for name in turns.in_turn((MODEL, *inputs), rounds, seed, is_over):
        iterator = inputs[name]() if name in inputs else None
        for number, (model, trainer) in enumerate(trainers.items()):
            batches = itertools.repeat(trainer.first) if iterator is None else iterator
            # First, workers start and fill their buffers (about four batches per worker of Grain),
            # and tf.data tunes its threads. Then the time of a step is estimated.
            warm_up = steps_in(min(5.0, turn_seconds), trainer.step_ms)
            if number:  # a faster loader refills the buffers that the previous model has emptied
                time.sleep(min(2.0, turn_seconds))
            else:
                warm_up = max(warm_up, 4 * workers + 8)
            trainer.run(batches, warm_up)
            timing = trainer.run(batches, max(3, warm_up // 5))
            timing = trainer.run(batches, steps_in(turn_seconds, timing.step))
            timings[model][name].append(timing)
            print(f"  {model}, {name}: {timing}", flush=True)
        getattr(iterator, "close", lambda: None)()
        del iterator, batches
        gc.collect()  # ends Grain's workers
    return timings


def medians(timings: Timings) -> dict[str, float]:
    """Returns the median of the milliseconds of a step, by input."""
    return {name: statistics.median(run.step for run in runs) for name, runs in timings.items()}


def longer(timings: Timings) -> dict[str, list[float]]:
    """Returns how much longer the steps are than with the constant batch, in percent."""
    return {
        name: [100 * (run.step / base.step - 1) for run, base in zip(runs, timings[MODEL])]
        for name, runs in timings.items()
    }


def as_json(timings: Timings) -> dict[str, dict[str, list[float]]]:
    """Returns the values of all rounds."""
    return {
        name: {
            "step_ms": [run.step for run in runs],
            "next_ms": [run.next for run in runs],
            "waiting_ms": [run.waiting for run in runs],
            "cores": [run.cores for run in runs],
        }
        for name, runs in timings.items()
    }


def recipe_batches(config: Any, source: Any, sharding: Any, threads: int) -> Iterator[Batch]:
    """Returns endless batches of the input of examples/imagenet."""
    function = importlib.import_module("input").training(config, CLASSES, sharding, source)
    return function.stream(None, batch_size=config.batch, num_threads=threads, seed=0)


def with_soft_labels(batches: Iterator[Batch], sharding: Any) -> Iterator[Batch]:
    """Yields the batches of another loader with labels and sharding as the step expects them."""
    soft = jax.jit(lambda labels: jax.nn.one_hot(labels.reshape(-1), CLASSES))
    for batch in batches:  # another sharding of the same device would compile the step again
        yield jax.device_put({**batch, "labels": soft(batch["labels"])}, sharding)


def default_workers(processes: int = 1) -> int:
    """Returns the number of workers of a process, so that two cores remain for its loop."""
    return max(1, len(os.sched_getaffinity(0)) // processes - 2)


def steps_in(seconds: float, step_ms: float) -> int:
    """Returns the number of steps of a time, the same in all processes."""
    return max(3, int(multihost_utils.broadcast_one_to_all(int(1e3 * seconds / step_ms))))


def start_processes(count: int, folder: pathlib.Path) -> None:
    """Runs this program in several processes, each with a part of the GPUs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    share, running = backend.GetCUDADeviceCount() // count, []
    for number in range(count):
        setup = {"address": address, "process": number, "folder": str(folder)}
        gpus = ",".join(map(str, range(number * share, (number + 1) * share)))
        running.append(
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=os.environ | {PROCESS: json.dumps(setup), "CUDA_VISIBLE_DEVICES": gpus},
                stdout=subprocess.DEVNULL if number else None,
            )
        )
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()  # if a process failed, the others would wait for it
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--config", default="resnet50", help="module of examples/imagenet/configs")
    parser.add_argument("--batch", type=int, default=256, help="global batch size")
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    parser.add_argument("--threads", type=int, default=8, help="DALI's threads per device")
    parser.add_argument("--workers", type=int, help="Grain's workers (default: cores - 2)")
    parser.add_argument("--match", default="", help="pattern of names of inputs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="time of all timed steps")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no turn begins"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes")
    args = parser.parse_args()
    ends = time.monotonic() + args.limit

    def is_over() -> bool:
        """Returns whether the time limit of the first process is over."""
        return bool(multihost_utils.broadcast_one_to_all(time.monotonic() > ends))

    if args.workers is None:
        args.workers = default_workers(args.processes)
    if args.processes > 1 and PROCESS not in os.environ:
        with tempfile.TemporaryDirectory() as spare:
            folder = args.folder or pathlib.Path(spare)
            photos.make(folder, args.files)
            start_processes(args.processes, folder)
        return
    if PROCESS in os.environ:
        setup = json.loads(os.environ[PROCESS])
        jax.distributed.initialize(setup["address"], args.processes, setup["process"])
        args.folder = pathlib.Path(setup["folder"])
    report.heading()
    recipe = importlib.import_module("input")
    config = importlib.import_module(f"configs.{args.config}").config
    config = dataclasses.replace(config, batch=args.batch)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, everything = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    with tempfile.TemporaryDirectory() as spare:
        files = photos.make(args.folder or pathlib.Path(spare), args.files)
        labels = [k % CLASSES for k in range(len(files))]
        source = recipe.sources.Files(paths=files, labels=labels)

        def batches(changes: dict[str, Any], source: Any = source) -> Any:
            return recipe_batches(
                dataclasses.replace(config, **changes), source, rows, args.threads
            )

        host = args.batch // jax.process_count()
        inputs: dict[str, Callable[[], Any]] = {
            name: functools.partial(batches, changes) for name, changes in INPUTS.items()
        }
        if re.search(args.match, TAR):
            folder = pathlib.Path(spare) / str(jax.process_index())
            tars = photos.tars(folder, files, classes=CLASSES)
            packed = recipe.sources.Tar(tars, recipe.FIELDS)
            inputs[TAR] = functools.partial(batches, ALL, packed)
        others_call = (list(map(str, files)), labels, host)
        has_others = config.side == other_inputs.SIDE
        if has_others and importlib.util.find_spec("cv2"):
            inputs[OPENCV] = lambda: with_soft_labels(
                other_inputs.grain_batches(*others_call, args.workers, config.jitter, rows),
                rows,
            )
        if has_others and importlib.util.find_spec("tensorflow"):
            inputs[TENSORFLOW] = lambda: with_soft_labels(
                other_inputs.tensorflow_batches(*others_call, config.jitter, rows),
                rows,
            )
        inputs = {k: v for k, v in inputs.items() if re.search(args.match, k)}
        stream = batches(PLAIN)
        trainer = Trainer(config, everything, next(stream))
        stream.close()
        # The seed gives simultaneous runs different orders.
        timings = measure(
            {args.config: trainer},
            inputs,
            args.rounds,
            args.seconds,
            args.workers,
            args.config,
            is_over,
        )[args.config]
    step_ms, over = medians(timings), longer(timings)
    report.table(
        (
            *("input", "ms per step", "longer than the model alone, %", "time in next(), %"),
            *("images/s", "CPU cores in use", "CPU ms per image"),
        ),
        [
            (
                name,
                report.spread([run.step for run in runs], 2),
                f"{statistics.median(over[name]):+.1f}",
                report.spread([100 * run.next / run.step for run in runs], 1),
                f"{1e3 * args.batch / step_ms[name]:,.0f}",
                f"{statistics.median(run.cores for run in runs):.1f}",
                f"{statistics.median(run.cores * run.step for run in runs) / args.batch:.2f}",
            )
            for name, runs in timings.items()
        ],
    )
    title = f"recipe-{args.config}"
    if args.processes > 1:
        title += f"-{args.processes}-processes"
    if jax.process_index() == 0:
        report.write(args.out, title, as_json(timings), {args.config: step_ms}, "ms per step")


if __name__ == "__main__":
    main()
