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


class ResNet(nn.Module):
    """Bottleneck blocks, with the stride in the 3x3 convolution.

    The normalization's moments are those of the batch that it gets, which may lie on many devices.
    """

    classes: int
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[batch, side, side, 3] to float32 [batch, classes]."""
        dtype = x.dtype

        def norm(x: jax.Array, **options: Any) -> jax.Array:
            return nn.BatchNorm(not train, momentum=0.9, dtype=dtype, **options)(x)

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
