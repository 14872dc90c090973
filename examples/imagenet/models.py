"""ViT (Dosovitskiy et al., 2021) and ResNet v1.5 (He et al., 2016) in flax.linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from configs.base import Config

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of 0 to 255


class ViT(nn.Module):
    """A Transformer over patches, whose tokens are averaged for the head."""

    classes: int
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[batch, side, side, 3] to [batch, tokens, width] to float32 [batch, classes]."""
        config, dtype = self.config, x.dtype
        x = nn.Conv(config.width, (config.patch,) * 2, config.patch, dtype=dtype)(x)
        x = x.reshape(len(x), -1, config.width)
        place = self.param("place", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + place.astype(dtype)
        for _ in range(config.depths[0]):
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(config.heads, dtype=dtype)(y, y)
            y = nn.Dense(4 * config.width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            x = x + nn.Dense(config.width, dtype=dtype)(nn.gelu(y))
        x = nn.LayerNorm(dtype=dtype)(x).astype(jnp.float32).mean(1)
        return nn.Dense(self.classes)(x)


class BatchNorm(nn.Module):
    """What flax's BatchNorm does with each group of pictures; 0, or no less than the batch: all.

    Moments of a batch that lies on many devices make these wait for each other. Those of a group
    don't, where a device has all of it. The averages take the mean over groups. The axis of groups
    is in this layer alone, since a `jax.vmap` over the whole model keeps XLA from adding a block's
    two gradients within cuDNN's convolution.
    """

    size: int  # pictures of a group
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    momentum: float = 0.9  # of the averages that evaluation takes
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[batch, rows, columns, channels] to the same."""
        channels = x.shape[-1:]
        scale = self.param("scale", self.scale_init, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        averages = [
            self.variable("batch_stats", name, start, channels)
            for name, start in (("mean", jnp.zeros), ("var", jnp.ones))
        ]
        # A ResNet-50 compiled for an H200 moves 1.6 % more bytes with an axis of one group, and
        # 0.9 % with one float32 copy of x for both moments and output.
        groups = x
        if train and 0 < self.size < len(x):
            groups = x.reshape(-1, self.size, *x.shape[1:])
        if train:
            exact = groups.astype(jnp.float32)
            mean, square = (y.mean((-4, -3, -2), keepdims=True) for y in (exact, exact**2))
            var = jnp.maximum(0, square - mean**2)
            if not self.is_initializing():
                for average, now in zip(averages, (mean, var)):
                    new = now.reshape(-1, *channels).mean(0)
                    average.value = self.momentum * average.value + (1 - self.momentum) * new
        else:
            mean, var = (average.value for average in averages)
        y = (groups - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias
        return y.reshape(x.shape).astype(x.dtype)


class ResNet(nn.Module):
    """Bottleneck blocks, with the stride in the 3x3 convolution."""

    classes: int
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[batch, side, side, 3] to float32 [batch, classes]."""
        dtype = x.dtype

        def norm(x: jax.Array, **options: Any) -> jax.Array:
            return BatchNorm(self.config.virtual_batch_size, **options)(x, train)

        def conv(x: jax.Array, features: int, size: int, stride: int = 1) -> jax.Array:
            return nn.Conv(features, (size, size), stride, use_bias=False, dtype=dtype)(x)

        x = nn.relu(norm(conv(x, self.config.width, 7, 2)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.config.depths):
            width = self.config.width << stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                y = nn.relu(norm(conv(x, width, 1)))
                y = nn.relu(norm(conv(y, width, 3, stride)))
                y = norm(conv(y, 4 * width, 1), scale_init=nn.initializers.zeros)
                x = norm(conv(x, 4 * width, 1, stride)) if x.shape != y.shape else x
                x = nn.relu(x + y)
        return nn.Dense(self.classes)(x.mean((1, 2)).astype(jnp.float32))


def build(config: Config, classes: int) -> nn.Module:
    """The model of a recipe."""
    return {"vit": ViT, "resnet": ResNet}[config.model](classes, config)


def normalize(images: jax.Array, dtype: str) -> jax.Array:
    """Bytes to values about 0."""
    x = (images.astype(jnp.float32) - jnp.array(MEAN)) / jnp.array(STD)
    return x.astype(dtype)
