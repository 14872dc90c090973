"""DALI's operators that call Python, with the callbacks of this package instead of DALI's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from nvidia.dali import fn, ops


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

    # Of DALI's name, which nodes are called by, and with them states: a run of DALI's own plugin
    # can go on here.
    class _JaxFunction(implementation._JaxFunction):
        def __init__(self, function: Callable[..., Any], device: str, **arguments: Any):
            self.function = function
            super(implementation._JaxFunction, self).__init__(
                function_id=id(function), device=device, **arguments
            )

    return _JaxFunction


@functools.cache
def dlpack_operator() -> Callable[..., Any]:
    """DALI's ``fn.dl_tensor_python_function``, whose callback gets capsules, without its wrapper.

    DALI makes the pipeline the current one around each call, for which it asks how deep the stack
    is: 80 to 120 us on two CPU cores. No operators are made in a callback, so nothing needs it.
    """

    # Of DALI's name, as above. Where a later DALI has no such method, its own wrapper is called,
    # which takes longer.
    class DLTensorPythonFunction(ops.DLTensorPythonFunction):
        def _function_wrapper_dlpack(
            self,
            batch_processing: bool,
            function: Callable[..., Any],
            num_outputs: int,
            *dlpack_inputs: Any,
        ) -> Any:
            return function(*dlpack_inputs)

        @property
        def preserve(self: Any) -> bool:
            # DALI's schema never prunes it, whatever is passed: code that prints, say, has no
            # outputs. False is a choice. (Not public, as is the method above.)
            preserve = self._init_args.get("preserve")
            return bool(self._preserve if preserve is None else preserve)

    wrap: Any = getattr(fn, "_wrap_op_fn", None)  # what makes all of DALI's functions of operators
    if wrap is None:
        return fn.dl_tensor_python_function
    operator: Callable[..., Any] = wrap(DLTensorPythonFunction, "dl_tensor_python_function", "")
    return operator
