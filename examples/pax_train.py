"""A paxml training program with DALI. Paxml's checkpoints contain the state of the input.

If it is run again, it resumes from its last checkpoint, at the same batch. It needs Python 3.10 and
``pip install "dalijax[pax]" pillow matplotlib tqdm``::

    python examples/pax_train.py                          # 60 steps, evaluation every 20
    python examples/pax_train.py --steps 90 --layout spmd
    python examples/pax_train.py --source                 # read with dalijax.sources

Without a GPU, it trains on two CPU devices.
"""

from __future__ import annotations

import os

# Several CPU devices. This version of JAX reads the flag when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import argparse
import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import nvidia.dali.fn as fn
import tensorflow as tf
from absl import flags
from images import CACHE, make_images, split
from losses import Losses
from nvidia.dali import backend
from paxml import base_experiment, learners, programs, tasks_lib, train
from praxis import base_model, layers, optimizers, pax_fiddle, py_utils, schedules

from dalijax import augment, data_iterator, sources
from dalijax.adapters.pax import DALIInput, DALIInputSpecsProvider

OUT = Path(__file__).resolve().parent / "out" / "pax_train"
SIDE = 16


@data_iterator(output_map=["images", "labels"], reader_name="reader")
def labeled_images(
    files: list[str], classes: list[int], training: bool, shard_id: int = 0, num_shards: int = 1
) -> Any:
    """Defines images and labels, shuffled and augmented for training."""
    device = "mixed" if backend.GetCUDADeviceCount() else "cpu"
    encoded, labels = fn.readers.file(
        files=files,
        labels=classes,
        random_shuffle=training,
        pad_last_batch=True,
        shard_id=shard_id,
        num_shards=num_shards,
        name="reader",
    )
    images = fn.resize(fn.decoders.image(encoded, device=device), size=(SIDE, SIDE))
    if training:
        images = fn.flip(images, horizontal=fn.random.coin_flip())
    return images, fn.squeeze(labels, axes=0)  # shape [batch], like the weights


@data_iterator(output_map=["images", "labels"])
def augmented(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines images of a source with augmentation, as in examples/imagenet."""
    images = fn.decoders.image(data, device="mixed" if backend.GetCUDADeviceCount() else "cpu")
    images = augment.random_resized_crop(images, SIDE, flip=0.5, draw=draw)
    return images, label


@data_iterator(output_map=["images", "labels"])
def centered(data: Any, label: Any, *, draw: Any) -> Any:
    """Defines center crops of images of a source."""
    images = fn.decoders.image(data, device="mixed" if backend.GetCUDADeviceCount() else "cpu")
    return augment.center_crop(images, SIDE, resize=SIDE, draw=draw), label


class Classifier(base_model.BaseModel):
    """A small vision transformer: patches, one block, and the mean of the tokens."""

    num_classes: int = 0
    width: int = 16
    patch: int = 4

    def setup(self) -> None:
        pixels, width = 3 * self.patch**2, self.width
        self.create_child(
            "patches", pax_fiddle.Config(layers.Linear, input_dims=pixels, output_dims=width)
        )
        attention = pax_fiddle.Config(
            layers.DotProductAttention, input_dim=width, hidden_dim=width, num_heads=2
        )
        self.create_child("attention", attention)
        self.create_child(
            "mlp",
            pax_fiddle.Config(layers.FeedForward, input_dims=width, output_dims=width),
        )
        self.create_child(
            "classes",
            pax_fiddle.Config(layers.Linear, input_dims=width, output_dims=self.num_classes),
        )

    def compute_predictions(self, input_batch: Any) -> Any:
        x, count = input_batch.images.astype(jnp.float32) / 127.5 - 1, SIDE // self.patch
        x = x.reshape(-1, count, self.patch, count, self.patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = self.patches(x.reshape(x.shape[0], count * count, -1))
        attended, _ = self.attention(x, x, x, jnp.zeros((1, 1, 1, count * count)))
        x = x + attended
        x = x + self.mlp(x)
        return self.classes(x.mean(1))

    def compute_loss(self, predictions: Any, input_batch: Any) -> Any:
        labels, weights = input_batch.labels, input_batch.eval_sample_weights
        hot = jax.nn.one_hot(labels, self.num_classes)
        losses = -(hot * jax.nn.log_softmax(predictions)).sum(-1)
        right = (predictions.argmax(-1) == labels).astype(jnp.float32)
        # Padding has a weight of 0. In paxml, the model applies the weights.
        count = weights.sum()
        mean = [(values * weights).sum() / jnp.maximum(count, 1) for values in (losses, right)]
        return py_utils.NestedMap(loss=(mean[0], count), accuracy=(mean[1], count)), {}


class Training(programs.SingleTaskTrainProgram):
    """Runs training steps and also writes the losses."""

    def __init__(self, losses: Losses):
        super().__init__()
        self._losses = losses

    def run(self, state: Any, step: int) -> Any:
        out = super().run(state, step)
        leaves = jax.tree_util.tree_leaves(out.state)
        digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        self._losses.add(
            kind="training",
            step=int(out.new_train_step),
            loss=float(np.mean(out.loss)),
            state=digest.hexdigest()[:16],
        )
        return out


class Evaluation(programs.SingleTaskEvalProgram):
    """Runs an evaluation and also writes the metrics."""

    def __init__(self, input_p: Any, losses: Losses):
        super().__init__(input_p)
        self._losses = losses

    def run(self, state: Any, step: int) -> Any:
        out = super().run(state, step)
        metrics = {name: float(value) for name, value in out.eval_metrics.items()}
        self._losses.add(
            kind="evaluation", step=int(step), batches=int(out.num_eval_steps), **metrics
        )
        return out


class Experiment(base_experiment.BaseExperiment):
    """The datasets, the task and the programs."""

    def __init__(self, arguments: argparse.Namespace, losses: Losses):
        self.names, self.files, self.held_out = split(
            arguments.data or make_images(arguments.cache, count=arguments.count)
        )
        self.arguments, self.losses = arguments, losses

    def datasets(self) -> list[Any]:
        def data(listed: Any, training: bool) -> dict[str, Any]:
            files, classes = listed
            arguments = {"files": files, "classes": classes, "training": training}
            iterator_fn = labeled_images
            if self.arguments.source:
                source = sources.Files(paths=files, labels=classes)
                arguments = {"source": source, "shuffle": training}
                iterator_fn = augmented if training else centered
            return {"iterator_fn": iterator_fn, "arguments": {**arguments, "num_threads": 2}}

        batch_size = self.arguments.batch_size
        training = pax_fiddle.Config(
            DALIInput,
            name="train",
            **data(self.files, training=True),
            batch_size=batch_size,
            is_training=True,
            input_random_seed=1,
        )
        evaluation = pax_fiddle.Config(
            DALIInput,
            name="held_out",
            **data(self.held_out, training=False),
            batch_size=batch_size,
            reset_for_eval=True,
            eval_loop_num_batches=-1,
        )
        return [training, evaluation]

    def get_input_specs_provider_params(self) -> Any:
        return pax_fiddle.Config(
            DALIInputSpecsProvider,
            input_p=self.train_datasets()[0],
            per_device=self.arguments.layout == "pmap",
        )

    def train_programs(self) -> list[Any]:
        return [Training(self.losses)]

    def eval_programs(self) -> list[Any]:
        return [Evaluation(input_p, self.losses) for input_p in self.eval_datasets()]

    def task(self) -> Any:
        model = pax_fiddle.Config(Classifier, name="classifier", num_classes=len(self.names))
        if self.arguments.layout == "spmd":
            model.mesh_axis_names = ["replica", "data", "mdl"]
            model.ici_mesh_shape = [1, jax.device_count(), 1]
        task = pax_fiddle.Config(tasks_lib.SingleTask, name="task", model=model)
        task.train.learner = pax_fiddle.Config(
            learners.Learner,
            loss_name="loss",
            optimizer=pax_fiddle.Config(
                optimizers.ShardedSgd,
                momentum=0.9,
                learning_rate=0.01,
                lr_schedule=pax_fiddle.Config(schedules.Constant, value=1.0),
            ),
        )
        task.train.num_train_steps = self.arguments.steps
        task.train.save_interval_steps = self.arguments.save_every
        task.train.eval_interval_steps = self.arguments.evaluate_every
        task.train.enable_input_checkpointing = True  # also saves the state of the input
        return task


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier with paxml.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--count", type=int, default=600, help="number of generated images")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=30)
    parser.add_argument("--evaluate-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--source", action="store_true", help="read with dalijax.sources")
    parser.add_argument("--layout", choices=["pmap", "spmd"], default="pmap")
    parser.add_argument("--out", type=Path, default=OUT, help="checkpoints and metrics")
    parser.add_argument("--fresh", action="store_true", help="delete earlier checkpoints")
    arguments = parser.parse_args()
    flags.FLAGS.mark_as_parsed()  # paxml requires parsed flags
    tf.config.set_visible_devices([], "GPU")  # otherwise TensorFlow allocates its memory
    out = arguments.out.resolve()
    if arguments.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    losses = Losses(out / "losses.jsonl")
    train.train_and_evaluate(
        Experiment(arguments, losses),
        str(out / arguments.layout),
        maybe_use_persistence_checkpointing=False,
        eval_on_test=True,
    )
    losses.save_picture(out / "losses.png")


if __name__ == "__main__":
    main()
