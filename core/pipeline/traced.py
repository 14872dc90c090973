"""Detection of calls within functions that JAX traces."""

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

    Callers ask `trace_state_clean` first, which is faster. It is also False within grad and vmap,
    where a call is allowed, because each call runs the Python code again. Only within jit and scan
    is a computed number a Tracer.
    """
    if isinstance(jnp.negative(np.float32(0)), jax.core.Tracer):
        raise RuntimeError(
            "next() was called while JAX traces a function (jax.jit, lax.scan): every call of the "
            "compiled function would get this same batch. Call next() outside, and pass the batch "
            "as an argument"
        )
