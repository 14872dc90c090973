"""Every adapter's iterator moves to a global step with seek_step(), and counts steps equally."""

import copy
import itertools
import types

import grain
import jax
import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import fn

from dalijax import LastBatchPolicy, data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.t5x import get_dataset_fn
from dalijax.adapters.tfdata import DALIDataset
from numbered import read_files

N, BATCH = 11, 4
CALL = {"num_threads": 1, "device_id": None}


def graph(number, *, draw):
    return number + 0, draw.uniform()


def over_source(**options):
    return data_iterator(graph, ["x", "u"], source=Numbers(N), **options)


def over_reader(files):
    def graph():
        _, label = read_files(files, random_shuffle=True, pad_last_batch=True)
        return fn.squeeze(label, axes=0), fn.random.uniform()

    return data_iterator(graph, ["x", "u"], reader_name="reader")


def loader(**options):
    records = [{"number": np.int32(i)} for i in range(N)]
    sampler = grain.samplers.IndexSampler(
        N, grain.sharding.NoSharding(), shuffle=True, num_epochs=4, seed=1
    )
    with_dali = {"pipeline_fn": lambda number: (number + 0, fn.random.uniform()), **options}
    return iter(
        DALIDataLoader(records, sampler, output_map=["x", "u"], batch_size=BATCH, **with_dali)
    )


def t5x(iterator_fn):
    cfg = types.SimpleNamespace(batch_size=BATCH, seed=3)
    return get_dataset_fn(iterator_fn, **CALL)(cfg, 0, 1, None)


# A new endless iterator, over a source or a reader.
ENDLESS = {
    "stream": lambda made: made.stream(batch_size=BATCH, **CALL),
    "CLU": lambda made: DALIDatasetIterator(made, batch_size=BATCH, **CALL),
    "T5X": t5x,
    "tf.data": lambda made: iter(DALIDataset(made, batch_size=BATCH, **CALL).repeat()),
    "Grain": lambda made: iter(DALIIterDataset(made, num_epochs=None, batch_size=BATCH, **CALL)),
}


def values(batch):
    return jax.tree.map(lambda x: np.asarray(x).ravel().tolist(), batch)


@pytest.mark.parametrize("adapter", ENDLESS)
@pytest.mark.parametrize("over", ["source", "reader"])
def test_every_endless_iterator_moves_to_a_step(adapter, over, jpegs_many):
    made = over_source() if over == "source" else over_reader(jpegs_many[:N])
    make = ENDLESS[adapter]
    whole = [values(batch) for batch in itertools.islice(make(made), 10)]
    iterator = make(made)
    for step in (7, 8, 2, 0):
        iterator.seek_step(float(step) if step == 2 else step)
        assert [values(next(iterator)) for _ in range(2)] == whole[step : step + 2]
    with pytest.raises(ValueError, match="step must be .* 0 or more, not -1"):
        iterator.seek_step(-1)
    other = make(made)
    iterator.seek_step(4)
    if hasattr(iterator, "get_state"):
        other.set_state(iterator.get_state())
        assert values(next(other)) == whole[4]


CHAINS = {
    "one epoch": lambda ds: ds,
    "epochs": lambda ds: ds.repeat(3),
    "take": lambda ds: ds.repeat().skip(2).take(8),
    "enumerate": lambda ds: ds.enumerate(7).skip(1).repeat(3),
    "rounds": lambda ds: ds.take(2).repeat().enumerate(),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("over", ["source", "reader"])
def test_elements_of_chains(chain, over, jpegs_many):
    made = over_source() if over == "source" else over_reader(jpegs_many[:N])
    ds = CHAINS[chain](DALIDataset(made, batch_size=BATCH, **CALL))
    iterator, last = iter(ds), 9
    whole = [values(e) for e in itertools.islice(DALIDataset.__iter__(fresh(ds)), last)]
    for step in [k for k in (5, 6, 1, 0, len(whole)) if k <= len(whole)]:
        iterator.seek_step(step)
        assert [values(e) for e in itertools.islice(iterator, last - step)] == whole[step:]
    if ds.cardinality() > 0:
        iterator.seek_step(1)
        with pytest.raises(ValueError, match=r"seek_step\(100\)"):
            iterator.seek_step(100)
        assert values(next(iterator)) == whole[1]


def fresh(ds):
    """Returns the same dataset, without an iterator."""
    return copy.deepcopy(ds)


def test_grains_loader_and_transform():
    whole = [values(batch) for batch in loader(num_threads=1)]
    iterator = loader(num_threads=1)
    for step in (5, 0, np.float32(9)):
        iterator.seek_step(step)
        step = int(step)
        assert values(next(iterator)) == whole[step]
    iterator.seek_step(len(whole))
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(ValueError, match=rf"seek_step\(99\): the loader has only {len(whole)} "):
        iterator.seek_step(99)
    with pytest.raises(ValueError, match=r"with on_error='skip'.*set_state\(\)"):
        loader(num_threads=1, on_error="skip").seek_step(3)
    transform = DALITransform(lambda x: x + 0, batch_size=2, output_map=["x"], **CALL)
    of_records = iter(
        grain.MapDataset.source([{"x": np.int32(i)} for i in range(8)]).pipe(transform)
    )
    next(of_records)
    of_records.seek_step(1)
    with pytest.raises(ValueError, match="batch 3 can't be reached .*DALIDataLoader"):
        of_records.seek_step(3)


def test_a_finite_clu_iterator():
    whole = [
        values(b) for b in DALIDatasetIterator(over_source(), num_epochs=2, batch_size=4, **CALL)
    ]
    iterator = DALIDatasetIterator(over_source(), num_epochs=2, batch_size=4, **CALL)
    future = iterator.peek_async()
    assert values(future.result()) == whole[0]
    iterator.seek_step(4)
    assert values(iterator.peek_async().result()) == values(next(iterator)) == whole[4]
    with pytest.raises(ValueError, match="num_epochs=2 the stream has only"):
        iterator.seek_step(len(whole) + 1)


# Counting if batches were skipped


def with_a_bad_file(jpegs, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not an image")
    files = [*jpegs[:2], str(bad), jpegs[3]]

    def graph():
        image, label = read_files(files, pad_last_batch=True)
        return label, fn.decoders.image(image)[0, 0, 0]

    return data_iterator(graph, ["x", "p"], reader_name="reader", on_error="skip")


def over_bad_records(bad):
    policy = LastBatchPolicy.DROP
    source = Numbers(4, unreadable=[2]) if bad == "read" else Numbers(4, undecodable=[2])
    return data_iterator(
        lambda number, data: (number + 0, fn.decoders.image(data)[0, 0, 0]),
        ["x", "p"],
        source=source,
        shuffle=False,
        on_error="skip",
        last_batch_policy=policy,
    )


def of_grain():
    records = [{"data": Numbers(4, undecodable=[2]).image(i)} for i in range(4)]
    graph = lambda data: fn.decoders.image(data)[0, 0, 0]  # noqa: E731
    transform = DALITransform(graph, batch_size=1, output_map=["p"], on_error="skip", **CALL)
    return iter(grain.MapDataset.source(records).pipe(transform))


@pytest.mark.parametrize("over", ["reader", "read", "decoded", "Grain"])
def test_counters_have_the_step_of_the_batch_after_a_skipped_batch(over, jpegs, tmp_path):
    if over == "Grain":
        iterator = of_grain()
    else:
        bad = over != "reader"
        made = over_bad_records(over) if bad else with_a_bad_file(jpegs, tmp_path)
        iterator = made.stream(1, batch_size=1, **CALL)
    stats, seen = iterator.watch(), []
    for _ in range(3):
        next(iterator)
        seen.append((stats.epoch, stats.step, stats.batches, stats.errors))
    assert seen == [(0, 0, 1, 0), (0, 1, 2, 0), (0, 3, 3, 1)]
