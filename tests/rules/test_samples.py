"""The batches of a stream equal the plain simulation with a single shard, for any sizes."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dalijax import LastBatchPolicy
from dalijax.core.order.samples import SamplePlan, SamplePosition, pads_by_default
from oracle import POLICIES, Case

CASES = st.builds(
    Case,
    n=st.integers(1, 12),
    shards=st.just(1),
    batch=st.integers(1, 12),
    policy=st.sampled_from(POLICIES),
    padded=st.booleans(),
    stick=st.just(False),
).filter(lambda case: case.policy != "DROP" or case.n >= case.batch)


def plan_of(case, **changes):
    case = dataclasses.replace(case, **changes)
    return SamplePlan(case.n, case.batch, LastBatchPolicy[case.policy], case.padded)


def cases(*more, max_examples=300):
    """Runs a test for generated cases."""
    run = hypothesis.settings(max_examples=max_examples, print_blob=True)
    return lambda function: run(hypothesis.given(CASES, *more)(function))


@cases()
def test_each_batch_has_the_samples_of_the_simulation(case):
    plan, here = plan_of(case), SamplePosition()
    simulated = case.epochs(8)
    for number in set(range(simulated[-1][0])) - {number for number, _ in simulated}:
        with pytest.raises(ValueError, match=f"no batch 0 in epoch {number}, which has 0"):
            plan.seek(number)  # all its samples were read ahead
    for number, (batches,) in simulated:
        assert here.epoch == number
        assert plan.length(here) == len(batches)
        assert plan.seek(number) == here
        for step, batch in enumerate(batches):
            assert plan.step(here) == step
            assert plan.remaining(here) == len(batches) - step
            rows = plan.rows(here)
            samples = [epoch * case.n + index for index, epoch, _ in batch]
            np.testing.assert_array_equal(rows.samples, samples)
            np.testing.assert_array_equal(rows.valid, case.mask(batch, number))
            assert plan.seek(number, step) == here
            here = plan.skip(here, 1)
        assert plan.remaining(here) == 0
        here = plan.next_epoch(here)


@cases()
def test_no_sample_is_lost_with_the_default_padding(case):
    mask = "mask" if case.padded else None
    plan = plan_of(case, padded=pads_by_default(LastBatchPolicy[case.policy], mask))
    here, samples = SamplePosition(), []
    for epoch in range(6):
        here = plan.run_from(here)
        while plan.remaining(here):
            rows = plan.rows(here)
            samples += rows.samples[rows.valid].tolist() if plan.padded else rows.samples.tolist()
            here = plan.skip(here, 1)
        here = plan.next_epoch(here)
        if case.policy == "DROP":  # each epoch loses less than a batch
            start = epoch * case.n
            assert samples == list(range(start, start + case.n // case.batch * case.batch))
            samples = []
    assert samples == list(range(len(samples)))
    assert case.policy == "DROP" or len(samples) >= 6 * case.n


@cases(st.integers(1, 8))
def test_slices_partition_each_batch(case, shards):
    if case.policy == "DROP" and case.n < case.batch * shards:
        return
    plan, here = plan_of(case, batch=case.batch * shards), SamplePosition()
    for _ in range(20):
        if plan.remaining(here) == 0:
            here = plan.next_epoch(here)
            continue
        whole, size = plan.rows(here), case.batch
        parts = [plan.rows(here, k * size, (k + 1) * size) for k in range(shards)]
        np.testing.assert_array_equal(np.concatenate([p.samples for p in parts]), whole.samples)
        np.testing.assert_array_equal(np.concatenate([p.valid for p in parts]), whole.valid)
        here = plan.skip(here, 1)


@hypothesis.settings(max_examples=300, print_blob=True)
@hypothesis.given(epoch=st.integers(0, 49), host=st.integers(0, 1023), data=st.data())
def test_1024_hosts_of_8_devices_over_a_billion_records(epoch, host, data):
    plan = SamplePlan(10**9, 1024 * 8 * 4)
    here = plan.seek(epoch, data.draw(st.integers(0, 10**9 // plan.batch_size - 1)))
    rows = plan.rows(here, host * 32, (host + 1) * 32)
    np.testing.assert_array_equal(rows.samples, here.sample + host * 32 + np.arange(32))
    assert rows.samples.nbytes + rows.valid.nbytes == 32 * 9


@hypothesis.settings(max_examples=300, print_blob=True)
@hypothesis.given(
    n=st.integers(8, 40),
    policy=st.sampled_from(LastBatchPolicy),
    padded=st.booleans(),
    runs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_another_batch_size_resumes_at_the_next_sample(n, policy, padded, runs):
    here, samples = SamplePosition(), []
    for batch_size, steps in runs:
        plan = SamplePlan(n, batch_size, policy, padded)
        for _ in range(min(plan.remaining(here), steps)):
            assert plan.length(here) == plan.step(here) + plan.remaining(here)
            rows = plan.rows(here)
            samples += rows.samples[rows.valid].tolist()
            here = plan.skip(here, 1)
    # Each sample of the epoch once, in order, up to the position.
    assert samples == list(range(min(here.sample, plan.end(here))))
    assert plan.step(here) * batch_size >= here.sample - here.start


def test_epochs_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size 8 is more than the 7 samples of an epoch"):
        SamplePlan(7, 8, LastBatchPolicy.DROP)


def test_positions_out_of_range_are_refused():
    plan = SamplePlan(7, 2)
    assert plan.seek(0, 4).sample == 8
    with pytest.raises(ValueError, match="epoch 1000000000000000000.* too far"):
        plan.seek(10**18)  # a state could not express it
    for epoch, step in ((0, 5), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match=f"no batch {step} in epoch {epoch}"):
            plan.seek(epoch, step)
