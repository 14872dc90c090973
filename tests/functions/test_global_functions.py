"""Functions of global arrays: the last step of a graph, called on the placed batch."""

import functools
import gc
import itertools
import json
import os
import sys
import threading
import weakref
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn as dali_fn
from nvidia.dali import math as dali_math
from nvidia.dali import pipeline_def, types
from shardings import rows_over

import dalijax
from dalijax import data_iterator, fn
from dalijax.adapters.clu import DALIDatasetIterator
from dalijax.adapters.grain import DALIDataLoader, DALIIterDataset, DALITransform
from numbered import read_files
from programs import run_python


def sharded(files, shard_id=0, num_shards=1, sharding=None, function=None, broken=""):
    data, label = read_files(
        files, shard_id=shard_id, num_shards=num_shards, pad_last_batch=True, stick_to_shard=True
    )
    x = dali_fn.cast(label, dtype=types.FLOAT)
    if broken:
        x = x + 0 * dali_fn.cast(dali_fn.decoders.image(data)[0, 0, :1], dtype=types.FLOAT)
    return x, *fn.jax_function(function, num_outputs=2, sharding=sharding)(x)


@jax.jit
def centred(x, *, key):
    return x - x.mean(), jnp.flip(x, 0) + jax.random.uniform(key)


def over_files(sharding, function=centred, **settings):
    """An iterator function of files' numbers and what a function makes of them."""
    graph = functools.partial(sharded, sharding=sharding, function=function)
    settings = {"reader_name": "reader", "sharding": sharding} | settings
    return data_iterator(graph, ["x", "c", "f"], **settings)


def in_two(function, source=None, sharded_function=True, size=80, **settings):
    """An iterator of two pipelines' numbers, and a function of the global array, or of each."""
    sharding = rows_over(2)
    seen = sharding if sharded_function else None
    called = fn.jax_function(function, sharding=seen, stateful=False)

    def graph(shard_id=0, num_shards=1):
        x = numbers(shard_id, source)
        return x, called(x)

    made = data_iterator(graph, ["x", "f"], size=size, sharding=sharding, **settings)
    return made(batch_size=4, num_threads=1)


def numbers(shard_id, source=None):
    """Twice the number of the batch, and 100 more in the second shard."""

    def rows(info):
        if source is not None:
            source(info, shard_id)
        return np.full((2, 1), info.iteration + 100 * shard_id, np.float32)

    return dali_fn.external_source(rows, batch_info=True, dtype=types.FLOAT, ndim=1)


def of_graph(steps, names, sharding=None, **call):
    """An iterator over a graph of `numbers`, whose steps get them."""
    sharding = sharding or rows_over(2)

    def graph(shard_id=0, num_shards=1):
        return steps(numbers(shard_id))

    made = data_iterator(graph, names, size=80, sharding=sharding)
    return made(batch_size=4, num_threads=1, **call)


# The batch


@pytest.mark.parametrize("spec", ("d", None))
def test_a_function_of_global_arrays(jpegs_many, spec):
    devices = np.array(jax.devices()).reshape(4, 2)
    sharding = NamedSharding(Mesh(devices, ("d", "m")), PartitionSpec(spec))
    call = {"files": jpegs_many[:16], "batch_size": 8, "num_threads": 1}
    made = over_files(sharding)
    batches, states = [], []
    iterator = made(**call)
    for _ in range(3):
        for batch in iterator:
            x, c, f = (np.asarray(batch[name]).ravel() for name in "xcf")
            np.testing.assert_allclose(c, x - x.mean())
            drawn = f - x[::-1]
            np.testing.assert_allclose(drawn, drawn[0], rtol=1e-5, atol=1e-5)
            assert batch["c"].sharding == batch["x"].sharding == sharding
            batches.append((x, f))
            states.append(json.dumps(iterator.get_state()))
        iterator.reset()
    assert len({f.tobytes() for _, f in batches}) == len(batches)
    for at, state in enumerate(states[:-1]):
        other = made(**call)
        other.set_state(json.loads(state))
        if at % 2:
            other.reset()
        batch = next(other)
        np.testing.assert_array_equal(np.asarray(batch["f"]).ravel(), batches[at + 1][1])
        other.close()


def test_outputs_have_any_shape_and_dtype():
    def many(x):
        return x.mean(), jax.random.split(jax.random.key(0), 3), x.astype(jnp.bfloat16)

    called = fn.jax_function(jax.jit(many), num_outputs=3, sharding=rows_over(2), stateful=False)
    with of_graph(lambda x: (x, *called(x)), ["x", "mean", "keys", "half"]) as iterator:
        for step in range(3):
            batch = next(iterator)
            assert float(batch["mean"]) == step + 50
            np.testing.assert_array_equal(
                jax.random.key_data(batch["keys"]),
                jax.random.key_data(jax.random.split(jax.random.key(0), 3)),
            )
            assert batch["half"].dtype == jnp.bfloat16
            assert batch["half"].sharding == batch["x"].sharding
        spec = iterator.element_spec
    assert spec["mean"].shape == () and spec["keys"].shape == (3,) and spec["x"].shape == (4, 1)


def test_outputs_are_placed_by_a_dict_of_shardings():
    rows = rows_over(2)
    sharding = {"x": rows, "y": PartitionSpec(), "mean": PartitionSpec()}

    def both(x):
        return x * 2, x.mean()

    called = fn.jax_function(both, num_outputs=2, sharding=rows, stateful=False)
    with of_graph(lambda x: (x, *called(x)), list(sharding), sharding) as iterator:
        batch = next(iterator)
    assert (
        batch["y"].sharding == batch["mean"].sharding == NamedSharding(rows.mesh, PartitionSpec())
    )
    np.testing.assert_array_equal(np.asarray(batch["y"]).ravel(), [0, 0, 200, 200])


def test_inputs_have_the_functions_sharding():
    seen = []
    everywhere = NamedSharding(rows_over(2).mesh, PartitionSpec())

    def look(x, y):
        seen.append((x.sharding, y.sharding))
        return x

    def steps(x):
        doubled = fn.jax_function(lambda x: x * 2, sharding=rows_over(2), stateful=False)(x)
        return x, fn.jax_function(look, sharding=everywhere, stateful=False)(x, doubled)

    with of_graph(steps, ["x", "y"]) as iterator:
        batch = next(iterator)
        np.testing.assert_array_equal(np.asarray(batch["x"]), np.asarray(batch["y"]))
        assert batch["y"].sharding == batch["x"].sharding == rows_over(2)
    assert seen == [(everywhere, everywhere)]


def test_functions_of_other_functions_outputs():
    order = []

    def step(name, function):
        called = lambda *xs: order.append(name) or function(*xs)  # noqa: E731
        return fn.jax_function(called, sharding=rows_over(2), stateful=False)

    def steps(x):
        squared = step("squared", lambda x: x * x)(x)
        mean = step("mean", lambda x: x.mean())(squared)
        return step("less", lambda x, m: x - m)(squared, mean), x

    with of_graph(steps, ["y", "x"]) as iterator:
        for batch in itertools.islice(iterator, 3):
            x = np.asarray(batch["x"])
            np.testing.assert_allclose(np.asarray(batch["y"]), x**2 - (x**2).mean())
    assert order == ["squared", "mean", "less"] * 3


def test_a_graph_may_return_what_functions_return_alone():
    called = fn.jax_function(lambda x: x * 2, sharding=rows_over(2), stateful=False)
    with of_graph(called, ["y"]) as iterator:
        assert np.asarray(next(iterator)["y"]).ravel().tolist() == [0, 0, 200, 200]

    @fn.jax_function(sharding=rows_over(2))
    def noise(*, key):
        return jax.random.uniform(key, (3,))

    with of_graph(lambda x: noise(), ["y"]) as iterator:
        drawn = [np.asarray(next(iterator)["y"]).tobytes() for _ in range(3)]
    assert len(set(drawn)) == 3
    nothing = fn.jax_function(lambda: jnp.ones(3), sharding=rows_over(2))
    with pytest.raises(ValueError, match="give one of them an output of an operator"):
        of_graph(lambda x: nothing(), ["y"])


def test_donated_inputs_are_not_delivered():
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    called = fn.jax_function(double, sharding=rows_over(2))
    with of_graph(lambda x: called(dali_fn.copy(x)), ["y"]) as iterator:
        for step in range(5):
            got = np.asarray(next(iterator)["y"]).ravel().tolist()
            assert got == [2 * step] * 2 + [200 + 2 * step] * 2


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_numpy_outputs_of_global_functions_are_not_narrowed(dtype):
    sharding = rows_over(1)

    @fn.jax_function(sharding=sharding, stateful=False)
    def wide(x):
        return np.asarray(x, dtype) * 2

    def graph():
        x = dali_fn.random.uniform(shape=[2])
        return x, wide(x)

    iterator = data_iterator(graph, ["x", "y"], size=-1, sharding=sharding)(batch_size=2)
    if dtype == np.float64:
        with pytest.raises(RuntimeError, match="which JAX would narrow to float32"):
            next(iterator)
    else:
        batch = next(iterator)
        np.testing.assert_array_equal(np.asarray(batch["y"]), 2 * np.asarray(batch["x"]))


# When it is called


def test_it_is_called_once_for_each_batch_that_is_delivered_in_the_callers_thread():
    calls, traces = [], []

    @jax.jit
    def traced(x):
        traces.append(x.shape)
        return x * 2

    def called(x):
        calls.append(threading.get_ident())
        return traced(x)

    with in_two(called) as iterator:
        assert iterator.element_spec["f"].shape == (4, 1) and len(calls) == 1
        peeked = iterator.peek()
        assert peeked["f"] is iterator.peek()["f"] is next(iterator)["f"]
        assert len(calls) == 1
        for step in range(1, 4):
            assert np.asarray(next(iterator)["f"]).ravel()[0] == 2 * step
            assert len(calls) == step + 1
        state = iterator.get_state()
        assert iterator.skip(3) == 3 and len(calls) == 4  # nobody wants those
        assert np.asarray(next(iterator)["f"]).ravel()[0] == 14
        iterator.set_state(state)
        assert np.asarray(next(iterator)["f"]).ravel()[0] == 8
    assert set(calls) == {threading.get_ident()} and traces == [(4, 1)]


@pytest.mark.parametrize("outputs", (0, 1))
@pytest.mark.parametrize("preserve", (True, False))
def test_functions_whose_outputs_nobody_uses(outputs, preserve):
    calls = []

    def look(x, *, key):
        calls.append((np.asarray(x).ravel().tolist(), jax.random.key_data(key).tolist()))
        return x if outputs else None

    options = {"num_outputs": outputs, "preserve": preserve, "stateful": False}

    def steps(x):
        made = fn.jax_function(look, sharding=rows_over(2), **options)(x + 1)
        assert outputs or made == ()
        return x

    with of_graph(steps, ["x"]) as iterator:
        for step in range(4):
            assert set(next(iterator)) == {"x"}
            assert len(calls) == (step + 1) * preserve
    assert [rows[1:3] for rows, _ in calls] == [[k + 1, k + 101] for k in range(len(calls))]
    assert len({str(key) for _, key in calls}) == len(calls)


def test_those_that_a_used_function_needs_are_called():
    called = functools.partial(fn.jax_function, sharding=rows_over(2), preserve=False)

    def steps(x):
        called(lambda x: 1 / 0)(x)
        return x, called(lambda y: y + 1)(called(lambda x: x * 2)(x))

    with of_graph(steps, ["x", "y"]) as iterator:
        batch = next(iterator)
    np.testing.assert_array_equal(np.asarray(batch["y"]), 2 * np.asarray(batch["x"]) + 1)


@pytest.mark.parametrize("executor", ({"exec_async": False, "exec_pipelined": False}, {}))
@pytest.mark.parametrize("dynamic", (True, False))
def test_every_executor(jpegs_many, executor, dynamic):
    if dynamic and executor:
        pytest.skip("DALI's dynamic executor is asynchronous")
    made = over_files(rows_over(2))
    call = {"files": jpegs_many[:16], "batch_size": 4, "exec_dynamic": dynamic, **executor}
    with made(**call) as iterator:
        batches = list(iterator)
    assert len(batches) == 4
    for batch in batches:
        x = np.asarray(batch["x"])
        np.testing.assert_allclose(np.asarray(batch["c"]), x - x.mean())


# What is refused

USES = {
    "operator": lambda p, x: dali_fn.cast(p, dtype=types.INT32),
    "argument": lambda p, x: dali_fn.gaussian_blur(x, sigma=p),
    "second input": lambda p, x: dali_fn.stack(x, p),
    "math": lambda p, x: dali_math.sqrt(p),
    "added": lambda p, x: x + p,
    "adds": lambda p, x: p + 1,
    "from 1": lambda p, x: 1 - p,
    "negative": lambda p, x: -p,
    "positive": lambda p, x: +p,
    "equal": lambda p, x: p == x,
    "less": lambda p, x: x < p,
    "item": lambda p, x: p[0],
    "unpacked": lambda p, x: next(iter(p)),
    "length": lambda p, x: len(p),
    "gpu": lambda p, x: p.gpu(),
    "cpu": lambda p, x: p.cpu(),
    "shape": lambda p, x: p.shape(),
    "dtype": lambda p, x: p.dtype,
    "any attribute": lambda p, x: p.mean,
    "set attribute": lambda p, x: setattr(p, "name", "x"),
    "not": lambda p, x: not p,
    "and": lambda p, x: p and x,
    "numpy": lambda p, x: np.asarray(p),
    "jnp": lambda p, x: jnp.sum(p),
    "python_function": lambda p, x: dali_fn.python_function(p, function=lambda y: y),
    "jax_function": lambda p, x: fn.jax_function(lambda y: y)(p),
    "dlpack": lambda p, x: fn.dl_tensor_python_function(p, function=lambda y: y),
}


def in_if(p, x):
    if p:
        return x
    return x + 1


def passed_through_if(p, x):
    if dali_fn.random.coin_flip(dtype=types.BOOL):  # noqa: SIM108 - which DALI rewrites
        y = p
    else:
        y = x
    return y


@pytest.mark.filterwarnings("ignore:.*AutoGraph")
@pytest.mark.parametrize("conditionals", (False, True))
@pytest.mark.parametrize(
    "use", [*USES, in_if, passed_through_if], ids=lambda one: getattr(one, "__name__", one)
)
def test_every_use_in_the_graph_names_the_function_and_the_cure(use, conditionals):
    if use is passed_through_if and not conditionals:
        pytest.skip("of DALI's if alone")
    use = USES.get(use, use)

    def halves(x):
        return x / 2

    called = fn.jax_function(halves, sharding=rows_over(2))
    with pytest.raises(ValueError) as raised:
        of_graph(lambda x: (x, use(called(x), x)), ["x", "y"], enable_conditionals=conditionals)
    assert "halves() was used in the graph" in str(raised.value)
    assert "make it the last step of the graph, or apply it to the batch" in str(raised.value)


def branching(x, shard_id=0, num_shards=1):
    called = fn.jax_function(lambda x: x, sharding=rows_over(2))
    if dali_fn.random.coin_flip(dtype=types.BOOL):  # noqa: SIM108 - which DALI rewrites
        y = called(x)
    else:
        y = x
    return y


def test_a_call_in_a_branch_of_if_is_refused():
    def graph(shard_id=0, num_shards=1):
        return branching(dali_fn.random.uniform(shape=[2]))

    made = data_iterator(graph, ["y"], size=8, sharding=rows_over(2))
    with pytest.raises(ValueError, match="in a branch of if"):
        made(batch_size=4, enable_conditionals=True)


def test_with_conditionals_it_is_the_last_step_too():
    called = fn.jax_function(lambda x: x * 2, sharding=rows_over(2), stateful=False)

    def graph(shard_id=0, num_shards=1):
        x = dali_fn.random.uniform(shape=[2])
        if dali_fn.random.coin_flip(dtype=types.BOOL):
            x = x + 1
        y = called(x)
        return x, y

    made = data_iterator(graph, ["x", "y"], size=8, sharding=rows_over(2))
    with made(batch_size=4, enable_conditionals=True) as iterator:
        for batch in iterator:
            np.testing.assert_array_equal(np.asarray(batch["y"]), 2 * np.asarray(batch["x"]))


def test_an_iterator_without_a_sharding_is_refused(jpegs_many):
    for placed, words in (({}, "has none"), ({"devices": jax.devices()[:2]}, "has devices=")):
        graph = functools.partial(sharded, sharding=rows_over(2), function=centred)
        made = data_iterator(graph, ["x", "c", "f"], reader_name="reader", **placed)
        with pytest.raises(ValueError, match=f"{words}: pass sharding= to the iterator"):
            made(files=jpegs_many, batch_size=4)
    records = [np.array([k], np.float32) for k in range(8)]
    called = fn.jax_function(lambda x: x, sharding=rows_over(2))
    transform = DALITransform(called, batch_size=4, output_map=["x"])
    with pytest.raises(ValueError, match="pass sharding= to the iterator"):
        next(iter(grain.MapDataset.source(records).pipe(transform)))


def test_constants_and_other_graphs_in_some_shards_are_refused():
    called = fn.jax_function(lambda x, y: x, sharding=rows_over(2))
    with pytest.raises(TypeError, match=r"input 1 of .* is a float, .*types\.Constant"):
        of_graph(lambda x: called(x, 3.0), ["x"])

    def graph(shard_id=0, num_shards=1):
        x = numbers(shard_id)
        return called(x, x) if shard_id else x

    made = data_iterator(graph, ["x"], size=80, sharding=rows_over(2))
    with pytest.raises(ValueError, match="the same ones whatever shard_id is"):
        made(batch_size=4)


def test_an_output_of_another_pipeline_is_refused():
    kept = []

    def steps(x):
        made = fn.jax_function(lambda x: x, sharding=rows_over(2))(x)
        kept.append(made)
        return x, kept[0]

    with pytest.raises(ValueError, match="is of another pipeline than the one that returns it"):
        of_graph(steps, ["x", "y"])


def test_ragged_inputs_are_refused():
    rows = itertools.cycle([1, 2])

    def graph(shard_id=0, num_shards=1):
        x = dali_fn.external_source(
            lambda info: np.zeros(next(rows), np.float32), batch=False, dtype=types.FLOAT, ndim=1
        )
        y = fn.jax_function(lambda x: x.sum(), sharding=rows_over(1), stateful=False)(x)
        return dali_fn.pad(x), y

    made = data_iterator(graph, ["x", "y"], size=8, sharding=rows_over(1))
    words = "'input 0 of .*' is ragged.*fn.pad"
    with made(batch_size=2) as iterator, pytest.raises(ValueError, match=words):
        next(iterator)
    with pytest.raises(ValueError, match="ragged with sharding"):
        fn.jax_function(lambda x: x, sharding=rows_over(2), ragged="pad")


def test_a_state_of_other_calls_is_refused(jpegs_many):
    call = {"files": jpegs_many[:16], "batch_size": 4, "num_threads": 1}
    with over_files(rows_over(2))(**call) as iterator:
        next(iterator)
        state = iterator.get_state()
    assert "the function centred() of global arrays" in state["unchecked"]

    def without(files, shard_id=0, num_shards=1):
        x, c, f = sharded(files, shard_id, num_shards, rows_over(2), centred)
        return x, f, c

    other = data_iterator(without, ["x", "c", "f"], reader_name="reader", sharding=rows_over(2))
    with other(**call) as iterator:
        iterator.set_state(state)  # the same operators, in another order of outputs
        next(iterator)

    def keyless(x):
        return x, x

    iterator = over_files(rows_over(2), keyless)(**call)
    with pytest.raises(ValueError, match=r"operators.global_0.key: 1 -> .left out."):
        iterator.set_state(state)
    iterator.close()


# Pipelines that are not defined by an iterator here


def by_hand(sharding, shard_id=0, function=lambda x: x * 2):
    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def graph():
        x = numbers(shard_id)
        return x, dali_fn.copy(fn.jax_function(function, sharding=sharding)(x))

    return graph()


def test_in_pipelines_made_by_hand_dali_calls_it_for_one_device():
    seen = []

    def look(x, *, key):
        seen.append((x.sharding, key.shape))
        return x * 2

    with dalijax.DALIGenericIterator(by_hand(rows_over(1), 0, look), ["x", "f"], size=40) as own:
        for batch in itertools.islice(own, 3):
            np.testing.assert_array_equal(np.asarray(batch["f"]), 2 * np.asarray(batch["x"]))
    assert seen and set(seen) == {(rows_over(1), ())}
    with pytest.raises(ValueError, match="2 devices of this process.*last step.*to the batch"):
        by_hand(rows_over(2))


def test_pipelines_made_by_hand_stay_in_step_when_the_source_of_one_fails():
    failed = []

    def source(info, shard):
        if shard == 1 and info.iteration == 2 and not failed:
            failed.append(shard)
            raise OSError("not there now")

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def graph(shard):
        return numbers(shard, source)

    got = []
    with dalijax.DALIGenericIterator([graph(0), graph(1)], ["x"], size=40) as iterator:
        for _ in range(5):
            try:
                got.append(np.asarray(next(iterator)["x"]).ravel()[1:3].tolist())
            except OSError:
                got.append("not there now")
    assert got == [[0, 100], [1, 101], "not there now", [2, 102], [3, 103]]


# Failures


def test_a_batch_that_fails_in_one_shard_fails_in_all(jpegs, tmp_path):
    bad = tmp_path / "broken.jpg"
    bad.write_bytes(b"no picture")
    files = [*jpegs[:8]]
    files[5] = str(bad)  # the second shard's second batch
    iterator = over_files(rows_over(2))(files=files, batch_size=2, num_threads=1, broken="yes")
    got = []
    while len(got) < 4:
        try:
            got.append(np.asarray(next(iterator)["x"]).ravel().tolist())
        except RuntimeError as error:
            got.append("failed" if "counts as delivered" in str(error) else str(error))
    assert got == [[0, 4], "failed", [2, 6], [3, 7]]
    iterator.close()


def fails_at(bad):
    """A function that fails at the batch of a number."""

    def doubled(x):
        if float(x[0, 0]) == bad:
            raise ValueError("no picture")
        return x * 2

    return doubled


@pytest.mark.parametrize("outputs", (0, 1))
def test_a_batch_whose_function_fails_counts_as_delivered(outputs):
    def checked(x):
        made = fails_at(1)(x)
        return made if outputs else None

    called = fn.jax_function(checked, num_outputs=outputs, sharding=rows_over(2), stateful=False)
    got = []
    with of_graph(lambda x: (called(x), x)[1], ["x"]) as iterator:
        for _ in range(4):
            try:
                got.append(float(next(iterator)["x"][0, 0]))
            except RuntimeError as error:
                assert isinstance(error.__cause__, ValueError)
                got.append(str(error))
                state = iterator.get_state()
        iterator.set_state(state)
        assert float(next(iterator)["x"][0, 0]) == 2
    wrong = got.pop(1)
    assert got == [0, 2, 3]
    assert "batch 1 of epoch 0 failed, and counts as delivered" in wrong
    assert "checked() raised ValueError: no picture" in wrong and "DALI says" not in wrong


def test_failed_functions_are_skipped_where_asked():
    with in_two(fails_at(1), on_error="skip") as iterator:
        got = [float(batch["x"][0, 0]) for batch in itertools.islice(iterator, 3)]
        assert got == [0, 2, 3] and "no picture" in iterator.errors[0].message


def ends(x):
    raise StopIteration


@pytest.mark.parametrize(
    "function,words",
    [
        (lambda x: (x, x), "returned 2 outputs, and num_outputs is 1"),
        (lambda x: None, "returned 0 outputs"),
        (lambda x: "text", "is a str, not an array"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (ends, "ends.. raised StopIteration"),
    ],
)
def test_what_functions_do_wrong_is_said(function, words):
    with in_two(function) as iterator:
        for _ in range(2):  # it goes on, and fails again
            with pytest.raises(RuntimeError, match=words):
                next(iterator)


def test_a_batch_is_not_lost_where_ctrl_c_comes_within_a_function():
    struck = []

    def interrupted(x):
        if float(x[0, 0]) == 2 and not struck:
            struck.append(2)
            raise KeyboardInterrupt
        return x * 2

    def graph(files, shard_id=0, num_shards=1):
        x, _, _ = sharded(
            files, shard_id, num_shards, sharding=rows_over(2), function=lambda x: (x, x)
        )
        return x, fn.jax_function(interrupted, sharding=rows_over(2), stateful=False)(x)

    made = data_iterator(graph, ["x", "f"], reader_name="reader", sharding=rows_over(2))
    files = [str(Path(__file__))] * 12
    got = []
    with made(files=files, batch_size=2, num_threads=1) as iterator:
        for _ in range(7):
            try:
                got.append(np.asarray(next(iterator)["f"]).ravel().tolist())
            except KeyboardInterrupt:
                got.append("interrupted")
    rows = [[2 * k, 12 + 2 * k] for k in range(6)]
    assert got == [*rows[:2], "interrupted", *rows[2:]]


@pytest.mark.parametrize("sharded_function", (True, False))
def test_a_source_that_fails_in_one_shard_takes_nothing_of_the_others(sharded_function):
    failed = []

    def source(info, shard):
        if shard == 1 and info.iteration == 2 and not failed:
            failed.append(shard)
            raise OSError("not there now")

    got = []
    with in_two(lambda x: x * 2, source, sharded_function) as iterator:
        for _ in range(5):
            try:
                got.append(np.asarray(next(iterator)["f"]).ravel()[1:3].tolist())
            except OSError:
                got.append("not there now")
    assert got == [[0, 200], [2, 202], "not there now", [4, 204], [6, 206]]


@pytest.mark.parametrize("counts", ((3, 4), (4, 3)))
@pytest.mark.parametrize("sharded_function", (True, False))
def test_shards_that_end_one_after_the_other_begin_the_next_epoch_together(
    counts, sharded_function
):
    def source(info, shard):
        if info.iteration == counts[shard]:
            raise StopIteration

    with in_two(lambda x: x * 2, source, sharded_function, size=12) as iterator:
        for _ in range(3):
            got = [np.asarray(batch["f"]).ravel()[1:3].tolist() for batch in iterator]
            assert got == [[2 * k, 200 + 2 * k] for k in range(3)]


def test_a_function_that_fails_does_not_keep_its_batch():
    held = []

    def bad(x):
        held.append(weakref.ref(x))
        if len(held) > 3:
            raise ValueError("no picture")
        return x

    gc.collect()
    gc.disable()
    try:
        with in_two(bad) as iterator:
            for _ in range(3):
                next(iterator)
            for _ in range(6):
                with pytest.raises(RuntimeError, match="no picture"):
                    next(iterator)
            assert len(held) == 9 and sum(one() is not None for one in held) == 0
    finally:
        gc.enable()


# Around it


def test_a_thread_goes_on_when_the_main_one_has_ended():
    program = """
import threading, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import test_global_functions
iterator = test_global_functions.in_two(lambda x: x * 2)
def go_on():
    taken = [np.asarray(next(iterator)["f"]).ravel().tolist()]
    threading.main_thread().join()
    taken += [np.asarray(next(iterator)["f"]).ravel().tolist() for _ in range(5)]
    assert taken == [[2 * k] * 2 + [200 + 2 * k] * 2 for k in range(6)], taken
    iterator.close()
    print("went on", flush=True)
threading.Thread(target=go_on).start()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_python("-c", program, cwd=Path(__file__).parent, env=environment)
    assert done.stdout.split("\n")[0] == "went on", done.stderr


def test_the_callers_transfer_guard_is_not_about_functions_of_the_graph():
    step = jax.jit(lambda x: x * 2)

    def keyed(x, *, key):
        return x + 0 * jax.random.uniform(key, x.shape) + jnp.float32(1)

    with in_two(jax.jit(keyed)) as iterator:
        for number in range(3):
            with jax.transfer_guard("disallow"):
                made = step(next(iterator)["f"])
            assert np.asarray(made).ravel()[1:].tolist() == [
                2 * (number + 1),
                *[2 * (number + 101)] * 2,
            ]


def test_iterators_of_global_functions_may_be_collected(jpegs_many):
    for _ in range(3):
        iterator = over_files(rows_over(2))(files=jpegs_many, batch_size=4, num_threads=1)
        next(iterator)
        iterator._engine.cycle = iterator  # so that Python's gc finds it
        gone = weakref.ref(iterator)
        del iterator
        gc.collect()
        assert gone() is None


# Adapters

N = 12
NUMBERS = [{"x": np.array([k], np.float32)} for k in range(N)]
LOADER = grain.samplers.IndexSampler(N, grain.sharding.NoSharding(), shuffle=False, num_epochs=1)


def of_records(x):
    return x, *fn.jax_function(centred, num_outputs=2, sharding=rows_over(2))(x)


def in_grains_transform(files, function=of_records, **options):
    options = {"batch_size": 4, "output_map": ["x", "c", "f"], "sharding": rows_over(2)} | options
    made = DALITransform(function, pad="mask", **options)
    return iter(grain.MapDataset.source(NUMBERS).to_iter_dataset().pipe(made))


def in_grains_loader(files):
    call = {"batch_size": 4, "output_map": ["x", "c", "f"], "sharding": rows_over(2)}
    return iter(DALIDataLoader(NUMBERS, LOADER, (), pipeline_fn=of_records, pad="mask", **call))


def over_all(files):
    return over_files(rows_over(2))(files=files[:N], batch_size=4, num_threads=1)


def in_grain(files):
    made = over_files(rows_over(2))
    return iter(DALIIterDataset(made, pad="mask", files=files[:N], batch_size=4, num_threads=1))


def in_clu(files):
    made, call = over_files(rows_over(2)), {"batch_size": 4, "num_threads": 1}
    return DALIDatasetIterator(made, num_epochs=1, element="jax", files=files[:N], **call)


@pytest.mark.parametrize(
    "make", (over_all, in_grain, in_clu, in_grains_transform, in_grains_loader)
)
def test_it_resumes_everywhere_in_every_adapter(jpegs_many, make):
    iterator, batches, states = make(jpegs_many), [], []
    for batch in iterator:
        batches.append({name: np.asarray(one) for name, one in batch.items()})
        states.append(json.loads(json.dumps(iterator.get_state())))
    iterator.close()
    assert len({batch["f"].tobytes() for batch in batches}) == len(batches) == 3
    for batch in batches:
        np.testing.assert_allclose(batch["c"], batch["x"] - batch["x"].mean())
    for at, state in enumerate(states):
        other = make(jpegs_many)
        other.set_state(state)
        rest = [{name: np.asarray(one) for name, one in batch.items()} for batch in other]
        other.close()
        assert len(rest) == len(batches) - at - 1
        for got, expected in zip(rest, batches[at + 1 :], strict=True):
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("on_error", ("raise", "skip", "mask"))
def test_a_function_that_fails_behind_grains_records(jpegs_many, on_error):
    def checked(x):
        return x, fn.jax_function(fails_at(4), sharding=rows_over(2), stateful=False)(x)

    options = {"function": checked, "output_map": ["x", "y"], "on_error": on_error}
    iterator = in_grains_transform(jpegs_many, **options)
    got = [float(next(iterator)["y"][0, 0])]
    if on_error != "skip":
        with pytest.raises(RuntimeError, match=r"batch 1 failed. .*doubled.. raised ValueError"):
            next(iterator)
    got += [float(batch["y"][0, 0]) for batch in iterator]
    assert got == [0, 16] and len(iterator.errors) == (on_error == "skip")


def test_peeks_and_prefetching_threads_of_one_process(jpegs_many):
    iterator = in_clu(jpegs_many)
    peeked = iterator.peek_async().result()
    assert next(iterator)["f"] is peeked["f"]
    iterator.close()
    made = DALITransform(
        of_records, batch_size=4, output_map=["x", "c", "f"], sharding=rows_over(2), pad="mask"
    )
    ds = grain.MapDataset.source(NUMBERS).to_iter_dataset().pipe(made)
    ahead = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
    batches = list(ahead)
    assert len(batches) == 3
    for batch in batches:
        x = np.asarray(batch["x"])
        np.testing.assert_allclose(np.asarray(batch["c"]), x - x.mean())
