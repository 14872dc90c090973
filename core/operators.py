"""DALI's operators that call Python, with the callbacks of this package instead of DALI's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from nvidia.dali import Pipeline, fn, ops
from nvidia.dali.data_node import DataNode


@functools.cache
def jax_operator() -> Any:
    """The class of `jax_function`'s: DALI's own callback makes a jax.Array of each input.

    Raises:
        RuntimeError: Where JAX is older than DALI's plugin wants.
    """
    try:
        from nvidia.dali.plugin.jax.fn import _jax_function_impl as implementation
    except (AssertionError, ImportError) as error:
        raise RuntimeError(
            f"fn.jax_function needs the JAX that DALI's plugin wants, and JAX is {jax.__version__}"
            f" ({error}). Use a newer JAX, or fn.dl_tensor_python_function with "
            "batch_processing=True, which JAX functions may be called in, too"
        ) from error

    class JaxFunction(implementation._JaxFunction):
        def __init__(self, function: Callable[..., Any], device: str, **arguments: Any):
            self.function = function
            super(implementation._JaxFunction, self).__init__(
                function_id=id(function), device=device, **arguments
            )

    return JaxFunction


def dlpack_operator(
    pipeline: Pipeline, nodes: Sequence[DataNode], function: Callable[..., Any], **arguments: Any
) -> Any:
    """The outputs of `dl_tensor_python_function`'s operator for a callback that gets capsules.

    DALI's makes the pipeline the current one around each call, for which it asks how deep the
    stack is: 50 us and more. No operators are made in a callback, so that nothing needs it.
    """
    if getattr(pipeline, "_debug_on", False):  # DALI's debug mode knows its own functions only
        return fn.dl_tensor_python_function(*nodes, function=function, **arguments)
    return _DLTensorPythonFunction(function=function, **arguments)(*nodes)


class _DLTensorPythonFunction(ops.DLTensorPythonFunction):
    # Where a later DALI has no such method, its own callback is run, which takes longer.
    def _function_wrapper_dlpack(
        self,
        batch_processing: bool,
        function: Callable[..., Any],
        num_outputs: int,
        *capsules: Any,
    ) -> Any:
        return function(*capsules)
