"""The closed form of epochs equals the plain simulation, and holds for large sizes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dalijax.core.order.epochs import EpochPlan
from oracle import POLICIES, Case

CASES = st.builds(
    Case,
    n=st.integers(1, 14),
    shards=st.integers(1, 5),
    batch=st.integers(1, 20),
    policy=st.sampled_from(POLICIES),
    padded=st.booleans(),
    stick=st.booleans(),
).filter(Case.readable)
run = settings(max_examples=400, print_blob=True)


def plan_of(case: Case) -> EpochPlan:
    policy = LastBatchPolicy[case.policy]
    return EpochPlan(case.n, case.shards, case.batch, policy, case.padded, case.stick)


@run
@given(CASES)
def test_equals_the_simulation(case):
    plan, epoch = plan_of(case), 0
    for number, expected in case.epochs(7):
        assert number == epoch
        for stream, batches in enumerate(expected):
            assert plan.delivered(epoch, stream) == len(batches)
            masks = [case.mask(samples, epoch) for samples in batches]
            for step, mask in enumerate(masks):
                valid = plan.valid(epoch, step, stream)
                assert mask == [k < valid for k in range(len(mask))]
            complete = [all(mask) and len(mask) == case.batch for mask in masks]
            assert plan.num_full(epoch, stream) == [*complete, False].index(False)
        epoch = plan.next_epoch(epoch)


@run
@given(CASES, st.integers(1, 7))
def test_a_stream_has_the_announced_length(case, epochs):
    plan = plan_of(case)
    simulated = [(number, [len(own) for own in streams]) for number, streams in case.epochs(7)]
    for stream in range(case.shards):
        batches, epoch = 0, 0
        while epoch < epochs:
            batches += plan.delivered(epoch, stream)
            epoch = plan.next_epoch(epoch)
        assert batches == sum(own[stream] for number, own in simulated if number < epochs)
        assert plan.total(epochs, stream) == batches


@run
@given(CASES, st.integers(0, 9))
def test_first_batch_counts_what_was_consumed(case, epoch):
    plan = plan_of(case)
    assert plan.first_batch(epoch) == sum(plan.consumed(earlier) for earlier in range(epoch))


def test_the_example_of_dalis_documentation():
    # DALI's documentation: samples [1..7], batch size 2.
    def ends(policy, padded):
        plan = EpochPlan(7, 1, 2, policy, padded)
        return plan.delivered(0), plan.first_batch(1), plan.valid(0, 3, 0)

    assert ends(LastBatchPolicy.FILL, True) == (4, 4, 1)
    assert ends(LastBatchPolicy.FILL, False) == (4, 4, 1)
    assert ends(LastBatchPolicy.DROP, True)[:2] == (3, 4)
    assert ends(LastBatchPolicy.DROP, False)[:2] == (3, 4)
    assert ends(LastBatchPolicy.PARTIAL, True) == (4, 4, 1)


sizes = st.integers(1, 10**7)


@settings(max_examples=300, print_blob=True)
@given(sizes, st.integers(1, 64), st.integers(1, 4096), st.booleans(), st.booleans(), st.data())
def test_laws_at_any_size(n, shards, batch, padded, stick, data):
    plan = EpochPlan(n, shards, batch, LastBatchPolicy.FILL, padded, stick)
    epoch = data.draw(st.integers(0, 10**4))
    assert sum(plan.shard_size(i) for i in range(shards)) == n
    # Over one epoch, the streams read each shard once.
    assert sorted(plan.shard_of(s, epoch) for s in range(shards)) == list(range(shards))
    for stream in {0, shards - 1, shards // 2}:
        before = plan.samples_until(stream, epoch - 1) if epoch else 0
        own = plan.samples_until(stream, epoch) - before
        assert own == plan.shard_size(plan.shard_of(stream, epoch))
        partial = EpochPlan(n, shards, batch, LastBatchPolicy.PARTIAL, padded, stick)
        length = partial.delivered(epoch, stream)
        valid = [partial.valid(epoch, k, stream) for k in {0, max(length - 1, 0), length}]
        assert partial.valid(epoch, length, stream) == 0 or length == plan.consumed(epoch)
        assert length == 0 or all(v > 0 for v in valid[:1])
    if padded:
        # The unmasked samples of all shards are the data set, each exactly once.
        last = plan.delivered(epoch) - 1
        counted = sum(last * batch + plan.valid(epoch, last, s) for s in range(shards))
        full = all(plan.valid(epoch, max(last - 1, 0), s) == batch for s in range(shards))
        assert counted == n or not full
