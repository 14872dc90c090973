"""`batch_map`: functions of the placed batch, against NumPy and jax.random, in every adapter."""

import functools
import json
import pickle
import random
import threading

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types
from shardings import rows_over

import dalijax
from dalijax import LastBatchPolicy, data_iterator, sources
from dalijax.adapters.clu import DALIDatasetIterator, DALIGenericPeekableIterator
from dalijax.adapters.grain import DALIBatch, DALIDataLoader, DALIIterDataset, DALITransform
from dalijax.adapters.t5x import get_dataset_fn
from dalijax.adapters.tfdata import DALIDataset
from dalijax.core.errors import BatchMapError
from numbered import read_files

N, BATCH, SEED = 11, 4, 5
NUMBERS = np.arange(N, dtype=np.float32)[:, None]
CALL = {"batch_size": BATCH, "num_threads": 1, "seed": SEED}


def noisy(batch, key):
    """Each row plus the next row and noise, and an array that is no batch."""
    x = batch["x"]
    noise = jax.random.uniform(key, x.shape)
    return {**batch, "x": x + jnp.roll(x, -1, 0) + noise, "mean": x.mean()}


def key_of(epoch, step, number=0, seed=SEED):
    """The documented key of a function."""
    key = jax.random.key(seed)
    for count in (epoch, step, number):
        key = jax.random.fold_in(key, count)
    return key


def expected(rows, epoch, step, seed=SEED):
    """The result of `noisy` by NumPy, with the numbers of jax.random."""
    noise = np.asarray(jax.random.uniform(key_of(epoch, step, seed=seed), rows.shape))
    return {"x": rows + np.roll(rows, -1, 0) + noise, "mean": rows.mean()}


def over_source(x):
    return fn.copy(x)


def over_reader(files, shard_id=0, num_shards=1):
    label = read_files(
        files[:N],
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=True,
        stick_to_shard=True,
    )[1]
    return fn.cast(label, dtype=types.FLOAT)


def of_source(function=noisy, **config):
    config = {"shuffle": False, "source": sources.Arrays({"x": NUMBERS}), **config}
    return data_iterator(over_source, ["x"], batch_map=function, **config)


def of_reader(function=noisy, **config):
    return data_iterator(over_reader, ["x"], reader_name="reader", batch_map=function, **config)


def values(batch):
    return {name: np.asarray(array) for name, array in batch.items()}


def check(batch, wanted):
    assert wanted.keys() <= batch.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(np.asarray(batch[name]), value, rtol=1e-5, err_msg=name)


def padded_rows(step):
    return NUMBERS[np.minimum(np.arange(BATCH) + step * BATCH, N - 1)]


# The batch and its key


@pytest.mark.parametrize("devices", (0, 1, 2, 4))
def test_the_global_batch_over_a_source(devices):
    sharding = {"sharding": rows_over(devices)} if devices else {}
    with of_source(mask="mask", **sharding)(**CALL) as iterator:
        spec = iterator.element_spec
        for epoch in range(2):
            for step, batch in enumerate(iterator):
                assert list(batch) == ["x", "mask", "mean"]
                check(batch, expected(padded_rows(step), epoch, step))
                for name, array in batch.items():
                    assert (array.shape, array.dtype) == (spec[name].shape, spec[name].dtype)
                    assert not devices or array.sharding == spec[name].sharding
            iterator.reset()
    if devices:
        assert spec["x"].sharding == rows_over(devices)
        assert spec["mean"].sharding.is_fully_replicated


@pytest.mark.parametrize("devices", (0, 2))
def test_it_resumes_at_every_position(jpegs_many, devices):
    """States of two devices continue on one, over a source; a reader's on two."""
    sharding = {"sharding": rows_over(devices)} if devices else {}
    reader = CALL | {"files": jpegs_many}
    for made, call in ((of_source(mask="mask"), CALL), (of_reader(), reader)):
        stream = made.stream(3, **call, **sharding)
        states, batches = [], []
        for batch in stream:
            batches.append(values(batch))
            states.append(json.loads(json.dumps(stream.get_state())))
        stream.close()
        assert len({batch["x"].tobytes() for batch in batches}) == 9
        for at, state in enumerate(states[:-1]):
            other = made.stream(3, **call, **(sharding if call is reader else {}))
            other.set_state(state)
            check(next(other), batches[at + 1])
            other.close()


def test_moves_skip_no_key():
    def stepped(stream):
        stream.skip(5)

    def sought(stream):
        next(stream)
        stream.seek_step(5)

    def peeked(stream):
        for _ in range(5):
            stream.peek()
            next(stream)

    for move in (stepped, sought, peeked):
        with of_source(mask="mask").stream(**CALL) as stream:
            move(stream)
            check(next(stream), expected(padded_rows(2), 1, 2))
    with of_source(mask="mask")(**CALL) as iterator:
        for epoch, batches in iterator.epochs(2):
            for step, batch in enumerate(batches):
                check(batch, expected(padded_rows(step), epoch, step))


def test_a_state_brings_its_seed():
    with of_source()(**{**CALL, "seed": 1 << 40}) as iterator:
        next(iterator)
        state, wanted = iterator.get_state(), values(next(iterator))
    call = {name: value for name, value in CALL.items() if name != "seed"}
    with of_source()(**call) as iterator:
        before = values(next(iterator))
        iterator.set_state(state)
        check(next(iterator), wanted)
        assert not np.array_equal(before["x"], wanted["x"])


def test_several_functions_are_applied_in_order_with_keys_of_their_own():
    def double(batch, key):
        return {"x": 2 * batch["x"], "first": jax.random.uniform(key)}

    def add(batch, key):
        return batch | {"x": batch["x"] + 1, "second": jax.random.uniform(key)}

    with of_source([double, functools.partial(add)])(**CALL) as iterator:
        for step in range(2):
            batch = next(iterator)
            check(batch, {"x": 2 * NUMBERS[4 * step :][:4] + 1})
            for number, name in enumerate(("first", "second")):
                assert batch[name] == jax.random.uniform(key_of(0, step, number))
    for function in ([double], double, (double,)):
        with of_source(function)(**CALL) as iterator:
            assert next(iterator)["first"] == jax.random.uniform(key_of(0, 0))
    with of_source([])(**CALL) as iterator:
        check(next(iterator), {"x": NUMBERS[:4]})


def test_results_may_be_other_arrays():
    def other(batch, key):
        half = batch["x"].astype(jnp.bfloat16)
        return {"half": half, "keys": jax.random.split(key, 3), "twice": jnp.tile(half, (2, 1))}

    with of_source(other, sharding=rows_over(2))(**CALL) as iterator:
        batch, spec = next(iterator), iterator.element_spec
    assert list(batch) == list(spec) == ["half", "keys", "twice"]
    assert batch["half"].dtype == jnp.bfloat16 and batch["half"].sharding == rows_over(2)
    assert batch["twice"].shape == spec["twice"].shape == (8, 1)
    assert batch["keys"].shape == (3,)
    np.testing.assert_array_equal(
        jax.random.key_data(batch["keys"]), jax.random.key_data(jax.random.split(key_of(0, 0), 3))
    )


def test_results_are_placed_like_the_outputs():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows, both = (PartitionSpec(*axes) for axes in (("data",), ("data", "model")))
    sharding = {"x": NamedSharding(mesh, rows), "wide": NamedSharding(mesh, both)}

    def graph(x):
        return x, fn.cat(x, x)

    def swapped(batch, key):
        return {**batch, "x": batch["wide"], "wide": batch["x"], "new": batch["x"][:, 0]}

    source = sources.Arrays({"x": NUMBERS})
    made = data_iterator(
        graph, ["x", "wide"], source=source, sharding=sharding, batch_map=swapped, mask="mask"
    )
    with made(**CALL) as iterator:
        spec, batch = iterator.element_spec, next(iterator)
        assert {k: v.sharding for k, v in batch.items()} == {k: v.sharding for k, v in spec.items()}
        assert batch["x"].shape == (4, 2) and batch["x"].sharding == sharding["x"]
        assert batch["new"].sharding == batch["mask"].sharding == sharding["x"]
        assert batch["wide"].sharding == sharding["x"]  # (4, 1) does not fit on its own axes


def test_meshes_with_explicit_axes_and_pmaps_layout():
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=axes, devices=jax.devices()[:4])

    def scaled(batch, key):
        return {"x": batch["x"] * jax.random.uniform(key), "mean": batch["x"].mean()}

    rows = PartitionSpec("data")
    with jax.set_mesh(mesh), of_source(scaled, sharding=rows)(**CALL) as iterator:
        batch = next(iterator)
        drawn = np.asarray(jax.random.uniform(key_of(0, 0)))
        check(batch, {"x": NUMBERS[:4] * drawn, "mean": 1.5})
        assert batch["x"].sharding.spec == PartitionSpec("data")
    with of_source(devices=jax.devices()[:2])(**CALL) as iterator:
        batch = next(iterator)
        check(batch, expected(NUMBERS[:4].reshape(2, 2, 1), 0, 0))
        assert len(batch["x"].sharding.device_set) == 2


def test_numpy_arrays():
    """They are computed on the CPU; 64 bits that JAX would narrow are an error."""
    with of_source(as_numpy=True, mask="mask")(**CALL) as iterator:
        batch = next(iterator)
        assert {type(array) for array in batch.values()} == {np.ndarray}
        check(batch, expected(NUMBERS[:4], 0, 0))

    def wide(x):
        return (fn.cast(x, dtype=types.INT64) + 1) * (1 << 20) * (1 << 20)

    source = sources.Arrays({"x": NUMBERS})
    made = data_iterator(wide, ["x"], source=source, as_numpy=True, batch_map=noisy)
    with (
        made(**CALL) as iterator,
        pytest.raises(TypeError, match="'x' is int64, which JAX would narrow"),
    ):
        next(iterator)


def test_text_bypasses_the_functions():
    records = [{"x": NUMBERS[k], "text": f"record {k}"} for k in range(N)]
    source = sources.Records(records, identity="texts")
    seen = []

    def look(batch, key):
        seen.append(set(batch))
        return {"x": -batch["x"]}

    with of_source(look, source=source)(**CALL) as iterator:
        assert set(iterator.element_spec) == {"x", "text"}
        batch = next(iterator)
    assert seen[0] == {"x"} and batch["text"].tolist() == [f"record {k}" for k in range(4)]
    check(batch, {"x": -NUMBERS[:4]})
    named = of_source(lambda batch, key: {"text": batch["x"]}, source=source)
    with (
        named(**CALL) as iterator,
        pytest.raises(ValueError, match=r"\['text'\], like text"),
    ):
        next(iterator)


# When it is called


def test_it_is_compiled_once_for_each_shape_and_runs_once_for_each_delivered_batch():
    traces, runs = [], []

    def seen(batch, key):
        traces.append(batch["x"].shape)
        jax.debug.callback(lambda x: runs.append(x.tolist()), batch["x"][0, 0])
        return batch

    made = of_source(seen, last_batch_policy=LastBatchPolicy.PARTIAL)
    for _ in range(3):
        with made(**CALL) as iterator:
            spec = iterator.element_spec
            assert spec["x"].shape == (4, 1)
            assert iterator.peek()["x"] is iterator.peek()["x"] is next(iterator)["x"]
            iterator.skip(1)
            state = iterator.get_state()
            assert [batch["x"].shape for batch in iterator] == [(3, 1)]
            assert iterator.element_spec == spec
            iterator.set_state(state)
            next(iterator)
        jax.effects_barrier()
    assert runs == [0, 8, 8] * 3
    # Twice to compare the traces, and once to compile.
    assert traces == [(4, 1)] * 3 + [(3, 1)] * 3


def test_nothing_moves_with_peek_and_element_spec():
    with of_source()(**CALL) as iterator:
        state = iterator.get_state()
        iterator.peek()
        assert iterator.element_spec["mean"].shape == ()
        assert iterator.get_state() == state
        check(next(iterator), expected(NUMBERS[:4], 0, 0))


def test_outputs_may_be_donated_and_guards_are_about_the_caller():
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    with of_source(sharding=rows_over(2))(**CALL) as iterator:
        for number in range(2):
            with jax.transfer_guard("disallow"):
                x = step(next(iterator)["x"])
            rows = NUMBERS[4 * number :][:4]
            check({"x": x}, {"x": 2 * expected(rows, 0, number)["x"]})


def test_an_iterator_function_pickles():
    made = pickle.loads(pickle.dumps(of_source()))
    with made(**CALL) as iterator:
        check(next(iterator), expected(NUMBERS[:4], 0, 0))


# Errors


@pytest.mark.parametrize("call", ("next", "peek", "element_spec"))
def test_a_function_that_fails_leaves_the_batch(call):
    broken = [True]

    def fails(batch, key):
        if broken:
            return {"x": batch["y"]}
        return batch

    calls = {"next": next, "peek": lambda it: it.peek(), "element_spec": lambda it: it.element_spec}
    with of_source([noisy, fails], on_error="skip")(**CALL) as iterator:
        state = iterator.get_state()
        for _ in range(2):
            with pytest.raises(BatchMapError, match=r"batch_map: fails.. raised KeyError: 'y'"):
                calls[call](iterator)
        assert iterator.get_state() == state and iterator.errors == ()
        broken.clear()
        check(next(iterator), expected(NUMBERS[:4], 0, 0))


@pytest.mark.parametrize(
    "function,error,words",
    [
        (lambda batch, key: None, TypeError, "returned NoneType: return the batch, a dict"),
        (lambda batch, key: batch["x"], TypeError, "a dict of arrays"),
        (lambda batch, key: {1: batch["x"]}, TypeError, "a dict of arrays"),
        (lambda batch, key: {"x": 1.0}, TypeError, "'x' as float, not as an array"),
        (lambda batch, key: {"x": batch["x"]}, ValueError, "did not return the mask 'mask'"),
        (lambda batch, key: batch | {"mask": batch["x"]}, TypeError, "as float32, not bool"),
        (lambda batch, key: batch | {"mask": batch["mask"][:2]}, ValueError, r"\(2,\), not \(4,\)"),
        (
            lambda batch, key: {k: jax.numpy.repeat(v, 2, axis=0) for k, v in batch.items()},
            ValueError,
            r"shape \(8,\), not \(4,\)",
        ),
        (
            lambda batch, key: batch | {"x": np.array([1 << 40])},
            TypeError,
            "x of batch_map <lambda>",
        ),
        (lambda batch, key: batch | {"x": float(batch["x"][0, 0])}, BatchMapError, "Concretiz"),
    ],
)
def test_wrong_results_are_named(function, error, words):
    with of_source(function, mask="mask")(**CALL) as iterator:
        for call in (next, lambda it: it.element_spec):
            with pytest.raises(error, match=f"(?s)batch_map: <lambda>.*{words}|{words}"):
                call(iterator)


RNG = np.random.default_rng(0)


class Drawing:
    """A function with a generator of its own."""

    def __init__(self):
        self.rng = random.Random(0)

    def __call__(self, batch, key):
        return {"x": batch["x"] + self.rng.random()}

    def method(self, batch, key):
        return self(batch, key)


def from_global(batch, key):
    return {"x": batch["x"] + np.random.rand()}


def from_generator(batch, key):
    return {"x": batch["x"] + RNG.random()}


def from_python(batch, key):
    return {"x": batch["x"] + random.random()}


def from_tree(batch, key):
    return jax.tree.map(lambda x: x + RNG.normal(), batch)


def from_new_generator(batch, key):
    return {"x": batch["x"] + np.random.default_rng().random()}


def from_container(batch, key, generators={"one": [RNG]}):
    return {"x": batch["x"] + generators["one"][0].random()}


def from_system(batch, key):
    return {"x": batch["x"] + random.SystemRandom().random()}


JITTED = jax.jit(from_global)


@pytest.mark.parametrize(
    "function",
    [
        *(from_global, from_generator, from_python, from_tree, from_new_generator),
        *(from_container, from_system, JITTED, functools.partial(from_generator)),
        *(lambda batch, key: JITTED(batch, key), [noisy, from_global]),
        *(Drawing(), Drawing().method),
    ],
)
def test_generators_outside_of_jax_are_refused(function):
    JITTED({"x": jnp.zeros((4, 1))}, jax.random.key(0))  # JAX has traced it already
    with of_source(function)(**CALL) as iterator:
        for call in (lambda it: it.element_spec, next):
            with pytest.raises(RuntimeError, match=r"batch_map: .* differs between two calls.*key"):
                call(iterator)


TABLE = np.arange(4, dtype=np.float32)[:, None]
KEY = jax.random.key(3)


def seeded(batch, key):
    np.random.seed(3)
    return {"x": batch["x"] + np.random.rand(4, 1)}


def controlled(batch, key):
    x = jax.lax.fori_loop(0, 3, lambda k, x: x + k, batch["x"])
    x = jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: x + 1, x)
    x = jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(1), x)[1]
    return {"x": jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x) + jax.random.gamma(key, 2.0)}


def with_constants(batch, key):
    noise = jax.random.normal(KEY, (4, 1)) + jax.random.normal(jax.random.key(4), (4, 1))
    return {"x": batch["x"] + TABLE + jnp.asarray([0.5]) + noise}


@pytest.mark.parametrize("function", (noisy, seeded, controlled, with_constants, jax.jit(noisy)))
def test_functions_that_do_not_draw_are_accepted(function):
    """Even if another thread draws."""
    ended = threading.Event()

    def draw():
        while not ended.wait(0.0005):
            np.random.rand(), random.random(), RNG.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with of_source(function)(**CALL) as iterator:
            assert next(iterator)["x"].shape == (4, 1)
    finally:
        ended.set()
        thread.join()


def test_a_function_that_seeds_its_numbers_is_accepted():
    def seeded(batch, key):
        np.random.seed(3)
        return {"x": batch["x"] + np.random.rand(4, 1).astype(np.float32)}

    with of_source(seeded)(**CALL) as iterator:
        noise = np.random.RandomState(3).rand(4, 1).astype(np.float32)
        np.testing.assert_array_equal(next(iterator)["x"], NUMBERS[:4] + noise)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"function of \(batch, key\), or a list of them, not 3"):
        of_source(3)
    with pytest.raises(TypeError, match="or a list of them, not 'mixup'"):
        of_source(["mixup"])
    with pytest.raises(TypeError, match=r"batch_map calls keyless\(batch\) with \(batch, key\)"):

        def keyless(batch):
            return batch

        of_source(keyless)
    with pytest.raises(ValueError, match="given both to data_iterator and to the call"):
        of_source()(**CALL, batch_map=noisy)
    with pytest.raises(ValueError, match="Use DALITransform or DALIDataLoader"):
        DALIBatch(over_source, 4, ["x"], batch_map=noisy)


def test_ctrl_c_within_a_function_loses_no_batch():
    struck = []

    def strikes(batch, key):
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return noisy(batch, key)

    with of_source(strikes)(**CALL) as iterator:
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        check(next(iterator), expected(NUMBERS[:4], 0, 0))


def other(batch, key):
    return batch


def saved_states(jpegs):
    """Yields an iterator's factory, its files and a state with `noisy`, of each kind of input."""
    for make, files in ((of_source, {}), (of_reader, {"files": jpegs})):
        with make()(**CALL, **files) as iterator:
            next(iterator)
            state = iterator.get_state()
        yield make, files, state


def test_a_state_of_other_functions_is_refused(jpegs_many):
    for make, files, state in saved_states(jpegs_many):
        for changed in (other, [noisy, other], None):
            with make(changed)(**CALL, **files) as iterator:
                with pytest.raises(ValueError, match="batch_map"):
                    iterator.set_state(state)
                iterator.set_state(state, allow=["operators.batch_map"])
                assert iterator.step == 1


def test_a_renamed_function_is_named(jpegs_many):
    for make, files, state in saved_states(jpegs_many):
        assert make is of_source or "the code of noisy() of batch_map" in state["unchecked"]
        difference = r"operators.batch_map.function: noisy -> other"
        with (
            make(other)(**CALL, **files) as iterator,
            pytest.raises(ValueError, match=difference),
        ):
            iterator.set_state(state)


# Adapters


def records():
    return grain.MapDataset.source([{"x": row} for row in NUMBERS])


def in_core(files):
    return of_reader().stream(2, **CALL, files=files)


def over_two_devices(files):
    return of_source(last_batch_padded=True, sharding=rows_over(2)).stream(2, **CALL)


def over_a_source(files):
    return of_source(last_batch_padded=True).stream(2, **CALL)


def made_by_hand(files):
    graph = pipeline_def(over_reader)(files, device_id=None, **CALL)
    return dalijax.DALIGenericIterator(graph, ["x"], reader_name="reader", batch_map=noisy)


def peekable(files):
    graph = pipeline_def(over_reader)(files, device_id=None, **CALL)
    return DALIGenericPeekableIterator(graph, ["x"], reader_name="reader", batch_map=noisy)


def in_grain(files):
    return iter(DALIIterDataset(of_reader(), num_epochs=2, pad="mask", files=files, **CALL))


def in_grains_transform(files, **options):
    transform = DALITransform(
        over_source, output_map=["x"], batch_map=noisy, pad="mask", **CALL, **options
    )
    return iter(records().pipe(transform))


def in_grains_transform_over_two_devices(files):
    return in_grains_transform(files, sharding=rows_over(2))


def in_grains_loader(files):
    sampler = grain.samplers.IndexSampler(N, grain.sharding.NoSharding(), num_epochs=1)
    options = {"pipeline_fn": over_source, "output_map": ["x"], "batch_map": noisy, "pad": "mask"}
    return iter(DALIDataLoader([{"x": row} for row in NUMBERS], sampler, (), **options, **CALL))


def in_clu(files, element="numpy"):
    return DALIDatasetIterator(of_reader(), num_epochs=2, element=element, files=files, **CALL)


def in_clu_as_jax(files):
    return in_clu(files, "jax")


def in_tfdata(files):
    return iter(DALIDataset(of_reader(), files=files, **CALL).repeat(2))


def in_t5x(files):
    class Config:
        batch_size, seed = BATCH, SEED

    return get_dataset_fn(of_reader(), files=files, num_threads=1)(Config(), 0, 1)


ADAPTERS = [
    *(in_core, over_two_devices, over_a_source, made_by_hand, peekable, in_grain),
    *(in_grains_transform, in_grains_transform_over_two_devices, in_grains_loader),
    *(in_clu, in_clu_as_jax, in_tfdata, in_t5x),
]


@pytest.mark.parametrize("make", ADAPTERS)
def test_every_adapter(jpegs_many, make):
    iterator, batches, states = make(jpegs_many), [], []
    for step in range(3):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches.append(values(next(iterator)))
        check(batches[-1], expected(padded_rows(step), 0, step))
    if make is in_grains_loader or make is in_grains_transform:
        assert batches[2]["mask"].tolist() == [True] * 3 + [False]
    iterator.close()
    if make in (made_by_hand, peekable):
        return
    for at, state in enumerate(states):
        other = make(jpegs_many)
        other.set_state(state)
        for wanted in batches[at:]:
            check(next(other), wanted)
        other.close()


@pytest.mark.parametrize("make", (in_grains_transform, in_grain))
def test_grains_element_specs_have_the_results(jpegs_many, make):
    if make is in_grain:
        ds = DALIIterDataset(of_reader(), pad="mask", files=jpegs_many, **CALL)
    else:
        transform = DALITransform(
            over_source, output_map=["x"], batch_map=noisy, pad="mask", **CALL
        )
        ds = records().pipe(transform)
    spec = grain.experimental.get_element_spec(ds)
    assert spec["mean"].shape == () and spec["x"].shape == (4, 1)


def test_threads_that_take_batches_ahead(jpegs_many):
    iterator = in_clu(jpegs_many)
    peeked = iterator.peek_async().result()
    check(next(iterator), peeked)
    iterator.close()
    transform = DALITransform(over_source, output_map=["x"], batch_map=noisy, pad="mask", **CALL)
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        records().to_iter_dataset().pipe(transform), prefetch_buffer_size=2
    )
    for step, batch in enumerate(ahead):
        check(batch, expected(padded_rows(step), 0, step))
    with of_source()(**CALL) as source:
        taken = []
        thread = threading.Thread(target=lambda: taken.append(next(source)))
        thread.start()
        thread.join()
        check(taken[0], expected(NUMBERS[:4], 0, 0))
