"""`fn.jax_function`: calls, outputs, layouts, and the errors of a batch."""

import functools
import itertools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_graphs import BATCH, check, layouts, run, uniform
from nvidia.dali import Pipeline, pipeline_def
from nvidia.dali import fn as dali_fn
from nvidia.dali.plugin import jax as dax
from shardings import rows_over

from dalijax import data_iterator, fn
from dalijax.core.pipeline.dali_pipeline import free
from dalijax.core.pipeline.function_notes import live_outputs
from full import in_slow
from pages import ROOT, Page


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


def test_a_sharding_over_one_device():
    """As in DALI; functions of the batch over several devices are for ``batch_map``."""
    seen = []

    def doubled(x, *, key):
        seen.append((x.sharding, key.shape))
        return x * 2

    def graph(sharding, shard_id=0, num_shards=1):
        x = uniform()
        return x, dali_fn.copy(fn.jax_function(doubled, sharding=sharding, stateful=False)(x))

    for placed in ({}, {"sharding": rows_over(1)}):
        made = data_iterator(graph, ["x", "f"], size=40, **placed)
        with made(rows_over(1), batch_size=BATCH, num_threads=1) as iterator:
            for batch in itertools.islice(iterator, 3):
                np.testing.assert_array_equal(np.asarray(batch["f"]), 2 * np.asarray(batch["x"]))
    assert seen and set(seen) == {(rows_over(1), ())}
    for placed in ({}, {"sharding": rows_over(2)}):
        made = data_iterator(graph, ["x", "f"], size=40, **placed)
        with pytest.raises(ValueError, match=r"2 devices of this process.*batch_map=f"):
            made(rows_over(2), batch_size=BATCH)
    with pytest.raises(ValueError, match="ragged with sharding"):
        fn.jax_function(doubled, sharding=rows_over(1), ragged="pad")


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
    assert "Return None" in caplog.text and "has no outputs, failed" in caplog.text


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
    with pytest.raises(ValueError, match=r"output_layouts=\['A', 'B'\] has more layouts"):
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
        (lambda x: (x, x), {}, "returned 2 outputs, but num_outputs is 1"),
        (lambda x: x, {"num_outputs": 2}, "returned 1 output, but num_outputs is 2"),
        (lambda x: None, {}, "returned 0 outputs"),
        (lambda x: x[:2], {}, r"shape \(2, 6, 5, 3\), but the batch has 4"),
        (lambda x: x.sum(), {}, r"shape \(\), but the batch"),
        (lambda x: x.astype(jnp.bfloat16), {}, "bfloat16, for which DALI has no type"),
        (lambda x: np.zeros(4, np.complex64), {}, "complex64, for which DALI has no type"),
        (lambda x: jax.random.split(jax.random.key(3), 4), {}, "e.g. jax.random.key_data"),
        (lambda x: np.zeros(4), {}, "float64, which JAX would narrow to float32"),
        (lambda x: "text", {}, "is a str, not an array"),
        (
            lambda x: x,
            {"output_layouts": "HW"},
            "3 dimensions without the batch dimension, but",
        ),
        (lambda x: 1 / 0, {}, "ZeroDivisionError"),
        (jax.vmap(lambda x, *, key: x), {}, "vmap was requested to map its argument"),
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
    for _ in range(2):  # the iterator continues, and fails again
        with pytest.raises(RuntimeError, match=words):
            next(iterator)
    iterator.close()


@pytest.mark.parametrize(
    "later,words",
    [
        (lambda x: (x, x), "returned 2 outputs, but num_outputs is 1"),
        (lambda x: (), "returned 0 outputs"),
        (lambda x: None, "returned 0 outputs"),
        (lambda x: x[:2], r"shape \(2, 6, 5, 3\), but the batch has 4"),
        (lambda x: x[..., None], "4 dimensions without the batch dimension, but its layout"),
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

    with pytest.raises(RuntimeError, match=r"shape \(4, 2\), but the batch has 3"):
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


def test_the_example_of_the_docs(jpegs):
    names = {}
    code = Page(ROOT / "docs" / "functions.md").block("batch_map")
    code = code.split("batch = next(")[0]  # over a folder of the page's own
    exec(code, names)  # noqa: S102 - our own text
    with names["train"](str(Path(jpegs[0]).parent.parent), batch_size=4) as iterator:
        state, batch = iterator.get_state(), next(iterator)
        assert batch["images"].shape == (4, 224, 224, 3)
        assert batch["images"].dtype == np.float32
        np.testing.assert_allclose(np.asarray(batch["labels"]).sum(1), 1, rtol=1e-6)
        iterator.set_state(state)
        np.testing.assert_array_equal(next(iterator)["images"], batch["images"])


def numba_both(x):
    def both(out0, out1, in0, in1):
        out0[:] = in0
        out1[:] = in1

    return fn.numba_function(x, x * 2, run_fn=both, example=[np.zeros(3, np.float32)] * 2)


def doubled(x):
    return x, x * 2


@pytest.mark.parametrize(
    "graph",
    [
        fn.jax_function(doubled, num_outputs=2),
        lambda x: fn.jax_function(lambda x, lengths: doubled(x), 2, ragged="pad")(x),
        lambda x: fn.dl_tensor_python_function(
            x, function=doubled, num_outputs=2, batch_processing=False
        ),
        in_slow(numba_both),
    ],
    ids=("jax", "ragged", "dlpack", "numba"),
)
def test_several_outputs_may_be_what_a_graph_returns(graph):
    """DALI's operators give lists, which its pipeline functions must not return."""
    iterator = data_iterator(lambda: graph(uniform((3,))), ["x", "y"])
    with iterator(batch_size=2) as made:
        batch = next(made)
        np.testing.assert_array_equal(batch["y"], 2 * np.asarray(batch["x"]))


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

    written = threading.Semaphore(0)

    def twice(x):
        np.multiply(x, 2, out=own)
        written.release()
        return own

    def graph():
        x = uniform((1024,))
        return x, fn.jax_function(twice, stateful=False)(x)

    pipeline = pipeline_def(graph, batch_size=BATCH, num_threads=2, device_id=None)()
    pipeline.run()
    assert all(written.acquire(timeout=300) for _ in range(2))
    for _ in range(10):
        x, made = pipeline.run()
        assert written.acquire(timeout=300)  # the next batch lies there, too
        np.testing.assert_array_equal(made.as_array(), x.as_array() * 2)


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
    free(pipeline_def(graph, batch_size=2, num_threads=1, device_id=None)())  # another one
    assert [len(place) for place in places[:2]] == [5, 3]
    iterator.close()
    assert [len(place) for place in places[:2]] == [0, 0]


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("compiled", (True, False))
def test_functions_without_outputs_read_their_own_batch(dynamic, compiled):
    """The older executors write the memory of the inputs again at once."""
    work, sums = jnp.full((500, 500), 1e-3), []

    @jax.jit
    def total(x):  # in milliseconds, while DALI continues
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
