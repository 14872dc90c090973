"""Random states: computed for any step without running, short, and resumed bit for bit."""

import json
import re

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn, pipeline_def, types

from dalijax.adapters.grain import DALIBatch, DALIDataLoader, DALITransform, RandomInputs
from dalijax.core.formats import protobuf
from dalijax.core.state.random_state import after_runs, compress, expand, stateful, to_other_device
from dalijax.errors import StateError
from full import in_full

BATCH = 3
MANY = [f"o{k}" for k in range(12)]
STEPS = (0, 1, 2, 3, 10, 40)
IMAGE = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)


def many(image):
    """A graph with an operator of each kind that draws."""
    return (
        fn.random.uniform(),
        fn.random.uniform(range=(5.0, 7.0), shape=[3]),
        fn.random.normal(shape=[3]),
        fn.random.coin_flip(probability=0.3),
        fn.random.choice(10, shape=[4]),
        fn.random.beta(alpha=2.0, beta=3.0),
        fn.batch_permutation(),
        fn.random_resized_crop(image, size=(4, 4)),
        fn.roi_random_crop(image, crop_shape=[2, 2, 3], roi_start=[0, 0, 0], roi_end=[4, 4, 3]),
        fn.noise.gaussian(image, stddev=5.0),
        fn.noise.shot(image, factor=5.0),
        fn.noise.salt_and_pepper(image, prob=0.3),
    )


def plain(image):
    return image


def built(graph, checkpoint=None, sizes=None, **call):
    """Builds a plain DALI pipeline; ``sizes`` are its batch sizes, repeated."""
    call = {"batch_size": BATCH, "num_threads": 1, "device_id": None, "seed": 0, **call}
    sizes = sizes or [call["batch_size"]]

    @pipeline_def(enable_checkpointing=True, checkpoint=checkpoint, **call)
    def definition():
        image = fn.external_source(
            source=lambda index: [IMAGE] * sizes[index % len(sizes)],
            batch=True,
            dtype=types.UINT8,
            ndim=3,
        )
        return graph(image)

    pipeline = definition()
    pipeline.build()
    return pipeline


def outputs(pipeline):
    return [np.asarray(one.as_tensor()) for one in pipeline.run()]


def checkpoints(graph, count, **options):
    pipeline = built(graph, **options)
    made = [pipeline.checkpoint()]
    for _ in range(count):
        pipeline.run()
        made.append(pipeline.checkpoint())
    return made


def alike(a, b):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, other)


# The checkpoint after some runs


@pytest.mark.parametrize("depth", (1, 3))
@pytest.mark.parametrize("runs", STEPS)
def test_the_checkpoint_after_runs_resumes_like_a_pipeline_that_ran(runs, depth):
    told = after_runs(runs, *checkpoints(many, 2))
    ran = built(many, prefetch_queue_depth=depth)
    for _ in range(runs):
        ran.run()
    restored = built(many, told, prefetch_queue_depth=depth)
    for _ in range(3):
        alike(outputs(restored), outputs(ran))


def test_all_numbers_of_the_checkpoint_after_runs_equal_dalis():
    real = checkpoints(many, 40)
    number = re.compile(rb"[0-9A-F]{16}:[0-9A-F]{16}")
    for runs, own in enumerate(real):
        assert number.findall(after_runs(runs, *real[:3])) == number.findall(own)
    assert len(number.findall(real[0])) == 12


@pytest.mark.parametrize("graph", (plain, many))
def test_the_count_of_runs_stays_at_its_start(graph):
    real = checkpoints(graph, 2)
    assert after_runs(0, *real) == real[0]
    assert b'"iter": 0,' in after_runs(7, *real)


def test_numbers_carry_over_all_digits():
    def text(n):
        return b"Philox_000000009D2F70B9_%016X:0000000000000000_0" % n

    for step in (0, 1, 255, 2**33):
        for start in (0, 2**32 - 1, 2**40):
            zero, one, two = (text(start + k * step) for k in range(3))
            assert after_runs(1000, zero, one, two) == text(start + 1000 * step)


UNEVEN = {
    "another step": lambda c: c.replace(b"_0000000000000006:", b"_0000000000000007:"),
    "a step back": lambda c: c.replace(b"_0000000000000006:", b"_0000000000000000:"),
    "another text": lambda c: c.replace(b"_0\n", b"_1\n"),
    "another operator": lambda c: c.replace(b"__Uniform_1", b"__Uniform_2"),
    "longer": lambda c: c + b"0000000000000000",
}


@pytest.mark.parametrize("change", UNEVEN.values(), ids=UNEVEN)
def test_operators_that_advance_unevenly_are_refused_with_the_fix(change):
    zero, one, two = checkpoints(lambda image: fn.random.uniform(), 2)
    assert change(two) != two
    with pytest.raises(StateError, match="is unknown, so.*RandomInputs"):
        after_runs(3, zero, one, change(two))


def test_batches_of_several_sizes_advance_unevenly():
    real = checkpoints(lambda image: (image, fn.random.uniform()), 2, sizes=[3, 2])
    with pytest.raises(StateError, match="of a random operator .* is unknown"):
        after_runs(3, *real)


def test_a_number_that_goes_down_is_refused():
    texts = [b"x_%016X_" % n for n in (9, 8, 7)]
    with pytest.raises(StateError, match="of a random operator .* is unknown"):
        after_runs(3, *texts)


def test_operators_with_and_without_a_state_are_distinguished():
    assert stateful() == stateful(checkpoints(plain, 0)[0]) == []
    checkpoint = checkpoints(many, 0)[0]
    names = stateful(checkpoint)
    assert len(names) == 12 and names[0].startswith("__Uniform_")
    assert b"__ExternalSource_" in checkpoint and "ExternalSource" not in str(names)


# On other devices


def test_a_checkpoint_moves_to_operators_that_copy_to_another_device():
    start, *_, real = checkpoints(many, 3)
    elsewhere = real.replace(b"__MakeContiguous_CpuToCpu_", b"__MakeContiguous_GpuToCpu_")
    assert elsewhere != real
    with pytest.raises(RuntimeError, match="might come from another pipeline"):
        built(many, elsewhere)
    assert to_other_device(elsewhere, start) == real
    assert to_other_device(real, start) == real


def test_a_checkpoint_moves_to_no_graph_of_other_operators_with_a_state():
    start, *_, real = checkpoints(many, 3)
    for pair in ((real, b"__Uniform_1"), (start, b"__Normal_3")):
        one, name = pair
        other = one.replace(name, name[:-1] + b"7")
        assert other != one
        both = (other, start) if one is real else (real, other)
        with pytest.raises(StateError, match=name.decode() + ".*in only one of the two graphs"):
            to_other_device(*both)
    assert (
        to_other_device(checkpoints(plain, 2)[2], checkpoints(plain, 0)[0])
        == checkpoints(plain, 2)[2]
    )
    known = dict(protobuf.fields(next(c for n, c in protobuf.fields(real) if b"__Uniform_1" in c)))
    without = protobuf.message([(1, protobuf.message([(1, known[1]), (2, b"")]))])
    # The last occurrence of a name counts.
    with pytest.raises(StateError, match="__Uniform_1: exists, or has a state, in only one"):
        to_other_device(real + without, start)
    assert to_other_device(real, start + without) == real


def test_a_checkpoint_moves_to_no_other_output_of_its_operators():
    def made(names):
        content = [(1, protobuf.message([(1, name), (2, b"")])) for name in names]
        return protobuf.message([*content, (2, protobuf.message([(1, b"{}")]))])

    a = made([b"x", b"y", b"__MakeContiguous_CpuToCpu_x"])
    for names in ([b"__Copy_GpuToCpu_x"], [b"__MakeContiguous_GpuToGpu_x", b"__Copy_GpuToCpu_y"]):
        b = made([b"x", b"y", *names])
        assert to_other_device(a, b) == b and to_other_device(b, a) == a
    both = made([b"x", b"y", b"__MakeContiguous_CpuToCpu___Copy_GpuToCpu_x"])
    assert to_other_device(a, both) == both and to_other_device(both, a) == a
    c = made([b"x", b"y", b"__MakeContiguous_CpuToCpu_y"])
    with pytest.raises(StateError, match=r"outputs were \['x'\], and are now \['y'\]"):
        to_other_device(a, c)


@pytest.mark.parametrize(
    "odd", (b"junk", b"\x08\x01", b"\x0a\x02\x12\x00", b"\x0a\x03\x0a\x01\xff")
)
def test_bytes_that_are_not_a_checkpoint_are_refused(odd):
    start = checkpoints(plain, 0)[0]
    with pytest.raises(StateError, match="has an unknown format"):
        to_other_device(start + odd, start)


# The short text


@settings(max_examples=100)
@given(st.lists(st.tuples(st.binary(max_size=99), st.binary(max_size=99)), max_size=4))
def test_a_difference_restores_the_checkpoints(pairs):
    first, now = [a for a, _ in pairs], [b for _, b in pairs]
    assert expand(compress(now, first), first) == now


def test_a_difference_of_real_checkpoints_is_short():
    real = checkpoints(many, 3)
    text = compress([real[3]], [real[0]])
    assert expand(text, [real[0]]) == [real[3]]
    assert len(text) < 150
    others = [checkpoints(many, 0, seed=1)[0], checkpoints(plain, 0)[0], real[1]]
    for other in others:
        with pytest.raises(StateError, match="another graph, seed or number of devices"):
            expand(text, [other])
    with pytest.raises(StateError, match="another graph, seed or number of devices"):
        expand(text, [real[0], real[0]])
    with pytest.raises(StateError, match="the state has 1 pipelines, not 0"):
        expand(compress([real[3]], []), [])


@pytest.mark.parametrize("text", ("", "x", "~~~", "\x00", "é", "c$" * 40))
def test_a_missing_difference_is_refused(text):
    with pytest.raises(StateError):
        expand(text, [b"first"])


# Through Grain


def dataset(ds_seed=None, depth=2, graph=many, names=MANY, **options):
    """Repeated batches of 4, 4 and 2 images."""
    ds = grain.MapDataset.source([{"image": IMAGE, "i": np.int32(k)} for k in range(10)])
    ds = ds if ds_seed is None else ds.seed(ds_seed)
    options = {"batch_size": 4, "num_threads": 1, "output_map": names, **options}
    lists = ds.batch(4, batch_fn=list).repeat(3).to_iter_dataset()
    return lists.pipe(DALITransform(graph, prefetch=depth, **options))


def taken(iterator):
    return [[np.asarray(v) for v in batch.values()] for batch in iterator]


def same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b):
        alike(one, other)


def test_the_numbers_equal_plain_dalis_over_the_same_batches():
    pipeline = built(many, batch_size=4, sizes=[4, 4, 2], prefetch_queue_depth=1)
    got = taken(dataset())
    assert len(got) == 9
    for batch in got:
        alike(batch[:-1], outputs(pipeline))


# Every depth with one executor, and both ends with both.
DEPTHS = [
    (depth, options) if depth in (1, 5) or depth % 2 == k else in_full(depth, options)
    for depth in range(1, 6)
    for k, options in enumerate(({}, {"exec_dynamic": False}))
]


@pytest.mark.parametrize(("depth", "options"), DEPTHS, ids=str)
def test_random_operators_resume_bit_for_bit_at_every_position(depth, options):
    whole = taken(dataset(depth=1))
    ds = dataset(depth=depth, **options)
    iterator = iter(ds)
    for step in range(10):
        state = json.loads(json.dumps(iterator.get_state()))
        again = iter(ds)
        again.set_state(state)
        assert again.get_state() == state
        same(taken(again), whole[step:])
        # With another depth than the saved one.
        other = iter(dataset(depth=6 - depth, **options))
        other.set_state(state)
        same(taken([next(other)] if step < 9 else []), whole[step : step + 1])
        other.close()
        if step < 9:
            same(taken([next(iterator)]), whole[step : step + 1])
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_state_of_dozens_of_operators_stays_short():
    def graph(image):
        return fn.reductions.mean(image) + sum(fn.random.uniform() for _ in range(40))

    iterator = iter(dataset(graph=graph, names=["u"]))
    for _ in range(5):
        next(iterator)
        state = iterator.get_state()
        assert len(json.dumps(state)) < 1500 + len(json.dumps(state["parent"]))


def test_the_datasets_seed_changes_the_numbers_and_a_seed_of_the_transform_overrides_it():
    def first(ds_seed=None, **options):
        ds = dataset(ds_seed=ds_seed, graph=own, names=["u"], **options)
        return next(iter(ds))["u"].tolist()

    def own(image):
        return fn.reductions.mean(image) * 0 + fn.random.uniform()

    assert len({str(first(seed)) for seed in (None, 0, 1, 2, 2**32 - 1)}) == 5
    assert first(1) == first(1) == first(1, seed=None)
    assert first(1, seed=5) == first(2, seed=5) == first(seed=5) != first(1)
    assert first() == first(seed=0) == first(1, seed=0)


class Listed(list):
    def __repr__(self):
        return f"Listed({len(self)})"


def drawn(size, shards=None):
    """Returns the numbers of each record, through an unchanged DataLoader or on each shard."""
    inputs = RandomInputs(a=(-1.0, 1.0), b=lambda rng: rng.integers(1000, size=2))
    data = Listed({"i": k} for k in range(12))
    sampler = grain.samplers.IndexSampler(12, num_epochs=1, shuffle=True, seed=3)

    def both(a, b):
        return a + 0, b + 0

    if shards is None:
        operations = [inputs, DALIBatch(both, size, ["a", "b"], num_threads=1)]
        loaders = [grain.DataLoader(data_source=data, sampler=sampler, operations=operations)]
    else:
        call = {"pipeline_fn": both, "output_map": ["a", "b"], "drop_remainder": True}
        loaders = [
            DALIDataLoader(
                data,
                sampler,
                [inputs],
                batch_size=size,
                num_threads=1,
                shard_options=grain.sharding.ShardOptions(shard, shards),
                **call,
            )
            for shard in range(shards)
        ]
    batches = [batch for loader in loaders for batch in loader]
    return {
        int(i): (float(a), b.tolist())
        for batch in batches
        for i, a, b in zip(batch["i"], batch["a"], batch["b"])
    }


def test_random_inputs_follow_the_record_whatever_the_batch_or_the_shards():
    want = drawn(4)
    assert sorted(want) == list(range(12))
    assert len({a for a, _ in want.values()}) == 12 and all(-1 <= a < 1 for a, _ in want.values())
    for size in (1, 3, 12):
        assert drawn(size) == want
    for shards in (1, 2, 4):
        assert drawn(4, shards) == want
    ds = grain.MapDataset.source([{"i": k} for k in range(12)]).seed(4)
    ds = ds.random_map(RandomInputs(a=(-1.0, 1.0)))
    whole = [record["a"] for record in ds]
    for shards in (2, 3):
        for shard in range(shards):
            assert [record["a"] for record in ds[shard::shards]] == whole[shard::shards]


def test_mismatched_random_inputs_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"already have .*'i'.*Rename the random inputs"):
        RandomInputs(i=(0, 1)).random_map({"i": 1}, rng)
    with pytest.raises(TypeError, match="requires records that are dicts, not b'x'"):
        RandomInputs(i=(0, 1)).random_map(b"x", rng)
