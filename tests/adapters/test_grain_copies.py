"""Grain's iterators over pipelines can't be copied; an attempt changes nothing."""

import copy
import pickle

import grain
import numpy as np
import pytest

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform

N, BATCH = 8, 2
CALL = {"batch_size": BATCH, "num_threads": 1, "device_id": None}


def identity(number):
    return number + 0


def records():
    return [{"number": np.array([k], np.int32)} for k in range(N)]


def transform():
    made = DALITransform(identity, output_map=["number"], **CALL)
    return iter(grain.MapDataset.source(records()).pipe(made))


def loader():
    sampler = grain.samplers.SequentialSampler(N, grain.sharding.NoSharding())
    made = DALIDataLoader(records(), sampler, pipeline_fn=identity, output_map=["number"], **CALL)
    return iter(made)


def iter_dataset():
    source = sources.Arrays({"number": np.arange(N, dtype=np.int32)[:, None]})
    iterator_fn = data_iterator(identity, ["number"], source=source, shuffle=False)
    return iter(DALIIterDataset(iterator_fn, **CALL))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("make", [transform, loader, iter_dataset])
def test_a_copy_is_refused_and_the_iterator_continues(make, copied):
    iterator = make()
    next(iterator)
    with pytest.raises(TypeError, match=r"copied.*set_state\(\)"):
        copied(iterator)
    numbers = [np.asarray(batch["number"]).ravel().tolist() for batch in iterator]
    assert numbers == np.arange(BATCH, N).reshape(-1, BATCH).tolist()
