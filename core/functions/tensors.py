"""Conversions between DALI's capsules and the arrays of a function, on the CPU and on a GPU.

The arguments of ``give`` and ``give_all`` are the function's name, the output's number, and the
output of one sample or of a batch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from nvidia.dali import Pipeline

from ..arrays.dtypes import KINDS
from ..pipeline.dali_pipeline import queue_depth
from ..pipeline.function_notes import live_outputs
from . import checks
from .dlpack import NO_WAIT, DLTensor, header

# Imported by `nvidia.dali` itself; its stubs do not have it.
_plugin: Any = importlib.import_module("nvidia.dali.python_function_plugin")


def capsule_of(array: Any) -> Any:
    """Returns the DLPack capsule of an array from ``take`` of `HostTensors` or `GpuTensors`."""
    return array.__dlpack__() if isinstance(array, DLTensor) else _plugin.ArrayToDLTensor(array)


class HostTensors:
    """Converts DALI's capsules to NumPy arrays (``take``), and outputs to capsules (``give``)."""

    def __init__(self) -> None:
        self.take: Callable[[Any], Any] = _plugin.DLTensorToArray

    def begin(self) -> None:
        """Does nothing; see `GpuTensors.begin`."""

    def give(self, name: str, number: int, value: Any) -> Any:
        """Returns the DLPack capsule of an output of one sample, which may be a capsule already."""
        if type(value) is np.ndarray and value.dtype.char in KINDS and value.dtype.isnative:
            return _plugin.ArrayToDLTensor(value)  # of any strides
        if _is_capsule(value):
            return value
        if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, jax.Array)):
            value = np.from_dlpack(value)
        checks.check_kind(name, number, value)
        array = np.asarray(value)
        return _plugin.ArrayToDLTensor(array.astype(array.dtype.newbyteorder("="), copy=False))

    def give_all(self, name: str, number: int, values: Any) -> list[Any]:
        """Returns a list with the DLPack capsule of each sample of an output."""
        return [self.give(name, number, value) for value in values]


class GpuTensors:
    """Converts DALI's capsules to `DLTensor` objects (``take``), and outputs to capsules.

    Keeps outputs alive until DALI has read them.

    Args:
        pipeline: The pipeline.
        num_outputs: Number of outputs.
        awaited: Whether DALI waits for its stream before each call, so that DALI has read the
            outputs of the previous call. Otherwise, DALI has read them when the batch is delivered.
        renewed: Whether the outputs of a batch are freed when the next batch begins.
    """

    def __init__(self, pipeline: Pipeline, num_outputs: int, awaited: bool, renewed: bool):
        most = num_outputs * pipeline.max_batch_size * (1 if awaited else queue_depth(pipeline))
        self._live = live_outputs(pipeline, None if renewed else most)
        self._renewed = renewed
        self._events: dict[int, Any] = {}  # CuPy's events, by device
        copies = self._live if awaited else None

        def take_unbuilt(capsule: Any) -> DLTensor:
            return DLTensor(header(capsule).device_id, copies, capsule)

        # A partial with positional arguments is the fastest: with keyword arguments a call takes
        # 1.5 times as long, and a call of a Python function twice as long.
        self.take: Callable[[Any], Any] = functools.partial(DLTensor, pipeline.device_id, copies)
        if pipeline.device_id is None:  # until the pipeline is built
            self.take = take_unbuilt

    def begin(self) -> None:
        """Begins a batch; frees the outputs of the previous batch if ``renewed``."""
        if self._renewed:
            self._live.clear()

    def give(self, name: str, number: int, value: Any) -> Any:
        """Returns the DLPack capsule of an output of one sample.

        DALI's stream waits for the array, unless the output is a capsule or a `DLTensor`.

        Raises:
            TypeError: If the output is not on a GPU, or DALI does not support its dtype.
        """
        if _is_capsule(value):
            return value
        if isinstance(value, DLTensor):
            return value.__dlpack__()
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            raise TypeError(
                f"output {number} of {name}() is a {type(value).__name__}, but the function runs "
                "on the GPU. Return an array of JAX, CuPy or PyTorch on the GPU"
            )
        if isinstance(value, jax.Array):
            checks.check_kind(name, number, value)
        self._live.append(value)
        # JAX's stub lacks the parameter.
        return value.__dlpack__(stream=_dalis_stream())  # pyright: ignore[reportCallIssue]

    def give_all(self, name: str, number: int, values: Any) -> list[Any]:
        """Returns a list with the DLPack capsule of each sample of an output.

        DALI's stream waits for the arrays; for a list of CuPy arrays, a single wait suffices.
        """
        kinds = set(map(type, values)) if isinstance(values, list) else {type(values)}
        if {(kind.__module__, kind.__name__) for kind in kinds} != {("cupy", "ndarray")}:
            return [self.give(name, number, value) for value in values]
        # For each array, CuPy (core.pyx) makes the consumer's stream wait for CuPy's current stream
        # by a new event and a new stream object, which takes 20 to 30 us. A single event recorded
        # after all arrays has the same effect. It can be reused, because a wait refers to the last
        # record before it.
        values = list(values)  # the rows of an array of the whole batch
        self._live.extend(values)
        capsules = [value.__dlpack__(stream=NO_WAIT) for value in values]
        cuda: Any = importlib.import_module("cupy").cuda
        device = cuda.runtime.getDevice()
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = cuda.Event(disable_timing=True)
        event.record()
        cuda.runtime.streamWaitEvent(_dalis_stream(), event.ptr)
        return capsules


def _is_capsule(value: Any) -> bool:
    return type(value).__name__ == "PyCapsule"


def _dalis_stream() -> int:
    """Returns the CUDA stream of the running operator, as a stream number of DLPack."""
    # In DLPack, 1 is CUDA's default stream, and 0 is not allowed.
    return int(_plugin.current_dali_stream()) or 1
