"""Fingerprints contain each value on which positions depend."""

import itertools

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from dalijax import LastBatchPolicy, augment
from dalijax.core.order.epochs import EpochPlan
from dalijax.core.random.draw import Draw
from dalijax.core.state.differences import differences
from dalijax.core.state.fingerprint import fingerprint
from dalijax.core.state.operators import graph_outputs, read_operators, without_choices
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


def test_older_states_may_contain_arguments_that_are_ignored():
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def resized():
        image = fn.constant(fdata=[0.0] * 12, shape=[2, 2, 3])
        return fn.resize(image, size=[4, 4], minibatch_size=16)

    pipeline = resized()
    pipeline.build()
    now = fingerprint([pipeline], EpochPlan(1, 1, 1, LastBatchPolicy.FILL, False, False), (0,))
    before = [
        f"{line}\tminibatch_size=16" if line.startswith("resize") else line
        for line in now["operators"]
    ]
    assert before != now["operators"]
    assert differences(now | {"operators": before}, now) == []
    other = [line.replace("size=", "sizes=") for line in before]
    assert differences(now | {"operators": other}, now) != []


def built(graph):
    """Returns a pipeline of a graph of (images, condition), with conditionals."""

    def define():
        images = fn.external_source(source=lambda: [np.zeros((4, 4, 3), np.uint8)], batch=True)
        condition = fn.external_source(source=lambda: [np.bool_(True)], batch=True)
        return graph(images, condition)

    pipeline = pipeline_def(
        define, batch_size=1, num_threads=1, device_id=None, enable_conditionals=True
    )()
    pipeline.build()
    return pipeline


@pytest.mark.parametrize("name", ("size", "choice_of_size"))
def test_operators_with_any_name_are_compared(name):
    first, second = (
        fingerprint([built(lambda x, _: fn.resize(x, size=(size, size), name=name))], None, (0,))
        for size in (8, 16)
    )
    assert any(difference.name.endswith("size.size") for difference in differences(first, second))


def changed(images, condition):
    draw = Draw(lambda *_: None, {})
    if condition:
        images = augment.grayscale(images, draw=draw, probability=0.5)
    return augment.solarize(images, 128, draw=draw)


def test_choices_leave_no_unused_operators():
    """Graphs on a GPU, whose states are the same, have no choices, and DALI drops what feeds them.

    Here, the `if` splits the choice of the images, too.
    """
    pipeline = built(changed)
    operators, outputs = without_choices(read_operators(pipeline)[0], graph_outputs(pipeline))
    data = [of for _, _, arguments in operators for of, _ in arguments.get("inputs", ())]
    names = {name for _, name, _ in operators}
    assert names == {of if of in names else of.partition("[")[0] for of in [*data, *outputs]}
