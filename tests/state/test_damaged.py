"""Damaged states of every kind raise a StateError with a fix, and have no effect."""

import base64
import copy
import json
import zlib

import grain
import numpy as np
import pytest
from nvidia.dali import fn
from sealing import crafted, opened, sealed

from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform, data_loader
from dalijax.adapters.grain import transform as transform_module
from dalijax.adapters.tfdata import DALIDataset, stepped_stream
from dalijax.core.formats import protobuf
from dalijax.core.sources import state as source_state
from dalijax.core.state import reader_state
from dalijax.errors import StateError
from numbered import read_files

VALUES = [None, True, -1, 0, 7, 1.5, 2**31, 2**53, 2**70, "", "x", "7", b"x", [], [3], ["x"], {}]
VALUES += [[[]], {"a": 1}, [None]]


def deep(levels=100_000):
    made = []
    for _ in range(levels):
        made = [made]
    return made


CURE = "(?s)restore an undamaged copy|Pass the result of|saved ->|pass the content"
DEEP = deep()
DEEP_TEXT = "[" * 100_000 + "]" * 100_000


def graph(files, shuffle=True, pad=True, shard_id=0, num_shards=1):
    x = read_files(
        files,
        random_shuffle=shuffle,
        pad_last_batch=pad,
        stick_to_shard=True,
        shard_id=shard_id,
        num_shards=num_shards,
    )[1]
    return x, fn.random.uniform(range=(0.0, 1.0))


def function(**config):
    return data_iterator(graph, ["x", "u"], reader_name="reader", **config)


def changes(value):
    """Yields a dict with each of its values, at any depth, removed or replaced."""
    for key in value:
        yield {k: v for k, v in value.items() if k != key}
        for other in VALUES:
            if type(other) is not type(value[key]) or other != value[key]:
                yield {**value, key: other}
        if isinstance(value[key], dict):
            for inner in changes(value[key]):
                yield {**value, key: inner}
        elif isinstance(value[key], list) and value[key]:
            for other in VALUES:
                if other != value[key][0]:
                    yield {**value, key: [other, *value[key][1:]]}
            yield {**value, key: value[key][1:]}
            yield {**value, key: [*value[key], value[key][0]]}


def plain(batch):
    if isinstance(batch, tuple):  # numbered by enumerate()
        return int(batch[0]), plain(batch[1])
    return {k: np.asarray(v).tolist() for k, v in batch.items()}


def reader(files):
    return function(as_numpy=True).stream(None, files=files[:10], batch_size=3)


def source(files):
    def flipped(x, draw):
        return x + draw.uniform()

    arrays = sources.Arrays({"x": np.arange(10)})
    return data_iterator(flipped, ["x"], source=arrays, as_numpy=True).stream(None, batch_size=3)


def mixture(files):
    parts = [sources.Arrays({"x": np.arange(10) + k}) for k in (0, 10)]
    source = sources.Mixture([(parts[0], 1), (parts[1], [(0, 2), (9, 1)])])
    make = data_iterator(lambda x: x + 0, ["x"], source=source, as_numpy=True)
    return make.stream(None, batch_size=3)


def chain(files):
    stream = DALIDataset(function(), files=files[:10], batch_size=3)
    return iter(stream.repeat().skip(2).enumerate())


def drawing(number):
    return number + 0, fn.random.uniform(range=(0.0, 1.0))


def records(files):
    return grain.MapDataset.source(np.arange(len(files))).repeat(2)


def transform(files):
    names = ["x", "u"]
    return iter(records(files).pipe(DALITransform(drawing, batch_size=2, output_map=names, seed=1)))


def loader(files):
    sampler = grain.samplers.IndexSampler(len(files), num_epochs=2, seed=0)
    options = dict(pipeline_fn=drawing, output_map=["x", "u"], batch_size=2)
    return iter(DALIDataLoader(records(files), sampler, **options))


# The form of each kind, and an iterator.
KINDS = {
    "reader": (reader_state.FORM, reader),
    "source": (source_state.FORM, source),
    "mixture": (source_state.FORM, mixture),
    "chain": (stepped_stream.FORM, chain),
    "transform": (transform_module.FORM, transform),
    "loader": (data_loader.FORM, loader),
}


@pytest.mark.parametrize("built", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_each_field(jpegs_many, kind, built):
    _, make = KINDS[kind]
    saved, other, reference = (make(jpegs_many) for _ in range(3))
    for _ in range(5 if built else 2):
        next(saved)
    if built:
        next(other), next(reference)
    state, first = saved.get_state(), other.get_state()
    original, count = copy.deepcopy(state), 0
    for damaged in changes(state):
        with pytest.raises(StateError, match=CURE):
            other.set_state(damaged)
        count += 1
    assert other.get_state() == first and state == original
    assert count > 50
    for _ in range(4):
        assert plain(next(other)) == plain(next(reference))


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_not_a_state(jpegs_many, kind):
    form, make = KINDS[kind]
    iterator = make(jpegs_many)
    next(iterator)
    state = iterator.get_state()
    text = json.dumps(state)
    head, data = opened(form, state)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 25))).decode()
    behind = base64.b64encode(base64.b64decode(state["data"]) + b"x").decode()
    other_kind = next(other.kind for other, _ in KINDS.values() if other is not form)
    bad = [
        (None, "not a state of dalijax"),
        ("nonsense", "not JSON.*pass the content of the file"),
        ({}, "not a state of dalijax.*Pass the result of get_state"),
        ({**state, "format": "other"}, "not a state of dalijax"),
        ({**state, "version": 99}, "version: 99 -> 3 .*newer dalijax"),
        ({**state, "version": 0}, "version: 0 -> 3 .*older dalijax"),
        ({**state, "version": "3"}, "version: '3' -> 3 .*older dalijax"),
        ({**state, "kind": other_kind}, f"kind: '{other_kind}' -> '{form.kind}'.*of the kind that"),
        ({**state, "digest": "0" * 16}, "damaged: its digest does not match.*undamaged copy"),
        ({**state, "digest": 3}, "damaged: digest is 3, not text"),
        ({**state, "lag": 0}, r"damaged.*\['lag'\] are unknown"),
        (sealed(head, state["data"][:-8]), "damaged.*(is cut off|base64|padding)"),
        (sealed(head, state["data"][:-7]), "damaged.*(base64|padding)"),
        (sealed(head, "%%%"), "damaged.*base64"),
        (sealed(head, "\u00e4"), "damaged"),
        (sealed(head, ""), "damaged.*is cut off"),
        (sealed(head, behind), "damaged.*longer than its content"),
        (sealed(head, bomb), "damaged.*too large"),
        (sealed(head, b"[]"), "damaged: data is .*, not a dict"),
        (sealed(head, DEEP_TEXT.encode()), "damaged"),
        *[(bad, "") for bad in (DEEP, DEEP_TEXT, DEEP_TEXT.encode(), '{"a":' * 100_000, 3, {3: 4})],
        *[({**state, name: DEEP}, "") for name in state],
        *[({**state, name: np.array(["dalijax", kind])}, "") for name in state],
        *[(text[:-20], ""), (text[:99].encode(), ""), (b"\xff" + text.encode(), "")],
        ("9" * 10_000, ""),
    ]
    for name, value in data.items():
        if not isinstance(value, dict):
            deep = json.dumps({**data, name: None}).replace("null", DEEP_TEXT).encode()
            bad += [(sealed(head, deep), "damaged")]
            words = f"damaged: data.{name} is 1.5, not (a whole number from|text|a list of texts)"
            bad += [(sealed(head, {**data, name: 1.5}), words)]
    for wrong, words in bad:
        with pytest.raises(StateError, match=f"(?s){words}"):
            iterator.set_state(wrong)
        assert json.dumps(iterator.get_state()) == text


def doubled(number):
    return number * 2, fn.random.uniform(range=(0.0, 1.0))


@pytest.mark.parametrize("kind", ["transform", "loader"])
def test_another_graphs_state_does_not_prevent_a_restore(jpegs_many, kind, monkeypatch):
    _, make = KINDS[kind]
    saved, iterator = make(jpegs_many), make(jpegs_many)
    next(saved)
    state = saved.get_state()
    monkeypatch.setitem(globals(), "drawing", doubled)
    other = make(jpegs_many)
    next(other)
    iterator.set_state(other.get_state())  # the graph is unknown before the first batch
    iterator.set_state(state)
    assert plain(next(iterator)) == plain(next(saved))


def test_names_of_differences_stay_on_one_line(jpegs_many):
    form, make = KINDS["source"]
    saved, iterator = make(jpegs_many), make(jpegs_many)
    next(saved), next(iterator)
    state = saved.get_state()
    (name,) = opened(form, state)[1]["outputs"]
    forged = crafted(form, state, outputs=[f"{name}\n\x1b[2Jseed: 1 -> 2"])
    with pytest.raises(StateError) as error:
        iterator.set_state(forged)
    assert "\x1b" not in str(error.value) and "\nseed" not in str(error.value)


def test_checkpoints_as_bytes(jpegs_many):
    iterator_fn, call = function(), dict(files=jpegs_many[:10], batch_size=3)
    iterator = iterator_fn(**call)
    next(iterator)
    (good,) = iterator.checkpoints()

    def enveloped(content):
        return protobuf.message([(2, protobuf.message([(2, content)]))])

    bad = [json.dumps(own).encode() for own in changes(iterator.get_state()) if _is_json(own)]
    bad += [DEEP_TEXT.encode(), b"{", b"[]", b"3"]
    dali = {"_counter": 0, "_counter_per_gpu": [0], "_shard_sizes_per_gpu": [10], "_shards_id": [0]}
    for own in changes(dali):
        # Another iterator may have saved a larger integer.
        if _is_json(own) and any(type(own.get(k)) is not type(v) for k, v in dali.items()):
            bad.append(json.dumps(own).encode())
    for content in bad:
        with pytest.raises(StateError):
            iterator_fn(**call, checkpoints=[enveloped(content)])
    for pieces in (good, [good[:-3]], [good, good], [b""], [b"\xff" * 40], ["text"], [None], 3):
        with pytest.raises((StateError, TypeError)):
            iterator_fn(**call, checkpoints=pieces)
    assert plain(next(iterator_fn(**call, checkpoints=[good]))) == plain(next(iterator))


def _is_json(value):
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def test_dalis_drop_is_ahead_of_the_delivered_batches(jpegs_many):
    """The only negative lag, at the end of an epoch."""
    from nvidia.dali.plugin.jax import data_iterator as dali_data_iterator

    options = dict(reader_name="reader", last_batch_policy=LastBatchPolicy.DROP)
    theirs = dali_data_iterator(graph, ["x", "u"], **options)(
        jpegs_many[:10],
        batch_size=4,
        num_threads=1,
        device_id=None,
        seed=0,
        enable_checkpointing=True,
    )
    assert len(list(theirs)) == 2
    ours = data_iterator(graph, ["x", "u"], **options)
    iterator = ours(jpegs_many[:10], batch_size=4, checkpoints=theirs.checkpoints())
    state = iterator.get_state()
    other = ours.stream(None, jpegs_many[:10], batch_size=4)
    other.set_state(state)
    assert other.get_state() == state
    iterator.reset()
    assert plain(next(other)) == plain(next(iterator))


def test_files_of_clu(jpegs_many, tmp_path):
    iterator_fn, call = function(), dict(files=jpegs_many[:10], batch_size=3)
    saved = DALIDatasetIterator(iterator_fn, **call)
    next(saved)
    saved.save(tmp_path / "good")
    text = (tmp_path / "good").read_bytes()
    other = DALIDatasetIterator(function(), **{**call, "files": jpegs_many[1:11]})
    for content in (b"", b"\xff\xfe", text[:-10], DEEP_TEXT.encode(), text):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(StateError, match="bad: "):
            other.restore(tmp_path / "bad")
    fresh = DALIDatasetIterator(function(), **{**call, "files": jpegs_many[1:11]})
    assert plain(next(other)) == plain(next(fresh))


def test_a_restore_before_the_first_batch_refuses_at_once(jpegs_many, tmp_path):
    """The iterator, still without pipelines, then delivers the same batches as before."""
    builds = []

    def counted(files, size):
        builds.append(size)
        x, u = graph(files)
        return x, u * size

    iterator_fn = data_iterator(counted, ["x", "u"], reader_name="reader")
    call = dict(files=jpegs_many[:10], batch_size=3)
    saved = iterator_fn(**call, size=1.0)
    next(saved)
    state, want = saved.get_state(), plain(next(saved))
    (tmp_path / "state").write_text(json.dumps(state))
    kinds = {
        "clu": lambda size: DALIDatasetIterator(iterator_fn, **call, size=size),
        "grain": lambda size: iter(DALIIterDataset(iterator_fn, pad="mask", **call, size=size)),
        "tfdata": lambda size: iter(DALIDataset(iterator_fn, **call, size=size)),
        "stream": lambda size: iterator_fn.stream(None, **call, size=size),
    }
    for name, make in kinds.items():
        other = make(2.0)
        first = other.get_state()
        builds.clear()
        with pytest.raises(StateError, match="saved -> now"):
            if name == "clu":
                other.restore(tmp_path / "state")
            else:
                other.set_state(state)
        assert len(builds) == 1
        assert other.get_state() == first
        assert plain(next(other)) == plain(next(make(2.0)))
        other = make(1.0)
        builds.clear()
        other.get_state()
        assert not builds
        other.set_state(state)
        assert builds == [1.0]  # once, at the checkpoint
        batch = plain(next(other))
        assert {k: batch[k] for k in want} == want and builds == [1.0], name
