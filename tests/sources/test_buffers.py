"""Memory of read records is used again, and never while an array or DALI may read it."""

import gc
import itertools
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from nvidia.dali import fn, types
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from dalijax import data_iterator
from dalijax.core.arrays.dtypes import KINDS
from dalijax.core.feeding.read_rows import _tensors
from dalijax.core.formats import buffers
from dalijax.core.formats.buffers import new_buffer
from dalijax.sources import Tar
from tars import write_tar

MIB = 1 << 20
# Objects that keep the memory of an array in use, by name; each is a function of a slice.
VIEWS = {
    "slice": lambda part: part[8:],
    "slice of a slice": lambda part: part[8:][3:-1][::2],
    "dtype": lambda part: part[: len(part) // 4 * 4].view(np.int32),
    "shape": lambda part: part[: len(part) // 8 * 8].reshape(8, -1).T,
    "memoryview": lambda part: memoryview(part)[2:],
    "frombuffer": lambda part: np.frombuffer(memoryview(part), np.uint8),
    "frombuffer of an array": lambda part: np.frombuffer(part, np.uint8),
    "DLPack": lambda part: np.from_dlpack(part),
    "JAX": lambda part: jax.dlpack.from_dlpack(part[-address(part) % 64 :], copy=False),
    "TensorCPU": TensorCPU,
    "TensorCPU of DLPack": lambda part: _tensors([part])[0],
    "TensorListCPU": lambda part: TensorListCPU([TensorCPU(part)], contiguous=False),
}


@pytest.fixture(autouse=True)
def unused():
    """The unused memory, which other tests have not left."""
    gc.collect()
    buffers._unused.clear()
    yield buffers._unused
    buffers._unused.clear()


def values_of(view):
    """Returns the set of bytes in the memory of a view."""
    if isinstance(view, TensorListCPU):
        view = view.at(0)
    array = np.ascontiguousarray(np.asarray(view))
    return set(np.frombuffer(array.tobytes(), np.uint8).tolist())


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_with_a_view_is_not_used_again(kind, unused):
    buffer = new_buffer(MIB)
    buffer[:] = 7
    where = address(buffer)
    view = VIEWS[kind](buffer[64:4160])
    del buffer
    others = [new_buffer(MIB) for _ in range(3)]
    for other in others:
        other[:] = 9
    assert values_of(view) == {7}
    assert where not in map(address, others) and not unused
    del view, other, others
    gc.collect()
    assert where in map(address, unused)


def test_memory_is_used_again_for_similar_sizes(unused):
    buffer = new_buffer(MIB)
    where = address(buffer)
    del buffer
    small, large = new_buffer(MIB // 3), new_buffer(5 * MIB)
    assert where not in (address(small), address(large)) and len(unused) == 1
    assert address(new_buffer(MIB - 1000)) == where
    buffers_before = [address(array) for array in (small, large)]
    del small, large
    assert sorted(map(address, unused)) == sorted([where, *buffers_before])
    assert [new_buffer(size).shape for size in (0, 1, 70_000, 5 * MIB)] == [
        (size,) for size in (0, 1, 70_000, 5 * MIB)
    ]


def test_unused_memory_is_bounded(unused):
    held = [new_buffer(60 * MIB) for _ in range(8)]  # its pages are never touched
    last = [address(array) for array in held[-2:]]
    while held:
        held.pop(0)
    assert 200 * MIB < sum(array.size for array in unused) <= 256 * MIB
    assert set(last) <= set(map(address, unused))
    del held[:]
    huge = new_buffer(300 * MIB)
    del huge
    assert sum(array.size for array in unused) <= 256 * MIB


def test_threads_have_different_memory():
    """Each thread holds slices of old buffers, and drops them in another order."""

    def work(seed):
        draw = random.Random(seed)
        held = []
        for turn in range(150):
            buffer = new_buffer(draw.randrange(1, MIB))
            value = (seed * 31 + turn) % 251
            buffer[:] = value
            parts = [buffer[at : at + 5000] for at in range(0, len(buffer), 40_000)]
            held += [(part, value) for part in draw.sample(parts, min(3, len(parts)))]
            del buffer, parts
            draw.shuffle(held)
            for part, expected in held:
                assert (part == expected).all()
            del held[20:]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))


def test_a_forked_process_has_its_own_memory():
    kept = new_buffer(MIB)
    kept[:] = 3
    del kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, which the child does not use
        pid = os.fork()
    if not pid:
        code = 1
        try:
            buffer = new_buffer(MIB)
            buffer[:] = 4
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert set(new_buffer(MIB).tolist()) == {3}


SHAPES = ((), (0,), (1,), (7,), (0, 3), (3, 0), (2, 3), (1, 5, 1), (2, 1, 1, 3))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tensors_have_the_memory_of_the_values(kind):
    values = [np.arange(1, 1 + np.prod(shape, dtype=int)).astype(kind) for shape in SHAPES]
    values = [value.reshape(shape) for value, shape in zip(values, SHAPES)]
    for only_read in (False, True):
        if only_read:
            values[3].setflags(write=False)
        tensors = _tensors(values)
        for value, tensor in zip(values, tensors, strict=True):
            assert tensor.dtype == TensorCPU(value).dtype and tensor.shape() == [*value.shape]
            np.testing.assert_array_equal(np.asarray(tensor), value)
            assert not value.size or tensor.data_ptr() == address(value)
    strided = np.arange(12).astype(kind).reshape(3, 4).T
    np.testing.assert_array_equal(np.asarray(_tensors([strided])[0]), strided)
    swapped = np.arange(3).astype(np.dtype(kind).newbyteorder(">"))
    np.testing.assert_array_equal(np.asarray(_tensors([swapped])[0]), swapped)


@pytest.mark.parametrize("convert", (bytes, bytearray, memoryview))
def test_tensors_of_bytes(convert):
    tensors = _tensors([convert(data) for data in (b"abc", b"", b"\0\0")])
    assert [np.asarray(tensor).tobytes() for tensor in tensors] == [b"abc", b"", b"\0\0"]


# Iterators

SIZES = [150_000 + 997 * (i % 7) for i in range(48)]


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar")
    draw = random.Random(0)
    records = [draw.randbytes(size) for size in SIZES]
    entries = [(f"{i:04d}.bin", data) for i, data in enumerate(records)]
    entries = [
        entry for i, entry in enumerate(entries) for entry in (entry, (f"{i:04d}.cls", b"%d" % i))
    ]
    path = write_tar(folder / "a.tar", entries)
    return Tar(path, {"data": "bin", "label": "cls"}, cache_dir=folder), records


def sums_and_bytes(data, label):
    # The same input is read by several operators, at several times.
    total = fn.cast(fn.reductions.sum(data, axes=[0]), dtype=types.UINT32)
    return fn.slice(data, 0, 100_000, axes=[0]), total, label


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("as_numpy", (True, False))
@pytest.mark.parametrize("options", ({}, {"prefetch_queue_depth": 5, "num_threads": 2}))
def test_old_batches_keep_their_values(tar, unused, as_numpy, options):
    source, records = tar
    iterator = data_iterator(
        sums_and_bytes, output_map=["data", "sum", "label"], source=source, as_numpy=as_numpy
    )(batch_size=4, seed=5, **options)
    old, tensors, reused = [], [], set()
    for batch in itertools.chain.from_iterable(batches for _, batches in iterator.epochs(4)):
        old.append(batch)
        values = source.read(np.asarray(batch["label"]), ["data"])["data"]
        tensors.append(list(map(TensorCPU, values)))
        reused |= set(map(address, list(unused)))
        if len(old) > 30:  # a queue of old batches, of which some are dropped
            del old[::3], tensors[::3]
    for batch, values in zip(old, tensors, strict=True):
        for row, label in enumerate(np.asarray(batch["label"]).tolist()):
            expected = np.frombuffer(records[label], np.uint8)
            np.testing.assert_array_equal(np.asarray(batch["data"])[row], expected[:100_000])
            assert np.asarray(batch["sum"])[row] == expected.sum(dtype=np.uint64)
            np.testing.assert_array_equal(np.asarray(values[row]), expected)
    assert len(reused) > 2
    iterator.close()
