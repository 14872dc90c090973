"""A function of batches, with checks of what it gets and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..pipeline.dtypes import check_width
from . import checks


class BatchFunction:
    """A user's function of batches, whose results are checked.

    Attributes:
        name: Its name, for messages.
        inputs: Number of its inputs.
        num_outputs: Number of its outputs.
        keyed: Whether it wants a key, whose words are then the input behind them.
        where: "cpu" or "gpu".
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_outputs: int,
        layouts: Sequence[str] | None,
        where: str,
        keyed: bool,
        inputs: int,
    ):
        self.name = checks.name_of(function)
        self.inputs = inputs
        self.keyed = keyed
        self.where = where
        self._function = function
        self.num_outputs = num_outputs
        self._layouts = layouts
        self._last: Any = None  # of what shapes, dtypes and places the last outputs were
        # A compiled function takes NumPy views, which are made ten times faster than
        # jax.Arrays; where the default device is no CPU they would be moved there.
        self.takes_views = (
            where == "cpu"
            and isinstance(function, jax.stages.Wrapped)
            and jax.default_backend() == "cpu"
        )

    def key(self, words: Any) -> jax.Array:
        """The key of a batch, of its first sample's words: of NumPy's, a key on no device."""
        if self.where == "cpu" or isinstance(words, np.ndarray):
            return checks.jax_key(checks.key_of(np.asarray(words)))
        return _key_on_device(words)

    def __call__(self, arrays: Sequence[Any], batch: int | None, **more: Any) -> tuple[Any, ...]:
        """The checked outputs for arrays of a batch, on the GPU where the inputs are, if any."""
        devices = arrays[0].devices() if arrays and self.where == "gpu" else ()
        outputs = self._checked(self._function(*arrays, **more), batch)
        if len(devices) != 1:
            return outputs
        return tuple(on_device(self.name, k, one, *devices) for k, one in enumerate(outputs))

    def _checked(self, returned: Any, batch: int | None) -> tuple[Any, ...]:
        outputs = checks.results(self.name, returned, self.num_outputs)
        for number, array in enumerate(outputs):
            layout = self._layouts[number] if self._layouts else None
            checks.check_output(self.name, number, array, batch, layout)
        return outputs

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """The outputs of a pipeline's batch, checked. The words of the key are the last array."""
        more = {"key": self.key(arrays.pop())} if self.keyed else {}
        returned = self._function(*arrays, **more)
        outputs = returned if type(returned) is tuple else (returned,)
        batch = arrays[0].shape[0] if arrays else None
        try:
            alike = [(batch, type(o), o.shape, o.dtype, o.sharding) for o in outputs]
        except AttributeError:  # no jax.Array
            alike = None
        # The checks cost 8 to 33 us beside an H200. Outputs like the last ones, which passed them
        # and were where they belong, need none.
        if alike and alike == self._last:
            return outputs
        checked = self._checked(returned, batch)
        placed = tuple(on_device(self.name, k, one, device) for k, one in enumerate(checked))
        stayed = all(one is other for one, other in zip(placed, checked))
        self._last = alike if stayed else None
        return placed

    def arrays(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Batches that were made of samples on the CPU, as what the function gets."""
        for number, batch in enumerate(batches):
            check_width(batch.dtype, f"{number} of {self.name}()", "input")
        if self.takes_views:
            return list(batches)
        cpu = jax.local_devices(backend="cpu")[0]
        return [jax.device_put(one, cpu) for one in batches]


_key_on_device = jax.jit(checks.key_of_array)


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
