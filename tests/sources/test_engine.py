"""The engine of a source: every way of moving, on every layout, against the plan and the order."""

import itertools
import json

import jax
import numpy as np
import pytest
from numbers_source import Numbers, expected
from nvidia.dali import fn
from sealing import crafted
from shardings import rows_over

from dalijax import LastBatchPolicy, data_iterator
from dalijax import fn as dali
from dalijax.core.config import IteratorConfig
from dalijax.core.feeding.graph import field_graph
from dalijax.core.feeding.source_engine import SourceEngine
from dalijax.core.order.samples import SamplePlan, SamplePosition
from dalijax.core.sources import state as states
from dalijax.errors import StateError
from dalijax.sources import Arrays

FILL, DROP, PARTIAL = LastBatchPolicy.FILL, LastBatchPolicy.DROP, LastBatchPolicy.PARTIAL


def numbers_and_draws(number, draw):
    return number, draw.uniform()


def make(source, batch_size, shards=0, policy=FILL, padded=False, seed=3, shuffle=True, **more):
    config = IteratorConfig(
        output_map=more.pop("output_map", ["number", "drawn"]),
        mask="mask",
        last_batch_policy=policy,
        last_batch_padded=padded,
        sharding=rows_over(shards) if shards else None,
        as_numpy=None if shards else True,
        on_error=more.pop("on_error", "raise"),
        source=source,
        shuffle=shuffle,
    )
    graph = field_graph(
        more.pop("graph", numbers_and_draws), source.fields, more.pop("settings", {}), None
    )
    call = {"batch_size": batch_size, "num_threads": 1, "seed": seed, "device_id": None} | more
    return SourceEngine(source, graph, call, config)


def check(batch, rows, count, seed=3, shuffle=True):
    numbers, draws = expected(rows.samples, count, seed, shuffle)
    np.testing.assert_array_equal(batch["number"], numbers)
    np.testing.assert_array_equal(batch["drawn"], draws)
    np.testing.assert_array_equal(batch["mask"], rows.valid)
    assert batch["text"].tolist() == [f"text {k}" for k in numbers]


@pytest.mark.parametrize("seed", range(12))
def test_random_moves(seed):
    """Batches match the position after any moves, on any layout."""
    chosen = np.random.default_rng(seed)
    policy, padded = (FILL, DROP, PARTIAL)[seed % 3], bool(chosen.integers(2))
    count, shuffle = int(chosen.integers(5, 30)), bool(chosen.integers(4))

    def other():
        shards = 0 if policy is PARTIAL else int(chosen.choice([0, 1, 2, 4]))
        rows = int(chosen.integers(1, 4)) * max(shards, 1)
        engine = make(Numbers(count), rows, shards, policy, padded, shuffle=shuffle)
        return engine, SamplePlan(count, rows, policy, padded)

    (engine, plan), here = other(), SamplePosition()
    for _ in range(60):
        move = chosen.choice(["next"] * 6 + ["peek", "skip", "rewind", "seek", "restore", "drop"])
        if move == "skip":
            batches = int(chosen.integers(5))
            moved = min(batches, plan.remaining(here))
            assert engine.skip(batches) == moved
            here = plan.skip(here, moved)
        elif move == "rewind":
            engine.rewind()
            here = SamplePosition(here.epoch, here.start, here.start)
        elif move == "seek":
            here = plan.seek(int(chosen.integers(4)))
            engine.seek(here.epoch, 0)
        elif move == "restore":
            state = json.loads(json.dumps(engine.get_state()))
            engine.close()
            engine, plan = other()
            engine.set_state(state, (), ())
            assert engine.get_state() == state
        elif move == "drop":
            engine.drop()
        else:
            outcome = engine.peek()
            assert outcome.ended == (plan.remaining(here) == 0) == engine.at_end()
            if not outcome.ended:
                check(outcome.batch, plan.rows(here), count, shuffle=shuffle)
            if move == "next" and outcome.ended:
                engine.next_epoch()
                here = plan.next_epoch(here)
            elif move == "next":
                engine.advance()
                here = plan.skip(here, 1)
        assert engine.position == here
    engine.close()


def test_moves_take_constant_time():
    """A move reads only the batches that are prepared."""
    source = Numbers(100_000)
    engine = make(source, 4)
    for move in (lambda: engine.skip(20_000), lambda: engine.rewind(), lambda: engine.seek(7, 99)):
        engine.advance()
        source.reads.clear()
        move()
        engine.peek()
        # At most eight batches are read ahead, before the move (partly after `clear`) and after it.
        assert sum(map(len, source.reads)) <= 2 * 4 * 8
    engine.close()


def decode(number, data, draw):
    return number, fn.resize(fn.decoders.image(data), size=[2, 2]), draw.uniform()


@pytest.mark.parametrize("how", ["unreadable", "undecodable"])
@pytest.mark.parametrize("shards", [0, 2])
def test_bad_records(how, shards):
    bad = {2, 3, 11}

    def batches(on_error):
        source = Numbers(16, **{how: bad})
        outputs = ["number", "images", "drawn"]
        more = {"graph": decode, "output_map": outputs, "on_error": on_error, "shuffle": False}
        engine = make(source, 4, shards, **more)
        for _ in range(2):  # epochs
            while not (outcome := engine.peek()).ended:
                yield engine, outcome
                engine.advance()
            engine.next_epoch()
        engine.close()

    steps = [0, 1, 2, 3] * 2
    for step, (engine, outcome) in zip(steps, batches("raise"), strict=True):
        names = [f"number {k}" for k in sorted(bad) if k // 4 == step]
        assert (outcome.batch is None) == bool(names)
        if names:
            assert sorted(outcome.error.files) == names
            assert all(name in str(outcome.error) for name in names)
            assert "counts as delivered" in str(outcome.error)
    good = [step for step in steps if step in (1, 3)]
    for step, (engine, outcome) in zip(good, batches("skip"), strict=True):
        np.testing.assert_array_equal(outcome.batch["number"], np.arange(4) + 4 * step)
    first = [["number 2", "number 3"], ["number 11"]]
    assert [sorted(error.files) for error in engine.errors][:2] == first
    for step, (engine, outcome) in zip(steps, batches("mask"), strict=True):
        wanted = np.arange(4) + 4 * step
        valid = np.array([k not in bad for k in wanted])
        np.testing.assert_array_equal(outcome.batch["mask"], valid)
        np.testing.assert_array_equal(np.asarray(outcome.batch["number"])[valid], wanted[valid])
        images = np.asarray(outcome.batch["images"])[valid]
        assert np.abs(images.astype(int) - 3 * wanted[valid, None, None, None]).max() <= 1
        drawn = expected(np.arange(4) + 4 * step, 16, 3, shuffle=False)[1]
        epoch = engine.position.epoch
        if epoch == 0:
            np.testing.assert_array_equal(np.asarray(outcome.batch["drawn"])[valid], drawn[valid])
    assert [sorted(error.files) for error in engine.errors] == first * 2


@pytest.mark.parametrize("name", ("number", None))
def test_each_masked_record_is_named_once(name):
    """It is named once, however often its batch is made, with other bad records and in padding."""

    class Named(Numbers):
        def name(self, index):
            return f"{name} {index}" if name else {}[index]  # which reads the record

    name = name or "record"
    source = Named(6, unreadable={0, 1}, undecodable={3})
    more = {"graph": decode, "output_map": ["number", "images", "drawn"], "on_error": "mask"}
    engine = make(source, 4, **more, shuffle=False)
    start = engine.position
    for _ in range(2):
        masks = []
        while not (outcome := engine.peek()).ended:
            masks.append(outcome.batch["mask"].tolist())
            engine.advance()
        assert masks == [[False, False, True, False], [True, True, False, False]]
        engine.go_to(start)
    assert sorted(file for error in engine.errors for file in error.files) == [
        f"{name} {number}" for number in (0, 1, 3)
    ]
    assert {(error.epoch, error.step) for error in engine.errors} == {(0, 0)}
    assert engine.num_failed == 1
    engine.close()


def test_a_source_that_vanishes_loses_no_batch():
    source = Numbers(8)
    engine = make(source, 4, graph=decode, output_map=["number", "images", "drawn"], shuffle=False)
    source.unreadable = set(range(8))
    with pytest.raises(OSError, match="number 0 is gone"):
        engine.peek()
    source.unreadable = set()
    np.testing.assert_array_equal(engine.peek().batch["number"], np.arange(4))
    engine.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 4}, "seed: 3 -> 4"),
        ({"count": 9}, r"identity: numbers of 8 -> numbers of 9 \(how many records"),
        ({"shuffle": False}, "order: shuffled FILL unpadded 8 -> sequential"),
        ({"policy": DROP}, "order: shuffled FILL unpadded 8 -> shuffled DROP"),
        ({"padded": True}, "order: shuffled FILL unpadded 8 -> shuffled FILL padded"),
        ({"output_map": ["a", "b"]}, "outputs: .*number.* -> .*a.*"),
        ({"graph": lambda number, draw: (number, draw.uniform(0, 2) + 1)}, "operators.add"),
    ],
)
def test_states_of_another_stream_are_refused(change, name):
    def of(count=8, batch_size=3, **more):
        return make(Numbers(count), batch_size, **more)

    engine = of()
    engine.peek()
    engine.advance()
    state = engine.get_state()
    assert len(json.dumps(state)) <= 2048
    other = of(**change)
    before = other.get_state()
    with pytest.raises(StateError, match=name):
        other.set_state(state, (), ())
    assert other.get_state()["sample"] == before["sample"] == 0
    engine.close()
    other.close()


def test_a_missing_seed_is_taken_from_the_state():
    engine, other = make(Numbers(8), 3), make(Numbers(8), 5, seed=None)
    engine.peek()
    engine.advance()
    other.peek()
    other.set_state(engine.get_state(), (), ())
    numbers = expected(np.arange(3, 8), 8, 3)[0]
    np.testing.assert_array_equal(other.peek().batch["number"], numbers)
    engine.close()
    other.close()


def test_damaged_states_are_refused():
    engine = make(Numbers(8), 3)
    state = engine.get_state()
    wrong = []
    for key, values in {
        "epoch": [-1, 1.0, True],
        "start": [-1, None],
        "sample": [-1, "3"],
        "seed": [1 << 63, 0.5],
        "operators": [["x", 1], 1],
        "outputs": [[None]],
    }.items():
        wrong += [crafted(states.FORM, state, **{key: value}) for value in values]
    for one in wrong:
        with pytest.raises(StateError):
            engine.set_state(one, (), ())
        assert engine.get_state() == state
    engine.close()


def test_a_record_draws_the_same_numbers_in_every_batch():
    seen = {}
    for batch_size, shards in itertools.product((2, 4, 8), (0, 1, 2)):
        engine = make(Numbers(16), batch_size, shards)
        for _ in range(16 // batch_size):
            batch = engine.peek().batch
            for number, drawn in zip(np.asarray(batch["number"]), np.asarray(batch["drawn"])):
                assert seen.setdefault(int(number), float(drawn)) == float(drawn)
            engine.advance()
        engine.close()
    assert len(set(seen.values())) == 16


def test_keys_of_functions_belong_to_records():
    @dali.jax_function
    def noise(numbers, *, key):
        return jax.random.uniform(key, numbers.shape)

    def graph(number):
        return number, noise(number)

    engine = make(Numbers(16), 4, 0, graph=graph)
    batches = []
    for _ in range(3):
        batches.append(np.asarray(engine.peek().batch["drawn"]))
        engine.advance()
    state = engine.get_state()
    engine.rewind()
    again = np.asarray(engine.peek().batch["drawn"])
    engine.close()
    np.testing.assert_array_equal(again, batches[0])
    assert state["sample"] == 12
    assert len(np.unique(np.concatenate(batches))) == 12


def noisy(number):
    return number, fn.random.uniform(range=[0, 1])


def walk(engine, count, spec=False):
    """Returns the next batches, across the ends of epochs."""
    out = []
    while len(out) < count:
        if engine.at_end():
            engine.next_epoch()
        with engine.interruptible():
            outcome = engine.peek()
            engine.advance()
        if not outcome.ended:
            batch = outcome.unwrap()
            out.append((batch["number"].tolist(), np.asarray(batch["drawn"]).tolist()))
    return out


def records_of(batches):
    return [number for number, _ in batches]


def test_random_operators_of_dali_have_no_state():
    """Their numbers depend on earlier batches and on the layout, so restoring raises an error.

    Moves to a saved position are refused before and after the pipelines are built.
    """
    engine = make(Numbers(18), 4, graph=noisy)
    walk(engine, 2)
    saved = make(Numbers(18), 4)
    walk(saved, 2)
    moves = (
        engine.get_state,
        lambda: engine.set_state(saved.get_state(), (), ()),
        lambda: engine.seek(0, 1),
        lambda: engine.seek(3, 0),
    )
    for move in moves:
        here = engine.position
        with pytest.raises(StateError, match=r"Uniform.*draw\.uniform"):
            move()
        assert engine.position == here
    engine.seek(0, 2)  # its position
    walk(engine, 1)
    lazy = make(Numbers(18), 4, graph=noisy)
    lazy.seek(0, 2)  # before the graph is known
    with pytest.raises(StateError, match=r"Uniform.*draw\.uniform"):
        lazy.peek()
    lazy.seek(0, 0)
    assert walk(lazy, 2) == walk(make(Numbers(18), 4, graph=noisy), 2)


@pytest.mark.parametrize("shards", (0, 2))
def test_random_operators_of_dali_deliver_the_right_records(shards):
    """Every move within a run delivers the position's records, with new numbers."""
    whole = walk(make(Numbers(18), 4, shards, graph=noisy), 14)
    assert len({tuple(np.ravel(drawn)) for _, drawn in whole}) == 14
    assert whole == walk(make(Numbers(18), 4, shards, graph=noisy), 14)
    other = walk(make(Numbers(18), 4, shards, graph=noisy, seed=4), 4)
    drawn = [{*np.ravel([numbers for _, numbers in batches])} for batches in (whole, other)]
    assert drawn[0].isdisjoint(drawn[1])
    engine = make(Numbers(18), 4, shards, graph=noisy)
    assert walk(engine, 1) == whole[:1] and engine.skip(2) == 2
    assert records_of(walk(engine, 2)) == records_of(whole[3:5])
    engine.rewind()
    assert records_of(walk(engine, 5)) == records_of(whole[:5])
    with pytest.raises(KeyboardInterrupt), engine.interruptible():
        engine.peek()
        engine.advance()
        raise KeyboardInterrupt
    assert records_of(walk(engine, 3)) == records_of(whole[5:8])


@pytest.mark.parametrize(
    ("graph", "other"),
    [
        (lambda x, y: (x, y), lambda x, y: (y, x)),
        (lambda x, y: (x - y, x), lambda x, y: (y - x, x)),
        (lambda x, y: (x + 1, y + 1), lambda x, y: (y + 1, x + 1)),
    ],
)
def test_graphs_with_different_connections_are_refused(graph, other):
    source = Arrays({"x": np.arange(8), "y": np.arange(8) * 10})

    def make(definition, batch_size=2):
        return data_iterator(definition, ["a", "b"], source=source)(batch_size=batch_size, seed=1)

    first = make(graph)
    next(first)
    state = first.get_state()
    two = make(other)
    with pytest.raises(StateError, match=r"operators\.connections"):
        two.set_state(state)
        next(two)
    again = make(graph, batch_size=4)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["a"][:2], next(first)["a"])
