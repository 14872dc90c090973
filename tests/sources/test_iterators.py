"""Iterators over a source: the conformance check in every adapter, and resuming elsewhere."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import threading
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conformance import Expected, check, frozen
from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters import clu, t5x, tfdata
from dalijax.adapters.grain import DALIIterDataset
from dalijax.errors import StateError
from oracle import Case
from tars import write_tar

N, BATCH = 11, 4
PADDED = Case(N, 1, BATCH, "FILL", True, False)
RUNS_ON = Case(N, 1, BATCH, "FILL", False, False)


def graph(number, draw):
    return number + 0, draw.uniform()


def numbers(count=N):
    return sources.Arrays({"number": np.arange(count, dtype=np.int32)[:, None]})


def mesh_of(shape, axes, spec, order):
    devices = np.array([jax.devices()[k] for k in order]).reshape(shape)
    return NamedSharding(Mesh(devices, axes), PartitionSpec(*spec))


def over(case, mesh=None, **config):
    """Returns an iterator over a source that is read in order."""
    if mesh is not None:
        config["sharding"] = mesh_of(*mesh)
    if "devices" in config:
        config["devices"] = [jax.devices()[k] for k in config["devices"]]
    policy = LastBatchPolicy[case.policy]
    config |= {"mask": "mask", "last_batch_policy": policy, "last_batch_padded": case.padded}
    make = data_iterator(graph, ["x", "u"], source=numbers(), shuffle=False, **config)
    return make(batch_size=BATCH, num_threads=1)


def over_case(case, pipelines=1, shape=None, **options):
    epochs = []
    for number, streams in case.epochs(3):
        epochs.append([])
        for samples in streams[0]:
            x = np.array([[s[0]] for s in samples], np.int32)
            mask = np.array(case.mask(samples, number))
            if shape:
                x, mask = x.reshape(*shape, 1), mask.reshape(shape)
            epochs[-1].append({"x": x, "mask": mask})
    return Expected(epochs, pipelines=pipelines, state_bytes=2048, **options)


def over_grain(**options):
    make = data_iterator(graph, ["x", "u"], source=numbers(), shuffle=False)
    return iter(DALIIterDataset(make, num_epochs=3, batch_size=BATCH, num_threads=1, **options))


def over_clu(**options):
    make = data_iterator(graph, ["x", "u"], mask="mask", last_batch_padded=True)
    call = {"source": numbers(), "shuffle": False, "batch_size": BATCH, "num_threads": 1}
    return clu.DALIDatasetIterator(make, num_epochs=3, **call, **options)


def over_tfdata():
    make = data_iterator(graph, ["x", "u"], source=numbers(), shuffle=False, mask="mask")
    return iter(tfdata.DALIDataset(make, last_batch_padded=True, batch_size=BATCH).repeat(3))


def unmasked(expected):
    epochs = [[{"x": batch["x"]} for batch in epoch] for epoch in expected.epochs]
    return dataclasses.replace(expected, epochs=epochs)


PARTIAL, DROP = (dataclasses.replace(PADDED, policy=policy) for policy in ("PARTIAL", "DROP"))
ROWS = {
    "padded": (lambda: over(PADDED), over_case(PADDED)),
    "runs on": (lambda: over(RUNS_ON), over_case(RUNS_ON)),
    "auto_reset": (
        lambda: over(PADDED, as_numpy=True, auto_reset=True),
        over_case(PADDED, auto_reset=True),
    ),
    "partial": (lambda: over(PARTIAL), over_case(PARTIAL)),
    "partial, runs on": (
        lambda: over(dataclasses.replace(RUNS_ON, policy="PARTIAL")),
        over_case(dataclasses.replace(RUNS_ON, policy="PARTIAL")),
    ),
    "drop": (lambda: over(DROP), over_case(DROP)),
    "drop, runs on": (
        lambda: over(dataclasses.replace(RUNS_ON, policy="DROP")),
        over_case(dataclasses.replace(RUNS_ON, policy="DROP")),
    ),
    "mesh with replicas": (
        lambda: over(PADDED, ((2, 2), ("d", "m"), ("d",), (6, 2, 0, 5))),
        over_case(PADDED),
    ),
    "mesh of two axes": (
        lambda: over(RUNS_ON, ((2, 2), ("d", "m"), (("d", "m"),), (0, 1, 2, 3))),
        over_case(RUNS_ON),
    ),
    "devices": (lambda: over(PADDED, devices=(3, 1)), over_case(PADDED, shape=(2, 2))),
    "Grain, partial": (over_grain, unmasked(over_case(PARTIAL)).as_stream(2048)),
    "Grain, mask": (lambda: over_grain(pad="mask"), over_case(PADDED).as_stream(2048)),
    "Grain, drop": (
        lambda: over_grain(drop_remainder=True),
        unmasked(over_case(DROP)).as_stream(2048),
    ),
    "CLU": (over_clu, dataclasses.replace(over_case(PADDED).as_stream(2048), sized=True)),
    "tf.data": (over_tfdata, over_case(PADDED).as_stream(2048)),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_conformance(row):
    make, expected = ROWS[row]
    check(make, expected, process=row in ("padded", "mesh with replicas", "Grain, mask"))


# Resuming on another layout

LAYOUTS = {
    "one device": {},
    "two devices": {"mesh": ((2,), ("d",), ("d",), (0, 1))},
    "four, turned": {"mesh": ((4,), ("d",), ("d",), (3, 1, 0, 2))},
    "with replicas": {"mesh": ((2, 2), ("d", "m"), ("d",), (0, 1, 2, 3))},
    "as NumPy": {"as_numpy": True},
}


def elastic(layout, batch_size, source=None, seed=None, **more):
    more |= LAYOUTS[layout]
    mesh = more.pop("mesh", None)
    if mesh is not None:
        more["sharding"] = mesh_of(*mesh)
    make = data_iterator(graph, ["x", "u"], mask="mask", **more)
    return make(source=source or numbers(29), batch_size=batch_size, num_threads=1, seed=seed)


def rows_of(iterator, epochs=2):
    """Returns the rows of the following batches, up to the end of some epochs."""
    out = []
    while iterator.epoch < epochs:
        out += [
            (int(x[0]), float(u), bool(m))
            for batch in iterator
            for x, u, m in zip(*(np.asarray(batch[k]) for k in ("x", "u", "mask")))
        ]
        iterator.reset()
    iterator.close()
    return out


@pytest.fixture(scope="module")
def unbroken():
    return rows_of(elastic("one device", 4, seed=5))


@pytest.mark.parametrize(("first", "second"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_a_state_resumes_on_any_layout(first, second, unbroken):
    """The following rows are equal bit for bit, for any layouts that save and restore the state."""
    saved = elastic(first, 4, seed=5)
    for _ in range(9):  # into the second epoch, which begins in mid-batch
        if (batch := next(saved, None)) is None:
            saved.reset()
    del batch
    state = json.loads(json.dumps(saved.get_state()))
    behind = 4 * (saved.step + (8 if saved.epoch else 0))
    saved.close()
    iterator = elastic(second, 4)
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert rows_of(iterator) == unbroken[behind:]


@pytest.mark.parametrize("padded", [False, True])
def test_a_state_resumes_with_any_batch_size(padded):
    """Each sample of the epoch is delivered once, in the order of the epoch."""
    order = [row[0] for row in rows_of(elastic("one device", 1, last_batch_padded=padded), 1)]
    seen, state = [], None
    for layout, size in zip(itertools.cycle(LAYOUTS), (4, 8, 4, 12, 8)):
        iterator = elastic(layout, size, last_batch_padded=padded)
        if state is not None:
            iterator.set_state(state)
        before, length = iterator.step, len(iterator)
        batch = next(iterator, None)
        if batch is None:
            break
        assert len(iterator) == length == before + 1 + (len(iterator) - iterator.step)
        seen += np.asarray(batch["x"])[np.asarray(batch["mask"])].ravel().tolist()
        state = iterator.get_state()
        iterator.close()
    assert seen == order
    assert sorted(seen) == list(range(29))


def test_hosts_deliver_slices_of_a_global_batch():
    """Grain's shards and T5X's hosts: a single seed, a single state, rows in order."""
    make = data_iterator(graph, ["x", "u"], source=numbers(29))
    whole = [frozen(b) for b in DALIIterDataset(make, pad="mask", batch_size=6, seed=4)]
    hosts = []
    for index in range(3):
        options = types.SimpleNamespace(shard_index=index, shard_count=3, drop_remainder=False)
        ds = DALIIterDataset(make, pad="mask", batch_size=2, seed=4, shard_options=options)
        hosts.append(iter(ds))
    states = []
    for batch in whole:
        parts = [next(host) for host in hosts]
        together = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        assert frozen(together) == batch
        states.append([host.get_state() for host in hosts])
        assert states[-1][0] == states[-1][1] == states[-1][2]
    one = iter(DALIIterDataset(make, pad="mask", batch_size=6, seed=4))
    one.set_state(states[1][2])
    assert frozen(next(one)) == whole[2]


def test_t5x_over_a_source():
    make = data_iterator(
        lambda number, draw: (number, draw.uniform(shape=[3])),
        ["x", "decoder_loss_weights"],
        source=numbers(11),
    )
    config = types.SimpleNamespace(batch_size=4, seed=3)
    train = t5x.get_dataset_fn(make)(config, 0, 1)
    first = [np.asarray(next(train)["x"]).ravel().tolist() for _ in range(3)]
    hosts = [t5x.get_dataset_fn(make)(config, k, 2) for k in range(2)]
    for batch in first:
        parts = [np.asarray(next(host)["x"]).ravel() for host in hosts]
        assert np.concatenate(parts).tolist() == batch
    rows = 0.0
    for host in range(2):
        evaluation = t5x.eval_get_dataset_fn(make)(config, host, 2, eval_steps=None)
        batches = [b for ds in evaluation.values() for b in ds]
        assert len(batches) == 3
        rows += sum(float(np.asarray(b["weights"]).sum()) for b in batches)
        for batch in batches:
            padding = np.asarray(batch["weights"]) == 0
            assert (np.asarray(batch["decoder_loss_weights"])[padding] == 0).all()
    assert rows == 11


def test_settings_that_would_desynchronize_hosts_are_refused():
    make = data_iterator(graph, ["x", "u"], source=numbers(29))
    call = {"batch_size": 2, "hosts": (0, 2)}
    with pytest.raises(ValueError, match="'skip' over several processes or hosts.*'mask'"):
        make(on_error="skip", **call)
    with pytest.raises(ValueError, match="'partial' over 2 shards.*'fill' and a mask"):
        make(last_batch_policy=LastBatchPolicy.PARTIAL, **call)


def test_a_dropped_iterator_ends_its_threads():
    def reading():
        return {t for t in threading.enumerate() if t.name.startswith("dalijax-read")}

    gc.collect()
    before = reading()
    gc.disable()
    try:
        iterator = elastic("one device", 4)
        next(iterator)
        own = reading() - before
        assert own
        del iterator
        for thread in own:
            thread.join(300)
        assert not reading() & own
    finally:
        gc.enable()


# Binding


def test_parameters_are_fields_draws_and_settings():
    @data_iterator(output_map=["x"])
    def scaled(number, *, factor, draw=None):
        return number * factor

    iterator = scaled(source=numbers(), batch_size=2, factor=3, shuffle=False)
    assert np.asarray(next(iterator)["x"]).ravel().tolist() == [0, 3]
    with pytest.raises(
        TypeError, match=r"scaled.. needs \['factor'\], which the records do not have.*'number'"
    ):
        scaled(source=numbers(), batch_size=2)
    with pytest.raises(TypeError, match="settings by keyword"):
        scaled(3, source=numbers(), batch_size=2)
    with pytest.raises(ValueError, match="batch_size is missing"):
        scaled(source=numbers(), factor=3)
    with pytest.raises(TypeError, match=r"no argument \['fctor'\].*did you mean"):
        scaled(source=numbers(), batch_size=2, factor=3, fctor=2)
    with pytest.raises(ValueError, match="exec_dynamic=False"):
        scaled(source=numbers(), batch_size=2, factor=3, exec_dynamic=False)


@pytest.mark.parametrize("name", ["shard_id", "num_shards", "reader_name", "size"])
def test_arguments_of_readers_are_refused(name):
    value = {"reader_name": "r"}.get(name, 1)
    with pytest.raises(ValueError, match=f"{name}.*Omit them"):
        data_iterator(graph, ["x", "u"])(source=numbers(), batch_size=2, **{name: value})


def test_a_source_in_the_decorator_or_in_the_call():
    with pytest.raises(ValueError, match="source.*both"):
        data_iterator(graph, ["x", "u"], source=numbers())(source=numbers(), batch_size=2)
    with pytest.raises(TypeError, match="dalijax.sources.Records"):
        data_iterator(graph, ["x", "u"])(source=[1, 2], batch_size=2)
    sequential = data_iterator(graph, ["x", "u"], shuffle=False)  # the call may provide the source
    assert next(sequential(source=numbers(), batch_size=2))["x"].ravel().tolist() == [0, 1]
    with pytest.raises(TypeError, match="gets no value for .*source="):
        sequential(batch_size=2)
    own = data_iterator(lambda source: source, ["x"])  # a parameter of the graph
    assert not own._has_source({"source": numbers()})


def test_seek_skip_and_reset():
    iterator = elastic("one device", 4)
    every = [frozen(b) for b in iterator]
    iterator.seek(0, 3)
    assert frozen(next(iterator)) == every[3]
    assert iterator.skip(2) == 2
    assert frozen(next(iterator)) == every[6]
    iterator.reset()
    assert frozen(next(iterator)) == every[0]
    iterator.seek(5)
    assert (iterator.epoch, iterator.step) == (5, 0)
    with pytest.raises(ValueError, match="no batch 99 in epoch 0"):
        iterator.seek(0, 99)
    assert iterator.epoch == 5
    iterator.close()


def test_shuffle_is_for_sources(jpegs):
    from nvidia.dali import fn

    def reader():
        return fn.readers.file(files=jpegs, name="r")[1]

    made = data_iterator(reader, ["x"], reader_name="r", shuffle=False)
    for use in (made, made.stream):
        with pytest.raises(ValueError, match="shuffle=False of reader.*random_shuffle=True"):
            next(use(batch_size=2))
    again = data_iterator(reader, ["x"], reader_name="r")
    with pytest.raises(ValueError, match="shuffle=False of reader.*random_shuffle=True"):
        again(batch_size=2, shuffle=False)


def test_a_readers_iterator_has_no_seek(jpegs):
    from nvidia.dali import fn

    reader = data_iterator(
        lambda: fn.readers.file(files=jpegs, name="r")[1], ["x"], reader_name="r"
    )
    iterator = reader(batch_size=2)
    with pytest.raises(ValueError, match="seek.*source"):
        iterator.seek(1)
    with pytest.raises(StateError, match="kind: 'source' -> 'reader'.*kind that saved"):
        iterator.set_state(elastic("one device", 4).get_state())
    iterator.close()


METAS = [{"box": [1, 2], "by": None}, {"box": []}, None, "text", [3, 4], 0.5]


@pytest.mark.parametrize("make_source", ["tar", "records"])
def test_json_is_delivered_as_objects(make_source, tmp_path):
    entries = [
        entry
        for k, meta in enumerate(METAS)
        for entry in ((f"{k}.jpg", bytes([k])), (f"{k}.json", json.dumps(meta).encode()))
    ]
    if make_source == "tar":
        source = sources.Tar(
            write_tar(tmp_path / "a.tar", entries), {"data": "jpg", "meta": "json"}
        )
    else:
        source = sources.Records([{"data": bytes([k]), "meta": m} for k, m in enumerate(METAS)])
    make = data_iterator(lambda data: data + 0, ["data"], source=source, shuffle=False)
    batches = list(make(batch_size=2, num_threads=1))
    assert [batch["meta"].dtype for batch in batches] == [object] * 3
    assert [one for batch in batches for one in batch["meta"]] == METAS


@pytest.mark.parametrize("shape", (None, (4,), (2, 2)), ids=("host", "4", "2x2"))
def test_json_and_text_bypass_the_graph(shape, tmp_path):
    names = [f"{k}" for k in range(N)]
    entries = [
        entry
        for k in range(N)
        for entry in (
            (f"{k:02}.jpg", bytes([k])),
            (f"{k:02}.json", json.dumps(10 * k).encode()),
            (f"{k:02}.txt", names[k].encode()),
        )
    ]
    tar = sources.Tar(
        write_tar(tmp_path / "a.tar", entries), {"data": "jpg", "meta": "json", "text": "txt"}
    )

    def take(data):
        return data + 0

    sharding = shape and mesh_of(shape, ("x", "y")[: len(shape)], ("x",), range(np.prod(shape)))
    config = {"as_numpy": True} if shape is None else {"sharding": sharding}
    make = data_iterator(take, ["data"], source=tar, shuffle=False, **config)
    iterator = make(batch_size=BATCH, num_threads=1)
    spec = iterator.element_spec
    assert (spec["text"].shape, spec["text"].dtype) == ((BATCH,), object)
    assert spec["text"].sharding is None  # stays on the host
    for step, batch in enumerate(iterator):
        rows = [k % N for k in range(BATCH * step, BATCH * (step + 1))]
        assert batch["text"].tolist() == [names[k] for k in rows]
        assert batch["meta"].dtype == object and batch["meta"].tolist() == [10 * k for k in rows]
        assert np.asarray(batch["data"]).tolist() == [[k] for k in rows]
