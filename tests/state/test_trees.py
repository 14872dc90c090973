"""All states of an iterator have the same tree, so that each is a target for the others."""

import contextlib

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from numbered import read_files


def arrays():
    return sources.Arrays({"x": np.arange(10)})


def over_a_source(x, draw):
    return x + draw.uniform()


def over_a_reader(files):
    label = read_files(files[:10], pad_last_batch=True)[1]
    return fn.python_function(label, function=lambda x: x * 2) + fn.random.uniform()


class ThirdRecordFails(list):
    def __getitem__(self, index):
        if index == 2:
            raise OSError("no such record")
        return {"x": np.int64(index)}


def graph(x):
    return x + fn.random.uniform()


def transform(files):
    dataset = grain.MapDataset.source(ThirdRecordFails(range(10))).to_iter_dataset()
    return iter(dataset.pipe(DALITransform(graph, batch_size=2, output_map=["x"])))


def loader(files):
    sampler = grain.samplers.IndexSampler(10, num_epochs=1, seed=0)
    options = dict(pipeline_fn=graph, output_map=["x"], batch_size=2)
    return iter(DALIDataLoader(ThirdRecordFails(range(10)), sampler, **options))


def of_source():
    return data_iterator(over_a_source, ["x"], source=arrays())


def of_reader():
    return data_iterator(over_a_reader, ["x"], reader_name="reader")


KINDS = {
    "source": lambda files: of_source()(batch_size=2),
    "source, stream": lambda files: of_source().stream(None, batch_size=2),
    "reader": lambda files: of_reader().stream(None, files, batch_size=2),
    "clu": lambda files: DALIDatasetIterator(of_reader(), files=files, batch_size=2),
    "grain": lambda files: iter(DALIIterDataset(of_source(), batch_size=2)),
    "tfdata": lambda files: iter(DALIDataset(of_reader(), files=files, batch_size=2)),
    "chain": lambda files: iter(DALIDataset(of_source(), batch_size=2).skip(1).repeat().take(7)),
    "transform": transform,
    "loader": loader,
}


def walked(make, files):
    """Returns the states of an iterator before and after some calls."""
    iterator = make(files)
    states = [iterator.get_state()]
    for _ in range(6):
        with contextlib.suppress(OSError, RuntimeError, StopIteration):
            next(iterator)
        states.append(iterator.get_state())
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_state_is_a_target_for_flax(kind, jpegs_many):
    make = KINDS[kind]
    fresh = make(jpegs_many).get_state()
    for state in walked(make, jpegs_many):
        assert jax.tree.map(type, state) == jax.tree.map(type, fresh)
        assert serialization.from_state_dict(fresh, serialization.to_state_dict(state)) == state
        restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
        assert restored == state
        target = make(jpegs_many)
        target.set_state(restored)
        assert target.get_state() == state


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_state_is_a_target_for_orbax(kind, jpegs_many, tmp_path):
    """Orbax saves the state as a tree, or as JSON."""
    make = KINDS[kind]
    fresh, state = make(jpegs_many).get_state(), walked(make, jpegs_many)[-1]
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", state)
        restored = checkpointer.restore(tmp_path / "tree", item=fresh)
    assert restored == state
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "json", state)
        assert checkpointer.restore(tmp_path / "json") == state
    target = make(jpegs_many)
    target.set_state(restored)
    assert target.get_state() == state
