"""What runs at the same time: independent operators; the next run and the use of a batch."""

import numpy as np
import pytest
from nvidia.dali import OperatorConcurrency, Pipeline, fn, pipeline_def, types

from dalijax.core.pipeline.dali_pipeline import run_concurrently
from dalijax.core.pipeline.runner import Runner
from dalijax.fn import numba_function


def concurrency(calls_python=False, **options):
    @pipeline_def(batch_size=1, num_threads=1, **options)
    def defined():
        x = fn.constant(idata=1)
        return fn.python_function(x, function=lambda x: x) if calls_python else x

    pipeline = defined()
    run_concurrently(pipeline)
    return pipeline.concurrency


@pytest.mark.parametrize("device_id", (None, 0))
def test_independent_operators_run_at_the_same_time(device_id):
    assert concurrency(device_id=device_id) == OperatorConcurrency.FULL


@pytest.mark.parametrize("options", ({"exec_dynamic": False}, {"calls_python": True}))
def test_other_pipelines_keep_the_default(options):
    assert concurrency(**{"device_id": 0, **options}) is None


@pytest.mark.parametrize("is_dalis", (True, False))
def test_a_graph_that_calls_a_function_of_numba_keeps_the_default(is_dalis):
    plugin = pytest.importorskip("nvidia.dali.plugin.numba.fn.experimental")

    def double(out, x):
        out[:] = 2 * x

    forms = {"in_types": [types.INT32], "ins_ndim": [1]}
    if is_dalis:
        forms |= {"out_types": [types.INT32], "outs_ndim": [1]}

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def defined():
        function = plugin.numba_function if is_dalis else numba_function
        return function(fn.constant(idata=[1]), run_fn=double, **forms)

    pipeline = defined()
    run_concurrently(pipeline)
    assert pipeline.concurrency is None


def test_a_graph_that_is_defined_when_it_is_built_keeps_the_default():
    class Later(Pipeline):
        def define_graph(self):
            return fn.constant(idata=1)

    pipeline = Later(1, 1, 0)
    run_concurrently(pipeline)
    assert pipeline.concurrency is None


def test_an_argument_is_kept():
    for policy in (OperatorConcurrency.BACKEND, OperatorConcurrency.NONE):
        assert concurrency(device_id=0, concurrency=policy) == policy


def test_the_policy_reaches_dalis_executor():
    @pipeline_def(batch_size=1, num_threads=1, device_id=0)
    def defined():
        return fn.constant(idata=1)

    pipeline = defined()
    run_concurrently(pipeline)
    expected = defined(concurrency=OperatorConcurrency.FULL)
    # Private in DALI: what the executor is built from.
    assert pipeline._get_params().executor_flags == expected._get_params().executor_flags


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("count", (1, 2))
def test_a_pipeline_continues_while_a_batch_is_converted(count, dynamic):
    """Without the dynamic executor, DALI would reuse the buffers of the batch."""
    requested = [0] * count

    def numbers(k):
        while True:
            requested[k] += 1
            yield [np.int32(requested[k])]

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, exec_dynamic=dynamic)
    def defined(k):
        return fn.external_source(numbers(k), batch=True)

    pipelines = [defined(k) for k in range(count)]
    for pipeline in pipelines:
        pipeline.build()
    runner = Runner(pipelines)

    def convert(outputs):
        return [int(tensors.as_array()[0]) for (tensors,) in outputs], list(requested)

    batches = [runner.take(convert) for _ in range(5)]
    ahead = 2 if dynamic else 1  # of the batch, while it is converted
    assert batches == [([n] * count, [n + ahead] * count) for n in range(1, 6)]
    runner.close()
