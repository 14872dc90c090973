"""`dl_tensor_python_function`: Python functions of samples or batches in any array library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..arguments import knows_its_names, qualified_name
from ..arrays.dtypes import check_width
from ..messages.user_warnings import warn_user
from . import checks
from .dali_operators import dlpack_operator
from .dlpack import DLTensor
from .notes import note
from .tensors import GpuTensors, HostTensors, capsule_of


@do_not_convert
@knows_its_names
def dl_tensor_python_function(
    *inputs: DataNode,
    function: Callable[..., Any],
    batch_processing: bool | None = None,
    bytes_per_sample_hint: int | Sequence[int] | None = None,
    num_outputs: int = 1,
    output_layouts: str | Sequence[str] | None = None,
    preserve: bool | None = None,
    seed: int = -1,
    synchronize_stream: bool = True,
    device: str | None = None,
    name: str | None = None,
    stateful: bool | None = None,
    capsules: bool = False,
) -> Any:
    """Runs a Python function on DALI's tensors, as arrays of any library.

    It has the arguments of ``nvidia.dali.fn.dl_tensor_python_function``, whose operator runs it.
    On the CPU the function gets NumPy arrays, which are views of DALI's memory and also suitable
    for ``from_dlpack`` of JAX and PyTorch. On a GPU it gets `DLTensor` objects for ``from_dlpack``
    of JAX, CuPy and PyTorch. It may return arrays of any of these libraries, and raw capsules.

    The function must not change its inputs, nor use them after it has returned. It must not return
    the same buffer for several samples: DALI copies them when all samples of a batch are complete.

    On a GPU DALI synchronizes its own stream before the call, and its stream waits for the returned
    arrays (``__dlpack__(stream=...)``; for CuPy and PyTorch on their current stream), so no other
    synchronization is necessary. Other work on the inputs, as with ``num_outputs=0``, must be
    finished when the function returns. Returned arrays are kept until DALI has copied them. Raw
    capsules can't be kept: work on their memory must be finished, and the memory must not be reused
    until DALI has copied it. With ``synchronize_stream=False`` DALI does not wait; work must then
    run on DALI's stream, ``nvidia.dali.python_function_plugin.current_dali_stream()``, which JAX
    can't use.

    Args:
        *inputs: Batches.
        function: Takes one array per input, and returns ``num_outputs`` outputs: None, one array,
            or a tuple. With ``batch_processing`` each input and output is a list of the samples'
            arrays; an output may also be a single array of shape [batch, ...]. The keyword-only
            parameters ``rng``, a numpy.random.Generator, and ``key``, a jax.random.key, are filled
            in for each call. Both are derived from the pipeline's seed and the number of the
            sample; over a source, from the seed, the epoch and the record. A state restores them.
        batch_processing: Whether the function is called once per batch instead of per sample. The
            default is False, as DALI documents, with a warning, since DALI itself passes lists.
        bytes_per_sample_hint: The bytes to preallocate for each sample of the outputs.
        num_outputs: The number of outputs.
        output_layouts: The layouts of the outputs, one for all or a list. If the list is shorter,
            the other outputs have no layout.
        preserve: If False, the function isn't run if its outputs are unused. By default it is run,
            as by DALI's operator.
        seed, name: As for any operator of DALI.
        synchronize_stream: Whether DALI waits for its CUDA stream before the call.
        device: "cpu" or "gpu"; the device of the inputs by default.
        stateful: True if the function keeps state, so that iterators can't resume. False if no
            output depends on state that the function keeps. None: dalijax checks whether values
            that the function reaches have changed.
        capsules: Whether the function gets raw DLPack capsules, as by DALI's operator, for
            ``nvidia.dali.ops._dlpack_to_array`` or ``torch.utils.dlpack.from_dlpack``.

    Returns:
        A DataNode, or a tuple of DataNodes if num_outputs is not 1.

    Raises:
        RuntimeError: If no pipeline is being defined.
        ValueError: If ``rng`` or ``key`` is used with synchronize_stream=False on a GPU,
            num_outputs is negative, there are neither inputs nor outputs, or the inputs are on
            different devices. At run time, if the number of outputs isn't num_outputs.
        TypeError: If the function can't take the inputs. At run time, if an output isn't an array
            of a dtype that DALI supports.
    """
    checks.require_pipeline("fn.dl_tensor_python_function")
    device_type = checks.device_of(inputs, device)
    if num_outputs < 0:
        raise ValueError(f"num_outputs must be 0 or more, not {num_outputs}")
    if batch_processing is None:
        _warn_of_default()
    batch = bool(batch_processing)
    watched = note(function, stateful)
    nodes = list(inputs)
    called = _taking_capsules(function, batch) if capsules else function
    keywords = [keyword for keyword in ("rng", "key") if checks.wants(called, keyword)]
    checks.check_signature(function, len(inputs), keywords, "rng or key")
    if keywords:
        if device_type == "gpu" and not synchronize_stream:
            raise ValueError(
                "synchronize_stream=False with a parameter rng or key: their random bits may not "
                "be computed yet when the function is called. Omit synchronize_stream"
            )
        nodes.append(checks.key_words(device_type))
        called = _filled(called, keywords, batch)
    if not nodes and not num_outputs:
        raise ValueError(
            f"{qualified_name(function)}() has neither inputs nor outputs, so that DALI would not "
            "call it: pass an input"
        )
    operator_arguments = checks.arguments(seed, bytes_per_sample_hint, name)
    if not synchronize_stream:
        operator_arguments["synchronize_stream"] = False
    called = watched(called)
    return _operator(
        called,
        nodes,
        batch,
        num_outputs,
        output_layouts,
        device_type,
        preserve,
        **operator_arguments,
    )


@functools.cache
def _warn_of_default() -> None:
    """Warns once per process that batch_processing has another default in DALI than documented."""
    warn_user(
        "fn.dl_tensor_python_function without batch_processing: DALI documents False, calls with "
        "one sample, but itself calls with lists of samples (True). Here it is False. Pass "
        "batch_processing=False, or True for code that runs so with DALI's operator",
        UserWarning,
    )


def _taking_capsules(function: Callable[..., Any], batch: bool) -> Callable[..., Any]:
    """Returns a function of arrays or `DLTensor` objects that passes their capsules to another.

    Args:
        function: A function of DLPack capsules.
        batch: Whether the function takes lists of samples.
    """

    @functools.wraps(function)
    def with_arrays(*arrays: Any, **keywords: Any) -> Any:
        if batch:
            lists = [list(map(capsule_of, samples)) for samples in arrays]
            return function(*lists, **keywords)
        return function(*map(capsule_of, arrays), **keywords)

    with_arrays.__qualname__ = qualified_name(function)  # some functions have none
    return with_arrays


def _filled(function: Callable[..., Any], names: Sequence[str], batch: bool) -> Callable[..., Any]:
    """Returns a function that fills in the keywords ``rng`` and ``key`` of a function.

    The last argument of the returned function, after the inputs, contains the random bytes from
    `checks.key_words`.
    """

    def filled(*arrays: Any) -> Any:
        *inputs, words = arrays
        word = np.asarray(_as_array(words[0] if batch else words))
        key = checks.key_of(word[None])
        keywords: dict[str, Any] = {}
        if "rng" in names:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=key.astype(np.uint64)))
        if "key" in names:
            keywords["key"] = checks.jax_key(key)
        return function(*inputs, **keywords)

    filled.__qualname__ = qualified_name(function)
    return filled


def _as_array(tensor: Any) -> Any:
    """Returns a `DLTensor` as a jax.Array, and a NumPy array unchanged."""
    return jax.dlpack.from_dlpack(tensor) if isinstance(tensor, DLTensor) else tensor


def batch_operator(
    function: Callable[..., Any],
    nodes: Sequence[DataNode],
    num_outputs: int,
    layouts: str | Sequence[str] | None,
    device_type: str,
    preserve: bool | None,
) -> Any:
    """Adds an operator whose function gets lists of samples: NumPy views or jax.Arrays.

    Returns:
        The outputs of the operator: a DataNode, or a tuple of DataNodes if num_outputs is not 1.
    """
    if device_type == "cpu":
        return _operator(function, nodes, True, num_outputs, layouts, device_type, preserve)

    @functools.wraps(function)
    def with_jax_arrays(*inputs: Sequence[Any]) -> Any:
        for number, samples in enumerate(inputs):  # from_dlpack narrows dtypes silently
            check_width(samples[0].dtype, f"{number} of {qualified_name(function)}()", "input")
        return function(*([_as_array(sample) for sample in samples] for samples in inputs))

    return _operator(with_jax_arrays, nodes, True, num_outputs, layouts, device_type, preserve)


def _callback(
    function: Callable[..., Any],
    num_outputs: int,
    tensors: HostTensors | GpuTensors,
    batch: bool,
    per_sample: bool,
) -> Callable[..., Any]:
    """Returns the callback of DALI's operator, which takes and returns DLPack capsules.

    Args:
        function: The user's function, which the callback calls.
        num_outputs: The number of outputs.
        tensors: Converts the inputs and outputs of the function.
        batch: Whether the function takes lists of samples.
        per_sample: Whether DALI calls the callback per sample.
    """
    name = qualified_name(function)
    take, give = tensors.take, tensors.give

    def call_batch(*capsules: Sequence[Any]) -> Any:
        tensors.begin()
        inputs = [list(map(take, samples)) for samples in capsules]
        # DALI takes lists; iterating over an array of a whole batch returns its samples.
        outputs = results(function(*inputs))
        for number, output in enumerate(outputs):
            if inputs and len(output) != len(inputs[0]):
                raise ValueError(
                    f"output {number} of {name}() has {len(output)} samples, but the batch has "
                    f"{len(inputs[0])}. Return one output for each sample"
                )
        return as_dali([tensors.give_all(name, k, output) for k, output in enumerate(outputs)])

    def call_samples(*capsules: Sequence[Any]) -> Any:
        tensors.begin()
        outputs = [call_sample(*sample) for sample in zip(*capsules, strict=True)]
        if num_outputs == 0:
            return None
        return tuple(map(list, zip(*outputs))) if num_outputs > 1 else outputs

    def call_sample(*capsules: Any) -> Any:
        output = function(*map(take, capsules))
        if num_outputs == 1 and not (output is None or isinstance(output, (list, tuple))):
            return give(name, 0, output)  # the usual case, without further checks
        return as_dali([give(name, k, result) for k, result in enumerate(results(output))])

    def results(returned: Any) -> tuple[Any, ...]:
        # A list is a single output, the samples of a batch. A tuple is several outputs.
        listed = (returned,) if isinstance(returned, list) else returned
        return checks.results(name, listed, num_outputs)

    def as_dali(outputs: list[Any]) -> Any:
        # DALI takes a tuple, a single output, or None.
        return tuple(outputs) if num_outputs > 1 else outputs[0] if outputs else None

    callback = call_batch if batch else call_sample if per_sample else call_samples
    return callback if num_outputs else checks.logged(name, callback)


def _operator(
    function: Callable[..., Any],
    nodes: Sequence[DataNode],
    batch: bool,
    num_outputs: int,
    layouts: str | Sequence[str] | None,
    device_type: str,
    preserve: bool | None,
    **arguments: Any,
) -> Any:
    """Adds DALI's operator for a function to the current pipeline, and returns its outputs."""
    pipeline = checks.require_pipeline(qualified_name(function))
    # DALI calls the callback once per batch, which is cheaper than once per sample. Without inputs
    # only DALI knows the number of samples, and calls it for each.
    per_sample = not batch and not nodes
    tensors: HostTensors | GpuTensors = HostTensors()
    if device_type == "gpu":
        awaited = arguments.get("synchronize_stream", True)
        tensors = GpuTensors(pipeline, num_outputs, awaited, awaited and not per_sample)
    outputs = dlpack_operator()(
        *nodes,
        function=_callback(function, num_outputs, tensors, batch, per_sample),
        batch_processing=not per_sample,
        num_outputs=num_outputs,
        device=device_type,
        **({} if preserve is None else {"preserve": preserve}),
        **checks.layout_argument(layouts),
        **arguments,
    )
    return checks.nodes_of(outputs, qualified_name(function))
