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
from collections.abc import Callable
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
    """Milliseconds of a step and of its ``next()``, and the number of busy cores."""

    step: float
    next: float
    cores: float


def run(step: Any, state: Any, batches: Any, count: int) -> tuple[Any, Timing]:
    """Runs steps, at most two at a time, and returns the new state and the timing."""
    begin, in_next, losses, busy = time.perf_counter(), 0.0, [], cpu_seconds()
    for _ in range(count):
        start = time.perf_counter()
        batch = next(batches)
        in_next += time.perf_counter() - start
        state, loss = step(state, batch["images"], batch["labels"])
        losses.append(loss)
        if len(losses) > 2:
            losses[-3].block_until_ready()
    if not np.isfinite(float(losses[-1])):
        raise RuntimeError("the loss is not finite")
    total = time.perf_counter() - begin
    cores = float(np.sum(multihost_utils.process_allgather((cpu_seconds() - busy) / total)))
    return state, Timing(1e3 * total / count, 1e3 * in_next / count, cores)


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

    if args.workers is None:  # two cores remain for the training loop
        args.workers = max(1, len(os.sched_getaffinity(0)) // args.processes - 2)
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
    recipe, steps = importlib.import_module("input"), importlib.import_module("steps")
    config = importlib.import_module(f"configs.{args.config}").config
    config = dataclasses.replace(config, batch=args.batch)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, everything = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    with tempfile.TemporaryDirectory() as spare:
        files = photos.make(args.folder or pathlib.Path(spare), args.files)
        labels = [k % CLASSES for k in range(len(files))]
        source = recipe.sources.Files(paths=files, labels=labels)

        def batches(changes: dict[str, Any], source: Any = source) -> Any:
            changed = dataclasses.replace(config, **changes)
            function = recipe.training(changed, CLASSES, rows, source)
            return function.stream(None, batch_size=args.batch, num_threads=args.threads, seed=0)

        soft = jax.jit(lambda labels: jax.nn.one_hot(labels, CLASSES))

        def others_batches(batches: Any) -> Any:
            return ({**batch, "labels": soft(batch["labels"])} for batch in batches)

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
            inputs[OPENCV] = lambda: others_batches(
                other_inputs.grain_batches(*others_call, args.workers, config.jitter, rows)
            )
        if has_others and importlib.util.find_spec("tensorflow"):
            inputs[TENSORFLOW] = lambda: others_batches(
                other_inputs.tensorflow_batches(*others_call, config.jitter, rows)
            )
        inputs = {k: v for k, v in inputs.items() if re.search(args.match, k)}
        turn_seconds = args.seconds / args.rounds / (1 + len(inputs))
        begin, step, _ = steps.steps_of(config, CLASSES, 1000)
        state = jax.device_put(begin(), everything)
        stream = batches(PLAIN)
        first = next(stream)
        stream.close()
        state, _ = run(step, state, itertools.repeat(first), 3)  # compiles
        state, alone = run(step, state, itertools.repeat(first), 10)
        timings: dict[str, list[Timing]] = {name: [] for name in (MODEL, *inputs)}
        # The seed gives simultaneous runs different orders.
        for name in turns.in_turn(timings, args.rounds, args.config, is_over):
            iterator = inputs[name]() if name in inputs else itertools.repeat(first)
            # First, workers start and fill their buffers (about four batches per worker of Grain),
            # and tf.data tunes its threads. Then the time of a step is estimated.
            warm_up = max(steps_in(min(5.0, turn_seconds), alone.step), 4 * args.workers + 8)
            state, _ = run(step, state, iterator, warm_up)
            state, timing = run(step, state, iterator, max(3, warm_up // 5))
            state, timing = run(step, state, iterator, steps_in(turn_seconds, timing.step))
            timings[name].append(timing)
            getattr(iterator, "close", lambda: None)()
            del iterator
            gc.collect()  # ends Grain's workers
            print(f"  {name}: {timing}", flush=True)
    medians = {name: statistics.median(run.step for run in runs) for name, runs in timings.items()}
    over = {
        name: [100 * (run.step / base.step - 1) for run, base in zip(runs, timings[MODEL])]
        for name, runs in timings.items()
    }
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
                f"{1e3 * args.batch / medians[name]:,.0f}",
                f"{statistics.median(run.cores for run in runs):.1f}",
                f"{statistics.median(run.cores * run.step for run in runs) / args.batch:.2f}",
            )
            for name, runs in timings.items()
        ],
    )
    results = {
        name: {
            "step_ms": [run.step for run in runs],
            "next_ms": [run.next for run in runs],
            "cores": [run.cores for run in runs],
        }
        for name, runs in timings.items()
    }
    title = f"recipe-{args.config}"
    if args.processes > 1:
        title += f"-{args.processes}-processes"
    if jax.process_index() == 0:
        report.write(args.out, title, results, {args.config: medians}, "ms per step")


if __name__ == "__main__":
    main()
