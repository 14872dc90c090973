"""The recipe of examples/imagenet, as a user runs it."""

import dataclasses
import importlib
import io
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from PIL import Image

from full import FULL
from processes import free_port
from programs import kill_python, run_python, start_python
from tars import write_tar

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


def labelled(numbers):
    """Drawn pictures of six shades as a tar has them: a class is a shade, and noise."""
    for number in numbers:
        shade = np.random.default_rng(number).integers(0, 40, (72, 90, 3)) + 35 * (number % 6)
        file = io.BytesIO()
        Image.fromarray(shade.astype(np.uint8)).save(file, "JPEG")
        yield f"{number:05d}.jpg", file.getvalue()
        yield f"{number:05d}.cls", b"%d" % (number % 6)


def run_over_tars(folder, out, steps, processes):
    """Trains with AutoAugment over tars, and holds that each process ends well."""
    options = ["--config", "smoke", "--policy", "auto", "--classes", 6, "--threads", 1]
    options += ["--data", folder / "train-*.tar", "--val", folder / "held-*.tar", "--batch", 12]
    options += ["--log-every", 1, "--save-every", 4, "--steps", steps, "--out", folder / out]
    coordinator = f"localhost:{free_port()}"
    started = [
        start_python(
            *(TRAIN, *options),
            *(("--coordinator", coordinator) if processes > 1 else ()),
            *(("--processes", processes, "--process", k) if processes > 1 else ()),
            env=environment(2 // processes),
        )
        for k in range(processes)
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.skipif(not FULL, reason="a minute: make test-full")
def test_two_processes_over_tars_train_as_one_and_go_on_as_one(tmp_path):
    for name, numbers in {
        "train-0": range(60),
        "train-1": range(60, 110),
        "held-0": range(25),
    }.items():
        write_tar(tmp_path / f"{name}.tar", labelled(numbers))
    run_over_tars(tmp_path, "one", 12, processes=1)
    run_over_tars(tmp_path, "two", 8, processes=2)
    run_over_tars(tmp_path, "two", 12, processes=1)
    one, two = lines(tmp_path, "one"), lines(tmp_path, "two")
    assert sorted(one) == sorted(two) == list(range(1, 13))
    for step, row in one.items():  # sums over processes differ in their last bits
        assert two[step]["loss"] == pytest.approx(row["loss"], abs=2e-3), step
    for name in ("one", "two"):
        assert {row["pictures"] for row in lines(tmp_path, name, "evaluation").values()} == {25}


@pytest.fixture
def recipe(monkeypatch):
    """The module `input` and the configuration `vit_s16` of examples/imagenet."""
    monkeypatch.syspath_prepend(TRAIN.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with jax.numpy_dtype_promotion("standard"):
        yield importlib.import_module("input"), importlib.import_module("configs.vit_s16").config


def test_tars_open_by_a_pattern(recipe, tmp_path):
    for name, numbers in {"train-0": range(6), "train-1": range(6, 10)}.items():
        write_tar(tmp_path / f"{name}.tar", labelled(numbers))
    source = recipe[0].open_source(f"{tmp_path}/train-*.tar")
    values = source.read(np.arange(10), ["data", "label"])
    assert values["label"].tolist() == [number % 6 for number in range(10)]
    assert [bytes(value[:2]) for value in values["data"]] == [b"\xff\xd8"] * 10


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_the_share_of_mixing_has_betas_distribution(recipe, alpha):
    keys = jax.random.split(jax.random.key(0), 20_000)
    shares = np.asarray(jax.vmap(lambda key: recipe[0].beta(key, alpha))(keys))
    assert shares.min() >= 0 and shares.max() <= 1
    # As float32, since a hundredth of Beta(0.2, 0.2) is rounded to 1.
    expected = np.random.default_rng(1).beta(alpha, alpha, 20_000).astype(np.float32)
    assert scipy.stats.ks_2samp(shares, expected).pvalue > 1e-3


@pytest.mark.parametrize("changes", [{}, {"mixup": 0.0}, {"cutmix": 0.0}])
def test_mixing_has_no_loop_for_which_the_host_waits(recipe, changes):
    module, config = recipe
    mix = module.mixing(dataclasses.replace(config, **changes), 10)
    images, labels = jnp.zeros((8, 32, 32, 3), jnp.uint8), jnp.zeros(8, jnp.int32)
    traced = mix.trace(images, labels, key=jax.random.key(0))
    assert "while" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_normalization_is_about_imagenets_mean(recipe):
    models = importlib.import_module("models")
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 9, 3), np.uint8)
    expected = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(models.normalize(images, "float32"), expected, atol=1e-5)
    erased = models.normalize(np.array(recipe[0].MEAN, np.uint8), "float32")
    assert np.abs(erased).max() < 0.01


@pytest.mark.parametrize("changes", [{"cutmix": 0.0}, {"mixup": 0.0}])
def test_labels_have_the_shares_of_the_mixed_pictures(recipe, changes):
    module, config = recipe
    mix = module.mixing(dataclasses.replace(config, smoothing=0.0, **changes), 10)
    labels = jnp.arange(4)
    images = (
        np.zeros((4, 20, 30, 3), np.uint8)
        + np.array([0, 200, 0, 200], np.uint8)[:, None, None, None]
    )
    for seed in range(8):
        mixed, soft = mix(images, labels, key=jax.random.key(seed))
        share = float(soft[0, 0])
        hot = np.eye(10)[:4]
        np.testing.assert_allclose(soft, share * hot + (1 - share) * np.roll(hot, 1, 0), atol=1e-6)
        first, second = np.asarray(mixed[0, ..., 0]), np.asarray(mixed[1, ..., 0])
        assert (mixed == mixed[..., :1]).all() and (np.abs(first + second - 200.0) <= 1).all()
        if "cutmix" in changes:  # MixUp: one value for all pixels
            assert (np.abs(first - 200 * (1 - share)) <= 0.51).all()
        else:  # CutMix: a box
            box = first == 200
            assert set(np.unique(first)) <= {0, 200}
            assert box.mean() == pytest.approx(1 - share, abs=1e-6)
            assert np.array_equal(box, box.any(1)[:, None] & box.any(0))
