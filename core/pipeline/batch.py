"""Converts the outputs of pipelines to batches, and places the batches on devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nvidia.dali import types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.tensors import TensorListCPU, TensorListGPU

from ..arrays.dtypes import WIDE, as_bfloat16, check_width, is_number, narrowed
from ..arrays.placement import DataShard, GlobalPlacement, over_devices
from ..config import IteratorConfig
from ..errors import RaggedError
from ..messages.user_warnings import warn_user
from ..order.packing import RowLayout
from .runner import Outputs, TensorList

Batch = dict[str, Any]

_MOST_SHAPES = 8  # shapes of samples before a warning: a jitted step compiles for each shape


def choose_placement(config: IteratorConfig) -> GlobalPlacement | LocalPlacement:
    """Returns the placement of batches that the iterator's arguments determine."""
    if config.sharding is not None:
        return GlobalPlacement(config.sharding, config.output_map)
    if config.devices is not None:
        return over_devices(config.devices, config.output_map)
    return LocalPlacement(None if config.as_numpy else jax.local_devices(backend="cpu")[0])


class LocalPlacement:
    """Keeps batches on the devices of the pipelines, and joins the arrays of several pipelines.

    Args:
        host: The CPU device for outputs on the CPU; None: these outputs stay NumPy arrays.
    """

    shards: tuple[DataShard, ...] = ()

    def __init__(self, host: jax.Device | None):
        self._host = host
        self._is_first = host is not None and host == jax.local_devices()[0]

    def place(self, name: str, pieces: Sequence[Any]) -> Any:
        """Returns an output as one array: the pieces of the pipelines, joined along dimension 0.

        Pieces on different GPUs become one array over these GPUs, without a copy. Pieces on one
        device are concatenated there. On the host, the result is a NumPy array until `finish`.
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
        """Returns the mask of all pipelines, joined from their pieces, for use on any device.

        The mask is a NumPy array, or an uncommitted jax.Array if JAX's default device is not the
        host device.
        """
        mask = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return mask if self._host is None or self._host_is_default() else jax.device_put(mask)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch with its NumPy arrays as jax.Arrays, if there is a host device.

        Aligned, read-only arrays are not copied. One call for all arrays costs less than a call for
        each array. (jnp.asarray is cheaper for small arrays, but it is a computation, subject to
        transfer guards, meshes and jax_debug_nans.) The arrays are uncommitted, so that a step
        compiles once for fresh and for computed parameters, and can also take GPU arrays.
        """
        on_host = {k: array for k, array in batch.items() if isinstance(array, np.ndarray)}
        if self._host is None or not on_host:
            return batch
        if self._host_is_default():
            return batch | jax.device_put(on_host)  # avoids the context, which costs 10 to 100 us
        with jax.default_device(self._host):
            return batch | jax.device_put(on_host)

    def _host_is_default(self) -> bool:
        default = jax.config.jax_default_device
        return self._is_first if default is None else default == self._host


class BatchMaker:
    """Creates batches from the outputs of an iterator's pipelines.

    Args:
        config: Arguments of the iterator.
        placement: Placement of the batches.
        num_shapes: The number of shapes that samples of an output are expected to have.

    Attributes:
        names: Names of the outputs, in the order in which the pipelines return them.
        bfloat16: Indices of the outputs that are rounded to bfloat16. Both attributes are final
            once the pipelines were defined.
    """

    def __init__(
        self,
        config: IteratorConfig,
        placement: GlobalPlacement | LocalPlacement,
        num_shapes: int = 1,
    ):
        self._placement = placement
        self.names = tuple(config.output_map)
        self._mask = config.mask
        self._cut = config.last_batch_policy is LastBatchPolicy.PARTIAL
        self._as_numpy = bool(config.as_numpy)
        self.bfloat16: tuple[int, ...] = ()
        self._shapes: dict[str, set[tuple[int, ...]]] = {}  # shapes of samples, by output name
        self._most_shapes = max(_MOST_SHAPES, num_shapes)
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
        layouts: Sequence[RowLayout] = (),
        row_values: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({}),
    ) -> Batch:
        """Returns the batch of one run: an array for each output, and the mask.

        Args:
            outputs: The outputs of each pipeline.
            valid: For each pipeline, the number of leading rows of its batch that are samples of
                the epoch, or a bool mask [rows].
            copy: Whether arrays are copies, because DALI reuses the buffers of the outputs.
            layouts: The layout of each pipeline's rows if these contain several samples, whose
                outputs follow each other; else empty. The masks are those of the rows then.
            row_values: Further arrays [rows, ...] of the batch by name: one of each pipeline.

        Raises:
            ValueError: If an output has a name of ``row_values``, or does not fill its rows.
        """
        axis = self._has_device_axis(len(outputs))
        cut = self._cut
        rows_kept = [
            n if cut and isinstance(n, int) else len(tensors[0])
            for n, tensors in zip(valid, outputs)
        ]

        def pieces(k: int, name: str) -> list[Any]:
            arrays = [
                self._piece(tensors[k], name, number, n, copy, axis, layout)
                for number, (tensors, n, layout) in enumerate(
                    itertools.zip_longest(outputs, rows_kept, layouts)
                )
            ]
            return [*map(as_bfloat16, arrays)] if k in self.bfloat16 else arrays

        batch: Batch = {
            name: self._placement.place(name, pieces(k, name)) for k, name in enumerate(self.names)
        }
        if self._mask is not None:
            masks = [
                v if isinstance(v, np.ndarray) else np.arange(n) < v
                for n, v in zip(rows_kept, valid)
            ]
            batch[self._mask] = self._place_rows(self._mask, masks, axis)
        for name, arrays in row_values.items():
            if name in batch:
                raise ValueError(
                    f"an output, or the mask, has the name {name!r} of an array that the source "
                    "adds to the batch. Rename it"
                )
            if self._keeps_on_host(name):
                batch[name] = np.concatenate(arrays)
            else:
                batch[name] = self._place_rows(name, arrays, axis)
        return self._placement.finish(batch)

    def add_columns(
        self,
        batch: Batch,
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
        column_of: Callable[[Sequence[Any], str], Any],
    ) -> None:
        """Adds to a batch the values of records that bypass the graph.

        With a sharding, the rows of numeric arrays are placed like the rows of the mask. If a dict
        of shardings contains the name of the values, its entry is used. For the entry None, the
        array stays on the host.

        Args:
            batch: The batch of one run, which is changed.
            columns: The values of all rows, by name.
            rows: Number of rows of each pipeline's batch.
            column_of: A function of (values, name) that returns the values of all rows as the entry
                of the batch, e.g. stacked to a NumPy array.

        Raises:
            ValueError: If the batch already has the name, or the values can't be stacked.
            TypeError: If JAX would narrow 64-bit numbers.
        """
        for name, values in columns.items():
            if name in batch:
                raise ValueError(
                    f"the records' key {name!r} bypasses the graph, but an output or the mask has "
                    "the same name. Rename the output"
                )
            column = column_of(values, name)
            numeric = isinstance(column, np.ndarray) and is_number(column.dtype)
            is_global = isinstance(self._placement, GlobalPlacement)
            if numeric and is_global and not self._keeps_on_host(name):
                pieces = np.split(narrowed(column, name), np.cumsum(rows)[:-1])
                column = self._place_rows(name, pieces, self._has_device_axis(len(rows)))
            batch[name] = column

    def _keeps_on_host(self, name: str) -> bool:
        """Returns whether an output stays on the host, because its sharding is None."""
        return isinstance(self._placement, GlobalPlacement) and self._placement.is_on_host(name)

    def _has_device_axis(self, pipelines: int) -> bool:
        if self._device_axis is None:  # like DALI's plugin, which stacks pipelines
            return pipelines > 1
        return self._device_axis

    def _place_rows(self, name: str, pieces: Sequence[np.ndarray], axis: bool) -> Any:
        """Returns the host arrays [rows, ...] of all pipelines as one array, placed as the mask."""
        return self._placement.place_mask(
            name, [piece[None] for piece in pieces] if axis else pieces
        )

    def _piece(
        self,
        tensors: TensorList,
        name: str,
        pipeline: int,
        num_rows: int,
        copy: bool,
        axis: bool,
        layout: RowLayout | None,
    ) -> Any:
        """Returns an output as an array [num_rows, ...], or [1, num_rows, ...] with ``axis``."""
        if layout is None:
            check_uniform(tensors, name, pipeline)
            shape = [len(tensors), *tensors[0].shape()]
        else:
            shape = _shape_of_rows(tensors, name, layout)
        on_gpu = isinstance(tensors, TensorListGPU)
        on_host = self._as_numpy or self._keeps_on_host(name)
        if tensors.dtype in WIDE and (on_gpu or not on_host):
            check_width(np.dtype(types.to_numpy_type(tensors.dtype)), name)
        view: Any = gpu_array if on_gpu else host_view
        array = view(tensors, copy, [1, *shape] if axis else shape)
        self._note_shape(name, array.shape[1 + axis :])
        if layout is not None or num_rows == len(tensors):
            return array
        return array[:, :num_rows] if axis else array[:num_rows]

    def _note_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Counts the shapes of an output's samples; warns once if there are many."""
        shapes = self._shapes.setdefault(name, set())
        if shape in shapes or len(shapes) > self._most_shapes:
            return
        shapes.add(shape)
        if len(shapes) > self._most_shapes:
            warn_user(
                f"samples of output {name!r} have had {len(shapes)} different shapes, such as "
                f"{min(shapes)} and {max(shapes)}, in different batches: a jitted step compiles "
                "for each. Pass the largest shape (shape=...), or multiples (align=...), to fn.pad",
                UserWarning,
            )

    def spec(self, batch: Batch, batch_size: int | None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape, dtype and sharding of each array of a full batch, by name.

        Args:
            batch: A batch, which PARTIAL may have cut.
            batch_size: Batch size of each pipeline; None: shapes are as in ``batch``.
        """
        specs = {}
        placed = isinstance(self._placement, GlobalPlacement)
        for name, array in batch.items():
            shape = array.shape
            if self._cut and batch_size is not None:
                axis = 1 if self._device_axis else 0
                shape = (*shape[:axis], batch_size, *shape[axis + 1 :])
            on_device = placed and isinstance(array, jax.Array)  # text stays on the host
            sharding = array.sharding if on_device else None
            specs[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        return specs


def check_uniform(tensors: TensorList, name: str, pipeline: int) -> None:
    """Raises RaggedError if the samples of a pipeline's output differ in shape."""
    if tensors.is_dense_tensor():
        return
    shapes = [tuple(shape) for shape in tensors.shape()]
    row_of_other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), 0)
    if row_of_other:
        files = [tensors[row].source_info() for row in (0, row_of_other)]  # set by DALI's readers
        names = files if all(files) else ()
        raise RaggedError(
            name, pipeline, (0, row_of_other), (shapes[0], shapes[row_of_other]), names
        )


def _shape_of_rows(tensors: TensorList, name: str, layout: RowLayout) -> list[int]:
    """Returns the shape [rows, ...] of an output whose samples fill rows exactly.

    Raises:
        ValueError: If they do not.
    """
    shapes = [shape or (0,) for shape in tensors.shape()]  # empty for scalars
    ends, rows = np.cumsum([shape[0] for shape in shapes]), len(layout.counts)
    length, rest = divmod(int(ends[-1]), rows)
    # The last sample also fills the blank rows after it.
    (filled,) = np.nonzero(layout.counts[:-1] * layout.counts[1:])
    last = np.cumsum(layout.counts)[filled] - 1
    fills = length in (layout.most, layout.capacity) and not rest
    fills = fills and bool((ends[last] == length * (filled + 1)).all())
    others = {shape[1:] for shape in shapes}
    if not fills or len(others) > 1:
        raise ValueError(
            f"the samples of output {name!r} do not fill the rows of the batch: their shapes are "
            f"{', '.join(map(str, tensors.shape()[:3]))}, ... pack.per_image(x) takes values of "
            "one shape, and operators after pack must keep the shapes"
        )
    shape = [rows, length, *others.pop()]
    return shape[:1] + shape[2:] if length == layout.capacity == 1 else shape


def host_view(tensors: TensorListCPU, copy: bool, shape: list[int]) -> np.ndarray:
    """Returns a pipeline's CPU output as a NumPy array of a shape, such as [batch, ...].

    The result is read-only: a view that keeps DALI's buffer alive, or with ``copy`` a copy, for
    pipelines that reuse the buffer.
    """
    view = np.asarray(tensors.as_reshaped_tensor(shape))
    if copy:
        view = view.copy()
    # Views may share the caller's own memory (external_source with no_copy), or each other's.
    view.flags.writeable = False
    return view


def gpu_array(tensors: TensorListGPU, copy: bool, shape: list[int]) -> jax.Array:
    """Returns a pipeline's GPU output as a jax.Array of a shape, such as [batch, ...].

    Without ``copy``, the array shares DALI's buffer. JAX copies asynchronously, so that a copy is
    awaited before DALI reuses the buffer (DALI issue 5617).
    """
    array = jax.dlpack.from_dlpack(tensors.as_reshaped_tensor(shape))
    return array.copy().block_until_ready() if copy else array


def writable(batch: dict[str, Any], wanted: bool) -> dict[str, Any]:
    """Returns a batch, with copies of its read-only NumPy arrays if ``wanted``.

    Read-only arrays are views of DALI's buffers. Writing to a view could change other data, because
    other outputs, a constant of the graph or a file in memory may share its buffer.
    """
    if not wanted:
        return batch
    return {
        name: array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
        for name, array in batch.items()
    }
