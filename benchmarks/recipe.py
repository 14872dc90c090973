"""What the input of examples/imagenet costs its training step, with more and more augmentation.

In each round the step runs over one batch that lies on the devices, then over the recipe's input::

    python benchmarks/recipe.py --config resnet50 --batch 256 --seconds 300

A round's steps stop by the clock; building pipelines and compiling come on top.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {os.environ.get('XLA_FLAGS', '')}"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import photos
import report

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "imagenet"))
CLASSES = 1000
PLAIN = {"jitter": 0.0, "policy": "none", "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
JITTER = {**PLAIN, "jitter": 0.3}
POLICY = {**JITTER, "policy": "rand"}
ALL = {**POLICY, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}
MODEL = "a batch on the devices"
INPUTS = {
    "crop, flip": PLAIN,
    "+ jitter": JITTER,
    "+ RandAugment": POLICY,
    "+ erasing, mixing": ALL,
}


def run(step: Any, state: Any, batches: Any, seconds: float) -> tuple[Any, float, float]:
    """The state, milliseconds of a step, and of those in ``next()``; two steps are under way."""
    begin, in_next, losses = time.perf_counter(), 0.0, []
    while time.perf_counter() - begin < seconds or len(losses) < 3:
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
    return state, 1e3 * total / len(losses), 1e3 * in_next / len(losses)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--config", default="resnet50", help="of examples/imagenet/configs")
    parser.add_argument("--batch", type=int, default=256, help="over all devices")
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--folder", type=pathlib.Path, help="where the JPEGs lie, or are put")
    parser.add_argument("--threads", type=int, default=8, help="of DALI, for each device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="of all timed steps")
    args = parser.parse_args()
    report.heading()
    recipe, steps = importlib.import_module("input"), importlib.import_module("steps")
    config = importlib.import_module(f"configs.{args.config}").config
    config = dataclasses.replace(config, batch=args.batch)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, everything = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    each = args.seconds / args.rounds / (1 + len(INPUTS))
    with tempfile.TemporaryDirectory() as spare:
        files = photos.make(args.folder or pathlib.Path(spare), args.files)
        labels = [k % CLASSES for k in range(len(files))]
        source = recipe.sources.Files(paths=files, labels=labels)

        def batches(changes: dict[str, Any]) -> Any:
            changed = dataclasses.replace(config, **changes)
            function = recipe.training(changed, CLASSES, rows, source)
            return function.stream(None, batch_size=args.batch, num_threads=args.threads, seed=0)

        begin, step, _ = steps.steps_of(config, CLASSES, 1000)
        state = jax.device_put(begin(), everything)
        stream = batches(PLAIN)
        first = next(stream)
        stream.close()
        state, _, _ = run(step, state, itertools.repeat(first), 0)
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in (MODEL, *INPUTS)}
        for _ in range(args.rounds):
            for name in seen:
                iterator = batches(INPUTS[name]) if name in INPUTS else itertools.repeat(first)
                state, _, _ = run(step, state, iterator, min(3.0, each / 3))  # prepared ones
                state, step_ms, next_ms = run(step, state, iterator, each)
                seen[name].append((step_ms, next_ms))
                getattr(iterator, "close", lambda: None)()
                print(f"  {name}: {step_ms:.2f} ms, {next_ms:.2f} in next()", flush=True)
    medians = {name: statistics.median(ms for ms, _ in own) for name, own in seen.items()}
    alone = [ms for ms, _ in seen[MODEL]]
    over = {
        name: [100 * (ms / base - 1) for (ms, _), base in zip(own, alone)]
        for name, own in seen.items()
    }
    report.table(
        ("input", "ms a step", "over the model, %", "in next(), % of the step", "images/s"),
        [
            (
                name,
                report.spread([ms for ms, _ in own], 2),
                f"{statistics.median(over[name]):+.1f}",
                report.spread([100 * waited / ms for ms, waited in own], 1),
                f"{1e3 * args.batch / medians[name]:,.0f}",
            )
            for name, own in seen.items()
        ],
    )
    results = {name: dict(zip(("step_ms", "next_ms"), zip(*own))) for name, own in seen.items()}
    title = f"recipe-{args.config}"
    report.write(args.out, title, results, {args.config: medians}, "ms a step")


if __name__ == "__main__":
    main()
