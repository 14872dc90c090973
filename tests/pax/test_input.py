"""DALIInput fulfils praxis's contract of an input, line by line, and its states are portable."""

import contextlib
import copy
import functools
import gc
import json
import logging
import pickle

import fiddle
import jax
import numpy as np
import pytest
from etils import epath
from nvidia.dali import Pipeline, fn, types
from paxml import checkpoints
from praxis import base_hyperparams, base_input, pax_fiddle, py_utils

import dalijax.adapters.pax as adapter
from conformance import Expected, check, frozen
from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.pax import DALIInput, DALIInputSpecsProvider
from dalijax.adapters.tfdata import DALIDataset
from dalijax.core.state import reader_state
from numbered import graph, read_files

N, BATCH = 10, 4


iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader")


def config(files, **fields):
    arguments = {"files": files[:N], "num_threads": 1, **fields.pop("arguments", {})}
    own = {"name": "data", "iterator_fn": iterator_fn, "batch_size": BATCH, **fields}
    return pax_fiddle.Config(DALIInput, arguments=arguments, **own)


def made(files, **fields):
    return base_hyperparams.instantiate(config(files, **fields))


def evaluation(files, **fields):
    return made(files, **{"reset_for_eval": True, "eval_loop_num_batches": -1, **fields})


def test_training_moves_to_a_step(jpegs_many):
    data, other = (made(jpegs_many, is_training=True) for _ in range(2))
    whole = [samples([data.get_next()]) for _ in range(8)]
    for step in (5, 1, 0):
        other.peek_padded()
        other.seek_step(step)
        assert samples([other.get_next()]) == whole[step]
    with pytest.raises(ValueError, match="has only 3 batches"):
        evaluation(jpegs_many).seek_step(4)


def epoch(data):
    batches = []
    while True:
        try:
            batches.append(data.get_next())
        except StopIteration:
            return batches


def samples(batches):
    return [(b.x.ravel().tolist(), b.eval_sample_weights.tolist()) for b in batches]


WHOLE = [
    ([0, 1, 2, 3], [1, 1, 1, 1]),
    ([4, 5, 6, 7], [1, 1, 1, 1]),
    ([8, 9, 9, 9], [1, 1, 0, 0]),
]


@pytest.fixture
def built(monkeypatch):
    """Records the pipelines that were built."""
    seen, build = [], Pipeline.build

    def counted(own):
        seen.extend([] if any(own is one for one in seen) else [own])
        return build(own)

    monkeypatch.setattr(Pipeline, "build", counted)
    DALIInputSpecsProvider._last = None
    return seen


def test_an_evaluation_is_one_epoch_and_again_after_reset(jpegs_many):
    data = evaluation(jpegs_many)
    for _ in range(3):
        assert samples(epoch(data)) == WHOLE
        with pytest.raises(StopIteration):
            data.get_next()
        data.reset()
    data.get_next()
    data.reset()  # in mid-epoch, too
    assert samples(epoch(data)) == WHOLE


def test_a_batch_is_a_nested_map_of_arrays(jpegs_many):
    batch = made(jpegs_many, is_training=True).get_next()
    assert isinstance(batch, py_utils.NestedMap) and set(batch) == {"x", "u", "eval_sample_weights"}
    assert all(type(leaf) is np.ndarray and leaf.shape[0] == BATCH for leaf in batch.values())
    assert batch.eval_sample_weights.dtype == np.float32
    on_device = made(jpegs_many, is_training=True, element="jax").get_next()
    assert isinstance(on_device.x, jax.Array)
    named = made(jpegs_many, weights="w", arguments={"mask": "m"}).get_next()
    assert set(named) == {"x", "u", "w"}
    padded = evaluation(jpegs_many, batch_padding_size=2)
    assert padded.get_next_padded().eval_sample_weights.tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("fields", [{"is_training": True}, {"reset_for_eval": False}], ids=str)
def test_training_never_ends(jpegs_many, fields):
    data = made(jpegs_many, **fields)
    seen = samples(data.get_next() for _ in range(9))
    assert seen == WHOLE * 3
    runs_on = made(jpegs_many, arguments={"padded": False}, **fields)
    flat = [x for xs, _ in samples(runs_on.get_next() for _ in range(10)) for x in xs]
    assert flat == [k % N for k in range(40)]


def test_hosts_read_their_shards(jpegs_many):
    for arguments in ({}, {"padded": False}, {"stick": True}):
        hosts = [
            evaluation(
                jpegs_many,
                infeed_host_index=i,
                num_infeed_hosts=3,
                batch_size=3,
                arguments=arguments,
            )
            for i in range(3)
        ]
        batches = [epoch(host) for host in hosts]
        assert len({len(own) for own in batches}) == 1
        real = [
            x
            for own in batches
            for xs, weights in samples(own)
            for x, weight in zip(xs, weights)
            if weight
        ]
        assert sorted(real) == list(range(N))
    draws = [
        made(jpegs_many, infeed_host_index=i, num_infeed_hosts=2, input_random_seed=s).get_next().u
        for i, s in ((0, None), (1, None), (0, 1), (1, 0))
    ]
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[2], draws[3])  # host 0 of one seed, host 1 of another


def test_pipelines_are_built_on_first_use(jpegs_many, built):
    data = made(jpegs_many, is_training=True)
    state = data.get_state()
    data.reset()
    data.set_state(state)
    assert state and bool(data) and not hasattr(data, "__len__") and not built
    assert pickle.loads(pickle.dumps(data)).get_state() == state and not built
    data.get_next()
    assert len(built) == 1


def test_peeks_states_and_pickles(jpegs_many):
    arguments = {"shuffle": True}
    walk = made(jpegs_many, is_training=True, arguments=arguments)
    whole = [frozen(walk.get_next()) for _ in range(12)]
    data = made(jpegs_many, is_training=True, arguments=arguments)
    for at in range(8):
        if at % 3 == 1:
            assert frozen(data.peek_padded()) == whole[at]
        state = data.get_state()
        assert state and isinstance(state, bytes)
        for other in (
            made(jpegs_many, is_training=True, arguments=arguments),
            pickle.loads(pickle.dumps(data)),
            copy.deepcopy(data),
        ):
            other.set_state(state)
            assert other.get_state() == state
            assert [frozen(other.get_next_padded()) for _ in range(3)] == whole[at : at + 3]
        assert frozen(data.get_next_padded()) == whole[at]


def test_save_and_restore_files(jpegs_many, tmp_path):
    data = evaluation(jpegs_many)
    data.get_next()
    data.save(tmp_path / "input")
    assert json.loads((tmp_path / "input").read_text())["step"] == 1
    other = evaluation(jpegs_many)
    other.restore(tmp_path / "input")
    assert samples(epoch(other)) == WHOLE[1:]
    for begun in (0, 1):  # a refused state has no effect, even before the first batch
        fewer = evaluation(jpegs_many, arguments={"count": 9})
        for _ in range(begun):
            fewer.get_next()
        with pytest.raises(ValueError, match="epoch_size: 10 -> 9"):
            fewer.restore(tmp_path / "input")
        for bad in (b"", b"\xff", b"[" * 100_000, b"3", data.get_state()[:-9]):
            with pytest.raises(ValueError, match="not a state of dalijax"):
                fewer.set_state(bad)
        assert samples(epoch(fewer))[0][0] == [[0, 1, 2, 3], [4, 5, 6, 7]][begun]


def test_configurations_are_fiddles(jpegs_many):
    one = config(jpegs_many, is_training=True)
    assert one.clone() == one and copy.deepcopy(one) == one
    assert fiddle.build(one.clone()).get_next().x.ravel().tolist() == [0, 1, 2, 3]
    assert DALIInput.get_batch_size(one) == BATCH
    assert "iterator_fn" in str(one.to_text() if hasattr(one, "to_text") else one)


def test_specs_build_no_pipeline_twice(jpegs_many, built):
    train = config(jpegs_many, is_training=True)
    provider = base_hyperparams.instantiate(
        pax_fiddle.Config(DALIInputSpecsProvider, input_p=train.clone())
    )
    specs = provider.get_input_specs()
    data = base_hyperparams.instantiate(train)  # like Pax, which then drops the provider
    del provider
    gc.collect()
    expected = {"x": ((4, 1), np.int32), "u": ((4,), np.float32)}
    expected["eval_sample_weights"] = ((4,), np.float32)
    assert {k: (s.shape, s.dtype) for k, s in specs.items()} == expected and len(built) == 1
    assert samples([data.get_next()]) == WHOLE[:1] and len(built) == 1
    # Only once, and only for the same data.
    assert samples([made(jpegs_many, is_training=True).get_next()]) == WHOLE[:1]
    assert len(built) == 2
    for other in (
        {"arguments": {"shuffle": True}},
        {"batch_size": 2},
        {"arguments": {"count": 10}},
    ):
        provider = base_hyperparams.instantiate(
            pax_fiddle.Config(DALIInputSpecsProvider, input_p=train)
        )
        before = len(built)
        made(jpegs_many, is_training=True, **other).get_next()
        assert len(built) == before + 1
    made(jpegs_many, is_training=True).get_next()  # the provider's still
    assert len(built) == before + 1
    # Pipelines that no input has requested are freed with the provider.
    del provider
    base_hyperparams.instantiate(pax_fiddle.Config(DALIInputSpecsProvider, input_p=train))
    gc.collect()
    assert DALIInputSpecsProvider._last() is None


def test_given_specs_and_specs_of_a_device(jpegs_many, built):
    train = config(jpegs_many, is_training=True, batch_size=16)
    a_device = pax_fiddle.Config(DALIInputSpecsProvider, input_p=train, per_device=True)
    specs = base_hyperparams.instantiate(a_device).get_input_specs()
    assert specs.x.shape == (16 // jax.local_device_count(), 1)
    with pytest.raises(ValueError, match="batch_size=4 and .* by its 8 devices"):
        base_hyperparams.instantiate(
            pax_fiddle.Config(DALIInputSpecsProvider, input_p=config(jpegs_many), per_device=True)
        )
    built.clear()
    given = pax_fiddle.Config(DALIInputSpecsProvider, input_p=train, specs=specs)
    assert base_hyperparams.instantiate(given).get_input_specs() == specs and not built
    assert issubclass(DALIInputSpecsProvider, base_input.DatasetInputSpecsProvider)


def test_more_batches_than_the_epoch_are_warned_of(jpegs_many, caplog):
    with caplog.at_level(logging.WARNING, "dalijax"):
        data = evaluation(jpegs_many, eval_loop_num_batches=3)
        epoch(data)
        assert not caplog.records
        evaluation(jpegs_many, eval_loop_num_batches=4).get_next()
    assert "eval_loop_num_batches=4, but an epoch of input 'data' has only 3 batches" in caplog.text


def unresumable():
    return fn.external_source(iter(np.zeros((6, 2, 1), np.int32))), fn.random.uniform()


def test_a_source_without_a_state_is_refused_only_if_states_are_saved():
    own = {"iterator_fn": data_iterator(unresumable, ["x", "u"]), "batch_size": 2}
    for enabled, error in ((True, ValueError), (False, NotImplementedError)):
        data = base_hyperparams.instantiate(
            pax_fiddle.Config(DALIInput, input_checkpointing_enabled=enabled, **own)
        )
        data.get_next()
        with pytest.raises(error, match="state of the pipelines can't be saved"):
            data.get_state()
    assert data.peek_padded() is not None  # as Pax looks at it if it stores no states


def test_evaluations_of_all_batches(jpegs_many):
    for loops in (-1, None, 0):
        assert samples(epoch(evaluation(jpegs_many, eval_loop_num_batches=loops))) == WHOLE
        with pytest.raises(ValueError, match="reset_for_eval=True"):
            made(jpegs_many, eval_loop_num_batches=loops)
    ended = evaluation(jpegs_many, arguments={"auto_reset": True})
    assert len(epoch(ended)) == 3 and not epoch(ended)


def test_a_source_that_alone_knows_its_end():
    def source(info):
        if info.iteration >= 3:
            raise StopIteration
        return np.full((2, 1), info.iteration, np.int32)

    def pipe():
        return fn.external_source(source, batch_info=True)

    own = {"iterator_fn": data_iterator(pipe, ["x"]), "batch_size": 2}
    for fields, expected in (
        ({"is_training": True}, [0, 1, 2] * 3),
        ({"reset_for_eval": True, "eval_loop_num_batches": 5}, [0, 1, 2]),
    ):
        data = base_hyperparams.instantiate(pax_fiddle.Config(DALIInput, **own, **fields))
        got = []
        while len(got) < 9:
            try:
                got.append(int(data.get_next().x[0, 0]))
            except StopIteration:
                break
        assert got == expected


def test_seeds(jpegs_many):
    def seeded(files, seed=7):
        label = fn.readers.file(files=files, name="reader")[1]
        return label, fn.random.uniform(seed=seed)

    own = data_iterator(seeded, ["x", "u"], reader_name="reader")
    theirs = next(own(files=jpegs_many, batch_size=BATCH, num_threads=1))
    mine = made(jpegs_many, iterator_fn=own).get_next()
    np.testing.assert_array_equal(theirs["u"], mine.u)
    by_numpy = made(jpegs_many, is_training=True, input_random_seed=np.int64(3))
    by_numpy.get_next()
    assert reader_state.decode(by_numpy.get_state()).fingerprint["seed"] == 3


def test_a_failed_peek_or_state_has_no_effect(jpegs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")

    def pipe():
        files = [*jpegs[:4], str(broken), *jpegs[5:]]
        image, label = read_files(files)
        return label, fn.decoders.image(image)[0, 0]

    own = {"iterator_fn": data_iterator(pipe, ["x", "p"], reader_name="reader"), "batch_size": 4}
    data = base_hyperparams.instantiate(pax_fiddle.Config(DALIInput, is_training=True, **own))
    assert data.get_next_padded().x.ravel().tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="counts as delivered"):
        data.peek_padded()
    assert data.peek_padded().x.ravel().tolist() == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="not a state of dalijax"):
        data.set_state(b"garbage")
    assert data.get_next_padded().x.ravel().tolist() == [8, 9, 10, 11]


def wide():
    label = fn.readers.file(files=[__file__] * 4, name="reader")[1]
    return fn.cast(label, dtype=types.INT64), fn.random.uniform()


def test_values_that_jax_would_narrow_are_refused():
    own = {"iterator_fn": data_iterator(wide, ["x", "u"], reader_name="reader"), "batch_size": 2}
    for kind in ("numpy", "jax"):
        with pytest.raises(TypeError, match="int64"):
            base_hyperparams.instantiate(
                pax_fiddle.Config(DALIInput, element=kind, **own)
            ).get_next()


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"eval_loop_num_batches": -1}, "reset_for_eval=True"),
        ({"iterator_fn": graph}, "Decorate it with dalijax.data_iterator"),
        ({"element": "torch"}, "'numpy' or 'jax', not 'torch'"),
        ({"arguments": {"batch_size": 3}}, "batch_size"),
        ({"arguments": {"shard_id": 0}}, "infeed_host_index"),
        ({"arguments": {"seed": 1}, "input_random_seed": 2}, "Set only one"),
        ({"arguments": {"last_batch_policy": LastBatchPolicy.PARTIAL}}, "'fill'"),
        ({"arguments": {"devices": jax.devices()[:1]}}, "by Pax's mesh"),
        ({"weights": "x"}, "name of an output"),
        ({"arguments": {"flies": 1}}, r"no argument \['flies'\]"),
        ({"arguments": {"pmap_compatible": True}}, "by Pax's mesh"),
        ({"element": "jax", "arguments": {"as_numpy": True}}, "Omit as_numpy"),
        ({"weights": "items"}, "'items' can't be a name in a NestedMap"),
        ({"batch_size": 0.5}, r"batch_size must be a whole number of samples, .*not 0\.5"),
        (
            {
                "reset_for_eval": True,
                "num_infeed_hosts": 2,
                "arguments": {"on_error": "skip"},
            },
            "which wait for it",
        ),
    ],
    ids=str,
)
def test_what_is_refused(jpegs_many, fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        made(jpegs_many, **fields)


def test_one_shard_of_a_function_without_shard_arguments():
    def plain(files):
        return fn.readers.file(files=files, name="reader")[1], fn.random.uniform()

    own = data_iterator(plain, ["x", "u"], reader_name="reader")
    with pytest.raises(ValueError, match="Add shard_id=0 and num_shards=1"):
        made([], iterator_fn=own, num_infeed_hosts=2)
    made([], iterator_fn=own)


# The conformance check, and a state through every protocol


class View:
    """An input with the names of the other iterators."""

    def __init__(self, data):
        self.data = data

    def __next__(self):
        return dict(self.data.get_next())

    def get_state(self):
        return json.loads(self.data.get_state())

    def set_state(self, state):
        self.data.set_state(json.dumps(state).encode())

    def start_prefetch(self):
        self.data.start_prefetch()

    def close(self):
        self.data.close()


def test_conformance(jpegs_many):
    def view(files):
        return View(evaluation(files))

    batches = [
        {
            "x": np.array(xs, np.int32)[:, None],
            "eval_sample_weights": np.array(weights, np.float32),
        }
        for xs, weights in WHOLE
    ]
    check(functools.partial(view, jpegs_many), Expected([batches]).as_stream(4096), process=True)


def test_every_public_class_is_tested_here():
    assert set(adapter.__all__) == {"DALIInput", "DALIInputSpecsProvider"}


def others(files):
    """Returns each protocol's iterator over the same function and arguments."""
    call = {"files": files[:N], "num_threads": 1, "batch_size": BATCH, "shuffle": True}
    fitted = data_iterator(graph, ["x", "u"], reader_name="reader", mask="eval_sample_weights")
    yield fitted.stream(None, **call)
    yield DALIDatasetIterator(fitted, **call)
    yield iter(DALIDataset(fitted, **call).repeat())


@pytest.mark.parametrize("number", range(3))
def test_states_go_from_and_to_the_other_protocols(jpegs_many, number, tmp_path):
    other = [*others(jpegs_many)][number]
    data = made(jpegs_many, is_training=True, arguments={"shuffle": True})
    whole = [data.get_next() for _ in range(12)]
    expected = list(map(frozen, whole))
    for at in range(7):
        data.set_state(json.dumps(other.get_state()).encode())
        assert [frozen(data.get_next()) for _ in range(4)] == expected[at : at + 4]
        assert same(next(other), whole[at])
    for at in range(7):
        data = made(jpegs_many, is_training=True, arguments={"shuffle": True})
        for _ in range(at):
            data.get_next()
        other.set_state(data.get_state())
        for k in range(4):
            assert same(next(other), whole[at + k])


def same(batch, expected):
    return all(np.array_equal(batch[k], v) for k, v in expected.items())


TRAINING = {"is_training": True, "input_random_seed": 3}


def over_source(host=0, hosts=1, **fields):
    """Returns a host's input over a source of 11 numbers."""
    source = sources.Arrays({"number": np.arange(11, dtype=np.int32)})
    make = data_iterator(lambda number, draw: (number, draw.uniform()), ["x", "u"], source=source)
    place = {"infeed_host_index": host, "num_infeed_hosts": hosts, "batch_size": 4 // hosts}
    own = {"name": "data", "iterator_fn": make, **place, **fields}
    return base_hyperparams.instantiate(pax_fiddle.Config(DALIInput, **own))


def test_a_source():
    """Hosts slice a global batch, and an evaluation has each sample once."""
    whole, hosts = (
        over_source(**TRAINING),
        [over_source(k, 2, **TRAINING) for k in range(2)],
    )
    for _ in range(5):
        batch, parts = whole.get_next(), [host.get_next() for host in hosts]
        for name in ("x", "u"):
            together = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(together, batch[name])
    evaluated = []
    for k in range(2):
        data = over_source(k, 2, reset_for_eval=True, eval_loop_num_batches=-1)
        batches = []
        with contextlib.suppress(StopIteration):
            while True:
                batches.append(data.get_next())
        assert len(batches) == 3
        for one in batches:
            evaluated += one.x[one.eval_sample_weights > 0].tolist()
    assert sorted(evaluated) == list(range(11))


def test_paxmls_files_of_a_source_resume_on_another_number_of_hosts(tmp_path):
    """Two hosts save, one host restores with paxml's handler and saves, and four hosts resume."""
    handler = checkpoints.BaseInputCheckpointHandler()
    saved, next_batches = epath.Path(tmp_path) / "two", []
    saved.mkdir()
    for host in range(2):
        data = over_source(host, 2, **TRAINING)
        for _ in range(4):  # into the second epoch
            data.get_next()
        data.save(saved / f"process_{host}-of-2")
        next_batches.append(data.get_next())
    one = over_source(**TRAINING)
    handler.restore(saved, one)
    handler.save(epath.Path(tmp_path) / "one", one)
    batch = one.get_next()
    hosts = [over_source(host, 4, **TRAINING) for host in range(4)]
    for host, data in enumerate(hosts):
        data.restore(epath.Path(tmp_path) / "one" / f"process_{host}-of-4")
    for parts in (next_batches, [data.get_next() for data in hosts]):
        for name in ("x", "u"):
            together = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(together, batch[name])
    with pytest.raises(FileNotFoundError, match="no iterator was saved there"):
        one.restore(epath.Path(tmp_path) / "none" / "process_0-of-1")


def test_a_readers_file_is_of_its_host(jpegs_many, tmp_path):
    made(jpegs_many, infeed_host_index=0, num_infeed_hosts=2).save(tmp_path / "process_0-of-2")
    with pytest.raises(FileNotFoundError):
        made(jpegs_many).restore(tmp_path / "process_0-of-1")
