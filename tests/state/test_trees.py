"""Every state of an iterator has the same tree, so that any state is a target for another one."""

import contextlib

import grain
import numpy as np
import pytest
from flax import serialization
from nvidia.dali import fn

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALITransform
from numbered import read_files


def over_a_source():
    source = sources.Arrays({"x": np.arange(10)})
    return data_iterator(lambda x: x + 0, ["x"], source=source)(batch_size=2)


def over_a_reader(files):
    def graph():
        label = read_files(files[:10], pad_last_batch=True)[1]
        return fn.python_function(label, function=lambda x: x * 2)

    return data_iterator(graph, ["x"], reader_name="reader").stream(None, batch_size=2)


class ThirdRecordFails(list):
    def __getitem__(self, index):
        if index == 2:
            raise OSError("no such record")
        return {"x": np.int64(index)}


def behind_a_transform():
    dataset = grain.MapDataset.source(ThirdRecordFails(range(10))).to_iter_dataset()
    transform = DALITransform(lambda x: x + 0, batch_size=2, output_map=["x"])
    return iter(dataset.pipe(transform))


@pytest.mark.parametrize("name", ["source", "reader", "transform"])
def test_a_fresh_state_is_a_target_for_flax(name, jpegs_many):
    makers = {
        "source": over_a_source,
        "reader": lambda: over_a_reader(jpegs_many),
        "transform": behind_a_transform,
    }
    fresh, iterator = makers[name]().get_state(), makers[name]()
    for _ in range(4):
        with contextlib.suppress(OSError, RuntimeError):
            next(iterator)
        state = iterator.get_state()
        assert serialization.from_bytes(fresh, serialization.to_bytes(state)) == state
