"""Functions in the graph: DALI's documentation, line by line, and resuming."""

import functools
import gc
import itertools
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from nvidia.dali import Pipeline, ops, pipeline_def, types
from nvidia.dali import fn as dali_fn
from nvidia.dali.plugin import jax as dax

import dalijax
import function_cells
from dalijax import LastBatchPolicy, data_iterator, fn
from dalijax.core.functions.dlpack import DLTensor, Exported, aligned
from dalijax.core.pipeline.function_notes import live_outputs, release

BATCH = 4


def run(graph, runs=3, batch_size=BATCH, **call):
    """The outputs of some runs of a plain DALI pipeline: lists of arrays of the samples."""
    call = {"num_threads": 2, "device_id": None, "seed": 3, **call}
    pipeline = pipeline_def(graph, batch_size=batch_size, **call)()
    pipeline.build()
    return [[[np.array(one) for one in output] for output in pipeline.run()] for _ in range(runs)]


def uniform(shape=(6, 5, 3)):
    return dali_fn.random.uniform(shape=list(shape))


def ragged():
    rows = dali_fn.cast(dali_fn.random.uniform(range=(1, 9), shape=[1]), dtype=types.INT32)
    return dali_fn.random.uniform(shape=dali_fn.cat(rows, types.Constant([3], device="cpu")))


def check(graph, expected, **call):
    """The outputs of a graph behind its first one are what NumPy makes of that, per sample."""
    for first, *others in run(graph, **call):
        for k, other in enumerate(others):
            for sample, got in zip(first, other, strict=True):
                want = expected[k](sample) if isinstance(expected, list) else expected(sample)
                np.testing.assert_allclose(got, want, rtol=1e-6, strict=True)


# jax_function: DALI's documentation


def test_the_documents_example():
    @fn.jax_function
    def flip_horizontal(image_batch):
        assert isinstance(image_batch, jax.Array)
        return image_batch[:, :, ::-1, :]

    def graph():
        images = uniform()
        return images, flip_horizontal(images)

    check(graph, lambda image: image[:, ::-1])


def test_jit_and_vmap_inside():
    @fn.jax_function
    @jax.jit
    @jax.vmap
    def flip_horizontal(image):
        return image[:, ::-1, :]

    def graph():
        images = uniform()
        return images, flip_horizontal(images)

    check(graph, lambda image: image[:, ::-1])


@pytest.mark.parametrize("compiled", (False, True))
def test_it_is_dalis_own(compiled):
    def both(a, b):
        return a + b.sum(), b.astype(jnp.int32)

    both = jax.jit(both) if compiled else both

    def graph():
        images, others = uniform(), uniform((2,))
        mine = fn.jax_function(both, num_outputs=2)(images, others)
        theirs = dax.fn.jax_function(both, num_outputs=2)(images, others)
        return *mine, *theirs

    for a, b, c, d in run(graph):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


def test_no_outputs():
    seen = []

    @fn.jax_function(num_outputs=0, stateful=False)
    def look(images):
        seen.append(images.shape)

    @fn.jax_function(num_outputs=0, preserve=False, stateful=False)
    def unseen(images):
        seen.append("unseen")

    def graph():
        images = uniform()
        assert look(images) == ()
        unseen(images)
        return images

    assert len(run(graph)) == 3
    assert len(seen) >= 3 and set(seen) == {(BATCH, 6, 5, 3)}


def test_what_functions_without_outputs_raise_is_logged(caplog):
    def fails(x):
        raise ValueError("for the test")

    def graph():
        x = uniform()
        fn.jax_function(fails, num_outputs=0)(x)
        fn.dl_tensor_python_function(
            x, function=lambda one: one, num_outputs=0, batch_processing=False
        )
        return x

    iterator = data_iterator(graph, ["x"])(batch_size=2)
    next(iterator)
    iterator.close()
    assert "ValueError: for the test" in caplog.text  # DALI itself drops it
    assert "return nothing" in caplog.text and "has no outputs, failed" in caplog.text


@pytest.mark.parametrize("ragged", (None, "pad", "group"))
def test_a_failure_without_outputs_is_logged_once(caplog, ragged):
    calls = []

    def fails(x, lengths=None):
        calls.append(x)
        raise ValueError("for the test")

    def graph():
        x = uniform()
        fn.jax_function(fails, num_outputs=0, ragged=ragged)(x)
        return x

    with data_iterator(graph, ["x"])(batch_size=2) as iterator:
        next(iterator)
    failed = [one for one in caplog.records if "has no outputs, failed" in one.getMessage()]
    assert len(failed) == len(calls) > 0


def test_no_inputs():
    @fn.jax_function
    def ones():
        return jnp.ones((BATCH, 2))

    for (output,) in run(lambda: (ones(),)):
        assert [one.tolist() for one in output] == [[1.0, 1.0]] * BATCH


def layouts(graph):
    """The layouts of the outputs of a graph."""
    pipeline = pipeline_def(graph, batch_size=BATCH, num_threads=1, device_id=None)()
    pipeline.build()
    return [output.layout() for output in pipeline.run()]


def test_layouts():
    def two(a, b):
        return a + 1, b.sum((1, 2))

    def graph(**options):
        images = dali_fn.reshape(uniform(), layout="HWC")
        frames = dali_fn.reshape(uniform((3, 4)), layout="FH")
        return tuple(fn.jax_function(two, num_outputs=2, **options)(images, frames))

    # Only where the numbers of dimensions are the same.
    assert layouts(lambda: graph()) == ["HWC", ""]
    assert layouts(lambda: graph(output_layouts=["XYZ", ""])) == ["XYZ", ""]
    one = lambda: fn.jax_function(lambda a: a, output_layouts="CHW")(uniform())  # noqa: E731
    assert layouts(lambda: (one(),)) == ["CHW"]


@pytest.mark.parametrize("ragged", (None, "pad", "group"))
@pytest.mark.parametrize(
    "given,expected",
    [
        ("CHW", ["CHW", "CHW"]),
        (["CHW"], ["CHW", ""]),
        (("CHW", "XYZ"), ["CHW", "XYZ"]),
        ([], 2 * [""]),
    ],
)
def test_a_layout_for_all_outputs_or_for_the_first_ones(ragged, given, expected):
    def two(x, **lengths):
        return x * 1, x * 2

    def graph():
        x = dali_fn.reshape(uniform(), layout="HWC")
        options = {"num_outputs": 2, "output_layouts": given}
        return tuple(fn.jax_function(two, ragged=ragged, **options)(x)) + tuple(
            fn.dl_tensor_python_function(x, function=two, batch_processing=False, **options)
            if given
            else []
        )

    assert layouts(graph) == expected * (2 if given else 1)


def test_more_layouts_than_outputs_are_refused():
    with pytest.raises(ValueError, match=r"output_layouts=\['A', 'B'\], and there are 1 outputs"):
        fn.jax_function(lambda x: x, output_layouts=["A", "B"])


def test_numpy_and_64_bits_and_bool_are_taken():
    @fn.jax_function(num_outputs=3)
    def numpys(images):
        host = np.asarray(images)
        return host * 2, host > 0, host.astype(np.float16)

    def graph():
        images = uniform()
        return images, *numpys(images)

    check(graph, [lambda x: x * 2, lambda x: x > 0, lambda x: x.astype(np.float16)])


@pytest.mark.parametrize(
    "function,options,words",
    [
        (lambda x: (x, x), {}, "returned 2 outputs, and num_outputs is 1"),
        (lambda x: x, {"num_outputs": 2}, "returned 1 output, and num_outputs is 2"),
        (lambda x: None, {}, "returned 0 outputs"),
        (lambda x: x[:2], {}, r"shape \(2, 6, 5, 3\), and the batch has 4"),
        (lambda x: x.sum(), {}, r"shape \(\), and the batch"),
        (lambda x: x.astype(jnp.bfloat16), {}, "bfloat16, for which DALI has no type"),
        (lambda x: np.zeros(4, np.complex64), {}, "complex64, for which DALI has no type"),
        (lambda x: jax.random.split(jax.random.key(3), 4), {}, "return numbers, of a key say"),
        (lambda x: np.zeros(4), {}, "float64, which JAX would narrow to float32"),
        (lambda x: "text", {}, "is a str, not an array"),
        (lambda x: x, {"output_layouts": "HW"}, "3 dimensions without the batch, and its layout"),
        (lambda x: 1 / 0, {}, "ZeroDivisionError"),
        (jax.vmap(lambda x, *, key: x), {}, "take it in a function around the mapped one"),
    ],
)
def test_what_functions_do_wrong_is_said(function, options, words):
    iterator_fn = data_iterator(lambda: fn.jax_function(function, **options)(uniform()), ["x"])
    if options.get("num_outputs", 1) != 1:
        names = [f"x{k}" for k in range(options["num_outputs"])] + ["y"]

        def graph():
            images = uniform()
            return *(fn.jax_function(function, **options)(images) or ()), images

        iterator_fn = data_iterator(graph, names)
    iterator = iterator_fn(batch_size=BATCH)
    for _ in range(2):  # it goes on, and fails again
        with pytest.raises(RuntimeError, match=words):
            next(iterator)
    iterator.close()


@pytest.mark.parametrize(
    "later,words",
    [
        (lambda x: (x, x), "returned 2 outputs, and num_outputs is 1"),
        (lambda x: (), "returned 0 outputs"),
        (lambda x: None, "returned 0 outputs"),
        (lambda x: x[:2], r"shape \(2, 6, 5, 3\), and the batch has 4"),
        (lambda x: x[..., None], "4 dimensions without the batch, and its layout"),
        (lambda x: x.astype(jnp.bfloat16), "bfloat16, for which DALI has no type"),
        (lambda x: np.zeros((4, 6, 5, 3)), "float64, which JAX would narrow to float32"),
        (lambda x: "text", "is a str, not an array"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_behind_right_batches_is_said(later, words):
    calls = itertools.count()

    def function(x):
        return x * 2 if next(calls) < 5 else later(x)

    def graph():
        images = uniform()
        return images, fn.jax_function(function, output_layouts="HWC", stateful=False)(images)

    with data_iterator(graph, ["x", "y"])(batch_size=BATCH) as iterator:
        for _ in range(5):
            batch = next(iterator)
            np.testing.assert_array_equal(batch["y"], 2 * np.asarray(batch["x"]))
        with pytest.raises(RuntimeError, match=words):
            next(iterator)


def test_a_right_output_is_wrong_for_a_smaller_batch():
    batches = [np.zeros((rows, 2), np.float32) for rows in (4, 4, 4, 3)]

    def graph():
        x = dali_fn.external_source(lambda k: batches[k % 4], batch=True)
        return fn.jax_function(lambda x: jnp.ones((4, 2)), stateful=False)(x)

    with pytest.raises(RuntimeError, match=r"shape \(4, 2\), and the batch has 3"):
        run(graph, runs=4)
    assert len(run(graph, runs=1)) == 1


def test_outputs_of_changing_kinds_and_places():
    places, calls = jax.devices("cpu")[:3], itertools.count()

    def function(x):
        made, number = x * 2, next(calls)
        return np.asarray(made) if number % 4 == 3 else jax.device_put(made, places[number % 4])

    def graph():
        images = uniform()
        return images, fn.jax_function(function, stateful=False)(images)

    assert len(places) == 3
    check(graph, lambda x: x * 2, runs=12)


def test_what_is_refused_in_the_definition():
    for options in ({"ragged": "crop"}, {"num_outputs": -1}, {"align": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError):
            run(lambda o=options: (fn.jax_function(lambda x: x, **o)(uniform()),))
    with pytest.raises(RuntimeError, match="belongs in a pipeline function"):
        fn.jax_function(lambda x: x)(None)
    narrowed = data_iterator(
        lambda: fn.jax_function(lambda x: x)(dali_fn.cast(uniform(), dtype=types.INT64)), ["x"]
    )
    with pytest.raises(RuntimeError, match=r"input '0 of .*' is int64, which JAX would narrow"):
        next(narrowed(batch_size=2))


KEY_HINT = r"key is filled in where it is keyword-only"


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
        (lambda x, rng: x, r"'rng'\. .*; rng or key is filled in where it is keyword-only"),
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


def test_the_readmes_example(jpegs):
    text = (Path(dalijax.__file__).parent / "README.md").read_text()
    block = text.split("## Functions in the graph")[1].split("```python\n")[1].split("```")[0]
    on_cpu = block.replace('device="mixed"', 'device="cpu"').replace("labels.gpu()", "labels")
    names = {}
    exec(on_cpu, names)  # noqa: S102 - our own text
    with names["train"](str(Path(jpegs[0]).parent.parent), batch_size=4) as iterator:
        state, batch = iterator.get_state(), next(iterator)
        assert batch["images"].shape == (4, 224, 224, 3)
        assert batch["images"].dtype == np.float32
        np.testing.assert_allclose(np.asarray(batch["labels"]).sum(1), 1, rtol=1e-6)
        iterator.set_state(state)
        np.testing.assert_array_equal(next(iterator)["images"], batch["images"])


def test_several_outputs_may_be_what_a_graph_returns():
    """DALI's operators give lists, which its pipeline functions must not return."""

    def both(out0, out1, in0, in1):
        out0[:] = in0
        out1[:] = in1

    def numbas(x):
        return fn.numba_function(x, x * 2, run_fn=both, example=[np.zeros(3, np.float32)] * 2)

    def doubled(x):
        return x, x * 2

    graphs = [
        fn.jax_function(doubled, num_outputs=2),
        lambda x: fn.jax_function(lambda x, lengths: doubled(x), 2, ragged="pad")(x),
        lambda x: fn.dl_tensor_python_function(
            x, function=doubled, num_outputs=2, batch_processing=False
        ),
        numbas,
    ]
    for graph in graphs:
        iterator = data_iterator(lambda graph=graph: graph(uniform((3,))), ["x", "y"])
        with iterator(batch_size=2) as made:
            batch = next(made)
            np.testing.assert_array_equal(batch["y"], 2 * np.asarray(batch["x"]))


def test_dalis_operators_are_elsewhere():
    with pytest.raises(AttributeError, match=r"no 'readers', but .*those of nvidia\.dali\.fn"):
        fn.readers
    assert not hasattr(fn, "__wrapped__")


def test_what_it_returns_of_its_inputs_stays_what_it_was():
    """Outputs that are the inputs' memory must not be written by later batches."""

    @fn.jax_function
    def same(x):
        return x

    @fn.jax_function
    @jax.jit
    def compiled(x):
        return x

    def graph():
        images = uniform((64, 64))
        taken = [same(images), compiled(images), same(same(images))]
        taken.append(
            fn.dl_tensor_python_function(images, function=lambda x: x, batch_processing=False)
        )
        return dali_fn.reductions.sum(images, axes=[0, 1]), *taken

    for dynamic in (True, False):
        names = ["sum", "a", "b", "c", "d"]
        with data_iterator(graph, names)(batch_size=4, exec_dynamic=dynamic) as iterator:
            for batch in list(itertools.islice(iterator, 40)):
                for name in names[1:]:
                    got = np.asarray(batch[name]).sum((1, 2))
                    np.testing.assert_allclose(got, batch["sum"], rtol=1e-3)


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("kind", ("as it is", "compiled", "NumPy", "a part"))
def test_older_executors_get_no_output_in_an_inputs_memory(kind, dynamic):
    """They write it again while a GPU still reads the output."""
    of_inputs, of_outputs = set(), set()

    def look(into, x):
        into.add(x.unsafe_buffer_pointer())
        return x * 1

    same = {
        "as it is": lambda x: x,
        "compiled": jax.jit(lambda x: x),
        "NumPy": lambda x: np.asarray(x),
        "a part": lambda x: np.asarray(x)[:, 16:],
    }[kind]

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, exec_dynamic=dynamic)
    def graph():
        x = uniform((4096,))
        inputs = fn.jax_function(functools.partial(look, of_inputs), stateful=False)(x)
        made = fn.jax_function(same)(x)
        outputs = fn.jax_function(functools.partial(look, of_outputs), stateful=False)(made)
        return dali_fn.copy(x), made, inputs, outputs

    pipeline, start = graph(), 16 if kind == "a part" else 0
    for _ in range(5):
        x, made, *_ = [np.array(one[0]) for one in pipeline.run()]
        np.testing.assert_array_equal(made, x[start:])
    shared = {one + 4 * start for one in of_inputs} & of_outputs
    if not dynamic:
        assert len(of_inputs) == 1 and not shared
    elif kind == "as it is":
        assert shared  # nothing is copied without need


def test_an_array_that_a_function_writes_again_is_copied():
    """An aligned one would be taken as it is."""
    raw = np.empty(4 * 1024 * BATCH + 64, np.uint8)
    start = -raw.ctypes.data % 64
    own = raw[start : start + 4 * 1024 * BATCH].view(np.float32).reshape(BATCH, 1024)

    def twice(x):
        np.multiply(x, 2, out=own)
        return own

    def graph():
        x = uniform((1024,))
        return x, fn.jax_function(twice, stateful=False)(x)

    pipeline = pipeline_def(graph, batch_size=BATCH, num_threads=2, device_id=None)()
    for _ in range(10):
        x, made = pipeline.run()
        time.sleep(0.01)  # while it prepares the next ones
        np.testing.assert_array_equal(made.as_array(), x.as_array() * 2)


@pytest.mark.parametrize("mode", ("pad", "group"))
@pytest.mark.parametrize("dtype", (types.INT64, types.FLOAT64))
def test_compiled_ragged_functions_do_not_narrow_their_inputs(mode, dtype):
    same = jax.jit(lambda x, **lengths: x)
    with pytest.raises(RuntimeError, match="which JAX would narrow to"):
        run(lambda: fn.jax_function(same, ragged=mode)(dali_fn.cast(ragged(), dtype=dtype)))


def test_functions_that_nothing_would_call_are_refused():
    for options in ({"num_outputs": 0}, {"ragged": "group"}, {"ragged": "pad"}):
        with pytest.raises(ValueError, match="has no inputs with .* Give it an input"):
            run(lambda: fn.jax_function(lambda: None, **options)())
    with pytest.raises(ValueError, match="has neither inputs nor outputs"):
        run(
            lambda: fn.dl_tensor_python_function(
                function=lambda: None, num_outputs=0, batch_processing=False
            )
        )


# Ragged batches


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
            np.testing.assert_allclose(total, own.sum() + number, rtol=1e-5)
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
            RuntimeError, match="for the samples of one shape and .* those of another"
        ):
            run(lambda: fn.jax_function(function, ragged="group")(ragged()), batch_size=16)


def test_ragged_batches_are_refused_otherwise():
    iterator = data_iterator(lambda: fn.jax_function(lambda x: x)(ragged()), ["x"])(batch_size=8)
    with pytest.raises(RuntimeError, match="Pass ragged='pad' or ragged='group'"):
        next(iterator)


# Keys and state


@fn.jax_function
@jax.jit
def jittered(x, *, key):
    return x + jax.random.uniform(key, x.shape)


def sampled(x, *, rng, key):
    return x + np.float32(rng.random()), np.asarray(jax.random.uniform(key, (2,)))


def test_keys_are_of_the_seed_and_the_batch():
    def graph():
        x = dali_fn.constant(fdata=[0.0], shape=[3])
        both = functools.partial(fn.dl_tensor_python_function, x, function=sampled, num_outputs=2)
        return jittered(x), *both(batch_processing=False), *both(batch_processing=False)

    once, again, other = run(graph, 20), run(graph, 20), run(graph, 20, seed=4)
    flat = [np.concatenate([np.ravel(one) for output in r for one in output]) for r in once]
    for k, outputs in enumerate(again):
        for mine, theirs, changed in zip(once[k], outputs, other[k]):
            np.testing.assert_array_equal(mine, theirs)
            assert not np.array_equal(mine, changed)
    drawn = np.concatenate(flat)
    assert len(np.unique(drawn)) > 0.5 * len(drawn) and 0.4 < drawn.mean() < 0.6
    samples = once[0][1]
    assert len({one.tobytes() for one in samples}) == BATCH  # each sample draws its own


def copied(out0, in0):
    out0[:] = in0[:]


# numba_function: DALI's documentation


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


@pytest.mark.parametrize("batch", (False, True))
@pytest.mark.parametrize("source", (ragged, lambda: uniform((4, 3))), ids=("ragged", "uniform"))
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


def test_numba_without_setup_keeps_shapes_and_types():
    def double(out0, in0):
        out0[:] = in0[:] * 2

    def graph():
        x = ragged()
        single = fn.numba_function(
            x, run_fn=double, in_types=types.FLOAT, ins_ndim=2, out_types=types.FLOAT, outs_ndim=2
        )
        return x, single, fn.numba_function(x, run_fn=double, example=np.zeros((1, 3), np.float32))

    check(graph, lambda x: x * 2)


def test_numba_with_fewer_outputs_than_inputs_and_no_setup():
    def scaled(out0, in0, in1):
        out0[:] = in0[:] * in1[0]

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
    out0[:] = in1[:, 0]
    out1[:] = in0[:, 0] > 0.5
    out2[0] = in0.sum()


def setup_one(outs, ins):
    for k in range(len(outs[0])):
        outs[0][k][0] = ins[0][k][0] + ins[1][k][0]  # DALI's own sees one input here


def joined(out0, in0, in1):
    n = in0.shape[0]
    for k in range(n):
        out0[k] = in0[k, 0]
    for k in range(in1.shape[0]):
        out0[n + k] = in1[k, 0]


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


def test_numba_takes_six_of_each():
    def six(o0, o1, o2, o3, o4, o5, i0, i1, i2, i3, i4, i5):
        o0[:], o1[:], o2[:] = i5, i4, i3
        o3[:], o4[:], o5[:] = i2, i1, i0

    def graph():
        xs = [uniform((2,)) for _ in range(6)]
        return *xs, *fn.numba_function(*xs, run_fn=six, example=[np.zeros(2, np.float32)] * 6)

    for outputs in run(graph):
        for k in range(6):
            np.testing.assert_array_equal(outputs[k], outputs[11 - k])


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
    out0[:] = in0[::-1]


@pytest.mark.parametrize(
    "arguments,words",
    [
        ({}, "in_types and ins_ndim are missing"),
        ({"in_types": ["float32"], "ins_ndim": [1, 1]}, "one type and one number of dimensions"),
        ({"example": np.zeros(2, np.float16)}, "float16 is no type of Numba's"),
        ({"example": np.zeros(2, "M8[s]")}, "is no type of DALI's tensors"),
        (
            {
                "example": np.zeros(2, np.float32),
                "out_types": ["float32"] * 2,
                "outs_ndim": [1, 1],
            },
            r"outputs of \[1, 1\] dimensions .* of \[1\]: pass setup_fn",
        ),
        (
            {"example": np.zeros(2, np.float32), "out_types": ["float32"], "outs_ndim": [1, 1]},
            "1 out_types and 2 outs_ndim",
        ),
    ],
)
def test_numbas_arguments_are_checked(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        run(lambda: (fn.numba_function(uniform((2,)), run_fn=copied, **arguments),))


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
    for sample, words in ((np.zeros(2, np.uint8), "in_types"), (np.zeros((1, 2)), "ins_ndim")):
        with pytest.raises(RuntimeError, match=rf"`{words}`.*\n.*\n.*an example is one sample"):
            data = data_iterator(
                lambda s=sample: fn.numba_function(
                    uniform((2,)), run_fn=copied, example=np.float32(s) if s.ndim == 2 else s
                ),
                ["x"],
            )
            next(data(batch_size=2))
    with pytest.raises(numba.core.errors.NumbaError, match=r"FLOAT of 1 dimensions.*an example is"):
        run(
            lambda: (
                fn.numba_function(uniform((2,)), run_fn=planar, example=np.zeros(2, np.float32)),
            )
        )
    from dalijax.core.functions import numba_function as module

    def broken():
        raise AttributeError("numba has no attribute 'core'")

    monkeypatch.setattr(module, "_operator_class", broken)
    versions = rf"Numba {numba.__version__} and DALI [\d.]+ do not fit"
    with pytest.raises(RuntimeError, match=versions):
        run(
            lambda: (
                fn.numba_function(uniform((2,)), run_fn=copied, example=np.zeros(2, np.float32)),
            )
        )


def planar(out0, in0):
    out0[0, 0] = in0[0, 0]


def not_numba(out0, in0):
    out0[:] = in0[:]
    jax.numpy.sum(in0)


def test_numba_into_other_types():
    """Without setup_fn DALI would allocate the inputs' types, and Numba write behind their end."""

    def graph():
        x = dali_fn.random.uniform(shape=[1000], range=(0, 255), dtype=types.UINT8)
        return x, fn.numba_function(
            x, run_fn=copied, example=np.zeros(1, np.uint8), out_types="float32"
        )

    check(graph, lambda x: x.astype(np.float32))
    with pytest.raises(ValueError, match="pass setup_fn"):
        run(
            lambda: (
                fn.numba_function(
                    uniform((2,)), run_fn=copied, example=np.zeros(2, np.float32), outs_ndim=3
                ),
            )
        )


def test_what_numba_takes_for_constants_may_change_between_builds():
    table = np.zeros(1, np.float32)

    def graph(factor):
        def scaled(out0, in0):
            out0[:] = in0[:] * factor + table[0]

        x = uniform((2,))
        return x, fn.numba_function(x, run_fn=scaled, example=np.zeros(2, np.float32))

    for factor, shift in ((2, 1), (2.5, 5), (2, 5)):
        table[:] = shift
        check(lambda f=factor: graph(f), lambda x, f=factor, s=shift: x * f + np.float32(s))


def test_states_go_on_in_another_process(jpegs_many):
    program = f"""
import sys, json
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from nvidia.dali import fn as dali_fn
from dalijax import data_iterator, fn

def twice(out0, in0):
    out0[:] = in0[:] * 2

@fn.jax_function
@jax.jit
def jittered(x, *, key):
    return x + jax.random.uniform(key, x.shape)

def drawn(x, *, rng, key):
    return x + np.float32(rng.random()) + np.asarray(jax.random.uniform(key))

def shapes(outs, ins):
    for k in range(len(outs[0])):
        outs[0][k][0] = ins[0][k][0]

def graph():
    label = dali_fn.readers.file(files={jpegs_many[:12]!r}, name="reader")[1]
    other = dali_fn.random.uniform(shape=[1])
    compiled = fn.numba_function(
        other, run_fn=twice, setup_fn=shapes, in_types="float32", ins_ndim=1
    )
    return (
        label, compiled, jittered(other),
        fn.dl_tensor_python_function(other, function=drawn, batch_processing=False),
        fn.jax_function(lambda x, *, key: jax.random.uniform(key, x.shape), ragged="group")(other),
    )

names = ["x", "numba", "jax", "dlpack", "group"]
iterator = data_iterator(graph, names, reader_name="reader")(batch_size=4, num_threads=1)

def rest():
    return [{{k: np.asarray(v).tolist() for k, v in batch.items()}} for batch in iterator]
if sys.argv[1] == "save":
    next(iterator)
    state = iterator.get_state()
    assert "the Numba function of" in str(state["unchecked"]), state
    print(json.dumps([state, rest()]))
else:
    state, expected = json.loads(sys.stdin.read())
    iterator.set_state(state)
    assert rest() == expected and len(expected) == 2
    print("resumed")
"""
    options = {"capture_output": True, "text": True, "timeout": 120}
    saved = subprocess.run([sys.executable, "-c", program, "save"], **options)
    assert saved.returncode == 0, saved.stderr
    resumed = subprocess.run([sys.executable, "-c", program, "load"], input=saved.stdout, **options)
    assert resumed.stdout == "resumed\n", resumed.stderr


# dl_tensor_python_function: DALI's documentation


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
    with pytest.raises(RuntimeError, match="samples, and the batch has 4: return as many"):
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
        (lambda x: (x, x), "returned 2 outputs, and num_outputs is 1"),
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


# Around DALI


def test_conditionals():
    @fn.jax_function
    @jax.jit
    def jitter(x, *, key):
        return x + 0 * jax.random.uniform(key)

    def graph():
        x = dali_fn.random.uniform(shape=[3])
        flag = dali_fn.random.coin_flip(dtype=types.BOOL)
        if flag:
            y = jitter(x) * 2
        else:
            y = fn.dl_tensor_python_function(
                x, function=lambda one: one * 3, batch_processing=False
            )
        return x, flag, y

    pipeline = pipeline_def(graph, enable_conditionals=True)
    made = pipeline(batch_size=16, num_threads=1, device_id=None)
    made.build()
    for _ in range(5):
        x, flag, y = (np.asarray(output.as_array()) for output in made.run())
        np.testing.assert_allclose(y, np.where(flag.reshape(-1, 1), 2 * x, 3 * x), rtol=1e-6)


def test_keys_that_are_bound_or_of_another_kind():
    key = jax.random.key(5)

    def shifted(x, *, key):
        return x + jax.random.uniform(key)

    def graph():
        x = uniform((2,))
        return x, fn.jax_function(functools.partial(shifted, key=key))(x)

    check(graph, lambda x: x + np.asarray(jax.random.uniform(key)))
    try:
        jax.config.update("jax_default_prng_impl", "rbg")
        assert len(run(lambda: (jittered(uniform((2,))),))) == 3
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")


KEY = jax.random.key(7)


def noisy(x, *, key):
    return x * 0 + jax.random.uniform(key)


def hands_it_on(function):
    @functools.wraps(function)
    def wrapper(*given, **named):
        return function(*given, **named)

    return wrapper


def fills_it_in(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x, key=KEY)

    return wrapper


def optional(x, *, key=None):
    return noisy(x, key=KEY if key is None else key)


def an_option(x, *, key=KEY):
    return noisy(x, key=key)


@pytest.mark.parametrize(
    "function,filled",
    [
        (noisy, True),
        (jax.jit(noisy), True),
        (hands_it_on(jax.jit(noisy)), True),
        (jax.jit(hands_it_on(noisy)), True),
        (optional, True),
        (functools.partial(noisy, key=KEY), False),
        (jax.jit(functools.partial(noisy, key=KEY)), False),
        (fills_it_in(noisy), False),
        (jax.jit(fills_it_in(jax.jit(noisy))), False),
        (an_option, False),
    ],
)
def test_keys_are_filled_in_where_nobody_has(function, filled):
    batches = run(lambda: (fn.jax_function(function)(uniform((2,))),), runs=5)
    drawn = {float(sample[0]) for (batch,) in batches for sample in batch}
    own = float(jax.random.uniform(KEY))
    assert len(drawn) == 5 and own not in drawn if filled else drawn == {own}


@pytest.mark.parametrize("mode", ("pad", "group"))
def test_keys_of_ragged_functions(mode):
    def drawn(x, *, key, **lengths):
        return jax.random.uniform(key, (x.shape[0],))

    def graph():
        return ragged(), fn.jax_function(drawn, ragged=mode)(ragged())

    once, again = (run(graph, 6, batch_size=16) for _ in range(2))
    numbers = [float(one) for _, batch in once for one in batch]
    assert len(set(numbers)) == 6 * 16  # of each sample of each group and batch
    assert numbers == [float(one) for _, batch in again for one in batch]


def test_keys_of_functions_of_lists():
    def drawn(xs, *, rng, key):
        noise = np.float32(rng.random()) + np.asarray(jax.random.uniform(key, (2,)))
        return [noise for _ in xs]

    def graph():
        return fn.dl_tensor_python_function(uniform(()), function=drawn, batch_processing=True)

    once, again = (run(lambda: (graph(),), 6) for _ in range(2))
    assert len({batch[0].tobytes() for (batch,) in once}) == 6
    np.testing.assert_array_equal(once, again)


def test_iterators_that_are_collected_within_a_function():
    """Python's cyclic gc may run in DALI's threads, and end other pipelines there."""

    def collects(x):
        gc.collect()
        return x

    def same(x):
        return x

    class Trainer:
        def __init__(self):
            made = data_iterator(
                lambda: fn.dl_tensor_python_function(
                    uniform((2,)), function=same, batch_processing=False
                ),
                ["x"],
            )
            self.data = made(batch_size=2, num_threads=1)
            self.step = self.run  # a cycle
            next(self.data)

        def run(self):
            return next(self.data)

    main = data_iterator(
        lambda: fn.dl_tensor_python_function(
            uniform((2,)), function=collects, stateful=False, batch_processing=False
        ),
        ["x"],
    )(batch_size=2, num_threads=1)
    for _ in range(5):
        Trainer().step()
        for _ in range(3):
            next(main)
    main.close()


@pytest.mark.parametrize("make", function_cells.ADAPTERS)
def test_every_function_in_every_adapter_resumes_everywhere(jpegs_many, make):
    function_cells.check(make, jpegs_many, "cpu")


@pytest.mark.filterwarnings("default:.*seed.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ("numba", "dlpack"))
def test_arguments_of_any_operator(kind):
    def graph(**options):
        if kind == "dlpack":
            return fn.dl_tensor_python_function(
                uniform((3,)),
                function=lambda x: x,
                batch_processing=False,
                stateful=False,
                **options,
            )
        return fn.numba_function(
            uniform((3,)), run_fn=function_cells.halved, example=np.zeros(3, np.float32), **options
        )

    def arguments(**options):
        said = []

        def asked():
            node = graph(**options)
            said.extend([node.source.name, str(node.source.spec)])
            return node

        run(lambda: (asked(),))
        return said

    name, spec = arguments(name="mine", bytes_per_sample_hint=5000, preserve=True)
    assert name == "mine" and "bytes_per_sample_hint: [5000, ]" in spec and "preserve: True" in spec
    with pytest.warns(DeprecationWarning, match='"seed" should not be used'):
        arguments(seed=5)  # DALI's own words: it has no use for it
    name, spec = arguments()
    assert name != "mine" and "sample_hint" not in spec and "preserve: True" not in spec


def test_numba_takes_plain_functions_of_arrays():
    class Scale:
        def run(self, out0, in0):
            out0[:] = in0[:]

    def scaled(out0, in0, scale=0.5):
        out0[:] = in0[:] * scale

    example = np.zeros(3, np.float32)

    def made(run_fn, **options):
        options = {"example": example} | options
        return lambda: (x := uniform((3,)), fn.numba_function(x, run_fn=run_fn, **options))

    check(made(scaled), lambda x: x / 2)  # a parameter with a default is no output
    for wrong, kind in ((Scale().run, "method"), (functools.partial(scaled, scale=2), "partial")):
        with pytest.raises(TypeError, match=f"is a {kind}: Numba compiles plain functions"):
            run(made(wrong))
    with pytest.raises(ValueError, match=r"Give numbers one by fn.reshape\(x, shape=\[1\]\)"):
        run(made(scaled, example=np.float32(0)))


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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    numbas, jaxs = done.stdout.splitlines()
    assert numbas == 'ImportError fn.numba_function needs Numba: pip install "dalijax[numba]"'
    assert jaxs.startswith("RuntimeError fn.jax_function needs the JAX that DALI's plugin wants")


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
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 fn.dl_tensor_python_function without batch_processing: DALI")
    assert "batch_processing=False, or True" in done.stdout


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


@pytest.mark.parametrize("preserve", (None, True, False))
def test_preserve_false_drops_what_nobody_uses_whatever_its_parameters(preserve):
    called = set()

    def plain(x):
        called.add("plain")
        return x

    def keyed(x, *, key):
        called.add("key")
        return x

    def drawn(x, *, rng):
        called.add("rng")
        return x

    def silent(x, *, rng):
        called.add("silent")

    def padded(x, *, lengths, key):
        called.add("padded")
        return x

    def used(x, *, key):
        called.add("used")
        return x

    def graph():
        x = uniform((2,))
        options = {} if preserve is None else {"preserve": preserve}
        function = functools.partial(
            fn.dl_tensor_python_function, x, batch_processing=False, stateful=False, **options
        )
        for one in (plain, keyed, drawn):
            function(function=one)
        function(function=silent, num_outputs=0)
        fn.jax_function(padded, ragged="pad", stateful=False, **options)(x)
        return function(function=used)

    run(graph, runs=5)
    all_of_them = {"plain", "key", "rng", "silent", "padded", "used"}
    assert called == ({"used"} if preserve is False else all_of_them)


def test_the_public_functions():
    assert set(fn.__all__) == {
        "dl_tensor_python_function",
        "jax_function",
        "numba_function",
        "read_file",
    }
    assert dalijax.LastBatchPolicy is LastBatchPolicy


def test_a_gpus_tensor_is_handed_over_once_where_it_is():
    tensor = DLTensor(1, None, np.arange(3.0).__dlpack__())  # of a host, which nobody looks at
    assert tensor.__dlpack_device__() == (2, 1) and tensor.dtype == "float64"
    for wanted in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="Copy what from_dlpack makes of them"):
            tensor.__dlpack__(**wanted)
    capsule = tensor.__dlpack__(stream=1, max_version=(1, 0), dl_device=(2, 1), copy=False)
    assert type(capsule).__name__ == "PyCapsule"
    for again in (tensor.__dlpack__, lambda: tensor.dtype):
        with pytest.raises(RuntimeError, match="taken by from_dlpack already"):
            again()


@pytest.mark.parametrize("dtype", (np.int64, np.float64, np.float32, np.uint8))
@pytest.mark.parametrize("offset", range(3))
def test_copies_at_even_addresses_are_what_they_were(dtype, offset):
    values = (np.arange(9) * (1 << 40) + 5).astype(dtype)[offset:]  # more than 32 bits hold
    copied = aligned(Exported(values.__dlpack__(), (1, 0)))
    assert copied.unsafe_buffer_pointer() % 16 == 0
    np.testing.assert_array_equal(np.from_dlpack(copied), values, strict=True)


def doubled(out, x):
    for k in range(x.shape[0]):
        out[k] = x[k] * 2


@pytest.mark.parametrize("kind", ("jax", "dlpack", "numba"))
def test_a_run_of_dalis_plugin_goes_on_here(jpegs, kind):
    def graph(jax_function, dlpack_function, numba_function):
        _, label = dali_fn.readers.file(files=jpegs, name="reader")
        x = dali_fn.random.uniform(shape=[3])
        if kind == "jax":
            return label, x, jax_function(lambda x: x * 2)(x)
        if kind == "dlpack":
            return label, x, dlpack_function(x, function=lambda x: x, batch_processing=True)
        return label, x, numba_function(x)

    def theirs():
        from nvidia.dali.plugin.numba.fn.experimental import numba_function

        types_of = {"out_types": [types.FLOAT], "in_types": [types.FLOAT]}
        numba_own = functools.partial(
            numba_function, run_fn=doubled, outs_ndim=[1], ins_ndim=[1], **types_of
        )
        return graph(dax.fn.jax_function, dali_fn.dl_tensor_python_function, numba_own)

    def ours():
        own = functools.partial(fn.numba_function, run_fn=doubled, in_types="float32", ins_ndim=1)
        return graph(fn.jax_function, fn.dl_tensor_python_function, own)

    call = {"batch_size": 4, "num_threads": 1, "device_id": None, "seed": 3}
    names = {"output_map": ["label", "x", "y"], "reader_name": "reader"}
    first = dax.data_iterator(theirs, **names)(**call, enable_checkpointing=True)
    next(first)
    saved = first.checkpoints()
    second = data_iterator(ours, **names)(**call, checkpoints=saved)
    expected, batch = next(first), next(second)
    for name in names["output_map"]:
        np.testing.assert_array_equal(batch[name], np.asarray(expected[name]))


@pytest.mark.parametrize("layout", ("FHWC", "DHWC", "FDHWC"))
def test_sequences_and_volumes(layout):
    shape = (2, 3, 4, 5, 2)[-len(layout) :]

    def doubled(out0, in0):
        for k in range(in0.shape[0]):
            out0[k] = in0[k] * 2

    def graph():
        x = dali_fn.reshape(uniform(shape), layout=layout)
        return (
            x,
            fn.jax_function(lambda x: x * 2)(x),
            fn.jax_function(lambda x: x * 2, ragged="group")(x),
            fn.dl_tensor_python_function(x, function=lambda x: x * 2, batch_processing=False),
            fn.numba_function(x, run_fn=doubled, example=np.zeros(shape, np.float32)),
        )

    check(graph, lambda x: x * 2)
    assert layouts(graph)[:2] == [layout, layout]


def test_256_inputs():
    def total(*arrays):
        assert len(arrays) == 256
        return sum(arrays)

    def graph():
        x = uniform((2,))
        inputs = [x] + [dali_fn.copy(x) for _ in range(255)]
        return (
            x,
            fn.jax_function(total)(*inputs),
            fn.dl_tensor_python_function(*inputs, function=total, batch_processing=False),
        )

    for x, *made in run(graph, runs=1):
        for one in made:
            np.testing.assert_allclose(one, 256 * np.array(x), rtol=1e-5)


def test_functions_whose_outputs_nobody_uses_stay_in_the_graph():
    def operators(**options):
        def graph():
            x = uniform((2,))
            named = {"name": "numba", **options}
            fn.numba_function(
                x, run_fn=function_cells.halved, example=np.zeros(2, np.float32), **named
            )
            fn.dl_tensor_python_function(
                x, function=lambda x: x, batch_processing=False, name="dlpack", **options
            )
            return x

        arguments = {"batch_size": 2, "num_threads": 1, "device_id": None}
        pipeline = pipeline_def(graph, enable_memory_stats=True, exec_dynamic=False, **arguments)()
        pipeline.build()
        pipeline.run()
        return set(pipeline.executor_statistics())

    for options in ({}, {"preserve": True}):
        assert {"CPU_numba", "CPU_dlpack"} <= operators(**options)


def test_errors_name_the_function_that_was_called():
    def graph():
        return fn.dl_tensor_python_function(
            uniform(), function=lambda x: 1 / 0, batch_processing=False
        )

    with pytest.raises(RuntimeError, match="`nvidia.dali.fn.dl_tensor_python_function`") as raised:
        run(graph)
    assert "in graph" in str(raised.value)
    with pytest.raises(ValueError, match="num_outputs=-1: 0 is the least"):
        run(
            lambda: fn.dl_tensor_python_function(
                uniform(), function=abs, num_outputs=-1, batch_processing=False
            )
        )


@pytest.mark.parametrize("batch", (False, True))
def test_dalis_own_callback_is_not_around_it(batch):
    """It makes the pipeline the current one, which takes longer than most functions."""
    above = set()

    def look(x):
        above.update(one.name for one in traceback.extract_stack())
        return x

    options = {"function": look, "batch_processing": batch, "stateful": False}
    run(lambda: fn.dl_tensor_python_function(uniform(), **options))
    assert "look" in above and "function_wrapper_batch" not in above


def test_outputs_that_a_pipeline_keeps_alive_go_when_it_is_closed():
    places = []

    def graph():
        pipeline = Pipeline.current()
        places.extend([live_outputs(pipeline), live_outputs(pipeline, 3)])
        return dali_fn.random.uniform(shape=[2])

    iterator = data_iterator(graph, ["x"], size=-1)(batch_size=2)
    next(iterator)
    for place in places:
        place.extend(range(5))
    assert [list(place) for place in places] == [[0, 1, 2, 3, 4], [2, 3, 4]]
    release(pipeline_def(graph, batch_size=2, num_threads=1, device_id=None)())  # another one
    assert [len(place) for place in places[:2]] == [5, 3]
    iterator.close()
    assert [len(place) for place in places[:2]] == [0, 0]


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("compiled", (True, False))
def test_functions_without_outputs_read_their_own_batch(dynamic, compiled):
    """The older executors write the memory of the inputs again at once."""
    work, sums = jnp.full((500, 500), 1e-3), []

    @jax.jit
    def total(x):  # in milliseconds, while DALI goes on
        idle = work
        for _ in range(12):
            idle = idle @ work
        return x.sum() + 0 * idle[0, 0]

    def watch(x):
        sums.append(total(x if compiled else x * 1))

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, exec_dynamic=dynamic)
    def graph():
        x = dali_fn.random.uniform(shape=[64])
        fn.jax_function(watch, num_outputs=0, stateful=False)(x)
        return x

    pipeline = graph()
    batches = [np.array([np.array(one) for one in pipeline.run()[0]]) for _ in range(20)]
    assert len(sums) >= 20
    for x, made in zip(batches, sums):
        np.testing.assert_allclose(float(made), x.sum(), rtol=1e-4, atol=1e-3)
