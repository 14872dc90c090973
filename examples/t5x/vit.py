"""A small vision transformer as a T5X model, with images from DALI.

T5X, its gin files and its checkpoints do not change. ``vit.gin`` configures the model and the input
of ``vit_input.py``::

    python -m t5x.train --gin_file=vit.gin --gin.FOLDER="'imagenet/train'" \\
        --gin.VALIDATION="'imagenet/val'" --gin.CLASSES=1000 --gin.MODEL_DIR="'/tmp/vit'" \\
        --gin.TRAIN_STEPS=1000

This folder must be on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.partitioning import param_with_axes
from t5x import models


class Encoder(nn.Module):
    """A vision transformer: patches, blocks of attention and MLP, and the mean of the tokens.

    Attributes:
        classes: Number of classes.
        width: Number of features of a token.
        depth: Number of blocks.
        heads: Number of attention heads.
        patch: Side of a patch in pixels.
    """

    classes: int
    width: int = 64
    depth: int = 2
    heads: int = 4
    patch: int = 16

    def linear(self, name: str, x: jax.Array, features: int, axes: tuple[str, str]) -> jax.Array:
        shape = (x.shape[-1], features)
        kernel = param_with_axes(
            name, nn.initializers.lecun_normal(), shape, jnp.float32, axes=axes
        )
        return x @ kernel

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        n, rows, columns, _ = images.shape
        x = images.astype(jnp.float32) / 127.5 - 1
        x = x.reshape(n, rows // self.patch, self.patch, columns // self.patch, self.patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, 3 * self.patch**2)
        x = self.linear("patches", x, self.width, ("joined_kv", "embed"))
        x += param_with_axes(
            "positions",
            nn.initializers.normal(0.02),
            x.shape[1:],
            jnp.float32,
            axes=("length", "embed"),
        )
        for k in range(self.depth):
            y = nn.standardize(x)
            y = self.linear(f"qkv{k}", y, 3 * self.width, ("embed", "joined_kv"))
            q, key, value = jnp.split(
                y.reshape(n, -1, self.heads, 3 * self.width // self.heads), 3, -1
            )
            y = nn.dot_product_attention(q, key, value).reshape(x.shape)
            x += self.linear(f"out{k}", y, self.width, ("joined_kv", "embed"))
            y = nn.gelu(self.linear(f"up{k}", nn.standardize(x), 4 * self.width, ("embed", "mlp")))
            x += self.linear(f"down{k}", y, self.width, ("mlp", "embed"))
        return self.linear("classes", nn.standardize(x).mean(1), self.classes, ("embed", "vocab"))


class Classifier(models.BaseModel):
    """A T5X model for batches with ``images``, ``labels`` and, in evaluation, ``weights``."""

    FEATURE_CONVERTER_CLS = None  # batches need no conversion

    def __init__(self, module: nn.Module, optimizer_def: Any):
        super().__init__(optimizer_def)
        self.module = module

    def get_initial_variables(
        self, rng: jax.Array, input_shapes: Mapping[str, Any], input_types: Any = None
    ) -> Any:
        return self.module.init(rng, jnp.zeros(input_shapes["images"], jnp.uint8))

    def loss_fn(
        self, params: Any, batch: Mapping[str, jax.Array], dropout_rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        logits, labels = self.score_batch(params, batch), batch["labels"]
        weights = batch.get("weights", jnp.ones(labels.shape))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # The mean over samples without padding, since T5X's trainer does not divide.
        loss = (losses * weights).sum() / jnp.maximum(weights.sum(), 1)
        metrics = models.compute_base_metrics(
            logits[:, None], labels[:, None], weights[:, None] > 0, loss
        )
        return loss, metrics

    def predict_batch_with_aux(self, params: Any, batch: Any, rng: Any = None) -> Any:
        return self.score_batch(params, batch).argmax(-1), {}

    def score_batch(self, params: Any, batch: Any, return_intermediates: bool = False) -> Any:
        return self.module.apply({"params": params}, batch["images"])
