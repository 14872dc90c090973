"""Functions of a graph must be pure: the check detects changed values, without false alarms."""

import collections
import contextlib
import functools
import json
import random
import sys
import traceback
from random import uniform as uniform_of_python

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvidia.dali import fn as dali_fn

from dalijax import data_iterator, fn, sources
from dalijax.core.state.purity import changes, reachable_values
from full import in_slow

COUNT = [0]
GENERATOR = np.random.default_rng(0)
PYTHON = random.Random(0)
BITS, SEEDS = np.random.PCG64(0), np.random.SeedSequence(0)
MEAN = np.array([1.0, 2.0, 3.0], np.float32)
TABLE = np.zeros((3, 4))
QUEUE = collections.deque([1, 2])
NESTED = {"inner": {"number": 0}, "lists": [[]], "scale": 2.0}
LISTS = collections.defaultdict(list)


def counts(x):
    COUNT[0] += 1
    return x


def draws(x):
    return x + GENERATOR.random()


def writes_a_global(x):
    global total
    total = 1
    return x


def default_grows(x, seen=[]):
    seen += [1]
    return x


def keyword_default_grows(x, *, seen={}):
    seen[len(seen)] = 1
    return x


def closures():
    seen, number = [], 0

    def appends(x):
        seen.append(1)
        return x

    def assigns(x):
        nonlocal number
        number += 1
        return x

    def reads(x):
        return x + number + len(seen)

    return appends, assigns, reads


APPENDS, ASSIGNS, READS = closures()


def inner_function_draws(x):
    def add_noise(value):
        return value + GENERATOR.random()

    return np.stack([add_noise(value) for value in x])


def alias_grows(x):
    mean = MEAN
    mean += 1
    return x


def row_grows(x):
    row = TABLE[-1]
    row += 1
    return x


def counts_within(x):
    NESTED["inner"]["number"] += 1
    NESTED["lists"][0].append(1)
    return x


def appends_to_a_missing_list(x):
    LISTS["seen"].append(1)
    return x


def sets(x):
    setattr(SPACE, "number", SPACE.number + 1)
    return x


class Space:
    number = 0


SPACE = Space()


@jax.jit
def jitted_draw(x):
    return x + GENERATOR.random()


def counted(function):
    calls = []

    @functools.wraps(function)
    def wrapper(*arguments):
        calls.append(1)
        return function(*arguments)

    return wrapper


def counts_in(state, x, *, more):
    state["n"] = state.get("n", 0) + len(more)
    return x


class Augment:
    made = 0

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.counts = [0]
        self.buffers = [np.zeros(3)]
        self.scale = 2.0

    def __call__(self, x):
        return x + self.rng.random()

    def draws(this, x):
        return x + this.rng.random()

    def counts_up(self, x):
        self.counts[0] += 1
        return x

    def calls_another_method(self, x):
        return self.counts_up(x)

    def writes(self, x):
        self.buffers[0][:] += 1
        return x

    def counts_for_all(self, x):
        type(self).made += 1
        return x

    def reads(self, x):
        return x * self.scale + len(self.counts) + self.buffers[0].sum()


class Derived(Augment):
    def __call__(self, x):
        return super().__call__(x) + 1


class Compose:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


def lambda_with(function):
    """A function that calls another one in its closure."""
    return lambda x: function(x) + 0 * x


IMPURE = {
    "global": counts,
    "global that is only written": writes_a_global,
    "generator": draws,
    "Python's generator": lambda x: x + PYTHON.random(),
    "bit generator": lambda x: x + np.random.Generator(BITS).random(),
    "seed sequence": lambda x: x + np.random.default_rng(SEEDS.spawn(1)[0]).random(),
    "default": default_grows,
    "keyword-only default": keyword_default_grows,
    "closure": APPENDS,
    "closure that is assigned": ASSIGNS,
    "function in a closure": lambda_with(counts),
    "inner function": inner_function_draws,
    "array": alias_grows,
    "row of an array": row_grows,
    "array by out=": lambda x: np.add(MEAN, 1, out=MEAN) + x,
    "deque": lambda x: QUEUE.append(1) or x,
    "dict in a dict": counts_within,
    "defaultdict": appends_to_a_missing_list,
    "setattr": sets,
    "jit": jax.jit(counts),
    "function that calls jit": lambda x: jitted_draw(x),
    "functools.wraps": counted(np.sin),
    "partial": functools.partial(counts_in, {}, more=[1]),
    "partial of a partial": functools.partial(functools.partial(counts_in, {}), more=[1]),
    "jit of a partial": jax.jit(functools.partial(counts_in, {}, more=(1,))),
    "partial with a generator": functools.partial(
        lambda x, rng: x + rng.random(), rng=np.random.default_rng()
    ),
    "object": Augment(),
    "derived object": Derived(),
    "bound method": Augment().draws,
    "method that calls a method": Augment().calls_another_method,
    "buffers of an object": Augment().writes,
    "attribute of the class": Augment().counts_for_all,
    "objects in an object": Compose(np.sin, Augment()),
}


def normalized(x):
    return (x - MEAN.reshape(1, 3).max()) * NESTED["scale"] + MEAN.sum()


def changes_its_own_values(x, options={"a": 1}, out=np.zeros(3)):
    options = dict(options)
    options["b"] = 2
    out = x * 2
    out[0] = 1
    parts = []
    parts.append(out)
    number = 0

    def inner(QUEUE):
        nonlocal number
        number += 1
        QUEUE.append(number)
        return QUEUE

    return out + len(inner(parts))


def changes_copies(x):
    scale, rows = MEAN[0], TABLE[np.asarray(x, int)]
    scale *= 2
    rows -= rows.mean()
    return x * scale + rows.sum()


def prints(x):
    traceback.print_exc(file=sys.stderr)
    return x


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


PURE = {
    "NumPy": np.sin,
    "lambda": lambda x: x * 2,
    "globals that are read": normalized,
    "closure that is read": READS,
    "method that reads": Augment().reads,
    "objects that are pure": Compose(normalized, np.sin),
    "seeded generators": lambda x: (
        x + np.random.default_rng(0).random() + random.Random(3).random()
    ),
    "generator of a seed sequence": lambda x: x + np.random.default_rng(SEEDS).random(),
    "own values": changes_its_own_values,
    "copies": changes_copies,
    "prints": prints,
    "vmap": jax.vmap(normalized),
    "grad": jax.jit(jax.vmap(jax.grad(lambda x: x * 2.0))),
    "generator that is not used": jax.jit(
        functools.partial(lambda x, rng: x, rng=np.random.default_rng())
    ),
    "flax": jax.jit(functools.partial(Scale().apply, {"params": {}})),
}


def changed_by_calls(function):
    before = reachable_values(function)
    for shape in ((3,), (2, 3)):
        with contextlib.suppress(Exception):  # some take other arguments
            function(np.ones(shape, np.float32))
    return changes(before, reachable_values(function))


def test_impure_functions_are_detected():
    found = {name: changed_by_calls(function) for name, function in IMPURE.items()}
    assert [name for name, text in found.items() if "changed" not in text] == []


def test_pure_functions_pass():
    found = {name: changed_by_calls(function) for name, function in PURE.items()}
    assert found == dict.fromkeys(PURE, "")


def test_iterators_are_state():
    function = functools.partial(lambda it, x: x, iter([1]))
    assert (
        changes(reachable_values(function), reachable_values(function)) == "it has 0, an iterator"
    )


class Model:
    """An object whose attributes matter only if the code of the function names them."""

    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.step, self.slot, self.table = 0, 0, np.zeros(1 << 21)
        self.weights = jnp.zeros(3)
        self.mask = jax.random.key(0)

    @property
    def drawn(self):
        self.calls = getattr_of(self, "calls") + 1
        return self.calls

    def scales(self, x):
        return x * self.table[0] + self.weights[0]

    def reads_a_property(self, x):
        return x + self.drawn

    def reads_a_slot(self, x):
        return x + self.slot

    def reads_a_key(self, x):
        return x + jax.random.uniform(self.mask)


getattr_of = functools.partial(lambda owner, name: vars(owner).get(name, 0))


def test_attributes_that_code_does_not_name_are_ignored():
    model = Model()
    functions = (model.scales, model.reads_a_slot, model.reads_a_key)
    before = [reachable_values(function) for function in functions]
    model.step += 1  # by a training loop
    assert before == [reachable_values(function) for function in functions]
    model.table[-1] = 1  # an array of 16 MiB, of which some elements are compared
    model.slot = 1
    model.mask = jax.random.key(1)
    seen = [changes(old, reachable_values(function)) for old, function in zip(before, functions)]
    assert seen == ["self.table changed", "self.slot changed", "self.mask changed"]
    model.table[-1] = 0
    assert reachable_values(model.scales) == before[0]
    model.weights = jnp.ones(3)
    assert changes(before[0], reachable_values(model.scales)) == "self.weights changed"


def test_properties_are_read():
    model = Model()
    before = reachable_values(model.reads_a_property)
    model.reads_a_property(1)
    assert "calls changed" in changes(before, reachable_values(model.reads_a_property))


# In graphs


def imports(x):
    from random import random as drawn

    return x + np.float32(drawn())


def drawn_by_numpy(x):
    return x + np.float32(np.random.random())


DRAWN = {
    "numpy.random": (drawn_by_numpy, lambda x: x + np.float32(getattr(np.random, "rand")())),
    "random": (imports, lambda x: x + np.float32(uniform_of_python(0, 1))),
}


def uniform(shape):
    return dali_fn.random.uniform(shape=list(shape))


def in_graph(function, kind, **options):
    """An iterator over a graph that calls a function."""

    def graph():
        x = uniform((3,))
        if kind == "jax":
            return fn.jax_function(function, **options)(x)
        if kind == "ragged":
            return fn.jax_function(function, ragged="group", **options)(x)
        batch = kind == "batch"
        return fn.dl_tensor_python_function(x, function=function, batch_processing=batch, **options)

    return data_iterator(graph, ["x"], size=40)(batch_size=4)


@pytest.mark.parametrize("kind", ("jax", "ragged", "sample"))
@pytest.mark.parametrize("generator", DRAWN)
def test_global_random_states_are_compared_around_the_first_call(kind, generator):
    np.random.random(), random.random()  # by another part of the program
    for function in DRAWN[generator]:
        with in_graph(function, kind) as iterator:
            next(iterator)
            with pytest.raises(ValueError, match=rf"keeps state \(.*{generator} changed\)"):
                iterator.get_state()
        with in_graph(function, kind, stateful=False) as iterator:
            next(iterator)
            assert iterator.get_state()
    with in_graph(lambda x: x * 2, kind) as iterator:
        next(iterator)
        np.random.random(), random.random()
        assert iterator.get_state()


@pytest.mark.parametrize("conditionals", (False, True))
@pytest.mark.parametrize("kind", ("clean", "counted", "drawn"))
def test_functions_that_are_defined_in_the_graph(conditionals, kind):
    seen = []

    def graph():
        def counted(x):
            seen.append(1)
            return x

        def drawn(x):
            return x + np.float32(np.random.random())

        def clean(x):
            made = x.copy()
            if made.sum() > 1:
                made[0] = 2
            return made

        chosen = {"clean": clean, "counted": counted, "drawn": drawn}[kind]
        return fn.dl_tensor_python_function(uniform((3,)), function=chosen, batch_processing=False)

    iterator = data_iterator(graph, ["x"], size=40)(batch_size=4, enable_conditionals=conditionals)
    next(iterator)
    if kind == "clean":
        assert iterator.get_state()
        return
    value = {"counted": "seen", "drawn": r"numpy\.random"}[kind]
    with pytest.raises(ValueError, match=rf"{kind}\(\) keeps state \(.*{value}.* changed\)"):
        iterator.get_state()


def copied(out0, in0):
    for k in range(in0.shape[0]):  # Numba compiles a slice for several times as long
        out0[k] = in0[k]


@pytest.mark.parametrize("data", ("reader", "source"))
@pytest.mark.parametrize("kind", ("jax", "dlpack", in_slow("numba")))
def test_impure_functions_are_named_when_a_state_is_requested(jpegs_many, kind, data):
    def of_reader(stateful=None, function=counts):
        return of_labels(
            dali_fn.readers.file(files=jpegs_many[:8], name="reader")[1], stateful, function
        )

    def of_labels(label, stateful=None, function=counts):
        if kind == "jax":
            return fn.jax_function(function, stateful=stateful)(label)
        if kind == "dlpack":
            return fn.dl_tensor_python_function(
                label, function=function, batch_processing=False, stateful=stateful
            )
        return fn.numba_function(
            label, run_fn=copied, example=np.zeros(1, np.int32), stateful=stateful
        )

    if data == "reader":
        made = data_iterator(of_reader, ["x"], reader_name="reader")
    else:
        source = sources.Arrays({"label": np.arange(8, dtype=np.int32)[:, None]})
        made = data_iterator(of_labels, ["x"], source=source)
    seen = {"stateful": True} if kind == "numba" else {}
    iterator = made(batch_size=4, **seen)
    assert len(list(iterator)) == 2  # it iterates well
    with pytest.raises(ValueError, match=r"its function \w+\(\) keeps state .*stateful=False"):
        iterator.get_state()
    assert made(batch_size=4, stateful=False).get_state()


def test_a_state_from_before_a_function_counted_is_refused_in_the_same_process(jpegs_many):
    # In a new process the function would also start again, and the state would be correct.
    calls = []

    @fn.jax_function
    def counting(x):
        calls.append(1)
        return x + len(calls)

    def graph():
        return counting(dali_fn.readers.file(files=jpegs_many[:8], name="reader")[1])

    made = data_iterator(graph, ["x"], reader_name="reader", prepare_first_batch=False)
    iterator = made(batch_size=4)
    state = json.loads(json.dumps(iterator.get_state()))
    next(iterator)
    with pytest.raises(ValueError, match="keeps state"):
        iterator.set_state(state)
    assert next(iterator)["x"].shape == (4, 1)
    with pytest.raises(ValueError, match="keeps state"):
        iterator.get_state()


def test_changes_before_an_iterator_was_made_are_ignored(jpegs_many):
    def graph(function):
        return fn.jax_function(function)(dali_fn.readers.file(files=jpegs_many, name="r")[1])

    scale = {"value": 1}

    def scaled(x):
        return x * scale["value"]

    made = data_iterator(graph, ["x"], reader_name="r")
    first = made(scaled, batch_size=4)
    next(first)
    scale["value"] = 2  # between two runs
    second = made(scaled, batch_size=4)
    next(second)
    assert second.get_state()
    with pytest.raises(ValueError, match=r"scale.value changed"):
        first.get_state()
