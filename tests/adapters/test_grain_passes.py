"""A loop that iterates over a Grain dataset in each epoch gets equal batches, and a warning."""

import contextlib
import warnings

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from numbered import read_files

RECORDS = [{"x": np.float32(k)} for k in range(8)]
SAMPLER = grain.samplers.IndexSampler(8, shuffle=True, seed=1, num_epochs=1)


def noisy(x, *, draw):
    return {"x": x, "noise": draw.uniform()}


def keyed(x):
    return {"x": x, "noise": x + fn.random.uniform(range=(0.0, 1.0))}


def plain(x):
    return {"x": x, "noise": x + 1}


def transformed(graph=noisy, **call):
    ds = grain.MapDataset.source(RECORDS).seed(1).shuffle()
    return ds.pipe(DALITransform(graph, batch_size=4, **call))


def loaded(graph=noisy, **call):
    return DALIDataLoader(RECORDS, SAMPLER, [], pipeline_fn=graph, batch_size=4, **call)


def over_source(graph=noisy, **call):
    source = sources.Records(RECORDS)
    return DALIIterDataset(data_iterator(graph), source=source, batch_size=4, **call)


def over_reader(files, graph=noisy):
    def read(files):
        label = fn.cast_like(read_files(files, pad_last_batch=True)[1], np.float32(0))
        noise = fn.random.uniform(range=(0.0, 1.0)) if graph is noisy else label
        return {"x": label, "noise": noise + label}

    return DALIIterDataset(data_iterator(read, reader_name="reader"), files=files[:8], batch_size=4)


MADE = {
    "transform": (transformed, r"\.repeat\(EPOCHS\)"),
    "prefetched": (lambda graph=noisy: transformed(graph).map(dict), r"\.repeat\(EPOCHS\)"),
    "random of DALI": (lambda graph=keyed: transformed(graph), r"\.repeat\(EPOCHS\)"),
    "loader": (loaded, "num_epochs=EPOCHS to the sampler"),
    "source": (over_source, "num_epochs=EPOCHS to DALIIterDataset"),
}


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def noise(batches):
    return np.concatenate([np.asarray(batch["noise"]).ravel() for batch in batches]).tolist()


def check(make, cure):
    ds = make()
    with no_warning():
        next(iter(ds))
        first = noise(ds)
    iterator = iter(ds)
    with pytest.warns(RuntimeWarning, match=f"iterated again after its end.*{cure}"):
        batch = next(iterator)
    with no_warning():
        assert noise([batch, *iterator]) == first == noise(ds)


@pytest.mark.parametrize("name", MADE)
def test_a_second_pass_with_equal_random_numbers_is_reported_once(name):
    check(*MADE[name])


def test_a_second_pass_over_a_reader_is_reported(jpegs_many):
    check(lambda: over_reader(jpegs_many), "num_epochs=EPOCHS to DALIIterDataset")
    with no_warning():
        ds = over_reader(jpegs_many, plain)
        assert noise(ds) == noise(ds)


def test_a_dataset_that_is_placed_by_the_current_mesh_is_reported():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    ds = transformed(sharding=PartitionSpec("data"), drop_remainder=True)
    with jax.set_mesh(mesh):
        first = noise(ds)
        with pytest.warns(RuntimeWarning, match="iterated again"):
            assert noise(ds) == first


@pytest.mark.parametrize("make", (transformed, loaded, over_source))
def test_passes_that_do_not_repeat_random_numbers_are_not_reported(make):
    with no_warning():
        ds = make(plain)  # e.g. for evaluation
        assert noise(ds) == noise(ds)
        ds = make()
        iterator = iter(ds)
        next(iterator)
        state = iterator.get_state()
        rest = noise(iterator)
        restored = iter(ds)
        restored.set_state(state)
        assert noise(restored) == rest


def test_epochs_of_one_iterator_differ():
    with no_warning():
        ds = grain.MapDataset.source(RECORDS).seed(1).shuffle().repeat(2)
        several = [
            ds.pipe(DALITransform(noisy, batch_size=4)),
            over_source(num_epochs=2),
            DALIDataLoader(
                RECORDS,
                grain.samplers.IndexSampler(8, shuffle=True, seed=1, num_epochs=2),
                [],
                pipeline_fn=noisy,
                batch_size=4,
            ),
        ]
        for dataset in several:
            drawn = noise(dataset)
            assert len({*drawn}) == len(drawn) == 16
