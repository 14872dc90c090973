"""`batch_map`: functions that change each placed batch before ``next()`` delivers it.

The functions run in the thread that calls ``next()``, as one compiled computation. Every process
therefore runs them in the same order among the caller's computations. The key that a function
receives depends only on the seed, the epoch, the step and the function's index::

    fold_in(fold_in(fold_in(jax.random.key(seed), epoch), step), number of the function)
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ..arguments import call_fault
from ..errors import BatchMapError
from ..messages.printable import printable_repr
from ..messages.redacted_errors import redacted_error
from ..stats import span
from .dtypes import is_number, narrowed

MapFunction = Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]
_WORD = 0xFFFFFFFF
_KEY_WORDS = jax.ShapeDtypeStruct((4,), np.uint32)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions, in the text of a computation
_STAYS = "The batch is still the next one"


class ResultPlacement(Protocol):
    """The placement of arrays that functions of the batch return."""

    def is_on_host(self, name: str) -> bool:
        """Returns whether an array of the batch stays on the host."""
        ...

    def result_sharding(self, name: str, shape: Sequence[int], rows: int) -> Sharding | None:
        """Returns the sharding of a returned array; None leaves its choice to the compiler."""
        ...


class BatchMap:
    """The functions of ``batch_map``, compiled together.

    The functions are compiled once for all batches with the same names, shapes, dtypes and
    shardings. Iterators that share a `BatchMap` share the compiled computations.

    Args:
        functions: A function of (batch, key), or several, applied in order.

    Attributes:
        functions: The functions.
        names: Names of the functions, for messages and states.

    Raises:
        TypeError: If a value is not a function of two arguments.
    """

    def __init__(self, functions: MapFunction | Sequence[MapFunction]):
        several = functions if isinstance(functions, (list, tuple)) else [functions]
        for function in several:
            _check_function(function)
        self.functions = tuple(several)
        self.names = tuple(map(_name_of, self.functions))
        self._label = ", ".join(self.names)
        self._apply = _applied(self.functions, self.names)
        self._repeatable: set[Any] = set()  # the kinds of batches that were checked
        # By the names, shapes, dtypes and shardings of the arrays: the compiled function, and the
        # names of its results in their original order, because jax.jit sorts the names.
        self._compiled: dict[Any, tuple[Callable[..., dict[str, jax.Array]], list[str]]] = {}

    def __reduce__(self) -> Any:
        return BatchMap, (self.functions,)

    def __repr__(self) -> str:
        return f"[{self._label}]"

    def __call__(
        self,
        batch: Mapping[str, Any],
        seed: int,
        epoch: int,
        step: int,
        mask: str | None = None,
        placement: ResultPlacement | None = None,
        as_numpy: bool = False,
    ) -> dict[str, Any]:
        """Applies the functions to a batch, and returns the resulting batch.

        The arrays of the batch are not donated: if a function fails, they are needed again.

        Args:
            batch: The batch; its text, objects and arrays that a sharding keeps on the host bypass
                the functions.
            seed: The seed of the iterator.
            epoch: The epoch of the batch.
            step: The number of the batch in its epoch.
            mask: The name of the mask, which the functions must return.
            placement: The placement of the results, for global arrays.
            as_numpy: Whether to compute on the CPU and return NumPy arrays, if all arrays of the
                batch are NumPy arrays.

        Raises:
            BatchMapError: If a function raises.
            RuntimeError: If a function differs between two calls, e.g. because of numpy.random, or
                the arrays belong to several processes and this is not the main thread.
            TypeError, ValueError: If a function does not return a dict of arrays that includes the
                mask unchanged.
        """
        arrays, unmapped = _split(batch, placement)
        self._check_thread(arrays)
        words = np.array([seed >> 32 & _WORD, seed & _WORD, epoch & _WORD, step & _WORD], np.uint32)
        on_host = as_numpy and all(isinstance(array, np.ndarray) for array in arrays.values())
        # The caller's transfer_guard is meant for the caller's computations.
        with span("dalijax.batch_map", function=self._label), jax.transfer_guard("allow"):
            if not on_host:
                return self._run(arrays, words, mask, placement, unmapped) | unmapped
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                results = self._run(arrays, words, mask, None, unmapped)
            return {name: np.asarray(array) for name, array in results.items()} | unmapped

    def _run(
        self,
        arrays: Mapping[str, Any],
        words: np.ndarray,
        mask: str | None,
        placement: ResultPlacement | None,
        unmapped: Mapping[str, Any],
    ) -> dict[str, jax.Array]:
        """Returns the results of the functions, compiled for the first batch of each kind.

        Batches are of the same kind if their arrays have the same names, shapes, dtypes and
        shardings, and the mask has the same name.
        """
        kind = (mask, *((k, a.shape, a.dtype, _sharding_of(a)) for k, a in arrays.items()))
        if kind not in self._compiled:
            specs = self._result_specs(_specs(arrays), mask, placement, unmapped)
            shardings = {name: spec.sharding for name, spec in specs.items()}
            jitted = jax.jit(self._apply, out_shardings=shardings if placement else None)
            self._compiled[kind] = jitted, list(specs)
        compiled, names = self._compiled[kind]
        try:
            results = compiled(arrays, words)
            return {name: results[name] for name in names}
        except BatchMapError:
            raise
        except Exception as error:
            raise BatchMapError(
                f"batch_map: {self._label} failed with {type(error).__name__}: {error}. {_STAYS}"
            ) from redacted_error(error)

    def specs(
        self,
        batch: Mapping[str, Any],
        mask: str | None = None,
        placement: ResultPlacement | None = None,
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape, dtype and sharding of each array of the result, without computing it.

        Args:
            batch: The jax.ShapeDtypeStructs of a batch.
            mask: The name of the mask, which the functions must return.
            placement: The placement of the results, for global arrays.

        Raises:
            BatchMapError, TypeError, ValueError: As for a call.
        """
        arrays = {
            name: spec
            for name, spec in batch.items()
            if is_number(spec.dtype) and not _is_on_host(name, placement)
        }
        unmapped = {name: spec for name, spec in batch.items() if name not in arrays}
        return self._result_specs(_specs(arrays), mask, placement, unmapped) | unmapped

    def _result_specs(
        self,
        arrays: Mapping[str, jax.ShapeDtypeStruct],
        mask: str | None,
        placement: ResultPlacement | None,
        unmapped: Mapping[str, Any],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Traces the functions, checks the results, and returns their specs.

        Args:
            arrays: Specs of the arrays that the functions receive.
            mask: The name of the mask; None if there is no mask.
            placement: The placement of the results, for global arrays.
            unmapped: The values that bypass the functions.

        Returns:
            The shape, dtype and sharding of each result, by name.
        """
        rows = next(iter(arrays.values())).shape[0] if arrays else 0
        self._check_repeatable(arrays)
        results = jax.eval_shape(self._apply, dict(arrays), _KEY_WORDS)
        if mask is not None and mask not in unmapped:
            self._check_mask(results.get(mask), mask, arrays[mask].shape)
        if repeated := sorted(results.keys() & unmapped.keys()):
            raise ValueError(
                f"batch_map: {self._label} returned arrays named {repeated}, like text, objects "
                "or arrays on the host, which bypass batch_map. Use other names"
            )
        order = [name for name in arrays if name in results]
        specs = {}
        for name in dict.fromkeys([*order, *results]):
            shape = results[name].shape
            sharding = placement.result_sharding(name, shape, rows) if placement else None
            specs[name] = jax.ShapeDtypeStruct(shape, results[name].dtype, sharding=sharding)
        return specs

    def _check_repeatable(self, arrays: Mapping[str, Any]) -> None:
        """Raises RuntimeError if two traces of the functions give different computations.

        JAX traces the functions once. Numbers that they draw from other generators than JAX's, or
        other values that differ between calls, would be equal in every batch.
        """

        kind = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        if kind in self._repeatable:
            return

        def trace() -> Any:
            apply = functools.partial(self._apply)  # a new object, for which JAX has no trace
            with jax.disable_jit():  # calls functions that JAX has traced, too
                return jax.make_jaxpr(apply)(dict(arrays), _KEY_WORDS)

        if not _are_equal(trace(), trace()):
            raise RuntimeError(
                f"batch_map: {self._label} differs between two calls: it probably draws random "
                "numbers from numpy.random or another generator, or depends on the time. It is "
                "compiled once, so that every batch would get the same numbers. Use jax.random "
                "with the key, the second argument"
            )
        self._repeatable.add(kind)

    def _check_mask(
        self, result: jax.ShapeDtypeStruct | None, mask: str, shape: tuple[int, ...]
    ) -> None:
        if result is None:
            raise ValueError(
                f"batch_map: {self._label} did not return the mask {mask!r}, without which padding "
                "counts as data: return it, too, as in {**batch, 'images': images}"
            )
        if result.dtype != bool:
            raise TypeError(
                f"batch_map: {self._label} returned the mask {mask!r} as {result.dtype}, not bool: "
                "return it unchanged"
            )
        if result.shape != shape:
            raise ValueError(
                f"batch_map: {self._label} returned the mask {mask!r} with the shape "
                f"{result.shape}, not {shape}: return it unchanged, as a row of the mask describes "
                "a row of the batch, and a changed copy under another name"
            )

    def _check_thread(self, arrays: Mapping[str, Any]) -> None:
        """Raises RuntimeError outside the main thread if an array spans several processes."""
        if threading.current_thread() is threading.main_thread():
            return
        if all(isinstance(a, np.ndarray) or a.is_fully_addressable for a in arrays.values()):
            return
        raise RuntimeError(
            f"batch_map: {self._label} must run in the same order among the other computations in "
            "all processes, and this is not the main thread: take batches there, without a thread "
            f"that prefetches or peeks. {_STAYS}"
        )


def _check_function(function: object) -> None:
    """Raises TypeError if a value can't be called with (batch, key)."""
    if not callable(function):
        raise TypeError(
            f"batch_map must be a function of (batch, key), or a list of them, not "
            f"{printable_repr(function)}"
        )
    if fault := call_fault(function, {}, None):
        signature = inspect.signature(function)
        raise TypeError(
            f"batch_map calls {_name_of(function)}{signature} with (batch, key): {fault}"
        )


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return str(name).replace(" ", "_")


def _applied(
    functions: Sequence[MapFunction], names: Sequence[str]
) -> Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]]:
    """Composes the functions of ``batch_map``.

    Returns:
        A function of a batch and of four uint32 words: the upper and the lower half of the seed,
        the epoch and the step. It returns the resulting batch.
    """

    def apply(batch: dict[str, jax.Array], words: jax.Array) -> dict[str, jax.Array]:
        key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, words[2]), words[3])
        for number, (function, name) in enumerate(zip(functions, names)):
            try:
                result = function(dict(batch), jax.random.fold_in(key, number))
            except Exception as error:
                raise BatchMapError(
                    f"batch_map: {name}() raised {type(error).__name__}: {error}. "
                    f"{_cure(error, batch)}{_STAYS}"
                ) from redacted_error(error)
            batch = _checked(result, name)
        return batch

    return apply


def _cure(error: Exception, batch: Mapping[str, Any]) -> str:
    """Returns the fix for an error of a function, with a space at its end; "" if none is known."""
    if isinstance(error, KeyError) and error.args[0] not in batch:
        return f"The batch has {[*batch]}; text and objects bypass batch_map. "
    if "tracer" in f"{type(error).__name__} {error}".lower():
        return (
            "jax.jit compiles the functions: compute with jax.numpy, use jnp.where instead of if, "
            "and draw random numbers by jax.random with the key. "
        )
    return ""


def _checked(result: Any, name: str) -> dict[str, jax.Array]:
    """Returns the result of a function, with 64-bit NumPy arrays narrowed as by JAX.

    Raises:
        TypeError: If the result is not a dict of arrays, or a NumPy array can't be narrowed.
    """
    if not isinstance(result, Mapping) or not all(isinstance(key, str) for key in result):
        raise TypeError(
            f"batch_map: {name}() returned {type(result).__name__}: return the batch, a dict of "
            "arrays, as in {**batch, 'images': images}"
        )
    for key, value in result.items():
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise TypeError(
                f"batch_map: {name}() returned {key!r} as {type(value).__name__}, not as an array"
            )
    batch: dict[str, Any] = dict(result)
    for key, value in batch.items():
        if isinstance(value, np.ndarray):
            batch[key] = narrowed(value, f"{key} of batch_map {name}()")
    return batch


def _are_equal(first: Any, second: Any) -> bool:
    """Returns whether two computations, as closed jaxprs, are equal, including their constants."""
    texts = [_ADDRESS.sub("", str(computation.jaxpr)) for computation in (first, second)]
    pairs = zip(first.consts, second.consts)  # equally many, if the texts are equal
    return texts[0] == texts[1] and all(a is b or _bytes_of(a) == _bytes_of(b) for a, b in pairs)


def _bytes_of(constant: Any) -> bytes:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.asarray(constant).tobytes()


def _is_on_host(name: str, placement: ResultPlacement | None) -> bool:
    return placement is not None and placement.is_on_host(name)


def _split(
    batch: Mapping[str, Any], placement: ResultPlacement | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two dicts: the arrays of numbers in a batch, and values that bypass the functions."""
    arrays, unmapped = dict[str, Any](), dict[str, Any]()
    for name, value in batch.items():
        if not isinstance(value, np.ndarray):
            arrays[name] = value
        elif is_number(value.dtype) and not _is_on_host(name, placement):
            arrays[name] = narrowed(value, name)
        else:
            unmapped[name] = value
    return arrays, unmapped


def _sharding_of(array: Any) -> Any:
    return getattr(array, "sharding", None)  # None for NumPy arrays


def _specs(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of each array: shape, dtype in JAX, and the sharding if it has a mesh."""
    specs = {}
    for name, array in arrays.items():
        sharding = _sharding_of(array)
        specs[name] = jax.ShapeDtypeStruct(
            array.shape,
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=sharding if isinstance(sharding, NamedSharding) else None,
        )
    return specs
