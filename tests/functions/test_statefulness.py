"""Whether functions of a graph keep state: what they change is seen, and nothing else."""

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

from dalijax import data_iterator, fn
from dalijax.core.functions.statefulness import changes, memory

COUNT = [0]
GENERATOR = np.random.default_rng(0)


def counts(x):
    COUNT[0] += 1
    return x


def draws(x):
    return x + GENERATOR.random()


def shared(x):
    return x + np.random.random()


def by_random(x):
    return x + random.random()


def helper(x):
    global total
    total = 1
    return x


def calls_a_helper(x):
    return helper(x)


def closes_over():
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


class Counter:
    def __init__(self):
        self.number = 0

    def __call__(self, x):
        self.number += 1
        return x

    def reads(self, x):
        return x + self.number


def default(x, seen=[]):
    seen.append(1)
    return x


def writes_its_own(x):
    out = np.zeros(3)
    out[0] = 1
    parts = []
    parts.append(out)
    return x + jax.random.uniform(jax.random.key(0))


APPENDS, ASSIGNS, READS = closes_over()


MEAN = np.array([1.0, 2.0, 3.0], np.float32)
CONFIG = {"scale": 2.0}
QUEUE = collections.deque([1, 2])


def normalised(x):
    return (x - MEAN.reshape(1, 3).max()) * CONFIG["scale"] + MEAN.sum()


def own_generators(x):
    return x + np.random.default_rng(0).random() + random.Random(3).random()


def nested(x):
    number = 0

    def inner():
        nonlocal number
        number += 1

    inner()
    return x + number


def writes_an_array(x):
    MEAN[0] += 1
    return x


def queues(x):
    QUEUE.append(1)
    return x


def aliases(x):
    SPACE.number += 1
    return x


class Space:
    number = 0


SPACE = Space()
SPACE.rng = np.random.default_rng(0)


def draws_from_an_object(x):
    return x + SPACE.rng.random()


def counted(function):
    calls = []

    @functools.wraps(function)
    def wrapper(*arguments):
        calls.append(1)
        return function(*arguments)

    return wrapper


class Augment:
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.counts = [0]
        self.scale = 2.0

    def draws(this, x):
        return x + this.rng.random()

    def counts_up(self, x):
        self.counts[0] += 1
        return x

    def calls(self, x):
        return self.counts_up(x)

    def reads(self, x):
        return x * self.scale + len(self.counts)


AUGMENT = Augment()


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x + self.rng.random()


class Compose:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def first(self, x):
        rng = self.parts[0].rng
        return x + rng.random()


def imported_name(x):
    return x + uniform_of_python(0, 1)


def imports(x):
    from random import random as drawn

    return x + drawn()


def unseeded(x):
    return x + np.random.default_rng(None).random() + random.Random().random()


def seeded_by_keyword(x):
    return x + np.random.default_rng(seed=3).random() + np.random.RandomState(seed=3).rand()


def inner_draws(x):
    def one(value):
        return value + GENERATOR.random()

    return np.stack([one(value) for value in x])


def inner_appends(x):
    return (lambda: QUEUE.append(1))() or x


def renames(x):
    seen = QUEUE
    seen.append(1)
    return x


def sets(x):
    setattr(SPACE, "number", SPACE.number + 1)
    return x


def writes_out(x):
    np.add(MEAN, 1, out=MEAN)
    return x


@jax.jit
def jitted_draw(x):
    return x + GENERATOR.random()


def calls_a_jitted_one(x):
    return jitted_draw(x)


NESTED = {"one": {"number": 0}, "lists": [[]], "scale": 2.0}
LISTS = collections.defaultdict(list)
ORDER = [3, 1, 2]
BITS = np.random.PCG64(0)
SEEDS = np.random.SeedSequence(0)


def counts_within(x):
    NESTED["one"]["number"] += 1
    return x


def appends_within(x):
    NESTED["lists"][0].append(1)
    return x


def appends_somewhere(x):
    for key in ("a", "b"):
        LISTS[key].append(1)
    return x


def adds_at(x):
    np.add.at(MEAN, [0], 1)
    return x


def copies_to(x):
    np.copyto(MEAN, MEAN + 1)
    return x


def fills(x):
    MEAN[0:1].fill(3)
    return x


def rotates(x):
    QUEUE.rotate(1)
    return x


def reverses(x):
    ORDER.reverse()
    return x


def default_grows(x, seen=[]):
    seen += [1]
    return x


def alias_grows(x):
    mean = MEAN
    mean += 1
    return x


def row_grows(x):
    first = NESTED["lists"][0]
    first += [1]
    return x


def loops(x):
    for one in [QUEUE]:
        one.append(1)
    return x


def draws_of_bits(x):
    return x + np.random.Generator(BITS).random()


def spawns(x):
    return x + np.random.default_rng(SEEDS.spawn(1)[0]).random()


def seeded_by_a_sequence(x):
    return x + np.random.default_rng(SEEDS).random()


def counts_in(state, x, *, more):
    state["n"] = state.get("n", 0) + 1
    return x


def appends_in(state, x, *, more):
    more.append(1)
    return x


def reads_in(state, x, *, more):
    return x * state["n"] + len(more)


class Parts:
    made = 0

    def __init__(self):
        self.parts = [Counter(), Counter()]
        self.first, self.second = Noise(), Space()
        self.lists = collections.defaultdict(list)
        self.buffers = [np.zeros(3)]

    def loops(self, x):
        for part in self.parts:
            x = part.__call__(x)
        return x

    def unpacks(self, x):
        second, first = self.second, self.first
        return x + first.rng.random() + second.number

    def appends(self, x):
        self.lists["seen"].append(x)
        return x

    def writes(self, x):
        self.buffers[0][:] += 1
        return x

    def counts_for_all(self, x):
        type(self).made += 1
        return x

    def reads(self, x):
        total = x + sum(len(part) for part in self.lists.values())
        for buffer in self.buffers:
            total = total + buffer
        return total


PARTS = Parts()


class Derived(Noise):
    def __call__(self, x):
        return super().__call__(x) + 1


class DerivedReader(Counter):
    def __call__(self, x):
        return super().reads(x)


def prints(x):
    traceback.print_exc(file=sys.stderr)
    return x


def parameter_of_its_own(x, options={"a": 1}, out=np.zeros(3)):
    options = dict(options)
    options["b"] = 2
    out = x * 2
    out[0] = 1
    out += 1
    return out


def parameters_in_blocks(x, table=np.zeros(3), row=np.zeros(3)):
    if x.ndim > 1:
        table = table.copy()
        table[0] = 1
    for row in x.copy():
        row[0] = 1
    return x


def parameter_of_one_branch(x, table=np.zeros(3)):
    if x.ndim > 1:
        table = table.copy()
    else:
        table[0] = 1
    return x


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


def parameter_changed_before(x, options={"a": 1}):
    options["b"] = 2
    options = dict(options)
    return x


def reads_a_global(x):
    global total
    return x + total


def inner_shadows(x):
    def inner():
        QUEUE = []
        QUEUE.append(1)
        return QUEUE

    return x + len(QUEUE) + len(inner())


def numbers_of_an_array(x):
    scale, other, rows = MEAN[0], TABLE[1, -1], TABLE[np.asarray(x, int)]
    scale *= 2
    other += 1
    rows -= rows.mean()
    for name in ("scale",):
        value = NESTED[name]
        value *= 2
    return x * scale


TABLE = np.zeros((3, 4))
BUCKETS = {"a": [], "b": []}


def row_of_an_array(x):
    row = TABLE[-1]
    row += 1
    return x


def rows_of_an_array(x):
    for row in TABLE:
        row += 1
    return x


def somewhere_in_buckets(x):
    for name in ("a", "b"):
        bucket = BUCKETS[name]
        bucket.append(1)
    return x


def inner_names(x):
    def inner(QUEUE):
        MEAN = np.zeros(3)
        MEAN[0] = 1
        QUEUE.append(MEAN)
        return QUEUE

    return x + len(inner([]))


@pytest.mark.parametrize(
    "function,why",
    [
        (counts, "changed"),
        (draws, "changed"),
        (shared, "changed"),
        (by_random, "changed"),
        (calls_a_helper, ""),
        (APPENDS, "changed"),
        (ASSIGNS, "number changed"),
        (READS, ""),
        (Counter(), "changed"),
        (Counter().__call__, "changed"),
        (Counter().reads, ""),
        (default, "changed"),
        (writes_its_own, ""),
        (functools.partial(lambda x, rng: x + rng.random(), rng=np.random.default_rng()), "rng ch"),
        (functools.partial(lambda it, x: x, iter([1])), "an iterator"),
        (jax.jit(counts), "changed"),
        (np.sin, ""),
        (normalised, ""),
        (own_generators, ""),
        (nested, ""),
        (writes_an_array, "changed"),
        (queues, "changed"),
        (aliases, "changed"),
        (draws_from_an_object, "changed"),
        (counted(np.sin), "changed"),
        (AUGMENT.draws, "changed"),
        (AUGMENT.counts_up, "changed"),
        (AUGMENT.calls, "changed"),
        (AUGMENT.reads, ""),
        (jax.jit(functools.partial(lambda x, rng: x, rng=np.random.default_rng())), ""),
        (jax.vmap(normalised), ""),
        (jax.jit(jax.vmap(jax.grad(lambda x: x * 2.0))), ""),
        (lambda x: x * 2, ""),
        (Compose(Noise()), "changed"),
        (Compose(normalised, np.sin), ""),
        (Compose(Noise()).first, "changed"),
        (imported_name, "changed"),
        (imports, "changed"),
        (unseeded, "without a seed"),
        (seeded_by_keyword, ""),
        (inner_draws, "changed"),
        (inner_appends, "changed"),
        (renames, "changed"),
        (sets, "changed"),
        (writes_out, "changed"),
        (calls_a_jitted_one, "changed"),
        (inner_names, ""),
        (counts_within, "changed"),
        (appends_within, "changed"),
        (appends_somewhere, "changed"),
        (adds_at, "changed"),
        (copies_to, "changed"),
        (fills, "changed"),
        (rotates, "changed"),
        (reverses, "changed"),
        (default_grows, "changed"),
        (alias_grows, "changed"),
        (row_grows, "changed"),
        (loops, "changed"),
        (draws_of_bits, "changed"),
        (spawns, "changed"),
        (seeded_by_a_sequence, ""),
        (functools.partial(counts_in, {}, more=[]), "changed"),
        (functools.partial(appends_in, {}, more=[]), "changed"),
        (functools.partial(functools.partial(counts_in, {}), more=[]), "changed"),
        (jax.jit(functools.partial(counts_in, {}, more=())), "changed"),
        (functools.partial(reads_in, {"n": 2}, more=[]), ""),
        (PARTS.loops, "changed"),
        (PARTS.unpacks, "changed"),
        (PARTS.appends, "changed"),
        (PARTS.writes, "changed"),
        (PARTS.counts_for_all, "changed"),
        (PARTS.reads, ""),
        (Derived(), "changed"),
        (DerivedReader(), ""),
        (prints, ""),
        (parameter_of_its_own, ""),
        (parameter_changed_before, "changed"),
        (parameters_in_blocks, ""),
        (parameter_of_one_branch, "changed"),
        (functools.partial(Scale().apply, {"params": {}}), ""),
        (jax.jit(functools.partial(Scale().apply, {"params": {}})), ""),
        (functools.partial(jax.jit(Scale().apply), {"params": [iter("")]}), "an iterator"),
        (reads_a_global, ""),
        (inner_shadows, ""),
        (numbers_of_an_array, ""),
        (row_of_an_array, "changed"),
        (rows_of_an_array, "changed"),
        (somewhere_in_buckets, "changed"),
    ],
)
def test_what_keeps_state_is_seen(function, why):
    before = memory(function)
    assert memory(function) == before or why  # looking changes nothing
    seen = []
    for shape in ((3,), (2, 3)):
        with contextlib.suppress(Exception):  # some take other arguments
            function(np.ones(shape, np.float32))
        seen.append(changes(before, memory(function)))
    assert any(why in one for one in seen) and any(seen) == bool(why)


class Model:
    """An object of the user's: what its function names counts, and what it does not, does not."""

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


getattr_of = functools.partial(lambda one, name: vars(one).get(name, 0))


def test_of_an_object_only_what_code_names_is_seen():
    model = Model()
    before = [memory(one) for one in (model.scales, model.reads_a_slot, model.reads_a_key)]
    model.step += 1  # a training loop's own
    after = [memory(one) for one in (model.scales, model.reads_a_slot, model.reads_a_key)]
    assert before == after
    model.table[-1] = 1  # an array of 16 MiB, of which blocks are looked at
    model.slot = 1
    model.mask = jax.random.key(1)
    after = [memory(one) for one in (model.scales, model.reads_a_slot, model.reads_a_key)]
    seen = [changes(*pair) for pair in zip(before, after)]
    assert seen == ["self.table changed", "self.slot changed", "self.mask changed"]
    model.table[-1] = 0
    assert memory(model.scales) == before[0]
    model.weights = jnp.ones(3)
    assert changes(before[0], memory(model.scales)) == "self.weights changed"


def test_properties_are_seen():
    model = Model()
    before = memory(model.reads_a_property)
    model.reads_a_property(1)
    assert "calls changed" in changes(before, memory(model.reads_a_property))


def uniform(shape):
    return dali_fn.random.uniform(shape=list(shape))


@pytest.mark.parametrize("conditionals", (False, True))
@pytest.mark.parametrize("kind", ("clean", "counted", "drawn"))
def test_state_is_seen_of_functions_defined_in_the_graph(conditionals, kind):
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
    what = {"counted": "seen", "drawn": r"np\.random"}[kind]
    with pytest.raises(ValueError, match=rf"{kind}\(\) keeps state \(.*{what}.* changed\)"):
        iterator.get_state()


def copied(out0, in0):
    out0[:] = in0[:]


@pytest.mark.parametrize("kind", ("jax", "dlpack", "numba"))
def test_stateful_functions_are_named_where_a_state_is_asked_for(jpegs_many, kind):
    def graph(stateful=None, function=counts):
        label = dali_fn.readers.file(files=jpegs_many[:8], name="reader")[1]
        if kind == "jax":
            return fn.jax_function(function, stateful=stateful)(label)
        if kind == "dlpack":
            return fn.dl_tensor_python_function(
                label, function=function, batch_processing=False, stateful=stateful
            )
        return fn.numba_function(
            label, run_fn=copied, example=np.zeros(1, np.int32), stateful=stateful
        )

    made = data_iterator(graph, ["x"], reader_name="reader")
    seen = {"stateful": True} if kind == "numba" else {}
    iterator = made(batch_size=4, **seen)
    assert len(list(iterator)) == 2  # it iterates well
    with pytest.raises(ValueError, match=r"its function \w+\(\) keeps state .*stateful=False"):
        iterator.get_state()
    assert made(batch_size=4, stateful=False).get_state()


def test_a_state_from_before_a_function_counted_is_refused_in_the_same_process(jpegs_many):
    # In a new process the function would begin anew as well, and the state would be right.
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


def test_what_another_iterator_has_changed_before_is_none_of_this_one(jpegs_many):
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
    with pytest.raises(ValueError, match=r"scale\['value'\] changed"):
        first.get_state()
