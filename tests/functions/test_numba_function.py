"""`fn.numba_function`: shapes, types, limits, and the cache of compiled functions.

The functions have loops, which Numba compiles faster than expressions of arrays.
"""

import functools
import gc

import jax
import numba
import numpy as np
import pytest
from function_graphs import check, ragged, run, uniform
from nvidia.dali import fn as dali_fn
from nvidia.dali import types

from dalijax import data_iterator, fn
from full import in_full


def copied(out0, in0):
    for k in range(in0.shape[0]):
        out0[k] = in0[k]


def setup_change_out_shape(outs, ins):
    out0 = outs[0]
    in0 = ins[0]
    perm = [1, 0]
    for sample_idx in range(len(out0)):
        for d in range(len(perm)):
            out0[sample_idx][d] = in0[sample_idx][perm[d]]


def transpose(out0, in0):
    for i in range(in0.shape[0]):
        for j in range(in0.shape[1]):
            out0[j, i] = in0[i, j]


def transpose_batch(out0_samples, in0_samples):
    for out0, in0 in zip(out0_samples, in0_samples):
        for i in range(in0.shape[0]):
            for j in range(in0.shape[1]):
                out0[j, i] = in0[i, j]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "batch"), [
    (ragged, False), in_full(ragged, True), in_full(lambda: uniform((4, 3)), False),
    (lambda: uniform((4, 3)), True),
], ids=("ragged", "ragged_batch", "uniform", "uniform_batch"))  # fmt: skip
def test_numbas_documents_example(batch, source):
    def graph():
        x = source()
        return x, fn.numba_function(
            x,
            run_fn=transpose_batch if batch else transpose,
            out_types=[types.FLOAT],
            in_types=[types.FLOAT],
            outs_ndim=[2],
            ins_ndim=[2],
            setup_fn=setup_change_out_shape,
            batch_processing=batch,
        )

    check(graph, lambda x: x.T)


@pytest.mark.slow
def test_numba_without_setup_keeps_shapes_and_types():
    def double(out0, in0):
        for i in range(in0.shape[0]):
            for j in range(in0.shape[1]):
                out0[i, j] = in0[i, j] * 2

    def graph():
        x = ragged()
        single = fn.numba_function(
            x, run_fn=double, in_types=types.FLOAT, ins_ndim=2, out_types=types.FLOAT, outs_ndim=2
        )
        return x, single, fn.numba_function(x, run_fn=double, example=np.zeros((1, 3), np.float32))

    check(graph, lambda x: x * 2)


@pytest.mark.slow
def test_numba_with_fewer_outputs_than_inputs_and_no_setup():
    def scaled(out0, in0, in1):
        for i in range(in0.shape[0]):
            for j in range(in0.shape[1]):
                out0[i, j] = in0[i, j] * in1[0]

    def graph():
        x, factor = ragged(), uniform((1,))
        made = fn.numba_function(
            x,
            factor,
            run_fn=scaled,
            example=[np.zeros((1, 3), np.float32), np.zeros(1, np.float32)],
            out_types=["float32"],
        )
        return x, factor, made

    for xs, factors, got in run(graph):
        for x, factor, own in zip(xs, factors, got):
            np.testing.assert_allclose(own, x * factor, rtol=1e-6)


def setup_three(outs, ins):
    for k in range(len(outs[0])):
        outs[0][k][0] = ins[1][k][0]
        outs[1][k][0] = ins[0][k][0]
        outs[2][k][0] = 1


def three(out0, out1, out2, in0, in1):
    for k in range(in1.shape[0]):
        out0[k] = in1[k, 0]
    for k in range(in0.shape[0]):
        out1[k] = in0[k, 0] > 0.5
    out2[0] = 0
    for k in range(in0.shape[0]):
        out2[0] += in0[k, 0] + in0[k, 1] + in0[k, 2]


def setup_one(outs, ins):
    for k in range(len(outs[0])):
        outs[0][k][0] = ins[0][k][0] + ins[1][k][0]  # DALI's own sees one input here


def joined(out0, in0, in1):
    n = in0.shape[0]
    for k in range(n):
        out0[k] = in0[k, 0]
    for k in range(in1.shape[0]):
        out0[n + k] = in1[k, 0]


@pytest.mark.slow
def test_numba_with_other_numbers_of_inputs_and_outputs():
    def graph():
        x, y = ragged(), ragged()
        more = fn.numba_function(
            x,
            y,
            run_fn=three,
            setup_fn=setup_three,
            example=[np.zeros((1, 3), np.float32)] * 2,
            out_types=["float32", np.uint8, types.FLOAT],
            outs_ndim=[1, 1, 1],
        )
        one = fn.numba_function(
            x,
            y,
            run_fn=joined,
            setup_fn=setup_one,
            in_types=["float32"] * 2,
            ins_ndim=[2, 2],
            out_types="float32",
            outs_ndim=1,
        )
        return x, y, *more, one

    for xs, ys, *more in run(graph):
        for x, y, a, b, c, d in zip(xs, ys, *more):
            np.testing.assert_array_equal(a, y[:, 0])
            np.testing.assert_array_equal(b, (x[:, 0] > 0.5).astype(np.uint8))
            np.testing.assert_allclose(c, [x.sum()], rtol=1e-5)
            np.testing.assert_array_equal(d, np.concatenate([x[:, 0], y[:, 0]]))


@pytest.mark.slow
def test_numba_takes_six_of_each():
    def six(o0, o1, o2, o3, o4, o5, i0, i1, i2, i3, i4, i5):
        for k in range(2):
            o0[k], o1[k], o2[k] = i5[k], i4[k], i3[k]
            o3[k], o4[k], o5[k] = i2[k], i1[k], i0[k]

    def graph():
        xs = [uniform((2,)) for _ in range(6)]
        return *xs, *fn.numba_function(*xs, run_fn=six, example=[np.zeros(2, np.float32)] * 6)

    for outputs in run(graph):
        for k in range(6):
            np.testing.assert_array_equal(outputs[k], outputs[11 - k])


@pytest.mark.slow
def test_numba_compiles_once(monkeypatch):
    compiled = []
    original = numba.core.ccallback.CFunc.compile
    monkeypatch.setattr(
        numba.core.ccallback.CFunc, "compile", lambda own: (compiled.append(own), original(own))[1]
    )

    def graph(factor=2):
        def times(out0, in0):
            out0[:] = in0[:] * factor

        x = uniform((2,))
        return x, fn.numba_function(x, run_fn=transposed_copy, example=np.zeros(2, np.float32))

    for _ in range(3):
        check(graph, lambda x: x[::-1])
        gc.collect()
    assert len(compiled) == 1


def transposed_copy(out0, in0):
    out0[0], out0[1] = in0[1], in0[0]


@pytest.mark.parametrize(
    "arguments,words",
    [
        ({}, "in_types and ins_ndim are missing"),
        ({"in_types": ["float32"], "ins_ndim": [1, 1]}, "a type and a number of dimensions"),
        ({"example": np.zeros(2, np.float16)}, "float16 is not supported by Numba"),
        (
            {"example": np.zeros(2, "M8[s]")},
            "datetime64.s., which DALI does not support",
        ),
        (
            {
                "example": np.zeros(2, np.float32),
                "out_types": ["float32"] * 2,
                "outs_ndim": [1, 1],
            },
            r"outputs, with outs_ndim=\[1, 1\], .*ins_ndim=\[1\]. Pass setup_fn",
        ),
        (
            {"example": np.zeros(2, np.float32), "out_types": ["float32"], "outs_ndim": [1, 1]},
            "out_types has 1 types, but outs_ndim 2 numbers",
        ),
    ],
)
def test_numbas_arguments_are_checked(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        run(lambda: (fn.numba_function(uniform((2,)), run_fn=copied, **arguments),))


@pytest.mark.slow
def test_numbas_limits_and_errors(monkeypatch):
    seven = [np.zeros(1, np.float32)] * 7
    with pytest.raises(ValueError, match="takes 1 to 6"):
        run(
            lambda: fn.numba_function(
                *(uniform((1,)) for _ in range(7)), run_fn=lambda *a: None, example=seven
            )
        )
    with pytest.raises(numba.core.errors.NumbaError):
        run(
            lambda: (
                fn.numba_function(uniform((2,)), run_fn=not_numba, example=np.zeros(2, np.float32)),
            )
        )
    for run_fn, sample, words in (
        (copied, np.zeros(2, np.uint8), "in_types"),
        (transpose, np.zeros((1, 2), np.float32), "ins_ndim"),
    ):
        with pytest.raises(RuntimeError, match=f"`{words}`"):
            data = data_iterator(
                lambda f=run_fn, s=sample: fn.numba_function(uniform((2,)), run_fn=f, example=s),
                ["x"],
            )
            next(data(batch_size=2))
    with pytest.raises(numba.core.errors.NumbaError, match=r"FLOAT of 1 dimensions.*An example is"):
        run(
            lambda: (
                fn.numba_function(uniform((2,)), run_fn=planar, example=np.zeros(2, np.float32)),
            )
        )
    from dalijax.core.functions import numba_function as module

    def broken():
        raise AttributeError("numba has no attribute 'core'")

    monkeypatch.setattr(module, "_operator_class", broken)
    versions = rf"numba {numba.__version__},.* numpy {np.__version__} and DALI [\d.]+ are incompat"
    with pytest.raises(RuntimeError, match=versions):
        run(
            lambda: (
                fn.numba_function(uniform((2,)), run_fn=copied, example=np.zeros(2, np.float32)),
            )
        )


def planar(out0, in0):
    out0[0, 0] = in0[0, 0]


def not_numba(out0, in0):
    jax.numpy.sum(in0)


@pytest.mark.slow
def test_numba_into_other_types():
    """Without setup_fn DALI would allocate the inputs' types, too small for Numba's outputs."""

    def graph():
        x = dali_fn.random.uniform(shape=[1000], range=(0, 255), dtype=types.UINT8)
        return x, fn.numba_function(
            x, run_fn=copied, example=np.zeros(1, np.uint8), out_types="float32"
        )

    check(graph, lambda x: x.astype(np.float32))
    with pytest.raises(ValueError, match="Pass setup_fn"):
        run(
            lambda: (
                fn.numba_function(
                    uniform((2,)), run_fn=copied, example=np.zeros(2, np.float32), outs_ndim=3
                ),
            )
        )


@pytest.mark.slow
def test_what_numba_takes_for_constants_may_change_between_builds():
    table = np.zeros(1, np.float32)

    def graph(factor):
        def scaled(out0, in0):
            for k in range(2):
                out0[k] = in0[k] * factor + table[0]

        x = uniform((2,))
        return x, fn.numba_function(x, run_fn=scaled, example=np.zeros(2, np.float32))

    for factor, shift in ((2, 1), (2.5, 5), (2, 5)):
        table[:] = shift
        check(lambda f=factor: graph(f), lambda x, f=factor, s=shift: x * f + np.float32(s))


def test_numba_takes_plain_functions_of_arrays():
    class Scale:
        def run(self, out0, in0):
            out0[:] = in0[:]

    def scaled(out0, in0, scale=0.5):
        for k in range(3):
            out0[k] = in0[k] * scale

    example = np.zeros(3, np.float32)

    def made(run_fn, **options):
        options = {"example": example} | options
        return lambda: (x := uniform((3,)), fn.numba_function(x, run_fn=run_fn, **options))

    check(made(scaled), lambda x: x / 2)  # a parameter with a default is no output
    for wrong, kind in ((Scale().run, "method"), (functools.partial(scaled, scale=2), "partial")):
        with pytest.raises(TypeError, match=f"is a {kind}: Numba compiles plain functions"):
            run(made(wrong))
    with pytest.raises(ValueError, match=r"Convert scalars .* fn.reshape\(x, shape=\[1\]\)"):
        run(made(scaled, example=np.float32(0)))
