"""Passes over a DALIDataset differ like tf.data's reshuffled passes."""

import copy
import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
from numbers_source import Numbers
from nvidia.dali import fn

from dalijax import LastBatchPolicy, data_iterator
from dalijax.adapters.tfdata import DALIDataset
from full import in_full
from numbered import graph, read_files

N, BATCH = 11, 4


def over_source(policy="PARTIAL", mask=None, **call):
    made = data_iterator(
        lambda number, *, draw: (number + 0, draw.uniform()),
        ["x", "u"],
        source=Numbers(N),
        last_batch_policy=LastBatchPolicy[policy],
        mask=mask,
    )
    return DALIDataset(made, batch_size=BATCH, num_threads=1, device_id=None, **call)


def over_reader(files, policy="PARTIAL", mask=None, shuffle=True, **call):
    made = data_iterator(
        graph,
        ["x", "u"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy[policy],
        mask=mask,
    )
    call = {"batch_size": BATCH, "num_threads": 1, "shuffle": shuffle, **call}
    return DALIDataset(made, files=files, **call)


@pytest.fixture(params=["source", "reader"])
def make(request, jpegs_many):
    if request.param == "source":
        return over_source
    return lambda *args, **call: over_reader(jpegs_many[:N], *args, **call)


def listed(element):
    if isinstance(element, tuple):
        return (int(element[0]), listed(element[1]))
    return np.asarray(element["x"]).ravel().tolist(), np.asarray(element["u"]).tolist()


def walk(ds, count=None):
    return [listed(element) for element in itertools.islice(ds, count)]


def oracle(reshuffle=True):
    """Returns tf.data's records of each batch, reshuffled in each epoch."""
    ds = tf.data.Dataset.range(N).shuffle(N, seed=1, reshuffle_each_iteration=reshuffle)
    return ds.map(lambda x: {"x": x, "u": tf.cast(x, tf.float32)}).batch(BATCH)


def samples(elements):
    return sorted(itertools.chain.from_iterable(x for x, _ in elements))


def equalities(ds):
    """Returns which walks over a dataset and over datasets derived from it are equal."""
    first = walk(ds)
    walks = {
        "first": first,
        "second": walk(ds),
        "third": walk(ds.prefetch(2)),
        "taken": walk(ds.take(2)),
        "taken again": walk(ds.take(2)),
    }
    both = walk(ds.repeat(2))
    walks |= {"epoch 1": both[: len(first)], "epoch 2": both[len(first) :], "after": walk(ds)}
    one, other = iter(ds), iter(ds)
    together = [(listed(next(one)), listed(next(other))) for _ in range(2)]
    walks |= {"one": [x for x, _ in together], "other": [x for _, x in together]}
    pairs = itertools.combinations(walks, 2)
    return {(a, b) for a, b in pairs if all(x == y for x, y in zip(walks[a], walks[b]))}


def test_passes_are_equal_if_those_of_tf_data_are(make):
    for reshuffle in (True, False):
        wanted = equalities(oracle(reshuffle))
        assert equalities(make(reshuffle_each_iteration=reshuffle)) == wanted
    for ds in (make(), oracle()):
        assert all(samples(walk(ds)) == list(range(N)) for _ in range(3))


def test_passes_over_a_source_are_its_epochs():
    for policy, mask in itertools.product(("FILL", "DROP", "PARTIAL"), (None, "mask")):
        make = data_iterator(
            lambda number, *, draw: (number + 0, draw.uniform()),
            ["x", "u"],
            last_batch_policy=LastBatchPolicy[policy],
            mask=mask,
            as_numpy=True,
        )(source=Numbers(N), batch_size=BATCH, num_threads=1, device_id=None)
        ds = over_source(policy, mask)
        if policy == "FILL" and mask is None:  # each pass begins with a sample of its own epoch
            lengths = {len(walk(ds)) for _ in range(5)}
            assert lengths == {len(ds)} == {3}
            continue
        epochs = [walk(make) for _ in range(6)]
        assert [walk(ds) for _ in range(2)] == epochs[:2]
        assert walk(ds.repeat(2)) == epochs[2] + epochs[3]
        assert walk(ds.repeat(), 4) == (epochs[4] + epochs[5])[:4]
        assert len(ds) == len(epochs[0])


def test_an_endless_iterator_starts_its_epochs_lazily():
    ds, whole = over_source(), over_source().repeat()
    epochs = np.reshape(np.array(walk(whole, 15), object), (5, 3, 2)).tolist()
    iterator = iter(ds.repeat())
    got = [listed(next(iterator)) for _ in range(4)]
    assert got == [tuple(x) for x in epochs[0]] + [tuple(epochs[1][0])]
    assert walk(ds) == [tuple(x) for x in epochs[2]]


@pytest.mark.parametrize(
    "taken,seed",
    [
        (taken, seed) if taken % 2 == k else in_full(taken, seed)
        for taken in range(4)
        for k, seed in enumerate((None, 5))
    ],
)
@pytest.mark.parametrize(
    "chain",
    [lambda ds: ds, lambda ds: ds.repeat(2), lambda ds: ds.repeat().skip(1).take(9).enumerate()],
    ids=["plain", "epochs", "chain"],
)
def test_the_state_of_a_later_pass_resumes_it(make, chain, taken, seed):
    ds = chain(make(seed=seed))
    walk(ds), walk(ds)
    iterator = iter(ds)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest, following = walk(iterator), walk(ds)
    again = copy.deepcopy(ds)  # like a new process: no pass has begun
    for other in (iter(again), iter(ds)):
        other.set_state(state)
        assert json.dumps(other.get_state()) == json.dumps(state)
        assert walk(other) == rest
        with pytest.raises(StopIteration):
            next(other)
    if rest:
        assert walk(again) == following  # the next pass follows the restored pass, as in tf.data


def test_a_step_is_counted_within_a_pass(make):
    for chain in (lambda ds: ds.repeat(2), lambda ds: ds.repeat(3).skip(1).enumerate()):
        ds = chain(make())
        other = copy.deepcopy(ds)
        walk(ds), walk(other)
        whole, iterator = walk(ds), iter(other)
        for step in (4, 1, 0, 5):
            iterator.seek_step(step)
            assert walk(iterator) == whole[step:]


def test_tf_train_checkpoint_of_a_later_pass(make, tmp_path):
    ds = make().repeat(2)
    walk(ds)
    iterator = iter(ds)
    next(iterator)
    path = tf.train.Checkpoint(data=iterator).save(str(tmp_path / "a"))
    rest = walk(iterator)
    other = iter(copy.deepcopy(ds))
    tf.train.Checkpoint(data=other).restore(path)
    assert walk(other) == rest


def test_an_explicit_seed_is_still_compared(jpegs_many):
    ds, other = (over_reader(jpegs_many[:N], seed=seed) for seed in (5, 6))
    walk(ds)
    iterator = iter(ds)
    next(iterator)
    target = iter(other)
    next(target)
    before = target.get_state()
    with pytest.raises(ValueError, match=r"seed: \d+ -> 6"):
        target.set_state(iterator.get_state())
    assert target.get_state() == before and len(walk(target)) == 2


def test_to_tf_dataset_and_keras_epochs(make):
    theirs, ours = make().to_tf_dataset(), make()
    assert [walk(theirs.as_numpy_iterator()) for _ in range(3)] == [walk(ours) for _ in range(3)]
    same = make(reshuffle_each_iteration=False).to_tf_dataset()
    assert walk(same.as_numpy_iterator()) == walk(same.as_numpy_iterator())


def test_shards_of_a_source_reshuffle_equally():
    shards = [over_source("FILL", "mask").shard(2, index) for index in range(2)]
    for number in range(3):
        passes = [walk(ds) for ds in shards]
        rows = sorted(x for part in passes for xs, _ in part for x in xs)
        assert set(rows) == set(range(N)), number
        assert passes[0] != passes[1]


def test_dalis_random_operators_over_a_source_run_through_passes():
    made = data_iterator(lambda number: (number + 0, fn.random.uniform()), ["x", "u"])
    ds = DALIDataset(made, source=Numbers(N), batch_size=BATCH, num_threads=1, device_id=None)
    passes = [walk(ds) for _ in range(3)]
    assert len({str([x for x, _ in one]) for one in passes}) == 3


def test_graphs_with_their_own_seed_and_without_a_seed(jpegs_many):
    def graph(seed=7):
        label = read_files(jpegs_many[:N], random_shuffle=True, seed=seed)[1]
        return label, fn.random.uniform(seed=seed)

    made = data_iterator(graph, ["x", "u"], reader_name="reader")
    ds = DALIDataset(made, batch_size=BATCH, num_threads=1)
    assert len({str(walk(ds)) for _ in range(3)}) == 3
    plain = over_reader(jpegs_many[:N], shuffle=False)
    xs = [[x for x, _ in walk(plain)] for _ in range(2)]
    assert xs[0] == xs[1]  # a reader that does not shuffle keeps its order


def test_the_argument_is_a_flag():
    with pytest.raises((TypeError, ValueError), match="reshuffle_each_iteration"):
        over_source(reshuffle_each_iteration=3)
