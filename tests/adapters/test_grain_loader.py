"""DALIDataLoader: records in the sampler's order, over any mesh, resumable on another mesh."""

import io
import itertools
import json

import absl.flags
import grain
import numpy as np
import pytest
from nvidia.dali import fn
from PIL import Image
from sealing import crafted
from shardings import rows_over

from conformance import frozen
from dalijax import sources
from dalijax.adapters.grain import (
    DALIBatch,
    DALIDataLoader,
    DALITransform,
    RandomInputs,
    data_loader,
)
from full import FULL, in_full

N, BATCH, SEED = 21, 8, 5
INDEX = grain.samplers.IndexSampler
SAMPLER = INDEX(N, shuffle=True, num_epochs=2, seed=SEED)


class Source(list):
    """A data source whose repr does not contain an address."""

    def __repr__(self):
        return f"Source({len(self)})"


def numbers(count=N):
    return Source({"number": np.array([i], np.int32)} for i in range(count))


def jpegs(count, bad):
    """Gray JPEGs: every pixel of image i is 8 * i; the bad image is truncated."""
    made = Source()
    for i in range(count):
        file = io.BytesIO()
        Image.fromarray(np.full((16, 16, 3), 8 * i, np.uint8)).save(file, "JPEG", quality=100)
        data = file.getvalue()
        made.append({"image": data if i != bad else data[: data.index(b"\xff\xda") + 12]})
    return made


def plain(number):
    return number + 0


def drawing(number):
    return number + 0, fn.random.uniform(), fn.random.normal()


def decode(image):
    return fn.crop(fn.decoders.image(image), crop=(1, 1))[:, :, 0], fn.random.uniform()


def loader(
    sampler=SAMPLER, source=None, operations=(), *, graph=plain, output_map=("x",), **options
):
    options = {"batch_size": BATCH, "num_threads": 1, **options}
    if graph is drawing:
        output_map = ("x", "u", "v")
    source = numbers() if source is None else source
    return DALIDataLoader(
        source, sampler, operations, pipeline_fn=graph, output_map=output_map, **options
    )


def taken(iterator, most=99):
    """Returns the batches of an iterator as NumPy arrays."""
    batches = itertools.islice(iterator, most)
    return [{name: np.asarray(array) for name, array in batch.items()} for batch in batches]


def same(one, other):
    """Whether lists of batches are equal bit for bit."""
    return [frozen(batch) for batch in one] == [frozen(batch) for batch in other]


def records(iterator, most=99):
    """Returns the record numbers of each batch."""
    return [batch["x"][:, 0].tolist() for batch in taken(iterator, most)]


def keys(sampler, count):
    return [int(sampler[i].record_key) for i in range(count)]


def cut(values, policy, batch=BATCH):
    """Splits values into batches and masks: the last is dropped, padded at its end, or smaller."""
    made = []
    for start in range(0, len(values), batch):
        own = values[start : start + batch]
        missing = batch - len(own)
        if missing and policy == "drop":
            continue
        pad = missing if policy == "mask" else 0
        made.append((own + own[-1:] * pad, [True] * len(own) + [False] * pad))
    return made


POLICIES = {"drop": {"drop_remainder": True}, "mask": {"pad": "mask"}, "smaller": {}}


# Records and their order


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("epochs", (1, 2, 3))
@pytest.mark.parametrize("shuffle", (False, True))
def test_records_come_in_the_samplers_order(shuffle, epochs, policy):
    sampler = INDEX(N, shuffle=shuffle, num_epochs=epochs, seed=5)
    order = keys(sampler, epochs * N)
    for epoch in range(epochs):  # checks the oracle: each record once per epoch
        own = order[epoch * N : (epoch + 1) * N]
        assert sorted(own) == list(range(N)) and (own == sorted(own)) != shuffle
    got = taken(loader(sampler, **POLICIES[policy]))
    want = cut(order, policy)
    assert [batch["x"][:, 0].tolist() for batch in got] == [own for own, _ in want]
    if policy == "mask":
        assert [batch["mask"].tolist() for batch in got] == [mask for _, mask in want]
        seen = np.concatenate([batch["x"][batch["mask"], 0] for batch in got])
        assert np.bincount(seen).tolist() == [epochs] * N
    else:
        assert all(set(batch) == {"x"} for batch in got)


def test_a_sampler_without_an_end():
    sampler = INDEX(N, shuffle=True, num_epochs=None, seed=5)
    iterator = iter(loader(sampler, drop_remainder=True))
    want = [own for own, _ in cut(keys(sampler, 10 * BATCH), "drop")]
    assert records(iterator, 6) == want[:6]
    again = iter(loader(sampler, drop_remainder=True))
    again.set_state(iterator.get_state())
    assert records(again, 4) == want[6:]


def two(number, image):
    return number + 0, image[:1]


@pytest.mark.parametrize("workers", (0, in_full(1)))
def test_a_record_with_an_additional_key_is_delivered(workers):
    # Its batch is passed on differently; the state is still exact.
    absl.flags.FLAGS.mark_as_parsed()
    source = [
        {"number": np.array([i], np.int32), "image": bytes([i] * 9), **({"a": 1} if i == 9 else {})}
        for i in range(N)
    ]
    options = {"graph": two, "output_map": ("x", "y"), "batch_size": 4, "worker_count": workers}
    made = loader(INDEX(N, num_epochs=1, seed=SEED), source, **options)
    want = taken(iter(made))
    assert [batch["y"][:, 0].tolist() for batch in want] == [
        batch["x"][:, 0].tolist() for batch in want
    ]
    iterator = iter(made)
    for step in range(len(want)):
        state = json.loads(json.dumps(iterator.get_state()))
        other = iter(made)
        other.set_state(state)
        assert same(taken(other, 1), want[step : step + 1])
        other.close()
        next(iterator)
    iterator.close()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", (in_full(1), 2))
def test_worker_processes_read_the_same_records_in_the_same_order(workers):
    absl.flags.FLAGS.mark_as_parsed()
    source = list(numbers())  # a class of this file could not be imported there
    options = {"pad": "mask", "worker_count": workers, "worker_buffer_size": 2}
    made = loader(SAMPLER, source, **options)
    want = [own for own, _ in cut(keys(SAMPLER, 2 * N), "mask")]
    with_state = iter(made)
    assert records(with_state, 2) == want[:2]
    state = with_state.get_state()
    with_state.close()
    # Workers are not part of the state.
    for one in (made, loader(SAMPLER, source, pad="mask")):
        again = iter(one)
        again.set_state(state)
        assert records(again) == want[2:]
        again.close()


class Twice(grain.transforms.Map):
    def map(self, element):
        return {"number": 2 * element["number"]}


class Noise(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {"number": element["number"] + rng.integers(1000, dtype=np.int32)}


def test_operations_get_the_samplers_random_numbers():
    order = keys(SAMPLER, 2 * N)

    def noise(index):  # like Grain: one generator for each index
        return np.random.Generator(np.random.Philox(key=5 + index)).integers(1000, dtype=np.int32)

    want = [int(2 * key + noise(i)) for i, key in enumerate(order)]
    got = records(loader(SAMPLER, None, [Twice(), Noise()]))
    assert np.concatenate(got).tolist() == want
    theirs = grain.DataLoader(
        data_source=numbers(), sampler=SAMPLER, operations=[Twice(), Noise()], worker_count=0
    )
    assert [int(one["number"][0]) for one in theirs] == want


class Odd(grain.transforms.Filter):
    def filter(self, element):
        return element["number"][0] % 2


class Split(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


@pytest.mark.parametrize(
    ("operation", "cure"),
    (
        (Odd(), "can't be resumed by the step. Use ds.pipe"),
        (Split(), "can't be resumed by the step. Use ds.pipe"),
        (grain.transforms.Batch(2), "Omit it: batch_size= and drop_remainder= of the loader"),
        (DALIBatch(plain, batch_size=2), "pass the graph function as pipeline_fn="),
        (DALITransform(plain, batch_size=2), "pass the graph function as pipeline_fn="),
        (Twice, r"Pass an instance, Twice\(\)"),
        (lambda record: record, "subclass of grain.transforms.Map that calls it"),
    ),
)
def test_operations_that_do_not_map_single_records_are_refused(operation, cure):
    with pytest.raises(ValueError, match=f"not a grain.transforms.Map or RandomMap .*{cure}"):
        loader(INDEX(N, num_epochs=1), None, [operation])


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    (
        ({"operations": Twice()}, TypeError, "operations must be a list, not .*Pass "),
        ({"sampler": range(N)}, TypeError, r"not range\(0, 21\). Pass grain.samplers.IndexSampler"),
        ({"sampler": None}, TypeError, "must be a sampler of Grain, not None. Pass"),
        ({"source": sources.Arrays({"x": [1]})}, TypeError, "Pass it as source= to DALIIterData"),
        ({"read_options": 3}, TypeError, "read_options must be a ReadOptions of Grain, .* not 3"),
        ({"shard_options": 2}, TypeError, "shard_options must be a ShardOptions of Grain"),
        ({"batch_size": "8"}, TypeError, "batch_size must be a whole number .*, not '8'"),
        ({"worker_count": -1}, ValueError, "worker_count must be a whole number .*, not -1"),
        ({"seed": "a"}, TypeError, "seed must be a whole number .*, not 'a'"),
        ({"enable_profiling": True}, TypeError, "use dalijax.profile.* those of DALIDataLoader"),
        ({"device_put": True}, TypeError, "use sharding="),
        ({"num_epochs": 3}, TypeError, r"use sampler=grain.samplers.IndexSampler\(..., num_epo"),
        ({"shuffle": True}, TypeError, r"use sampler=grain.samplers.IndexSampler\(..., shuffle"),
        ({"num_workers": 3}, TypeError, "use worker_count=.*'worker_count', 'writable'"),
        ({"worker_buffer": 3}, TypeError, "did you mean 'worker_buffer_size'"),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_other_kinds_are_refused_with_the_fix(arguments, kind, text):
    with pytest.raises(kind, match=text):
        loader(**arguments)


def test_missing_arguments_are_described():
    with pytest.raises(TypeError, match=r"DALIDataLoader\(\) needs batch_size\n  .*global batch"):
        DALIDataLoader(numbers(), SAMPLER, pipeline_fn=plain)


def test_records_beyond_the_data_source_are_named():
    iterator = iter(loader(INDEX(N + 3, num_epochs=1)))
    assert records(iterator, 2) == [[*range(8)], [*range(8, 16)]]
    with pytest.raises(IndexError, match="record 21 of 21 records. Pass num_records=len"):
        next(iterator)


def test_tuples_are_refused_with_the_transform_of_a_loader():
    pairs = [(np.array([k], np.int32), k) for k in range(N)]
    with pytest.raises(TypeError, match="grain.transforms.Map in the operations of a loader"):
        next(iter(loader(INDEX(N, num_epochs=1), pairs)))


def test_a_sharded_sampler_is_refused():
    sampler = INDEX(N, grain.sharding.ShardOptions(0, 2), num_epochs=1)
    with pytest.raises(ValueError, match="the sampler is sharded.*Omit its shard_options"):
        loader(sampler)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"sharding": True}, "drop_remainder=True to drop it, or pad='mask'"),
        ({"shard": 2}, "may have no record for a shard"),
        ({"shard": 3, "pad": "mask"}, "the 3 shards don't divide batch_size=8"),
        ({"shard": 2, "sharding": True, "pad": "mask"}, "which determines the shards"),
        ({"sharding": True, "pad": "mask", "batch_size": 7}, "not divisible by the 2 data shards"),
    ],
)
def test_shards_that_do_not_divide_batches_are_refused(options, words):
    options = dict(options)
    if options.pop("sharding", False):
        options["sharding"] = rows_over(2)
    if "shard" in options:
        options["shard_options"] = grain.sharding.ShardOptions(0, options.pop("shard"))
    with pytest.raises(ValueError, match=words):
        loader(INDEX(N, num_epochs=1), **options)


@pytest.mark.parametrize("policy", ("drop", "mask"))
def test_shard_options_give_each_process_its_part_of_each_batch(policy):
    want = cut(keys(SAMPLER, 2 * N), policy)
    for index in range(4):
        shard = grain.sharding.ShardOptions(index, 4)
        got = taken(loader(shard_options=shard, **POLICIES[policy]))
        own = slice(2 * index, 2 * index + 2)
        assert [batch["x"][:, 0].tolist() for batch in got] == [rows[own] for rows, _ in want]
        if policy == "mask":
            assert [batch["mask"].tolist() for batch in got] == [mask[own] for _, mask in want]


# Meshes


@pytest.mark.parametrize("shape", ((1,), (2,), (4,), (8,), (4, 2), (2, 4), (1, 8)))
@pytest.mark.parametrize("turn", (1, -1))
def test_each_device_has_its_rows(shape, turn):
    sharding = rows_over(*shape, turn=turn)
    want = cut(keys(SAMPLER, 2 * N), "mask")
    each = BATCH // shape[0]
    iterator = iter(loader(sharding=sharding, pad="mask"))
    for (rows, mask), batch in zip(want, iterator, strict=True):
        held = {}
        for name, values in (("x", rows), ("mask", mask)):
            assert batch[name].sharding.is_equivalent_to(sharding, batch[name].ndim)
            for shard in batch[name].addressable_shards:
                held[name, shard.device] = np.asarray(shard.data).ravel().tolist(), values
        for where, device in np.ndenumerate(sharding.mesh.devices):
            own = slice(where[0] * each, (where[0] + 1) * each)
            for name in ("x", "mask"):
                got, values = held[name, device]
                assert got == values[own]


def shardings():
    """Returns a sharding for each number of shards; None is a single shard without a sharding."""
    yield from [None, rows_over(1), rows_over(2), rows_over(4), rows_over(8)]
    yield rows_over(2, 4)


@pytest.mark.parametrize("policy", ("drop", "mask"))
def test_a_run_on_four_devices_resumes_on_any_number(policy):
    options = POLICIES[policy]
    saved = iter(loader(sharding=rows_over(4), **options))
    want = taken(loader(**options))
    for step in range(len(want) + 1):
        state = json.loads(json.dumps(saved.get_state()))
        for number, sharding in enumerate(shardings()):
            if not FULL and (step + number) % 2:  # each sharding resumes from half of the states
                continue
            again = iter(loader(sharding=sharding, **options))
            again.set_state(state)
            assert same(taken(again, 2), want[step : step + 2])
            again.close()
        assert next(saved, None) is not None or step == len(want)


# Random numbers


@pytest.mark.parametrize("shape", ((1,), (2,), (4, 2)))
def test_random_operators_draw_a_number_for_each_row(shape):
    batches = taken(loader(graph=drawing, seed=9, pad="mask", sharding=rows_over(*shape)))
    drawn = np.concatenate([batch["u"].ravel() for batch in batches])
    assert len(np.unique(drawn)) == len(drawn)


def test_random_operators_need_the_same_number_of_shards_unless_allowed():
    options = {"graph": drawing, "pad": "mask"}
    saved = iter(loader(sharding=rows_over(4), **options))
    straight = taken(loader(sharding=rows_over(4), **options))
    start, _ = saved.get_state(), taken(saved, 2)
    state = saved.get_state()
    other = iter(loader(sharding=rows_over(2), **options))
    with pytest.raises(ValueError, match="shards: 4 -> 2 .*RandomInputs.*other_randomness"):
        other.set_state(state)
    first = taken(other, 1)[0]
    assert first["x"].tolist() == straight[0]["x"].tolist()  # unchanged
    other.set_state(start)  # no number was drawn yet
    assert same(taken(other, 1), [first])
    replicas = iter(loader(sharding=rows_over(4, 2), **options))
    replicas.set_state(state)  # the same number of shards
    assert replicas.get_state() == state  # saving again without a batch gives the same state
    assert same(taken(replicas), straight[2:])
    told = iter(loader(sharding=rows_over(2), other_randomness=True, **options))
    told.set_state(state)
    for got, want in zip(taken(told), straight[2:], strict=True):
        assert got["x"].tolist() == want["x"].tolist()
        assert got["u"].tolist() != want["u"].tolist()


def test_random_inputs_do_not_depend_on_the_number_of_shards():

    def scaled(number, scale):
        return number + 0, 3 * scale

    def run(sharding, state=None):
        operations = [RandomInputs(scale=lambda rng: rng.uniform(size=3).astype(np.float32))]
        options = {"graph": scaled, "output_map": ("x", "u"), "pad": "mask"}
        iterator = iter(loader(SAMPLER, None, operations, sharding=sharding, **options))
        if state:
            iterator.set_state(state)
        return iterator

    saved = run(rows_over(4))
    want = []
    for i, key in enumerate(keys(SAMPLER, 2 * N)):
        rng = np.random.Generator(np.random.Philox(key=5 + i))
        want.append((key, (np.float32(3) * rng.uniform(size=3).astype(np.float32)).tolist()))
    got = [
        (int(x[0]), u.tolist()) for batch in taken(saved, 3) for x, u in zip(batch["x"], batch["u"])
    ]
    assert got == want[: 3 * BATCH]
    rest = taken(run(None, saved.get_state()))
    for sharding in shardings():
        assert same(taken(run(sharding, saved.get_state())), rest)


# Records that can't be decoded


def broken(on_error="raise", bad=7, state=None, **options):
    """Returns an iterator over 12 images, one of them truncated, and the bad position."""
    sampler = INDEX(12, shuffle=True, num_epochs=2, seed=3)
    options = {"graph": decode, "output_map": ("x", "u"), "batch_size": 4, **options}
    made = loader(sampler, jpegs(12, bad), on_error=on_error, pad="mask", **options)
    iterator = iter(made)
    if state is not None:
        iterator.set_state(state)
    order = keys(sampler, 24)
    return iterator, order, [i for i, key in enumerate(order) if key == bad]


@pytest.mark.parametrize("shards", (1, 2))
def test_an_error_names_index_and_key_and_the_next_batch_follows(shards):
    iterator, order, where = broken(sharding=rows_over(shards))
    seen = []
    for step in range(6):
        own = [i for i in where if i // 4 == step]
        if own:
            with pytest.raises(RuntimeError, match=rf"record {own[0]} \(key 7\)"):
                next(iterator)
        else:
            seen.append((taken(iterator, 1)[0]["x"].ravel() // 8).tolist())
    want = [
        own for k, (own, _) in enumerate(cut(order, "drop", 4)) if k not in (i // 4 for i in where)
    ]
    assert seen == want
    assert next(iterator, None) is None


@pytest.mark.parametrize("on_error", ("skip", "mask"))
@pytest.mark.parametrize("shards", (1, 2))
def test_only_a_bad_record_or_its_batch_is_lost_and_states_resume(shards, on_error):
    options = {"sharding": rows_over(shards), "on_error": on_error}
    iterator, order, where = broken(**options)
    want = []
    for step, (own, _) in enumerate(cut(order, "drop", 4)):
        mask = [4 * step + row not in where for row in range(4)]
        if all(mask) or on_error == "mask":
            want.append([8 * key if good else None for key, good in zip(own, mask)])
    states, got = [], []
    for _ in want:
        states.append(iterator.get_state())
        got += taken(iterator, 1)
    assert next(iterator, None) is None
    for batch, values in zip(got, want, strict=True):
        assert batch["mask"].tolist() == [value is not None for value in values]
        valid = [value for value in values if value is not None]
        assert batch["x"][batch["mask"]].ravel().tolist() == valid
    assert [error.step for error in iterator.errors] == [i // 4 for i in where]
    for i, error in zip(where, iterator.errors, strict=True):
        assert f"record {i} (key 7)" in error.message
    for step, state in enumerate(states):
        again, _, _ = broken(state=state, **options)
        most = 99 if FULL or step == 0 else 3
        assert same(taken(again, most), got[step : step + most])


def test_a_bad_record_does_not_change_random_numbers():
    # A neighbor replaces it, so that the draws of all other records are unchanged.
    (with_bad, _, where), (without, _, _) = broken("mask"), broken(bad=None)
    got, want = taken(with_bad), taken(without)
    for step in range(6):
        rows = got[step]["mask"]
        assert got[step]["u"][rows].tolist() == want[step]["u"][rows].tolist()
    assert len(got) == 6 and len(where) == 2


class Failing(Source):
    """Fails once, like a network disk."""

    where = 9

    def __getitem__(self, index):
        if index == self.where and not hasattr(self, "failed"):
            self.failed = True
            raise OSError("disk")
        return super().__getitem__(index)


def test_the_state_after_an_error_of_the_source_matches_the_batches():
    sampler, got = INDEX(4 * BATCH, num_epochs=1), []
    iterator = iter(loader(sampler, Failing(numbers(4 * BATCH)), drop_remainder=True))
    for _ in range(9):
        try:
            batch = next(iterator, None)
        except OSError:
            continue
        if batch is None:
            break
        got.append(np.asarray(batch["x"])[:, 0].tolist())
        again = iter(loader(sampler, numbers(4 * BATCH), drop_remainder=True))
        again.set_state(iterator.get_state())
        end = got[-1][-1] == 4 * BATCH - 1
        assert records(again, 1) == ([] if end else [[n + BATCH for n in got[-1]]])
        again.close()
    assert end


def test_an_error_of_the_source_while_skipping_repeats_no_batch():
    # Two pipelines: after an error of the first, the second continues within the same call.
    source = Failing(jpegs(28, bad=5))
    source.where = 17
    iterator = iter(
        loader(
            *(INDEX(28, num_epochs=1), source),
            graph=lambda image: fn.crop(fn.decoders.image(image), crop=(1, 1))[:, :, 0],
            batch_size=4,
            sharding=rows_over(2),
            drop_remainder=True,
            on_error="skip",
        )
    )
    got, failed = [], 0
    for _ in range(9):
        try:
            got += [(np.asarray(b["x"])[:, 0, 0] // 8).tolist() for b in taken(iterator, 1)]
        except OSError:
            failed += 1
    assert failed <= 1
    assert got == [list(range(4 * k, 4 * k + 4)) for k in (0, 2, 3, 4, 5, 6)]


# States


def stateful(batch=BATCH, seed=5, count=N, **options):
    return iter(
        loader(INDEX(N, num_epochs=2, seed=seed), numbers(count), batch_size=batch, **options)
    )


def changed(**values):
    return lambda state: crafted(data_loader.FORM, state, **values)


# What differs in the iterator that saved the state, or in the state; and the error's words.
REFUSED = [
    ({"batch": 4}, r"batch_size: 4 -> 8"),
    ({"seed": 6}, "sampler: .*seed=6"),
    ({"count": 30}, r"data_source: Source\(30\) -> Source\(21\)"),
    (changed(version=4), "version: 4 -> 3.*newer"),
    (changed(more=1), "damaged: .*'more'.* are unknown"),
    (changed(step="1"), "damaged: step is '1'"),
    (changed(step=-1), "damaged: step is -1"),
    (changed(step=1000), "step: 1000 -> at most 6"),
    (changed(seed=-9), "seed: -9 -> 0"),
    (changed(seed=1 << 63), f"damaged: seed is {1 << 63}"),
    (lambda state: {**state, "step": 0}, "damaged: its digest"),
    (lambda state: [state], "not a state"),
    (lambda state: None, "not a state"),
]


@pytest.mark.parametrize("change,words", REFUSED)
def test_a_different_state_is_refused_without_effect(change, words):
    want = [own for own, _ in cut(2 * list(range(N)), "mask")]
    other = stateful(pad="mask", **(change if isinstance(change, dict) else {}))
    next(other)
    state = other.get_state()
    if callable(change):
        state = change(state)
    iterator = stateful(pad="mask")
    for step in range(2):
        before = iterator.get_state()
        with pytest.raises(ValueError, match=words):
            iterator.set_state(state)
        assert iterator.get_state() == before
        assert records(iterator, 1) == want[step : step + 1]


def test_a_state_of_another_graph_is_refused_when_the_graph_is_known():
    def build(graph):
        made = DALIDataLoader(
            numbers(4 * BATCH),
            INDEX(4 * BATCH, num_epochs=1),
            pipeline_fn=graph,
            output_map=["x"],
            batch_size=BATCH,
            drop_remainder=True,
            num_threads=1,
        )
        return iter(made)

    plain, drawn = (
        build(lambda number: number + 0),
        build(lambda number: number + fn.random.normal()),
    )
    next(plain)
    next(drawn)
    with pytest.raises(ValueError, match="operators.random.normal: .none. -> random.normal"):
        drawn.set_state(plain.get_state())
    fresh = build(lambda number: number + fn.random.normal())
    fresh.set_state(plain.get_state())
    with pytest.raises(ValueError, match="operators.random.normal: .none. -> random.normal"):
        next(fresh)


def test_skipping_a_batch_is_refused_over_shards():
    with pytest.raises(ValueError, match="would be a batch ahead.*'mask'"):
        loader(
            INDEX(4 * BATCH, num_epochs=1),
            numbers(4 * BATCH),
            drop_remainder=True,
            on_error="skip",
            shard_options=grain.sharding.ShardOptions(0, 2),
        )
