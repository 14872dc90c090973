"""What DALI's operator for JAX functions calls: its tensors in, DLPack's capsules out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from nvidia.dali import Pipeline

from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.dtypes import check_width
from ..pipeline.function_notes import live_outputs
from ..placement import gpu_ordinal
from .batch_function import BatchFunction
from .dlpack import header, owning_view


def on_cpu(called: BatchFunction, pipeline: Pipeline) -> Callable[..., Any]:
    """The callback of DALI's operator for batches on the CPU.

    Args:
        called: The function.
        pipeline: Its pipeline.
    """
    cpu, inputs, checked = jax.local_devices(backend="cpu")[0], called.inputs, False
    # The older executors write the inputs' memory again, while a GPU's copies of an output that is
    # an input are still to come; outputs, for which it is waited, tell when JAX has read them.
    dynamic = pipeline.exec_dynamic
    copied = not called.num_outputs and not dynamic
    view = _copy if copied else owning_view

    def run(*tensors: Any) -> tuple[Any, ...] | None:
        nonlocal checked
        # What is compiled takes NumPy's views, which cost less. Else they are for the first batch,
        # since jax.dlpack narrows silently; a graph's batches have one dtype.
        if checked and not called.takes_views and not copied:
            arrays: list[Any] = [jax.dlpack.from_dlpack(one) for one in tensors[:inputs]]
        else:
            arrays = [view(one) for one in tensors[:inputs]]
            for number, array in enumerate(arrays):
                check_width(array.dtype, f"{number} of {called.name}()", "input")
            if not called.takes_views:
                arrays = [jax.device_put(array, cpu) for array in arrays]
            checked = True
        if len(tensors) > inputs:
            arrays += [view(one) for one in tensors[inputs:]]
        reused = [] if dynamic else list(map(_addresses, arrays))
        with TraceAnnotation("dalijax.function", function=called.name):
            outputs = called.run(arrays, cpu)
        if reused:
            outputs = tuple(
                one.copy()
                if any(one.unsafe_buffer_pointer() in memory for memory in reused)
                else one
                for one in outputs
            )
        # JAX's own capsules may be freed on any thread; NumPy's only by one that has the GIL,
        # which DALI's have not after a failed run.
        return tuple([one.block_until_ready().__dlpack__() for one in outputs]) or None

    return run


def _copy(tensor: Any) -> np.ndarray:
    return owning_view(tensor).copy()


def _addresses(array: np.ndarray | jax.Array) -> range:
    """Where the bytes of a batch on the CPU are."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
    return range(start, start + array.nbytes)


def on_gpu(called: BatchFunction, pipeline: Pipeline) -> Callable[..., Any]:
    """The callback of DALI's operator for batches on a GPU.

    Both sides' streams wait for one another by DLPack's protocol: each tensor is taken for a
    stream of JAX, and each output for DALI's.

    Args:
        called: The function.
        pipeline: Its pipeline.
    """
    device: jax.Device | None = None
    owner = weakref.ref(pipeline)  # weak, since its operator refers to this callback
    # So many batches later DALI has delivered what it made of it, for which it was waited.
    live = live_outputs(pipeline, queue_depth(pipeline))

    def run(stream: int, *tensors: Any) -> tuple[Any, ...] | None:
        nonlocal device
        inputs: Sequence[Any] = tensors
        if device is None:  # jax.dlpack narrows silently, and a graph's batches have one dtype
            inputs = [_Checked(one, f"{k} of {called.name}()") for k, one in enumerate(tensors)]
        arrays = [jax.dlpack.from_dlpack(one) for one in inputs]
        if device is None:
            device = next(iter(arrays[0].devices())) if arrays else _gpu(owner())
        with TraceAnnotation("dalijax.function", function=called.name):
            outputs = called.run(arrays, device)
        if not outputs:  # else an output tells when the inputs were read
            _one_more(jax.device_put(np.float32(0), device)).__dlpack__(stream=stream)
        live.append(outputs)
        return tuple([one.__dlpack__(stream=stream) for one in outputs]) or None

    return run


def _gpu(pipeline: Pipeline | None) -> jax.Device:
    """A pipeline's GPU, which DALI chooses as late as it is built where it was not given."""
    ordinal = None if pipeline is None else pipeline.device_id
    seen = jax.local_devices(backend="gpu")
    for one in seen:
        if ordinal in (None, gpu_ordinal(one)):
            return one
    raise RuntimeError(
        f"the pipeline is on GPU {ordinal}, which JAX does not see: it has {seen}. Give the "
        "pipeline the device_id of one of them"
    )


@jax.jit
def _one_more(number: jax.Array) -> jax.Array:
    return number + 1


class _Checked:
    """A tensor of DALI that from_dlpack takes unless it would narrow it."""

    def __init__(self, tensor: Any, name: str):
        self._tensor = tensor
        self._name = name

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        capsule = self._tensor.__dlpack__(stream)
        check_width(header(capsule).dtype, self._name, "input")
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()
