"""Epochs of a few samples, written out by hand: their batches, padding and masks."""

import itertools

import numpy as np
import pytest

from dalijax import LastBatchPolicy
from dalijax.core.order.epochs import EpochPlan, count_rows
from dalijax.core.order.samples import SamplePlan, SamplePosition

# Samples, batch size, policy, padded: each epoch's batches; the mask is False in parentheses.
STREAMS = {
    (7, 3, "FILL", False): {
        0: "0 1 2|3 4 5|6 (7) (8)",
        1: "9 10 11|12 13 (14)",
        2: "15 16 17|18 19 20",
    },
    (7, 3, "FILL", True): {
        0: "0 1 2|3 4 5|6 (6) (6)",
        1: "7 8 9|10 11 12|13 (13) (13)",
        2: "14 15 16|17 18 19|20 (20) (20)",
    },
    (7, 3, "DROP", False): {
        0: "0 1 2|3 4 5",
        1: "9 10 11|12 13 14",
        2: "18 19 20|21 22 23",
    },
    (7, 3, "DROP", True): {
        0: "0 1 2|3 4 5",
        1: "7 8 9|10 11 12",
        2: "14 15 16|17 18 19",
    },
    (7, 3, "PARTIAL", False): {
        0: "0 1 2|3 4 5|6",
        1: "9 10 11|12 13",
        2: "15 16 17|18 19 20",
    },
    (7, 3, "PARTIAL", True): {
        0: "0 1 2|3 4 5|6",
        1: "7 8 9|10 11 12|13",
        2: "14 15 16|17 18 19|20",
    },
    (5, 2, "DROP", False): {0: "0 1|2 3", 1: "6 7|8 9", 2: "12 13|14 15"},
    (5, 2, "DROP", True): {0: "0 1|2 3", 1: "5 6|7 8", 2: "10 11|12 13"},
    # Epochs of less than a batch: the last batch of epoch 1 contains all samples of epoch 2.
    (2, 3, "FILL", False): {0: "0 1 (2)", 1: "3 (4) (5)", 3: "6 7 (8)"},
    (2, 3, "FILL", True): {0: "0 1 (1)", 1: "2 3 (3)", 2: "4 5 (5)"},
    (2, 3, "PARTIAL", False): {0: "0 1", 1: "3", 3: "6 7"},
    (2, 3, "PARTIAL", True): {0: "0 1", 1: "2 3", 2: "4 5"},
}
CASES = pytest.mark.parametrize("case", STREAMS, ids=lambda case: "-".join(map(str, case)))


def plan_of(num_samples, batch_size, policy, padded):
    return SamplePlan(num_samples, batch_size, LastBatchPolicy[policy], padded)


def written(rows):
    pairs = zip(rows.samples.tolist(), rows.valid.tolist(), strict=True)
    return " ".join(f"{sample}" if valid else f"({sample})" for sample, valid in pairs)


@CASES
def test_batches_of_a_stream(case):
    plan, here = plan_of(*case), SamplePosition()
    for epoch, batches in STREAMS[case].items():
        assert here.epoch == epoch
        found = []
        for _ in range(plan.length(here)):
            found.append(written(plan.rows(here)))
            here = plan.skip(here, 1)
        assert "|".join(found) == batches
        assert plan.remaining(here) == 0
        here = plan.next_epoch(here)


@CASES
def test_positions_of_a_stream(case):
    plan, number = plan_of(*case), 0
    for epoch, batches in STREAMS[case].items():
        for step, batch in enumerate(batches.split("|")):
            here = plan.seek(epoch, step)
            assert written(plan.rows(here)) == batch
            assert plan.step(here) == step
            assert plan.locate(number) == (epoch, step)
            number += 1


# Shards, padded, stick: the samples in the batches of each reader, by epoch. Data sets of seven
# samples have the shards 0 1 2|3 4 5 6, or 0 1|2 3|4 5 6. Batches have two samples.
READERS = {
    (2, False, False): [["2 1", "2 2"], ["2 1", "2 1"], ["2 0", "2 1"], ["2", "2"]],
    (2, False, True): [["2 1", "2 2"], ["2 0", "2 2"], ["1 0", "2 2"], ["0 0", "2 2"]],
    (2, True, False): [["2 1", "2 2"], ["2 2", "2 1"], ["2 1", "2 2"], ["2 2", "2 1"]],
    (2, True, True): [["2 1", "2 2"], ["2 1", "2 2"], ["2 1", "2 2"], ["2 1", "2 2"]],
    (3, False, False): [["2 0", "2 0", "2 1"], ["0", "1", "1"], ["1", "1", "1"], ["1", "1", "2"]],
    (3, True, False): [["2 0", "2 0", "2 1"], ["2 0", "2 1", "2 0"], ["2 1", "2 0", "2 0"]],
}


@pytest.mark.parametrize("shards,padded,stick", READERS)
@pytest.mark.parametrize("policy", ("FILL", "PARTIAL"))
def test_batches_of_readers(policy, shards, padded, stick):
    plan = EpochPlan(7, shards, 2, LastBatchPolicy[policy], padded, stick)
    begun, delivered = 0, [0] * shards
    for epoch, readers in enumerate(READERS[shards, padded, stick]):
        assert plan.first_batch(epoch) == begun
        assert plan.consumed(epoch) == len(readers[0].split())
        begun += plan.consumed(epoch)
        for reader, text in enumerate(readers):
            counts = [int(count) for count in text.split()]
            # PARTIAL delivers no batch without a sample.
            counts = [n for n in counts if n] if policy == "PARTIAL" else counts
            assert plan.delivered(epoch, reader) == len(counts)
            assert [plan.valid(epoch, k, reader) for k in range(len(counts))] == counts
            assert plan.num_full(epoch, reader) == counts.count(2)
            delivered[reader] += len(counts)
            assert plan.total(epoch + 1, reader) == delivered[reader]


@pytest.mark.parametrize("per_shard", (False, True))
def test_full_batches_of_readers(per_shard):
    plan = EpochPlan(7, 2, 2, LastBatchPolicy.DROP, per_shard=per_shard)
    lengths = [[plan.delivered(epoch, reader) for reader in (0, 1)] for epoch in range(3)]
    assert lengths == ([[1, 2], [2, 1], [1, 2]] if per_shard else [[1, 1]] * 3)
    assert [plan.valid(epoch, 0, 0) for epoch in range(3)] == [2, 2, 2]
    assert [plan.first_batch(epoch) for epoch in range(3)] == [0, 2, 4]


@pytest.mark.parametrize("padded", (False, True))
def test_rows_and_padding_of_a_batch(padded):
    for rows, valid in itertools.product((4, 6), (1, 4)):
        counts = {policy: count_rows(rows, valid, policy, padded) for policy in LastBatchPolicy}
        whole = (valid, rows - valid) if padded else (rows, 0)
        assert counts[LastBatchPolicy.FILL] == counts[LastBatchPolicy.DROP] == whole
        assert counts[LastBatchPolicy.PARTIAL] == (valid, 0)


def test_slices_of_a_batch():
    plan = plan_of(7, 4, "FILL", True)
    last = plan.seek(0, 1)
    slices = [plan.rows(last, first, first + 2) for first in (0, 2)]
    assert [written(rows) for rows in slices] == ["4 5", "6 (6)"]
    assert np.concatenate([rows.valid for rows in slices]).tolist() == [True, True, True, False]
