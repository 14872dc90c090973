"""Functions of global arrays: the last step of a graph, or in DALI's thread on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..dtypes import check_width
from ..placement import GlobalPlacement, rows_sharding
from . import checks
from .batch_function import BatchFunction, on_device


class GlobalFunction:
    """A function that is called on the placed batch; see `core.pipeline.deferred`.

    Raises:
        ValueError: If it takes a key over several processes, without a NamedSharding.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_outputs: int,
        sharding: Sharding,
        keyed: bool,
        preserve: bool,
    ):
        self.name = checks.name_of(function)
        self.num_outputs = num_outputs
        self.sharding = sharding
        self.preserve = preserve
        self.keyed = keyed
        self._function = function
        if keyed and not (sharding.is_fully_addressable or isinstance(sharding, NamedSharding)):
            raise ValueError(
                f"{self.name}() wants a key over several processes, whose sharding must be a "
                f"NamedSharding then, not {sharding!r}"
            )

    def __call__(self, arrays: Sequence[jax.Array], words: Any) -> tuple[jax.Array, ...]:
        """Calls the function; returns jax.Arrays of any shape."""
        # This is the caller's thread, whose transfer_guard is meant for the caller's computations.
        with jax.transfer_guard("allow"):
            more = {"key": self._key(words)} if self.keyed else {}
            returned = self._function(*arrays, **more)
            outputs = checks.results(self.name, returned, self.num_outputs)
            return tuple(self._checked(k, one) for k, one in enumerate(outputs))

    def _key(self, words: Any) -> jax.Array:
        """The key of a batch: not committed to a device, or on all devices of all processes."""
        if isinstance(words, np.ndarray):
            return checks.jax_key(checks.key_of(words))
        mesh: Any = self.sharding
        return _key_maker(NamedSharding(mesh.mesh, PartitionSpec()))(words)

    def _checked(self, number: int, array: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return array
        checks.check_array(self.name, number, array)
        check_width(array.dtype, f"{number} of {self.name}()")
        return jax.device_put(np.array(array))  # a copy: the function may write its array again


@functools.lru_cache(maxsize=8)
def _key_maker(everywhere: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(checks.key_of_array, out_shardings=everywhere)


class OnOneDevice(BatchFunction):
    """A function of global arrays in a pipeline made by hand.

    As in DALI's documentation, it is called in DALI's thread, with one local device.

    Raises:
        ValueError: For several local devices, or a key in several processes.
    """

    def __init__(self, sharding: Sharding, *arguments: Any):
        super().__init__(*arguments)
        local = len(sharding.addressable_devices)
        if local > 1:
            raise ValueError(
                f"{self.name}() has a sharding over {local} devices of this process, and in "
                "the middle of a graph, or in a pipeline made by hand, DALI calls it for one "
                "device in each process: make it the last step of a function of "
                "dalijax.data_iterator, or apply it to the batch"
            )
        if self.keyed and jax.process_count() > 1:
            raise ValueError(
                f"{self.name}() wants a key, which differs from process to process here: hand "
                "it numbers that do not, by jax.random.key(step) say"
            )
        self._placement = GlobalPlacement(sharding, ["input"])
        self._rows = rows_sharding(sharding)

    def run(self, arrays: list[Any], device: jax.Device) -> tuple[Any, ...]:
        """This process's rows of the outputs, given its rows of the inputs."""
        more = {"key": self.key(np.asarray(arrays.pop()))} if self.keyed else {}
        placed = [self._placement.place("input", [one]) for one in arrays]
        outputs = self(placed, placed[0].shape[0] if placed else None, **more)
        by_rows = [on_device(self.name, k, one, self._rows) for k, one in enumerate(outputs)]
        return tuple(
            on_device(self.name, k, one.addressable_shards[0].data, device)
            for k, one in enumerate(by_rows)
        )
