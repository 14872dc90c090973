"""The keys of functions: which functions get a key, and its dependence on the batch."""

import functools

import jax
import numpy as np
import pytest
from function_graphs import BATCH, check, ragged, run, uniform
from nvidia.dali import fn as dali_fn

from dalijax import fn


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
