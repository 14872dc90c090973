"""Placement of batches: maps shardings or devices to pipelines, and pieces to global arrays.

The rows of a global batch are split into *data shards*, the distinct row ranges that the
sharding assigns to devices. Each data shard held by a local device is decoded by one pipeline, on
the first of its devices; the other devices receive copies::

    mesh (data=2, model=2), P("data")          rows 0..B/2          rows B/2..B
                                               device 0, device 1   device 2, device 3
                                               pipeline 0           pipeline 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..messages.printable import printable_repr


@dataclasses.dataclass(frozen=True)
class DataShard:
    """A row range of the global batch, with the devices that hold it.

    Attributes:
        shard_id: Index of the range among all ranges, over all processes.
        num_shards: Number of ranges.
        devices: Local devices that hold the range; the first of them decodes it.
    """

    shard_id: int
    num_shards: int
    devices: tuple[jax.Device, ...]

    @property
    def device_id(self) -> int | None:
        """DALI's device_id for the shard's pipeline: the index of its GPU on this host, or None."""
        return gpu_ordinal(self.devices[0])

    def batch_size(self, global_batch: int) -> int:
        """Returns how many rows of a global batch this shard has.

        Raises:
            ValueError: If the shards do not divide the global batch.
        """
        if global_batch % self.num_shards:
            raise ValueError(
                f"batch_size={global_batch} is not divisible by the {self.num_shards} data "
                "shards of the sharding. batch_size is the global batch size, "
                f"e.g. {-(-global_batch // self.num_shards) * self.num_shards}"
            )
        return global_batch // self.num_shards


def gpu_ordinal(device: jax.Device) -> int | None:
    """Returns the index of a GPU on its host; None for a CPU or TPU, for which the CPU decodes."""
    return int(device.local_hardware_id) if device.platform == "gpu" else None


def data_shards(sharding: Sharding) -> list[DataShard]:
    """Returns the data shards that this process's devices hold, in row order.

    Args:
        sharding: Any sharding, including reversed meshes, unused axes and several processes.
    """
    holders = _holders(sharding)
    own = sharding.addressable_devices
    local = [tuple(device for device in devices if device in own) for devices in holders]
    return [
        DataShard(number, len(holders), devices) for number, devices in enumerate(local) if devices
    ]


def _holders(sharding: Sharding) -> list[list[jax.Device]]:
    """Returns the devices that hold each row range: a list per range, over all processes."""
    rank = max(1, len(sharding.spec)) if isinstance(sharding, NamedSharding) else 1
    # The shape of a virtual array that every axis divides: only the row ranges matter.
    rows = len(sharding.device_set)
    holders: dict[int, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map((rows,) * rank).items():
        first_row = index[0].indices(rows)[0] if index else 0
        holders.setdefault(first_row, []).append(device)
    return [devices for _, devices in sorted(holders.items())]


def placement_text(sharding: Sharding) -> str:
    """Returns a description of a sharding that is the same text in all processes.

    The text contains the spec and the ids of the devices that hold each row range.
    """
    kind = type(sharding).__name__
    spec = str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else kind
    ranges = [[device.id for device in devices] for devices in _holders(sharding)]
    return f"{spec} over the devices {' '.join(map(str, ranges))}"


def rows_sharding(sharding: Sharding) -> Sharding:
    """Returns a sharding that splits dimension 0 as ``sharding`` does, and no other dimension.

    Only a NamedSharding is changed; other shardings are returned as they are.
    """
    if isinstance(sharding, NamedSharding):
        rows = sharding.spec[0] if len(sharding.spec) else None
        return NamedSharding(sharding.mesh, PartitionSpec(rows))
    return sharding


def over_current_mesh(sharding: Any) -> Any:
    """Returns a sharding whose PartitionSpecs are converted to NamedShardings on the current mesh.

    Args:
        sharding: A Sharding, a PartitionSpec, or a dict of these and None. In a dict,
            PartitionSpecs stay if another output has a NamedSharding, whose mesh is used later.

    Raises:
        ValueError: If there is no current mesh.
    """
    if isinstance(sharding, PartitionSpec):
        return NamedSharding(_current_mesh(sharding), sharding)
    if not isinstance(sharding, Mapping):
        return sharding
    if any(isinstance(value, NamedSharding) for value in sharding.values()):
        return sharding
    return {name: over_current_mesh(value) for name, value in sharding.items()}


def _current_mesh(spec: PartitionSpec) -> jax.sharding.Mesh:
    """Returns the mesh of `jax.set_mesh`, or of the mesh contexts of older versions of JAX.

    Raises:
        ValueError: If no mesh is set; the message has ``spec``.
    """
    # Private in JAX: the only getter of `with mesh:`, and of any mesh before JAX 0.6.
    from jax._src import mesh as meshes

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
        f"sharding is {spec!r}, and no mesh is set in this thread. Create the iterator inside "
        f"`with jax.set_mesh(mesh):`, or pass jax.sharding.NamedSharding(mesh, {spec!r})"
    )


def _output_shardings(
    sharding: Sharding | Mapping[str, Any], names: Sequence[str]
) -> dict[str, Sharding | None]:
    """Returns the sharding of each output, by name; None keeps an output on the host.

    Args:
        sharding: A common sharding, or a dict that has an entry for each output.
        names: The outputs' names; empty if they are unknown. A common sharding then has the key "".

    Raises:
        TypeError: If a sharding has another type.
        ValueError: If the dict lacks an output or places none, or a PartitionSpec has no mesh.
    """
    sharding = over_current_mesh(sharding)
    if isinstance(sharding, Sharding):
        return dict.fromkeys(names or [""], sharding)
    if not isinstance(sharding, Mapping):
        raise _no_sharding("sharding must be a jax.sharding.Sharding or a dict", sharding)
    if not set(names) <= set(sharding):
        raise ValueError(
            f"sharding has entries for {sorted(sharding)}, but the outputs are {sorted(names)}. "
            "Pass a sharding for each output"
        )
    if all(value is None for value in sharding.values()):
        raise ValueError(
            f"sharding={printable_repr(sharding)} places no output. Pass a sharding for at least "
            "one, or "
            "as_numpy=True for NumPy arrays"
        )
    mesh = next((s.mesh for s in sharding.values() if isinstance(s, NamedSharding)), None)
    shardings: dict[str, Sharding | None] = {}
    for name, value in sharding.items():
        if isinstance(value, PartitionSpec) and mesh is not None:
            value = NamedSharding(mesh, value)
        if not (value is None or isinstance(value, Sharding)):
            problem = f"sharding[{name!r}] must be a Sharding, a PartitionSpec or None"
            raise _no_sharding(problem, value)
        shardings[name] = value
    return shardings


def _no_sharding(problem: str, value: object) -> TypeError:
    cure = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))"
    if isinstance(value, jax.sharding.Mesh):
        axis = value.axis_names[0] if value.axis_names else "data"
        cure = (
            "a sharding with the mesh axes that split the batch, "
            f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec({axis!r}))"
        )
    elif isinstance(value, (list, tuple)) and all(isinstance(d, jax.Device) for d in value):
        cure = "these devices as devices=[...], for pmap's layout"
    return TypeError(f"{problem}, not {value!r}. Pass {cure}")


def _put(piece: Any, device: jax.Device) -> jax.Array:
    """Returns a piece as a jax.Array on a device, without a copy if it is already there."""
    if isinstance(piece, jax.Array) and piece.devices() == {device}:
        return piece
    return jax.device_put(piece, device)


class GlobalPlacement:
    """Assembles batches of global arrays, each output placed by its sharding.

    Arrays are assembled without concatenation: each device receives its rows from the pipeline of
    its data shard, without a copy if the rows are already on the device.

    Args:
        sharding: One Sharding for all outputs, or a dict of output name to Sharding or
            PartitionSpec (on the mesh of another output's NamedSharding). None keeps the rows of
            this process on the host, as a NumPy array. The dict may also contain the mask and
            values that bypass the graph, which are otherwise split like the mask.
        names: The outputs' names; empty if they are unknown and only ``shards`` is used.

    Attributes:
        shards: Data shards of this process, one for each pipeline. If outputs split the rows
            differently, these are the shards of the finest split, and JAX reshards the other
            outputs.

    Raises:
        TypeError: If a sharding has another type.
        ValueError: If the sharding lacks an output or places none, or a PartitionSpec has no mesh.
    """

    def __init__(self, sharding: Sharding | Mapping[str, Any], names: Sequence[str]):
        self._shardings = _output_shardings(sharding, names)
        placed = {name: value for name, value in self._shardings.items() if value is not None}
        cuts = {name: data_shards(value) for name, value in placed.items()}
        finest = max(cuts, key=lambda name: cuts[name][0].num_shards)
        self.shards = tuple(cuts[finest])
        self._rows = rows_sharding(placed[finest])
        # For each sharding: whether it splits the rows into the same ranges as the pipelines.
        self._direct = {placed[k]: tuple(cut) == self.shards for k, cut in cuts.items()}
        self._is_common = not isinstance(sharding, Mapping)
        self._has_no_replicas = all(len(shard.devices) == 1 for shard in self.shards)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch unchanged, because `place` already returned global arrays."""
        return batch

    def is_on_host(self, name: str) -> bool:
        """Returns whether an output stays on the host."""
        return name in self._shardings and self._shardings[name] is None

    def check_names(self, names: Collection[str]) -> None:
        """Raises ValueError if the dict of shardings has an entry that is not in ``names``."""
        unknown = sorted(self._shardings.keys() - {*names})
        if unknown and not self._is_common:
            raise ValueError(
                f"sharding has entries for {unknown}, but the batch has {sorted(names)}. Remove "
                "them, or correct their names"
            )

    def place_mask(self, name: str, pieces: Sequence[np.ndarray]) -> Any:
        """Returns the global mask, assembled from a bool array [rows] of each data shard.

        The mask has the sharding of its entry in the dict of shardings. Without an entry, its rows
        are split like the rows of the pipelines.
        """
        if name in self._shardings and not self._is_common:
            return self.place(name, pieces)
        return self._assemble(name, pieces, self._rows)

    def place(self, name: str, pieces: Sequence[Any]) -> Any:
        """Returns a global array, assembled from the rows that the local pipelines decoded.

        If the output stays on the host, returns a NumPy array of these rows instead.

        Args:
            name: The output's name.
            pieces: Array [rows, ...] of each data shard: NumPy arrays, or jax.Arrays on the shard's
                first device.

        Raises:
            ValueError: If the pieces differ in shape, or the sharding doesn't fit the global shape.
        """
        shapes = {piece.shape for piece in pieces}
        if len(shapes) > 1:
            raise ValueError(
                f"output {name!r} has different shapes in the shards, {sorted(shapes)}. Give it "
                "one shape in the pipeline, e.g. by fn.resize or fn.pad"
            )
        target = self._shardings[name]
        rows, *row_shape = pieces[0].shape
        _check_rank(name, (rows * self.shards[0].num_shards, *row_shape), target)
        if target is None:
            arrays = [np.asarray(piece) for piece in pieces]
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if self._direct[target]:
            return self._assemble(name, pieces, target)
        return jax.device_put(self._assemble(name, pieces, self._rows), target)

    def result_sharding(self, name: str, shape: Sequence[int], rows: int) -> Sharding | None:
        """Returns the sharding of an array that a function of ``batch_map`` returns.

        In a dict of shardings, an array with the name of an entry has the entry's sharding, if it
        fits. Other arrays with as many rows as the batch have the common sharding, if it fits, or
        are split like the mask. All other arrays are replicated over the mesh. Without a mesh, None
        leaves the choice to the compiler.

        Args:
            name: The name of the array.
            shape: The shape of the array.
            rows: The number of rows of the batch.
        """
        is_global = tuple(shape[:1]) == (rows,)
        named: Sharding | None = self._shardings.get(name)
        if self._is_common:
            named = next(iter(self._shardings.values())) if is_global else None
        for sharding in (named, self._rows if is_global else None):
            if sharding is not None and _fits(sharding, tuple(shape)):
                return sharding
        if isinstance(self._rows, NamedSharding):
            return NamedSharding(self._rows.mesh, PartitionSpec())
        return None

    def _assemble(self, name: str, pieces: Sequence[Any], sharding: Sharding) -> jax.Array:
        """Returns a global array, assembled from an array [rows, ...] of each data shard."""
        rows, *row_shape = pieces[0].shape
        shape = (rows * self.shards[0].num_shards, *row_shape)
        try:
            indices = sharding.addressable_devices_indices_map(shape)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"output {name!r} of shape {shape} does not fit {sharding}: {error}. Pass "
                "sharding as a dict of output name to the Sharding of each"
            ) from error
        is_explicit = "explicit" in (jax.config.jax_transfer_guard_host_to_device or "")
        on_host = all(isinstance(piece, np.ndarray) for piece in pieces)
        if on_host and self._has_no_replicas and not is_explicit:
            first_rows = [shard.shard_id * rows for shard in self.shards]
            return _from_host(shape, sharding, dict(zip(first_rows, pieces)))
        arrays: dict[jax.Device, jax.Array] = {}
        for shard, piece in zip(self.shards, pieces):
            first: dict[str, jax.Array] = {}
            for device in shard.devices:
                columns = (indices[device] or ())[1:]
                split = any(index != slice(None) for index in columns)
                part = piece.__getitem__((slice(None), *columns)) if split else piece
                # Further devices copy from the first device directly.
                arrays[device] = _put(first.get(str(columns), part), device)
                first.setdefault(str(columns), arrays[device])
        ordered = [arrays[device] for device in indices]
        return jax.make_array_from_single_device_arrays(shape, sharding, ordered)


def _check_rank(name: str, shape: tuple[int, ...], sharding: Sharding | None) -> None:
    """Raises ValueError if a PartitionSpec names more dimensions than an array has."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    if len(spec) > len(shape):
        axes = [axis for axis in spec if axis is not None]
        rows = PartitionSpec(*axes[:1])
        raise ValueError(
            f"output {name!r} of shape {shape} does not fit {spec!r}, which is for arrays of at "
            f"least {len(spec)} dimensions; the first dimension is the batch. Pass a dict with a "
            "sharding for each output, such as "
            f"sharding={{{name!r}: NamedSharding(mesh, {rows!r}), ...}}"
        )


def _from_host(
    shape: tuple[int, ...], sharding: Sharding, pieces: Mapping[int, np.ndarray]
) -> jax.Array:
    """Returns a global array, assembled from host arrays [rows, ...] in one call.

    A `jax.device_put` for each device takes several times as long, mostly under the GIL.

    Args:
        shape: The global shape.
        sharding: The sharding.
        pieces: The host arrays; the keys are the first rows that they have in the global array.
    """

    def piece_of(index: tuple[slice, ...] | None) -> np.ndarray:
        rows, *columns = index or (slice(None),)
        within = (slice(None), *columns)
        return pieces[rows.indices(shape[0])[0]][within]

    # As with `jax.device_put`, the caller's guard against implicit transfers does not apply. If the
    # guard is against explicit transfers, this function is not called.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, piece_of)


def _fits(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return False
    return True


def over_devices(devices: Sequence[jax.Device], names: Sequence[str]) -> GlobalPlacement:
    """Creates a placement that splits dimension 0 over devices, in their order.

    Raises:
        TypeError: If ``devices`` is not a list of devices.
        ValueError: If there is no device, a device is repeated, or there are several processes.
    """
    if not isinstance(devices, Iterable) or not all(isinstance(d, jax.Device) for d in devices):
        raise TypeError(
            f"devices must be a list of JAX devices such as jax.devices()[:2], not {devices!r}"
        )
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"devices must be non-empty and distinct, not {list(devices)}")
    if jax.process_count() > 1:
        raise ValueError(
            f"devices over {jax.process_count()} processes: pmap's layout requires a single "
            "process. Pass sharding for global arrays instead"
        )
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("device",))
    return GlobalPlacement(NamedSharding(mesh, PartitionSpec("device")), names)
