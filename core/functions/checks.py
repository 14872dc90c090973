"""Arguments, keys, and checks of outputs, for all kinds of Python functions in a graph."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.data_node import DataNode

from ..arguments import qualified_name
from ..arrays.dtypes import KINDS, cast_to
from ..pipeline import function_notes
from ..random.draw import draw_of_pipeline, on_device

_log = logging.getLogger("dalijax")


def wants(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function has a keyword-only parameter ``name`` that dalijax fills in.

    The parameter must have no default, or the default None, and all wrappers of the function
    (functools.partial, jit, decorators) must pass it on.
    """
    layer: Any = function
    while True:
        if isinstance(layer, functools.partial):
            if name in layer.keywords:
                return False
            layer = layer.func
            continue
        wrapped = getattr(layer, "__wrapped__", None)
        if wrapped is None or wrapped is layer:
            break
        if inspect.isfunction(layer) and not _takes(layer, name):
            return False
        layer = wrapped
    return _takes(layer, name, alone=True)


def _takes(function: Callable[..., Any], name: str, alone: bool = False) -> bool:
    """Returns whether a function has a keyword-only parameter ``name`` without a value.

    The parameter must have no default, or the default None. Unless ``alone``, a function with
    ``**kwargs`` counts as a function with the parameter.
    """
    signature = _signature(function)
    if signature is None:
        return False
    parameters = signature.parameters
    parameter = parameters.get(name)
    if parameter is not None:
        unfilled = parameter.default in (parameter.empty, None)
        return parameter.kind is parameter.KEYWORD_ONLY and unfilled
    return not alone and any(value.kind is value.VAR_KEYWORD for value in parameters.values())


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns a function's own signature, ignoring ``__wrapped__``; None if it has none."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def check_signature(
    function: Callable[..., Any], inputs: int, keywords: Sequence[str], fillable: str
) -> None:
    """Raises a TypeError if a function can't be called with the arrays and keywords of a graph.

    Functions that hide their parameters, such as those of jax.vmap, are not checked.

    Args:
        function: The function.
        inputs: The number of arrays, which are passed by position.
        keywords: The names of the keyword arguments.
        fillable: The names of the parameters that dalijax can fill in, for the message.
    """
    layer: Any = function
    while isinstance(layer, jax.stages.Wrapped) and hasattr(layer, "__wrapped__"):
        layer = layer.__wrapped__
    signature = _signature(layer)
    if signature is None:
        return
    try:
        signature.bind(*range(inputs), **dict.fromkeys(keywords))
    except TypeError as error:
        keyword_text = "".join(f" and {name}=" for name in keywords)
        raise TypeError(
            f"{qualified_name(function)}{signature} is called with {inputs} of the graph's "
            f"inputs{keyword_text}: {error}. Give it a parameter for each input; {fillable} is "
            "filled in if it is keyword-only (after a *)"
        ) from None


def device_of(inputs: Sequence[DataNode], device: str | None) -> str:
    """Returns the device of an operator, "cpu" or "gpu".

    It is ``device`` if given, otherwise the device of the inputs, or "cpu" without inputs.

    Raises:
        ValueError: If some inputs are on the CPU and others on a GPU, ``device`` is "cpu" and the
            inputs are on a GPU, or ``device`` has another value.
    """
    devices = sorted({node.device for node in inputs if isinstance(node, DataNode)})
    if device not in (None, "cpu", "gpu"):
        raise ValueError(f"device must be 'cpu', 'gpu' or None, not {device!r}")
    if len(devices) > 1 or (device == "cpu" and devices == ["gpu"]):
        raise ValueError(
            f"the inputs are on {devices}, but the function on {device or 'one device'}. All must "
            "be on the same device: call .gpu() on inputs that are on the CPU"
        )
    return device or (devices[0] if devices else "cpu")


def key_words(device: str = "cpu") -> DataNode:
    """Returns a DataNode of random bytes for keys, uint8 of shape [8] per sample, on a device.

    Over a record source, the bytes depend only on the seed, the epoch and the record. Otherwise
    DALI draws the bytes, depending on the pipeline's seed and the number of the batch, and DALI's
    checkpoints restore them.
    """
    draw = draw_of_pipeline()
    words: DataNode
    if draw is not None:
        words = draw._words()
    else:
        values = [float(k) for k in range(1 << 8)]
        words = fn.random.uniform(values=values, shape=[8], dtype=types.UINT8)
    return on_device(words, device)


def key_of(words: np.ndarray) -> np.ndarray:
    """Returns the data of a batch's key, uint32 [2]: the first row of ``words``, uint8 [n, 8]."""
    return np.frombuffer(np.ascontiguousarray(words[0], np.uint8).tobytes(), np.uint32)


def jax_key(words: np.ndarray) -> jax.Array:
    """Converts the result of `key_of` to a jax.random.key."""
    data: Any = words
    # The user's transfer guard is meant for the user's arrays only.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.random.wrap_key_data(data, impl="threefry2x32")


def key_of_array(words: jax.Array) -> jax.Array:
    """Returns ``jax_key(key_of(words))``, computed on the device of ``words``, uint8 [batch, 8]."""
    data = jax.lax.bitcast_convert_type(words[0].reshape(2, 4), np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def logged(name: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callback that calls another callback, and logs its errors before it raises them.

    DALI drops the errors of functions without outputs.
    """

    def run(*tensors: Any) -> Any:
        try:
            return callback(*tensors)
        except BaseException:
            _log.exception("%s(), which has no outputs, failed; the batch is delivered", name)
            raise

    return run


def results(name: str, returned: Any, count: int) -> tuple[Any, ...]:
    """Returns a function's outputs as a tuple.

    Raises:
        ValueError: If the number of outputs isn't ``count``.
    """
    outputs: tuple[Any, ...] = ()
    if returned is not None:
        outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if len(outputs) != count:
        raise ValueError(
            f"{name}() returned {len(outputs)} output{'s' * (len(outputs) != 1)}, but num_outputs "
            f"is {count}. Return "
            f"{'None' if count == 0 else 'one array' if count == 1 else f'a tuple of {count}'}, "
            f"or pass num_outputs={len(outputs)}"
        )
    return outputs


def check_array(name: str, number: int, array: Any) -> str:
    """Returns a label for messages, "output 0 of f()"; raises TypeError if given no array."""
    label = f"output {number} of {name}()"
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(
            f"{label} is a {type(array).__name__}, not an array: return arrays of numbers. Text "
            "and objects bypass the graph in fields of records that the graph does not take"
        )
    return label


def check_kind(name: str, number: int, array: Any) -> str:
    """Returns the label of `check_array`; raises TypeError if DALI lacks the array's dtype."""
    label = check_array(name, number, array)
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        raise TypeError(
            f"{label} is {array.dtype}, for which DALI has no type: return numbers, e.g. "
            "jax.random.key_data of a key"
        ) from None
    if dtype.char not in KINDS:
        raise TypeError(f"{label} is {dtype.name}, for which DALI has no type: {cast_to(dtype)}")
    return label


def check_output(name: str, number: int, array: Any, batch: int | None, layout: str | None) -> None:
    """Checks one output of a function.

    Args:
        name: The function's name, for messages.
        number: The index of the output, for messages.
        array: The output, of shape [batch, ...].
        batch: The number of samples; None if unknown.
        layout: The layout of a sample, such as "HWC", if given.

    Raises:
        TypeError: If the output is not an array, or DALI does not support its dtype.
        ValueError: If the output has another number of samples than the batch, or a sample has
            another number of dimensions than the layout.
    """
    label = check_kind(name, number, array)
    shape = tuple(array.shape)
    if not shape or (batch is not None and shape[0] != batch):
        raise ValueError(
            f"{label} has shape {shape}, but the batch has {batch or 'some'} samples. Its first "
            "dimension must be the batch"
        )
    if layout and len(layout) != len(shape) - 1:
        raise ValueError(
            f"{label} has {len(shape) - 1} dimensions without the batch dimension, but its layout "
            f"{layout!r} has {len(layout)}. Pass a matching layout in output_layouts"
        )


def nodes_of(outputs: Any, name: str) -> Any:
    """Returns the outputs of a DALI operator, named after the function that the operator calls.

    Several outputs are returned as a tuple, because a graph function can't return DALI's list.
    """
    nodes = tuple(outputs) if isinstance(outputs, list) else outputs
    for node in nodes if isinstance(nodes, tuple) else (nodes,):
        if isinstance(node, DataNode):
            function_notes.set_name(node, name)
    return nodes


def layout_argument(layouts: str | Sequence[str] | None) -> dict[str, Any]:
    """Returns {"output_layouts": layouts} for DALI's operators, or {} if ``layouts`` is None."""
    if layouts is None:
        return {}
    return {"output_layouts": layouts if isinstance(layouts, str) else list(layouts)}


def require_pipeline(label: str) -> Pipeline:
    """Returns the pipeline that is being defined.

    Raises:
        RuntimeError: If no pipeline is being defined.
    """
    pipeline = Pipeline.current()
    if pipeline is None:
        raise RuntimeError(
            f"{label} must be called in a graph function, with outputs of DALI's operators"
        )
    return pipeline


def arguments(
    seed: int, bytes_per_sample_hint: int | Sequence[int] | None, name: str | None
) -> dict[str, Any]:
    """Returns a dict of the arguments that all operators of DALI take, without default values."""
    given_arguments: dict[str, Any] = {"seed": seed} if seed != -1 else {}
    if bytes_per_sample_hint is not None:
        given_arguments["bytes_per_sample_hint"] = bytes_per_sample_hint
    return given_arguments if name is None else given_arguments | {"name": name}
