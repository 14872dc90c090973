"""DALI's operators that call Python, with the callbacks of this package instead of DALI's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from nvidia.dali import fn, ops


@functools.cache
def jax_operator() -> Any:
    """The operator class of `jax_function`, without DALI's callback, which makes jax.Arrays.

    Raises:
        RuntimeError: If JAX is older than DALI's plugin requires.
    """
    try:
        from nvidia.dali.plugin.jax.fn import _jax_function_impl as implementation
    except (AssertionError, ImportError) as error:
        raise RuntimeError(
            f"fn.jax_function needs the JAX that DALI's plugin wants, and JAX is {jax.__version__}"
            f" ({error}). Use a newer JAX, or fn.dl_tensor_python_function with "
            "batch_processing=True, which JAX functions may be called in, too"
        ) from error

    # DALI's class name, which operators, and so states, are named after: a run that DALI's own
    # plugin began can go on here.
    class _JaxFunction(implementation._JaxFunction):
        def __init__(self, function: Callable[..., Any], device: str, **arguments: Any):
            self.function = function
            super(implementation._JaxFunction, self).__init__(
                function_id=id(function), device=device, **arguments
            )

    return _JaxFunction


@functools.cache
def dlpack_operator() -> Callable[..., Any]:
    """DALI's ``fn.dl_tensor_python_function`` without the wrapper around its callback.

    The wrapper makes the pipeline the current one for each call, and for this looks up the depth
    of the stack: 80 to 120 us on two CPU cores. Callbacks make no operators and don't need it.
    """

    # DALI's class name, as above. If a later DALI has no such method, its slower wrapper is used.
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
            # DALI's schema never prunes this operator: code that prints, say, has no outputs.
            # preserve=False is the user's choice. (Not public, as is the method above.)
            preserve = self._init_args.get("preserve")
            return bool(self._preserve if preserve is None else preserve)

    wrap: Any = getattr(fn, "_wrap_op_fn", None)  # makes the functions in fn of operators
    if wrap is None:
        return fn.dl_tensor_python_function
    operator: Callable[..., Any] = wrap(DLTensorPythonFunction, "dl_tensor_python_function", "")
    return operator
