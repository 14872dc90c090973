"""A CLU training loop with DALI: metrics, progress, a report of the input, and checkpoints.

If it is run again, it resumes from its last checkpoint, at the same batch. TensorBoard shows how
long it waited for its input::

    python examples/clu_train.py                      # 300 steps
    tensorboard --logdir examples/out/clu_train

It needs TensorFlow and TensorBoard, which CLU does not install.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from clu import metric_writers, periodic_actions
from flax import nnx
from images import CACHE, make_images, split
from losses import Losses
from nvidia.dali import backend
from quickstart import Network, train_step, training_data

from dalijax.adapters.clu import DALIDatasetIterator, ReportInput

OUT = Path(__file__).resolve().parent / "out" / "clu_train"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier in a CLU training loop.")
    parser.add_argument("--data", type=Path, help="folder of class folders (default: generated)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of generated images")
    parser.add_argument("--count", type=int, default=2000, help="number of generated images")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--report-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="also profile five steps")
    parser.add_argument("--out", type=Path, default=OUT, help="checkpoints and metrics")
    parser.add_argument("--fresh", action="store_true", help="delete earlier checkpoints")
    arguments = parser.parse_args()
    # As in quickstart.py: DALI's threads may disturb the recording of CUDA graphs.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {os.environ.get('XLA_FLAGS', '')}"
    out = arguments.out.resolve()
    if arguments.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    names, train_files, _ = split(
        arguments.data or make_images(arguments.cache, count=arguments.count)
    )
    iterator = DALIDatasetIterator(
        training_data,
        files=train_files[0],
        classes=train_files[1],
        gpu=backend.GetCUDADeviceCount() > 0,
        batch_size=arguments.batch_size,
        element="jax",
    )
    first = iterator.peek_async()  # DALI prepares the batch while the model is created
    model = Network(len(names), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    manager = ocp.CheckpointManager(out / "checkpoints")
    start = manager.latest_step() or 0
    if start:
        restored = manager.restore(start, args=ocp.args.StandardRestore(state))
        model, optimizer = nnx.merge(graph, restored)
        iterator.restore(out / f"data-{start}.json")
        print(f"resuming after step {start}")
    else:
        first.result()

    def save(step: int, t: float | None = None) -> None:
        # Save the input first, so that every saved model has an input state.
        iterator.save(out / f"data-{step}.json")
        manager.save(step, args=ocp.args.StandardSave(nnx.split((model, optimizer))[1]))

    writer = metric_writers.create_default_writer(str(out), asynchronous=False)
    progress = periodic_actions.ReportProgress(
        num_train_steps=arguments.steps, writer=writer, every_steps=arguments.report_every
    )
    hooks = [
        progress,
        ReportInput(
            iterator,
            writer=writer,
            num_train_steps=arguments.steps,
            every_steps=arguments.report_every,
        ),
        periodic_actions.PeriodicCallback(every_steps=arguments.save_every, callback_fn=save),
    ]
    if arguments.profile and jax.process_index() == 0:
        hooks.append(periodic_actions.Profile(logdir=str(out), num_profile_steps=5))
    losses = Losses(out / "losses.jsonl")
    with metric_writers.ensure_flushes(writer):
        # With the range first, zip does not take an extra batch at the end.
        for step, batch in zip(range(start + 1, arguments.steps + 1), iterator):
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                loss = train_step(model, optimizer, batch["images"], batch["labels"])
            losses.add(step, float(loss))
            if step % arguments.report_every == 0:
                writer.write_scalars(step, {"loss": float(loss)})
            for hook in hooks:
                hook(step)
    manager.close()
    iterator.close()
    losses.save_picture(out / "losses.png")


if __name__ == "__main__":
    main()
