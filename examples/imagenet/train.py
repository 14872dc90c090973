"""Trains a ViT or a ResNet on ImageNet, or on any folders of pictures, over all devices there are.

It is killed at any moment, started again, with another number of devices if need be, and goes on::

    python examples/imagenet/train.py --smoke      # drawn pictures, two minutes on two CPU cores
    python examples/imagenet/train.py --config vit_s16 --data imagenet/train --val imagenet/val
    python examples/imagenet/train.py --config resnet50 --data "train/*.tar" --val "val/*.tar" \
        --classes 1000 --coordinator host:1234 --processes 4 --process 0      # on each of 4 hosts
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from configs.base import Config
from input import evaluation, open_source, training
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import build, normalize
from PIL import Image
from tqdm import tqdm

from dalijax import sources
from dalijax.adapters.clu import DALIDatasetIterator

# Its neighbours in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from losses import Losses
from pictures import CACHE, make_pictures, split

OUT = Path(__file__).resolve().parents[1] / "out" / "imagenet"


def optimizer(config: Config, steps_per_epoch: int) -> optax.GradientTransformation:
    """Warm-up and cosine; biases and the scales of normalizations do not decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        config.rate,
        max(1, int(config.warmup_epochs * steps_per_epoch)),
        config.epochs * steps_per_epoch,
    )

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    clip = optax.clip_by_global_norm(config.clip)
    if config.optimizer == "adamw":
        return optax.chain(clip, optax.adamw(rate, weight_decay=config.weight_decay, mask=decays))
    decay = optax.add_decayed_weights(config.weight_decay, decays)
    return optax.chain(clip, decay, optax.sgd(rate, momentum=0.9, nesterov=True))


def steps_of(config: Config, classes: int, steps_per_epoch: int) -> tuple[Callable[..., Any], ...]:
    """Functions that begin a state, take a step, and count what is right in a batch."""
    model, updater = build(config, classes), optimizer(config, steps_per_epoch)

    @jax.jit
    def begin() -> Any:
        images = jnp.zeros((1, config.side, config.side, 3), config.dtype)
        variables = model.init(jax.random.key(0), images, train=False)
        params, stats = variables["params"], variables.get("batch_stats", {})
        average = jax.tree.map(jnp.copy, params)
        return {"params": params, "stats": stats, "ema": average, "opt": updater.init(params)}

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["stats"]}
            x = normalize(images, config.dtype)
            logits, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy(logits, labels).mean()
            return loss, new.get("batch_stats", {})

        (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = updater.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["ema"], 1 - config.ema)
        return {"params": params, "stats": stats, "ema": average, "opt": opt}, loss

    @jax.jit
    def count(state: Any, images: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """How many pictures there are, how many are right, and the sum of their losses."""
        variables = {"params": state["ema"], "batch_stats": state["stats"]}
        logits = model.apply(variables, normalize(images, config.dtype), train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = logits.argmax(-1) == labels
        return mask.sum(), (right & mask).sum(), jnp.where(mask, losses, 0).sum()

    return begin, jax.jit(step, donate_argnums=0), count


def evaluate(count: Callable[..., Any], state: Any, batches: Any) -> tuple[int, float, float]:
    """Pictures, the share that is right, and the loss: each picture once, padding masked."""
    totals = np.zeros(3)
    for batch in batches:
        totals += [float(x) for x in count(state, **batch)]
    return int(totals[0]), totals[1] / totals[0], totals[2] / totals[0]


def save_picture(batch: dict[str, jax.Array], path: Path) -> None:
    """Pictures of this process as the model sees them."""
    shards = batch["images"].addressable_shards
    images = np.concatenate([np.asarray(shard.data) for shard in shards])[:32]
    rows = [np.concatenate(list(images[k : k + 8]), 1) for k in range(0, len(images) // 8 * 8, 8)]
    if rows:
        Image.fromarray(np.concatenate(rows, 0)).save(path)


def reporting(out: Path, iterator: DALIDatasetIterator, steps: int, every: int) -> Any:
    """CLU's writer and a hook about the input; without CLU and TensorFlow neither."""
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
    classes = options.classes or len(data.classes)
    steps_per_epoch = max(1, len(data) // config.batch)
    steps = min(options.steps or sys.maxsize, config.epochs * steps_per_epoch)
    begin, step_fn, count = steps_of(config, classes, steps_per_epoch)
    state = jax.device_put(begin(), everything)

    call = {"batch_size": config.batch, "num_threads": options.threads}
    iterator = DALIDatasetIterator(
        training(config, classes, rows, data), element="jax", seed=options.seed, **call
    )
    batches = evaluation(config, rows, held_out)(**call)
    manager = ocp.CheckpointManager(out / "checkpoints")
    start = manager.latest_step() or 0
    if start:  # a checkpoint is whole or not there; its input is alike on all processes
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(state), input=ocp.args.JsonRestore()
        )
        saved = manager.restore(start, args=wanted)
        state = saved["state"]
        iterator.set_state(saved["input"])
    writer, report = reporting(out, iterator, steps, options.report_every)
    losses = Losses(out / "losses.jsonl")
    bar = tqdm(range(start + 1, steps + 1), initial=start, total=steps, disable=not first)
    for step, batch in zip(bar, iterator):
        if step == 1 and first:
            save_picture(batch, out / "batch.png")
        state, loss = step_fn(state, batch["images"], batch["labels"])
        if step % options.log_every == 0 and first:
            losses.add(step, float(loss))
            bar.set_postfix(loss=f"{float(loss):.3f}")
        report(step)
        if step % options.save_every == 0 or step == steps:
            position = ocp.args.JsonSave(iterator.get_state())
            both = ocp.args.Composite(state=ocp.args.StandardSave(state), input=position)
            manager.save(step, args=both)
        if step % (options.evaluate_every or steps_per_epoch) == 0 or step == steps:
            seen, accuracy, loss = evaluate(count, state, batches)
            if writer:
                writer.write_scalars(step, {"eval/accuracy": accuracy, "eval/loss": loss})
            if first:
                losses.add(step, loss, kind="evaluation", accuracy=accuracy, pictures=seen)
                tqdm.write(f"step {step}: {100 * accuracy:.1f} % of {seen} pictures are right")
    manager.close()  # waits for the last checkpoint
    iterator.close()
    batches.close()
    if writer:
        writer.close()
    if first and start < steps:
        losses.save_picture(out / "losses.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a classifier of pictures.")
    parser.add_argument("--config", default="vit_s16", help="a file of configs/")
    parser.add_argument("--data", help="a folder of class folders, or a pattern of tars")
    parser.add_argument("--val", help="the same, of held-out pictures")
    parser.add_argument("--classes", type=int, help="number of classes; of folders, it is known")
    parser.add_argument("--batch", type=int, help="pictures of a batch over all devices")
    parser.add_argument("--steps", type=int, help="stop after so many; default: all epochs")
    parser.add_argument("--threads", type=int, default=8, help="of DALI, for each device")
    parser.add_argument("--seed", type=int, default=0, help="of the input")
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--report-every", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=10, help="steps between losses")
    parser.add_argument("--evaluate-every", type=int, help="default: each epoch")
    parser.add_argument("--out", type=Path, default=OUT, help="checkpoints, losses, pictures")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where drawn pictures are kept")
    parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and drawn pictures")
    parser.add_argument("--coordinator", help="of jax.distributed: host:port")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    # DALI's threads would spoil the CUDA graphs that XLA records.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {os.environ.get('XLA_FLAGS', '')}"
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    if options.fresh and jax.process_index() == 0:
        shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.config, options.threads, options.log_every = "smoke", 1, 1
        options.save_every = min(options.save_every, 20)
        names, *parts = split(make_pictures(options.cache, count=610))
        data, held_out = (sources.Files(paths=paths, labels=labels) for paths, labels in parts)
        options.classes = len(names)
    elif options.data and options.val:
        data, held_out = open_source(options.data), open_source(options.val)
    else:
        raise SystemExit("--data and --val say where the pictures are; --smoke draws some")
    config = importlib.import_module(f"configs.{options.config}").config
    if options.batch:
        config = type(config)(**{**vars(config), "batch": options.batch})
    train(options, config, data, held_out)


if __name__ == "__main__":
    main()
