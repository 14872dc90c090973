"""Fingerprints contain each value on which positions depend."""

import itertools

import pytest
from nvidia.dali import pipeline_def

from dalijax import LastBatchPolicy
from dalijax.core.order.epochs import EpochPlan
from dalijax.core.state.differences import differences
from dalijax.core.state.fingerprint import fingerprint
from numbered import graph


@pytest.mark.parametrize("policy", LastBatchPolicy, ids=lambda policy: policy.name)
def test_fingerprints_contain_the_epochs(policy, jpegs_many):
    pipelines = [
        pipeline_def(graph)(jpegs_many, batch_size=3, num_threads=1, device_id=None, seed=seed)
        for seed in (5, 6)
    ]
    for pipeline in pipelines:
        pipeline.build()
    for padded, stick in itertools.product((False, True), repeat=2):
        plan = EpochPlan(11, 4, 3, policy, padded, stick)
        found = fingerprint(pipelines, plan, (1, 3))
        expected = {
            "epoch_size": 11,
            "num_shards": 4,
            "batch_size": 3,
            "shard_ids": "1 3",
            "policy": policy.name,
            "padded": int(padded),
            "stick": int(stick),
            "seed": 5,
        }
        assert {name: found[name] for name in expected} == expected
        for name, value in expected.items():
            other = found | {name: "other" if isinstance(value, str) else value + 1}
            (difference,) = differences(found, other)
            assert difference.name == name and difference.before == str(value)
            assert difference.fixed == (name != "seed")
