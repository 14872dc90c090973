"""A function of batches that checks its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..arguments import qualified_name
from ..arrays.dtypes import check_width
from ..arrays.placement import GlobalPlacement, rows_sharding
from . import checks


class BatchFunction:
    """Calls a user's function of batches, and checks its outputs.

    Attributes:
        name: The function's name, for messages.
        inputs: The number of inputs.
        num_outputs: The number of outputs.
        keyed: Whether the function takes a key. The bytes from `checks.key_words` then follow the
            inputs.
        device_type: "cpu" or "gpu".
        takes_views: Whether the function takes NumPy views of DALI's memory instead of jax.Arrays.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_outputs: int,
        layouts: Sequence[str] | None,
        device_type: str,
        keyed: bool,
        inputs: int,
    ):
        self.name = qualified_name(function)
        self.inputs = inputs
        self.keyed = keyed
        self.device_type = device_type
        self._function = function
        self.num_outputs = num_outputs
        self._layouts = layouts
        # The batch size, and the types, shapes, dtypes and shardings of the last outputs.
        self._last: Any = None
        # A compiled function takes NumPy views, which are created ten times faster than
        # jax.Arrays. If the default device isn't a CPU, it takes jax.Arrays on the CPU, because JAX
        # would move NumPy views to the default device.
        self.takes_views = (
            device_type == "cpu"
            and isinstance(function, jax.stages.Wrapped)
            and jax.default_backend() == "cpu"
        )

    def key(self, words: Any) -> jax.Array:
        """Returns the jax.random.key of a batch.

        Args:
            words: Random bytes of the samples, uint8 of shape [batch, 8]; the bytes of the first
                sample determine the key. For a function on a GPU, jax.Arrays are converted on
                their device; other bytes are converted on the host.
        """
        if self.device_type == "cpu" or isinstance(words, np.ndarray):
            return checks.jax_key(checks.key_of(np.asarray(words)))
        return _key_on_device(words)

    def __call__(
        self, arrays: Sequence[Any], batch: int | None, **keywords: Any
    ) -> tuple[Any, ...]:
        """Calls the function, and returns its checked outputs.

        Outputs of a function on a GPU are moved to the device of the first input, unless this input
        is spread over several devices.

        Args:
            arrays: An array [batch, ...] for each input.
            batch: Number of samples; None if unknown.
            **keywords: Keyword arguments of the function, such as ``key``.
        """
        devices = arrays[0].devices() if arrays and self.device_type == "gpu" else ()
        outputs = self._checked(self._function(*arrays, **keywords), batch)
        if len(devices) != 1:
            return outputs
        return tuple(on_device(self.name, k, output, *devices) for k, output in enumerate(outputs))

    def _checked(self, returned: Any, batch: int | None) -> tuple[Any, ...]:
        outputs = checks.results(self.name, returned, self.num_outputs)
        for number, array in enumerate(outputs):
            layout = self._layouts[number] if self._layouts else None
            checks.check_output(self.name, number, array, batch, layout)
        return outputs

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """Calls the function with a batch, and returns its outputs on a device.

        Args:
            arrays: An array [batch, ...] for each input. If the function takes a key, the list ends
                with the random bytes of the key, uint8 [batch, 8], which are removed from it.
            device: The device of the outputs.
        """
        keywords = {"key": self.key(arrays.pop())} if self.keyed else {}
        returned = self._function(*arrays, **keywords)
        outputs = returned if type(returned) is tuple else (returned,)
        batch = arrays[0].shape[0] if arrays else None
        try:
            signature = [(batch, type(o), o.shape, o.dtype, o.sharding) for o in outputs]
        except AttributeError:  # not a jax.Array
            signature = None
        # The checks take 8 to 33 us with an H200. They are skipped if the signature equals that of
        # the last outputs, and the last outputs were valid and on the right device.
        if signature and signature == self._last:
            return outputs
        checked = self._checked(returned, batch)
        placed = tuple(on_device(self.name, k, output, device) for k, output in enumerate(checked))
        stayed = all(output is array for output, array in zip(placed, checked))
        self._last = signature if stayed else None
        return placed

    def arrays(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Returns NumPy batches as arguments of the function, in a list.

        The arguments are the batches themselves if `takes_views` is True, otherwise jax.Arrays on
        the CPU.

        Raises:
            TypeError: If a batch has a dtype of 64 bits, which JAX would narrow.
        """
        for number, batch in enumerate(batches):
            check_width(batch.dtype, f"{number} of {self.name}()", "input")
        if self.takes_views:
            return list(batches)
        cpu = jax.local_devices(backend="cpu")[0]
        return [jax.device_put(batch, cpu) for batch in batches]


class OneDeviceFunction(BatchFunction):
    """Calls a function of global arrays over one device per process, in DALI's thread.

    Raises:
        ValueError: If the process has several devices, or several processes need a key.
    """

    def __init__(self, sharding: Sharding, *arguments: Any):
        super().__init__(*arguments)
        local = len(sharding.addressable_devices)
        if local > 1:
            raise ValueError(
                f"{self.name}() has a sharding over {local} devices of this process, but DALI "
                "supports only one device per process for functions of a graph. Pass the function "
                "as batch_map=f to dalijax.data_iterator, which calls f(batch, key) with each "
                "global batch"
            )
        if self.keyed and jax.process_count() > 1:
            raise ValueError(
                f"{self.name}() takes a key, which would differ between processes. Use batch_map=f "
                "of dalijax.data_iterator, whose key is the same in all processes"
            )
        self._placement = GlobalPlacement(sharding, ["input"])
        self._rows = rows_sharding(sharding)

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """Calls the function with global arrays, and returns this process's rows of the outputs.

        Args:
            arrays: As for `BatchFunction.run`, with this process's rows of the inputs.
            device: The device of the outputs.
        """
        keywords = {"key": self.key(np.asarray(arrays.pop()))} if self.keyed else {}
        placed = [self._placement.place("input", [array]) for array in arrays]
        outputs = self(placed, placed[0].shape[0] if placed else None, **keywords)
        rows = [on_device(self.name, k, output, self._rows) for k, output in enumerate(outputs)]
        return tuple(
            on_device(self.name, k, output.addressable_shards[0].data, device)
            for k, output in enumerate(rows)
        )


_key_on_device = jax.jit(checks.key_of_array)


def on_device(name: str, number: int, array: Any, target: jax.Device | Sharding) -> jax.Array:
    """Returns an output of a function as a jax.Array on a device or with a sharding.

    Args:
        name: The function's name, for messages.
        number: The index of the output, for messages.
        array: The output.
        target: The device or the sharding. The output is moved there if necessary.

    Raises:
        TypeError: If the output is a NumPy array of 64 bits that JAX would narrow.
    """
    if isinstance(array, jax.Array):
        return array if array.devices() == {target} else jax.device_put(array, target)
    check_width(np.dtype(array.dtype), f"{number} of {name}()")
    # A copy, since the function may write to its array later. On the CPU device_put makes a view
    # of the array or reads it later, even with may_alias=False (in JAX 0.12).
    return jax.device_put(np.array(array), target)
