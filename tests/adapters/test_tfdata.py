"""A DALIDataset behaves like tf.data, compared with real tf.data.Datasets."""

import copy
import gc
import itertools
import json
import os
import random
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from forks import run_fork
from nvidia.dali import Pipeline, fn, types
from PIL import Image
from python_sources import ends_after, fails_at
from sealing import crafted
from shardings import rows_over

from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.tfdata import DALIDataset, stepped_stream
from dalijax.adapters.tfdata.steps import (
    INFINITE,
    UNKNOWN,
    Enumerate,
    Repeat,
    Skip,
    Take,
    element,
    length,
)
from full import FULL, in_full
from numbered import graph, read_files

N, BATCH = 11, 4


def dataset(files, policy="PARTIAL", **call):
    iterator_fn = data_iterator(
        graph, ["x", "u"], reader_name="reader", last_batch_policy=LastBatchPolicy[policy]
    )
    return DALIDataset(iterator_fn, files=files, **{"batch_size": BATCH, "num_threads": 1, **call})


def oracle(policy="PARTIAL", epochs=1):
    """Returns the same samples as a tf.data.Dataset."""
    ds = tf.data.Dataset.range(N).map(lambda x: {"x": tf.cast(x, tf.int32)[None]})
    if policy == "FILL":
        return ds.repeat().batch(BATCH).take(-(-N * epochs // BATCH) if epochs else -1)
    return ds.batch(BATCH, drop_remainder=policy == "DROP").repeat(epochs)


def listed(element):
    """Returns an element with only its numbers."""
    if isinstance(element, tuple):
        return (int(element[0].numpy()), listed(element[1]))
    return element["x"].numpy().ravel().tolist()


def outcome(call):
    """Returns the result of a call, or the text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


# Compared with tf.data


@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
def test_policies_match_tf_data(jpegs_many, policy):
    ours = dataset(jpegs_many, policy, padded=policy != "FILL")
    for epochs in (1, 2, 5):
        theirs = oracle(policy, epochs)
        assert [listed(e) for e in ours.repeat(epochs)] == [listed(e) for e in theirs]
        assert len(ours.repeat(epochs)) == len(theirs)
    endless = ours.repeat()
    expected = [listed(e) for e in oracle(policy, None).take(30)]
    assert [listed(e) for e in itertools.islice(endless, 30)] == expected
    spec, theirs = ours.element_spec["x"], oracle(policy).element_spec["x"]
    if policy == "FILL":
        theirs = oracle("DROP").element_spec["x"]  # its last batch is complete, too
    assert spec == theirs


CALLS = [
    *[("take", n) for n in (0, 1, 2, 4, 100, -1)],
    *[("skip", n) for n in (0, 1, 2, 5, 100, -1)],
    *[("repeat", n) for n in (0, 1, 2, None, -1)],
    *[("enumerate", n) for n in (0, 7)],
    ("prefetch", 2),
]


def test_chains_match_tf_data(jpegs_many, request):
    seed = 0 if os.environ.get("CI") else random.SystemRandom().randrange(2**31)
    request.node.add_report_section("setup", "seed", str(seed))
    chance = random.Random(seed)
    ours = dataset(jpegs_many)
    for _ in range(60 if FULL else 30):
        chain = [chance.choice(CALLS) for _ in range(chance.randrange(5))]
        mine, theirs = ours, oracle()
        for name, argument in chain:
            mine, theirs = (getattr(ds, name)(argument) for ds in (mine, theirs))
        expected = [listed(e) for e in itertools.islice(theirs, 40)]
        assert [listed(e) for e in itertools.islice(mine, 40)] == expected, chain
        assert outcome(lambda: len(mine)) == outcome(lambda: len(theirs)), chain
        assert int(mine.cardinality()) == int(theirs.cardinality().numpy()), chain
        assert str(list(_names(mine.element_spec))) == str(list(_names(theirs.element_spec)))


def _names(spec):
    if isinstance(spec, tuple):
        yield spec[0]
        yield from _names(spec[1])
    else:
        yield spec["x"].dtype


def test_the_pure_chain_matches_tf_data():
    chance = random.Random(0)
    steps = [
        *map(Take, (0, 1, 3, -1)),
        *map(Skip, (0, 2, -1)),
        *map(Repeat, (0, 2, -1)),
        Enumerate(5),
    ]
    names = {Take: "take", Skip: "skip", Repeat: "repeat", Enumerate: "enumerate"}
    for total in (0, 1, 3, INFINITE, UNKNOWN):
        source = tf.data.Dataset.range(max(total, 0))
        if total == INFINITE:
            source = tf.data.Dataset.counter()
        if total == UNKNOWN:
            source = tf.data.Dataset.range(3).filter(lambda _: True)
        pairs = list(itertools.product(steps, steps))
        if not FULL:
            chance.shuffle(pairs)  # others for each length
            del pairs[len(pairs) // 5 :]
        for chain in (*zip(steps), *pairs):
            ds = source
            for step in chain:
                ds = getattr(ds, names[type(step)])(*vars(step).values())
            assert length(chain, total) == int(ds.cardinality().numpy()), (chain, total)
            known = 3 if total == UNKNOWN else total
            got = [element(chain, known, i) for i in range(8)]
            expected = [_flat(e) for e in itertools.islice(ds, 8)]
            assert [e for e in got if e] == expected, (chain, total)
            assert got == [*expected, *[None] * (8 - len(expected))]


def _flat(element):
    if not isinstance(element, tuple):
        return int(element), ()
    at, numbers = _flat(element[1])
    return at, (int(element[0]), *numbers)


def test_lengths_have_tensorflows_constants(jpegs_many):
    ds = dataset(jpegs_many)
    for mine, theirs in [(ds, oracle()), (ds.repeat(), oracle().repeat())]:
        assert outcome(lambda: len(mine)) == outcome(lambda: len(theirs))
        assert mine.cardinality().numpy() == theirs.cardinality().numpy()
        assert bool(mine) is bool(theirs) is True
    ended = DALIDataset(data_iterator(ends_after(3), ["x"]), batch_size=2, num_threads=1)
    theirs = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=tf.TensorSpec(()))
    assert outcome(lambda: len(ended)) == outcome(lambda: len(theirs))
    assert ended.cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert ds.repeat().cardinality() == tf.data.INFINITE_CARDINALITY


def test_chains_over_a_source_of_unknown_length():
    ds = DALIDataset(data_iterator(ends_after(3), ["x"]), batch_size=2, num_threads=1)
    theirs = tf.data.Dataset.range(6).batch(2).map(lambda x: {"x": x})
    for chain in (
        lambda ds: ds.take(2),
        lambda ds: ds.skip(1),
        lambda ds: ds.take(5).repeat(2),
        lambda ds: ds.enumerate().repeat(2),
        lambda ds: ds.skip(9),
    ):
        assert [listed(e) for e in chain(ds)] == [listed(e) for e in chain(theirs)]


# Iterators


def test_iterators_are_independent_and_equal_without_reshuffling(jpegs_many):
    ds = dataset(jpegs_many, shuffle=True, reshuffle_each_iteration=False).repeat(2)
    first, second = iter(ds), iter(ds)
    for _ in range(2):
        next(first)
    left = [listed(e) for e in first]
    assert [listed(e) for e in second][2:] == left
    assert [listed(e) for e in ds] == [listed(e) for e in ds]
    assert iter(first) is first
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(first)
        with pytest.raises(tf.errors.OutOfRangeError):
            first.get_next()


def test_nothing_is_built_twice(jpegs_many, monkeypatch):
    built, build = set(), Pipeline.build
    monkeypatch.setattr(Pipeline, "build", lambda own: (built.add(own), build(own))[1])
    ds = dataset(jpegs_many)
    assert not built and "DALIDataset of graph" in repr(ds)
    assert len(ds) == 3 and ds.element_spec and ds.take(1).element_spec and len(built) == 1
    assert [listed(e) for e in ds] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] and len(built) == 1
    assert len([*ds]) == 3 and len(built) == 2  # list() asks for its length, too
    iterator = iter(ds)
    assert iterator.element_spec and len(ds) == 3 and len(built) == 3


def test_skip_delivers_the_following_batches(jpegs_many):
    ds = dataset(jpegs_many, batch_size=1, count=30)
    assert listed(next(iter(ds.skip(25)))) == [25]


def test_leaves(jpegs_many):
    batch = next(iter(dataset(jpegs_many)))
    leaf = batch["x"]
    assert isinstance(leaf, np.ndarray) and type(leaf.numpy()) is type(leaf._numpy()) is np.ndarray
    assert np.shares_memory(leaf, leaf.numpy())
    assert memoryview(leaf).shape == leaf.shape == (4, 1) and type(np.asarray(leaf)) is np.ndarray
    assert jax.jit(lambda b: b["x"].sum())(batch) == 6 and jnp.asarray(leaf).dtype == np.int32
    assert tf.convert_to_tensor(leaf).numpy().tolist() == [[0], [1], [2], [3]]
    for number, plain in dataset(jpegs_many).enumerate(2).as_numpy_iterator():
        assert type(plain["x"]) is np.ndarray and number.dtype == np.int64
    assert number == 4


def test_leaves_are_dalis_buffers_and_stay_valid(jpegs):
    def images():
        image, label = read_files(jpegs, random_shuffle=True)
        return fn.resize(fn.decoders.image(image), size=(64, 64)), label

    ds = DALIDataset(
        data_iterator(images, ["image", "x"], reader_name="reader"), batch_size=4, num_threads=2
    )
    kept = list(itertools.islice(ds.repeat(), 60))
    del ds
    gc.collect()
    for batch in kept:
        base = batch["image"]
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.base is not None  # the owner of the memory is not an array
        expected = np.broadcast_to(8 * batch["x"].reshape(-1, 1, 1, 1), batch["image"].shape)
        np.testing.assert_allclose(batch["image"], expected, atol=1)


def test_graph_building_calls_raise_with_the_fix(jpegs_many):
    ds = dataset(jpegs_many)
    theirs = {name for name in dir(tf.data.Dataset) if not name.startswith("_")}
    for name in ("map", "batch", "unbatch", "shuffle", "filter", "interleave", "cache"):
        assert name in theirs
        with pytest.raises(NotImplementedError, match=rf"{name}\(\) builds.*to_tf_dataset"):
            getattr(ds, name)(lambda x: x)
    with pytest.raises(NotImplementedError, match="of a reader, pass random_shuffle=True"):
        ds.repeat().shuffle(10)
    with pytest.raises(AttributeError, match="'DALIDataset' object has no attribute 'maps'"):
        ds.maps()
    makers = {"choose_from_datasets", "counter", "from_generator", "from_tensor_slices"}
    makers |= {"from_tensors", "list_files", "load", "random", "range", "sample_from_datasets"}
    # Every feature of tf.data.Dataset works, or is refused with advice.
    left = {name for name in theirs - makers if not hasattr(ds, name)}
    assert left == {"fingerprint", "options"}
    assert ds.apply(lambda own: own.take(1)).cardinality() == 1
    assert ds.with_options(tf.data.Options()) is ds
    with pytest.raises(
        NotImplementedError, match="must be the first step .* over one of dalijax.sour"
    ):
        ds.shard(2, 0)


@pytest.mark.parametrize("policy", ["FILL", "DROP"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_shards_of_a_source_are_slices_of_global_batches(policy, num_shards):
    source = sources.Arrays({"x": np.arange(N)})
    iterator_fn = data_iterator(
        lambda x, draw: (x, draw.uniform()),
        ["x", "u"],
        source=source,
        last_batch_policy=LastBatchPolicy[policy],
        mask="mask",
    )
    whole = list(DALIDataset(iterator_fn, batch_size=2 * num_shards, seed=1).repeat(2))
    shards = [
        DALIDataset(iterator_fn, batch_size=2, seed=1).shard(num_shards, index).repeat(2)
        for index in range(num_shards)
    ]
    assert {len(one) for one in shards} == {len(whole)}
    for batch, *parts in zip(whole, *shards, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], np.concatenate([p[name] for p in parts]))
    ds = DALIDataset(iterator_fn, batch_size=2)
    with pytest.raises(ValueError, match="index must be the number of one of 2 shards"):
        ds.shard(2, 2)
    for other in (ds.take(1), ds.shard(2, 0)):
        with pytest.raises(NotImplementedError, match="must be the first step"):
            other.shard(2, 0)


def test_unsupported_features_are_refused(jpegs_many):
    mesh = rows_over(1)
    with pytest.raises(ValueError, match="Omit sharding, devices and pmap_compatible"):
        dataset(jpegs_many, sharding=mesh)
    with pytest.raises(ValueError, match="Omit sharding, devices and pmap_compatible"):
        dataset(jpegs_many, pmap_compatible=True)
    ended = iter(dataset(jpegs_many, auto_reset=True))
    assert len(list(ended)) == 3 and not list(ended)  # like tf.data, whatever the setting of resets
    with pytest.raises(TypeError, match="Decorate it with dalijax.data_iterator"):
        DALIDataset(graph, files=jpegs_many)
    with pytest.raises(TypeError, match=r"got Arrays\(.* as a positional .* such as source="):
        DALIDataset(data_iterator(lambda x: x, ["x"]), sources.Arrays({"x": np.arange(4)}), 2)
    with pytest.raises(TypeError, match=r"no argument \['batchsize'\]"):
        dataset(jpegs_many, batchsize=3)
    for policy in ("DROP", "PARTIAL"):
        with pytest.raises(ValueError, match="pad_last_batch=True"):
            next(iter(dataset(jpegs_many, policy, padded=False).repeat(2)))


# Checkpoints


def saved(ds, count):
    iterator = iter(ds)
    for _ in range(count):
        next(iterator)
    return iterator


CHAINS = {
    "plain": lambda ds: ds,
    "endless": lambda ds: ds.repeat(),
    "taken": lambda ds: ds.repeat().skip(1).take(9),
    "rounds": lambda ds: ds.take(2).enumerate().repeat(3),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("count", (0, 1, 2, 3))
def test_tf_train_checkpoint(jpegs_many, tmp_path, chain, count):
    ds = CHAINS[chain](dataset(jpegs_many, shuffle=True))
    iterator = saved(ds, count)
    step = tf.Variable(count)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step, data=iterator), str(tmp_path), max_to_keep=3
    )
    manager.save()
    expected = [listed(e) for e in itertools.islice(iterator, 8)]
    other, again = iter(ds), tf.Variable(-1)
    checkpoint = tf.train.Checkpoint(step=again, data=other)
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    assert int(again) == count
    assert [listed(e) for e in itertools.islice(other, 8)] == expected
    checkpoint.restore(manager.latest_checkpoint)  # in place, too
    assert [listed(e) for e in itertools.islice(other, 8)] == expected


def test_asynchronous_checkpoints_have_the_position_of_the_call(jpegs_many, tmp_path):
    options = tf.train.CheckpointOptions(enable_async=True)
    ds = dataset(jpegs_many, shuffle=True, reshuffle_each_iteration=False).repeat()
    iterator = iter(ds)
    checkpoint = tf.train.Checkpoint(step=tf.Variable(0), data=iterator)
    expected, paths = [listed(e) for e in itertools.islice(ds, 40)], []
    for step in range(1, 9):
        next(iterator)
        paths.append(checkpoint.save(str(tmp_path / "ckpt"), options=options))
        next(iterator)  # possibly while it is written
    checkpoint.sync()
    for number, path in enumerate(paths):
        other = iter(ds)
        tf.train.Checkpoint(step=tf.Variable(0), data=other).restore(path)
        at = 2 * number + 1
        assert [listed(e) for e in itertools.islice(other, 4)] == expected[at : at + 4]
    # In place, by the checkpoint that saved it.
    checkpoint.restore(paths[1], options=options)
    assert [listed(e) for e in itertools.islice(iterator, 4)] == expected[3:7]


def test_a_refused_checkpoint_changes_nothing(jpegs_many, tmp_path):
    path = tf.train.Checkpoint(data=saved(dataset(jpegs_many, count=9), 1)).save(
        str(tmp_path / "a")
    )
    for chain in (lambda ds: ds, lambda ds: ds.take(2)):
        iterator = saved(chain(dataset(jpegs_many)), 1)
        before = iterator.get_state()
        with pytest.raises(ValueError, match=r"epoch_size: 9 -> 11|kind: 'reader' -> 'chain'"):
            tf.train.Checkpoint(data=iterator).restore(path)
        assert iterator.get_state() == before and listed(next(iterator)) == [4, 5, 6, 7]
    taken = iter(dataset(jpegs_many).take(2))
    with pytest.raises(ValueError, match=r"steps: .*Take\(count=2\).* -> .*Take\(count=1\)"):
        iter(dataset(jpegs_many).take(1)).set_state(taken.get_state())
    for damage in ({"element": 1}, {"at": 1}, {"stream": {}}, {"first_epoch": 1}, {"end": 1}):
        with pytest.raises(ValueError, match="damaged|not a state"):
            taken.set_state(crafted(stepped_stream.FORM, taken.get_state(), **damage))
    assert [listed(e) for e in taken] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_refused_seek_over_a_source_without_a_state_loses_nothing():
    iterator_fn = data_iterator(ends_after(4), ["x"])
    iterator = iter(DALIDataset(iterator_fn, batch_size=2, num_threads=1).enumerate())
    assert listed(next(iterator)) == (0, [0, 1])
    with pytest.raises(ValueError, match="the stream has only 4 batches"):
        iterator.seek_step(9)  # runs to the end of the source, which can't go back
    assert [listed(e) for e in iterator] == [(1, [2, 3]), (2, [4, 5]), (3, [6, 7])]


# A real tf.data.Dataset

_WAYS = ["generator", "plugin"]


@pytest.fixture(params=_WAYS)
def way(request, monkeypatch):
    if request.param == "plugin":
        pytest.importorskip("nvidia.dali.plugin.tf", reason="make test builds DALI's TF plugin")
    else:
        monkeypatch.setitem(sys.modules, "nvidia.dali.plugin.tf", None)
        monkeypatch.delattr("nvidia.dali.plugin.tf", raising=False)
    return request.param


@pytest.mark.parametrize(
    "policy,mask",
    [
        *(("FILL", None), ("FILL", "mask"), ("DROP", None), ("PARTIAL", "mask")),
        *(in_full("DROP", "mask"), in_full("PARTIAL", None)),
    ],
)
def test_to_tf_dataset(jpegs_many, way, policy, mask):
    same = {"mask": mask, "reshuffle_each_iteration": False}
    for number, ours in enumerate(
        (
            dataset(jpegs_many, policy, shuffle=True, **same),
            dataset(jpegs_many, policy, **same).repeat(3),
            dataset(jpegs_many, policy, **same).repeat().skip(2).enumerate(),
            dataset(jpegs_many, policy, stick=True, shard_id=1, num_shards=2, **same).repeat(2),
        )
    ):
        theirs = ours.to_tf_dataset()
        assert isinstance(theirs, tf.data.Dataset)
        expected = [jax.tree.map(np.asarray, e) for e in itertools.islice(ours, 12)]
        for _ in range(2 if FULL or number == 0 else 1):
            got = list(itertools.islice(theirs.prefetch(2), 12))
            assert len(got) == len(expected) > 0
            jax.tree.map(
                lambda a, b: np.testing.assert_array_equal(a, b.numpy(), strict=True), expected, got
            )
        assert theirs.element_spec == ours.element_spec


def test_to_tf_dataset_aliases_nothing(jpegs, way):
    def images(exec_dynamic=True):
        image, label = read_files(jpegs, pad_last_batch=True)
        return fn.resize(fn.decoders.image(image), size=(128, 128)), label

    made = data_iterator(images, ["image", "x"], reader_name="reader")
    for dynamic in (True, False):
        ds = DALIDataset(made, batch_size=4, num_threads=2, exec_dynamic=dynamic).repeat(15)
        kept = list(ds.to_tf_dataset().prefetch(2))
        gc.collect()
        assert len(kept) == 45
        for batch in kept:
            want = np.broadcast_to(8 * batch["x"].numpy().reshape(-1, 1, 1, 1), (4, 128, 128, 3))
            np.testing.assert_allclose(batch["image"].numpy(), want, atol=1)


def test_to_tf_dataset_through_the_plugin_is_checkpointed(jpegs_many, tmp_path):
    pytest.importorskip("nvidia.dali.plugin.tf", reason="make test builds DALI's TF plugin")
    ds = dataset(jpegs_many, shuffle=True).repeat().enumerate().to_tf_dataset()
    iterator = iter(ds)
    for _ in range(5):
        next(iterator)
    path = tf.train.Checkpoint(data=iterator).save(str(tmp_path / "tf"))
    expected = [listed(next(iterator)) for _ in range(6)]
    other = iter(ds)
    tf.train.Checkpoint(data=other).restore(path)
    assert [listed(next(other)) for _ in range(6)] == expected


TEXTS = {
    "text": ["té", "", "b", "cc"],
    "not UTF-8": ["a\udcff", "b", "\udcfe/é", "c"],
    "bytes": [b"\xff", b"", b"b", b"c"],
    "NumPy": [np.str_("té"), np.str_("b"), np.str_("c"), np.str_("long")],
}


@pytest.mark.parametrize("kind", TEXTS)
def test_to_tf_dataset_of_text(kind):
    rows = [{"x": k, "t": text} for k, text in enumerate(TEXTS[kind])]
    source = sources.Records(rows, kinds={"t": sources.Field(None)})
    ds = DALIDataset(data_iterator(lambda x: x, ["x"]), source=source, batch_size=2, shuffle=False)
    for dataset in (ds.to_tf_dataset(), ds.enumerate().to_tf_dataset().map(lambda _, b: b)):
        assert dataset.element_spec["t"].dtype == tf.string
        found = [text for batch in dataset for text in batch["t"].numpy()]
        assert found == [t if isinstance(t, bytes) else os.fsencode(t) for t in TEXTS[kind]]


@pytest.mark.parametrize("value", ({"a": 1}, None, [1]))
def test_to_tf_dataset_names_a_field_that_is_not_text(value):
    rows = [{"x": 0, "t": "a"}, {"x": 1, "t": value}]
    source = sources.Records(rows, kinds={"t": sources.Field(None)})
    ds = DALIDataset(data_iterator(lambda x: x, ["x"]), source=source, batch_size=2, shuffle=False)
    with pytest.raises(tf.errors.OpError, match="only supports text, but 't' has .*omit the field"):
        next(iter(ds.to_tf_dataset()))


def test_to_tf_dataset_of_python_sources_uses_a_generator():
    ds = DALIDataset(data_iterator(ends_after(3), ["x"]), batch_size=2, num_threads=1)
    assert [listed(e) for e in ds.to_tf_dataset()] == [[0, 1], [2, 3], [4, 5]]


# Loops of known code bases, rewritten


def test_flaxs_prepare_tf_data(jpegs_many):
    """Flax's examples: leaf._numpy(), reshaped for pmap, before prefetch_to_device."""
    devices = jax.local_device_count()
    ds = dataset(jpegs_many, "DROP", batch_size=devices, count=32).repeat()

    def prepare(xs):
        return jax.tree.map(lambda x: x._numpy().reshape((devices, -1, *x.shape[1:])), xs)

    batches = [b for _, b in zip(range(3), map(prepare, ds))]
    assert [b["x"].shape for b in batches] == [(devices, 1, 1)] * 3
    assert batches[1]["x"].ravel().tolist() == list(range(devices, 2 * devices))


def test_vision_transformers_prefetch(jpegs_many):
    """vision_transformer: iter(ds), leaf._numpy(), device_put_sharded, a deque."""
    ds = dataset(jpegs_many).repeat()
    it = (jax.tree.map(lambda t: np.asarray(memoryview(t)), b) for b in iter(ds))
    batches = [jax.device_put(b) for b in itertools.islice(it, 2)]
    assert np.asarray(batches[1]["x"]).ravel().tolist() == [4, 5, 6, 7]


def test_big_visions_specs_and_arrays(jpegs_many):
    """big_vision: element_spec for dummy inputs, tf_to_numpy over a tree."""
    ds = dataset(jpegs_many, "DROP").repeat()
    dummy = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype.as_numpy_dtype), ds.element_spec)
    assert jax.tree.map(jnp.shape, dummy) == {"x": (4, 1), "u": (4,)}
    arrays = jax.tree.map(lambda x: np.asarray(memoryview(x)), next(iter(ds)))
    assert arrays["x"].ravel().tolist() == [0, 1, 2, 3]


def test_t5xs_train_and_evaluation(jpegs_many):
    """T5X: an endless train iterator with next(), and a finite evaluation, repeatedly."""
    train = dataset(jpegs_many, "FILL", padded=False).repeat().prefetch(tf.data.AUTOTUNE)
    iterator = iter(train)
    seen = [listed(next(iterator)) for _ in range(5)]
    assert list(itertools.chain(*seen)) == [k % N for k in range(20)]
    evaluation = dataset(jpegs_many, "FILL", mask="mask").take(2)
    for _ in range(2):
        total = 0
        for batch in evaluation.as_numpy_iterator():
            total += int(batch["mask"].sum())
        assert total == 8
    whole = dataset(jpegs_many, "FILL", mask="mask")
    assert sum(int(b["mask"].sum()) for b in whole) == N and len(whole) == 3


def test_without_tensorflow(jpegs_many):
    program = f"""
import sys
sys.modules["tensorflow"] = None
import jax
jax.config.update("jax_platforms", "cpu")
from nvidia.dali import fn
from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.tfdata import DALIDataset

def graph():
    return fn.readers.file(files={jpegs_many[:8]!r}, labels=list(range(8)), name="reader")[1]

ds = DALIDataset(data_iterator(graph, ["x"], reader_name="reader"), batch_size=4, num_threads=1)
assert isinstance(ds.element_spec["x"], jax.ShapeDtypeStruct) and len(ds) == 2
iterator = iter(ds.repeat(2).enumerate())
assert [int(n) for n, _ in iterator] == [0, 1, 2, 3]
state = iter(ds).get_state()
iter(ds).set_state(state)
try:
    iterator.get_next()
except StopIteration:
    print("ended")
try:
    ds.to_tf_dataset()
except ImportError:
    print("needs TensorFlow")
"""
    assert run_fork(program).stdout == "ended\nneeds TensorFlow\n"


# Reports of an adversarial review


def test_a_call_that_fails_within_a_skip_loses_nothing():
    for fails in ({1}, {0}, {2}, {5}, {9}, {10}):
        made = data_iterator(fails_at(list(fails)), ["x", "u"], size=80)
        call = {"batch_size": 2, "num_threads": 1, "prefetch_queue_depth": 1}
        whole = data_iterator(fails_at([]), ["x", "u"], size=80)(**call)
        expected = [b["u"].tolist() for b in whole]
        iterator = iter(DALIDataset(made, **call).skip(10).take(20))
        got = []
        while len(got) < 20:
            state = iterator.get_state()
            try:
                got.append(next(iterator))
            except OSError:
                other = iter(DALIDataset(made, **call).skip(10).take(20))
                other.set_state(iterator.get_state())
                iterator = other
            assert json.dumps(state)
        assert [listed(b)[0] for b in got] == list(range(10, 30)), fails
        assert [b["u"].tolist() for b in got] == expected[10:30]


@pytest.fixture
def images_one_broken(jpegs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    return [*jpegs[:3], str(broken), *jpegs[4:6]]


def walked(iterator, count):
    got = []
    while len(got) < count:
        try:
            got.append(listed(next(iterator)))
        except StopIteration:
            return got
        except RuntimeError:
            got.append("failed")
    return got


def test_failed_batches_in_chains(images_one_broken):
    def decoded():
        image, label = read_files(images_one_broken, pad_last_batch=True)
        return label, fn.decoders.image(image)[0, 0, 0]

    def made(on_error):
        own = data_iterator(decoded, ["x", "p"], reader_name="reader", on_error=on_error)
        return DALIDataset(own, batch_size=1, num_threads=1)

    bad = "failed"
    raising, skipping = made("raise"), made("skip")
    assert walked(iter(raising.skip(1).repeat()), 8) == [[1], [2], bad, [4], [5], [1], [2], bad]
    assert walked(iter(raising.enumerate()), 8)[2:5] == [(2, [2]), bad, (4, [4])]
    assert walked(iter(skipping.skip(1).repeat()), 6) == [[1], [2], [4], [5], [1], [2]]
    assert walked(iter(skipping.skip(4)), 8) == [[5]]
    for ds, round_ in (
        (raising, [[0], [1], [2], bad, [4], [5]]),
        (skipping, [[0], [1], [2], [4], [5]]),
    ):
        assert walked(iter(ds.take(-1).repeat(2)), 20) == round_ * 2
    assert [listed(b) for b in skipping.to_tf_dataset()] == [[0], [1], [2], [4], [5]]


def test_states_do_not_contain_the_length_of_the_data(jpegs_many):
    ds = dataset(jpegs_many)
    short = iter(ds.repeat(2).enumerate())
    next(short)
    longer = iter(ds.repeat(3).enumerate())
    longer.set_state(short.get_state())
    assert len(list(longer)) == 8


def test_endless_over_a_source_of_unknown_length():
    ds = DALIDataset(data_iterator(ends_after(3), ["x"]), batch_size=2, num_threads=1)
    got = [listed(e) for e in itertools.islice(ds.repeat(), 7)]
    assert got == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1]]
    assert ds.element_spec["x"].shape == (None, 1)


def test_many_epochs_are_counted_at_once(jpegs_many):
    for policy in ("FILL", "DROP", "PARTIAL"):
        ds = dataset(jpegs_many, policy)
        one = len(ds)
        assert len(ds.repeat(10**9)) == one * 10**9
        assert len(list(ds.repeat(10**9).take(3))) == 3


def test_counts_are_converted_like_tf_data(jpegs_many):
    ds = dataset(jpegs_many)
    assert len(ds.take(np.int64(2))) == 2
    for call in (ds.take, ds.skip, ds.repeat, ds.enumerate):
        for wrong in (3.7, "3"):
            with pytest.raises(TypeError, match="whole number"):
                call(wrong)


def test_scalars_of_leaves_are_leaves(jpegs_many):
    batch = next(iter(dataset(jpegs_many)))
    assert [u.numpy() for u in batch["u"]] == batch["u"].tolist()
    assert isinstance(batch["u"][0].numpy(), np.float32) and int(batch["x"][1, 0]) == 1
    assert isinstance(batch["u"][1:].numpy(), np.ndarray) and hash(batch["u"][0].numpy())
    ((number, _),) = dataset(jpegs_many).enumerate().take(1).as_numpy_iterator()
    assert type(number) is np.int64 and {number: 1}
    assert batch["u"].sum().numpy() == np.float32(sum(batch["u"].numpy()))


def test_datasets_are_copied_and_pickled(jpegs_many):
    ds = DALIDataset(numbers, files=jpegs_many, batch_size=BATCH, num_threads=1).repeat(2).take(4)
    assert len(ds) == 4 and ds.element_spec
    for other in (copy.deepcopy(ds), cloudpickle.loads(cloudpickle.dumps(ds))):
        assert [listed(e) for e in other] == [listed(e) for e in ds]


numbers = data_iterator(
    graph, ["x", "u"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL
)


def doubled(array):
    return array * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda label: fn.python_function(label, function=doubled),
        lambda label: fn.cast(label, dtype=types.FLOAT64),
    ],
)
def test_to_tf_dataset_of_features_that_the_plugin_lacks(jpegs_many, way, make):
    def pipe():
        return make(fn.readers.file(files=jpegs_many[:8], name="reader")[1])

    ds = DALIDataset(data_iterator(pipe, ["x"], reader_name="reader"), batch_size=4, num_threads=1)
    theirs = ds.to_tf_dataset()
    assert [listed(e) for e in theirs] == [listed(e) for e in ds] and len(theirs) == len(ds) == 2


def test_to_tf_dataset_of_shapes_that_differ_between_batches(tmp_path, way):
    files = []
    for number in range(8):
        files.append(str(tmp_path / f"{number}.jpg"))
        Image.fromarray(np.zeros((8 + 4 * number, 12, 3), np.uint8)).save(files[-1])

    def pipe():
        image, label = read_files(files)
        return fn.pad(fn.decoders.image(image)), label

    ds = DALIDataset(
        data_iterator(pipe, ["image", "x"], reader_name="reader"), batch_size=4, num_threads=1
    )
    spec = ds.element_spec | {"image": tf.TensorSpec((4, None, None, 3), tf.uint8)}
    shapes = [tuple(e["image"].shape) for e in ds.to_tf_dataset(spec)]
    assert shapes == [(4, 20, 12, 3), (4, 36, 12, 3)]


def test_ctrl_c_within_a_skip_loses_nothing(jpegs_many, monkeypatch):
    ds = dataset(jpegs_many).repeat(6).skip(9)
    expected = [listed(e) for e in ds]
    iterator = iter(ds)
    stream = iterator._stream._stream
    skip, calls = type(stream)._skip_in_epoch, []

    def interrupted(own, batches):
        calls.append(batches)
        moved = skip(own, batches)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(type(stream), "_skip_in_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [listed(e) for e in iterator] == expected


def over_a_source(batch_size, *steps):
    """Returns a dataset of 0 to 23 from a source, after some steps."""
    source = sources.Arrays({"number": np.arange(24, dtype=np.int32)[:, None]})
    iterator_fn = data_iterator(lambda number: number + 0, ["x"], source=source, shuffle=False)
    made = DALIDataset(iterator_fn, batch_size=batch_size, num_threads=1, device_id=None)
    for step in steps:
        made = step(made)
    return iter(made)


@pytest.mark.parametrize("taken", (0, 1, 3, 5))
@pytest.mark.parametrize("batch_size", (1, 3, 6, 8))
@pytest.mark.parametrize("epochs", (1, 2, None))
def test_a_source_resumes_with_another_batch_size(batch_size, taken, epochs):
    repeat = [] if epochs == 1 else [lambda ds: ds.repeat(epochs)]
    saved = over_a_source(4, *repeat)
    for _ in range(taken):
        next(saved)
    other = over_a_source(batch_size, *repeat)
    other.set_state(json.loads(json.dumps(saved.get_state())))
    rest = [listed(element) for element in itertools.islice(other, 30)]
    # An epoch's last batch continues into the next epoch, which then lacks these samples.
    want = [k % 24 for k in range(4 * taken, 24 * 30)]
    assert np.concatenate(rest).tolist() == want[: sum(map(len, rest))]
    assert all(len(batch) == batch_size for batch in rest)
    if epochs == 1:
        assert len(rest) == -(-(24 - 4 * taken) // batch_size)
    elif epochs is None:
        assert len(rest) == 30


@pytest.mark.parametrize("step", ("enumerate", "take", "skip"))
def test_operations_that_count_batches_need_the_same_batch_size(step):
    steps = {
        "enumerate": lambda ds: ds.enumerate(),
        "take": lambda ds: ds.take(5),
        "skip": lambda ds: ds.skip(1),
    }
    saved = over_a_source(4, steps[step])
    for _ in range(3):
        next(saved)
    state = saved.get_state()
    other, fresh = over_a_source(8, steps[step]), over_a_source(8, steps[step])
    with pytest.raises(ValueError, match="of another batch size.*with its original batch size"):
        other.set_state(state)
    assert [listed(one) for one in other] == [listed(one) for one in fresh]
    same = over_a_source(4, steps[step])
    same.set_state(state)
    assert [listed(one) for one in same] == [listed(one) for one in saved]
