"""`DALIIterDataset` behaves like Grain's datasets: batches, ends, states and tools."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import json
import pickle
import threading
from typing import Any

import cloudpickle
import grain
import hypothesis
import jax
import numpy as np
import pytest
from absl import flags
from grain import experimental as toolbox
from grain._src.core.sharding import even_split
from hypothesis import strategies as st
from nvidia.dali import fn
from shardings import rows_over

from dalijax import LastBatchPolicy, data_iterator
from dalijax.adapters.grain import DALIIterDataset
from full import in_full
from oracle import Case

N, BATCH = 11, 4
Shard = grain.sharding.ShardOptions
check_checkpoints = toolbox.assert_equal_output_after_checkpoint


def numbers(files, n=N, first=0, padded=True, stick=True, shuffle=False, shard_id=0, num_shards=1):
    """Defines the numbers of n files from ``first``, and a draw that shows the random state."""
    label = fn.readers.file(
        files=files[:n],
        labels=list(range(first, first + n)),
        name="reader",
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=padded,
        stick_to_shard=stick,
        random_shuffle=shuffle,
    )[1]
    return label, fn.random.uniform()


ITERATOR_FN = data_iterator(numbers, ["x", "u"], reader_name="reader")


def source(files: list[str], iterator_fn: Any = ITERATOR_FN, **options: Any) -> DALIIterDataset:
    call = {"files": files, "batch_size": BATCH, "num_threads": 1, **options}
    return DALIIterDataset(iterator_fn, **call)


def samples(element: Any) -> Any:
    """Returns the numbers of an element, which Grain's tools may have converted."""
    if isinstance(element, tuple):
        return [samples(one) for one in element]
    return np.asarray(element["x"] if isinstance(element, dict) else element).ravel().tolist()


def walk(ds: Any) -> list[Any]:
    return [samples(element) for element in ds]


def merge_rows(batches: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def on_host(ds: grain.IterDataset) -> grain.IterDataset:
    return ds.map(lambda batch: jax.tree.map(np.asarray, batch))  # what the helper can compare


def batched(n: int, first: int = 0, drop: bool = False) -> list[list[int]]:
    """Returns some numbers in batches, by slicing."""
    own = [list(range(first, first + n))[at : at + BATCH] for at in range(0, n, BATCH)]
    return [batch for batch in own if len(batch) == BATCH or not drop]


def tail(ds: grain.IterDataset, state: dict[str, Any]) -> list[Any]:
    """Returns the batches of a new iterator from a state that was encoded as JSON."""
    iterator = iter(ds)
    iterator.set_state(json.loads(json.dumps(state)))
    return list(iterator)


def test_dataset_and_iterator_are_subclasses_of_grains(jpegs_many):
    plain = source(jpegs_many, numbers, output_map=["x", "u"], reader_name="reader")
    for ds in (plain, source(jpegs_many)):
        assert isinstance(ds, grain.IterDataset) and isinstance(iter(ds), grain.DatasetIterator)
        assert all(type(array) is np.ndarray for array in next(iter(ds)).values())
        assert walk(ds) == batched(N)


def test_a_graph_may_have_an_argument_as_numpy(jpegs_many):
    def graph(files, as_numpy="its own"):
        assert as_numpy == "its own"
        return fn.readers.file(files=files, name="reader", pad_last_batch=True)[1]

    iterator_fn = data_iterator(graph, ["x"], reader_name="reader")
    batch = next(iter(DALIIterDataset(iterator_fn, files=jpegs_many[:N], batch_size=BATCH)))
    assert isinstance(batch["x"], np.ndarray)
    for said in (True, False):  # no computation: the device determines it
        ds = DALIIterDataset(ITERATOR_FN, files=jpegs_many, batch_size=BATCH, as_numpy=said)
        assert isinstance(next(iter(ds))["x"], np.ndarray)


def test_iterators_are_fresh_independent_and_their_end_is_sticky(jpegs_many):
    ds = source(jpegs_many, num_epochs=2)
    one, other = iter(ds), iter(ds)
    ahead = [samples(next(one)) for _ in range(4)]
    assert [samples(next(other)) for _ in range(3)] == ahead[:3] == batched(N)
    assert ahead + walk(one) == batched(N) * 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(one)
    assert samples(next(other)) == batched(N)[0]  # an iterator's end does not affect the other


def test_a_closed_iterator_raises_and_closes_again(jpegs_many):
    for steps in range(2):
        iterator = iter(source(jpegs_many))
        for _ in range(steps):
            next(iterator)
        iterator.close()
        iterator.close()
        for use in (iterator.__next__, iterator.start_prefetch):
            with pytest.raises(ValueError, match="closed"):
                use()


def test_only_prefetch_and_batches_build_a_pipeline(jpegs_many):
    built = []

    def counted():
        built.append(1)
        return numbers(jpegs_many)

    ds = DALIIterDataset(
        counted, output_map=["x", "u"], reader_name="reader", batch_size=BATCH, num_threads=1
    )
    iterator = iter(ds)
    state = iterator.get_state()
    iterator.set_state(state)
    assert str(ds) and str(iterator) and not built
    for _ in range(2):
        iterator.start_prefetch()
    assert (len(built), iterator.get_state()) == (
        1,
        state,
    )  # delivered no batch
    assert walk(iterator) == batched(N) and len(built) == 1


def test_states_may_be_taken_in_another_thread(jpegs_many):
    ds = source(jpegs_many, num_epochs=20)
    iterator, seen, done = iter(ds), [], threading.Event()
    known = [iterator.get_state()]

    def watch():
        while not done.is_set():
            seen.append(iterator.get_state())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        watching = pool.submit(watch)
        for _ in range(60):
            next(iterator)
            known.append(pool.submit(iterator.get_state).result())
        done.set()
        watching.result()
    assert seen and all(state in known for state in seen)  # never half of a step
    assert [samples(b) for b in tail(ds, known[-4])] == batched(N)


def test_a_state_is_never_between_two_epochs(jpegs_many, monkeypatch):
    ds = source(jpegs_many, num_epochs=2)
    iterator, told = iter(ds), []
    for _ in range(len(batched(N))):
        next(iterator)
    stream = iterator._stream
    begin = stream._enter_next_epoch

    def begin_and_be_asked():  # like a concurrent thread
        begin()
        told.append(pool.submit(iterator.get_state))
        assert not concurrent.futures.wait(told, timeout=0.05).done

    monkeypatch.setattr(stream, "_enter_next_epoch", begin_and_be_asked)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        next(iterator)
        assert [future.result() for future in told] == [iterator.get_state()]


def test_an_endless_dataset_continues_and_resumes(jpegs_many):
    ds = source(jpegs_many, num_epochs=None)
    iterator = iter(ds)
    assert [samples(next(iterator)) for _ in range(16)] == (batched(N) * 6)[:16]
    other = iter(ds)
    other.set_state(iterator.get_state())
    assert [samples(next(other)) for _ in range(5)] == (batched(N) * 7)[16:21]
    with pytest.raises(ValueError, match="no epoch has a batch"):
        next(iter(source(jpegs_many, n=3, num_epochs=None, drop_remainder=True)))


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(3, 13), st.integers(1, 3), st.booleans())
def test_shards_have_grains_sizes(jpegs_many, n, shards, drop):
    mine, theirs = [], []
    for shard in range(shards):
        options = Shard(shard, shards)
        mine.append(walk(source(jpegs_many, n=n, shard_options=options, drop_remainder=drop)))
        own = grain.MapDataset.range(n)[slice(*even_split(n, options))]
        theirs.append(walk(own.batch(BATCH, drop_remainder=drop).to_iter_dataset()))
    if n % shards == 0:
        assert mine == theirs
        return
    # Grain assigns the remainder to the first shards, DALI to the last.
    assert sorted(map(len, merge_rows(mine))) == sorted(map(len, merge_rows(theirs)))
    if not drop:
        assert sorted(merge_rows(merge_rows(mine))) == sorted(merge_rows(merge_rows(theirs)))


@pytest.mark.parametrize("policy", [{"pad": "mask"}, {}], ids=str)
def test_a_shard_is_the_same_in_every_epoch(jpegs_many, policy):
    for shard in range(3):
        ds = source(jpegs_many, num_epochs=2, shard_options=Shard(shard, 3), **policy)
        valid = [b["x"].ravel()[b.get("mask", slice(None))].tolist() for b in ds]
        assert merge_rows(valid) == list(range(N * shard // 3, N * (shard + 1) // 3)) * 2


def test_a_shuffled_epoch_has_every_sample_once(jpegs_many):
    ds = source(jpegs_many, n=32, shuffle=True, num_epochs=2)
    epochs = np.reshape(walk(ds), (2, 32))
    assert (epochs[0] != epochs[1]).any() and (epochs[0] != np.arange(32)).any()
    np.testing.assert_array_equal(np.sort(epochs), [np.arange(32)] * 2)
    check_checkpoints(ds)


def test_a_reader_without_padding_drops_only_if_epochs_stay_complete(jpegs_many):
    ds = source(jpegs_many, padded=False, drop_remainder=True)
    assert walk(ds) == batched(N, drop=True)
    ds = source(jpegs_many, n=8, padded=False, drop_remainder=True, num_epochs=3)
    assert walk(ds) == batched(8) * 3
    # The samples of the dropped batch would be missing in the next epoch.
    with pytest.raises(ValueError, match="samples of the next epoch.*pad_last_batch=True"):
        next(iter(source(jpegs_many, padded=False, drop_remainder=True, num_epochs=3)))


@pytest.mark.parametrize(
    "policy,name", [({"pad": "mask"}, "FILL"), ({"drop_remainder": 1}, "DROP")]
)
def test_with_a_sharding_batches_are_global_arrays(jpegs_many, policy, name):
    sharding = rows_over(4)
    ds = source(jpegs_many, sharding=sharding, batch_size=8, num_epochs=2, **policy)
    case, got = Case(N, 4, 2, name, True, True), list(ds)
    assert len(got) == 2 * len(list(zip(*case.epochs(1)[0][1])))
    wanted = [(p, number) for number, streams in case.epochs(2) for p in zip(*streams)]
    for batch, (pieces, number) in zip(got, wanted, strict=True):
        assert all(isinstance(a, jax.Array) and a.sharding == sharding for a in batch.values())
        assert samples(batch) == [s[0] for own in pieces for s in own]
        if name == "FILL":
            mask = np.concatenate([case.mask(own, number) for own in pieces])
            np.testing.assert_array_equal(batch["mask"], mask)
    check_checkpoints(on_host(ds))


UNSHARDED = data_iterator(lambda files: numbers(files), ["x", "u"], reader_name="reader")


def made(**config: Any) -> Any:
    return {"iterator_fn": data_iterator(numbers, ["x", "u"], reader_name="reader", **config)}


def test_arguments_that_exclude_one_another_are_refused_at_once(jpegs_many):
    two, four = rows_over(2), rows_over(4)
    for options, message in (
        ({"pad": "zeros"}, "pad must be None or 'mask'"),
        ({"pad": "mask", "drop_remainder": True}, "Omit one"),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"sharding": two}, "drop_remainder=True.*pad='mask'"),
        ({"sharding": two, "pad": "mask", "shard_options": Shard(0, 2)}, "Omit one"),
        ({"iterator_fn": numbers}, "output_map= and reader_name="),
        (made(last_batch_policy=LastBatchPolicy.DROP), "last_batch_policy.*Omit it"),
        (made(auto_reset=True), "auto_reset=True.*Omit it"),
        ({**made(mask="m"), "pad": "mask"}, "mask='m'.*Omit it"),
        ({**made(sharding=four), "pad": "mask", "sharding": two}, "sharding=.*Omit it"),
    ):
        with pytest.raises(ValueError, match=message):
            source(jpegs_many, **options)


def test_an_unsuitable_reader_is_refused_with_the_missing_arguments(jpegs_many):
    for options, message in (
        ({"padded": False}, "Pass pad_last_batch=True"),
        ({"padded": False, "pad": "mask"}, "Pass pad_last_batch=True"),
        ({"stick": False, "shard_options": Shard(0, 2)}, "Pass stick_to_shard=True"),
        ({"shard_options": Shard(0, 2, drop_remainder=True)}, "2 shards do not divide the 11"),
        ({"shard_options": Shard(0, 2), "shard_id": 1}, "shard_options. Omit them"),
        ({"iterator_fn": UNSHARDED, "shard_options": Shard(0, 2)}, "Add shard_id=0 and num_sh"),
    ):
        with pytest.raises(ValueError, match=message):
            next(iter(source(jpegs_many, **options)))


def test_positional_arguments_are_refused(jpegs_many):
    with pytest.raises(TypeError, match="DALIIterDataset.* as a positional argument. Pass everyth"):
        DALIIterDataset(UNSHARDED, jpegs_many, batch_size=4)


@pytest.mark.parametrize("setting", ["auto_reset", "mask", "shard_options"])
def test_duplicate_settings_are_refused(jpegs_many, setting):
    options = {
        "auto_reset": {"auto_reset": True},
        "mask": {"mask": "m"},
        "shard_options": {"shard_options": Shard(1, 2), "pad": "mask"},
    }[setting]
    if setting == "shard_options":
        options |= made(sharding=rows_over(2))
    with pytest.raises(ValueError):
        next(iter(source(jpegs_many, **options)))


@pytest.mark.parametrize("depth", range(1, 6))
def test_checkpoints_at_every_prefetch_depth(jpegs_many, depth):
    check_checkpoints(source(jpegs_many, num_epochs=2, prefetch_queue_depth=depth, shuffle=True))
    ds = toolbox.ThreadPrefetchIterDataset(
        source(jpegs_many, num_epochs=2), prefetch_buffer_size=depth - 1
    )
    assert walk(ds) == batched(N) * 2
    check_checkpoints(ds)


def test_checkpoints_under_device_put(jpegs_many):
    device = jax.devices()[3]
    ds = toolbox.device_put(source(jpegs_many, num_epochs=2), device)
    assert all(batch["x"].devices() == {device} for batch in ds)
    assert walk(ds) == batched(N) * 2
    check_checkpoints(on_host(ds))


def test_checkpoints_under_multithread_prefetch(jpegs_many):
    ds = toolbox.multithread_prefetch(source(jpegs_many, num_epochs=2), 3, 2)
    assert sorted(merge_rows(walk(ds))) == sorted([*range(N)] * 2)
    check_checkpoints(ds)
    placed = source(jpegs_many, sharding=rows_over(2), pad="mask")
    with pytest.raises(ValueError, match="DALI reads in its own threads"):
        toolbox.multithread_prefetch(placed, 2, 1)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, in_full(2)])
def test_checkpoints_under_worker_processes(jpegs_many, workers):
    flags.FLAGS.mark_as_parsed()  # the workers copy Grain's flags
    seen: list[Any] = []
    ds = source(jpegs_many, n=7, num_threads=1)
    ds = ds.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    check_checkpoints(ds.map(lambda batch: seen.append(samples(batch)) or batch))
    # The helper walks through the data once, and then from both of its states to the end.
    assert sorted(merge_rows(seen[:2])) == list(range(7)) and seen[2:] == seen[:2] + seen[1:2]


class Samples(toolbox.FlatMapTransform):
    max_fan_out = BATCH

    def flat_map(self, element: Any) -> list[Any]:
        return list(element["x"].ravel())


def times(e: Any, factor: Any) -> Any:
    return {**e, "x": e["x"] * factor}


A, B = batched(N), batched(8, 100)
# Operations on p, a dataset of A, and q, a dataset of B.
TOOLS: dict[str, Any] = {
    "map": lambda p, q: p.map(lambda e: times(e, 2)),
    "random_map": lambda p, q: p.seed(3).random_map(lambda e, g: times(e, g.integers(2, 1 << 20))),
    "map_with_index": lambda p, q: p.map_with_index(lambda i, e: times(e, i)),
    "filter": lambda p, q: p.filter(lambda e: e["x"].ravel()[0] != 4),
    "batch": lambda p, q: q.batch(2),
    "apply": lambda p, q: p.apply([grain.transforms.Batch(1)]),
    "rebatch": lambda p, q: toolbox.RebatchIterDataset(p, 3),
    "mix": lambda p, q: grain.IterDataset.mix([p, q]),
    "mix by names": lambda p, q: grain.IterDataset.mix({"p": p, "q": q}, {"p": 1, "q": 2}),
    "zip": lambda p, q: toolbox.ZipIterDataset([p, q], strict=False),
    "interleave": lambda p, q: toolbox.InterleaveIterDataset([p, q], cycle_length=2),
    "repeat": lambda p, q: toolbox.RepeatIterDataset(p, 2),
    "limit": lambda p, q: toolbox.LimitIterDataset(p, 2),
    "cache": lambda p, q: toolbox.CacheIterDataset(p),
    "shuffle": lambda p, q: toolbox.WindowShuffleIterDataset(p, window_size=3, seed=2),
    "flat_map": lambda p, q: toolbox.FlatMapIterDataset(p, Samples()),
}
# Their results if plain lists determine them; otherwise Grain's results.
GIVEN: dict[str, Any] = {
    "map": [[2 * x for x in own] for own in A],
    "map_with_index": [[i * x for x in own] for i, own in enumerate(A)],
    "filter": [A[0], A[2]],
    "batch": [B[0] + B[1]],
    "apply": A,
    "rebatch": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]],
    "mix": [A[0], B[0], A[1], B[1], A[2]],
    "mix by names": [A[0], B[0], B[1], A[1]],
    "zip": [[A[0], B[0]], [A[1], B[1]]],
    "interleave": [A[0], B[0], A[1], B[1], A[2]],
    "repeat": A + A,
    "limit": A[:2],
    "cache": A,
    "flat_map": [[x] for x in range(N)],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_grains_tools_work_as_over_grains_datasets_and_resume(jpegs_many, tool):
    plain = []
    for data in (A, B):
        records = [{"x": np.array(x, np.int32)[:, None]} for x in data]
        plain.append(grain.MapDataset.source(records).to_iter_dataset())
    ds = TOOLS[tool](source(jpegs_many), source(jpegs_many, n=8, first=100))
    got = walk(ds)
    assert got == walk(TOOLS[tool](*plain)) == GIVEN.get(tool, got) != []
    check_checkpoints(ds)


def doubled(files: list[str]) -> Any:
    """Returns a dataset whose graph is a local function, which only cloudpickle can pickle."""

    def graph(files, shard_id=0, num_shards=1):
        number, u = numbers(files, shard_id=shard_id, num_shards=num_shards)
        return number * 2, u

    return source(files, graph, output_map=["x", "u"], reader_name="reader")


def test_datasets_pickle_and_copy_with_their_states(jpegs_many):
    ds = source(jpegs_many, num_epochs=2)
    iterator = iter(ds)
    next(iterator)
    state, rest = iterator.get_state(), list(iterator)
    for again in (pickle.loads(pickle.dumps(ds)), copy.deepcopy(ds)):
        assert walk(again) == batched(N) * 2
        np.testing.assert_equal(tail(again, state), rest)
    local = cloudpickle.loads(cloudpickle.dumps(doubled(jpegs_many).map(lambda e: times(e, 5))))
    assert walk(local) == [[10 * x for x in own] for own in A]
    check_checkpoints(local)


def test_a_slice_of_a_copy_does_not_change_the_dataset(jpegs_many):
    ds = source(jpegs_many, n=12, shard_options=Shard(1, 2))
    parts = [copy.deepcopy(ds) for _ in range(3)]
    for i, part in enumerate(parts):
        part.set_slice(slice(i, None, 3))
    assert [walk(part) for part in parts] == [[[6, 7]], [[8, 9]], [[10, 11]]]
    assert walk(ds) == [[6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize(
    "policy,size", [({}, None), ({"pad": "mask"}, 4), ({"drop_remainder": 1}, 4)]
)
def test_the_element_spec_matches_the_batches(jpegs_many, policy, size):
    ds = source(jpegs_many, **policy)
    spec = toolbox.get_element_spec(toolbox.LimitIterDataset(ds, 1))
    batch = next(iter(ds))
    assert set(spec) == set(batch)
    for name, array in batch.items():
        assert spec[name].shape == (size, *array.shape[1:]) and spec[name].dtype == array.dtype
