"""What the input of examples/imagenet costs its training step, with more and more augmentation.

In each round the step runs over one batch that lies on the devices, and over the recipe's inputs,
in another order each round::

    python benchmarks/recipe.py --config resnet50 --batch 256 --seconds 300

A round's steps last about as long as its share of the seconds. Building pipelines, compiling, and
steps of some seconds before the timed ones, come on top. With ``--processes 2`` two
processes of ``jax.distributed`` share the GPUs of this machine, and the figures are of the first.
After ``--limit`` seconds no turn begins, once each input had one.
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

os.environ["XLA_FLAGS"] = " ".join(  # of a flag given twice the last one counts
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
PROCESS = "RECIPE_PROCESS"  # what one of several processes gets, as JSON
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
class Seen:
    """What steps took: milliseconds of one, of those in ``next()``, and cores that were busy."""

    step: float
    next: float
    cores: float


def run(step: Any, state: Any, batches: Any, count: int) -> tuple[Any, Seen]:
    """The state behind so many steps, and what they took; two are under way."""
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
    return state, Seen(1e3 * total / count, 1e3 * in_next / count, cores)


def steps_in(seconds: float, step_ms: float) -> int:
    """About how many steps last so long; the same for all processes."""
    return max(3, int(multihost_utils.broadcast_one_to_all(int(1e3 * seconds / step_ms))))


def start_processes(count: int, folder: pathlib.Path) -> None:
    """Runs this program in so many processes, each with its share of the GPUs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    share, running = backend.GetCUDADeviceCount() // count, []
    for process in range(count):
        setup = {"address": address, "process": process, "folder": str(folder)}
        gpus = ",".join(map(str, range(process * share, (process + 1) * share)))
        running.append(
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=os.environ | {PROCESS: json.dumps(setup), "CUDA_VISIBLE_DEVICES": gpus},
                stdout=subprocess.DEVNULL if process else None,
            )
        )
    try:
        while None in (codes := [one.poll() for one in running]) and not any(codes):
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()  # the others would wait for one that failed
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--config", default="resnet50", help="of examples/imagenet/configs")
    parser.add_argument("--batch", type=int, default=256, help="over all devices")
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--folder", type=pathlib.Path, help="where the JPEGs lie, or are put")
    parser.add_argument("--threads", type=int, default=8, help="of DALI, for each device")
    parser.add_argument("--workers", type=int, help="of Grain (default: two less than cores)")
    parser.add_argument("--match", default="", help="only inputs whose name it is found in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="of all timed steps")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, when turns end")
    parser.add_argument("--processes", type=int, default=1, help="that share the GPUs")
    args = parser.parse_args()
    ends = time.monotonic() + args.limit

    def is_over() -> bool:
        """Whether the time of the first process is over."""
        return bool(multihost_utils.broadcast_one_to_all(time.monotonic() > ends))

    if args.workers is None:  # the loop and what it starts have the others
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
        each = args.seconds / args.rounds / (1 + len(inputs))
        begin, step, _ = steps.steps_of(config, CLASSES, 1000)
        state = jax.device_put(begin(), everything)
        stream = batches(PLAIN)
        first = next(stream)
        stream.close()
        state, _ = run(step, state, itertools.repeat(first), 3)  # compiles
        state, alone = run(step, state, itertools.repeat(first), 10)
        seen: dict[str, list[Seen]] = {name: [] for name in (MODEL, *inputs)}
        # Two of them on a machine differ in their orders.
        for name in turns.in_turn(seen, args.rounds, args.config, is_over):
            iterator = inputs[name]() if name in inputs else itertools.repeat(first)
            # Workers begin, fill their buffers, of which Grain's have some four batches each, and
            # tf.data finds its threads. Then the time of a step is looked at.
            few = max(steps_in(min(5.0, each), alone.step), 4 * args.workers + 8)
            state, _ = run(step, state, iterator, few)
            state, one = run(step, state, iterator, max(3, few // 5))
            state, one = run(step, state, iterator, steps_in(each, one.step))
            seen[name].append(one)
            getattr(iterator, "close", lambda: None)()
            del iterator
            gc.collect()  # which ends Grain's workers
            print(f"  {name}: {one}", flush=True)
    medians = {name: statistics.median(one.step for one in runs) for name, runs in seen.items()}
    over = {
        name: [100 * (one.step / base.step - 1) for one, base in zip(runs, seen[MODEL])]
        for name, runs in seen.items()
    }
    report.table(
        (
            *("input", "ms a step", "over the model, %", "in next(), % of it", "images/s", "cores"),
            "ms of a core, an image",
        ),
        [
            (
                name,
                report.spread([one.step for one in runs], 2),
                f"{statistics.median(over[name]):+.1f}",
                report.spread([100 * one.next / one.step for one in runs], 1),
                f"{1e3 * args.batch / medians[name]:,.0f}",
                f"{statistics.median(one.cores for one in runs):.1f}",
                f"{statistics.median(one.cores * one.step for one in runs) / args.batch:.2f}",
            )
            for name, runs in seen.items()
        ],
    )
    results = {
        name: {
            "step_ms": [one.step for one in runs],
            "next_ms": [one.next for one in runs],
            "cores": [one.cores for one in runs],
        }
        for name, runs in seen.items()
    }
    title = f"recipe-{args.config}"
    if args.processes > 1:
        title += f"-{args.processes}-processes"
    if jax.process_index() == 0:
        report.write(args.out, title, results, {args.config: medians}, "ms a step")


if __name__ == "__main__":
    main()
