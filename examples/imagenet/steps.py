"""The optimizer, the training step and the evaluation step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from configs.base import Config
from models import build, normalize


def optimizer(config: Config, steps_per_epoch: int) -> optax.GradientTransformation:
    """Returns an optimizer with warm-up and cosine decay.

    Biases and the scales of normalizations have no weight decay.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        config.rate,
        max(1, int(config.warmup_epochs * steps_per_epoch)),
        config.epochs * steps_per_epoch,
    )

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    clip = optax.clip_by_global_norm(config.clip)
    if config.optimizer == "adamw":
        return optax.chain(clip, optax.adamw(rate, weight_decay=config.weight_decay, mask=decays))
    decay = optax.add_decayed_weights(config.weight_decay, decays)
    return optax.chain(clip, decay, optax.sgd(rate, momentum=0.9, nesterov=True))


def steps_of(config: Config, classes: int, steps_per_epoch: int) -> tuple[Callable[..., Any], ...]:
    """Returns functions that create a state, train a step, and evaluate a batch."""
    model, updater = build(config, classes), optimizer(config, steps_per_epoch)

    # The key is an argument. If it were a constant, XLA would compute all weights at compile time,
    # which took minutes for a ViT-B.
    @jax.jit
    def begin_with(key: jax.Array) -> Any:
        images = jnp.zeros((1, config.side, config.side, 3), config.dtype)
        variables = model.init(key, images, train=False)
        params, stats = variables["params"], variables.get("batch_stats", {})
        average = jax.tree.map(jnp.copy, params)
        return {"params": params, "stats": stats, "ema": average, "opt": updater.init(params)}

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["stats"]}
            x = normalize(images, config.dtype)
            logits, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy(logits, labels).mean()
            return loss, new.get("batch_stats", {})

        (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = updater.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["ema"], 1 - config.ema)
        return {"params": params, "stats": stats, "ema": average, "opt": opt}, loss

    @jax.jit
    def count(state: Any, images: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Returns the number of images, the number of correct images, and the sum of losses."""
        variables = {"params": state["ema"], "batch_stats": state["stats"]}
        logits = model.apply(variables, normalize(images, config.dtype), train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        losses = jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)
        right = logits.argmax(-1) == labels
        return mask.sum(), (right & mask).sum(), jnp.where(mask, losses, 0).sum()

    def begin() -> Any:
        return begin_with(jax.random.key(0))

    return begin, jax.jit(step, donate_argnums=0), count
