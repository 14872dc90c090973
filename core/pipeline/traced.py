"""Detects calls within functions that JAX traces."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

try:  # private in JAX; without it, calls within traced functions are not detected
    from jax._src.core import trace_state_clean as trace_state_clean
except ImportError:
    trace_state_clean: Callable[[], bool] = lambda: True  # type: ignore[no-redef]  # noqa: E731


def check_not_traced() -> None:
    """Raises RuntimeError within jax.jit, scan etc., where a batch would become a constant.

    Callers call this function if `trace_state_clean`, which is faster, returns False. It also
    returns False within grad and vmap, where a call is allowed, because the Python code runs each
    time. A computed number is a Tracer only within jit and scan.
    """
    if isinstance(jnp.negative(np.float32(0)), jax.core.Tracer):
        raise RuntimeError(
            "next() was called while JAX traces a function (jax.jit, lax.scan): every call of the "
            "compiled function would get this same batch. Call next() outside, and pass the batch "
            "as an argument"
        )
