"""Packed records: unpacking returns the packed records, also through shared memory."""

import pickle

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from dalijax.adapters.grain import PackedRecords, pack_records
from dalijax.adapters.grain.packing import has_room
from full import FULL

DTYPES = st.sampled_from(["u1", "<i4", ">i4", "<f2", ">f8", "?", "c8", "M8[s]", "S3", "U2"])
NUMBERS = st.one_of(st.booleans(), st.integers(), st.floats(), st.integers(-3, 3).map(np.int16))
OTHERS = st.one_of(
    st.none(), st.just({}), st.lists(st.integers(), max_size=2), st.just(np.str_("a"))
)
ARRAYS = nps.arrays(DTYPES, nps.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))
LEAVES = st.one_of(st.binary(max_size=5), st.text(max_size=5), NUMBERS, ARRAYS, OTHERS)
RECORDS = st.recursive(
    LEAVES, lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c"]), inner), max_leaves=5
)


def batches_of_equal_records(kinds):
    """Batches whose records have equal keys and types."""
    made = {k: st.lists(one, min_size=4, max_size=4) for k, one in kinds.items()}
    return st.fixed_dictionaries(made).map(
        lambda columns: [dict(zip(columns, row)) for row in zip(*columns.values())]
    )


LIKE = batches_of_equal_records(
    {
        "bytes": st.binary(max_size=5),
        "text": st.text(max_size=5),
        "int": st.integers(),
        "float": st.floats(),
        "bool": st.booleans(),
        "ragged": nps.arrays(">i4", nps.array_shapes(min_dims=2, min_side=0, max_dims=2)),
        "stacked": nps.arrays(">f4", (2, 3)),
        "scalar": st.floats(width=32).map(np.float32),
        "nested": st.fixed_dictionaries({"x": st.binary(max_size=3), "y": st.none()}),
        "some": st.one_of(st.integers(), st.floats(), st.binary(max_size=2)),
    }
)


def exact(value):
    """Returns the comparable parts of a value: its type and its exact content."""
    if isinstance(value, memoryview):
        value = bytes(value)
    if isinstance(value, dict):
        return {k: exact(own) for k, own in value.items()}
    if isinstance(value, list):
        return [exact(own) for own in value]
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "biufc":  # the bytes of a number may be swapped
            value = value.astype(value.dtype.newbyteorder("="))
        return (isinstance(value, np.ndarray), value.shape, value.dtype.str, value.tobytes())
    return (type(value), pickle.dumps(value))


def transferred(packed):
    """Passes an element through Grain's transfer between processes."""
    from grain._src.python.ipc import shared_memory_array

    sent = pickle.dumps(shared_memory_array.copy_to_shm(packed))
    return shared_memory_array.open_from_shm(pickle.loads(sent))


@settings(max_examples=1000 if FULL else 40)
@given(st.one_of(st.lists(RECORDS, max_size=4), LIKE))
def test_packing_round_trips(records):
    assert exact(pack_records(records).records()) == exact(records)


@settings(max_examples=30)
@given(st.one_of(st.lists(RECORDS, max_size=4), LIKE))
def test_packing_round_trips_in_another_process(records):
    assert exact(transferred(pack_records(records)).records()) == exact(records)


@pytest.mark.parametrize("size,arrays", ((1, 0), (10_000, 1)))
def test_equal_records_are_one_array_and_few_records_a_byte_string(size, arrays):
    records = [
        {"image": bytes(size), "name": "x" * i, "label": i, "box": {"at": np.zeros((i % 3, 4))}}
        for i in range(64)
    ]
    leaves = jax.tree.leaves(pack_records(records))
    assert sum(isinstance(one, np.ndarray) for one in leaves) == arrays
    assert len(leaves) < 50


def test_little_shared_memory_is_left_free():
    assert has_room(2 << 20, 64 << 20)  # the size that a container has without a message
    assert not has_room((2 << 20) + 1, 64 << 20)
    assert not has_room(1, 0)


def test_views_keep_the_memory_alive():
    records = [{"image": bytes([i]) * (1 << 16)} for i in range(8)]
    images = [one["image"] for one in transferred(pack_records(records)).records()]
    assert [bytes(one) for one in images] == [one["image"] for one in records]
    with pytest.raises(TypeError, match="read-only"):
        images[0][0] = 1


def test_it_is_a_batch_function_of_grain():
    ds = grain.MapDataset.range(10).map(lambda i: {"i": i, "text": str(i)})
    made = list(ds.batch(4, batch_fn=pack_records))
    assert all(isinstance(one, PackedRecords) for one in made)
    assert [one.size for one in made] == [4, 4, 2]
    assert [r for one in made for r in one.records()] == [
        {"i": i, "text": str(i)} for i in range(10)
    ]
