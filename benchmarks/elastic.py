"""Compares a training run that is killed and resumed on fewer devices with an uninterrupted run.

The model, the input and the training step come from examples/imagenet. Each part of a run is a
process, which the parent kills with SIGKILL at a step. The next part restores the newest checkpoint
of Orbax on its own number of devices::

    python benchmarks/elastic.py --config resnet50 --batch 256 --steps 120         # 4, 2 and 1 GPU
    JAX_PLATFORMS=cpu python benchmarks/elastic.py --small --batch 24 --steps 60 --save-every 5

Without GPUs, the devices are CPU devices of XLA. The program fails if a batch differs from the
uninterrupted run, or a loss differs by more than 0.01.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

import photos
import report

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "imagenet"))
CLASSES = 1000
# Sums in a different order differ in the last bits, and the optimizer amplifies this. A wrong batch
# differs by some tenths.
TOLERANCE = 1e-2
SMALL = {
    "width": 8,
    "depths": (1,),
    "side": 32,
    "dtype": "float32",  # bfloat16 is slow on a CPU
    "virtual_batch_size": 0,
    "warmup_epochs": 0,
    "rate": 0.02,
}
# Rounding of the mean of an image, in levels of 255, and of its mean class. Other images differ by
# some levels, and other labels by some classes.
ROW_ERROR = 0.02


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a run, in a process of its own.

    Attributes:
        run: Name of the run, whose parts share a folder.
        devices: Number of devices.
        kill_at: The step at which the parent kills the process; 0: the part runs to the end.
    """

    run: str
    devices: int
    kill_at: int = 0


def open_source(args: argparse.Namespace) -> Any:
    """Returns the photos as a source with labels."""
    from dalijax import sources

    files = sorted(map(str, (args.folder / "photos").glob("*.jpg")))
    return sources.Files(paths=files, labels=[k % CLASSES for k in range(len(files))])


def config_of(args: argparse.Namespace) -> Any:
    """Returns the configuration of examples/imagenet, with the arguments' changes."""
    config = importlib.import_module(f"configs.{args.config}").config
    changes: dict[str, Any] = dict(SMALL) if args.small else {}
    return dataclasses.replace(config, batch=args.batch, **changes)


def train(args: argparse.Namespace, out: pathlib.Path) -> None:
    """Trains from the newest checkpoint to the last step, and prints a line of JSON per step."""
    recipe, steps = importlib.import_module("input"), importlib.import_module("steps")
    config, source = config_of(args), open_source(args)
    everything, rows = (
        NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*axes))
        for axes in ((), ("data",))
    )
    begin, step_fn, _ = steps.steps_of(config, CLASSES, max(1, len(source) // args.batch))
    state = jax.device_put(begin(), everything)
    function = recipe.training(config, CLASSES, rows, source)
    iterator = function.stream(None, seed=1, batch_size=args.batch, num_threads=args.threads)
    manager = ocp.CheckpointManager(out / "checkpoints")
    start = manager.latest_step() or 0
    if start:
        restored = ocp.args.Composite(
            state=ocp.args.StandardRestore(state), input=ocp.args.JsonRestore()
        )
        saved = manager.restore(start, args=restored)
        state = saved["state"]
        iterator.set_state(saved["input"])

    @jax.jit
    def described(images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns numbers that identify the image and the soft label of each row."""
        return images.astype(jnp.float32).mean((1, 2, 3)), (labels * jnp.arange(1.0 * CLASSES)).sum(
            1
        )

    for step, batch in zip(range(start + 1, args.steps + 1), iterator):
        pixels, classes = described(batch["images"], batch["labels"])
        state, loss = step_fn(state, batch["images"], batch["labels"])
        rows_of_step = [np.asarray(values).tolist() for values in (pixels, classes)]
        if step % args.save_every == 0:
            position = ocp.args.JsonSave(iterator.get_state())
            checkpoint = ocp.args.Composite(state=ocp.args.StandardSave(state), input=position)
            manager.save(step, args=checkpoint)
        # After the save, so that a process that is killed here has completed the save before it.
        print(json.dumps({"step": step, "loss": float(loss), "rows": rows_of_step}), flush=True)
    manager.close()
    iterator.close()
    parameters = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state["params"])]
    np.save(out / "parameters.npy", np.concatenate(parameters))


def run(args: argparse.Namespace, part: Part) -> list[dict[str, Any]]:
    """Runs a part in a new process, and returns its steps.

    Raises:
        SystemExit: If the process ends in another way than the part requires.
    """
    environment = dict(os.environ)
    flag = f"--xla_force_host_platform_device_count={part.devices}"
    if report.GPU:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(part.devices)))
        flag = "--xla_gpu_enable_command_buffer=FUSION"  # as in examples/imagenet
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    command = [sys.executable, __file__, *sys.argv[1:], "--only", part.run]
    command += ["--folder", str(args.folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    steps: list[dict[str, Any]] = []
    for line in process.stdout or ():
        if line.startswith("{"):
            steps.append(json.loads(line))
            if steps[-1]["step"] == part.kill_at:
                process.kill()
                break
    code = process.wait()
    if code != (-9 if part.kill_at else 0):
        raise SystemExit(f"{part} ended with {code}")
    ended = "killed" if part.kill_at else "complete"
    first, last = steps[0]["step"], steps[-1]["step"]
    print(f"{part.run}: {part.devices} devices, steps {first} to {last}, {ended}", flush=True)
    return steps


def row_errors(step: dict[str, Any], other: dict[str, Any]) -> NDArray[np.float64]:
    """Returns the largest differences of a step's images and labels from those of another run."""
    return np.abs(np.array(step["rows"]) - np.array(other["rows"])).max(axis=1)


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--config", default="resnet50", help="module of examples/imagenet/configs")
    parser.add_argument("--small", action="store_true", help="one block, images of 32 x 32")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 2, 1], help="of each part")
    parser.add_argument(
        "--uninterrupted", type=int, nargs="+", help="devices of other runs, at most two of each"
    )
    parser.add_argument("--batch", type=int, default=256, help="global batch size")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=4, help="DALI's threads per device")
    parser.add_argument("--files", type=int, default=2048, help="number of generated photos")
    parser.add_argument("--folder", type=pathlib.Path, help="directory of photos and checkpoints")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Saving the second checkpoint of a part waits until the first is complete.
    if args.steps // len(args.devices) < 2 * args.save_every:
        parser.error("each part needs two checkpoints: pass more --steps, or a lower --save-every")
    return args


def compare(args: argparse.Namespace) -> None:
    """Runs all parts, prints and stores the differences, and exits with 1 if they are too large."""
    report.heading()
    photos.make(args.folder / "photos", args.files)
    # The same run twice: GPUs add numbers in any order, and the optimizer amplifies this.
    counts = args.uninterrupted or [args.devices[0], args.devices[0], args.devices[-1]]
    broken = " -> ".join(map(str, args.devices))
    runs: dict[str, list[Part]] = {}
    for count in counts:
        name = f"{count}, uninterrupted"
        name += ", again" * (name in runs)
        runs[name] = [Part(name.replace(", ", "-"), count)]
    kills = [args.steps * k // len(args.devices) for k in range(1, len(args.devices))]
    runs[broken] = [Part("broken", count, kill) for count, kill in zip(args.devices, [*kills, 0])]
    results: dict[str, Any] = {}
    expected: dict[int, dict[str, Any]] = {}
    parameters: NDArray[np.float32] | None = None
    for name, parts in runs.items():
        steps: list[dict[str, Any]] = []
        for part in parts:
            begun = run(args, part)
            if steps and not 1 < begun[0]["step"] <= steps[-1]["step"] + 1:
                raise SystemExit(f"{part} began at step {begun[0]['step']}, not at a checkpoint")
            steps += begun
        after = np.load(args.folder / parts[0].run / "parameters.npy")
        if parameters is None:
            expected, parameters = {step["step"]: step for step in steps}, after
        errors = np.array([row_errors(step, expected[step["step"]]) for step in steps])
        losses = [step["loss"] for step in steps]
        difference = [abs(step["loss"] - expected[step["step"]]["loss"]) for step in steps]
        results[name] = {
            "steps": [step["step"] for step in steps],
            "losses": losses,
            "largest difference of a loss": max(difference),
            "batches that differ": int((errors > ROW_ERROR).any(axis=1).sum()),
            "relative difference of the parameters": float(
                np.linalg.norm(after - parameters) / np.linalg.norm(parameters)
            ),
        }
    report.table(
        (
            *("devices", "steps", "last loss", "largest difference of a loss"),
            *("relative difference of the parameters", "batches that differ"),
        ),
        [
            (
                name,
                f"{len(result['steps'])}, {len(result['steps']) - args.steps} of them twice",
                f"{result['losses'][-1]:.4f}",
                f"{result['largest difference of a loss']:.1e}",
                f"{result['relative difference of the parameters']:.1e}",
                result["batches that differ"],
            )
            for name, result in results.items()
        ],
    )
    differences = {name: result["largest difference of a loss"] for name, result in results.items()}
    report.write(args.out, f"elastic-{args.config}", results, {"": differences}, "loss")
    if any(result["batches that differ"] for result in results.values()):
        raise SystemExit("batches differ from those of the first run")
    if not max(differences.values()) <= TOLERANCE:
        raise SystemExit(f"losses differ by more than {TOLERANCE}: {differences}")


def main() -> None:
    args = parse_arguments()
    if args.only:
        train(args, args.folder.resolve() / args.only)
        return
    with tempfile.TemporaryDirectory() as spare:
        args.folder = args.folder or pathlib.Path(spare)
        compare(args)


if __name__ == "__main__":
    main()
