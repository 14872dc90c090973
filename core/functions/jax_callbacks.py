"""Callbacks of DALI's operator for JAX functions, from DALI's tensors to DLPack capsules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from nvidia.dali import Pipeline

from ..arrays.dtypes import check_width
from ..arrays.placement import gpu_ordinal
from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.function_notes import live_outputs
from .batch_function import BatchFunction
from .dlpack import header, owning_view


def on_cpu(called: BatchFunction, pipeline: Pipeline) -> Callable[..., Any]:
    """Returns the function that DALI's operator of a JAX function calls for batches on the CPU.

    The callback takes DALI's tensors, and returns DLPack capsules of the outputs.
    """
    cpu, inputs, checked = jax.local_devices(backend="cpu")[0], called.inputs, False
    # The older executors reuse the inputs' memory, even while an output that aliases an input waits
    # to be copied to a GPU. Without outputs to wait for, JAX may read the inputs late, so they are
    # copied.
    dynamic = pipeline.exec_dynamic
    copied = not called.num_outputs and not dynamic
    view = _copy if copied else owning_view

    def run(*tensors: Any) -> tuple[Any, ...] | None:
        nonlocal checked
        # Compiled functions take NumPy views, which are cheaper. For other functions the inputs of
        # the first batch are checked, since jax.dlpack narrows dtypes silently. All batches have
        # the same dtypes.
        if checked and not called.takes_views and not copied:
            arrays: list[Any] = [jax.dlpack.from_dlpack(array) for array in tensors[:inputs]]
        else:
            arrays = [view(array) for array in tensors[:inputs]]
            for number, array in enumerate(arrays):
                check_width(array.dtype, f"{number} of {called.name}()", "input")
            if not called.takes_views:
                arrays = [jax.device_put(array, cpu) for array in arrays]
            checked = True
        if len(tensors) > inputs:
            arrays += [view(array) for array in tensors[inputs:]]
        reused = [] if dynamic else list(map(_addresses, arrays))
        with TraceAnnotation("dalijax.function", function=called.name):
            outputs = called.run(arrays, cpu)
        if reused:
            outputs = tuple(
                array.copy()
                if any(array.unsafe_buffer_pointer() in memory for memory in reused)
                else array
                for array in outputs
            )
        # JAX's capsules may be freed on any thread. NumPy's capsules need the GIL, which DALI's
        # threads don't hold after a failed run.
        return tuple([array.block_until_ready().__dlpack__() for array in outputs]) or None

    return run


def _copy(tensor: Any) -> np.ndarray:
    """Returns a copy of DALI's CPU batch."""
    return owning_view(tensor).copy()


def _addresses(array: np.ndarray | jax.Array) -> range:
    """Returns the range of addresses of a batch on the CPU."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
    return range(start, start + array.nbytes)


def on_gpu(called: BatchFunction, pipeline: Pipeline) -> Callable[..., Any]:
    """Returns the callback of DALI's operator for batches on a GPU.

    The callback takes the number of DALI's stream and DALI's tensors, and returns DLPack capsules
    of the outputs. By DLPack's protocol JAX's stream waits for the inputs, and DALI's stream waits
    for the outputs.
    """
    device: jax.Device | None = None
    owner = weakref.ref(pipeline)  # weak, since the pipeline's operator refers to this callback
    # Outputs are freed after queue_depth further batches: DALI has read and delivered them then.
    live = live_outputs(pipeline, queue_depth(pipeline))

    def run(stream: int, *tensors: Any) -> tuple[Any, ...] | None:
        nonlocal device
        inputs: Sequence[Any] = tensors
        # Checked in the first batch only, since the dtypes stay the same; jax.dlpack narrows
        # silently.
        if device is None:
            inputs = [
                _Checked(tensor, f"{k} of {called.name}()") for k, tensor in enumerate(tensors)
            ]
        arrays = [jax.dlpack.from_dlpack(tensor) for tensor in inputs]
        if device is None:
            device = next(iter(arrays[0].devices())) if arrays else _gpu(owner())
        with TraceAnnotation("dalijax.function", function=called.name):
            outputs = called.run(arrays, device)
        if not outputs:  # DALI's stream waits for a number that JAX computes after the function
            _one_more(jax.device_put(np.float32(0), device)).__dlpack__(stream=stream)
        live.append(outputs)
        return tuple([output.__dlpack__(stream=stream) for output in outputs]) or None

    return run


def _gpu(pipeline: Pipeline | None) -> jax.Device:
    """Returns the jax.Device of a pipeline's GPU, or JAX's first GPU if device_id is None.

    Raises:
        RuntimeError: If JAX does not see the GPU.
    """
    ordinal = None if pipeline is None else pipeline.device_id
    gpus = jax.local_devices(backend="gpu")
    for device in gpus:
        if ordinal in (None, gpu_ordinal(device)):
            return device
    raise RuntimeError(
        f"the pipeline is on GPU {ordinal}, which JAX does not see: it has {gpus}. Give the "
        "pipeline the device_id of one of them"
    )


@jax.jit
def _one_more(number: jax.Array) -> jax.Array:
    """Returns number + 1, computed on the device of the number."""
    return number + 1


class _Checked:
    """A tensor of DALI that raises a TypeError in from_dlpack if JAX would narrow its dtype."""

    def __init__(self, tensor: Any, name: str):
        self._tensor = tensor
        self._name = name

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        capsule = self._tensor.__dlpack__(stream)
        check_width(header(capsule).dtype, self._name, "input")
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()
