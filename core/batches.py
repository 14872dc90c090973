"""From the outputs of pipelines to the batch that JAX code gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.tensors import TensorListCPU

from . import arrays
from .config import IteratorConfig
from .placement import GlobalLayout, LocalLayout, over_devices
from .runner import Outputs

Batch = dict[str, Any]


def choose_layout(config: IteratorConfig) -> GlobalLayout | LocalLayout:
    """Where batches live, by the iterator's arguments."""
    if config.sharding is not None:
        return GlobalLayout(config.sharding, config.output_map)
    if config.devices is not None:
        return over_devices(config.devices, config.output_map)
    return LocalLayout(None if config.as_numpy else jax.local_devices(backend="cpu")[0])


class BatchMaker:
    """Makes batches of what the pipelines of one iterator give.

    Args:
        config: The iterator's arguments.
        layout: Where batches live.
    """

    def __init__(self, config: IteratorConfig, layout: GlobalLayout | LocalLayout):
        self._names = config.output_map
        self._mask = config.mask
        self._cut = config.last_batch_policy is LastBatchPolicy.PARTIAL
        self._as_numpy = bool(config.as_numpy)
        self._layout = layout
        self._device_axis = config.pmap_compatible
        if config.sharding is not None:
            self._device_axis = False
        elif config.devices is not None and self._device_axis is None:
            self._device_axis = True

    def __call__(self, outputs: Sequence[Outputs], valid: Sequence[int], copy: bool) -> Batch:
        """The batch of one run.

        Args:
            outputs: The outputs of each pipeline.
            valid: Number of samples of each pipeline's batch that belong to the epoch.
            copy: Whether the buffers are reused once they are released.
        """
        axis = self._device_axis
        if axis is None:  # as DALI's plugin: several pipelines without a sharding are stacked
            axis = len(outputs) > 1
        kept = [n if self._cut else len(own[0]) for n, own in zip(valid, outputs)]
        batch: Batch = {}
        for k, name in enumerate(self._names):
            pieces = [self._piece(own[k], name, n, copy, axis) for own, n in zip(outputs, kept)]
            batch[name] = self._layout.place(name, pieces)
        if self._mask is not None:
            masks = [np.arange(n) < v for n, v in zip(kept, valid)]
            if axis:
                masks = [mask[None] for mask in masks]
            batch[self._mask] = self._layout.place_mask(self._mask, masks)
        return batch

    def _piece(
        self, tensors: arrays.TensorList, name: str, kept: int, copy: bool, axis: bool
    ) -> Any:
        """One pipeline's output as an array of [kept, ...], or [1, kept, ...] for pmap."""
        array: Any
        if arrays.is_on_gpu(tensors):
            array = arrays.gpu_array(tensors, name, copy, axis)
        else:
            array = arrays.host_view(cast(TensorListCPU, tensors), name, copy, axis)
            if not self._as_numpy:
                arrays.check_width(array.dtype, name)
        if kept == len(tensors):
            return array
        return array[:, :kept] if axis else array[:kept]
