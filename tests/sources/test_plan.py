"""The batches of a stream against a generator of ten lines, and against DALI's epochs."""

import itertools

import numpy as np
import pytest

from dalijax import LastBatchPolicy
from dalijax.core.order.epochs import EpochPlan
from dalijax.core.order.samples import SamplePlan, SamplePosition, pads_by_default

FILL, DROP, PARTIAL = LastBatchPolicy.FILL, LastBatchPolicy.DROP, LastBatchPolicy.PARTIAL
CASES = list(
    itertools.product((1, 2, 3, 5, 7, 8, 10), (1, 2, 3, 4, 9), (FILL, DROP, PARTIAL), (False, True))
)
CASES = [(n, b, policy, padded) for n, b, policy, padded in CASES if policy is not DROP or n >= b]


def oracle(n, b, policy, padded):
    """Returns lists of (samples, valid), epoch by epoch."""
    at = 0
    for epoch in itertools.count():
        batches = []
        if policy is DROP or padded:
            begin = epoch * n if padded else at
            stop = begin + n
        else:
            begin, stop = at, (epoch + 1) * n
        while begin < stop:
            rows = list(range(begin, begin + b))
            valid = [row < stop for row in rows]
            rows = [min(row, stop - 1) for row in rows] if padded else rows
            if policy is PARTIAL:
                rows, valid = rows[: sum(valid)], valid[: sum(valid)]
            if policy is not DROP or all(valid):
                batches.append((rows, valid))
            begin += b
        at = begin
        yield batches


@pytest.mark.parametrize(("n", "b", "policy", "padded"), CASES)
def test_each_batch_has_the_samples_of_the_oracle(n, b, policy, padded):
    plan, here = SamplePlan(n, b, policy, padded), SamplePosition()
    epochs = itertools.islice(oracle(n, b, policy, padded), 12)
    for epoch, batches in enumerate(epochs):
        if not batches and policy is not DROP:
            with pytest.raises(ValueError, match=f"no batch 0 in epoch {epoch}, which has 0"):
                plan.seek(epoch)  # a state could not express it
            continue  # read ahead: not an epoch of its own
        assert here.epoch == epoch
        assert plan.length(here) == len(batches)
        assert plan.seek(epoch) == here
        for step, (samples, valid) in enumerate(batches):
            assert plan.step(here) == step
            assert plan.has(here)
            assert plan.remaining(here) == len(batches) - step
            rows = plan.rows(here)
            np.testing.assert_array_equal(rows.samples, samples)
            np.testing.assert_array_equal(rows.valid, valid)
            assert plan.seek(epoch, step) == here
            here = plan.skip(here, 1)
        assert plan.remaining(here) == 0
        assert plan.has(here)
        here = plan.next_epoch(here)


@pytest.mark.parametrize(("n", "b", "policy", "mask"), CASES)
def test_no_sample_is_lost_without_an_explicit_padding(n, b, policy, mask):
    plan = SamplePlan(n, b, policy, pads_by_default(policy, "mask" if mask else None))
    here, samples = SamplePosition(), []
    for epoch in range(6):
        here = plan.run_from(here)
        while plan.remaining(here):
            rows = plan.rows(here)
            samples += rows.samples[rows.valid].tolist() if plan.padded else rows.samples.tolist()
            here = plan.skip(here, 1)
        here = plan.next_epoch(here)
        if policy is DROP:  # each epoch has less than a batch
            assert samples == list(range(epoch * n, epoch * n + n // b * b))
            samples = []
    assert samples == list(range(len(samples)))
    assert policy is DROP or len(samples) >= 6 * n


@pytest.mark.parametrize(("n", "b", "policy", "padded"), CASES)
def test_epochs_match_those_of_a_reader_of_one_shard(n, b, policy, padded):
    plan, reader = SamplePlan(n, b, policy, padded), EpochPlan(n, 1, b, policy, padded)
    here = SamplePosition()
    for _ in range(12):
        assert plan.length(here) == reader.delivered(here.epoch)
        for step in range(plan.length(here)):
            valid = plan.rows(plan.seek(here.epoch, step)).valid
            assert valid.sum() == reader.valid(here.epoch, step, 0)
        following = plan.next_epoch(plan.skip(here, plan.length(here)))
        assert following.epoch == reader.next_epoch(here.epoch)
        here = following


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("n", "policy", "padded"), [(c[0], c[2], c[3]) for c in CASES if c[1] == 1]
)
def test_slices_partition_each_batch(n, shards, policy, padded):
    for rows in (1, 2, 3):
        if policy is DROP and n < rows * shards:
            continue
        plan, here = SamplePlan(n, rows * shards, policy, padded), SamplePosition()
        for _ in range(30):
            if plan.remaining(here) == 0:
                here = plan.next_epoch(here)
                continue
            whole = plan.rows(here)
            parts = [plan.rows(here, k * rows, (k + 1) * rows) for k in range(shards)]
            np.testing.assert_array_equal(np.concatenate([p.samples for p in parts]), whole.samples)
            np.testing.assert_array_equal(np.concatenate([p.valid for p in parts]), whole.valid)
            here = plan.skip(here, 1)


def test_1024_hosts_of_8_devices_over_a_billion_records():
    plan = SamplePlan(10**9, 1024 * 8 * 4)
    numbers = np.random.default_rng(0)
    for _ in range(1000):
        here = plan.seek(int(numbers.integers(50)), int(numbers.integers(10**9 // plan.batch_size)))
        host = int(numbers.integers(1024))
        rows = plan.rows(here, host * 32, (host + 1) * 32)
        np.testing.assert_array_equal(rows.samples, here.sample + host * 32 + np.arange(32))
        assert rows.samples.nbytes + rows.valid.nbytes == 32 * 9


@pytest.mark.parametrize("policy", [FILL, DROP, PARTIAL])
@pytest.mark.parametrize("padded", [False, True])
def test_another_batch_size_goes_on_from_the_next_sample(policy, padded):
    numbers = np.random.default_rng(7)
    for _ in range(300):
        n = int(numbers.integers(8, 40))
        here, seen, sizes = SamplePosition(), [], numbers.integers(1, 9, 12)
        for b in sizes:
            plan = SamplePlan(n, int(b), policy, padded)
            steps = min(plan.remaining(here), int(numbers.integers(0, 4)))
            for _ in range(steps):
                assert plan.has(here)
                assert plan.length(here) == plan.step(here) + plan.remaining(here)
                rows = plan.rows(here)
                seen += rows.samples[rows.valid].tolist()
                here = plan.skip(here, 1)
        # Each sample of the epoch once, in order, up to the position.
        assert seen == list(range(min(here.sample, plan.end(here))))
        assert plan.step(here) * int(sizes[-1]) >= here.sample - here.start


def test_epochs_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size 8 is more than the 7 samples of an epoch"):
        SamplePlan(7, 8, DROP)


def test_positions_out_of_range_are_refused():
    plan = SamplePlan(7, 2)
    assert plan.seek(0, 4).sample == 8
    with pytest.raises(ValueError, match="epoch 1000000000000000000.* too far"):
        plan.seek(10**18)  # a state could not express it
    for epoch, step in ((0, 5), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match=f"no batch {step} in epoch {epoch}"):
            plan.seek(epoch, step)
