"""Placement of batches: from a Sharding or devices to pipelines, and from pieces to arrays.

The rows of a global batch are cut into *data shards*, the distinct row ranges that the
sharding gives to devices. One pipeline decodes each data shard that a local device holds, on
the first such device; the others get copies::

    mesh (data=2, model=2), P("data")          rows 0..B/2          rows B/2..B
                                               device 0, device 1   device 2, device 3
                                               pipeline 0           pipeline 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


@dataclasses.dataclass(frozen=True)
class DataShard:
    """One distinct range of a global batch's rows, and the devices that hold it.

    Attributes:
        shard_id: Position of the range among all ranges, over all processes.
        num_shards: Number of the ranges.
        devices: The local devices that hold it; the first of them decodes it.
    """

    shard_id: int
    num_shards: int
    devices: tuple[jax.Device, ...]

    @property
    def device_id(self) -> int | None:
        """DALI's device_id for the pipeline: the GPU's number on this host, None on a CPU."""
        return gpu_ordinal(self.devices[0])

    def batch_size(self, global_batch: int) -> int:
        """Rows of this shard.

        Raises:
            ValueError: If the shards do not divide the global batch.
        """
        if global_batch % self.num_shards:
            raise ValueError(
                f"batch_size={global_batch} is not divisible by the {self.num_shards} data "
                "shards that the sharding cuts it into: batch_size is the global batch, "
                f"e.g. {-(-global_batch // self.num_shards) * self.num_shards}"
            )
        return global_batch // self.num_shards


def gpu_ordinal(device: jax.Device) -> int | None:
    """The number of a GPU on its host; None for a CPU."""
    return None if device.platform == "cpu" else int(device.local_hardware_id)


def data_shards(sharding: Sharding) -> list[DataShard]:
    """The data shards that this process holds, in order of their rows.

    Args:
        sharding: Any sharding, of any device order, with unused axes, over any processes.
    """
    rank = max(1, len(sharding.spec)) if isinstance(sharding, NamedSharding) else 1
    # The shape of a virtual array that every axis divides: only the cuts matter.
    shape = (len(sharding.device_set),) * rank

    def first_row(index: tuple[slice, ...] | None) -> int:
        return index[0].indices(shape[0])[0] if index else 0

    order = sorted({first_row(index) for index in sharding.devices_indices_map(shape).values()})
    holders: dict[int, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(first_row(index), []).append(device)
    return [
        DataShard(order.index(start), len(order), tuple(devices))
        for start, devices in sorted(holders.items())
    ]


def rows_sharding(sharding: Sharding) -> Sharding:
    """A sharding that cuts the same rows and nothing else, for arrays of rank 1 or more."""
    if isinstance(sharding, NamedSharding):
        rows = sharding.spec[0] if len(sharding.spec) else None
        return NamedSharding(sharding.mesh, PartitionSpec(rows))
    return sharding


def over_current_mesh(sharding: Any) -> Any:
    """A sharding, with the current mesh for PartitionSpecs that have none.

    Args:
        sharding: A Sharding, a PartitionSpec, or a dict of them. In a dict, PartitionSpecs are of
            the mesh of another output's NamedSharding, if there is one.

    Raises:
        ValueError: If there is no current mesh.
    """
    if isinstance(sharding, PartitionSpec):
        return NamedSharding(_current_mesh(sharding), sharding)
    if not isinstance(sharding, Mapping):
        return sharding
    if any(isinstance(one, NamedSharding) for one in sharding.values()):
        return sharding
    return {name: over_current_mesh(one) for name, one in sharding.items()}


def _current_mesh(spec: PartitionSpec) -> jax.sharding.Mesh:
    """The mesh of `jax.set_mesh`, or of the contexts of older versions of JAX."""
    from jax._src import mesh as meshes  # the only getter of `with mesh:` and of jax below 0.6

    getters = (
        getattr(jax.sharding, "get_mesh", None),
        getattr(meshes, "get_concrete_mesh", None),
        lambda: meshes.thread_resources.env.physical_mesh,
    )
    for getter in getters:
        mesh = None if getter is None else getter()
        if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
            return mesh
    raise ValueError(
        f"sharding is {spec!r}, and no mesh is set in this thread: make the iterator within `with "
        f"jax.set_mesh(mesh):`, or pass jax.sharding.NamedSharding(mesh, {spec!r})"
    )


def _output_shardings(
    sharding: Sharding | Mapping[str, Any], names: Sequence[str]
) -> dict[str, Sharding]:
    """The sharding of each output, given one for all or a dict."""
    sharding = over_current_mesh(sharding)
    if isinstance(sharding, Sharding):
        return dict.fromkeys(names, sharding)
    if not isinstance(sharding, Mapping):
        raise _no_sharding("sharding must be a jax.sharding.Sharding, or a dict", sharding)
    if set(sharding) != set(names):
        raise ValueError(
            f"sharding is for {sorted(sharding)}, the outputs are {sorted(names)}: "
            "give each output one"
        )
    mesh = next((s.mesh for s in sharding.values() if isinstance(s, NamedSharding)), None)
    shardings: dict[str, Sharding] = {}
    for name, value in sharding.items():
        if isinstance(value, PartitionSpec) and mesh is not None:
            value = NamedSharding(mesh, value)
        if not isinstance(value, Sharding):
            raise _no_sharding(f"sharding[{name!r}] must be a Sharding or PartitionSpec", value)
        shardings[name] = value
    return shardings


def _no_sharding(what: str, value: object) -> TypeError:
    cure = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))"
    if isinstance(value, jax.sharding.Mesh):
        axis = value.axis_names[0] if value.axis_names else "data"
        cure = (
            "with the axes that cut the batch, "
            f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec({axis!r}))"
        )
    elif isinstance(value, (list, tuple)) and all(isinstance(d, jax.Device) for d in value):
        cure = "or these as devices=[...], for pmap's layout"
    return TypeError(f"{what}, not {value!r}: pass {cure}")


def _put(piece: Any, device: jax.Device) -> jax.Array:
    """A piece on a device; no copy is made of one that is there already."""
    if isinstance(piece, jax.Array) and piece.devices() == {device}:
        return piece
    return jax.device_put(piece, device)


class GlobalPlacement:
    """Batches as global arrays, each output placed by its sharding.

    Nothing is concatenated: each device gets its rows from the pipeline of its data shard,
    without a copy where they are there already.

    Args:
        sharding: One Sharding for all outputs, or a dict of output name to Sharding or
            PartitionSpec (of the mesh of another output's NamedSharding).
        names: The outputs' names.

    Attributes:
        shards: This process's data shards, one for each pipeline. Where outputs cut the rows
            differently, the shards of the finest cut; JAX reshards the other outputs.

    Raises:
        TypeError: If a sharding is of another type.
        ValueError: If the names are not the outputs', or a PartitionSpec has no mesh.
    """

    def __init__(self, sharding: Sharding | Mapping[str, Any], names: Sequence[str]):
        self._shardings = _output_shardings(sharding, names)
        cuts = {name: data_shards(one) for name, one in self._shardings.items()}
        finest = max(cuts, key=lambda name: cuts[name][0].num_shards)
        self.shards = tuple(cuts[finest])
        self._rows = rows_sharding(self._shardings[finest])
        # Whether a sharding cuts the rows as the pipelines do.
        self._direct = {self._shardings[k]: tuple(cut) == self.shards for k, cut in cuts.items()}
        self._one_for_all = isinstance(sharding, Sharding)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of the arrays that `place` returned: nothing is left to do."""
        return batch

    def place_mask(self, name: str, pieces: Sequence[np.ndarray]) -> jax.Array:
        """The global mask, cut by rows as the pipelines are."""
        return self._assemble(name, pieces, self._rows)

    def sharding(self, name: str) -> Sharding:
        """The sharding of an output."""
        return self._shardings[name]

    def place(
        self, name: str, pieces: Sequence[Any], sharding: Sharding | None = None
    ) -> jax.Array:
        """One global array of the rows that each local pipeline decoded.

        Args:
            name: The output's name.
            pieces: [rows, ...] of each data shard: NumPy arrays, or jax.Arrays on its first
                device.
            sharding: Its sharding; the output's by default.

        Raises:
            ValueError: If the pieces differ in shape, or the sharding doesn't fit it.
        """
        shapes = {piece.shape for piece in pieces}
        if len(shapes) > 1:
            raise ValueError(
                f"output {name!r} has another shape in each shard, {sorted(shapes)}: give it "
                "one shape in the pipeline, e.g. by fn.resize or fn.pad"
            )
        target = sharding or self._shardings[name]
        if target not in self._direct:
            self._direct[target] = tuple(data_shards(target)) == self.shards
        if self._direct[target]:
            return self._assemble(name, pieces, target)
        return jax.device_put(self._assemble(name, pieces, self._rows), target)

    def reshard(
        self, name: str, array: jax.Array, rows: int, sharding: Sharding | None = None
    ) -> jax.Array:
        """Places an array that a function returned as the outputs are placed.

        An output with a sharding of its own gets that. Otherwise the sharding is for batches:
        an array that is none, a mean say, stays where JAX put it.

        Args:
            name: The output's name.
            array: The array.
            rows: Rows of the global batch.
            sharding: The sharding of batches; the output's by default.
        """
        target = sharding or self._shardings[name]
        if array.sharding == target:
            return array
        if sharding is not None or self._one_for_all:
            try:
                target.shard_shape(array.shape)
            except (ValueError, IndexError):
                return array
            if array.shape[:1] != (rows,):
                return array
        return jax.device_put(array, target)

    def _assemble(self, name: str, pieces: Sequence[Any], sharding: Sharding) -> jax.Array:
        rows, *rest = pieces[0].shape
        shape = (rows * self.shards[0].num_shards, *rest)
        try:
            indices = sharding.addressable_devices_indices_map(shape)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"output {name!r} of shape {shape} does not fit {sharding}: {error}. Pass "
                "sharding as a dict of output name to the Sharding of each"
            ) from error
        arrays: dict[jax.Device, jax.Array] = {}
        for shard, piece in zip(self.shards, pieces):
            first: dict[str, jax.Array] = {}
            for device in shard.devices:
                columns = (indices[device] or ())[1:]
                split = any(one != slice(None) for one in columns)
                part = piece.__getitem__((slice(None), *columns)) if split else piece
                # Further holders copy from the first, device to device.
                arrays[device] = _put(first.get(str(columns), part), device)
                first.setdefault(str(columns), arrays[device])
        ordered = [arrays[device] for device in indices]
        return jax.make_array_from_single_device_arrays(shape, sharding, ordered)


def over_devices(devices: Sequence[jax.Device], names: Sequence[str]) -> GlobalPlacement:
    """A placement that cuts dimension 0 over devices, in their order.

    Raises:
        TypeError: If they are no devices.
        ValueError: If there is no device, one of them twice, or several processes.
    """
    if not isinstance(devices, Iterable) or not all(isinstance(d, jax.Device) for d in devices):
        raise TypeError(
            f"devices must be a list of jax devices, as jax.devices()[:2], not {devices!r}"
        )
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"devices must be distinct and at least one, not {list(devices)}")
    if jax.process_count() > 1:
        raise ValueError(
            f"devices over {jax.process_count()} processes: pmap's layout is for one process, "
            "pass sharding for global arrays instead"
        )
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("device",))
    return GlobalPlacement(NamedSharding(mesh, PartitionSpec("device")), names)
