"""All kinds of functions among DALI's operators, executors, checkpoints and adapters."""

import functools
import gc
import traceback

import jax
import numpy as np
import pytest
from forks import run_fork
from function_graphs import check, layouts, run, uniform
from nvidia.dali import fn as dali_fn
from nvidia.dali import pipeline_def, types
from nvidia.dali.plugin import jax as dax

import dalijax
import function_cells
from dalijax import LastBatchPolicy, data_iterator, fn
from full import in_full, in_slow

NUMBA = in_slow("numba")  # Numba compiles for seconds


def test_dalis_operators_are_elsewhere():
    with pytest.raises(AttributeError, match=r"no 'readers'. .*operators are in nvidia\.dali\.fn"):
        fn.readers
    assert not hasattr(fn, "__wrapped__")


@pytest.mark.slow
def test_states_go_on_in_another_process(jpegs_many, tmp_path):
    program = f"""
import sys, json, pathlib
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from nvidia.dali import fn as dali_fn
from dalijax import data_iterator, fn

def twice(out0, in0):
    for k in range(in0.shape[0]):
        out0[k] = in0[k] * 2

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
    pathlib.Path(sys.argv[2]).write_text(json.dumps([state, rest()]))
else:
    state, expected = json.loads(pathlib.Path(sys.argv[2]).read_text())
    iterator.set_state(state)
    assert rest() == expected and len(expected) == 2
    print("resumed")
"""
    run_fork(program, "save", tmp_path / "state.json")
    loaded = run_fork(program, "load", tmp_path / "state.json", number=1)
    assert loaded.stdout == "resumed\n"


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
    for _ in range(3):
        Trainer().step()
        for _ in range(3):
            next(main)
    main.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", function_cells.ADAPTERS)
def test_every_function_in_every_adapter_resumes_everywhere(jpegs_many, make):
    function_cells.check(make, jpegs_many, "cpu")


@pytest.mark.filterwarnings("default:.*seed.*:DeprecationWarning")
@pytest.mark.parametrize("kind", (NUMBA, "dlpack"))
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
        "cast",
        "dl_tensor_python_function",
        "jax_function",
        "numba_function",
        "pad_rows",
        "read_file",
    }
    assert dalijax.LastBatchPolicy is LastBatchPolicy


def doubled(out, x):
    for k in range(x.shape[0]):
        out[k] = x[k] * 2


@pytest.mark.parametrize("kind", ("jax", "dlpack", NUMBA))
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


@pytest.mark.parametrize("layout", (in_full("FHWC"), in_full("DHWC"), "FDHWC"))
def test_sequences_and_volumes(layout):
    shape = (2, 3, 4, 5, 2)[-len(layout) :]

    def doubled(out0, in0):
        for k in range(in0.size):  # Numba compiles loops over rows for twice as long
            out0.flat[k] = in0.flat[k] * 2

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
