"""A real paxml training with input checkpoints: an uninterrupted run equals two processes."""

import importlib
import json
import os
import pathlib

import pytest
from PIL import Image
from praxis import base_hyperparams, pax_fiddle

from dalijax.adapters.pax import DALIInput
from programs import run_python

DEVICES = "--xla_force_host_platform_device_count=2"
SCRIPT = pathlib.Path(__file__).parent.parent.parent / "examples" / "pax_train.py"


def run(folder, out, steps, layout, *options):
    run_python(
        *(SCRIPT, "--layout", layout, "--steps", steps, *options),
        *("--cache", folder / "cache", "--count", "58", "--batch-size", "4"),
        *("--save-every", "100", "--evaluate-every", "2", "--out", folder / out),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES},
    )
    lines = [json.loads(line) for line in (folder / out / "losses.jsonl").read_text().splitlines()]
    return {(line["kind"], line["step"]): line for line in lines}


@pytest.mark.parametrize("layout,options", [("pmap", ()), ("spmd", ()), ("spmd", ("--source",))])
def test_six_steps_are_four_and_two(tmp_path, layout, options):
    straight = run(tmp_path, "straight", 6, layout, *options)
    assert {step for kind, step in straight if kind == "training"} == set(range(1, 7))
    run(tmp_path, "stopped", 4, layout, *options)
    # Parameters and momenta, too.
    assert run(tmp_path, "stopped", 6, layout, *options) == straight
    evaluations = [line for (kind, _), line in straight.items() if kind == "evaluation"]
    # Ten images are held out: three batches of four.
    assert [line["batches"] for line in evaluations] == [3, 3, 3]
    (saved,) = (tmp_path / "stopped").glob("**/checkpoint_*4/train_input/process_0-of-1")
    state = json.loads(saved.read_bytes())
    assert state["sample"] == 16 if options else state["step"] == 4
    assert Image.open(tmp_path / "straight" / "losses.png").convert("L").getextrema()[0] < 100


def test_labels_have_the_shape_of_the_weights(jpegs, monkeypatch):
    """Otherwise a loss for each sample would have the shape (batch, batch)."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setenv("XLA_FLAGS", DEVICES)
    example = importlib.import_module("pax_train")
    arguments = {"files": jpegs, "classes": list(range(len(jpegs))), "training": True}
    config = pax_fiddle.Config(
        DALIInput,
        iterator_fn=example.labeled_images,
        arguments=arguments,
        batch_size=4,
        is_training=True,
    )
    batch = base_hyperparams.instantiate(config).get_next()
    assert batch.labels.shape == batch.eval_sample_weights.shape == (4,)
