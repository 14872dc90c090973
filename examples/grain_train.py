"""A training program with Grain and Orbax, which decodes with DALI in the lines marked DALI.

You can stop it at any time, with Ctrl-C or kill -9. If it is run again, it resumes from its last
checkpoint bit for bit: model, optimizer and data::

    python examples/grain_train.py                       # 300 steps, a checkpoint every 50
    python examples/grain_train.py --fresh               # from the beginning

Without DALI, the marked lines would be ``.map(decode_and_augment).batch(32)``, and Python would
decode every record.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import nvidia.dali.fn as fn
import optax
import orbax.checkpoint as ocp
from flax import nnx
from images import CACHE, make_images, split
from losses import Losses
from nvidia.dali import backend
from quickstart import SIDE, Network

from dalijax.adapters.grain import DALITransform, RandomInputs

OUT = Path(__file__).resolve().parent / "out" / "grain_train"


class ReadFile(grain.transforms.Map):
    """Reads the file of a record. Grain's worker processes can run this transformation."""

    def map(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"image": Path(record["path"]).read_bytes(), "label": record["label"]}


def decode_and_augment(image: Any, angle: Any) -> Any:  # DALI: a graph for each batch
    """Defines a DALI graph of the key `image`; the key `label` bypasses it."""
    gpu = backend.GetCUDADeviceCount() > 0
    images = fn.decoders.image(image, device="mixed" if gpu else "cpu")
    images = fn.random_resized_crop(images, size=(SIDE, SIDE), random_area=(0.8, 1.0))
    images = fn.rotate(images, angle=angle, keep_size=True, fill_value=0)
    return fn.flip(images, horizontal=fn.random.coin_flip())


def dataset(files: list[str], labels: list[int], batch_size: int) -> grain.IterDataset:
    """Returns shuffled, endless batches of images."""
    records = [{"path": f, "label": np.int32(c)} for f, c in zip(files, labels, strict=True)]
    return (
        grain.MapDataset.source(records)
        .seed(1)
        .shuffle()
        .repeat()
        .map(ReadFile())
        .random_map(RandomInputs(angle=(-20, 20)))  # DALI: a random number for each record
        .pipe(
            DALITransform(decode_and_augment, output_map=["image"], batch_size=batch_size)
        )  # DALI
    )


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def loss_fn(model: Network) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier with Grain.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--count", type=int, default=2000, help="number of generated images")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=OUT, help="directory of checkpoints and losses")
    parser.add_argument("--fresh", action="store_true", help="delete earlier checkpoints")
    arguments = parser.parse_args()
    # As in quickstart.py: DALI's threads may disturb the recording of CUDA graphs.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {os.environ.get('XLA_FLAGS', '')}"
    out = arguments.out.resolve()
    if arguments.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    names, (files, labels), _ = split(
        arguments.data or make_images(arguments.cache, count=arguments.count)
    )
    model = Network(len(names), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    iterator = iter(dataset(files, labels, arguments.batch_size))
    graph, state = nnx.split((model, optimizer))
    losses = Losses(out / "losses.jsonl")
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        start = manager.latest_step() or 0
        if start:
            restored = manager.restore(
                start,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state),
                    data=grain.checkpoint.CheckpointRestore(iterator),
                ),
            )
            model, optimizer = nnx.merge(graph, restored["state"])
            print(f"resuming after step {start}")
        for step, batch in zip(range(start + 1, arguments.steps + 1), iterator):
            loss = float(train_step(model, optimizer, batch["image"], batch["label"]))
            losses.add(step, loss)
            if step % arguments.save_every == 0 or step == arguments.steps:
                state = nnx.split((model, optimizer))[1]
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave(state),
                        data=grain.checkpoint.CheckpointSave(iterator),
                    ),
                )
                print(
                    f"step {step}: loss {loss:.3f}, saving", flush=True
                )  # Orbax saves in a thread
    iterator.close()
    losses.save_picture(out / "losses.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; run it again to resume from the last checkpoint") from None
