"""Which pipelines run independent operators at the same time."""

import pytest
from nvidia.dali import OperatorConcurrency, Pipeline, fn, pipeline_def, types

from dalijax.core.pipeline.dali_pipeline import run_concurrently
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
