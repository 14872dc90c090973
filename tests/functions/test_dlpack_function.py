"""`fn.dl_tensor_python_function`: samples, lists, capsules, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import run_fork
from function_graphs import check, layouts, ragged, run, uniform
from nvidia.dali import fn as dali_fn
from nvidia.dali import ops

from dalijax import data_iterator, fn


def by_numpy(x):
    return np.from_dlpack(x) * 2


def by_jax(x):
    return jax.dlpack.from_dlpack(x) * 2


def by_batches(xs):
    return [x * 2 for x in xs]


def whole_batch(xs):
    return jnp.stack(xs) * 2


@pytest.mark.parametrize(
    "function,batch",
    [(by_numpy, False), (by_jax, False), (by_batches, True), (whole_batch, True)],
)
def test_a_dlpack_function_gets_and_gives_any_librarys_arrays(function, batch):
    def graph():
        x = uniform((3, 2))
        return x, fn.dl_tensor_python_function(x, function=function, batch_processing=batch)

    check(graph, lambda x: x * 2)


def test_dlpack_functions_of_ragged_samples():
    def graph():
        x = ragged()
        return (
            x,
            fn.dl_tensor_python_function(x, function=by_numpy, batch_processing=False),
            fn.dl_tensor_python_function(x, function=by_batches, batch_processing=True),
        )

    check(graph, lambda x: x * 2)


@pytest.mark.parametrize("made", (np.array([1.5, 2.5], ">f4"), np.array([258, 3], ">i2")), ids=str)
@pytest.mark.parametrize("batch", (False, True))
def test_arrays_of_the_other_byte_order(made, batch):
    function = (lambda xs: [made for _ in xs]) if batch else (lambda x: made)

    def graph():
        return fn.dl_tensor_python_function(uniform(()), function=function, batch_processing=batch)

    for (batch,) in run(lambda: (graph(),)):
        for sample in batch:
            np.testing.assert_array_equal(sample, made)


@pytest.mark.parametrize("function", (lambda xs: xs[:1], lambda xs: [*xs, xs[0]]))
def test_lists_of_other_lengths_are_refused(function):
    with pytest.raises(RuntimeError, match="samples, but the batch has 4. Return one output"):
        run(
            lambda: fn.dl_tensor_python_function(
                uniform((2,)), function=function, batch_processing=True
            )
        )


def test_dlpack_functions_of_several_outputs_and_none():
    seen = []

    def two(x, y):
        return x + y, np.asarray([x.sum()])

    def nothing(x):
        seen.append(x.shape)

    def graph():
        x, y = uniform((3,)), uniform((3,))
        fn.dl_tensor_python_function(
            x, function=nothing, num_outputs=0, stateful=False, batch_processing=False
        )
        both = fn.dl_tensor_python_function(
            x, y, function=two, num_outputs=2, batch_processing=False
        )
        many = fn.dl_tensor_python_function(
            x,
            y,
            function=lambda xs, ys: (xs, ys),
            num_outputs=2,
            batch_processing=True,
            output_layouts=["A"],
            name="many",
            bytes_per_sample_hint=12,
            preserve=True,
            synchronize_stream=True,
        )
        return x, y, *both, *many

    for xs, ys, sums, totals, first, second in run(graph):
        for x, y, a, b, c, d in zip(xs, ys, sums, totals, first, second):
            np.testing.assert_allclose(a, x + y)
            np.testing.assert_allclose(b, [x.sum()])
            assert np.array_equal(c, x) and np.array_equal(d, y)
    assert seen  # an operator without outputs is not optimised out
    # Fewer layouts than outputs: the rest have none.
    assert layouts(graph)[4:] == ["A", ""]


@pytest.mark.parametrize(
    "function,words",
    [
        (lambda x: (x, x), "returned 2 outputs, but num_outputs is 1"),
        (lambda x, *, rng: (x, x), r"<lambda>\(\) returned 2 outputs"),
        (lambda x: "text", "is a str, not an array"),
        (lambda x: jnp.asarray(x).astype(jnp.bfloat16), "bfloat16, for which DALI has no type"),
    ],
)
def test_what_dlpack_functions_do_wrong_is_said(function, words):
    iterator = data_iterator(
        lambda: fn.dl_tensor_python_function(
            uniform((2,)), function=function, batch_processing=False
        ),
        ["x"],
    )(batch_size=2)
    with pytest.raises(RuntimeError, match=words):
        next(iterator)


def test_batch_processing_left_out_is_said_once_in_a_process():
    program = """
import warnings
from nvidia.dali import fn as dali_fn, pipeline_def
from dalijax import fn

shapes = []
def look(x):
    shapes.append(x.shape)
    return x

def run(**options):
    def graph():
        x = dali_fn.random.uniform(shape=[3])
        return fn.dl_tensor_python_function(x, function=look, **options)
    pipeline = pipeline_def(graph, batch_size=2, num_threads=1, device_id=None)()
    pipeline.build()
    pipeline.run()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run(batch_processing=False)
    assert not caught
    run()
    run()
assert set(shapes) == {(3,)}
print(len(caught), caught[0].message)
print(caught[0].filename, caught[0].lineno)
"""
    done = run_fork(program)
    assert done.stdout.startswith("1 fn.dl_tensor_python_function without batch_processing: DALI")
    assert "batch_processing=False, or True" in done.stdout
    assert done.stdout.endswith("/program.py 14\n")  # the line of the graph


@pytest.mark.parametrize("batch", (False, True))
def test_functions_of_capsules_run_as_in_dali(batch):
    def negated(capsule):
        assert type(capsule).__name__ == "PyCapsule"
        return ops._dlpack_from_array(-ops._dlpack_to_array(capsule))

    def function(given):
        return list(map(negated, given)) if batch else negated(given)

    def keyed(given, *, rng):
        assert 0 <= rng.random() < 1
        return function(given)

    def graph():
        x = uniform((4,))
        options = {"batch_processing": batch, "stateful": False}
        ours = functools.partial(fn.dl_tensor_python_function, x, capsules=True, **options)
        dalis = dali_fn.dl_tensor_python_function(x, function=function, batch_processing=batch)
        return x, dalis, ours(function=function), ours(function=keyed)

    for x, *others in run(graph):
        for other in others:
            np.testing.assert_array_equal(np.negative(x), other)
