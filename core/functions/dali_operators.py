"""DALI's operators that call Python functions, without DALI's own wrappers around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from nvidia.dali import fn, ops


@functools.cache
def jax_operator() -> Any:
    """Returns DALI's operator class for JAX functions, without DALI's conversion to jax.Arrays.

    The class passes DALI's tensors to the function.

    Raises:
        RuntimeError: If JAX is older than DALI's plugin requires.
    """
    try:
        from nvidia.dali.plugin.jax.fn import _jax_function_impl as implementation
    except (AssertionError, ImportError) as error:
        raise RuntimeError(
            f"fn.jax_function needs the JAX version that DALI's plugin requires, but JAX is "
            f"{jax.__version__} ({error}). Use a newer JAX, or fn.dl_tensor_python_function with "
            "batch_processing=True, which may call JAX functions, too"
        ) from error

    # The class has the name of DALI's class, because names of operators and states contain it. A
    # run that began with DALI's own plugin can therefore be resumed with this class.
    class _JaxFunction(implementation._JaxFunction):
        def __init__(self, function: Callable[..., Any], device: str, **arguments: Any):
            self.function = function
            super(implementation._JaxFunction, self).__init__(
                function_id=id(function), device=device, **arguments
            )

    return _JaxFunction


@functools.cache
def dlpack_operator() -> Callable[..., Any]:
    """Returns DALI's ``fn.dl_tensor_python_function`` without the wrapper around its callback.

    For each call, the wrapper makes the pipeline the current pipeline. It inspects the stack for
    this, which takes 80 to 120 us on two CPU cores. Callbacks don't create operators, so they don't
    need a current pipeline.
    """

    # The class has the name of DALI's class, as above. If a later version of DALI does not call
    # _function_wrapper_dlpack, DALI's slower wrapper is used.
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
            # DALI's schema never prunes this operator, since a function without outputs may print,
            # for example. preserve=False is the user's choice. (_preserve is private, like the
            # method above.)
            preserve = self._init_args.get("preserve")
            return bool(self._preserve if preserve is None else preserve)

    wrap: Any = getattr(fn, "_wrap_op_fn", None)  # private; it creates fn's functions of operators
    if wrap is None:
        return fn.dl_tensor_python_function
    operator: Callable[..., Any] = wrap(DLTensorPythonFunction, "dl_tensor_python_function", "")
    return operator
