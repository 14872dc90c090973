"""Trains a ViT or a ResNet on ImageNet, or on any class folders, on all available devices.

If it is killed and run again, it resumes, also with a different number of devices::

    python examples/imagenet/train.py --smoke      # generated images, two minutes on two CPU cores
    python examples/imagenet/train.py --config vit_s16 --data imagenet/train --val imagenet/val
    python examples/imagenet/train.py --config resnet50 --data "train/*.tar" --val "val/*.tar" \
        --classes 1000 --coordinator host:1234 --processes 4 --process 0      # on each of 4 hosts
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from configs.base import Config
from input import evaluation, open_source, training
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image
from steps import steps_of
from tqdm import tqdm

from dalijax import sources

# Modules of the parent folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from images import CACHE, make_images, split
from losses import Losses

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "imagenet"
CONFIGS = sorted({path.stem for path in (HERE / "configs").glob("*.py")} - {"base"})
MAX_CHECKPOINTS = 3


def evaluate(count: Callable[..., Any], state: Any, batches: Any) -> tuple[int, float, float]:
    """Returns the number of images, the accuracy, and the loss, without padding."""
    totals = np.zeros(3)
    for batch in batches:
        totals += [float(x) for x in count(state, **batch)]
    return int(totals[0]), totals[1] / totals[0], totals[2] / totals[0]


def save_picture(batch: dict[str, jax.Array], path: Path) -> None:
    """Draws augmented images of this process."""
    shards = batch["images"].addressable_shards
    images = np.concatenate([np.asarray(shard.data) for shard in shards])[:32]
    rows = [np.concatenate(list(images[k : k + 8]), 1) for k in range(0, len(images) // 8 * 8, 8)]
    if rows:
        Image.fromarray(np.concatenate(rows, 0)).save(path)


def reporting(out: Path, iterator: Any, steps: int, every: int) -> Any:
    """Returns CLU's writer and a hook that reports the input, if CLU is installed."""
    if not all(map(importlib.util.find_spec, ("clu", "tensorflow"))):
        return None, lambda step: None
    from clu import metric_writers

    from dalijax.adapters.clu import ReportInput

    writer = metric_writers.create_default_writer(
        str(out), just_logging=jax.process_index() > 0, asynchronous=False
    )
    return writer, ReportInput(iterator, writer=writer, num_train_steps=steps, every_steps=every)


def train(options: argparse.Namespace, config: Config, data: Any, held_out: Any) -> None:
    out, first = options.out.resolve(), jax.process_index() == 0
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everything, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    classes = options.classes
    steps_per_epoch = max(1, len(data) // config.batch)
    steps = min(options.steps or sys.maxsize, config.epochs * steps_per_epoch)
    begin, step_fn, count = steps_of(config, classes, steps_per_epoch)
    state = jax.device_put(begin(), everything)

    call = {"batch_size": config.batch, "num_threads": options.threads}
    train_fn = training(config, classes, rows, data)
    bad, held_out_bad = ("skip", "mask") if options.on_error == "skip" else ("raise", "raise")
    iterator = train_fn.stream(None, seed=options.seed, on_error=bad, **call)  # endless
    batches = evaluation(config, rows, held_out)(on_error=held_out_bad, **call)
    manager_options = ocp.CheckpointManagerOptions(max_to_keep=MAX_CHECKPOINTS)
    manager = ocp.CheckpointManager(out / "checkpoints", options=manager_options)
    start = manager.latest_step() or 0
    if start:  # checkpoints are written atomically, and their input is the same on all processes
        restored = ocp.args.Composite(
            state=ocp.args.StandardRestore(state), input=ocp.args.JsonRestore()
        )
        saved = manager.restore(start, args=restored)
        state = saved["state"]
        iterator.set_state(saved["input"])
    writer, report = reporting(out, iterator, steps, options.report_every)
    losses = Losses(out / "losses.jsonl")

    def evaluate_at(step: int) -> None:
        if step % (options.evaluate_every or steps_per_epoch) and step < steps:
            return
        seen, accuracy, loss = evaluate(count, state, batches)
        if not np.isfinite(loss):
            manager.close()
            raise SystemExit(
                f"step {step}: the evaluation's loss is {loss}. Are labels 0 to {classes - 1}?"
            )
        if writer:
            writer.write_scalars(step, {"eval/accuracy": accuracy, "eval/loss": loss})
        if first:
            losses.add(step, loss, kind="evaluation", accuracy=accuracy, images=seen)
            tqdm.write(f"step {step}: accuracy {100 * accuracy:.1f} % on {seen} images")

    if start:  # the run may have been killed before this evaluation
        evaluate_at(start)
    bar = tqdm(range(start + 1, steps + 1), initial=start, total=steps, disable=not first)
    for step, batch in zip(bar, iterator):
        if step == 1 and first:
            save_picture(batch, out / "batch.png")
        state, loss = step_fn(state, batch["images"], batch["labels"])
        saves = step % options.save_every == 0 or step == steps
        logs = step % options.log_every == 0
        if (saves or logs) and not np.isfinite(float(loss)):  # all processes exit, without saving
            raise SystemExit(f"step {step}: the loss is {loss}. Are labels 0 to {classes - 1}?")
        if logs and writer:
            writer.write_scalars(step, {"train/loss": float(loss)})
        if logs and first:
            losses.add(step, float(loss))
            bar.set_postfix(loss=f"{float(loss):.3f}")
        report(step)
        if saves:
            position = ocp.args.JsonSave(iterator.get_state())
            checkpoint = ocp.args.Composite(state=ocp.args.StandardSave(state), input=position)
            manager.save(step, args=checkpoint)
        evaluate_at(step)
    manager.close()  # waits for the last checkpoint
    iterator.close()
    batches.close()
    if writer:
        writer.close()
    if first:
        losses.save_picture(out / "losses.png")
    if first and start >= steps:
        print(f"The run of {steps} steps is already complete; --fresh starts a new run.")


def number_of_classes(data: Any, held_out: Any, given: int | None) -> int:
    """Returns the number of classes. A label is the index of its class folder."""
    names, others = (list(getattr(source, "classes", ())) for source in (data, held_out))
    if names and others and names != others:
        raise SystemExit(
            "--data and --val have different class folders, so their labels differ: only in --data "
            f"{sorted({*names} - {*others})}, only in --val {sorted({*others} - {*names})}"
        )
    num_folders, count = len(names or others), given or len(names)
    if count < max(num_folders, 1):
        reason = "" if names else "--data has no class folders: "
        raise SystemExit(
            f"{reason}--classes must be {num_folders or 'the number of classes'}, not {given}"
        )
    return count


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains an image classifier.")
    parser.add_argument("--config", choices=CONFIGS, default="vit_s16", help="module of configs/")
    parser.add_argument("--data", help="folder of class folders, or pattern of tars")
    parser.add_argument("--val", help="the same for held-out images")
    parser.add_argument(
        "--classes", type=int, help="number of classes (default: number of folders)"
    )
    parser.add_argument("--policy", choices=("rand", "auto", "none"), help="augmentation policy")
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise",
        help="skip: drop batches with images that can't be decoded (single process only); "
        "evaluation masks these images",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="global batch size")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--steps", type=int, help="number of steps (default: all epochs)")
    parser.add_argument("--threads", type=int, default=8, help="DALI threads per device")
    parser.add_argument("--seed", type=int, default=0, help="seed of the input")
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--report-every", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=10, help="steps between logged losses")
    parser.add_argument(
        "--evaluate-every", type=int, help="steps between evaluations (default: an epoch)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="checkpoints, losses, pictures")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--fresh", action="store_true", help="delete earlier checkpoints")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and generated images")
    parser.add_argument("--coordinator", help="host:port of jax.distributed")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    name = "smoke" if options.smoke else options.config
    config = importlib.import_module(f"configs.{name}").config
    changes = {"batch": options.batch, "rate": options.rate, "policy": options.policy}
    try:
        config = dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})
    except ValueError as error:
        raise SystemExit(f"--config {name}: {error}") from None
    # Only CUDA graphs of XLA's own kernels: DALI's threads may disturb recorded graphs.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer=FUSION {flags}"
    if options.on_error == "skip" and (options.processes or 1) > 1:
        raise SystemExit("--on-error skip needs a single process: others would be a batch behind")
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    if options.fresh and jax.process_index() == 0:
        shutil.rmtree(options.out, ignore_errors=True)
    multihost_utils.sync_global_devices("the output directory is ready")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.threads, options.log_every = 1, 1
        options.save_every = min(options.save_every, 20)
        names, *parts = split(make_images(options.cache, count=610))
        data, held_out = (sources.Files(paths=paths, labels=labels) for paths, labels in parts)
        options.classes = len(names)
    elif options.data and options.val:
        data, held_out = open_source(options.data), open_source(options.val)
        options.classes = number_of_classes(data, held_out, options.classes)
    else:
        raise SystemExit("pass --data and --val, or --smoke for generated images")
    train(options, config, data, held_out)


if __name__ == "__main__":
    main()
