"""The recipe of examples/imagenet, as a user runs it."""

import json
import os
import pathlib
import time

import pytest
from PIL import Image

from full import FULL
from programs import kill_python, run_python, start_python

TRAIN = pathlib.Path(__file__).parents[2] / "examples" / "imagenet" / "train.py"
HELD_OUT = 120  # of 610 drawn pictures, each fifth of each of six classes


def command(folder, name, *options):
    return [TRAIN, "--smoke", "--cache", folder / "cache", "--out", folder / name, *options]


def environment(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def lines(folder, name, kind="training"):
    """The lines of a run by step; of a step that was repeated, the last one."""
    path = folder / name / "losses.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["step"]: row for row in rows if row["kind"] == kind}


def test_the_smoke_run_learns_and_evaluates_each_picture_once(tmp_path):
    run_python(*command(tmp_path, "out"), env=environment(2))
    evaluated = lines(tmp_path, "out", "evaluation")
    assert len(evaluated) == 8
    assert {row["pictures"] for row in evaluated.values()} == {HELD_OUT}
    assert evaluated[max(evaluated)]["accuracy"] > 0.3  # chance is a sixth
    for name in ("batch.png", "losses.png"):
        low, high = Image.open(tmp_path / "out" / name).convert("L").getextrema()
        assert high - low > 50, name


@pytest.mark.skipif(not FULL, reason="a minute: make test-full")
def test_a_killed_run_goes_on_with_another_number_of_devices(tmp_path):
    options = ("--steps", 24, "--save-every", 5, "--batch", 28)  # 120 is no multiple of 28
    run_python(*command(tmp_path, "unbroken", *options), env=environment(1))
    for devices, step in ((2, 8), (4, 16)):
        process = start_python(*command(tmp_path, "broken", *options), env=environment(devices))
        try:
            while step not in lines(tmp_path, "broken") and process.poll() is None:
                time.sleep(0.02)
        finally:
            assert kill_python(process) == -9
    run_python(*command(tmp_path, "broken", *options), env=environment(1))
    unbroken, broken = lines(tmp_path, "unbroken"), lines(tmp_path, "broken")
    assert sorted(broken) == sorted(unbroken) == list(range(1, 25))
    for step, row in unbroken.items():  # sums of other parts differ in their last bits
        assert broken[step]["loss"] == pytest.approx(row["loss"], abs=2e-3), step
    for name in ("unbroken", "broken"):
        counted = lines(tmp_path, name, "evaluation").values()
        assert counted and {row["pictures"] for row in counted} == {HELD_OUT}
