"""Normalization, MixUp, CutMix and label smoothing of examples/imagenet, as in torchvision."""

import dataclasses
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from parity import DRAWS, FAR, differences, distance, pixels, tensor

RECIPE = pathlib.Path(__file__).parents[2] / "examples" / "imagenet"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10


@pytest.fixture
def recipe(monkeypatch):
    """The modules `input` and `models`, and a configuration without smoothing."""
    monkeypatch.syspath_prepend(RECIPE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with jax.numpy_dtype_promotion("standard"):
        config = importlib.import_module("configs.vit_s16").config
        plain = dataclasses.replace(config, smoothing=0.0)
        yield importlib.import_module("input"), importlib.import_module("models"), plain


def batch_of(photos, side=200):
    """Returns different images [8, side, side, 3] and labels [8]."""
    cut = [one[k : k + side, k : k + side] for k in (0, 60) for one in photos]
    return np.stack(cut), np.arange(8, dtype=np.int32)


def normalized(images):
    return v2.Normalize(MEAN, STD)(F.to_dtype(tensor(images), torch.float32, scale=True))


def test_normalization(recipe, photos):
    images, _ = batch_of(photos)
    ours = recipe[1].normalize(images, "float32")
    assert differences("normalization", [ours], [pixels(normalized(images))]).max() < 1e-5


def test_erased_pixels_are_the_mean_of_normalized_images(recipe):
    module, models, _ = recipe
    erased = models.normalize(np.array(module.MEAN, np.uint8)[None, None, None], "float32")
    assert differences("erased pixels, normalized", [erased], [np.zeros((1, 1, 1, 3))]).max() < 0.01


def applied(mix, images, labels, key):
    """Images and labels after a ``batch_map``."""
    batch = jax.jit(mix)({"images": images, "labels": labels}, key)
    return batch["images"], batch["labels"]


def test_mixup_of_the_same_share(recipe, photos):
    module, _, config = recipe
    mix = module.mixing(dataclasses.replace(config, cutmix=0.0), CLASSES)
    images, labels = batch_of(photos)
    transform = v2.MixUp(num_classes=CLASSES)
    for seed in range(4):
        mixed, soft = applied(mix, images, labels, jax.random.key(seed))
        share = float(soft[3, 3])
        target = torch.from_numpy(labels.astype(np.int64))
        params = {"lam": share, "labels": target, "batch_size": 8}
        expected = transform.transform(tensor(images).float(), params)
        assert differences("MixUp", [mixed], [pixels(expected)]).max() <= 0.5001
        theirs = transform.transform(target, params)
        assert differences("MixUp, labels", [soft], [theirs]).max() < 1e-6


def test_cutmix_of_the_same_box(recipe, photos):
    module, _, config = recipe
    mix = module.mixing(dataclasses.replace(config, mixup=0.0), CLASSES)
    images, labels = batch_of(photos)
    marks = np.zeros_like(images)
    marks[1::2] = 255  # each next to another image
    transform = v2.CutMix(num_classes=CLASSES)
    for seed in range(4):
        key = jax.random.key(seed)
        mixed, soft = applied(mix, images, labels, key)
        ys, xs = np.nonzero(np.asarray(applied(mix, marks, labels, key)[0])[0, ..., 0])
        box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) if len(xs) else (0, 0, 0, 0)
        assert len(xs) == (box[2] - box[0]) * (box[3] - box[1])
        target = torch.from_numpy(labels.astype(np.int64))
        share = 1.0 - len(xs) / 200**2
        params = {"box": box, "lam_adjusted": share, "labels": target, "batch_size": 8}
        expected = transform.transform(tensor(images), params)
        assert differences("CutMix", [mixed], [pixels(expected)]).max() == 0
        theirs = transform.transform(target, params)
        assert differences("CutMix, labels", [soft], [theirs]).max() < 1e-6


def drawn(mix, height=24, width=36):
    """Returns label shares and boxes (top, bottom, left, right) of DRAWS batches of two images."""
    images = jnp.zeros((2, height, width, 1), jnp.uint8).at[1].set(255)

    def one(key):
        mixed, soft = applied(mix, images, jnp.arange(2), key)
        other = mixed[0, ..., 0] > 0
        rows, columns = other.any(1), other.any(0)
        sides = [
            side
            for one in (rows, columns)
            for side in (one.argmax(), one.shape[0] - one[::-1].argmax())
        ]
        return soft[0, 0], jnp.stack(sides), rows.any()

    keys = jax.random.split(jax.random.key(0), DRAWS)
    return map(np.asarray, jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=500))(keys))


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_mixup_has_torchvisions_shares(recipe, alpha):
    module, _, config = recipe
    mix = module.mixing(dataclasses.replace(config, mixup=alpha, cutmix=0.0), CLASSES)
    shares, _, _ = drawn(mix)
    torch.manual_seed(0)
    transform = v2.MixUp(alpha=alpha, num_classes=CLASSES)
    theirs = np.array([transform.make_params([])["lam"] for _ in range(DRAWS)])
    assert distance(f"MixUp of {alpha}, shares", shares, theirs.astype(np.float32)) < FAR


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_cutmix_has_torchvisions_shares_and_boxes(recipe, alpha):
    module, _, config = recipe
    mix = module.mixing(dataclasses.replace(config, mixup=0.0, cutmix=alpha), CLASSES)
    shares, boxes, some = drawn(mix)
    torch.manual_seed(0)
    transform = v2.CutMix(alpha=alpha, num_classes=CLASSES)
    params = [transform.make_params([torch.empty(2, 1, 24, 36)]) for _ in range(DRAWS)]
    theirs = np.array([one["lam_adjusted"] for one in params]).astype(np.float32)
    assert distance(f"CutMix of {alpha}, shares", shares, theirs) < FAR
    left, top, right, bottom = np.array([one["box"] for one in params])[theirs < 1].T
    sides = {"top": top, "bottom": bottom, "left": left, "right": right}
    for (name, other), ours in zip(sides.items(), boxes[some].T):
        assert distance(f"CutMix of {alpha}, {name}", ours, other) < FAR, name


def test_a_batch_has_mixup_or_cutmix_as_in_a_random_choice(recipe):
    module, _, config = recipe
    images = jnp.zeros((2, 24, 36, 1), jnp.uint8).at[1].set(200)
    mix = module.mixing(config, CLASSES)

    def is_mixup(key):
        mixed, _ = applied(mix, images, jnp.arange(2), key)
        return ((mixed > 0) & (mixed < 200)).any()

    keys = jax.random.split(jax.random.key(0), 2000)
    share = float(jax.lax.map(is_mixup, keys, batch_size=100).mean())
    unmixed = 0.03  # a share that rounds to 0 or 1
    assert 0.5 - 0.06 - unmixed < share < 0.5 + 0.06


def test_smoothed_labels_give_torchs_loss(recipe, photos):
    module, _, config = recipe
    images, labels = batch_of(photos)
    key, logits = jax.random.key(1), np.random.default_rng(0).normal(size=(8, CLASSES))
    plain = applied(module.mixing(config, CLASSES), images, labels, key)[1]
    smoothed = dataclasses.replace(config, smoothing=0.1)
    soft = applied(module.mixing(smoothed, CLASSES), images, labels, key)[1]
    ours = optax.softmax_cross_entropy(jnp.array(logits), soft).mean()
    theirs = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(np.array(plain, float)), label_smoothing=0.1
    )
    assert float(ours) == pytest.approx(theirs.item(), rel=1e-5)
