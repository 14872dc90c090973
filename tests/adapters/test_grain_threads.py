"""Grain's iterators over pipelines, used by several threads concurrently."""

import sys
import threading

import grain
import numpy as np
import pytest

from dalijax import data_iterator, sources
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform

N, BATCH = 60, 4
CALL = {"batch_size": BATCH, "num_threads": 1, "device_id": None}


def identity(number):
    return number + 0


def records(count=N):
    return [{"number": np.array([k], np.int32)} for k in range(count)]


class Watched(grain.IterDataset):
    """Detects prefetch calls during a read."""

    def __init__(self):
        super().__init__()
        self.reads, self.prefetched = threading.Event(), threading.Event()
        self.is_read = False
        self.overlaps = []

    def __iter__(self):
        return WatchedIterator(self)


class WatchedIterator(grain.DatasetIterator):
    def __init__(self, dataset):
        super().__init__()
        self._dataset, self._at = dataset, 0

    def __next__(self):
        self._dataset.is_read = True
        self._dataset.reads.set()
        self._dataset.prefetched.wait(0.2)  # a concurrent prefetch does
        self._at += 1
        self._dataset.is_read = False
        return {"number": np.array([self._at], np.int32)}

    def start_prefetch(self):
        self._dataset.overlaps.append(self._dataset.is_read)
        self._dataset.prefetched.set()

    def get_state(self):
        return {"at": self._at}

    def set_state(self, state):
        self._at = state["at"]


def test_a_prefetch_does_not_enter_the_parent_during_a_read():
    dataset = Watched()
    iterator = iter(dataset.pipe(DALITransform(identity, output_map=["x"], **CALL)))
    taking = threading.Thread(target=next, args=(iterator,), daemon=True)
    taking.start()
    assert dataset.reads.wait(60)
    iterator.start_prefetch()
    taking.join(60)
    assert not taking.is_alive() and dataset.overlaps == [False]
    iterator.close()


def over_map_dataset():
    ds = grain.MapDataset.source(records())
    return ds.pipe(DALITransform(identity, output_map=["x"], **CALL))


def over_iter_dataset():
    ds = grain.MapDataset.source(records()).to_iter_dataset()
    return ds.pipe(DALITransform(identity, output_map=["x"], **CALL))


def loader():
    sampler = grain.samplers.IndexSampler(N, num_epochs=1, seed=1)
    graph = {"pipeline_fn": identity, "output_map": ["x"], "drop_remainder": True}
    return DALIDataLoader(records(), sampler, **graph, **CALL)


def iter_dataset():
    source = sources.Arrays({"number": np.arange(N, dtype=np.int32)[:, None]})
    iterator_fn = data_iterator(identity, ["x"], source=source, shuffle=False)
    return DALIIterDataset(iterator_fn, num_epochs=1, **CALL)


@pytest.mark.parametrize("make", (over_map_dataset, over_iter_dataset, loader, iter_dataset))
def test_calls_concurrent_with_next_repeat_and_lose_no_batch(make):
    dataset = make()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(6):
            iterator, taken, failed = iter(dataset), [], []

            def take(iterator=iterator, taken=taken, failed=failed):
                try:
                    taken += [batch["x"].ravel().tolist() for batch in iterator]
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=take, daemon=True)
            thread.start()
            while thread.is_alive():
                iterator.start_prefetch()
                iterator.get_state()
            assert not failed
            assert taken == np.arange(N).reshape(-1, BATCH).tolist()
            iterator.close()
    finally:
        sys.setswitchinterval(before)
