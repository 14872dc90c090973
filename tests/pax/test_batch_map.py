"""`batch_map` with Pax: batches equal the functions applied to the unmapped batches, by NumPy."""

import jax
import numpy as np
import pytest
from praxis import base_hyperparams, pax_fiddle

from dalijax import data_iterator, sources
from dalijax.adapters.pax import DALIInput
from numbered import graph

N, BATCH, SEED = 10, 4, 6
WEIGHTS = "eval_sample_weights"
TRAINING = {"is_training": True}
EVALUATION = {"reset_for_eval": True, "eval_loop_num_batches": -1}


def noisy(batch, key):
    """Adds noise to the numbers, from another row and from the key; adds an array."""
    x = batch["x"].reshape(-1).astype(np.float32)
    noise = jax.random.uniform(key, x.shape)
    return {**batch, "x": x + x[::-1] + noise, "double": 2 * batch["u"]}


def negated(batch, key):
    return {**batch, "u": -batch["u"]}


def expected(batch, epoch, step):
    """Returns the result of both functions by NumPy, with the documented key."""
    key = jax.random.key(SEED)
    for number in (epoch, step, 0):
        key = jax.random.fold_in(key, number)
    x = batch["x"].ravel().astype(np.float32)
    noise = np.asarray(jax.random.uniform(key, x.shape))
    weights = batch[WEIGHTS]
    return {"x": x + x[::-1] + noise, "u": -batch["u"], "double": 2 * batch["u"], WEIGHTS: weights}


def made(make, arguments, host=0, hosts=1, **fields):
    own = {"infeed_host_index": host, "num_infeed_hosts": hosts, "batch_size": BATCH, **fields}
    own |= {"name": "data", "iterator_fn": make, "input_random_seed": SEED}
    return base_hyperparams.instantiate(pax_fiddle.Config(DALIInput, arguments=arguments, **own))


@pytest.fixture(params=("reader", "source"))
def make(request, jpegs_many):
    """Returns a function that creates an input, with or without `batch_map`."""
    if request.param == "source":
        source = sources.Arrays({"number": np.arange(N, dtype=np.int32)})
        of_source = data_iterator(
            lambda number, draw: (number, draw.uniform()), ["x", "u"], source=source
        )
        return lambda mapped, **fields: made(of_source, arguments_of(mapped), **fields)
    of_reader = data_iterator(graph, ["x", "u"], reader_name="reader")
    files = {"files": jpegs_many[:N], "stick": True}
    return lambda mapped, **fields: made(of_reader, arguments_of(mapped, **files), **fields)


def arguments_of(mapped, **arguments):
    return {"num_threads": 1, **arguments, **({"batch_map": [noisy, negated]} if mapped else {})}


def check(batch, unmapped, epoch, step):
    wanted = expected(unmapped, epoch, step)
    assert set(batch) == set(wanted)
    for name, values in wanted.items():
        assert type(batch[name]) is np.ndarray and batch[name].dtype == values.dtype
        np.testing.assert_allclose(batch[name], values, rtol=1e-6, err_msg=name)


def test_batch_map_of_training_batches(make):
    """In two epochs of three batches; a state resumes in the second."""
    data, plain = make(True, **TRAINING), make(False, **TRAINING)
    assert {name: spec.shape for name, spec in data.specs().items()} == {
        name: (BATCH,) for name in ("x", "u", "double", WEIGHTS)
    }
    states, batches = [], []
    for number in range(6):
        states.append(data._get_state_internal())
        unmapped = plain.get_next()
        peeked = data.peek_padded()
        batches.append(data.get_next_padded())
        check(batches[-1], unmapped, *divmod(number, 3))
        np.testing.assert_array_equal(peeked.x, batches[-1].x)
    resumed = make(True, **TRAINING)
    resumed._set_state_internal(states[4])
    for batch in batches[4:]:
        np.testing.assert_array_equal(resumed.get_next().x, batch.x)


def test_batch_map_of_an_evaluation(make):
    """The padding of the last batch keeps the weight 0, in each pass over the epoch."""
    data, plain = make(True, **EVALUATION), make(False, **EVALUATION)
    for _ in range(2):
        for step in range(3):
            unmapped = plain.get_next()
            check(data.get_next(), unmapped, 0, step)
        assert unmapped[WEIGHTS].tolist() == [1, 1, 0, 0]
        with pytest.raises(StopIteration):
            data.get_next()
        data.reset()
        plain.reset()


def test_batch_map_of_padded_batches_and_on_devices(make):
    plain = make(False, batch_padding_size=2, **TRAINING).get_next_padded()
    padded = make(True, batch_padding_size=2, **TRAINING).get_next_padded()
    check({k: v[:BATCH] for k, v in padded.items()}, {k: v[:BATCH] for k, v in plain.items()}, 0, 0)
    assert not any(values[BATCH:].any() for values in padded.values())
    on_device = make(True, element="jax", **TRAINING).get_next()
    assert isinstance(on_device.x, jax.Array)
    np.testing.assert_array_equal(on_device.x, padded.x[:BATCH])


@pytest.mark.parametrize("host", (0, 1))
def test_batch_map_of_several_hosts(make, host):
    """A host's functions receive its own batch, and the key that all hosts have."""
    place = {"host": host, "hosts": 2, **TRAINING}
    data, plain = make(True, **place), make(False, **place)
    for step in range(2):
        check(data.get_next(), plain.get_next(), 0, step)


def test_results_that_are_no_batch_are_refused(make):
    def with_scalar(batch, key):
        return {"mean": batch["u"].mean(), **batch}

    def with_weights(batch, key):
        return {**batch, WEIGHTS: batch["u"]}

    for function, options, words in (
        (with_scalar, {}, r"'mean' has shape \(\), but Pax requires .* rows"),
        (with_weights, {"mask": "mask"}, f"batch_map returned an array named '{WEIGHTS}'"),
    ):
        arguments = {"batch_map": function, **options}
        data = make(False, **TRAINING)
        data = made(data.iterator_fn, {**data.arguments, **arguments}, **TRAINING)
        with pytest.raises(ValueError, match=words):
            data.get_next()
        with pytest.raises(ValueError, match=words):
            data.specs()
