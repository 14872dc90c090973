"""Seeds of shards, and the seed that a restored run uses."""

import json
import pickle

import grain
import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def
from python_numbers import folded
from shardings import rows_over

from dalijax import data_iterator
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.tfdata import DALIDataset
from dalijax.core.random.seeds import ShardSeed, pass_of, pass_seed, shard_seed
from dalijax.errors import StateError
from numbered import read_files


def read(files, shard_id=0, num_shards=1):
    label = read_files(
        files,
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=True,
        stick_to_shard=True,
        random_shuffle=True,
        initial_fill=8,
    )[1]
    return label, fn.random.uniform(range=(0.0, 1.0))


KNOWN = {"reader_name": "reader", "auto_reset": True}
READ = data_iterator(read, ["x", "u"], reader_name="reader")


def test_no_two_seeds_or_shards_share_a_seed():
    seeds = {(seed, shard): shard_seed(seed, shard) for seed in range(201) for shard in range(65)}
    assert len(set(seeds.values())) == len(seeds)
    for (seed, shard), made in seeds.items():
        assert made == seed if shard == 0 else 1 << 31 <= made < 1 << 32, (seed, shard)
    # DALI uses 32 bits: they must be distinct, too.
    assert len({made & 0xFFFFFFFF for made in seeds.values()}) == len(seeds)
    # Frozen values: states depend on them.
    frozen = [2220523220, 4110331940, 3957738298, 3663432494]
    assert [shard_seed(*pair) for pair in ((0, 1), (1, 1), (0, 2), (2**62, 3))] == frozen


@pytest.mark.parametrize("seed", (0, 7, -1))
def test_seeds_match_pythons_integers(seed):
    for number in (1, 2, 3, 1000):
        assert shard_seed(seed, number) == 1 << 31 | folded(seed, number) >> 33
        assert pass_seed(seed, number) == 1 << 31 | folded(seed, 0x70617373, number) >> 33
        assert pass_of(seed, pass_seed(seed, number)) == number
    assert shard_seed(seed, 0) == pass_seed(seed, 0) == seed
    assert pass_of(seed, seed) == 0 and pass_of(seed, seed + 1) is None


def test_a_seed_of_a_shard_pickles():
    one = ShardSeed.of(ShardSeed(7, 0, is_default=True), 3)
    again = pickle.loads(pickle.dumps(one))
    assert (again, again.seed, again.shard, again.is_default) == (shard_seed(7, 3), 7, 3, True)
    assert ShardSeed.of(5, 0) == 5 and not ShardSeed.of(5, 0).is_default
    assert type(ShardSeed.of(np.int64(3), 1).seed) is int
    with pytest.raises(TypeError, match="seed must be a whole number, not 'a'"):
        ShardSeed.of("a", 1)
    with pytest.raises(ValueError, match="of at most 64 bits, not 1180591620717411303424"):
        ShardSeed.of(1 << 70, 1)
    assert ShardSeed.of(None, 0) == 0 and ShardSeed.of(None, 0).is_default


def draws(iterator, batches=2):
    return np.concatenate([np.asarray(next(iterator)["u"]).ravel() for _ in range(batches)])


def pipeline_draws(files, seed, shard, shards):
    pipeline = pipeline_def(read)(
        files, shard, shards, batch_size=2, num_threads=1, device_id=None, seed=seed
    )
    pipeline.build()
    return np.concatenate([pipeline.run()[1].as_array().ravel() for _ in range(2)])


@pytest.mark.parametrize("seed", (None, 5))
def test_each_shard_draws_as_a_pipeline_of_its_seed(jpegs_many, seed):
    def pieces(drawn):
        return drawn.reshape(2, 4, 2).transpose(1, 0, 2).reshape(4, 4)

    call = {"batch_size": 8, "num_threads": 1} | ({} if seed is None else {"seed": seed})
    seeds = [shard_seed(seed or 0, shard) for shard in range(4)]
    want = [pipeline_draws(jpegs_many, own, shard, 4) for shard, own in enumerate(seeds)]
    sharded = data_iterator(read, ["x", "u"], reader_name="reader", sharding=rows_over(4))
    np.testing.assert_array_equal(pieces(draws(sharded(jpegs_many, **call))), want)
    options = [grain.sharding.ShardOptions(shard, 4) for shard in range(4)]
    hosts = [
        DALIIterDataset(READ, shard_options=one, files=jpegs_many, **{**call, "batch_size": 2})
        for one in options
    ]
    np.testing.assert_array_equal([draws(iter(host)) for host in hosts], want)


def test_host_1_of_a_seed_differs_from_host_0_of_the_next_seed(jpegs_many):
    def host(shard, seed):
        call = READ._shard_arguments(shard, 2, seed)
        return draws(READ(jpegs_many, **call, batch_size=4, num_threads=1))

    drawn = [tuple(host(shard, seed)) for shard in (0, 1) for seed in (0, 1, 2)]
    assert len(set(drawn)) == 6


# The seed that a restored run uses


def core(files, **seed):
    made = data_iterator(read, ["x", "u"], **KNOWN)
    return made(files, batch_size=3, num_threads=1, **seed)


def sharded(files, **seed):
    made = data_iterator(read, ["x", "u"], **KNOWN, sharding=rows_over(2))
    return made(files, batch_size=6, num_threads=1, **seed)


def decorated(files, **seed):
    made = data_iterator(pipeline_def(read), ["x", "u"], **KNOWN)
    return made(files, batch_size=3, num_threads=1, **seed)


def clu(files, **seed):
    return DALIDatasetIterator(READ, files=files, batch_size=3, num_threads=1, **seed)


def host(files, **seed):
    call = READ._shard_arguments(1, 2, seed.get("seed"))
    return DALIDatasetIterator(READ, files=files, batch_size=3, num_threads=1, **call)


def drawn(files, **seed):
    call = READ._shard_arguments(1, 2, ShardSeed(seed.get("seed", 9), 0, is_default=not seed))
    return DALIDatasetIterator(READ, files=files, batch_size=3, num_threads=1, **call)


def of_grain(files, **seed):
    options = grain.sharding.ShardOptions(1, 2)
    return iter(
        DALIIterDataset(
            READ, num_epochs=None, shard_options=options, files=files, batch_size=3, **seed
        )
    )


def tf_data(files, **seed):
    return iter(DALIDataset(READ, files=files, batch_size=3, num_threads=1, **seed).repeat())


def transform(files, **seed):
    ds = grain.MapDataset.source(list(range(40)))
    return iter(ds.pipe(DALITransform(shifted, batch_size=3, output_map=["x", "u"], **seed)))


def shifted(x):
    return x + 0, fn.random.uniform(range=(0.0, 1.0))


def loader(files, **seed):
    sampler = grain.samplers.IndexSampler(num_records=40, num_epochs=1, seed=1)
    return iter(
        DALIDataLoader(
            list(range(40)),
            sampler,
            pipeline_fn=shifted,
            output_map=["x", "u"],
            batch_size=6,
            shard_options=grain.sharding.ShardOptions(1, 2, drop_remainder=True),
            drop_remainder=True,
            **seed,
        )
    )


WAYS = (core, sharded, decorated, clu, host, drawn, of_grain, tf_data, transform, loader)


def batches(iterator, count=4):
    """Returns the results of some calls of next(): a batch, or None at an end."""
    calls = [next(iterator, None) for _ in range(count)]
    return [one and {k: np.asarray(v).tolist() for k, v in one.items()} for one in calls]


def state_of(iterator):
    return json.loads(json.dumps(iterator.get_state()))


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("used", (False, True))
def test_a_missing_seed_is_taken_from_the_state(jpegs_many, make, used):
    first = make(jpegs_many, seed=5)
    batches(first, 2)
    state = state_of(first)
    want = batches(first)
    other = make(jpegs_many)
    if used:
        assert batches(other, 1) != want[:1]
    other.set_state(json.loads(json.dumps(state)))
    assert state_of(other) == state
    assert batches(other) == want
    # Continues from there in a third iterator.
    third = make(jpegs_many)
    third.set_state(state_of(other))
    assert batches(third) == batches(first)
    assert state_of(third) == state_of(first)


@pytest.mark.parametrize("make", WAYS)
def test_an_explicit_seed_is_not_changed(jpegs_many, make):
    first = make(jpegs_many, seed=5)
    batches(first, 2)
    state = state_of(first)
    for seed in (0, 6):
        other = make(jpegs_many, seed=seed)
        before = batches(make(jpegs_many, seed=seed), 3)
        assert batches(other, 1) == before[:1]
        with pytest.raises(StateError, match=rf"5\D* -> .*{seed}"):
            other.set_state(state)
        assert batches(other, 2) == before[1:]


@pytest.mark.filterwarnings("ignore:The use of negative seed:UserWarning")
@pytest.mark.parametrize("seed", (-1, -5, -(1 << 63)))
@pytest.mark.parametrize("make", (core, sharded, host))
def test_a_negative_seed_is_drawn_by_dali_and_not_compared(jpegs_many, make, seed):
    first = make(jpegs_many, seed=seed)
    batches(first, 2)
    state = state_of(first)
    want = batches(first)
    for other in (make(jpegs_many), make(jpegs_many, seed=seed)):
        other.set_state(state)
        assert batches(other) == want


def test_a_refused_state_does_not_change_the_seed(jpegs_many):
    first = core(jpegs_many[:20], seed=5)
    next(first)
    state = state_of(first)
    for used in (0, 1):
        other, alike = core(jpegs_many), core(jpegs_many)
        assert batches(other, used) == batches(alike, used)
        with pytest.raises(StateError, match="epoch_size: 20 -> 32"):
            other.set_state(state)
        assert batches(other, 3) == batches(alike, 3)
        assert state_of(other) == state_of(alike)


def test_reset_keeps_the_seed_of_a_state(jpegs_many):
    first = clu(jpegs_many, seed=5)
    want = batches(first, 3)
    other = clu(jpegs_many)
    other.set_state(state_of(first))
    other.reset()
    assert batches(other, 3) == want


def test_the_decorators_seed_is_explicit(jpegs_many):
    made = data_iterator(pipeline_def(seed=3)(read), ["x", "u"], reader_name="reader")
    first = core(jpegs_many, seed=5)
    next(first)
    for used in (False, True):
        other = made(jpegs_many, batch_size=3, num_threads=1)
        if used:
            next(other)
        with pytest.raises(StateError, match="seed: 5 -> 3"):
            other.set_state(state_of(first))


def test_the_datasets_seed_is_explicit():
    def make(seed):
        ds = grain.MapDataset.source(list(range(40)))
        ds = ds if seed is None else ds.seed(seed)
        return iter(ds.pipe(DALITransform(shifted, batch_size=3, output_map=["x", "u"])))

    first = make(5)
    next(first)
    with pytest.raises(StateError, match=r"  seed: \d+ -> \d+\n"):
        make(6).set_state(state_of(first))
    other = make(None)
    other.set_state(state_of(first))
    assert batches(other) == batches(first)
