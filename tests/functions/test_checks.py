"""What the functions refuse in the definition of a graph."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import run_fork
from function_graphs import BATCH, run, uniform
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def, types

from dalijax import data_iterator, fn
from dalijax.core.pipeline import function_notes
from dalijax.core.state.operators import operators


def test_what_is_refused_in_the_definition():
    for options in ({"ragged": "crop"}, {"num_outputs": -1}, {"align": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError):
            run(lambda o=options: (fn.jax_function(lambda x: x, **o)(uniform()),))
    with pytest.raises(RuntimeError, match="must be called in a graph function"):
        fn.jax_function(lambda x: x)(None)
    narrowed = data_iterator(
        lambda: fn.jax_function(lambda x: x)(dali_fn.cast(uniform(), dtype=types.INT64)), ["x"]
    )
    with pytest.raises(RuntimeError, match=r"input '0 of .*' is int64, which JAX would narrow"):
        next(narrowed(batch_size=2))


KEY_HINT = r"key is filled in if it is keyword-only"


@pytest.mark.parametrize(
    "function,options,words",
    [
        (lambda x, key: x, {}, rf"\(x, key\) is called with 1 .* argument: 'key'\. .* {KEY_HINT}"),
        (jax.jit(lambda x, key: x), {}, rf"'key'\. .* {KEY_HINT}"),
        (lambda x, *, rng: x, {}, rf"'rng'\. .* {KEY_HINT}"),
        (lambda x, y: x, {}, "with 1 of the graph's inputs: missing a required argument: 'y'"),
        (lambda: 1, {}, "too many positional arguments"),
        (lambda x: x, {"ragged": "pad"}, "inputs and lengths=: .* keyword argument 'lengths'"),
        (functools.partial(lambda x, y: x, 3, 4), {}, "too many positional arguments"),
    ],
)
def test_parameters_that_do_not_fit_the_inputs_are_refused_in_the_definition(
    function, options, words
):
    with pytest.raises(TypeError, match=words):
        run(lambda: (fn.jax_function(function, **options)(uniform()),))


def test_parameters_of_dlpack_functions_that_do_not_fit_are_refused_in_the_definition():
    for function, words in (
        (lambda x, rng: x, r"'rng'\. .*; rng or key is filled in if it is keyword-only"),
        (lambda x, y, *, rng: x, "with 1 of the graph's inputs and rng=: missing .* 'y'"),
    ):
        with pytest.raises(TypeError, match=words):
            run(
                lambda f=function: (
                    fn.dl_tensor_python_function(uniform(), function=f, batch_processing=False),
                )
            )


@pytest.mark.parametrize(
    "function",
    [
        lambda *xs, **more: xs[0],
        lambda x, y=None: x,
        lambda x, *, key=None: x,
        jax.jit(lambda x, *, key: x),
        jax.vmap(lambda x: x),
        functools.partial(lambda y, x, *, key: x, 3),
        jnp.square,
        np.square,
        np.asarray,
    ],
)
def test_parameters_that_fit_in_any_form(function):
    assert len(run(lambda: (fn.jax_function(function)(uniform()),), runs=1)[0][0]) == BATCH


def test_functions_that_nothing_would_call_are_refused():
    for options in ({"num_outputs": 0}, {"ragged": "group"}, {"ragged": "pad"}):
        with pytest.raises(ValueError, match="has no inputs, but .*Pass it an input"):
            run(lambda: fn.jax_function(lambda: None, **options)())
    with pytest.raises(ValueError, match="has neither inputs nor outputs"):
        run(
            lambda: fn.dl_tensor_python_function(
                function=lambda: None, num_outputs=0, batch_processing=False
            )
        )


def test_what_is_not_installed_is_named():
    program = """
import sys
sys.modules["numba"] = sys.modules["nvidia.dali.plugin.jax.fn"] = None  # as where it is not there
import numpy as np
from nvidia.dali import Pipeline, fn as dali_fn
from dalijax import fn

with Pipeline(batch_size=2, num_threads=1, device_id=None):
    x = dali_fn.random.uniform(shape=[3])
    for call in (
        lambda: fn.numba_function(x, run_fn=lambda o, i: None, example=np.zeros(3)),
        lambda: fn.jax_function(lambda x: x)(x),
    ):
        try:
            call()
        except (ImportError, RuntimeError) as error:
            print(type(error).__name__, error)
"""
    done = run_fork(program)
    numbas, jaxs = done.stdout.splitlines()
    assert numbas == 'ImportError fn.numba_function needs Numba: pip install "dalijax[numba]"'
    assert jaxs.startswith("RuntimeError fn.jax_function needs the JAX version that DALI")


def test_errors_name_the_function_that_was_called():
    def graph():
        return fn.dl_tensor_python_function(
            uniform(), function=lambda x: 1 / 0, batch_processing=False
        )

    with pytest.raises(RuntimeError, match="`nvidia.dali.fn.dl_tensor_python_function`") as raised:
        run(graph)
    assert "in graph" in str(raised.value)
    with pytest.raises(ValueError, match="num_outputs must be 0 or more, not -1"):
        run(
            lambda: fn.dl_tensor_python_function(
                uniform(), function=abs, num_outputs=-1, batch_processing=False
            )
        )


class Callable:
    def __call__(self, x):
        return x


def test_operators_have_the_names_of_the_functions():
    def lengths(x, *, lengths):
        return x

    def drawn(x, *, rng):
        return x

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def graph():
        options = {"batch_processing": False, "capsules": True}
        return (
            fn.jax_function(lengths, ragged="pad")(uniform()),
            fn.jax_function(abs, ragged="group")(uniform()),
            fn.dl_tensor_python_function(uniform(), function=Callable(), **options),
            fn.dl_tensor_python_function(uniform(), function=drawn, batch_processing=False),
        )

    names = [function_notes.name_of(operator) for operator in operators(graph())]
    own = "test_operators_have_the_names_of_the_functions.<locals>."
    assert [name for name in names if name] == [f"{own}lengths", "abs", "Callable", f"{own}drawn"]
