"""Measures how long training steps of a ResNet-50 in bfloat16 wait for their input.

Steps over a constant batch on the device measure the model alone. Then dalijax, Grain with OpenCV,
and others provide the batches in turn, for several rounds. A step waits for its input from the end
of the previous step until it is dispatched. The remaining additional time is due to sharing the
device with the decoder. The time of Python in ``next()`` matters only if the device is idle.
``import dalijax`` sets CUDA's hardware queues to 32; DALIJAX_CUDA_QUEUES=keep measures CUDA's
default of 8::

    python benchmarks/training.py --threads 8 --workers 16
"""

from __future__ import annotations

import pathlib
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import flags
from nvidia.dali.pipeline import OperatorConcurrency, StreamPolicy

import photos
import report
import throughput
import turns

CLASSES = 1000
MODEL = "a batch on the device"
Batch = dict[str, Any]


class Bottleneck(nn.Module):
    """A block of ResNet v1.5 (He et al., 2016; the stride is in the 3x3 convolution)."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, height, width, channels] to 4 * `width` channels."""

        def norm(**options: Any) -> nn.BatchNorm:
            return nn.BatchNorm(
                use_running_average=False, momentum=0.9, dtype=jnp.bfloat16, **options
            )

        def conv(features: int, size: int, stride: int = 1) -> nn.Conv:
            return nn.Conv(features, (size, size), stride, use_bias=False, dtype=jnp.bfloat16)

        y = nn.relu(norm()(conv(self.width, 1)(x)))
        y = nn.relu(norm()(conv(self.width, 3, self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, 1)(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet; ResNet-50 if stages is (3, 4, 6, 3) and width is 64 (25.6 million parameters)."""

    stages: tuple[int, ...]
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [batch, height, width, 3] to logits [batch, CLASSES], float32."""
        x = nn.Conv(self.width, (7, 7), 2, use_bias=False, dtype=jnp.bfloat16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for number, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if number and not block else 1
                x = Bottleneck(self.width << number, stride)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)).astype(jnp.float32))


class Trainer:
    """A model, its optimizer, and a compiled step."""

    def __init__(self, stages: tuple[int, ...], width: int, batch: Batch):
        model, optimizer = ResNet(stages, width), optax.sgd(0.1, momentum=0.9, nesterov=True)
        self._state = jax.jit(model.init)(jax.random.key(0), batch["images"])
        self._moments = optimizer.init(self._state["params"])
        self.parameters = sum(x.size for x in jax.tree.leaves(self._state["params"]))

        def loss(params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> Any:
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, images, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels % CLASSES)
            return losses.mean(), new["batch_stats"]

        def step(state: Any, moments: Any, images: jax.Array, labels: jax.Array) -> Any:
            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
                state["params"], state["batch_stats"], images, labels.reshape(-1)
            )
            updates, moments = optimizer.update(grads, moments, state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "batch_stats": stats}, moments, value

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def train(self, batch: Batch) -> Any:
        """Starts a step, and returns its loss."""
        self._state, self._moments, loss = self._step(
            self._state, self._moments, batch["images"], batch["labels"]
        )
        return loss


def repeated(batch: Batch) -> Iterator[Batch]:
    """Yields a constant batch."""
    while True:
        yield batch


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40, help="steps per input and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8, help="DALI's threads")
    parser.add_argument("--workers", type=int, default=16, help="Grain's workers")
    parser.add_argument("--stages", type=int, nargs="+", default=(3, 4, 6, 3))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--match", default="", help="pattern of names of inputs")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="directory of the JPEGs, created if necessary"
    )
    args = parser.parse_args()
    report.heading()
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with tempfile.TemporaryDirectory() as spare:
        files = photos.make(args.folder or pathlib.Path(spare), args.files)
        others = throughput.variants(files, args.batch, args.threads, args.workers)
        call = {"batch_size": args.batch, "num_threads": args.threads}
        function, folder = throughput.folder_images, str(pathlib.Path(files[0]).parent)

        parallel = {
            "stream_policy": StreamPolicy.PER_OPERATOR,
            "concurrency": OperatorConcurrency.FULL,
        }

        def fed(**options: Any) -> Callable[[], Iterator[Batch]]:
            return lambda: function.stream(None, folder, **call, **options)

        workers = f"Grain + OpenCV, {args.workers} workers"
        makers: dict[str, Callable[[], Iterator[Batch]]] = {
            MODEL: lambda: repeated(first),
            "dalijax": fed(),
            "dalijax, prefetch_queue_depth=4": fed(prefetch_queue_depth=4),
            "dalijax, prefetch_queue_depth=8": fed(prefetch_queue_depth=8),
            "dalijax, a stream for each operator": fed(**parallel),
            "dalijax, both": fed(prefetch_queue_depth=8, **parallel),
            workers: others[workers],
        }
        makers = {k: make for k, make in makers.items() if k == MODEL or re.search(args.match, k)}
        stream = function.stream(None, folder, **call)
        first = jax.device_put(next(stream))
        stream.close()
        trainer = Trainer(tuple(args.stages), args.width, first)
        print(f"{trainer.parameters:,} parameters, batch {args.batch}", flush=True)
        turns.time_steps(trainer.train, repeated(first), 5)
        runs_of: dict[str, list[turns.Steps]] = {name: [] for name in makers}
        for _ in range(args.rounds):
            for name, make in makers.items():
                iterator = make()
                turns.time_steps(
                    trainer.train, iterator, 2 * args.workers + 8
                )  # uses up prefetched batches
                runs_of[name].append(turns.time_steps(trainer.train, iterator, args.steps))
                getattr(iterator, "close", lambda: None)()
                step, in_next, idle = runs_of[name][-1]
                print(f"  {name}: {step:.2f} ms, {in_next:.2f} in next(), {idle:.2f} idle")
    base = statistics.median(step for step, _, _ in runs_of[MODEL])
    report.table(
        (
            *("input", "ms per step", "longer than the model alone, %", "waiting for input, %"),
            *("in next(), ms", "images/s"),
        ),
        [
            (
                name,
                report.spread([step for step, _, _ in runs], 2),
                f"{100 * (statistics.median(step for step, _, _ in runs) / base - 1):+.1f}",
                report.spread([100 * idle / step for step, _, idle in runs], 1),
                report.spread([in_next for _, in_next, _ in runs], 2),
                f"{1e3 * args.batch / statistics.median(step for step, _, _ in runs):,.0f}",
            )
            for name, runs in runs_of.items()
        ],
    )
    medians = {
        name: statistics.median(step for step, _, _ in runs) for name, runs in runs_of.items()
    }
    results = {
        name: dict(zip(("step_ms", "next_ms", "idle_ms"), zip(*runs)))
        for name, runs in runs_of.items()
    }
    report.write(args.out, "training", results, {"": medians}, "ms per step")


if __name__ == "__main__":
    main()
