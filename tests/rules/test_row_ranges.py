"""Data shards: the row ranges of a sharding in row order, with the devices that hold them."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dalijax.core.arrays.placement import GlobalPlacement, data_shards, over_devices, placement_text

MESHES = {
    (8,): ("a",),
    (4, 2): ("a", "b"),
    (2, 4): ("a", "b"),
    (2, 2, 2): ("a", "b", "c"),
}
ORDERS = {
    "in order": (0, 1, 2, 3, 4, 5, 6, 7),
    "reversed": (7, 6, 5, 4, 3, 2, 1, 0),
    "permuted": (3, 0, 6, 5, 1, 7, 2, 4),
}


def mesh_of(order, shape):
    devices = np.array([jax.devices()[k] for k in ORDERS[order]])
    return Mesh(devices.reshape(shape), MESHES[shape])


def row_axes(names):
    """Returns all sequences of axes that may split the rows."""
    return itertools.chain.from_iterable(
        itertools.permutations(names, count) for count in range(len(names) + 1)
    )


def expected_ids(order, shape, axes):
    """Returns the ids of the devices of each row range, in row order.

    The coordinates of a device along the axes are the digits of its range's number.
    """
    places = dict(zip(MESHES[shape], range(len(shape))))
    count = 1
    for axis in axes:
        count *= shape[places[axis]]
    ranges = [[] for _ in range(count)]
    for coordinates, device in zip(itertools.product(*map(range, shape)), ORDERS[order]):
        number = 0
        for axis in axes:
            number = number * shape[places[axis]] + coordinates[places[axis]]
        ranges[number].append(device)
    return ranges


@pytest.mark.parametrize("order", ORDERS)
def test_ranges_are_in_row_order(order):
    for shape, names in MESHES.items():
        mesh = mesh_of(order, shape)
        for axes in row_axes(names):
            expected = expected_ids(order, shape, axes)
            spec = PartitionSpec(axes or None)
            shards = data_shards(NamedSharding(mesh, spec))
            assert [[d.id for d in shard.devices] for shard in shards] == expected, (shape, axes)
            assert [shard.shard_id for shard in shards] == list(range(len(expected)))
            assert {shard.num_shards for shard in shards} == {len(expected)}
            lists = " ".join(map(str, expected))
            text = placement_text(NamedSharding(mesh, spec))
            assert text == f"{tuple(spec)} over the devices {lists}"


@pytest.mark.parametrize("order", ORDERS)
def test_devices_are_in_the_order_of_the_list(order):
    placement = over_devices([jax.devices()[k] for k in ORDERS[order]], ["x"])
    assert [[d.id for d in s.devices] for s in placement.shards] == [[k] for k in ORDERS[order]]


@pytest.mark.parametrize("names", [*itertools.permutations(("all", "two", "eight"))], ids="-".join)
def test_the_finest_split_is_read(names):
    mesh = mesh_of("permuted", (2, 4))
    specs = {"all": (), "two": ("a",), "eight": (("b", "a"),)}
    sharding = {name: NamedSharding(mesh, PartitionSpec(*specs[name])) for name in names}
    placement = GlobalPlacement(sharding, names)
    expected = expected_ids("permuted", (2, 4), ("b", "a"))
    assert [[d.id for d in shard.devices] for shard in placement.shards] == expected
    # Global arrays are equal, however their rows are split.
    pieces = [np.array([2 * k, 2 * k + 1], np.int32) for k in range(8)]
    for name in names:
        array = placement.place(name, pieces)
        np.testing.assert_array_equal(array, np.arange(16))
        assert array.sharding.is_equivalent_to(sharding[name], 1)
