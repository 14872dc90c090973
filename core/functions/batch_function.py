"""A function of batches, with checks of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..dtypes import check_width
from ..placement import GlobalPlacement, rows_sharding
from . import checks


class BatchFunction:
    """A user's function of batches, whose results are checked.

    Attributes:
        name: Its name, for messages.
        inputs: Number of its inputs.
        num_outputs: Number of its outputs.
        keyed: Whether it takes a key; its words then come behind the inputs.
        where: "cpu" or "gpu".
        takes_views: Whether it takes NumPy views of DALI's memory, not jax.Arrays.
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
        self._last: Any = None  # batch size, and types, shapes, dtypes, places of the last outputs
        # A compiled function takes NumPy views, which are made ten times faster than
        # jax.Arrays; where the default device is no CPU they would be moved there.
        self.takes_views = (
            where == "cpu"
            and isinstance(function, jax.stages.Wrapped)
            and jax.default_backend() == "cpu"
        )

    def key(self, words: Any) -> jax.Array:
        """The key of a batch, of its first sample's words; NumPy's give one on no device."""
        if self.where == "cpu" or isinstance(words, np.ndarray):
            return checks.jax_key(checks.key_of(np.asarray(words)))
        return _key_on_device(words)

    def __call__(self, arrays: Sequence[Any], batch: int | None, **more: Any) -> tuple[Any, ...]:
        """Calls the function; returns its checked outputs, on the GPU of the inputs if any."""
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
        """The checked outputs for a pipeline's batch; the words of a key are the last array."""
        more = {"key": self.key(arrays.pop())} if self.keyed else {}
        returned = self._function(*arrays, **more)
        outputs = returned if type(returned) is tuple else (returned,)
        batch = arrays[0].shape[0] if arrays else None
        try:
            alike = [(batch, type(o), o.shape, o.dtype, o.sharding) for o in outputs]
        except AttributeError:  # no jax.Array
            alike = None
        # The checks take 8 to 33 us beside an H200. They are left out for outputs like the last
        # ones, if those passed them and were on the right device.
        if alike and alike == self._last:
            return outputs
        checked = self._checked(returned, batch)
        placed = tuple(on_device(self.name, k, one, device) for k, one in enumerate(checked))
        stayed = all(one is other for one, other in zip(placed, checked))
        self._last = alike if stayed else None
        return placed

    def arrays(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Converts batches that were made on the CPU to the function's arguments."""
        for number, batch in enumerate(batches):
            check_width(batch.dtype, f"{number} of {self.name}()", "input")
        if self.takes_views:
            return list(batches)
        cpu = jax.local_devices(backend="cpu")[0]
        return [jax.device_put(one, cpu) for one in batches]


class OneDeviceFunction(BatchFunction):
    """A function of global arrays over one device of each process; DALI's thread calls it.

    Raises:
        ValueError: For several local devices, or a key in several processes.
    """

    def __init__(self, sharding: Sharding, *arguments: Any):
        super().__init__(*arguments)
        local = len(sharding.addressable_devices)
        if local > 1:
            raise ValueError(
                f"{self.name}() has a sharding over {local} devices of this process, and DALI "
                "calls functions of a graph for one device of each process: pass the function as "
                "batch_map=f to dalijax.data_iterator, which calls f(batch, key) with each global "
                "batch"
            )
        if self.keyed and jax.process_count() > 1:
            raise ValueError(
                f"{self.name}() takes a key, and the key would differ between processes: use "
                "batch_map=f of dalijax.data_iterator, whose key is the same in all processes"
            )
        self._placement = GlobalPlacement(sharding, ["input"])
        self._rows = rows_sharding(sharding)

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """Returns this process's rows of the outputs, for its rows of the inputs."""
        keywords = {"key": self.key(np.asarray(arrays.pop()))} if self.keyed else {}
        placed = [self._placement.place("input", [array]) for array in arrays]
        outputs = self(placed, placed[0].shape[0] if placed else None, **keywords)
        rows = [on_device(self.name, k, output, self._rows) for k, output in enumerate(outputs)]
        return tuple(
            on_device(self.name, k, output.addressable_shards[0].data, device)
            for k, output in enumerate(rows)
        )


_key_on_device = jax.jit(checks.key_of_array)


def on_device(name: str, number: int, array: Any, where: jax.Device | Sharding) -> jax.Array:
    """An output on the operator's device, or with a sharding; moved there if it is elsewhere.

    Raises:
        TypeError: For NumPy arrays of 64 bits that JAX would narrow.
    """
    if isinstance(array, jax.Array):
        return array if array.devices() == {where} else jax.device_put(array, where)
    check_width(np.dtype(array.dtype), f"{number} of {name}()")
    # A copy, since the function may write its array again, and device_put (even with
    # may_alias=False, in JAX 0.12) makes a view of it on the CPU, or reads it later.
    return jax.device_put(np.array(array), where)
