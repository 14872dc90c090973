"""DALITransform and DALIBatch: records of Grain through DALI, states, corrupt records, shards."""

import contextlib
import copy
import io
import json
import sys
import threading
import weakref

import absl.flags
import cloudpickle
import grain
import jax
import numpy as np
import pytest
from grain import experimental
from grain.experimental import assert_equal_output_after_checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, types
from PIL import Image
from sealing import crafted

from dalijax.adapters.grain import DALIBatch, DALITransform, pack_records
from dalijax.adapters.grain.transform import FORM, is_sliced
from dalijax.core.feeding.stream_engine import StreamEngine
from dalijax.errors import EpochError
from full import FULL, combinations, in_full

B = 4
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this file


def jpeg(i):
    """Returns image i, with 8 * i in every pixel; the encoded lengths differ."""
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 8 * i % 256, np.uint8)).save(file, "JPEG", quality=100)
    return file.getvalue()


BAD = jpeg(1)[: jpeg(1).index(b"\xff\xda") + 12]  # without pixels
NO_IMAGE = b"<html>"


def records(count=10, bad=(), instead=BAD):
    return [
        {"image": instead if i in bad else jpeg(i), "i": i, "key": f"k{i}"} for i in range(count)
    ]


def source(count=10, bad=(), instead=BAD):
    return grain.MapDataset.source(records(count, bad, instead))


def graph(image):
    return fn.decoders.image(image)[0, 0, 0], fn.random.uniform()


def decode(image):
    return fn.decoders.image(image)[0, 0, 0]


def transform(pipeline_fn=graph, **options):
    options = {"batch_size": B, "output_map": ["x", "u"], "num_threads": 1, **options}
    return DALITransform(pipeline_fn, **options)


def taken(iterator):
    """Returns the next batch as lists, or the error's text."""
    try:
        return {k: np.asarray(v).tolist() for k, v in next(iterator).items()}
    except RuntimeError as error:
        return str(error)


def walk(iterator):
    out = []
    with contextlib.suppress(StopIteration):
        while True:
            out.append(taken(iterator))
    return out


def numbers(batches):
    return [batch["i"] for batch in batches]


def chunks(values, size=B):
    return [values[i : i + size] for i in range(0, len(values), size)]


# Origin of records, and the last batch

SOURCES = {
    "MapDataset": lambda n: source(n),
    "records": lambda n: source(n).to_iter_dataset(),
    "lists": lambda n: source(n).to_iter_dataset().batch(B, batch_fn=list),
    "lists of a MapDataset": lambda n: source(n).batch(B, batch_fn=list).to_iter_dataset(),
    "packed": lambda n: source(n).batch(B, batch_fn=pack_records).to_iter_dataset(),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("count", (1, 3, 4, 8, 10))
def test_batches_and_the_last_one(make, count):
    want = chunks(list(range(count)))
    got = walk(iter(make(count).pipe(transform())))
    assert numbers(got) == want
    for batch, own in zip(got, want):
        assert batch["x"] == [8 * i for i in own]
        assert batch["key"] == [f"k{i}" for i in own]
        assert len(batch["u"]) == len(own)
    whole = [own for own in want if len(own) == B]
    assert numbers(walk(iter(make(count).pipe(transform(drop_remainder=True))))) == whole
    for batch, own in zip(walk(iter(make(count).pipe(transform(pad="mask")))), want, strict=True):
        padding = B - len(own)
        assert batch["mask"] == [True] * len(own) + [False] * padding
        assert batch["i"] == own + own[-1:] * padding
        assert batch["x"] == [8 * i for i in batch["i"]]


def test_a_parent_with_another_batch_size_is_refused_and_smaller_lists_are_batches():
    lists = source(10).batch(B + 1, batch_fn=list).to_iter_dataset()
    with pytest.raises(ValueError, match="lists of 5 records, but a batch has 4 records"):
        next(iter(lists.pipe(transform())))
    lists = source(10).batch(3, batch_fn=list).to_iter_dataset()
    assert numbers(walk(iter(lists.pipe(transform())))) == chunks(list(range(10)), 3)


def test_drop_remainder_drops_the_rest_of_each_epoch():
    ds = source(10).batch(B, batch_fn=list).repeat(2).to_iter_dataset()
    got = walk(iter(ds.pipe(transform(drop_remainder=True))))
    assert numbers(got) == chunks(list(range(8))) * 2


def test_an_empty_dataset_has_no_batches():
    assert walk(iter(grain.MapDataset.source([]).pipe(transform()))) == []


WRONG = [
    (dict(pad="x"), "pad must be None or 'mask', not 'x'"),
    (dict(pad="mask", drop_remainder=True), "there is nothing to pad. Omit one"),
    (dict(batch_size=0), "batch_size must be a whole number of records, 1 or more, not 0"),
    (dict(prefetch=0), "prefetch must be a whole number of batches, 1 or more, not 0"),
    (dict(pad="mask", output_map=["mask", "u"]), r"named '(mask|x|plus)' already.*mask='valid'"),
]


@pytest.mark.parametrize("options,words", WRONG)
def test_wrong_arguments_raise_at_the_constructor(options, words):
    with pytest.raises(ValueError, match=words):
        transform(**options)


@pytest.mark.parametrize("options,words", [
    (dict(on_error="x"), "on_error must be 'raise', 'skip' or 'mask', not 'x'"),
    (dict(on_error="mask"), "requires a mask, which marks bad records: pass pad='mask'"),
    (dict(nonsense=3), "has no argument"),
    (dict(drop_remaindr=True), r"no argument \['drop_remaindr'\] \(did you mean 'drop_remainder'"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wrong_arguments_raise_when_iterating(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        iter(source().pipe(transform(**options)))


# States


def test_states_are_short_json_and_build_nothing():
    built = []

    def counted(image):
        built.append(1)
        return graph(image)

    iterator = iter(source(10).seed(2**32 - 1).pipe(transform(counted)))
    states = [iterator.get_state()]
    again = iter(source(10).seed(2**32 - 1).pipe(transform(counted)))
    again.set_state(states[0])
    assert again.get_state() == states[0] and not built
    for _ in range(3):
        next(iterator)
        states.append(iterator.get_state())
    assert [state["parent"] for state in states] == [{"next_index": k} for k in range(4)]
    for state in states:
        assert state == json.loads(json.dumps(state))
        # The operators of the graph, with their arguments, name what differs.
        assert len(json.dumps(state)) < 1000 + len(json.dumps(state["parent"]))
        assert {k: type(v) for k, v in state.items()} == {
            **dict.fromkeys(("format", "kind", "failed", "data", "digest"), str),
            **dict.fromkeys(("version", "step", "records", "skip"), int),
            "parent": dict,
        }


def test_states_are_taken_while_another_thread_iterates():
    ds = source(12).repeat(15).pipe(transform())
    iterator = iter(ds)
    known = [iterator.get_state()]
    for _ in iterator:
        known.append(iterator.get_state())
    iterator, seen, over = iter(ds), [], threading.Event()

    def look():
        while not over.is_set():
            seen.append(iterator.get_state())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in iterator:
        pass
    over.set()
    thread.join()
    assert all(state == known[state["step"]] for state in seen) and seen
    assert [s["step"] for s in seen] == sorted(s["step"] for s in seen)


OTHERS = {
    "seed": dict(seed=1),
    "graph": dict(pipeline_fn=lambda image: (decode(image), fn.random.normal())),
    "batch": dict(batch_size=B, sharding=True, pad="mask"),
}


def other(name):
    options = dict(OTHERS[name])
    if "sharding" in options:
        options["sharding"] = over(2)
    iterator = iter(source(20).pipe(transform(**options)))
    next(iterator)
    return iterator.get_state()


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_graph_or_seed_is_refused_without_effect(name):
    whole = walk(iter(source(20).pipe(transform())))
    iterator = iter(source(20).pipe(transform(seed=0)))  # if omitted, it would be the state's
    next(iterator)
    before = iterator.get_state()
    with pytest.raises(ValueError, match="(?s)saved -> now.*(operators|seed|last_batch).*->"):
        iterator.set_state(other(name))
    assert iterator.get_state() == before
    assert walk(iterator) == whole[1:]


@pytest.mark.parametrize("size", [B // 2, 2 * B])
def test_a_different_batch_size_is_named(size):
    iterator = iter(source(10).pipe(transform()))
    next(iterator)
    with pytest.raises(
        ValueError, match=r"rows: .* -> .*source resumes with another batch size, a DALITransf"
    ):
        iter(source(10).pipe(transform(batch_size=size))).set_state(iterator.get_state())


def interleaved(cycle_length):
    """Interleaves lists of eight records from several iterators, like workers."""
    parts = [source(8).batch(2, batch_fn=list)[k::4].to_iter_dataset() for k in range(4)]
    if not cycle_length:
        return experimental.ZipIterDataset(parts[:1]).map(lambda lists: lists[0])
    return experimental.InterleaveIterDataset(parts, cycle_length=cycle_length).map(
        lambda each: each
    )


@pytest.mark.parametrize("now", (0, 1, 2, 3, 4))
def test_a_state_of_another_number_of_workers_is_refused_without_effect(now):
    saved = iter(interleaved(2).pipe(transform()))
    next(saved)
    state = saved.get_state()
    iterator = iter(interleaved(now).pipe(transform()))
    before = iterator.get_state()
    if now == 2:
        iterator.set_state(state)
        assert numbers(walk(iterator)) == numbers(walk(saved))
        return
    refusal = (
        f"(?s)Grain interleaves .num_workers of mp_prefetch.: 2 -> {now}.*Recreate the iterator"
    )
    with pytest.raises(ValueError, match=refusal if now else "parent rejects|2 -> 0"):
        iterator.set_state(state)
    assert iterator.get_state() == before
    fresh = iter(interleaved(now).pipe(transform()))
    assert numbers(walk(iterator)) == numbers(walk(fresh))


def test_packed_batches_of_a_map_dataset_raise_with_the_fix():
    packed = source(10).batch(B, batch_fn=pack_records)
    with pytest.raises(TypeError, match=r"to_iter_dataset\(\) before the transform"):
        next(iter(packed.pipe(transform())))


def test_a_refused_state_stays_refused():
    iterator = iter(source(20).pipe(transform()))
    iterator.set_state(other("graph"))  # unknown before the pipelines are built
    for _ in range(2):
        with pytest.raises(ValueError, match="operators.random.normal"):
            next(iterator)


@pytest.mark.parametrize("state", (None, {}, {"parent": {}}, {"step": "1"}, 3))
def test_invalid_states_are_refused(state):
    iterator = iter(source().pipe(transform()))
    with pytest.raises(ValueError, match="not a state of dalijax.*iterator over a DALITransform"):
        iterator.set_state(state)
    assert len(walk(iterator)) == 3


# Grain's tools on top

TOOLBOX = {
    "thread": lambda ds: experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    "threads": lambda ds: experimental.multithread_prefetch(ds, 2, 2),
    "map": lambda ds: ds.map(lambda batch: {"u": batch["u"] * 2}),
    "random_map": lambda ds: ds.seed(3).random_map(lambda b, rng: b["u"] * rng.uniform()),
    "filter": lambda ds: ds.filter(lambda batch: batch["i"][0] != 4),
    "mix": lambda ds: grain.IterDataset.mix([ds, ds], [0.3, 0.7]),
    "zip": lambda ds: experimental.ZipIterDataset([ds, ds]),
    "repeat": lambda ds: experimental.RepeatIterDataset(ds, 2),
    "limit": lambda ds: experimental.LimitIterDataset(ds, 2),
    "shuffle": lambda ds: experimental.WindowShuffleIterDataset(ds, window_size=2, seed=1),
    "deepcopy": copy.deepcopy,
    "pickle": lambda ds: cloudpickle.loads(cloudpickle.dumps(ds)),
}


@pytest.mark.parametrize("wrap", TOOLBOX.values(), ids=TOOLBOX)
def test_checkpoints_work_with_grains_tools(wrap):
    assert_equal_output_after_checkpoint(wrap(source(10).seed(5).pipe(transform())))


def test_copies_have_equal_batches_and_transforms_are_reusable():
    ds = source(10).seed(5).pipe(transform())
    want = walk(iter(ds))
    for wrap in (copy.deepcopy, TOOLBOX["pickle"], lambda same: same):
        assert walk(iter(wrap(ds))) == want


# Two batches each: every restore starts its workers again.
SELECTED = ("packed 1", "behind 1")
WORKERS = {
    "before 1": lambda n: SOURCES["lists"](8).mp_prefetch(workers(1)).pipe(transform()),
    "before 2": lambda n: SOURCES["lists"](8).mp_prefetch(workers(2)).pipe(transform()),
    "packed 1": lambda n: SOURCES["packed"](8).mp_prefetch(workers(1)).pipe(transform()),
    "packed 2": lambda n: SOURCES["packed"](8).mp_prefetch(workers(2)).pipe(transform()),
    "behind 1": lambda n: source(8).pipe(transform()).mp_prefetch(workers(1)),
    "behind 2": lambda n: source(8).pipe(transform()).mp_prefetch(workers(2)),
}


def workers(count):
    absl.flags.FLAGS.mark_as_parsed()
    return grain.MultiprocessingOptions(count)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "make",
    [make if name in SELECTED else in_full(make) for name, make in WORKERS.items()],
    ids=WORKERS,
)
def test_checkpoints_work_with_worker_processes(make):
    assert_equal_output_after_checkpoint(make(8))


PREFETCHED = {
    "threads": lambda ds: experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=1),
    "a process": lambda ds: ds.mp_prefetch(workers(1)),
    "two processes": in_full(lambda ds: ds.mp_prefetch(workers(2))),
    "another map": lambda ds: ds.map(lambda batch: batch),
}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("prefetched", PREFETCHED.values(), ids=PREFETCHED)
def test_the_default_seed_does_not_depend_on_prefetching(prefetched):
    def drawn(image, draw):
        return fn.decoders.image(image)[0, 0, 0], fn.random.uniform(), draw.uniform(0, 1)

    def batches(ds):
        return walk(iter(ds.pipe(transform(drawn, output_map=["x", "u", "v"]))))

    def packed(seed):
        return source(8).seed(seed).batch(B, batch_fn=pack_records).to_iter_dataset()

    want = batches(packed(5))
    assert batches(prefetched(packed(5))) == want
    assert batches(source(8).seed(5)) == want
    assert batches(packed(6)) != want


def test_slices_are_found_before_workers():
    """Grain hides the dataset before mp_prefetch."""
    whole = source(8).batch(B, batch_fn=pack_records).to_iter_dataset()
    sliced = source(8)[0::1].batch(B, batch_fn=pack_records).to_iter_dataset()
    for count in (1, 2):
        assert is_sliced(sliced.mp_prefetch(workers(count)))
        assert not is_sliced(whole.mp_prefetch(workers(count)))


def test_the_element_spec_has_shapes_and_dtypes():
    spec = experimental.get_element_spec(source().pipe(transform()))
    kinds = {k: (tuple(v.shape), np.dtype(v.dtype)) for k, v in spec.items()}
    number, text = np.dtype(np.int64), np.dtype(object)
    assert kinds["i"] == ((None,), number) and kinds["key"] == ((None,), text)
    assert kinds["u"] == ((None,), np.dtype(np.float32))
    for options in (dict(drop_remainder=True), dict(pad="mask")):
        spec = experimental.get_element_spec(source().pipe(transform(**options)))
        assert tuple(spec["x"].shape) == (B,)


def test_the_element_spec_of_nested_records():
    nested = grain.MapDataset.source([{"image": jpeg(i), "m": {"a": i}} for i in range(4)])
    spec = experimental.get_element_spec(nested.pipe(transform()))
    assert tuple(spec["m"]["a"].shape) == (None,)


# Records that DALI can't decode

ONE = [((k,), 1) for k in range(4, 8)] + [((0,), 0), ((9,), 2)]
SEVERAL = [((4, 6), 1), ((4, 5, 6), 1), ((4, 5, 6, 7), 1)]


def without(batches, bad, masked):
    """Returns the expected result of a run with bad records in a batch, from a clean run."""
    out = []
    for batch in copy.deepcopy(batches):
        gone = [k for k, i in enumerate(batch["i"]) if i in bad and batch["mask"][k]]
        out.append(batch)
        if gone and masked:
            good = [batch["mask"][k] and k not in gone for k in range(B)]
            out[-1] = {"mask": good, "rows": good, **{k: batch[k] for k in ("x", "u", "i")}}
        elif gone:
            out[-1] = None
    return out


def compare(got, want, how):
    """Checks that bad batches are errors, or skipped, or have the valid rows of the clean run."""
    if how == "skip":
        want = [batch for batch in want if batch is not None]
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if b is None:
            assert isinstance(a, str)
            continue
        assert a["mask"] == b["mask"] and a["u"] == b["u"]
        for name in ("x", "i"):
            pairs = zip(a[name], b[name], b["mask"])
            assert all(x == y for x, y, valid in pairs if valid)


CORRUPT = [(*records, BAD) for records in ONE + SEVERAL]
CORRUPT += [(*records, NO_IMAGE) for records in ONE[3:] + SEVERAL]


@pytest.mark.parametrize(("how", "records"), combinations(3, ("raise", "skip", "mask"), CORRUPT))
def test_a_corrupt_record_changes_no_other_batch_and_no_random_number(how, records, caplog):
    bad, step, instead = records
    clean = walk(iter(source(10).pipe(transform(pad="mask"))))
    want = without(clean, bad, how == "mask")
    ds = source(10, bad, instead).pipe(transform(pad="mask", on_error=how))
    iterator = iter(ds)
    got, states = [], [iterator.get_state()]
    while len(got) < 3 - (how == "skip"):
        got.append(taken(iterator))
        states.append(iterator.get_state())
    assert walk(iterator) == []
    compare(got, want, how)
    told = [got[step]] if how == "raise" else [one.message for one in iterator.errors]
    lead = "" if instead is BAD else "DALI can't take "
    name = f"record {bad[0]} of the stream (image of {len(instead)} bytes, first "
    outcome = "has bad records" if how == "mask" else "failed, and counts as delivered"
    head = f"batch {step} {outcome}: {lead}{name}{instead[:12]!r}"
    assert len(told) == 1 and told[0].startswith(head) and f"key 'k{bad[0]}'" in told[0]
    assert instead is not BAD or " can't be decoded: " in told[0]
    assert all(f"record {i} of the stream" in told[0] for i in bad)
    if how != "raise":
        assert [one.step for one in iterator.errors] == [step]
    for at, state in enumerate(states):
        if len(bad) == B and at == step:
            continue  # the next test
        again = iter(ds)
        again.set_state(json.loads(json.dumps(state)))
        assert walk(again) == got[at:]


@pytest.mark.parametrize("how", ("raise", "skip", "mask"))
def test_a_record_that_failed_is_known_in_later_epochs(how):
    """Only its first occurrence costs runs that search for it; its values identify it."""
    ds = source(12, (5,)).repeat(3)
    options = {"pad": "mask", "on_error": how, "output_map": ["x"]}
    make = transform(decode, **options)
    iterator = iter(ds.pipe(make))
    engine, searches = iterator._engine, []
    search = engine._run_alone
    engine._run_alone = lambda *args: searches.append(engine.step) or search(*args)
    got, states = [], []
    with contextlib.suppress(StopIteration):
        while True:
            states.append(iterator.get_state())
            got.append(taken(iterator))
    assert searches and max(searches) <= 1
    told = [one for one in got if isinstance(one, str)] + [e.message for e in iterator.errors]
    assert len(told) == 3
    for epoch, text in enumerate(sorted(told)):
        assert f"record {5 + 12 * epoch} of the stream" in text and " can't be decoded: " in text
    for state, want in zip(states[1:], got[1:]):  # an iterator that has not seen it
        fresh = iter(ds.pipe(make))
        fresh.set_state(state)
        assert taken(fresh) == want


@pytest.mark.parametrize("how", ("raise", "skip", "mask"))
@pytest.mark.parametrize("bad", (range(4), range(4, 8)), ids=("first", "resumed"))
def test_a_wholly_corrupt_first_batch(how, bad):
    clean = walk(iter(source(10).pipe(transform(pad="mask"))))
    iterator = iter(source(10).pipe(transform(pad="mask")))
    steps = bad[0] // B
    for _ in range(steps):
        next(iterator)
    again = iter(source(10, bad).pipe(transform(pad="mask", on_error=how)))
    again.set_state(iterator.get_state())
    compare(walk(again), without(clean, bad, how == "mask")[steps:], how)


def test_masking_without_a_replacement_record_raises_and_continues():
    # If skipped, one of several processes would be a batch ahead of the others.
    bad = range(4, 48)
    iterator = iter(source(48, bad).pipe(transform(pad="mask", on_error="mask")))
    steps = [taken(iterator) for _ in range(12)]
    assert numbers(steps[:1]) == [[0, 1, 2, 3]] and walk(iterator) == []
    for step, text in enumerate(steps[1:], 1):
        head = f"batch {step} failed, and counts as delivered: record {B * step} of the stream"
        assert text.startswith(head) and " can't be decoded: " in text
    assert iterator.errors == ()


def test_a_stream_does_not_search_for_a_good_batch_forever(monkeypatch):
    if not FULL:
        monkeypatch.setattr(StreamEngine, "_most_skipped", 32)  # instead of 1024, for 17 seconds
    endless = grain.MapDataset.source([{"image": BAD, "i": 0}]).repeat(None).to_iter_dataset()
    with pytest.raises(EpochError, match=r"^\d+ batches in a row failed"):
        next(iter(endless.pipe(transform(on_error="skip"))))


def test_a_failure_after_a_skipped_batch_loses_nothing():
    class Late:
        def __init__(self, fails):
            self.fails = fails

        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 8 and self.fails:
                self.fails -= 1
                raise OSError("disk")
            return {"image": BAD if index == 4 else jpeg(index), "i": index}

    def of(fails):
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        ds = grain.MapDataset.source(Late(fails)).to_iter_dataset(options)
        return iter(ds.pipe(transform(on_error="skip")))

    want, iterator = walk(of(0)), of(1)
    assert numbers(want) == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]
    got = [taken(iterator)]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    state = iterator.get_state()
    got += walk(iterator)
    assert numbers(got) == [[0, 1, 2, 3], [9, 10, 11, 12], [13, 14, 15]]  # 8 raised, once
    (skipped,) = iterator.errors
    assert skipped.step == 1 and skipped.files
    assert all(name in skipped.message for name in skipped.files)
    again = of(0)
    again.set_state(state)
    assert walk(again) == got[1:]


def test_a_repaired_batch_that_cannot_be_placed_is_consumed():
    big = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(big, "JPEG")
    own = records(12, (1,))
    own[2]["image"] = big.getvalue()
    made = transform(lambda image: fn.decoders.image(image), output_map=["x"],
                     on_error="mask", pad="mask")  # fmt: skip
    iterator = iter(grain.MapDataset.source(own).pipe(made))
    with pytest.raises(ValueError, match="ragged"):
        next(iterator)
    assert numbers(walk(iterator)) == [[4, 5, 6, 7], [8, 9, 10, 11]]


# Over a mesh


def over(shards, copies=1, order=None):
    devices = np.array(jax.devices())[order or range(shards * copies)]
    mesh = Mesh(devices.reshape(shards, copies), ("rows", "copies"))
    return NamedSharding(mesh, PartitionSpec("rows"))


@pytest.mark.parametrize("sharding", [(2,), (4,), (2, 4), (4, 2, [7, 1, 5, 0, 2, 4, 6, 3])])
def test_batches_are_global_arrays_with_the_right_rows(sharding):
    sharding = over(*sharding)
    ds = source(10).pipe(transform(sharding=sharding, pad="mask"))
    iterator = iter(ds)
    first = iterator.get_state()
    for k, batch in enumerate(iterator):
        own = [min(i, 9) for i in range(B * k, B * k + B)]
        want = {
            "x": np.array([8 * i for i in own], np.uint8),
            "i": np.array(own),
            "mask": np.arange(B * k, B * k + B) < 10,
        }
        for name, values in want.items():
            assert batch[name].sharding.is_equivalent_to(sharding, 1)
            for shard in batch[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, values[shard.index])
        assert list(batch["key"]) == [f"k{i}" for i in own]
        assert len(set(np.asarray(batch["u"]).tolist())) == B  # each shard has its own numbers
    iterator.set_state(first)
    whole = walk(iterator)
    iterator.set_state(first)
    next(iterator)
    again = iter(ds)
    again.set_state(iterator.get_state())
    assert walk(again) == whole[1:]


def test_a_shard_masks_its_corrupt_record():
    ds = source(8, (5,)).pipe(transform(sharding=over(4), pad="mask", on_error="mask"))
    got = walk(iter(ds))
    assert [batch["mask"] for batch in got] == [[True] * 4, [True, False, True, True]]
    assert got[1]["i"][0] == 4 and got[1]["i"][2:] == [6, 7]


def test_a_sharding_needs_complete_divisible_batches():
    with pytest.raises(ValueError, match=r"drop_remainder=True to drop it, or pad='mask'"):
        transform(sharding=over(2))
    with pytest.raises(ValueError, match="batch_size=4 is not divisible by the 8 data shards"):
        source().pipe(transform(sharding=over(8), pad="mask"))
    with pytest.raises(ValueError, match="device_id=0 together with sharding"):
        source().pipe(transform(sharding=over(2), pad="mask", device_id=0))


# DALIBatch in an unchanged DataLoader


class Listed(list):
    def __repr__(self):
        return f"Listed({len(self)})"


def loader(count, *operations, worker_count=0, **options):
    sampler = grain.samplers.IndexSampler(count, num_epochs=1, shuffle=False, seed=3, **options)
    return grain.DataLoader(
        data_source=Listed(records(count)),
        sampler=sampler,
        operations=operations,
        worker_count=worker_count,
    )


def operation(pipeline_fn=decode, size=B, names=("x",), **options):
    return DALIBatch(pipeline_fn, size, names, num_threads=1, **options)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("count,want", [
    (0, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    in_full(1, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    (2, [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]),  # Grain batches in each worker
])  # fmt: skip
def test_batches_of_an_unchanged_loader_and_its_state(count, want):
    workers(count)
    made = loader(10, operation(), worker_count=count)
    iterator = iter(made)
    got = [next(iterator)]
    state = iterator.get_state()
    got += list(iterator)
    for batch, own in zip(got, want, strict=True):
        assert batch["i"].tolist() == own and batch["x"].tolist() == [8 * i for i in own]
    again = iter(made)
    again.set_state(state)
    assert numbers(walk(again)) == want[1:]


def test_the_operation_pickles_after_use_and_pads_or_drops():
    used = operation(pad="mask")
    assert used.batch_fn(records(2))["mask"].tolist() == [True, True, False, False]
    again = cloudpickle.loads(cloudpickle.dumps(used))
    assert again.batch_fn(records(3))["x"].tolist() == [0, 8, 16, 16]
    assert numbers(walk(iter(loader(10, operation(drop_remainder=True))))) == chunks(list(range(8)))


def test_the_operation_serves_the_threads_of_a_map_dataset():
    ds = source(120).batch(B, batch_fn=operation().batch_fn)
    read = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
    got = list(ds.to_iter_dataset(read))
    assert [batch["i"].tolist() for batch in got] == chunks(list(range(120)))
    assert all((batch["x"] == batch["i"] * 8 % 256).all() for batch in got)
    assert ds[7]["i"].tolist() == [28, 29, 30, 31]  # and random access


def test_a_batch_operation_that_loses_the_function_is_refused():
    """Kauldron calls ds.batch() like this, for each operation that is a grain.Batch."""
    for own in (operation(), operation(drop_remainder=True)):
        with pytest.raises(TypeError, match="without its batch_fn.*override _apply_batch"):
            source(8).batch(own.batch_size, drop_remainder=own.drop_remainder)
        with pytest.raises(TypeError, match="without its batch_fn"):
            source(8).to_iter_dataset().batch(own.batch_size)
        got = source(8).batch(own.batch_size, batch_fn=own.batch_fn)
        assert [batch["x"].tolist() for batch in got] == [[0, 8, 16, 24], [32, 40, 48, 56]]
        assert numbers(walk(iter(source(8).apply([own]).to_iter_dataset()))) == chunks([*range(8)])


def test_graphs_that_draw_are_always_refused_in_an_operation():
    own = operation(graph, names=["x", "u"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'__Uniform_\d+'.*each record by RandomInputs"):
            own.batch_fn(records(4))
    with pytest.raises(ValueError, match="can't skip a batch. Use 'mask'"):
        operation(on_error="skip")


def test_an_operation_names_or_masks_a_corrupt_record_and_continues():
    own = operation()
    with pytest.raises(RuntimeError, match=r"record 2 of the batch \(image of \d+ bytes.*'k2'"):
        own.batch_fn(records(4, (2,)))
    assert own.batch_fn(records(4))["x"].tolist() == [0, 8, 16, 24]
    masks = operation(on_error="mask", pad="mask")
    assert masks.batch_fn(records(4, (2,)))["mask"].tolist() == [True, True, False, True]


def test_an_operation_continues_after_unequal_records():
    own = operation()
    own.batch_fn(records(4))
    with pytest.raises(ValueError, match="image is float32"):
        own.batch_fn([{"image": np.zeros((2, 2), np.float32), "i": 0, "key": ""}])
    assert own.batch_fn(records(4))["x"].tolist() == [0, 8, 16, 24]


def test_an_operation_continues_after_a_wholly_corrupt_first_batch():
    masks = operation(on_error="mask", pad="mask")
    # Batch by batch: Grain's prefetching ends in an IndexError after any error.
    batches = source(8, range(4)).batch(B, batch_fn=masks.batch_fn)
    with pytest.raises(RuntimeError, match=r"record 0 of the batch \(.*\) can't be decoded"):
        batches[0]
    assert batches[1]["i"].tolist() == [4, 5, 6, 7]


# Failures that must not lose records


def test_random_numbers_of_a_failed_batch_are_not_drawn_again(caplog):
    def sometimes(x):
        start = fn.cast(fn.random.uniform(range=(-0.49, 0.52)), dtype=types.INT32)
        return fn.slice(x, start, 1, axes=[0], out_of_bounds_policy="error")

    records = [{"x": np.full(1, i, np.int32)} for i in range(400)]
    made = DALITransform(sometimes, batch_size=B, output_map=["x"], on_error="skip", num_threads=1)
    iterator = iter(grain.MapDataset.source(records).pipe(made))
    states, whole = [], []
    for batch in iterator:
        whole.append(batch["x"].ravel().tolist())
        states.append(iterator.get_state())
    assert 0 < len(iterator.errors) < 40 and len(whole) == 100 - len(iterator.errors)
    other = iter(grain.MapDataset.source(records).pipe(made))
    other.set_state(states[40])
    assert [batch["x"].ravel().tolist() for batch in other] == whole[41:]


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which would end pytest."""


@pytest.mark.parametrize("where", ("_after", "_batch", "_next_outcome"))
def test_an_interrupted_batch_is_delivered_later_with_its_records(where):
    ds = source(40).pipe(transform())
    whole = walk(iter(ds))
    iterator = iter(ds)
    engine = iterator._engine
    taken = [next(iterator)]
    real = getattr(engine, where)
    for after in (False, True):  # in the middle of the call

        def broken(*args, after=after):
            if after:
                real(*args)
            raise Interrupt

        state = iterator.get_state()
        setattr(engine, where, broken)
        with pytest.raises(Interrupt):
            next(iterator)
        delattr(engine, where)
        assert iterator.get_state() == state
        taken.append(next(iterator))
    taken += list(iterator)
    for got, want in zip(taken, whole, strict=True):
        assert all(np.array_equal(got[k], want[k]) for k in want)


def test_next_may_be_called_from_several_threads():
    ds = source(200).pipe(transform())
    want = {tuple(batch["i"].tolist()): batch["x"].tobytes() for batch in ds}
    iterator, got, failed = iter(ds), [], []

    def take():
        try:
            for batch in iterator:
                got.append((tuple(batch["i"].tolist()), batch["x"].tobytes()))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and dict(got) == want and len(got) == len(want)


def test_a_dropped_iterator_frees_its_pipelines_at_once():
    import gc

    iterator = iter(source(20).pipe(transform()))
    next(iterator)
    pipelines = weakref.WeakSet(iterator._engine._runner.pipelines)
    gc.disable()
    try:
        del iterator
        assert not [p for p in pipelines if p._pipe is not None]
    finally:
        gc.enable()


def test_states_are_copied():
    iterator = iter(source(20).pipe(transform()))
    next(iterator)
    state = iterator.get_state()
    before = json.dumps(state)
    state["parent"]["next_index"] = 3
    assert json.dumps(iterator.get_state()) == before
    given = json.loads(before)
    iterator.set_state(given)
    given["parent"]["next_index"] = 3
    assert json.dumps(iterator.get_state()) == before


@pytest.mark.parametrize("parent", (None, {}, {"next_index": 10**9}, {"other": 1}))
def test_a_state_that_the_parent_refuses_has_no_effect(parent):
    ds = source(20).pipe(transform())
    whole = walk(iter(ds))
    iterator = iter(ds)
    next(iterator)
    state = iterator.get_state()
    words = "state of another dataset|the parent rejects its part of the state"
    with pytest.raises(ValueError, match=words):
        iterator.set_state(crafted(FORM, state, parent=parent))
    assert walk(iterator) == whole[1:]
