"""Functions of ragged batches: padded, grouped or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_graphs import ragged, run, uniform
from nvidia.dali import fn as dali_fn
from nvidia.dali import types

from dalijax import data_iterator, fn


@pytest.mark.parametrize("mode", ("pad", "group"))
@pytest.mark.parametrize("dtype", (types.INT64, types.FLOAT64))
def test_compiled_ragged_functions_do_not_narrow_their_inputs(mode, dtype):
    same = jax.jit(lambda x, **lengths: x)
    with pytest.raises(RuntimeError, match="which JAX would narrow to"):
        run(lambda: fn.jax_function(same, ragged=mode)(dali_fn.cast(ragged(), dtype=dtype)))


@pytest.mark.parametrize("align", (1, 4))
def test_ragged_batches_are_padded(align):
    @fn.jax_function(ragged="pad", align=align)
    def total(x, *, lengths):
        assert x.shape[1] == -(-int(lengths[:, 0].max()) // align) * align
        rows = jnp.arange(x.shape[1])[None, :, None] < lengths[:, :1, None]
        return jnp.where(rows, x, 7).sum((1, 2)) + 0 * x.sum()

    def graph():
        x = ragged()
        return x, total(x)

    for x, got in run(graph):
        most = -(-max(len(one) for one in x) // align) * align
        columns = 3 if align == 1 else 4  # all dimensions are
        want = [one.sum() + 7 * columns * (most - len(one)) for one in x]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_ragged_batches_are_grouped():
    calls = []

    @fn.jax_function(ragged="group", num_outputs=2, stateful=False)
    @jax.jit
    def both(x, y):
        calls.append(x.shape)  # when it is traced: once for each shape
        return x[:, ::-1], x.sum((1, 2)) + y

    def graph():
        x, y = ragged(), uniform(())
        return x, y, *both(x, y)

    for x, y, flipped, sums in run(graph, runs=10, batch_size=8):
        for own, number, got, total in zip(x, y, flipped, sums):
            np.testing.assert_array_equal(got, own[::-1])
            np.testing.assert_allclose(total, own.sum() + number, rtol=1e-5, atol=1e-5)
    assert len(calls) == len(set(calls))


def test_padded_lengths_are_of_each_input():
    @fn.jax_function(ragged="pad")
    def total(x, y, *, lengths):
        of_x, of_y = (own[:, 0].astype(np.float32) for own in lengths)
        return x.sum((1, 2)) + 10 * of_x + 100 * of_y + 0 * y.sum((1, 2))

    def graph():
        x, y = ragged(), ragged()
        return x, y, total(x, y)

    for x, y, made in run(graph):
        for own, other, got in zip(x, y, made):
            np.testing.assert_allclose(got, own.sum() + 10 * len(own) + 100 * len(other), rtol=1e-5)


def test_groups_of_different_kinds_are_refused():
    for function in (
        lambda x: x if x.shape[1] > 4 else x.sum(1),
        lambda x: x > 0 if x.shape[1] > 4 else x,
    ):
        with pytest.raises(
            RuntimeError, match="for some samples and .* for samples of another shape"
        ):
            run(lambda: fn.jax_function(function, ragged="group")(ragged()), batch_size=16)


def test_ragged_batches_are_refused_otherwise():
    iterator = data_iterator(lambda: fn.jax_function(lambda x: x)(ragged()), ["x"])(batch_size=8)
    with pytest.raises(RuntimeError, match="inputs must be batches of uniform shape"):
        next(iterator)
