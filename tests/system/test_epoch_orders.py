"""Each loop has a new random order: over each kind of source, and in each adapter."""

import grain
import numpy as np
import pytest
from elastic_graphs import paths, write
from python_numbers import listed_order, uniform_number

from dalijax import data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from tars import FIELDS

BATCH, SEED, EPOCHS = 4, 5, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders")
    write(path)
    return path


def numbers(count=11):
    return sources.Arrays({"label": np.arange(count, dtype=np.int32)})


SOURCES = {
    "Arrays": lambda folder: numbers(),
    "Records": lambda folder: sources.Records([{"label": np.int32(k)} for k in range(9)]),
    "Files": lambda folder: sources.Files(paths=paths(folder), labels=range(21)),
    "Tar": lambda folder: sources.Tar([folder / "most.tar", folder / "rest.tar"], FIELDS),
    "RLDS": lambda folder: sources.RLDS(
        folder / "episodes.tfrecord", {"label": "steps/label"}, cache_dir=folder
    ),
    "Selection": lambda folder: sources.Selection(numbers(30), np.arange(3, 20)),
    "Named": lambda folder: sources.Named(numbers(), "name"),
}


def graph(label):
    return {"label": label + 0}


def records(batches):
    return [record for batch in batches for record in np.asarray(batch["record"]).tolist()]


FUNCTION = data_iterator(graph, last_batch_policy="partial", as_numpy=True)


@pytest.mark.parametrize("name", SOURCES)
def test_epochs_of_a_source(name, folder):
    source = sources.Named(SOURCES[name](folder), None, index="record")
    iterator = FUNCTION(source=source, batch_size=BATCH, seed=SEED)
    epochs = [records(iterator) for _ in range(EPOCHS)]
    assert epochs == [listed_order(len(source), SEED, epoch) for epoch in range(EPOCHS)]
    assert len(set(map(tuple, epochs))) == EPOCHS


def test_epochs_of_a_mixture():
    mixture = sources.Mixture([(numbers(8), 1), (numbers(8), 1)])
    source = sources.Named(mixture, None, index="record")
    iterator = FUNCTION(source=source, batch_size=BATCH, seed=SEED)
    epochs = [records(iterator) for _ in range(EPOCHS)]
    assert len(set(map(tuple, epochs))) == EPOCHS
    for epoch, found in enumerate(epochs):
        parts = [[k for k in found if k < 8], [k - 8 for k in found if k >= 8]]
        assert all(sorted(part) == list(range(8)) for part in parts), epoch


def in_epochs(batches, count=8):
    rows = records(batches)
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def over_source():
    source = sources.Named(numbers(8), None, index="record")
    return {"source": source, "batch_size": BATCH, "seed": SEED}


def adapted(name, graph=graph):
    """Returns the batches of three epochs of eight records."""
    call, steps = over_source(), EPOCHS * 2
    if name == "stream":
        return data_iterator(graph).stream(EPOCHS, **call)
    if name == "auto_reset":
        iterator = data_iterator(graph)(**call, auto_reset=True)
        return [batch for _ in range(EPOCHS) for batch in iterator]
    if name == "CLU":
        iterator = DALIDatasetIterator(data_iterator(graph), **call)
        return [next(iterator) for _ in range(steps)]
    if name == "tf.data":
        return DALIDataset(data_iterator(graph), **call).repeat(EPOCHS)
    if name == "tf.data, each iter()":
        dataset = DALIDataset(data_iterator(graph), **call)
        return [batch for _ in range(EPOCHS) for batch in dataset]
    if name == "Grain":
        return DALIIterDataset(data_iterator(graph), num_epochs=EPOCHS, **call)
    raise ValueError(name)


ADAPTERS = ("stream", "auto_reset", "CLU", "tf.data", "tf.data, each iter()", "Grain")


@pytest.mark.parametrize("name", ADAPTERS)
def test_epochs_of_an_adapter(name):
    assert in_epochs(adapted(name)) == [listed_order(8, SEED, epoch) for epoch in range(EPOCHS)]


def drawing(label, *, draw):
    return {"label": label + 0, "pair": draw.uniform(name="pair", shape=(2,))}


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_epoch_has_its_own_random_numbers(name):
    batches = list(adapted(name, drawing))
    assert len(batches) == 2 * EPOCHS
    for number, batch in enumerate(batches):
        for record, pair in zip(np.asarray(batch["record"]).tolist(), np.asarray(batch["pair"])):
            expected = [uniform_number(SEED, number // 2, record, "pair", k) for k in (0, 1)]
            assert pair.tolist() == expected


@pytest.mark.parametrize("how", ("transform", "loader"))
def test_epochs_of_grains_records(how):
    """Grain shuffles the records: its own elements are the oracle."""
    values = [{"record": np.int32(k)} for k in range(8)]
    if how == "transform":
        ds = grain.MapDataset.source(values).seed(SEED).shuffle().repeat(EPOCHS)
        expected = [int(ds[k]["record"]) for k in range(len(ds))]
        batches = ds.pipe(DALITransform(plus_zero, batch_size=BATCH))
    else:
        sampler = grain.samplers.IndexSampler(8, shuffle=True, seed=SEED, num_epochs=EPOCHS)
        expected = [sampler[k].record_key for k in range(8 * EPOCHS)]
        batches = DALIDataLoader(values, sampler, pipeline_fn=plus_zero, batch_size=BATCH)
    epochs = in_epochs(batches)
    assert epochs == [expected[start : start + 8] for start in (0, 8, 16)]
    assert len(set(map(tuple, epochs))) == EPOCHS


def plus_zero(record):
    return {"record": record + 0}
