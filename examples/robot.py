"""Trains a policy that moves an arm to the disc that an instruction names, and resumes exactly.

The episodes are drawn, and TensorFlow writes them. batch.png shows some of their steps.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nvidia.dali.fn as fn
import optax
import orbax.checkpoint as ocp
from arm_episodes import write_episodes
from flax import nnx
from nvidia.dali import backend, types

from dalijax import data_iterator, sources
from dalijax.show import show

FIELDS = {
    "before": ("steps/observation/front", -2),  # the frame two steps earlier
    "front": "steps/observation/front",
    "wrist": "steps/observation/wrist",
    "action": ("steps/action", range(8)),  # [8, 2], with action_mask [8]
    "state": "steps/observation/state",
    "instruction": "steps/language_instruction",
}


@data_iterator(output_map=["before", "front", "wrist", "action"])
def steps(before: Any, front: Any, wrist: Any, action: Any, low: Any, high: Any) -> Any:
    """Defines images of 48x48, and actions from -1 to 1. The other fields bypass the graph."""
    device = "mixed" if backend.GetCUDADeviceCount() else "cpu"
    images = [fn.decoders.image(jpeg, device=device) for jpeg in (before, front, wrist)]
    action = (action - types.Constant(low)) / types.Constant(high - low) * 2 - 1
    images = [fn.resize(image, size=(48, 48)) for image in images]
    return *images, action.gpu() if device == "mixed" else action


class Policy(nnx.Module):
    """Predicts actions [batch, 8, 2] from images, the state and the words of a batch."""

    def __init__(self, num_words: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.see = nnx.Sequential(conv(9, 16), nnx.relu, conv(16, 32), nnx.relu, conv(32, 32))
        self.read = nnx.Embed(num_words, 32, rngs=rngs)
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.act = nnx.Sequential(linear(1186, 128), nnx.relu, linear(128, 16))

    def __call__(self, batch: dict[str, Any]) -> jax.Array:
        images = jnp.concatenate([batch["before"], batch["front"], batch["wrist"]], axis=-1)
        pixels = self.see(images / 127.5 - 1).reshape(len(images), -1)
        x = jnp.concatenate([pixels, self.read(batch["words"]).mean(1), batch["state"]], axis=1)
        return self.act(nnx.relu(x)).reshape(-1, 8, 2)


@nnx.jit
def train_step(model: Policy, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
    def loss_of(model: Policy) -> jax.Array:
        error = jnp.abs(model(batch) - batch["action"])
        return error.mean(where=batch["action_mask"][:, :, None])

    loss, slopes = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, slopes)
    return loss


def train(source: sources.RLDS, manager: Any, last: int, start: int = 0) -> Any:
    """Trains from a checkpoint, or from the beginning; yields each step and its loss."""
    low, high = np.quantile(source.column("steps/action"), [0.01, 0.99], axis=0).astype("float32")
    states = source.column("steps/observation/state")
    mean, std = states.mean(0), states.std(0)
    vocabulary = sorted(set(" ".join(source.column("steps/language_instruction")).split()))
    model = Policy(len(vocabulary), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    stream = steps.stream(source=source, batch_size=32, seed=1, low=low, high=high)
    if start:
        args = {"model": ocp.args.StandardRestore(nnx.state((model, optimizer)))}
        args["input"] = ocp.args.JsonRestore()
        saved = manager.restore(start, args=ocp.args.Composite(**args))
        nnx.update((model, optimizer), saved["model"])
        stream.set_state(saved["input"])
    for step, batch in zip(range(start + 1, last + 1), stream):
        words = [[vocabulary.index(w) for w in text.split()] for text in batch.pop("instruction")]
        batch |= {"words": np.array(words), "state": (batch["state"] - mean) / std}
        yield step, float(train_step(model, optimizer, batch))
        if step == last // 2:
            args = {"model": ocp.args.StandardSave(nnx.state((model, optimizer)))}
            args["input"] = ocp.args.JsonSave(stream.get_state())
            manager.save(step, args=ocp.args.Composite(**args))
            manager.wait_until_finished()
    stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a policy on drawn episodes, and resumes.")
    parser.add_argument("--steps", type=int, default=100, help="number of training steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "robot")
    options = parser.parse_args()
    out = options.out.resolve()
    write_episodes(out / "episodes", count=100)
    print(source := sources.RLDS(f"{out}/episodes/*.tfrecord*", FIELDS, cache_dir=out / "cache"))
    show(source.select(np.arange(1, len(source), 5)), samples=8).save(out / "batch.png")
    with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
        losses = dict(train(source, manager, options.steps))
        resumed = dict(train(source, manager, options.steps, start=options.steps // 2))
    print(f"loss {losses[1]:.3f} at step 1, {losses[options.steps]:.3f} at step {options.steps}")
    difference = max(abs(losses[step] - loss) for step, loss in resumed.items())
    print(f"resumed at step {min(resumed)}: the losses differ by at most {difference}")


if __name__ == "__main__":
    main()
