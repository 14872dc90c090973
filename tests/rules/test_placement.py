"""Placement: every device has the rows that JAX assigns to it, from the shard that read them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from nvidia.dali import fn, pipeline_def, types

from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator, sources
from dalijax.core.arrays.placement import data_shards, gpu_ordinal
from full import FULL, combinations
from numbered import read_case
from oracle import Case

MESHES = {
    (8,): ("a",),
    (4, 2): ("a", "b"),
    (2, 4): ("a", "b"),
    (2, 2, 2): ("a", "b", "c"),
}
SPECS = [
    ("a",),
    (),
    ("b",),
    (("a", "b"),),
    (("b", "a"),),
    (None, "a"),
    ("a", "b"),
    (("a", "c"), "b"),
]
ORDERS = {
    "in order": range(8),
    "reversed": range(7, -1, -1),
    "permuted": (3, 0, 6, 5, 1, 7, 2, 4),
}


def flat(spec):
    return [
        axis for part in spec for axis in (part if isinstance(part, tuple) else (part,)) if axis
    ]


LAYOUTS = [
    (shape, spec)
    for shape, spec in itertools.product(MESHES, SPECS)
    if set(flat(spec)) <= set(MESHES[shape])
]


def count_row_ranges(mesh, spec):
    """Returns the number of distinct row ranges, by the axes that split dimension 0."""
    first = spec[0] if spec else None
    axes = first if isinstance(first, tuple) else (first,) if first else ()
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))


def graph(files, case, shard_id=0, num_shards=1):
    label = read_case(files, case, shard_id, num_shards)[1]
    grid = fn.cast(label, dtype=types.FLOAT) * types.Constant(
        np.ones((8, 4), np.float32)
    ) + types.Constant(np.arange(32, dtype=np.float32).reshape(8, 4))
    return grid, label


def expected_epochs(case):
    """Returns global rows and mask of each batch of three epochs."""
    for number, streams in case.epochs(3):
        batches = []
        for pieces in zip(*streams):
            rows = np.array([s[0] for own in pieces for s in own], np.float32)
            mask = np.array([m for own in pieces for m in case.mask(own, number)])
            batches.append((rows, mask))
        yield batches


def check_array(array, want, sharding):
    assert array.shape == want.shape and array.sharding.is_equivalent_to(sharding, want.ndim)
    places = sharding.devices_indices_map(want.shape)
    assert {shard.device for shard in array.addressable_shards} == set(places)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[places[shard.device]])


@pytest.mark.parametrize(("layout", "order"), combinations(3, LAYOUTS, ORDERS), ids=str)
def test_every_device_has_its_rows(jpegs_many, layout, order):
    shape, spec = layout
    devices = np.array([jax.devices()[i] for i in ORDERS[order]]).reshape(shape)
    mesh = Mesh(devices, MESHES[shape])
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    shards = count_row_ranges(mesh, spec)
    by_rows = NamedSharding(mesh, PartitionSpec(*spec[:1]))
    policies = [*itertools.product(("FILL", "DROP"), (False, True))]
    # All pairs of a layout with an order and with a policy.
    first = LAYOUTS.index((shape, spec)) + [*ORDERS].index(order)
    for policy, padded in policies if FULL else policies[first % 2 :: 2]:
        case = Case(3 * shards + 1, shards, 2, policy, padded, False)
        iterator_fn = data_iterator(
            graph,
            ["grid", "x"],
            reader_name="reader",
            sharding={"grid": sharding, "x": by_rows},
            mask="mask",
            last_batch_policy=LastBatchPolicy[policy],
        )
        iterator = iterator_fn(jpegs_many, case, batch_size=2 * shards, num_threads=1)
        assert len(iterator._engine.prepare().pipelines) == shards
        for batches in expected_epochs(case):
            assert len(iterator) == len(batches)
            for got, (rows, mask) in zip(iterator, batches, strict=True):
                grid = rows[:, None, None] + np.arange(32, dtype=np.float32).reshape(8, 4)
                check_array(got["grid"], grid, sharding)
                check_array(got["x"], rows[:, None].astype(np.int32), by_rows)
                check_array(got["mask"], mask, by_rows)
            iterator.reset()
        iterator.close()


def test_parts_of_the_devices_and_other_shardings(jpegs_many):
    case = Case(10, 2, 2, "FILL", True, True)
    first = next(expected_epochs(case))
    some = Mesh(np.array(jax.devices())[[5, 2]], ("a",))
    for sharding in (NamedSharding(some, PartitionSpec("a")),):
        iterator = data_iterator(graph, ["g", "x"], reader_name="reader", sharding=sharding)(
            jpegs_many, case, batch_size=4
        )
        for got, (rows, _) in zip(iterator, first, strict=True):
            check_array(got["x"], rows[:, None].astype(np.int32), sharding)
    single = SingleDeviceSharding(jax.devices()[6])
    one = Case(10, 1, 4, "FILL", True, True)
    iterator = data_iterator(graph, ["g", "x"], reader_name="reader", sharding=single)(
        jpegs_many, one, batch_size=4
    )
    for got, (rows, _) in zip(iterator, next(expected_epochs(one)), strict=True):
        check_array(got["x"], rows[:, None].astype(np.int32), single)


def test_buffers_go_straight_to_their_devices(jpegs_many):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    case = Case(16, 4, 2, "FILL", True, True)
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    iterator = data_iterator(graph, ["g", "x"], reader_name="reader", sharding=sharding)(
        jpegs_many, case, batch_size=8
    )
    made, seen = iterator._engine.make_batch, []

    def recorded(outputs, *more):
        pointers = [np.asarray(own[0].as_tensor()).ctypes.data for own in outputs]
        batch = made(outputs, *more)
        pieces = {s.device: s.data for s in batch["g"].addressable_shards}
        first = [pieces[row[0]].unsafe_buffer_pointer() for row in mesh.devices]
        seen.append(first == pointers)
        return batch

    iterator._engine.make_batch = recorded
    assert len(list(iterator)) == 2
    assert seen == [True, True]


def test_an_output_with_different_rows_is_resharded(jpegs_many):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    case = Case(16, 4, 2, "FILL", True, True)
    sharding = {"g": NamedSharding(mesh, PartitionSpec("a")), "x": PartitionSpec()}
    iterator = data_iterator(graph, ["g", "x"], reader_name="reader", sharding=sharding)(
        jpegs_many, case, batch_size=8
    )
    for got, (rows, _) in zip(iterator, next(expected_epochs(case)), strict=True):
        whole = NamedSharding(mesh, PartitionSpec())
        check_array(got["x"], rows[:, None].astype(np.int32), whole)


def test_shards_of_a_mesh():
    devices = jax.devices()
    mesh = Mesh(np.array(devices)[::-1].reshape(2, 4), ("a", "b"))
    shards = data_shards(NamedSharding(mesh, PartitionSpec("b")))
    assert [(s.shard_id, s.num_shards, s.device_id) for s in shards] == [
        (i, 4, None) for i in range(4)
    ]
    assert [{d.id for d in s.devices} for s in shards] == [{7, 3}, {6, 2}, {5, 1}, {4, 0}]
    assert len(data_shards(NamedSharding(mesh, PartitionSpec()))) == 1


@pytest.mark.parametrize("picked", [(0, 1, 2, 3), (3, 1), (6,), (7, 0, 5)])
def test_devices_have_the_layout_of_pmap(jpegs_many, picked):
    devices = [jax.devices()[i] for i in picked]
    case = Case(4 * len(picked) + 1, len(picked), 2, "FILL", True, True)
    make = data_iterator(graph, ["g", "x"], reader_name="reader", devices=devices, mask="mask")
    iterator = make(jpegs_many, case, batch_size=2 * len(picked))
    assert len(iterator._engine.prepare().pipelines) == len(picked)
    flat_fn = data_iterator(
        graph, ["g", "x"], reader_name="reader", devices=devices, pmap_compatible=False
    )
    flat_one = flat_fn(jpegs_many, case, batch_size=2 * len(picked))
    for got, plain, (rows, mask) in zip(
        iterator, flat_one, next(expected_epochs(case)), strict=True
    ):
        want = rows.astype(np.int32).reshape(len(picked), 2, 1)
        assert got["x"].shape == want.shape and plain["x"].shape == (2 * len(picked), 1)
        np.testing.assert_array_equal(got["mask"], mask.reshape(len(picked), 2))
        pieces = {s.device: np.asarray(s.data) for s in got["x"].addressable_shards}
        assert list(pieces) and set(pieces) == set(devices)
        for i, device in enumerate(devices):
            np.testing.assert_array_equal(pieces[device], want[i : i + 1])
        np.testing.assert_array_equal(plain["x"], want.reshape(-1, 1))
    doubled = jax.pmap(lambda x: x * 2, devices=devices)(next(iter(iterator))["x"])
    assert doubled.shape == (len(picked), 2, 1)


def test_hand_made_pipelines_without_a_sharding(jpegs_many):
    case = Case(9, 2, 2, "FILL", True, True)

    def pipelines(count):
        return [
            pipeline_def(graph)(
                jpegs_many, case, s, count, batch_size=2, num_threads=1, device_id=None
            )
            for s in range(count)
        ]

    two = next(DALIGenericIterator(pipelines(2), ["g", "x"], reader_name="reader", mask="mask"))
    assert two["g"].shape == (2, 2, 8, 4) and two["mask"].shape == (2, 2)
    np.testing.assert_array_equal(two["x"][..., 0], [[0, 1], [4, 5]])
    numpy_two = next(
        DALIGenericIterator(pipelines(2), ["g", "x"], reader_name="reader", as_numpy=True)
    )
    np.testing.assert_array_equal(numpy_two["x"], two["x"])
    for pmap_compatible, shape in ((None, (2, 1)), (True, (1, 2, 1)), (False, (2, 1))):
        one = DALIGenericIterator(
            pipelines(1), ["g", "x"], reader_name="reader", pmap_compatible=pmap_compatible
        )
        assert next(one)["x"].shape == shape
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    placed = DALIGenericIterator(
        pipelines(2), ["g", "x"], reader_name="reader", sharding=sharding, mask="mask"
    )
    check_array(next(placed)["x"], np.array([[0], [1], [4], [5]], np.int32), sharding)
    with pytest.raises(ValueError, match="2 data shards .* 1 pipeline"):
        DALIGenericIterator(pipelines(1), ["g", "x"], reader_name="reader", sharding=sharding)


def test_mistakes(jpegs_many):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    case = Case(16, 4, 2, "FILL", True, True)
    by_rows = NamedSharding(mesh, PartitionSpec("a"))

    def make(graph=graph, sharding=by_rows, batch_size=8, **call):
        iterator_fn = data_iterator(graph, ["g", "x"], reader_name="reader", sharding=sharding)
        return iterator_fn(jpegs_many, case, batch_size=batch_size, **call)

    with pytest.raises(ValueError, match="batch_size=6 is not divisible by the 4 data shards"):
        make(batch_size=6)
    with pytest.raises(ValueError, match=r"no argument \['num_shards', 'shard_id'\]"):
        make(lambda files, case: graph(files, case))
    with pytest.raises(ValueError, match=r"\['shard_id'\] are set by the sharding"):
        make(shard_id=1)
    with pytest.raises(
        ValueError, match=r"has entries for \['g'\], but the outputs are \['g', 'x'\]"
    ):
        make(sharding={"g": by_rows})
    # It could refer to the mesh of jax.set_mesh, or to another output's mesh.
    with pytest.raises(ValueError, match="no mesh is set in this thread. Create the"):
        make(sharding={"g": PartitionSpec("a"), "x": PartitionSpec()})
    with pytest.raises(TypeError, match="must be a Sharding, a PartitionSpec or None, not 'a'"):
        make(sharding={"g": by_rows, "x": "a"})
    iterator = make(sharding=NamedSharding(mesh, PartitionSpec("a", None, None, "b")))
    with pytest.raises(ValueError, match="output 'g' of shape .* does not fit"):
        next(iterator)


def test_element_spec_is_global(jpegs_many):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    case = Case(16, 4, 2, "FILL", True, True)
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    iterator = data_iterator(
        graph, ["g", "x"], reader_name="reader", sharding=sharding, mask="mask"
    )(jpegs_many, case, batch_size=8)
    shapes = {k: v.shape for k, v in iterator.element_spec.items()}
    assert shapes == {"g": (8, 8, 4), "x": (8, 1), "mask": (8,)}
    assert iterator.element_spec["g"].sharding == sharding


def test_shards_draw_different_numbers(jpegs_many):
    def drawing(files, case, shard_id=0, num_shards=1):
        return graph(files, case, shard_id, num_shards)[1], fn.random.uniform()

    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    case = Case(16, 4, 2, "FILL", True, True)
    iterator_fn = data_iterator(
        drawing,
        ["x", "u"],
        reader_name="reader",
        sharding=NamedSharding(mesh, PartitionSpec("a")),
    )
    drawn = np.asarray(next(iterator_fn(jpegs_many, case, batch_size=8))["u"])
    assert len(np.unique(drawn)) == 8
    again = np.asarray(next(iterator_fn(jpegs_many, case, batch_size=8))["u"])
    np.testing.assert_array_equal(drawn, again)


def floats():
    x = fn.external_source(
        lambda info: np.full((4, 3), info.iteration, np.float32), batch_info=True
    )
    return x, fn.constant(fdata=[float("nan")], shape=[100, 100, 10]), fn.cast(x, dtype=types.BOOL)


def meshed():
    return jax.set_mesh(jax.make_mesh((8,), ("a",)))


@pytest.mark.parametrize(
    "around",
    (
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.transfer_guard_host_to_device("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.default_device(jax.devices()[3]),
        meshed,
    ),
    ids=("guard", "guard of the host", "NaNs", "default device", "mesh"),
)
def test_batches_are_placed_without_a_computation(around):
    iterator_fn = data_iterator(floats, ["x", "large", "b"], size=40, mask="mask")
    iterator = iterator_fn(batch_size=4, num_threads=1)
    for step in range(3):
        with around():
            batch = next(iterator)
        large = batch["large"]
        assert np.isnan(large).all() and large.shape == (4, 100, 100, 10)
        np.testing.assert_array_equal(batch["x"], np.full((4, 3), step, np.float32))
        np.testing.assert_array_equal(batch["b"], np.full((4, 3), step > 0))
        np.testing.assert_array_equal(batch["mask"], np.ones(4, bool))
        for name in ("x", "large", "b"):
            assert batch[name].devices() == {jax.devices()[0]} and not batch[name].committed


@pytest.mark.parametrize("axes", ((4, 1), (2, 2)), ids=("no replicas", "replicas"))
@pytest.mark.parametrize("guard", ("transfer_guard", "transfer_guard_host_to_device"))
def test_global_batches_are_placed_under_a_guard(guard, axes):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(axes), ("data", "model"))
    arrays = {
        "x": np.arange(16 * 6, dtype=np.float32).reshape(16, 6),
        "columns": np.arange(16 * 4, dtype=np.int32).reshape(16, 4),
    }
    specs = {
        "x": PartitionSpec("data"),
        "columns": PartitionSpec("data", "model"),
        "mask": PartitionSpec("data"),
    }
    sharding = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    iterator = data_iterator(
        lambda x, columns: (x, columns),
        ["x", "columns"],
        source=sources.Arrays(arrays),
        sharding=sharding,
        mask="mask",
        shuffle=False,
    )(batch_size=8, num_threads=1)
    with getattr(jax, guard)("disallow"):
        batch = next(iterator)
    for name, wanted in (arrays | {"mask": np.ones(16, bool)}).items():
        np.testing.assert_array_equal(batch[name], wanted[:8])
        assert batch[name].committed and batch[name].sharding == sharding[name]
    with getattr(jax, guard)("disallow_explicit"), pytest.raises(Exception, match="Disallowed"):
        next(iterator)


@dataclasses.dataclass
class Device:
    platform: str
    local_hardware_id: int = 3


@pytest.mark.parametrize(("platform", "ordinal"), (("gpu", 3), ("cpu", None), ("tpu", None)))
def test_only_gpus_have_gpu_pipelines(platform, ordinal):
    assert gpu_ordinal(Device(platform)) == ordinal
