"""`dl_tensor_python_function`: Python functions of samples or batches, of any library's arrays."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..dtypes import check_width
from . import checks
from .dali_operators import dlpack_operator
from .dlpack import DLTensor
from .notes import note
from .tensors import GpuTensors, HostTensors, capsule_of


@do_not_convert
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
    On the CPU the function gets NumPy arrays, views of DALI's memory, which jax.dlpack, NumPy and
    PyTorch take by ``from_dlpack``, too. On a GPU it gets `DLTensor` objects for ``from_dlpack`` of
    JAX, CuPy and PyTorch. It may return arrays of any of these libraries, and raw capsules.

    The function must not change its inputs, nor use them after it has returned. It must not return
    the same buffer for several samples: DALI copies them once all samples of a batch were made.

    On a GPU DALI waits for its own stream before the call, and its stream waits for the returned
    arrays (``__dlpack__(stream=...)``; of CuPy and PyTorch for their current stream): nothing else
    needs to wait. Other work on the inputs, with ``num_outputs=0`` say, must be finished when the
    function returns. Returned arrays are kept until DALI has copied them. Raw capsules can't be
    kept: work on their memory must be finished, and it must not be reused until DALI has copied it.
    With ``synchronize_stream=False`` DALI does not wait: work then belongs on DALI's stream,
    ``nvidia.dali.python_function_plugin.current_dali_stream()``, which JAX can't use.

    Args:
        *inputs: Batches.
        function: Takes one array for each input, and returns as many outputs as
            ``num_outputs``: None, one array, or a tuple. With ``batch_processing`` each of them
            is a list of the samples' arrays; a single array of shape [batch, ...] may be
            returned for one. Keyword-only parameters are filled in: ``rng``, a
            numpy.random.Generator, and ``key``, a jax.random.key, for the sample (for the batch
            with ``batch_processing``), made of the pipeline's seed and the number of the sample;
            they are resumed with the state.
        batch_processing: Whether the function is called once for a batch, not for each sample. If
            left out it is False, as DALI documents, with a warning: DALI itself then passes lists.
        bytes_per_sample_hint: Bytes to allocate beforehand for each sample of the outputs.
        num_outputs: Number of outputs.
        output_layouts: Layouts of the outputs, one for all or a list; after a shorter list the
            other outputs have none.
        preserve: False: the function is not run if its outputs are not used. If left out, or
            True, it is run, as by DALI's operator.
        seed, name: As for any operator of DALI.
        synchronize_stream: Whether DALI waits for its CUDA stream before the call.
        device: "cpu" or "gpu"; the device of the inputs by default.
        stateful: True: the function keeps state, so that iterators can't resume. False: no output
            depends on what it keeps. None: a check compares the values that it reaches.
        capsules: Whether the function gets raw DLPack capsules, as by DALI's operator, for
            ``nvidia.dali.ops._dlpack_to_array`` or ``torch.utils.dlpack.from_dlpack``.

    Returns:
        A DataNode, or a tuple of several or none.

    Raises:
        RuntimeError: Outside of a pipeline function.
        ValueError: For ``rng`` or ``key`` with synchronize_stream=False on a GPU, and num_outputs
            below 0. When it is run: for another number of outputs than num_outputs.
        TypeError: For another number of inputs than the function takes. When it is run: for an
            output that is no array, or of a dtype that DALI does not have.
    """
    checks.require_pipeline("fn.dl_tensor_python_function")
    where = checks.device_of(inputs, device)
    if num_outputs < 0:
        raise ValueError(f"num_outputs={num_outputs}: 0 is the least")
    if batch_processing is None:
        _warn_of_default()
    batch = bool(batch_processing)
    watched = note(function, stateful)
    nodes = list(inputs)
    called = _of_capsules(function, batch) if capsules else function
    wanted = [keyword for keyword in ("rng", "key") if checks.wants(called, keyword)]
    checks.check_signature(function, len(inputs), wanted, "rng or key")
    if wanted:
        if where == "gpu" and not synchronize_stream:
            raise ValueError(
                "synchronize_stream=False with a parameter rng or key: what they are made of is "
                "not there yet when the function is called. Leave synchronize_stream out"
            )
        nodes.append(checks.key_words(where))
        called = _filled(called, wanted, batch)
    if not nodes and not num_outputs:
        raise ValueError(
            f"{checks.name_of(function)}() has neither inputs nor outputs, and DALI would not "
            "call it: give it an input"
        )
    more = checks.arguments(seed, bytes_per_sample_hint, name)
    if not synchronize_stream:
        more["synchronize_stream"] = False
    called = watched(called)
    return _operator(called, nodes, batch, num_outputs, output_layouts, where, preserve, **more)


@functools.cache
def _warn_of_default() -> None:
    """Warns once in a process that DALI documents one default and has another."""
    warnings.warn(
        "fn.dl_tensor_python_function without batch_processing: DALI documents False, calls with "
        "one sample, but itself calls with lists of samples (True). Here it is False. Pass "
        "batch_processing=False, or True for code that runs so with DALI's operator",
        stacklevel=3,
    )


def _of_capsules(function: Callable[..., Any], batch: bool) -> Callable[..., Any]:
    """Makes a function of capsules one of arrays."""

    @functools.wraps(function)
    def of_arrays(*arrays: Any, **more: Any) -> Any:
        if batch:
            return function(*(list(map(capsule_of, one)) for one in arrays), **more)
        return function(*map(capsule_of, arrays), **more)

    of_arrays.__qualname__ = checks.name_of(function)  # some have none, which wraps() would copy
    return of_arrays


def _filled(function: Callable[..., Any], wanted: Sequence[str], batch: bool) -> Callable[..., Any]:
    """Fills in the wanted keywords, ``rng`` and ``key``, made of the words behind the inputs."""

    def filled(*arrays: Any) -> Any:
        *inputs, words = arrays
        word = np.asarray(_taken(words[0] if batch else words))
        key = checks.key_of(word[None])
        more: dict[str, Any] = {}
        if "rng" in wanted:
            more["rng"] = np.random.Generator(np.random.Philox(key=key.astype(np.uint64)))
        if "key" in wanted:
            more["key"] = checks.jax_key(key)
        return function(*inputs, **more)

    filled.__qualname__ = checks.name_of(function)
    return filled


def _taken(tensor: Any) -> Any:
    return jax.dlpack.from_dlpack(tensor) if isinstance(tensor, DLTensor) else tensor


def batch_operator(
    function: Callable[..., Any],
    nodes: Sequence[DataNode],
    num_outputs: int,
    layouts: str | Sequence[str] | None,
    where: str,
    preserve: bool | None,
) -> Any:
    """An operator that calls a function with lists of samples: NumPy views, or jax.Arrays."""
    if where == "cpu":
        return _operator(function, nodes, True, num_outputs, layouts, where, preserve)

    @functools.wraps(function)
    def of_arrays(*inputs: Sequence[Any]) -> Any:
        for number, samples in enumerate(inputs):  # from_dlpack does not say that it narrows
            check_width(samples[0].dtype, f"{number} of {checks.name_of(function)}()", "input")
        return function(*([_taken(one) for one in samples] for samples in inputs))

    return _operator(of_arrays, nodes, True, num_outputs, layouts, where, preserve)


def _callback(
    function: Callable[..., Any],
    num_outputs: int,
    tensors: HostTensors | GpuTensors,
    batch: bool,
    each: bool,
) -> Callable[..., Any]:
    """The callback of DALI's operator.

    Args:
        function: The function.
        num_outputs: Number of its outputs.
        tensors: Conversions of its inputs and outputs.
        batch: Whether it takes lists of samples.
        each: Whether DALI calls it for each sample.
    """
    name = checks.name_of(function)
    take, give = tensors.take, tensors.give

    def of_batch(*capsules: Sequence[Any]) -> Any:
        tensors.begin()
        inputs = [list(map(take, one)) for one in capsules]
        # DALI takes lists; an array of the whole batch gives its rows.
        outputs = results(function(*inputs))
        for number, output in enumerate(outputs):
            if inputs and len(output) != len(inputs[0]):
                raise ValueError(
                    f"output {number} of {name}() has {len(output)} samples, and the batch has "
                    f"{len(inputs[0])}: return as many"
                )
        return as_dali([tensors.give_all(name, k, output) for k, output in enumerate(outputs)])

    def of_samples(*capsules: Sequence[Any]) -> Any:
        tensors.begin()
        outputs = [of_sample(*one) for one in zip(*capsules, strict=True)]
        if num_outputs == 0:
            return None
        return tuple(map(list, zip(*outputs))) if num_outputs > 1 else outputs

    def of_sample(*capsules: Any) -> Any:
        output = function(*map(take, capsules))
        if num_outputs == 1 and not (output is None or isinstance(output, (list, tuple))):
            return give(name, 0, output)  # the usual case, without further checks
        return as_dali([give(name, k, one) for k, one in enumerate(results(output))])

    def results(returned: Any) -> tuple[Any, ...]:
        # A list is one output, of the samples of a batch; a tuple is several.
        listed = (returned,) if isinstance(returned, list) else returned
        return checks.results(name, listed, num_outputs)

    def as_dali(outputs: list[Any]) -> Any:
        # DALI takes a tuple, one output by itself, or nothing.
        return tuple(outputs) if num_outputs > 1 else outputs[0] if outputs else None

    callback = of_batch if batch else of_sample if each else of_samples
    return callback if num_outputs else checks.logged(name, callback)


def _operator(
    function: Callable[..., Any],
    nodes: Sequence[DataNode],
    batch: bool,
    num_outputs: int,
    layouts: str | Sequence[str] | None,
    where: str,
    preserve: bool | None,
    **more: Any,
) -> Any:
    """DALI's operator over a function, in the pipeline that is being defined."""
    pipeline = checks.require_pipeline(checks.name_of(function))
    # DALI calls once for a batch, which costs less than a call for each sample. Without inputs
    # only DALI knows the number of samples, and calls for each.
    each = not batch and not nodes
    tensors: HostTensors | GpuTensors = HostTensors()
    if where == "gpu":
        awaited = more.get("synchronize_stream", True)
        tensors = GpuTensors(pipeline, num_outputs, awaited, awaited and not each)
    outputs = dlpack_operator()(
        *nodes,
        function=_callback(function, num_outputs, tensors, batch, each),
        batch_processing=not each,
        num_outputs=num_outputs,
        device=where,
        **({} if preserve is None else {"preserve": preserve}),
        **checks.layout_argument(layouts),
        **more,
    )
    return checks.nodes_of(outputs, checks.name_of(function))
