"""A restore that Ctrl-C interrupts at any line changes the whole position or nothing."""

import contextlib
import itertools
import json
import types

import grain
import numpy as np
import pytest
from clu.data import dataset_iterator
from interrupts import interrupt_at, lines_of
from nvidia.dali import fn

from conformance import frozen
from dalijax import data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.t5x import get_dataset_fn
from dalijax.adapters.tfdata import DALIDataset
from full import FULL
from numbered import graph

N, BATCH = 11, 2
PER_CASE = 10_000 if FULL else 12  # lines of each case to try, spread over the call
# Distinct seeds: a state also contains the seed of the pipelines.
SEEDS = (None, 7)


def by_reader(files):
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader", as_numpy=True)
    return iterator_fn, {"files": files, "shuffle": True, "batch_size": BATCH, "num_threads": 1}


def by_source(_):
    def drawn(number, draw):
        return number + 0, draw.uniform()

    source = sources.Arrays({"number": np.arange(N, dtype=np.int32)[:, None]})
    iterator_fn = data_iterator(drawn, ["x", "u"], source=source, as_numpy=True)
    return iterator_fn, {"batch_size": BATCH, "num_threads": 1, "device_id": None}


def seeded(call, seed):
    return call if seed is None else {**call, "seed": seed}


def core(data, seed):
    iterator_fn, call = data
    return iterator_fn(**seeded(call, seed), auto_reset=True)


def chain(data, seed):
    iterator_fn, call = data
    dataset = DALIDataset(iterator_fn, **seeded(call, seed))
    return iter(dataset.repeat(2).skip(1).take(7).repeat(3).enumerate())


def clu(data, seed):
    iterator_fn, call = data
    return DALIDatasetIterator(iterator_fn, **seeded(call, seed))


def iter_dataset(data, seed):
    iterator_fn, call = data
    return iter(DALIIterDataset(iterator_fn, num_epochs=None, **seeded(call, seed)))


def t5x(data, seed):
    iterator_fn, call = data
    call = {k: v for k, v in call.items() if k != "batch_size"}
    config = types.SimpleNamespace(batch_size=BATCH, seed=seed)  # of T5X's DatasetConfig
    return get_dataset_fn(iterator_fn, **call)(config, 0, 1)


def records():
    return [{"number": np.array([k], np.int32)} for k in range(40)]


def with_draws(number, draw):
    return number + 0, draw.uniform(), fn.random.uniform()


RECORD_GRAPH = {"output_map": ["x", "u", "v"], "batch_size": BATCH, "num_threads": 1}


def transform(_, seed):
    made = DALITransform(with_draws, device_id=None, **seeded(RECORD_GRAPH, seed))
    return iter(grain.MapDataset.source(records()).pipe(made))


def transform_of_iterators(_, seed):
    made = DALITransform(with_draws, device_id=None, **seeded(RECORD_GRAPH, seed))
    ds = grain.MapDataset.source(records()).shuffle(3).to_iter_dataset()
    return iter(grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2).pipe(made))


class Records(list):
    def __repr__(self):
        return f"Records({len(self)})"


def loader(_, seed):
    sampler = grain.samplers.IndexSampler(40, shuffle=True, num_epochs=1, seed=1)
    return iter(
        DALIDataLoader(
            Records(records()),
            sampler,
            pipeline_fn=with_draws,
            device_id=None,
            drop_remainder=True,
            **seeded(RECORD_GRAPH, seed),
        )
    )


INDEXED = [by_reader, by_source]
CASES = [
    *((make, data) for make in (core, chain, clu, iter_dataset) for data in INDEXED),
    (t5x, by_source),
    *((make, None) for make in (transform, transform_of_iterators, loader)),
]
CASE_IDS = [f"{make.__name__}-{data.__name__ if data else 'records'}" for make, data in CASES]


def describe(element):
    numbers, batch = element if isinstance(element, tuple) else (0, element)
    return int(numbers), frozen(batch)


def walk(iterator, count):
    return [describe(element) for element in itertools.islice(iterator, count)]


@pytest.mark.parametrize("make,data", CASES, ids=CASE_IDS)
def test_an_interrupted_restore_keeps_the_old_or_the_new_position(jpegs_many, tmp_path, make, data):
    prepared = data and data(jpegs_many)
    saved = []
    for seed, taken in zip(SEEDS, (2, 9)):
        iterator = make(prepared, seed)
        walk(iterator, taken)
        saved.append((json.loads(json.dumps(iterator.get_state())), walk(iterator, 2)))
        with contextlib.suppress(AttributeError):
            iterator.close()
    (old, old_batches), (new, new_batches) = saved
    assert old_batches != new_batches
    iterator = make(prepared, None)

    if isinstance(iterator, dataset_iterator.DatasetIterator):
        file = tmp_path / "state.json"
        file.write_text(json.dumps(new))

        def restore():
            iterator.restore(file)
    else:

        def restore():
            iterator.set_state(new)

    def go_to_old():
        iterator.set_state(old)
        assert walk(iterator, 1) == old_batches[:1]  # the pipelines run, and have read ahead
        iterator.set_state(old)

    go_to_old()
    lines = lines_of(restore)
    step = -(-len(lines) // PER_CASE)
    reached, outcomes = 0, set()
    for number, line in enumerate(lines[::step]):
        go_to_old()
        if number % 3:  # new pipelines run, or are not built yet
            walk(iterator, 1)
            iterator.set_state(old)
        reached += interrupt_at(line, restore)  # some lines run only in the first restore
        looks = [iterator.get_state()] if number % 2 else []
        batches = walk(iterator, 2)
        assert batches in (old_batches, new_batches), line
        moved = batches == new_batches
        assert looks in ([], [new if moved else old]), line
        outcomes.add(moved)
    assert reached > len(lines[::step]) // 3 and False in outcomes


@pytest.mark.parametrize("make,data", CASES, ids=CASE_IDS)
def test_an_interrupted_first_batch_can_be_taken_again(jpegs_many, make, data):
    prepared = data and data(jpegs_many)
    iterator = make(prepared, 7)
    lines = lines_of(lambda: next(iterator))
    expected = walk(make(prepared, 7), 3)
    reached = 0
    tried = lines[:: -(-len(lines) // PER_CASE)]
    for line in tried:
        iterator = make(prepared, 7)
        reached += interrupt_at(line, lambda iterator=iterator: next(iterator))
        assert walk(iterator, 2) in (expected[:2], expected[1:]), line
        with contextlib.suppress(AttributeError):
            iterator.close()
    assert reached > len(tried) // 2
