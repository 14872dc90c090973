"""Trains on two processes, is killed, resumes with four, is killed again, and finishes with one.

The losses equal the losses of an uninterrupted run, up to the rounding of sums. Batches depend only
on the seed, and processes and devices take slices of them::

    python examples/elastic.py            # two minutes on two CPU cores
    python examples/elastic.py --smoke    # fewer steps

A checkpoint contains the model and the state of the input, a small dict that is the same on every
process. On a cluster, each host runs `train`. This program simulates the hosts with processes that
have CPU devices.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import nvidia.dali.fn as fn
import optax
import orbax.checkpoint as ocp
from flax import nnx
from images import CACHE, make_images
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from quickstart import SIDE, Network, train_step

from dalijax import augment, data_iterator, sources

OUT = Path(__file__).resolve().parent / "out" / "elastic"
BATCH = 32  # size of the global batch, over all processes
LAYOUTS = ((2, 2), (4, 1), (1, 1))  # numbers of processes, and of devices per process
# Maximum difference of losses. Sums in a different order differ in the last bit of a float32, and
# the optimizer amplifies this. A wrong batch would differ by some tenths.
BOUND = 1e-2


@data_iterator(output_map=["images", "labels"])
def augmented(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines shuffled and augmented images, with random numbers that depend on the image."""
    images = fn.decoders.image(data)
    images = augment.random_resized_crop(images, SIDE, scale=(0.6, 1.0), flip=0.5, draw=draw)
    return augment.color_jitter(images, brightness=0.2, contrast=0.2, draw=draw), label


def train(options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Trains from the last checkpoint, and yields steps and losses; every process runs this."""
    everything = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    rows = NamedSharding(everything.mesh, PartitionSpec("data"))
    source = sources.Files(options.data)
    # Each epoch has a new order of all files. The batch size is the size of the global batch.
    call = {"batch_size": BATCH, "seed": 1, "sharding": rows, "num_threads": 1}
    iterator = augmented.stream(source=source, **call)  # endless

    model = Network(num_classes=6, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    state = jax.device_put(state, everything)  # on all devices of all processes

    manager = ocp.CheckpointManager(options.checkpoints.resolve())
    start = manager.latest_step() or 0
    if start:
        saved = manager.restore(
            start,
            args=ocp.args.Composite(
                model=ocp.args.StandardRestore(state), input=ocp.args.JsonRestore()
            ),
        )
        state = saved["model"]  # on the current devices
        iterator.set_state(saved["input"])
    model, optimizer = nnx.merge(graph, state)

    for step, batch in zip(range(start + 1, options.steps + 1), iterator):
        loss = train_step(model, optimizer, batch["images"], batch["labels"])
        yield step, float(loss)
        if step % options.save_every == 0:
            state = nnx.split((model, optimizer))[1]
            manager.save(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(state),
                    input=ocp.args.JsonSave(iterator.get_state()),
                ),
            )
            manager.wait_until_finished()  # the run is short, so wait for each checkpoint
    manager.close()  # waits for the last checkpoint
    iterator.close()


def run_process(options: argparse.Namespace) -> None:
    """Runs a process of the job. The first process prints the losses."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"localhost:{options.port}"
        jax.distributed.initialize(address, options.processes, options.process)
    for step, loss in train(options):
        if options.process == 0:
            print("loss", step, loss, flush=True)  # only the first process prints


def losses(
    options: argparse.Namespace, name: str, layout: tuple[int, int], killed_after: int | None
) -> dict[int, float]:
    """Runs the processes of a layout, kills them after a step if given, and returns the losses."""
    processes, devices = layout
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--data", options.data, "--steps", options.steps]
    command += ["--save-every", options.save_every, "--checkpoints", options.out / name]
    command += ["--processes", processes, "--devices", devices, "--port", port]
    seen: dict[int, float] = {}
    log = options.out / f"{name}.log"
    with log.open("a") as errors:
        running = [
            subprocess.Popen(
                [str(word) for word in (*command, "--process", process)],
                stdout=subprocess.PIPE if process == 0 else errors,
                stderr=errors,
                text=True,
            )
            for process in range(processes)
        ]
        try:
            for line in running[0].stdout or ():
                if line.startswith("loss "):
                    step, loss = line.split()[1:]
                    seen[int(step)] = float(loss)
                    if int(step) == killed_after:
                        break
            if killed_after is None and any(process.wait(60) for process in running):
                raise SystemExit(f"a process failed: see {log}")
        finally:
            for process in running:
                process.kill()  # SIGKILL: the process can't save anything
                process.wait()
    print(f"{name}: {processes} processes x {devices} devices, steps {min(seen)} to {max(seen)}")
    return seen


def plot(uninterrupted: dict[int, float], parts: list[dict[int, float]], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5))
    ax = figure.add_subplot(xlabel="step", ylabel="loss", title="One run on 2, 4 and 1 processes")
    ax.plot(
        uninterrupted.keys(),
        uninterrupted.values(),
        color="0.8",
        linewidth=6,
        label="uninterrupted",
    )
    for (processes, devices), part in zip(LAYOUTS, parts):
        label = f"{processes} processes x {devices} devices"
        ax.plot(part.keys(), part.values(), marker=".", label=label)
    ax.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Resumes a run with different numbers of processes."
    )
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--out", type=Path, default=OUT, help="checkpoints, logs and the plot")
    parser.add_argument("--smoke", action="store_true", help="fewer images and steps")
    for name in ("steps", "save-every", "processes", "devices", "port", "process"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if options.process is not None:
        run_process(options)
        return
    options.steps, options.save_every, count = (15, 4, 120) if options.smoke else (75, 10, 600)
    options.data = options.data or make_images(options.cache, count=count)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    uninterrupted = losses(options, "uninterrupted", (1, 1), killed_after=None)
    kills = (options.steps * 2 // 5, options.steps * 4 // 5, None)
    parts = [losses(options, "interrupted", *run) for run in zip(LAYOUTS, kills)]

    print("step  uninterrupted  on 2, 4 and 1 processes")
    for step, loss in uninterrupted.items():
        print(
            f"{step:4}  {loss:13.6f}", *(f" {p[step]:.6f}" if step in p else " " * 9 for p in parts)
        )
    plot(uninterrupted, parts, options.out / "losses.png")
    if set(uninterrupted) != set().union(*parts):
        raise SystemExit("the interrupted run is missing steps")
    difference = max(abs(loss - uninterrupted[k]) for part in parts for k, loss in part.items())
    print(f"The losses differ by at most {difference:.1e}. Plot: {options.out / 'losses.png'}")
    if difference > BOUND:
        raise SystemExit(f"This is more than the limit for rounding, {BOUND}")


if __name__ == "__main__":
    main()
