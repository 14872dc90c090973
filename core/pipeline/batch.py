"""From the outputs of pipelines to the batch that JAX code gets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nvidia.dali import types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from ..config import IteratorConfig
from ..dtypes import WIDE, check_width, narrowed
from ..errors import RaggedError
from ..order.epochs import EpochPlan
from ..placement import DataShard, GlobalPlacement, over_devices
from .runner import Outputs, TensorList

Batch = dict[str, Any]

_MOST_SHAPES = 8  # of samples, each of which compiles a step, until it is said


def choose_placement(config: IteratorConfig) -> GlobalPlacement | LocalPlacement:
    """Where batches live, by the iterator's arguments."""
    if config.sharding is not None:
        return GlobalPlacement(config.sharding, config.output_map)
    if config.devices is not None:
        return over_devices(config.devices, config.output_map)
    return LocalPlacement(None if config.as_numpy else jax.local_devices(backend="cpu")[0])


class LocalPlacement:
    """Batches where the pipelines left them; what several pipelines give is put together.

    Args:
        host: The CPU device for CPU outputs; None keeps them NumPy arrays.
    """

    shards: tuple[DataShard, ...] = ()

    def __init__(self, host: jax.Device | None):
        self._host = host
        self._is_first = host is not None and host == jax.local_devices()[0]

    def place(self, name: str, pieces: Sequence[Any]) -> Any:
        """One array of the pieces that the pipelines decoded, along dimension 0.

        Pieces on different GPUs become one array over them, in place; pieces on one device
        are concatenated there. On the host it is a NumPy array until `finish`.
        """
        if len(pieces) == 1:
            return pieces[0]
        if not isinstance(pieces[0], jax.Array):
            return np.concatenate(pieces)
        devices = [piece.device for piece in pieces]
        if len(set(devices)) == 1:
            return jnp.concatenate(pieces)
        return over_devices(devices, [name]).place(name, pieces)

    def place_mask(self, name: str, pieces: Sequence[np.ndarray]) -> Any:
        """The mask of the pieces, not committed: it goes along with any array's device."""
        mask = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return mask if self._host is None or self._host_is_default() else jax.device_put(mask)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of what `place` gave, as jax.Arrays where there is a device for them.

        In place where they are aligned, read-only and kept alive, and in one call, which costs
        less than one for each. (jnp.asarray costs less for small ones, but it is a computation:
        it heeds transfer guards, meshes and jax_debug_nans.) Not committed: a step that takes it
        compiles once, whether its parameters are fresh or come from a step, and may take arrays
        of a GPU beside it.
        """
        on_host = {k: one for k, one in batch.items() if isinstance(one, np.ndarray)}
        if self._host is None or not on_host:
            return batch
        if self._host_is_default():
            return batch | jax.device_put(on_host)  # the context below costs 10 to 100 us
        with jax.default_device(self._host):
            return batch | jax.device_put(on_host)

    def _host_is_default(self) -> bool:
        default = jax.config.jax_default_device
        return self._is_first if default is None else default == self._host


class BatchMaker:
    """Makes batches of what the pipelines of one iterator give.

    Args:
        config: The iterator's arguments.
        placement: Where batches live.
    """

    def __init__(self, config: IteratorConfig, placement: GlobalPlacement | LocalPlacement):
        self._placement = placement
        self._names = config.output_map
        self._mask = config.mask
        self._cut = config.last_batch_policy is LastBatchPolicy.PARTIAL
        self._as_numpy = bool(config.as_numpy)
        self._shapes: dict[str, set[tuple[int, ...]]] = {}  # of samples, by output
        self._device_axis = config.pmap_compatible
        if config.sharding is not None:
            self._device_axis = False
        elif config.devices is not None and self._device_axis is None:
            self._device_axis = True

    def __call__(
        self,
        outputs: Sequence[Outputs],
        valid: Sequence[int | np.ndarray],
        copy: bool,
    ) -> Batch:
        """The batch of one run.

        Args:
            outputs: The outputs of each pipeline.
            valid: Number of samples at the head of each pipeline's batch that belong to the
                epoch, or their mask.
            copy: Whether the buffers are reused once they are released.
        """
        axis = self._has_device_axis(len(outputs))
        cut = self._cut
        kept = [
            n if cut and isinstance(n, int) else len(tensors[0])
            for n, tensors in zip(valid, outputs)
        ]

        def pieces(k: int, name: str) -> list[Any]:
            return [
                self._piece(tensors[k], name, number, n, copy, axis)
                for number, (tensors, n) in enumerate(zip(outputs, kept))
            ]

        batch: Batch = {
            name: self._placement.place(name, pieces(k, name)) for k, name in enumerate(self._names)
        }
        if self._mask is not None:
            masks = [
                v if isinstance(v, np.ndarray) else np.arange(n) < v for n, v in zip(kept, valid)
            ]
            batch[self._mask] = self._place_rows(self._mask, masks, axis)
        return self._placement.finish(batch)

    def add_columns(
        self,
        batch: Batch,
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
        column_of: Callable[[Sequence[Any], str], Any],
    ) -> None:
        """Adds fields that pass the graph by; with a sharding, numbers are placed as outputs are.

        Args:
            batch: The batch of one run.
            columns: For each name the values of all rows.
            rows: Rows of each pipeline's batch.
            column_of: Batches the values of a name.

        Raises:
            ValueError: If the batch has the name already, or the values don't stack.
            TypeError: If JAX would narrow 64-bit numbers.
        """
        for name, values in columns.items():
            if name in batch:
                raise ValueError(
                    f"the records' key {name!r} passes the graph by, and an output or the mask has "
                    "that name, too: name the output otherwise"
                )
            column = column_of(values, name)
            numeric = isinstance(column, np.ndarray) and column.dtype.kind in "biufc"
            if numeric and isinstance(self._placement, GlobalPlacement):
                pieces = np.split(narrowed(column, name), np.cumsum(rows)[:-1])
                column = self._place_rows(name, pieces, self._has_device_axis(len(rows)))
            batch[name] = column

    def _has_device_axis(self, pipelines: int) -> bool:
        if self._device_axis is None:  # as DALI's plugin stacks pipelines without a sharding
            return pipelines > 1
        return self._device_axis

    def _place_rows(self, name: str, pieces: Sequence[np.ndarray], axis: bool) -> Any:
        """Places host arrays of [rows, ...], one for each pipeline, as the mask is."""
        return self._placement.place_mask(name, [one[None] for one in pieces] if axis else pieces)

    def _piece(
        self, tensors: TensorList, name: str, pipeline: int, kept: int, copy: bool, axis: bool
    ) -> Any:
        """One pipeline's output as an array of [kept, ...], or [1, kept, ...] for pmap."""
        check_uniform(tensors, name, pipeline)
        on_gpu = isinstance(tensors, TensorListGPU)
        if tensors.dtype in WIDE and (on_gpu or not self._as_numpy):
            check_width(np.dtype(types.to_numpy_type(tensors.dtype)), name)
        view: Any = gpu_array if on_gpu else host_view
        array = view(tensors, copy, axis)
        self._note_shape(name, array.shape[1 + axis :])
        if kept == len(tensors):
            return array
        return array[:, :kept] if axis else array[:kept]

    def _note_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Warns once where an output's samples have had more than a few shapes."""
        shapes = self._shapes.setdefault(name, set())
        if shape in shapes or len(shapes) > _MOST_SHAPES:
            return
        shapes.add(shape)
        if len(shapes) > _MOST_SHAPES:
            warnings.warn(
                f"samples of output {name!r} had {len(shapes)} different shapes so far, like "
                f"{min(shapes)} and {max(shapes)}, one in each batch: a jitted step compiles anew "
                "for each. Give fn.pad the greatest shape (shape=...), or steps of it (align=...)",
                stacklevel=2,
            )

    def spec(
        self, batch: Batch, batch_size: int, plan: EpochPlan | None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of a whole batch, by one that may be cut.

        Args:
            batch: A batch.
            batch_size: Batch size of each pipeline.
            plan: The epochs; None where the source may give smaller batches.
        """
        specs = {}
        placed = isinstance(self._placement, GlobalPlacement)
        for name, array in batch.items():
            shape = array.shape
            if self._cut and plan is not None:
                axis = 1 if self._device_axis else 0
                shape = (*shape[:axis], batch_size, *shape[axis + 1 :])
            on_device = placed and isinstance(array, jax.Array)  # text stays on the host
            where = array.sharding if on_device else None
            specs[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=where)
        return specs


def check_uniform(tensors: TensorList, name: str, pipeline: int) -> None:
    """Raises RaggedError if the samples of an output of a pipeline differ in shape."""
    if tensors.is_dense_tensor():
        return
    shapes = [tuple(shape) for shape in tensors.shape()]
    other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), 0)
    if other:
        files = [tensors[row].source_info() for row in (0, other)]  # of DALI's own readers
        names = files if all(files) else ()
        raise RaggedError(name, pipeline, (0, other), (shapes[0], shapes[other]), names)


def host_view(tensors: TensorListCPU, copy: bool, device_axis: bool) -> np.ndarray:
    """A pipeline's CPU output as one NumPy array of shape [batch, ...], or [1, batch, ...].

    Read-only: a view that keeps the buffer alive, or a copy where the executor reuses the buffer.
    """
    view = np.asarray(tensors.as_tensor())
    if copy:
        view = view.copy()
    # Views may alias the caller's own memory (external_source with no_copy) or each other.
    view.flags.writeable = False
    return view[None] if device_axis else view


def gpu_array(tensors: TensorListGPU, copy: bool, device_axis: bool) -> jax.Array:
    """A pipeline's GPU output as a jax.Array of shape [batch, ...], or [1, batch, ...], there.

    JAX copies asynchronously: it is waited for, since the executor reuses the buffer (DALI issue
    5617).
    """
    if device_axis:
        tensor = tensors.as_reshaped_tensor([1, len(tensors), *tensors[0].shape()])
    else:
        tensor = tensors.as_tensor()
    array = jax.dlpack.from_dlpack(tensor)
    return array.copy().block_until_ready() if copy else array


def writable(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with copies for the NumPy arrays that are read-only views of DALI's buffers.

    A buffer may be shared with another output, a constant of the graph or a file in memory, which
    writing into it would change.
    """
    return {
        name: array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
        for name, array in batch.items()
    }
