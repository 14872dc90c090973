"""ViT (Dosovitskiy et al., 2021) and ResNet v1.5 (He et al., 2016) in flax.linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from configs.base import Config

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, for 0 to 255


class ViT(nn.Module):
    """A vision transformer with global average pooling."""

    classes: int
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps images [batch, side, side, 3] to logits, float32 [batch, classes]."""
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
    """Batch normalization of each group of images (ghost batch normalization).

    If a batch is split over devices, computing its moments makes the devices wait for each other.
    The moments of a group do not, if a single device has the whole group. The running averages take
    the mean over groups. Only this layer has an axis for groups: a `jax.vmap` over the whole model
    prevents XLA from adding the two gradients of a block within cuDNN's convolution.
    """

    size: int  # images of a group; 0, or at least the batch size: the whole batch
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    momentum: float = 0.9  # of the running averages
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Normalizes x of shape [batch, rows, columns, channels]."""
        channels = x.shape[-1:]
        scale = self.param("scale", self.scale_init, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        averages = [
            self.variable("batch_stats", name, start, channels)
            for name, start in (("mean", jnp.zeros), ("var", jnp.ones))
        ]
        # Compiled for an H200, a ResNet-50 moves 1.6 % more bytes with an axis for a single group,
        # and 0.9 % more with a shared float32 copy of x for moments and output.
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
        """Maps images [batch, side, side, 3] to logits, float32 [batch, classes]."""
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
    """Returns the model of a configuration."""
    return {"vit": ViT, "resnet": ResNet}[config.model](classes, config)


def normalize(images: jax.Array, dtype: str) -> jax.Array:
    """Converts bytes to values with mean 0 and standard deviation 1."""
    x = (images.astype(jnp.float32) - jnp.array(MEAN)) / jnp.array(STD)
    return x.astype(dtype)
