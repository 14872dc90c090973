"""None in a dict of shardings: outputs and other values whose rows stay on the host."""

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from nvidia.dali import fn, types
from shardings import rows_over

from dalijax import data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset
from dalijax.sources import Field, Records

COUNT, BATCH = 10, 4
TWO = rows_over(2)
SHARDING = {"x": TWO, "wide": None, "joint": None, "mask": None}


def values_of(numbers):
    """Returns the values of records by number."""
    return {
        "x": numbers.astype(np.float32),
        "wide": numbers * (1 << 40),
        "joint": numbers[:, None] / np.array([1.0, 3.0]),
        "placed": numbers.astype(np.int32),
    }


def source(count=COUNT):
    data = values_of(np.arange(count, dtype=np.int64))
    kinds = {"joint": Field(np.float64, 1, bypass=True), "placed": Field(np.int32, bypass=True)}
    records = [{name: column[k] for name, column in data.items()} for k in range(count)]
    return Records(records, kinds={"wide": Field(np.int64), **kinds})


def graph(x, wide):
    return {"x": x + 0, "wide": wide + 0}


def check(batch, numbers, mask=None):
    """Compares a batch with the values of records."""
    wanted = values_of(numbers) | ({} if mask is None else {"mask": mask})
    assert batch.keys() == wanted.keys()
    for name, column in wanted.items():
        is_on_host = name in ("wide", "joint", "mask")
        assert isinstance(batch[name], np.ndarray if is_on_host else jax.Array), name
        np.testing.assert_array_equal(batch[name], column, name, strict=is_on_host)
        if not is_on_host:
            assert batch[name].sharding == TWO


@pytest.mark.parametrize("policy", ("fill", "drop"))
@pytest.mark.parametrize("seed", (0, 1))
def test_rows_of_a_source_are_those_of_the_global_arrays(policy, seed):
    make = data_iterator(graph, sharding=SHARDING, mask=True, last_batch_policy=policy)
    iterator = make(source=source(), batch_size=BATCH, seed=seed, num_threads=1)
    found = []
    for batch in iterator:
        numbers = np.asarray(batch["x"]).astype(np.int64)
        mask = np.arange(len(found), len(found) + BATCH) < COUNT
        check(batch, numbers, mask)
        found += numbers.tolist()
    assert sorted(found[:COUNT]) == list(range(COUNT)) if policy == "fill" else len(found) == 8
    specs = iterator.element_spec
    assert specs["x"].sharding == TWO and specs["joint"].sharding is None
    assert {k: (v.shape, v.dtype) for k, v in specs.items()} == {
        "x": ((BATCH,), np.float32),
        "wide": ((BATCH,), np.int64),
        "joint": ((BATCH, 2), np.float64),
        "placed": ((BATCH,), np.int32),
        "mask": ((BATCH,), np.bool_),
    }


def adapted(adapter):
    make = data_iterator(graph, mask=True)
    call = {"source": source(), "batch_size": BATCH, "shuffle": False, "num_threads": 1}
    if adapter == "stream":
        stream = make.stream(sharding=SHARDING, **call)
        return [next(stream) for _ in range(3)]
    if adapter == "clu":
        clu = DALIDatasetIterator(make, num_epochs=1, element="jax", sharding=SHARDING, **call)
        return list(clu)
    make = data_iterator(graph)
    return list(DALIIterDataset(make, num_epochs=1, sharding=SHARDING, pad="mask", **call))


@pytest.mark.parametrize("adapter", ("stream", "clu", "grain"))
def test_adapters_leave_the_rows_on_the_host(adapter):
    batches = adapted(adapter)
    numbers = np.minimum(np.arange(12).reshape(3, BATCH), COUNT - 1)
    assert len(batches) == 3
    for batch, rows, number in zip(batches, numbers, range(3), strict=True):
        check(batch, rows, np.arange(4 * number, 4 * number + 4) < COUNT)


def test_a_loader_of_grain_leaves_the_rows_on_the_host():
    records = [{"x": np.float32(k), "wide": np.int64(k) << 40} for k in range(COUNT)]
    sampler = grain.samplers.SequentialSampler(COUNT, grain.sharding.NoSharding())
    loader = DALIDataLoader(
        data_source=records,
        sampler=sampler,
        pipeline_fn=graph,
        batch_size=BATCH,
        sharding={"x": TWO, "wide": None},
        pad="mask",
    )
    for batch in loader:
        wanted = np.asarray(batch["x"]).astype(np.int64) << 40
        np.testing.assert_array_equal(batch["wide"], wanted, strict=True)
        assert isinstance(batch["wide"], np.ndarray) and batch["mask"].sharding == TWO


def test_a_dict_may_place_values_that_bypass_the_graph():
    copies = rows_over(1, 2)
    sharding = {"x": TWO, "wide": None, "joint": None, "placed": copies}
    make = data_iterator(graph, shuffle=False, sharding=sharding)
    batch = next(make(source=source(), batch_size=BATCH, num_threads=1))
    assert batch["placed"].sharding == copies and batch["x"].sharding == TWO
    np.testing.assert_array_equal(batch["placed"], np.arange(BATCH))


@pytest.mark.parametrize("mask", (TWO, None), ids=("mask", "mask on the host"))
def test_rows_on_the_host_bypass_batch_map(mask):
    def doubled(batch, key):
        assert batch.keys() - {"mask"} == {"x", "placed"} and ("mask" in batch) == bool(mask)
        return batch | {"x": 2 * batch["x"]}

    make = data_iterator(
        graph, shuffle=False, mask=True, sharding=SHARDING | {"mask": mask}, batch_map=doubled
    )
    iterator = make(source=source(), batch_size=BATCH, num_threads=1)
    batch = next(iterator)
    np.testing.assert_array_equal(batch["x"], 2.0 * np.arange(4))
    np.testing.assert_array_equal(batch["wide"], np.arange(4) << 40, strict=True)
    np.testing.assert_array_equal(batch["mask"], np.ones(4, bool))
    assert {k: v.dtype for k, v in iterator.element_spec.items()} == {
        name: array.dtype for name, array in batch.items()
    }


def readers(shard_id=0, num_shards=1):
    x = fn.external_source(
        lambda info: np.int64([info.idx_in_epoch * num_shards + shard_id]),
        batch=False,
        dtype=types.INT64,
    )
    return {"x": fn.cast(x, dtype=types.INT32), "wide": x}


def test_outputs_of_readers():
    make = data_iterator(readers, sharding={"x": PartitionSpec("data"), "wide": None}, size=8)
    with pytest.raises(ValueError, match="no mesh is set"):
        make(batch_size=BATCH)
    with (
        jax.sharding.use_mesh(TWO.mesh)
        if hasattr(jax.sharding, "use_mesh")
        else jax.set_mesh(TWO.mesh)
    ):
        batch = next(make(batch_size=BATCH))
    np.testing.assert_array_equal(batch["wide"], [[0], [2], [1], [3]])
    np.testing.assert_array_equal(batch["x"], batch["wide"])
    assert batch["wide"].dtype == np.int64 and batch["x"].sharding == TWO


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"x": TWO}, r"entries for \['x'\], but the outputs are \['wide', 'x'\]"),
        (SHARDING | {"jiont": None}, r"entries for \['jiont'\], but the batch has \['joint', 'm"),
        ({"x": None, "wide": None}, "places no output. Pass a sharding for at least one, or as_n"),
    ],
)
def test_unsuitable_dicts_are_refused(sharding, words):
    make = data_iterator(graph, sharding=sharding, mask=True)
    with pytest.raises(ValueError, match=words):
        make(source=source(), batch_size=BATCH, num_threads=1)  # before any batch


def test_misspelled_names_of_readers_are_refused_before_any_batch():
    make = data_iterator(readers, sharding={"x": TWO, "wide": None, "mask": TWO}, size=8)
    with pytest.raises(
        ValueError, match=r"entries for \['mask'\], but the batch has \['wide', 'x'"
    ):
        make(batch_size=BATCH)
