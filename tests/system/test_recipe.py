"""The recipe of examples/imagenet, run like a user runs it."""

import dataclasses
import functools
import importlib
import io
import json
import os
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import linen
from forks import run_fork
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from full import FULL, combinations, in_full
from processes import free_port
from programs import kill_python, run_python, start_python
from tars import write_tar

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
TRAIN, ELASTIC = ROOT / "examples" / "imagenet" / "train.py", ROOT / "benchmarks" / "elastic.py"
LIBRARIES = ("flax.linen", "optax", "orbax.checkpoint", "tensorflow", "clu.metric_writers")
train = functools.partial(run_fork, modules=LIBRARIES)
HELD_OUT = 120  # of 610 drawn images, a fifth of each of six classes


def command(folder, name, *options):
    drawn = folder.parent / "drawn"  # the images of all tests
    return [TRAIN, "--smoke", "--cache", drawn, "--out", folder / name, *options]


def environment(devices):
    # XLA compiles for half a minute, and at this level for half as long.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def lines(folder, name, kind="training"):
    """Returns the lines of a run by step; of a repeated step, the last."""
    path = folder / name / "losses.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["step"]: row for row in rows if row["kind"] == kind}


def test_the_smoke_run_learns_evaluates_each_image_once_and_repeats_a_lost_evaluation(tmp_path):
    train(*command(tmp_path, "out", "--steps", 45), env=environment(2))
    evaluated = lines(tmp_path, "out", "evaluation")
    assert len(evaluated) == 3  # one after each epoch
    assert {row["images"] for row in evaluated.values()} == {HELD_OUT}
    assert evaluated[max(evaluated)]["accuracy"] > 0.3  # chance is a sixth
    tensorflow = pytest.importorskip("tensorflow")
    read = tensorflow.compat.v1.train.summary_iterator
    events = [event for path in (tmp_path / "out").glob("events.*") for event in read(str(path))]
    tags = {value.tag for event in events for value in event.summary.value}
    assert tags >= {"train/loss", "eval/loss", "eval/accuracy"}
    assert any(tag.startswith("input/") for tag in tags)
    for name in ("batch.png", "losses.png"):
        low, high = Image.open(tmp_path / "out" / name).convert("L").getextrema()
        assert high - low > 50, name
    # As if the run had been killed after its last checkpoint, before the evaluation.
    for name in ("losses.jsonl", "losses.png"):
        (tmp_path / "out" / name).unlink()
    said = train(*command(tmp_path, "out", "--steps", 45), env=environment(2)).stdout
    assert "The run of 45 steps is already complete" in said
    again = lines(tmp_path, "out", "evaluation")
    assert sorted(again) == [45]
    assert again[45]["loss"] == pytest.approx(evaluated[45]["loss"], abs=1e-5)
    assert (tmp_path / "out" / "losses.png").exists()


@pytest.mark.skipif(not FULL, reason="a minute: make test-full")
def test_a_killed_run_resumes_on_another_number_of_devices(tmp_path):
    options = ("--steps", 24, "--save-every", 5, "--batch", 28)  # 120 is not a multiple of 28
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
        assert counted and {row["images"] for row in counted} == {HELD_OUT}


@pytest.mark.skipif(not FULL, reason="a minute: make test-full")
def test_a_run_resumed_on_fewer_devices_has_the_batches_and_losses_of_an_uninterrupted_run(
    tmp_path,
):
    options = ("--small", "--batch", 12, "--steps", 18, "--files", 60, "--save-every", 2)
    options += ("--threads", 1, "--uninterrupted", 4, "--out", tmp_path)
    run_python(ELASTIC, *options, env=environment(1))  # the program sets the number of devices
    (path,) = tmp_path.glob("*-elastic-resnet50.json")
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["4, uninterrupted", "4 -> 2 -> 1"]
    whole, resumed = results.values()
    assert whole["steps"] == list(range(1, 19)) and set(resumed["steps"]) == {*whole["steps"]}
    assert len(resumed["steps"]) > 18  # steps after the last checkpoint are repeated
    assert resumed["batches that differ"] == 0
    losses = dict(zip(whole["steps"], whole["losses"]))
    assert losses[18] < losses[1]
    # A run that resumes one batch too late differs by 0.3, and its parameters by 5e-3.
    for step, loss in zip(resumed["steps"], resumed["losses"]):
        assert loss == pytest.approx(losses[step], abs=1e-3), step
    assert resumed["relative difference of the parameters"] < 1e-3


def labelled(numbers):
    """Returns drawn images of six shades as in a tar: a class is a shade, and noise."""
    for number in numbers:
        shade = np.random.default_rng(number).integers(0, 40, (72, 90, 3)) + 35 * (number % 6)
        file = io.BytesIO()
        Image.fromarray(shade.astype(np.uint8)).save(file, "JPEG")
        yield f"{number:05d}.jpg", file.getvalue()
        yield f"{number:05d}.cls", b"%d" % (number % 6)


def run_over_tars(folder, out, steps, processes):
    """Trains with AutoAugment over tars, and checks that each process exits normally."""
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
def test_two_processes_over_tars_train_and_resume_like_one(tmp_path):
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
        assert {row["images"] for row in lines(tmp_path, name, "evaluation").values()} == {25}


@pytest.fixture
def recipe(monkeypatch):
    """The modules `input` and configuration `vit_s16` of examples/imagenet."""
    monkeypatch.syspath_prepend(TRAIN.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    with jax.numpy_dtype_promotion("standard"):
        yield importlib.import_module("input"), importlib.import_module("configs.vit_s16").config
    jax.config.update("jax_disable_most_optimizations", False)


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
    traced = jax.jit(mix).trace({"images": images, "labels": labels}, jax.random.key(0))
    assert "while" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_tar_that_is_not_there_is_named(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no tar .*/none-\*\.tar"):
        recipe[0].open_source(f"{tmp_path}/none-*.tar")


@pytest.mark.parametrize(("dtype", "size"), combinations(2, ["float32", "bfloat16"], [0, 4, 64]))
def test_its_normalization_is_flaxs_of_each_group(recipe, size, dtype):
    ours = importlib.import_module("models").BatchNorm(size)
    theirs = linen.BatchNorm(momentum=0.9, dtype=dtype)
    random = np.random.default_rng(0)
    x = jnp.array(random.normal(3, 2, (12, 5, 5, 3)), dtype)
    params = {name: jnp.array(random.normal(size=3), "float32") for name in ("scale", "bias")}
    stats = {name: jnp.array(random.uniform(1, 2, 3), "float32") for name in ("mean", "var")}
    key, same = jax.random.key(0), functools.partial(np.testing.assert_array_equal, strict=True)
    for train in (False, True):
        started = ours.init(key, x, train), theirs.init(key, x, use_running_average=not train)
        jax.tree.map(same, *started)
    weights = jnp.array(random.normal(size=x.shape), "float32")

    def our_loss(params, x):
        variables = {"params": params, "batch_stats": stats}
        y, new = ours.apply(variables, x, train=True, mutable=["batch_stats"])
        return (y * weights).sum(), (y, new["batch_stats"])

    def their_loss(params, x):
        rows = size or len(x)
        parts = [
            theirs.apply({"params": params, "batch_stats": stats}, x[k : k + rows],
                         use_running_average=False, mutable=["batch_stats"])
            for k in range(0, len(x), rows)
        ]  # fmt: skip
        y = jnp.concatenate([y for y, _ in parts])
        means = jax.tree.map(lambda *seen: sum(seen) / len(seen), *(new for _, new in parts))
        return (y * weights).sum(), (y, means["batch_stats"])

    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    if dtype == "bfloat16":  # with 8 bits
        near = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=2**-5)
    seen, expected = (
        jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
        for loss in (our_loss, their_loss)
    )
    assert jax.tree.map(jnp.result_type, seen) == jax.tree.map(jnp.result_type, expected)
    jax.tree.map(lambda a, b: near(a.astype("float32"), b.astype("float32")), seen, expected)
    variables = {"params": params, "batch_stats": stats}
    near(  # evaluation uses the averages, for a batch of any size
        ours.apply(variables, x[:7], train=False).astype("float32"),
        theirs.apply(variables, x[:7], use_running_average=True).astype("float32"),
    )


@pytest.mark.parametrize("size", [0, 12])
def test_one_group_costs_as_much_as_flaxs_normalization(recipe, size):
    x = jnp.ones((12, 5, 5, 3), "bfloat16")

    def costs(layer, **options):
        variables = layer.init(jax.random.key(0), x, **options)

        def loss(params, x):
            now = {"params": params, "batch_stats": variables["batch_stats"]}
            y, new = layer.apply(now, x, mutable=["batch_stats"], **options)
            return (y.astype("float32") ** 2).sum(), new

        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        lowered = step.lower(variables["params"], x)
        assert "x12x5x5x3x" not in lowered.as_text()  # no axis of groups
        seen = lowered.compile().cost_analysis()
        return seen["flops"], seen["bytes accessed"]

    ours = costs(importlib.import_module("models").BatchNorm(size), train=True)
    theirs = linen.BatchNorm(momentum=0.9, dtype="bfloat16")
    assert ours == costs(theirs, use_running_average=False)


def test_its_normalization_of_pixels_that_are_all_equal_is_finite(recipe):
    x = jnp.full((8, 5, 5, 1), 777.7)  # whose variance is negative before it is clipped to 0
    layer = importlib.import_module("models").BatchNorm(4)
    variables = layer.init(jax.random.key(0), x, train=False)
    y, new = layer.apply(variables, x, train=True, mutable=["batch_stats"])
    assert np.isfinite(y).all()
    assert float(new["batch_stats"]["var"][0]) == pytest.approx(0.9)


def resnet_step(devices, **changes):
    """Returns a small ResNet's configuration, start, batch over devices, and compiled step."""
    steps, resnet50 = map(importlib.import_module, ("steps", "configs.resnet50"))
    small = {
        "width": 4,
        "side": 16,
        "dtype": "float32",
        "batch": 16,
        "virtual_batch_size": 4,
        **changes,
    }
    config = dataclasses.replace(resnet50.config, **small)
    begin, step, _ = steps.steps_of(config, 6, 10)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (config.batch, config.side, config.side, 3), np.uint8)
    labels = np.eye(6, dtype=np.float32)[random.integers(0, 6, config.batch)]
    batch = jax.device_put((images, labels), NamedSharding(mesh, PartitionSpec("data")))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), jax.eval_shape(begin)
    )
    compiled = step.lower(state, *batch).compile()
    return config, lambda: jax.device_put(begin(), everywhere), batch, compiled


# Of batches of 16.
@pytest.mark.parametrize(("devices", "size"), [in_full(1, 4), (4, 4), in_full(2, 64)])
def test_moments_are_of_so_many_images_whatever_the_devices(recipe, devices, size):
    config, start, batch, step = resnet_step(devices, depths=(1,), virtual_batch_size=size)
    state = start()
    models, steps = map(importlib.import_module, ("models", "steps"))
    model = models.build(config, 6)
    stats = jax.device_get(state["stats"])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss_of(params, images, labels):
        variables = {"params": params, "batch_stats": stats}
        x = models.normalize(images, config.dtype)
        logits, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return -(jax.nn.log_softmax(logits) * labels).sum(-1).mean(), new["batch_stats"]

    params = jax.device_get(state["params"])
    images, labels = jax.device_get(batch)
    groups = [slice(k, k + size) for k in range(0, len(images), size)]  # each group separately
    # NumPy's, and a single program, since JAX would compile the operations of each shape.
    found = jax.device_get([loss_of(params, images[group], labels[group]) for group in groups])
    (loss, moments), gradients = jax.tree.map(lambda *parts: sum(parts) / len(parts), *found)
    updater = steps.optimizer(config, 10)
    updated = jax.jit(
        lambda gradients, params: updater.update(gradients, updater.init(params), params)
    )
    _, opt = updated(gradients, params)  # the rate begins with 0
    after, seen = step(state, *batch)
    assert float(seen) == pytest.approx(float(loss), abs=1e-5)
    for name, expected in (("stats", moments), ("opt", opt)):
        near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(near, jax.device_get(after[name]), jax.device_get(expected))
    assert max(abs(x).max() for x in jax.tree.leaves(jax.device_get(after["opt"]))) > 0.01


def test_a_step_waits_for_other_devices_as_often_however_deep_its_model_is(recipe):
    def waits(**changes):
        return len(re.findall(r" all-reduce(?:-start)?\(", resnet_step(4, **changes)[3].as_text()))

    assert waits(depths=(1,)) == waits(depths=(2,)) > 0
    if FULL:  # moments of the whole batch need more waits
        assert waits(depths=(1,), virtual_batch_size=0) < waits(depths=(2,), virtual_batch_size=0)


@pytest.mark.parametrize(("change", "message"), [
    ({"batch": 400}, "batch=400 must be a multiple of virtual_batch_size=256"),
    ({"batch": 0}, "batch=0 and rate=0.4 must be above 0"),
    ({"rate": -0.1}, "batch=1024 and rate=-0.1 must be above 0"),
])  # fmt: skip
def test_a_configuration_is_refused_before_anything_is_removed(recipe, tmp_path, change, message):
    config = importlib.import_module("configs.resnet50").config
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(config, **change)
    ((name, value),) = change.items()
    (tmp_path / "old").touch()
    options = ("--config", "resnet50", f"--{name}", value, "--fresh", "--out", tmp_path)
    said = train(TRAIN, *options, env=environment(1), code=1)
    assert f"--config resnet50: {message}" in said.stderr
    assert (tmp_path / "old").exists()


def test_groups_of_a_negative_number_of_images_are_refused(recipe):
    message = "virtual_batch_size=-1 must not be negative; 0 uses the whole batch"
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(recipe[1], virtual_batch_size=-1)


@functools.cache
def small_vit():
    """Returns the side of a small model's images, its start, and its evaluation step."""
    steps, smoke = map(importlib.import_module, ("steps", "configs.smoke"))
    config = dataclasses.replace(smoke.config, depths=(1,), width=8, heads=2, side=16)
    begin, _, count = steps.steps_of(config, 6, 10)
    return config.side, begin(), count


@pytest.mark.parametrize(("labels", "mask", "finite"), [
    ([0, 5], [True, True], True),
    ([0, 6], [True, True], False),
    ([-1, 5], [True, True], False),
    ([-1, 5], [False, True], True),
])  # fmt: skip
def test_the_loss_of_an_out_of_range_label_is_nan(recipe, labels, mask, finite):
    side, state, count = small_vit()
    images = np.zeros((2, side, side, 3), np.uint8)
    seen, _, loss = count(state, images, np.array(labels, np.int32), np.array(mask))
    assert int(seen) == sum(mask) and bool(np.isfinite(loss)) == finite


def test_normalization_is_about_imagenets_mean(recipe):
    models = importlib.import_module("models")
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 9, 3), np.uint8)
    expected = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(models.normalize(images, "float32"), expected, atol=1e-5)
    erased = models.normalize(np.array(recipe[0].MEAN, np.uint8), "float32")
    assert np.abs(erased).max() < 0.01


@pytest.mark.parametrize("changes", [{"cutmix": 0.0}, {"mixup": 0.0}])
def test_labels_have_the_shares_of_the_mixed_images(recipe, changes):
    module, config = recipe
    mix = jax.jit(module.mixing(dataclasses.replace(config, smoothing=0.0, **changes), 10))
    labels = jnp.arange(4)
    images = (
        np.zeros((4, 20, 30, 3), np.uint8)
        + np.array([0, 200, 0, 200], np.uint8)[:, None, None, None]
    )
    for seed in range(8):
        batch = mix({"images": images, "labels": labels}, jax.random.key(seed))
        mixed, soft = batch["images"], batch["labels"]
        share = float(soft[0, 0])
        hot = np.eye(10)[:4]
        np.testing.assert_allclose(soft, share * hot + (1 - share) * np.roll(hot, 1, 0), atol=1e-6)
        first, second = np.asarray(mixed[0, ..., 0]), np.asarray(mixed[1, ..., 0])
        assert (mixed == mixed[..., :1]).all() and (np.abs(first + second - 200.0) <= 1).all()
        if "cutmix" in changes:  # MixUp: a single value for all pixels
            assert (np.abs(first - 200 * (1 - share)) <= 0.51).all()
        else:  # CutMix: a box
            box = first == 200
            assert set(np.unique(first)) <= {0, 200}
            assert box.mean() == pytest.approx(1 - share, abs=1e-6)
            assert np.array_equal(box, box.any(1)[:, None] & box.any(0))


PLAIN = {"jitter": 0.0, "policy": "none", "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
SIDE, BATCH = 32, 12
TEN = np.eye(10) * 0.9 + 0.01  # soft labels, with a smoothing of 0.1


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """24 smooth colorful images of ten classes."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(5)
    for number in range(24):
        rough = Image.fromarray(rng.integers(20, 236, (4, 5, 3), np.uint8))
        rough.resize((90, 72), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return [str(folder / f"{number}.png") for number in range(24)]


def batch_of(recipe, photos, **changes):
    """Returns images and labels of the first batch, as float64."""
    module, config = recipe
    config = dataclasses.replace(config, side=SIDE, **{**PLAIN, **changes})
    source = module.sources.Files(paths=photos, labels=[k % 10 for k in range(24)])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with module.training(config, 10, sharding, source)(batch_size=BATCH, seed=3) as batches:
        batch = next(batches)
    return [np.asarray(batch[name]).astype(np.float64) for name in ("images", "labels")]


def test_a_plain_recipe_crops_and_smooths_labels(recipe, photos):
    images, labels = batch_of(recipe, photos)
    assert images.shape == (BATCH, SIDE, SIDE, 3) and np.ptp(images) > 100
    np.testing.assert_allclose(labels, TEN[labels.argmax(1)], atol=1e-6)


@pytest.mark.parametrize("change", ({"jitter": 0.3}, {"policy": "rand"}, {"policy": "auto"}))
def test_the_recipe_has_the_configured_augmentation(recipe, photos, change):
    """Windows and labels stay, since each draw has its own numbers; most images change."""
    images, labels = batch_of(recipe, photos)
    changed, same = batch_of(recipe, photos, **change)
    np.testing.assert_array_equal(same, labels)
    differ = np.abs(changed - images).mean((1, 2, 3)) > 1
    assert differ.sum() >= BATCH // 2


def test_the_recipe_erases_rectangles(recipe, photos):
    images, _ = batch_of(recipe, photos)
    erased, _ = batch_of(recipe, photos, erasing=1.0)
    for before, after in zip(images, erased):
        rows, columns = np.nonzero((after != before).any(-1))
        box = after[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert len(rows) > 0.015 * SIDE * SIDE
        assert (box == recipe[0].MEAN).all()


def test_the_recipe_mixes_images_and_labels_equally(recipe, photos):
    images, labels = batch_of(recipe, photos)
    other_images, other_labels = np.roll(images, 1, 0), np.roll(labels, 1, 0)
    mixed, soft = batch_of(recipe, photos, mixup=0.8)
    (share,) = np.linalg.lstsq(
        (labels - other_labels).reshape(-1, 1), (soft - other_labels).ravel(), rcond=None
    )[0]
    assert 0.01 < share < 0.99
    np.testing.assert_allclose(soft, share * labels + (1 - share) * other_labels, atol=1e-5)
    assert np.abs(mixed - share * images - (1 - share) * other_images).max() <= 0.51

    cut, soft = batch_of(recipe, photos, cutmix=1.0)
    pasted = (cut == other_images).all((0, 3)) & (images != other_images).any((0, 3))
    assert 0 < pasted.sum() < SIDE * SIDE
    rows, columns = np.nonzero(pasted)
    assert pasted[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
    np.testing.assert_array_equal(cut[:, ~pasted], images[:, ~pasted])
    share = 1 - pasted.mean()
    np.testing.assert_allclose(soft, share * labels + (1 - share) * other_labels, atol=1e-5)


def test_an_out_of_range_label_is_nan(recipe):
    module, config = recipe
    for mixup in (0.0, 0.8):
        mix = jax.jit(module.mixing(dataclasses.replace(config, mixup=mixup, cutmix=0.0), 10))
        labels = jnp.array([0, 9, 10, -1])
        images = jnp.zeros((4, 8, 8, 3), jnp.uint8)
        soft = mix({"images": images, "labels": labels}, jax.random.key(0))["labels"]
        assert not np.isfinite(soft[2:]).any()
        assert np.isfinite(soft[:2]).all() == (mixup == 0)  # mixed with the previous image


def test_evaluation_resizes_and_cuts_out_the_center(recipe, tmp_path):
    """A ramp stays a ramp: a pixel's value is its position in the image."""
    module, config = recipe
    ramp = np.arange(120)[:, None, None] + np.arange(160)[None, :, None] * np.array([0.5, 1.0, 0.0])
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "ramp.png")
    source = module.sources.Files(paths=[str(tmp_path / "ramp.png")], labels=[3])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    config = dataclasses.replace(config, side=40, eval_resize=60)
    with module.evaluation(config, sharding, source)(batch_size=2) as batches:
        batch = next(batches)
    assert batch["mask"].tolist() == [True, False] and batch["labels"].tolist()[0] == 3
    # 160 x 120 becomes 80 x 60, whose middle 40 x 40 begins at (20, 10).
    y, x = (2 * (np.arange(40) + first + 0.5) - 0.5 for first in (10, 20))
    wanted = y[:, None, None] + x[None, :, None] * np.array([0.5, 1.0, 0.0])
    assert np.abs(np.asarray(batch["images"][0]) - wanted).max() < 1.1


def class_folders(recipe, folder, names):
    """Returns a source with an image in each of some class folders."""
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "0.png")
    return recipe[0].open_source(str(folder))


def test_other_class_folders_are_refused(recipe, tmp_path):
    train = importlib.import_module("train")
    parts = {"train": "abc", "same": "abc", "other": "bc"}
    data, same, other = (class_folders(recipe, tmp_path / k, v) for k, v in parts.items())
    assert train.number_of_classes(data, same, None) == 3
    for given in (None, 3):
        with pytest.raises(SystemExit, match=r"only in --data \['a'\], only in --val \[\]"):
            train.number_of_classes(data, other, given)


def test_tars_need_a_number_of_classes(recipe, tmp_path):
    train = importlib.import_module("train")
    write_tar(tmp_path / "some.tar", labelled(range(3)))
    source = recipe[0].open_source(f"{tmp_path}/some.tar")
    assert train.number_of_classes(source, source, 6) == 6
    with pytest.raises(SystemExit, match="--classes must be the number of classes, not None"):
        train.number_of_classes(source, source, None)
    folders = class_folders(recipe, tmp_path / "folders", "abc")
    for data, held_out in ((folders, folders), (source, folders), (folders, source)):
        assert train.number_of_classes(data, held_out, 5) == 5
        with pytest.raises(SystemExit, match="--classes must be 3, not 2"):
            train.number_of_classes(data, held_out, 2)
