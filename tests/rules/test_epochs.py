"""The closed form of epochs equals the plain simulation, and holds for large sizes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dalijax.core.order.epochs import EpochPlan
from oracle import Case

POLICIES = ("FILL", "DROP", "PARTIAL")


def plan_of(case: Case) -> EpochPlan:
    policy = LastBatchPolicy[case.policy]
    return EpochPlan(case.n, case.shards, case.batch, policy, case.padded, case.stick)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("stick", (False, True))
def test_equals_the_simulation(policy, padded, stick):
    for n, shards, batch in itertools.product(range(1, 13), range(1, 5), range(1, 6)):
        case = Case(n, shards, batch, policy, padded, stick)
        if not case.readable():
            continue
        plan, epoch = plan_of(case), 0
        for number, expected in case.epochs(7):
            assert number == epoch
            for stream in range(shards):
                assert plan.delivered(epoch, stream) == len(expected[stream]), (case, epoch)
                for step, samples in enumerate(expected[stream]):
                    mask = case.mask(samples, epoch)
                    valid = plan.valid(epoch, step, stream)
                    assert mask == [k < valid for k in range(len(mask))], (case, epoch, step)
                masks = [all(case.mask(own, epoch)) for own in expected[stream]]
                whole = next((k for k, full in enumerate(masks) if not full), len(masks))
                short = [len(own) < batch for own in expected[stream]]
                whole = min(whole, short.index(True) if True in short else whole)
                assert plan.whole(epoch, stream) == whole, (case, epoch)
            epoch = plan.next_epoch(epoch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("stick", (False, True))
def test_a_stream_has_the_announced_length(policy, padded, stick):
    # As a stream continues: from each epoch to the next epoch with a batch, if it was simulated.
    for n, shards, batch in itertools.product(range(1, 9), range(1, 4), range(1, 20)):
        case = Case(n, shards, batch, policy, padded, stick)
        if not case.readable():
            continue
        plan = plan_of(case)
        walk = [(number, [len(own) for own in streams]) for number, streams in case.epochs(7)]
        for epochs, stream in itertools.product(range(1, 8), range(shards)):
            seen, epoch = 0, 0
            while epoch < epochs:
                seen += plan.delivered(epoch, stream)
                epoch = plan.next_epoch(epoch)
            # The simulation agrees, without a plan.
            assert seen == sum(own[stream] for number, own in walk if number < epochs)
            assert plan.total(epochs, stream) == seen, (case, epochs, stream)


def test_first_batch_counts_what_was_consumed():
    for n, shards, batch in itertools.product(range(1, 9), range(1, 4), range(1, 4)):
        for policy, padded in itertools.product(LastBatchPolicy, (False, True)):
            plan = EpochPlan(n, shards, batch, policy, padded)
            total = 0
            for epoch in range(9):
                assert plan.first_batch(epoch) == total
                total += plan.consumed(epoch)


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


@settings(max_examples=300, deadline=None, print_blob=True)
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


@pytest.mark.parametrize("field", ("num_samples", "num_shards", "batch_size"))
def test_counts_below_one_are_refused(field):
    values = {"num_samples": 4, "num_shards": 1, "batch_size": 2, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        EpochPlan(**values)
