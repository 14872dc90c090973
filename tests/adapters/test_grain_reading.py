"""DALITransform with missing records, records that raise, and slow parents."""

import contextlib
import json
import threading

import grain
import numpy as np
import pytest
from nvidia.dali import fn
from sealing import crafted

from dalijax.adapters.grain import (
    DALIBatch,
    DALIDataLoader,
    DALIIterDataset,
    DALITransform,
    pack_records,
)
from dalijax.adapters.grain.transform import FORM

B = 4


def graph(x):
    return x + 0, fn.random.uniform()


def transform(**options):
    return DALITransform(graph, batch_size=B, output_map=["x", "u"], num_threads=1, **options)


def chunks(values, size=B):
    return [values[i : i + size] for i in range(0, len(values), size)]


class Fails:
    """A user's map that always fails for some records."""

    def __init__(self, *bad, error=KeyError):
        self.bad, self.error = bad, error

    def __call__(self, record):
        if int(record["x"]) in self.bad:
            raise self.error(f"record {record['x']}")
        return record


def source(count=14):
    return grain.MapDataset.source([{"x": np.int32(i)} for i in range(count)])


def events(iterator, most=100):
    """Returns the records of each batch, or the error, and the random numbers, up to the end."""
    out = []
    with contextlib.suppress(StopIteration):
        for _ in range(most):
            try:
                batch = next(iterator)
            except (KeyError, IndexError, RuntimeError) as error:
                out.append(f"{type(error).__name__} {error}")
            else:
                out.append((batch["x"].ravel().tolist(), batch["u"].ravel().tolist()))
    return out


def rows(out):
    return [one if isinstance(one, str) else one[0] for one in out]


def expected(count, bad):
    """Returns the expected events: each error precedes the batch that lacks its record."""
    out, batch = [], []
    for i in range(count):
        if i in bad:
            out.append(f"KeyError 'record {i}'")
            continue
        batch.append(i)
        if len(batch) == B:
            out.append(batch)
            batch = []
    return [*out, batch] if batch else out


PARENTS = {
    "MapDataset": lambda ds, f: ds.map(f),
    "threads": lambda ds, f: ds.map(f).to_iter_dataset(grain.ReadOptions(2, 3)),
    "no threads": lambda ds, f: ds.map(f).to_iter_dataset(grain.ReadOptions(0, 0)),
    "IterDataset": lambda ds, f: ds.to_iter_dataset(grain.ReadOptions(2, 3)).map(f),
    "filtered": lambda ds, f: ds.map(f).to_iter_dataset().filter(lambda record: True),
}


@pytest.mark.parametrize("make", PARENTS.values(), ids=PARENTS)
@pytest.mark.parametrize("bad", ([5], [0], [4, 5], [13], [0, 6, 7, 13], list(range(4, 9))))
def test_a_record_that_raises_loses_no_other_record_and_states_are_exact(make, bad):
    ds = make(source(), Fails(*bad)).pipe(transform())
    iterator, states, got = iter(ds), [], []
    while True:
        states.append(json.loads(json.dumps(iterator.get_state())))
        one = events(iterator, 1)
        if not one:
            break
        got += one
    assert rows(got) == expected(14, bad)
    for step, state in enumerate(states):
        restored = iter(ds)
        restored.set_state(state)
        assert events(restored) == got[step:]
    # The random numbers equal those of a stream without the failing records.
    plain = events(iter(source().filter(lambda r: int(r["x"]) not in bad).pipe(transform())))
    assert [one for one in got if not isinstance(one, str)] == plain


def test_a_record_that_raises_loses_the_list_that_grain_batches():
    for batch_fn in (list, pack_records):
        ds = source().map(Fails(5)).batch(B, batch_fn=batch_fn).to_iter_dataset()
        got = events(iter(ds.pipe(transform())))
        assert rows(got) == [[0, 1, 2, 3], "KeyError 'record 5'", [8, 9, 10, 11], [12, 13]]


def test_a_stop_iteration_of_a_record_does_not_end_the_dataset():
    ds = source(6).map(Fails(1, error=StopIteration)).pipe(transform())
    got = rows(events(iter(ds)))
    assert got[0].startswith("RuntimeError the reading of a record raised StopIteration")
    assert got[1:] == [[0, 2, 3, 4], [5]]


def test_errors_that_grain_cannot_pass_are_raised_repeatedly():
    class Stuck(grain.IterDataset):
        def __iter__(self):
            return StuckIterator()

    class StuckIterator(grain.DatasetIterator):
        def __init__(self):
            super().__init__()
            self.at = 0

        def __next__(self):
            if self.at == 5:
                raise KeyError("record 5")
            self.at += 1
            return {"x": np.int32(self.at - 1)}

        def get_state(self):
            return {"at": self.at}

        def set_state(self, state):
            self.at = state["at"]

    iterator = iter(Stuck().pipe(transform()))
    assert rows(events(iterator, 3)) == [[0, 1, 2, 3]] + ["KeyError 'record 5'"] * 2


# Missing records

HOLES = {
    "filter": lambda ds: ds.filter(lambda record: record["x"] % 3 != 1),
    "map to None": lambda ds: ds.map(lambda record: None if record["x"] % 3 == 1 else record),
    "as an IterDataset": lambda ds: ds.filter(lambda r: r["x"] % 3 != 1).to_iter_dataset(),
    "None of an IterDataset": lambda ds: ds.to_iter_dataset().map(
        lambda record: None if record["x"] % 3 == 1 else record
    ),
}


@pytest.mark.parametrize("make", HOLES.values(), ids=HOLES)
@pytest.mark.parametrize("options", ({}, {"drop_remainder": True}, {"pad": "mask"}))
def test_missing_records_are_removed_and_states_are_exact(make, options):
    want = [i for i in range(21) if i % 3 != 1]
    assert [int(one["x"]) for one in make(source(21)) if one is not None] == want
    ds = make(source(21)).pipe(transform(**options))
    iterator, states, got = iter(ds), [], []
    for _ in range(5):
        states.append(iterator.get_state())
        got += events(iterator, 1)
    whole = chunks(want)[: len(want) // B]
    last = {"drop_remainder": [], "pad": [[18, 20, 20, 20]]}
    assert rows(got) == whole + last.get(next(iter(options), ""), [[18, 20]])
    for step, state in enumerate(states):
        iterator.set_state(state)
        assert events(iterator) == got[step:]


def test_flat_map_delivers_its_records():
    class Twice(grain.experimental.FlatMapTransform):
        max_fan_out = 3

        def flat_map(self, record):
            return [record] * (int(record["x"]) % 3)

    ds = grain.experimental.apply_transformations(source(9), Twice())
    want = [i for i in range(9) for _ in range(i % 3)]
    assert rows(events(iter(ds.pipe(transform())))) == chunks(want)
    assert rows(events(iter(ds.repeat(2).pipe(transform())))) == chunks(want * 2)


def test_a_filter_without_records_ends():
    assert events(iter(source().filter(lambda record: False).pipe(transform()))) == []


# Properties of Grain's batches: writable arrays, and numbers of batches


def with_a_constant(x):
    return x + 0, fn.constant(idata=[7, 7])


def loader(**options):
    options = {"pipeline_fn": with_a_constant, "output_map": ["x", "c"], **options}
    records = [{"x": np.int32(i)} for i in range(14)]
    sampler = grain.samplers.SequentialSampler(14)
    return DALIDataLoader(records, sampler, batch_size=B, num_threads=1, **options)


def unchanged_loader(**options):
    records = [{"x": np.int32(i)} for i in range(14)]
    operation = DALIBatch(with_a_constant, B, ["x", "c"], num_threads=1, **options)
    sampler = grain.samplers.IndexSampler(14, num_epochs=1)
    return grain.DataLoader(data_source=records, sampler=sampler, operations=[operation])


def reader(**options):
    def read():
        x = fn.readers.numpy(files=list(FILES), name="r", pad_last_batch=True)
        return x, fn.constant(idata=[7, 7])

    options = {"output_map": ["x", "c"], "reader_name": "r", "num_threads": 1, **options}
    return DALIIterDataset(read, batch_size=B, **options)


FILES = []  # NumPy generators, one for each record
WRITERS = {
    "DALITransform": lambda **options: source().pipe(
        DALITransform(
            with_a_constant, batch_size=B, output_map=["x", "c"], num_threads=1, **options
        )
    ),
    "DALIDataLoader": loader,
    "DALIBatch": unchanged_loader,
    "DALIIterDataset": reader,
}


@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_arrays_are_writable_on_request(make, tmp_path, monkeypatch):
    for i in range(14):
        monkeypatch.setitem(globals(), "FILES", [*FILES, str(tmp_path / f"{i:02}.npy")])
        np.save(FILES[-1], np.int32(i))
    with pytest.raises(ValueError, match="read-only"):
        next(iter(make()))["c"][:] = 0
    seen = []
    for batch in make(writable=True):
        seen.append((batch["x"].ravel().tolist(), batch["c"].tolist()))
        for array in batch.values():
            array[:] = 100
    assert seen == [(own, [[7, 7]] * len(own)) for own in chunks(list(range(14)))]


def test_the_number_of_batches_equals_grains_or_raises_with_a_fix(monkeypatch, tmp_path):
    plain, ours = iter(source().to_iter_dataset().batch(B)), iter(source().pipe(transform()))
    for step in range(3):
        for iterator in (plain, ours):
            assert grain.experimental.get_next_index(iterator) == step
        next(plain), next(ours)
    grain.experimental.set_next_index(ours, 3)
    with pytest.raises(ValueError, match="batch 1 can't be reached without its state.*set_state"):
        grain.experimental.set_next_index(ours, 1)
    assert next(ours)["x"].tolist() == [12, 13]
    steps = iter(loader())
    grain.experimental.set_next_index(steps, 2)
    assert grain.experimental.get_next_index(steps) == 2
    assert next(steps)["x"].ravel().tolist() == [8, 9, 10, 11]
    monkeypatch.setitem(globals(), "FILES", [str(tmp_path / f"{i:02}.npy") for i in range(12)])
    for i, file in enumerate(FILES):
        np.save(file, np.int32(i))
    of_reader, whole = iter(reader()), list(reader())
    grain.experimental.set_next_index(of_reader, 2)
    assert next(of_reader)["x"].tolist() == whole[2]["x"].tolist()
    with pytest.raises(ValueError, match=r"counts samples, not batches.*Use get_state\(\)"):
        grain.experimental.get_next_index(of_reader)


# Slow parents


class Gated(grain.IterDataset):
    """Records after the first batches wait until the first batches are delivered."""

    def __init__(self, free, received):
        super().__init__()
        self.free, self.received = free, received

    def __iter__(self):
        return GatedIterator(self.free, self.received)


class GatedIterator(grain.DatasetIterator):
    def __init__(self, free, received):
        super().__init__()
        self.free, self.received, self.at = free, received, 0

    def __next__(self):
        if self.at == 40:
            raise StopIteration
        if self.at >= self.free and not self.received.wait(300):
            raise TimeoutError(f"record {self.at} was asked for before the first batch was given")
        self.at += 1
        return {"x": np.int32(self.at - 1)}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("prefetch", (1, 2, 4))
def test_the_first_batch_does_not_wait_for_later_records(prefetch):
    received = threading.Event()
    iterator = iter(Gated(B, received).pipe(transform(prefetch=prefetch)))
    first = next(iterator)
    received.set()
    got = [first["x"].tolist(), *rows(events(iterator))]
    assert got == chunks(list(range(40)))
    received.clear()
    start = dict(parent={"at": 0}, records=0, step=0)
    iterator.set_state(crafted(FORM, iterator.get_state(), **start))
    assert next(iterator)["x"].tolist() == [0, 1, 2, 3]


# Not with ds.map() or ds.apply()


@pytest.mark.parametrize("make", (lambda ds: ds, lambda ds: ds.to_iter_dataset()))
def test_a_mapped_or_applied_transform_raises_with_the_fix(make):
    way = r"Write ds\.pipe\(DALITransform\(\.\.\.\)\)"
    with pytest.raises(TypeError, match=way):
        next(iter(make(source()).map(transform())))
    with pytest.raises(TypeError, match=way):
        next(iter(make(source()).apply(transform())))
    with pytest.raises(TypeError, match=way):
        transform()([{"x": 1}])


def test_impossible_positions_are_refused_without_effect():
    iterator = iter(source().pipe(transform()))
    state = iterator.get_state()
    # Three batches after the start, or three records: the parent's states look the same.
    other = iter(source().to_iter_dataset().pipe(transform())).get_state()
    wrong = [dict(skip=-1), dict(failed="a"), dict(failed=["1"])]
    for bad in (other, *(crafted(FORM, state, **change) for change in wrong)):
        with pytest.raises(ValueError, match="damaged: |reads: records -> lists"):
            iterator.set_state(bad)
    assert rows(events(iterator)) == chunks(list(range(14)))
