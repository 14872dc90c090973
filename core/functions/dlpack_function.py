"""`dl_tensor_python_function`: Python functions of samples or batches, of any library's arrays."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from nvidia.dali import Pipeline
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.dtypes import KINDS, check_width
from ..pipeline.function_notes import live_outputs
from . import checks
from .checks import plugin
from .dali_operators import dlpack_operator
from .dlpack import NO_WAIT, DLTensor, header
from .statefulness import note


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
    """Runs a Python function on DALI's tensors, of which any library makes its arrays.

    With the names of ``nvidia.dali.fn.dl_tensor_python_function``, whose operator runs it.
    On the CPU the function gets NumPy arrays, views of DALI's memory, which jax.dlpack, NumPy and
    PyTorch take by ``from_dlpack``, too. On a GPU it gets `DLTensor` objects for ``from_dlpack`` of
    JAX, CuPy and PyTorch. It may return arrays of any of them, and raw capsules.

    The function must not change its inputs, nor use them after it has returned; nor may it return
    one buffer of its own again and again, since the samples of a batch are put together only
    when all were made. On a GPU DALI waits for its own stream before the call, and makes it wait
    for what is returned (``__dlpack__(stream=...)``; of CuPy and PyTorch for their current stream),
    so that nothing else needs to wait. What else is computed of its inputs, with
    ``num_outputs=0`` say, must be there when it returns. Arrays that are returned are kept until
    DALI has copied them. Raw capsules can't be: what they are of must be finished, and not be
    written again until then. With ``synchronize_stream=False`` DALI does not wait: work then
    belongs on DALI's stream, ``nvidia.dali.python_function_plugin.current_dali_stream()``, where
    JAX can't put it.

    Args:
        *inputs: Batches.
        function: Takes one array for each input, and returns as many outputs as
            ``num_outputs``: None, one array, or a tuple. With ``batch_processing`` each of them
            is a list of the samples' arrays; a single array of shape [batch, ...] may be
            returned for one. Keyword-only parameters are filled in: ``rng``, a
            numpy.random.Generator, and ``key``, a jax.random.key, of the sample (of the batch with
            ``batch_processing``), made of the pipeline's seed and the number of the sample; they
            are resumed with the state.
        batch_processing: Whether it is called once for a batch, not for each sample. Left out it
            is False, as DALI documents, with a warning: DALI itself then calls it with lists.
        bytes_per_sample_hint: Bytes to allocate for each sample of the outputs beforehand.
        num_outputs: Number of outputs.
        output_layouts: Layouts of the outputs, one for all or a list; a shorter list is of
            the first ones, and the others have none.
        preserve: False: the function is not run where nobody uses its outputs. Left out, or True,
            it is, as by DALI's operator.
        seed, name: As for any operator of DALI.
        synchronize_stream: Whether DALI waits for its CUDA stream before the call.
        device: "cpu" or "gpu"; left out, where the inputs are.
        stateful: Whether it keeps state, so that iterators can't be resumed; None: what
            can be seen of it.
        capsules: Whether it gets raw DLPack capsules, as DALI's own does, for what wants those
            (``nvidia.dali.ops._dlpack_to_array``, ``torch.utils.dlpack.from_dlpack``).

    Returns:
        A DataNode, or a tuple of several or none.

    Raises:
        RuntimeError: Outside of a pipeline function.
        ValueError: For ``rng`` or ``key`` with synchronize_stream=False on a GPU, and num_outputs
            below 0. When it is run: for another number of outputs than num_outputs.
        TypeError: For another number of inputs than it takes. When it is run: for what is no
            array, or of a dtype that DALI does not have.
    """
    checks.require_pipeline("fn.dl_tensor_python_function")
    where = checks.device_of(inputs, device)
    if num_outputs < 0:
        raise ValueError(f"num_outputs={num_outputs}: 0 is the least")
    if batch_processing is None:
        _warn_of_default()
    batch = bool(batch_processing)
    note(function, stateful)
    nodes = list(inputs)
    filled = _Filled(_of_capsules(function, batch) if capsules else function, batch)
    checks.check_signature(function, len(inputs), filled.wanted, "rng or key")
    if filled.keyed:
        if where == "gpu" and not synchronize_stream:
            raise ValueError(
                "synchronize_stream=False with a parameter rng or key: what they are made of is "
                "not there yet when the function is called. Leave synchronize_stream out"
            )
        words = checks.key_words()
        nodes.append(words.gpu() if where == "gpu" else words)
    if not nodes and not num_outputs:
        raise ValueError(
            f"{checks.name_of(function)}() has neither inputs nor outputs, and DALI would not "
            "call it: give it an input"
        )
    more = checks.arguments(seed, bytes_per_sample_hint, name)
    more |= {} if synchronize_stream else {"synchronize_stream": False}
    called = filled if filled.keyed else filled.function
    return _operator(called, nodes, batch, num_outputs, output_layouts, where, preserve, **more)


@functools.cache
def _warn_of_default() -> None:
    """Says once in a process that DALI documents one default and has another."""
    warnings.warn(
        "fn.dl_tensor_python_function without batch_processing: DALI documents False, calls with "
        "one sample, but itself calls with lists of samples (True). Here it is False. Pass "
        "batch_processing=False, or True for code that runs so with DALI's operator",
        stacklevel=3,
    )


def _of_capsules(function: Callable[..., Any], batch: bool) -> Callable[..., Any]:
    """A function of arrays for one of capsules."""

    def capsule(array: Any) -> Any:
        return array.__dlpack__() if isinstance(array, DLTensor) else plugin.ArrayToDLTensor(array)

    @functools.wraps(function)
    def of_arrays(*arrays: Any, **more: Any) -> Any:
        inputs = [list(map(capsule, one)) for one in arrays] if batch else map(capsule, arrays)
        return function(*inputs, **more)

    return of_arrays


class _Filled:
    """A function whose keyword-only parameters ``rng`` and ``key`` are filled in."""

    def __init__(self, function: Callable[..., Any], batch: bool):
        self.__name__ = checks.name_of(function)
        self.function = function
        self._batch = batch
        self.wanted = [name for name in ("rng", "key") if checks.wants(function, name)]
        self.keyed = bool(self.wanted)

    def __call__(self, *arrays: Any) -> Any:
        *inputs, words = arrays
        word = np.asarray(_taken(words[0] if self._batch else words))
        key = checks.key_of(word[None])
        more: dict[str, Any] = {}
        if "rng" in self.wanted:
            more["rng"] = np.random.Generator(np.random.Philox(key=key.astype(np.uint64)))
        if "key" in self.wanted:
            more["key"] = checks.jax_key(key)
        return self.function(*inputs, **more)


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


class _Tensors(NamedTuple):
    """How DALI's tensors come to a function, and its outputs back.

    Attributes:
        take: What the function gets for a capsule.
        give: The capsule of an output of one sample, by the function's name and the output's
            number.
        give_all: The capsules of an output of a batch.
        begin: Called before each batch.
    """

    take: Callable[[Any], Any]
    give: Callable[[str, int, Any], Any]
    give_all: Callable[[str, int, Any], list[Any]]
    begin: Callable[[], None]


def _on_gpu(pipeline: Pipeline, num_outputs: int, awaited: bool, renewed: bool) -> _Tensors:
    """The tensors of a pipeline on a GPU, whose outputs are kept alive until DALI has read them.

    Args:
        awaited: Whether DALI waits for its stream before each call: it has then read the last
            batch; else once it has delivered it.
        renewed: Whether the outputs of the last batch go when the next one begins.
    """
    most = num_outputs * pipeline.max_batch_size * (1 if awaited else queue_depth(pipeline))
    live = live_outputs(pipeline, None if renewed else most)
    copies = live if awaited else None
    # By position: with keywords, or as a function, it takes half as long again or twice.
    take: Callable[[Any], Any] = functools.partial(DLTensor, pipeline.device_id, copies)
    if pipeline.device_id is None:  # until it is built

        def take(capsule: Any) -> DLTensor:
            return DLTensor(header(capsule).device_id, copies, capsule)

    begin = live.clear if renewed else _nothing
    return _Tensors(take, functools.partial(_to_gpu, live), _AllToGpu(live), begin)


def _nothing() -> None:
    """Begins a batch before which nothing is freed."""


def _callback(
    function: Callable[..., Any], num_outputs: int, tensors: _Tensors, batch: bool, each: bool
) -> Callable[..., Any]:
    """What DALI's operator calls.

    Args:
        function: The function.
        num_outputs: Number of its outputs.
        tensors: How tensors come to it.
        batch: Whether it takes lists of samples.
        each: Whether DALI calls it for each sample.
    """
    name = checks.name_of(function)
    take, give, give_all, begin = tensors

    def of_batch(*capsules: Sequence[Any]) -> Any:
        begin()
        inputs = [list(map(take, one)) for one in capsules]
        # DALI takes lists; an array of the whole batch gives its rows.
        outputs = results(function(*inputs))
        for number, output in enumerate(outputs):
            if inputs and len(output) != len(inputs[0]):
                raise ValueError(
                    f"output {number} of {name}() has {len(output)} samples, and the batch has "
                    f"{len(inputs[0])}: return as many"
                )
        return as_dali([give_all(name, k, output) for k, output in enumerate(outputs)])

    def of_samples(*capsules: Sequence[Any]) -> Any:
        begin()
        outputs = [of_sample(*one) for one in zip(*capsules, strict=True)]
        if num_outputs == 0:
            return None
        return tuple(map(list, zip(*outputs))) if num_outputs > 1 else outputs

    def of_sample(*capsules: Any) -> Any:
        output = function(*map(take, capsules))
        if num_outputs == 1 and not (output is None or isinstance(output, (list, tuple))):
            return give(name, 0, output)  # the usual case, without what need not be asked
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
    # DALI calls once for a batch, which costs less than once for each sample. Without inputs only
    # DALI knows how many samples there are.
    each = not batch and not nodes
    tensors = _Tensors(plugin.DLTensorToArray, _to_host, _all_to_host, _nothing)
    if where == "gpu":
        awaited = more.get("synchronize_stream", True)
        tensors = _on_gpu(pipeline, num_outputs, awaited, awaited and not each)
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


def _is_capsule(value: Any) -> bool:
    return type(value).__name__ == "PyCapsule"


def _to_host(name: str, number: int, value: Any) -> Any:
    """An output on the CPU as a capsule."""
    if type(value) is np.ndarray and value.dtype.char in KINDS and value.dtype.isnative:
        return plugin.ArrayToDLTensor(value)  # of any strides
    if _is_capsule(value):
        return value
    if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, jax.Array)):
        value = np.from_dlpack(value)
    checks.check_kind(name, number, value)
    array = np.asarray(value)
    return plugin.ArrayToDLTensor(array.astype(array.dtype.newbyteorder("="), copy=False))


def _all_to_host(name: str, number: int, values: Any) -> list[Any]:
    return [_to_host(name, number, one) for one in values]


def _to_gpu(live: deque[Any], name: str, number: int, value: Any) -> Any:
    """An output on a GPU as a capsule, on whose work DALI's stream waits; it is kept alive."""
    if _is_capsule(value):
        return value
    if isinstance(value, DLTensor):
        return value.__dlpack__()
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        raise TypeError(
            f"output {number} of {name}() is a {type(value).__name__}, and the function runs on "
            "the GPU: return an array of JAX, CuPy or PyTorch that is there"
        )
    if isinstance(value, jax.Array):
        checks.check_kind(name, number, value)
    live.append(value)
    return value.__dlpack__(stream=_dalis_stream())


class _AllToGpu:
    """The samples of a batch, as `_to_gpu`; of CuPy's, DALI's stream waits once for all."""

    def __init__(self, live: deque[Any]):
        self._live = live
        self._events: dict[int, Any] = {}  # of CuPy, for each device that was the current one

    def __call__(self, name: str, number: int, values: Any) -> list[Any]:
        kinds = set(map(type, values)) if isinstance(values, list) else {type(values)}
        if {(kind.__module__, kind.__name__) for kind in kinds} != {("cupy", "ndarray")}:
            return [_to_gpu(self._live, name, number, one) for one in values]
        # CuPy makes the consumer's stream wait for its current one, whichever array is asked (its
        # core.pyx), by a new event and a new stream object for each, 20 to 30 us a time. One
        # event, behind them all, does the same, and a wait is for what was recorded before it.
        values = list(values)  # the rows of an array of the whole batch
        self._live.extend(values)
        capsules = [one.__dlpack__(stream=NO_WAIT) for one in values]
        cuda: Any = importlib.import_module("cupy").cuda
        device = cuda.runtime.getDevice()
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = cuda.Event(disable_timing=True)
        event.record()
        cuda.runtime.streamWaitEvent(_dalis_stream(), event.ptr)
        return capsules


def _dalis_stream() -> int:
    """The stream of the operator that is running, as DLPack wants it."""
    # 1 stands for CUDA's default stream, and 0 for nothing.
    return int(plugin.current_dali_stream()) or 1
