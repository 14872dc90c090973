"""Threads prepare records before the loop asks for a batch."""

import threading

import numpy as np
import pytest
from forks import run_fork
from nvidia.dali import fn
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from shardings import rows_over

from dalijax import data_iterator, sources
from dalijax.core.feeding.read_rows import ReadSettings
from dalijax.core.feeding.source_supply import RowRange, SourceSupply
from dalijax.core.feeding.stand_ins import BadSamples
from dalijax.core.order.samples import SamplePlan
from dalijax.core.random.hashing import column_keys, fold, uniform
from dalijax.core.sources.source import order_of
from dalijax.errors import BatchError
from dalijax.sources import Field, Source

COUNT, BATCH, SEED = 24, 4, 3


def numbered(count=COUNT):
    return sources.Arrays({"number": np.arange(count, dtype=np.int32)})


def reads_ahead():
    return threading.current_thread().name.startswith("dalijax-read")


def test_threads_repeat_the_draws_of_earlier_runs():
    """The loop draws the first runs, since the graph's draws are unknown until it runs."""
    ahead = []

    def noted(u, _):
        ahead.append(reads_ahead())
        return u

    def graph(number, draw):
        return number + 0, draw.compute(noted, (2,), name="noted")

    iterator = data_iterator(graph, ["number", "drawn"], source=numbered())
    with iterator(batch_size=BATCH, num_threads=1, seed=SEED, auto_reset=True) as batches:
        for epoch in range(2):
            for batch in batches:
                records = fold(SEED, epoch, np.asarray(batch["number"]))
                wanted = uniform(records, column_keys("noted", 2))
                np.testing.assert_array_equal(batch["drawn"], wanted)
    assert not ahead[0] and all(ahead[-4:])


@pytest.mark.parametrize("shards", (0, 2))
def test_a_draw_that_raises_fails_at_its_batch(shards):
    """Threads call it some batches ahead: earlier batches are delivered, and it is retried."""
    broken = [True]

    def checked(u, _):
        if broken and (u == bad).any():
            raise ArithmeticError("no number for this record")
        return u

    def graph(number, draw):
        return number + 0, draw.compute(checked, (1,), name="u")

    bad = uniform(fold(SEED, 0, np.array([17])), column_keys("u", 1))[0, 0]
    options = {"sharding": rows_over(shards)} if shards else {}
    iterator = data_iterator(graph, ["number", "u"], source=numbered(), shuffle=False, **options)
    with iterator(batch_size=BATCH, num_threads=1, seed=SEED) as batches:
        seen = [np.asarray(next(batches)["number"]).ravel() for _ in range(4)]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no number for this record"):
                next(batches)
        broken.clear()
        seen += [np.asarray(batch["number"]).ravel() for batch in batches]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(COUNT))


class Meeting(Source):
    """The first reads wait for one another, so each needs a thread."""

    fields = {"number": Field(np.int32)}

    def __init__(self, threads, meeting):
        self.read_threads, self._meeting, self._left = threads, meeting, meeting.parties
        self._lock, self.readers = threading.Lock(), set[int]()

    def __len__(self):
        return 1024

    def identity(self):
        return "numbers"

    def read(self, indices, names):
        with self._lock:
            self._left -= 1
            waits = self._left >= 0
            self.readers.add(threading.get_ident())
        if waits:
            self._meeting.wait(timeout=100)
        return {"number": indices.astype(np.int32)}


@pytest.mark.parametrize("shards,threads", ((1, 2), (2, 2), (4, 1), (4, 3)))
def test_all_pipelines_share_the_threads(shards, threads):
    """A read has 64 records: both runs of a pipeline request four reads at once."""
    source = Meeting(threads, threading.Barrier(threads))

    def graph(number):
        return number + 0

    iterator = data_iterator(graph, ["number"], source=source, sharding=rows_over(shards))
    with iterator(batch_size=128 * shards, num_threads=1) as batches:
        seen = [np.asarray(next(batches)["number"]) for _ in range(2)]
    assert len(set(np.concatenate(seen).ravel().tolist())) == 256 * shards
    assert len(source.readers) == threads


def test_threads_read_ahead_once_a_batch_is_taken():
    """While the batch is taken, the threads would only contend for the GIL."""
    read = []

    class Noted(Meeting):
        def read(self, indices, names):
            read.extend(indices.tolist())
            return super().read(indices, names)

    def runs_read():
        for _ in range(3):  # the start, its reads, and the following calls
            feed._workers.call(int).get()
        return len(read) // BATCH

    plan = SamplePlan(1024, BATCH, LastBatchPolicy.DROP, False)
    source = Noted(1, threading.Barrier(1))
    order = order_of(source, SEED, True)
    settings = ReadSettings(source, ("number",), SEED, 1024, BadSamples(), order, None, {})
    feed = SourceSupply(settings, plan, [RowRange(0, BATCH)], depth=2)
    try:
        feed.rows(0, 0).column("number")
        assert runs_read() == 3
        assert len(feed.rows(2, 0).column("number")) == BATCH and runs_read() == 3
        feed.forget(0)  # the third run was requested; the next run and two more are read
        assert runs_read() == 6
        feed.forget(1)
        assert len(feed.rows(5, 0).column("number")) == BATCH and runs_read() == 6
    finally:
        feed.close()


def test_a_record_of_a_source_without_names_is_named_by_its_number():
    class Broken(Meeting):
        def read(self, indices, names):
            if 200 in indices:
                raise OSError("the disk is gone")
            return super().read(indices, names)

    def graph(number):
        return number + 0

    source = Broken(2, threading.Barrier(1))
    with data_iterator(graph, ["number"], source=source, shuffle=False)(
        batch_size=128, num_threads=1
    ) as batches:
        next(batches)
        with pytest.raises(BatchError, match="record 200 of Broken can't be read"):
            next(batches)
        assert int(next(batches)["number"][0]) == 256


def test_inputs_of_any_rank_and_size_reach_the_graph():
    """Values that differ in shape are passed one by one, others as a single array."""
    rng = np.random.default_rng(0)
    ragged = [rng.integers(0, 256, (k % 3, k % 5 + 1), np.uint8) for k in range(COUNT)]
    table = rng.random((COUNT, 2, 3), np.float32)
    records = [{"ragged": one, "row": row} for one, row in zip(ragged, table)]

    def graph(ragged, row):
        return fn.pad(ragged, shape=(2, 5)), row * 2

    records = sources.Records(records)
    iterator = data_iterator(graph, ["padded", "doubled"], source=records, shuffle=False)
    with iterator(batch_size=BATCH, num_threads=1) as batches:
        for number, batch in enumerate(batches):
            rows = range(number * BATCH, (number + 1) * BATCH)
            padded = np.zeros((BATCH, 2, 5), np.uint8)
            for place, row in enumerate(rows):
                height, width = ragged[row].shape
                padded[place, :height, :width] = ragged[row]
            np.testing.assert_array_equal(batch["padded"], padded)
            np.testing.assert_array_equal(batch["doubled"], table[list(rows)] * 2)


class Counting(Source):
    """Notes the number of records of each read."""

    fields = {"number": Field(np.int32)}

    def __init__(self, bad=()):
        self.sizes, self._bad = [], list(bad)

    def __len__(self):
        return 1 << 16

    def identity(self):
        return "numbers"

    def read(self, indices, names):
        self.sizes.append(len(indices))
        if np.isin(indices, self._bad).any():
            raise ValueError("a bad record")
        return {"number": indices.astype(np.int32)}


@pytest.mark.parametrize("devices", (1, 2))
def test_only_awaited_batches_are_split_into_tasks(devices):
    source = Counting()
    iterator = data_iterator(
        lambda number: number + 0, ["number"], source=source, sharding=rows_over(devices)
    )(batch_size=256, num_threads=1, shuffle=False)
    for run in range(4):
        np.testing.assert_array_equal(next(iterator)["number"], np.arange(256) + 256 * run)
    assert source.sizes.count(128) == 2 and set(source.sizes) == {128, 256}
    iterator.seek(5, 2)
    next(iterator)
    iterator.close()
    assert source.sizes.count(128) == 4 and set(source.sizes) == {128, 256}


def test_a_bad_record_is_found_by_few_reads():
    source = Counting(bad=[300])
    iterator = data_iterator(lambda number: number + 0, ["number"], source=source, mask="mask")(
        batch_size=256, num_threads=1, shuffle=False, on_error="mask"
    )
    masks = [np.asarray(next(iterator)["mask"]) for _ in range(2)]
    iterator.close()
    assert masks[0].all() and np.flatnonzero(~masks[1]).tolist() == [300 - 256]
    # The batch in one read, then in parts of 64, 16, 4 and 1, one of which is bad.
    assert [source.sizes.count(size) for size in (64, 16, 4, 1)] == [4, 4, 4, 4]


# While threads start tasks, Python's cyclic gc may free the iterator that they read for.
ABANDONED = """
import gc, threading
from dalijax import data_iterator
from dalijax.sources import Records

goes_on = threading.Event()

class Held(Records):
    read_threads = 3

    def order(self, seed, shuffle):
        def order(samples):
            if samples[0]:  # not of the first run, which the iterator waits for
                goes_on.wait()
            return samples % len(self), samples // len(self)
        return order

def abandoned():
    make = data_iterator(lambda x: x, ["x"], source=Held([{"x": k} for k in range(8)]))
    iterator = make(batch_size=2, num_threads=1, prefetch_queue_depth=1)
    iterator.cycle = iterator

gc.disable()
abandoned()
readers = [one for one in threading.enumerate() if one.name.startswith("dalijax-read")]
assert readers
goes_on.set()
gc.collect()
for reader in readers:
    reader.join(60)
assert not any(one.is_alive() for one in readers)
"""


def test_the_cyclic_gc_may_free_an_iterator_anywhere():
    run_fork(ABANDONED, timeout=120, frees=True)
