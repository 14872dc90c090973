"""The examples run like a user runs them."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import tensorflow as tf
from forks import run_fork
from images import make_images
from PIL import Image

from full import FULL

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LIBRARIES = ("flax.nnx", "optax", "orbax.checkpoint", "grain")  # imported once for all examples
TENSORFLOW = ("tensorflow", "clu.metric_writers", "clu.periodic_actions")


def test_getting_started(tmp_path):
    # From a copy, so that its images are drawn again and stored there.
    folder = tmp_path / "examples"
    folder.mkdir()
    for script in EXAMPLES.glob("*.py"):
        (folder / script.name).write_text(script.read_text())
    done = run_fork(folder / "getting_started.py", modules=LIBRARIES, warn="error")
    pictures = sorted((folder / "out" / "getting_started").glob("*.png"))
    assert len(pictures) >= 10
    for picture in pictures:
        low, high = Image.open(picture).convert("L").getextrema()
        assert high - low > 50, picture  # the image is not empty
    assert "NamedSharding" in done.stdout and "images/s" in done.stdout


def run(name, *options, modules=()):
    """Runs an example on a CPU and returns its output."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return run_fork(EXAMPLES / name, *options, modules=(*LIBRARIES, *modules), env=env).stdout


@pytest.mark.parametrize("count", ("1", "4", "6"))
def test_video_takes_any_number_of_clips(tmp_path, count):
    said = run("video.py", "--count", count, "--out", tmp_path)
    assert "has the same clips: True" in said


# paxml needs Python 3.10
COMMANDS = [
    path.relative_to(EXAMPLES).as_posix()
    for path in sorted(EXAMPLES.glob("**/*.py"))
    if "__main__" in path.read_text() and path.name != "pax_train.py"
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
    said = run(name, "--help", modules=TENSORFLOW)
    assert said.startswith("usage: ") and "--out" in said


def test_quickstart_trains_on_a_users_folder(tmp_path):
    """The accuracy on these images is unknown."""
    own = make_images(tmp_path / "own", count=60)
    out = tmp_path / "batch.png"
    cache = ("--cache", tmp_path / "cache")
    said = run("quickstart.py", *cache, "--data", own, "--epochs", "1", "--out", out)
    assert re.search(r"each of 12 images once\nAccuracy on held-out images: [\d.]+%", said)
    assert Image.open(out).convert("L").getextrema()[1] > 100


def clu_train(folder, steps, out):
    run(
        *("clu_train.py", "--cache", folder / "cache", "--count", "120", "--batch-size", "16"),
        *("--save-every", "6", "--report-every", "3", "--steps", steps, "--out", folder / out),
        modules=TENSORFLOW,
    )
    lines = (folder / out / "losses.jsonl").read_text().splitlines()
    return {one["step"]: one["loss"] for one in map(json.loads, lines)}


def test_clu_train_resumes_and_reports_its_input(tmp_path):
    straight = clu_train(tmp_path, 18, "straight")
    assert sorted(straight) == list(range(1, 19))
    clu_train(tmp_path, 12, "stopped")
    assert clu_train(tmp_path, 18, "stopped") == straight
    steps = set()
    for file in (tmp_path / "stopped").glob("events.*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            steps |= {event.step for value in event.summary.value if "input/epoch" in value.tag}
    assert steps == {3, 6, 9, 12, 15, 18}
    assert Image.open(tmp_path / "stopped" / "losses.png").convert("L").getextrema()[0] < 100


def test_functions_draw_a_picture_each_and_resume(tmp_path):
    told = run("functions.py", "--cache", tmp_path / "cache", "--count", "60", "--out", tmp_path)
    assert "restores the state and returns the same batch: True" in told
    for name in ("mixup", "cutmix", "swirl", "solarized"):
        low, high = Image.open(tmp_path / f"{name}.png").convert("L").getextrema()
        assert high - low > 50, name


def test_robot_resumes_with_the_same_losses(tmp_path):
    told = run("robot.py", "--steps", "6", "--out", tmp_path, modules=TENSORFLOW)
    assert float(re.search("resumed at step 4: .* at most (.*)", told)[1]) < 1e-5
    low, high = Image.open(tmp_path / "batch.png").convert("L").getextrema()
    assert high - low > 50


@pytest.mark.skipif(not FULL, reason="40 s: make test-full")
def test_elastic_ends_with_the_losses_of_an_unbroken_run(tmp_path):
    said = run("elastic.py", "--cache", tmp_path / "cache", "--smoke", "--out", tmp_path / "out")
    for line in (
        "uninterrupted: 1 processes x 1 devices, steps 1 to 15",
        "interrupted: 2 processes x 2 devices, steps 1 to 6",
        "interrupted: 4 processes x 1 devices, steps 5 to 12",
        "interrupted: 1 processes x 1 devices, steps (9|13) to 15",  # killed as it saved step 12
    ):
        assert re.search(line, said)
    assert float(said.partition("differ by at most ")[2].partition(". ")[0]) < 1e-2
    assert (tmp_path / "out" / "losses.png").stat().st_size > 10_000


@pytest.mark.skipif(not FULL, reason="30 s: make test-full")
def test_input_bound_names_an_operator_and_draws_both_loops(tmp_path):
    options = ("--steps", "20", "--seconds", "3", "--out", tmp_path)
    said = run("input_bound.py", "--cache", tmp_path / "cache", *options)
    assert re.search(r"{'num_threads': 1}\ninput-bound: .*; input: fn\.[a-z.]+ takes", said)
    assert said.count("input-bound: next() takes") == 2 and "iterator = train(" in said
    low, high = Image.open(tmp_path / "input_bound.png").convert("L").getextrema()
    assert high - low > 50


# Programs of tasks, and a result that is reached only by learning.
TASKS = {
    "detection.py": 0.5,
    "image_text.py": 0.8,
    "native_resolution.py": 0.8,
    "segmentation.py": 0.8,
    "views.py": 0.8,
}


@pytest.mark.parametrize("program", TASKS)
def test_a_task_that_is_killed_resumes_with_equal_batches(program, tmp_path):
    command = [sys.executable, EXAMPLES / program, "--save-every", "4", "--steps"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def steps(out):
        text = (tmp_path / out / "steps.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    subprocess.run([*command, "14", "--out", tmp_path / "whole"], env=environment, check=True)
    again = [*command, "14", "--out", tmp_path / "killed"]
    with subprocess.Popen(again, env=environment, stdout=subprocess.PIPE, text=True) as killed:
        for line in killed.stdout:
            if line.startswith("step 8"):
                killed.kill()
    assert killed.returncode == -signal.SIGKILL
    subprocess.run(again, env=environment, check=True)
    whole = {line["step"]: line["batch"] for line in steps("whole")}
    both = steps("killed")
    assert len(whole) == 14 and {line["step"] for line in both} == {*whole} and len(both) >= 14
    assert [line["batch"] for line in both] == [whole[line["step"]] for line in both]


@pytest.mark.skipif(not FULL, reason="2 min: make test-full")
@pytest.mark.parametrize(("program", "least"), TASKS.items())
def test_a_task_is_learned(program, least, tmp_path):
    said = run(program, "--out", tmp_path)
    before, after = map(float, re.search(r": ([\d.]+) before, ([\d.]+) after", said).groups())
    assert before < 0.7 * least and after > least
    assert Image.open(tmp_path / "batch.png").convert("L").getextrema()[1] > 100
