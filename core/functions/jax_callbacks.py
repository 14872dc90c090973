"""What DALI's operator for JAX functions calls: its tensors in, DLPack's capsules out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding
from nvidia.dali import Pipeline

from ..pipeline.arrays import check_width
from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.function_notes import live_outputs
from ..placement import gpu_ordinal
from .dlpack import header, owning_view


class Body(Protocol):
    """A function of batches; see `dalijax.core.functions.jax_function`."""

    name: str
    inputs: int
    num_outputs: int
    takes_views: bool

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """The outputs of a batch, jax.Arrays on a device.

        Args:
            arrays: The inputs, and what lies behind them (words of a key, say). It may be changed.
            device: The operator's.
        """
        ...


def on_cpu(called: Body, pipeline: Pipeline) -> Callable[..., Any]:
    """The callback of DALI's operator for batches on the CPU.

    Args:
        called: The function.
        pipeline: Whose it is.
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
        # since jax.dlpack does not say that it narrows; those of a graph are of one type.
        if checked and not called.takes_views and not copied:
            arrays: list[Any] = [jax.dlpack.from_dlpack(one) for one in tensors[:inputs]]
        else:
            arrays = [view(one) for one in tensors[:inputs]]
            for number, own in enumerate(arrays):
                check_width(own.dtype, f"{number} of {called.name}()", "input")
            if not called.takes_views:
                arrays = [jax.device_put(own, cpu) for own in arrays]
            checked = True
        if len(tensors) > inputs:
            arrays += [view(one) for one in tensors[inputs:]]
        owned = [] if dynamic else list(map(_addresses, arrays))
        made = called.run(arrays, cpu)
        if owned:
            made = tuple(
                one.copy() if any(one.unsafe_buffer_pointer() in own for own in owned) else one
                for one in made
            )
        # JAX's own capsules may be freed on any thread; NumPy's only by one that has the GIL,
        # which DALI's have not after a failed run.
        return tuple([one.block_until_ready().__dlpack__() for one in made]) or None

    return run


def _copy(tensor: Any) -> np.ndarray:
    return owning_view(tensor).copy()


def _addresses(array: np.ndarray | jax.Array) -> range:
    """Where the bytes of a batch on the CPU are."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
    return range(start, start + array.nbytes)


def on_gpu(called: Body, pipeline: Pipeline) -> Callable[..., Any]:
    """The callback of DALI's operator for batches on a GPU.

    Both sides' streams wait for one another by DLPack's protocol: each tensor is taken for a
    stream of JAX, and each output for DALI's.

    Args:
        called: The function.
        pipeline: Whose it is.
    """
    device: jax.Device | None = None
    owner = weakref.ref(pipeline)
    # So many batches later DALI has delivered what it made of it, for which it was waited.
    held = live_outputs(pipeline, queue_depth(pipeline))

    def run(stream: int, *tensors: Any) -> tuple[Any, ...] | None:
        nonlocal device
        given: Sequence[Any] = tensors
        if device is None:  # those of a graph are of one type: jax.dlpack does not say it narrows
            given = [_Checked(one, f"{k} of {called.name}()") for k, one in enumerate(tensors)]
        arrays = [jax.dlpack.from_dlpack(one) for one in given]
        if device is None:
            device = next(iter(arrays[0].devices())) if arrays else _gpu(owner())
        made = called.run(arrays, device)
        if not made:  # what has read the inputs is told by an output else
            _one_more(jax.device_put(np.float32(0), device)).__dlpack__(stream=stream)
        held.append(made)
        return tuple([one.__dlpack__(stream=stream) for one in made]) or None

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


def on_device(name: str, number: int, array: Any, where: jax.Device | Sharding) -> jax.Array:
    """An output on the operator's device, or of a sharding, moved there where it is elsewhere.

    Raises:
        TypeError: For NumPy's arrays of 64 bits, where JAX would narrow them.
    """
    if isinstance(array, jax.Array):
        return array if array.devices() == {where} else jax.device_put(array, where)
    check_width(np.dtype(array.dtype), f"{number} of {name}()")
    # A copy, since the function may write its array again, and device_put (even with
    # may_alias=False, in JAX 0.12) makes a view of it on the CPU, or reads it later.
    return jax.device_put(np.array(array), where)
