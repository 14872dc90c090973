"""Trains a model, saves checkpoints, and resumes from the last one, for the programs of tasks."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from dalijax import BatchStream

Batch = dict[str, Any]


def parse_arguments(name: str, description: str, steps: int) -> argparse.Namespace:
    """Returns the number of steps and the output folder of a program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    out = Path(__file__).resolve().parent / "out" / name
    parser.add_argument("--out", type=Path, default=out, help="folder of images and checkpoints")
    return parser.parse_args()


def digest(batch: Batch) -> int:
    """Returns a checksum of all arrays of a batch, to compare the batches of two runs."""
    value = 0
    for name in sorted(batch):
        value = zlib.crc32(np.ascontiguousarray(batch[name]), value)
    return value


def train(
    model: nnx.Module,
    loss_of: Callable[[Any, Batch], jax.Array],
    stream: BatchStream,
    options: argparse.Namespace,
    rate: float = 3e-3,
) -> None:
    """Trains a model for some steps, from the last checkpoint if there is one.

    Args:
        model: The model.
        loss_of: Returns the mean loss of a model for a batch.
        stream: The batches.
        options: The number of steps, the number of steps between checkpoints, and the folder of
            checkpoints and of steps.jsonl, which gets a line for each step.
        rate: The highest learning rate.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 20, max(options.steps, 21))
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    @nnx.jit
    def step_of(model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, slopes = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, slopes)
        return loss

    folder = options.out.resolve()
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        start = manager.latest_step() or 0
        if start:
            args = {"model": ocp.args.StandardRestore(nnx.state((model, optimizer)))}
            args["input"] = ocp.args.JsonRestore()
            saved = manager.restore(start, args=ocp.args.Composite(**args))
            nnx.update((model, optimizer), saved["model"])
            stream.set_state(saved["input"])
            print(f"resuming after step {start}")
        with (folder / "steps.jsonl").open("a") as log:
            for step, batch in zip(range(start + 1, options.steps + 1), stream):
                loss = float(step_of(model, optimizer, batch))
                line = {"step": step, "loss": round(loss, 4), "batch": digest(batch)}
                print(json.dumps(line), file=log, flush=True)
                if step % options.save_every == 0 or step == options.steps:
                    args = {"model": ocp.args.StandardSave(nnx.state((model, optimizer)))}
                    args["input"] = ocp.args.JsonSave(stream.get_state())
                    manager.save(step, args=ocp.args.Composite(**args))
                    print(f"step {step}: loss {loss:.3f}", flush=True)
    stream.close()
