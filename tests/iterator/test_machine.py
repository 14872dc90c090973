"""Random call sequences of an iterator against a model: an epoch, a step and two flags."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from nvidia.dali import pipeline_def

from cells import Cell, graph
from conformance import frozen
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from full import FULL
from oracle import Case


@dataclasses.dataclass(frozen=True)
class Setup:
    """A cell of the matrix, and whether dalijax or the caller creates the pipelines."""

    cell: Cell
    given: bool

    def make(self, files, checkpoints=None):
        cell, case = self.cell, self.cell.case
        names = {"output_map": ["x", "u"], "reader_name": "reader", "mask": "mask"}
        config = names | {
            "auto_reset": cell.auto_reset,
            "prepare_first_batch": cell.prepare,
            "last_batch_policy": LastBatchPolicy[case.policy],
            "as_numpy": True,
        }
        build = {
            "batch_size": case.batch,
            "num_threads": 1,
            "prefetch_queue_depth": cell.depth,
        }
        if not self.given:
            return data_iterator(graph, **config)(files, cell, **build, checkpoints=checkpoints)
        if checkpoints is not None:
            build |= {"enable_checkpointing": True, "checkpoint": checkpoints[0]}
        pipeline = pipeline_def(graph)(files, cell, device_id=None, seed=0, **build)
        return DALIGenericIterator(pipeline, **config)


@st.composite
def setups(draw):
    shards = draw(st.integers(1, 3))
    case = Case(
        n=draw(st.integers(shards, 9)),
        shards=shards,
        batch=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(("FILL", "DROP", "PARTIAL"))),
        padded=draw(st.booleans()),
        stick=draw(st.booleans()),
    )
    shuffles = ("none", "random_shuffle", "shuffle_after_epoch")
    cell = Cell(
        case,
        stream=draw(st.integers(0, shards - 1)),
        # DALI rejects the third over a reader that sticks to its shard.
        shuffle=draw(st.sampled_from(shuffles[: 2 if case.stick else 3])),
        depth=draw(st.integers(1, 3)),
        auto_reset=draw(st.booleans()),
        prepare=draw(st.booleans()),
    )
    return Setup(cell, given=draw(st.booleans()))


class Reference:
    """All epochs of an uninterrupted iterator, walked as far as needed.

    Attributes:
        numbers: The number of each epoch.
        epochs: The batches of each epoch.
        states: The state at each (epoch, step).
    """

    def __init__(self, setup, files):
        self.numbers, self.epochs, self.states = [], [], {}
        self._cell = setup.cell
        # An iterator that only delivers batches, and an iterator whose states are saved.
        self._iterators = setup.make(files), setup.make(files)

    def reach(self, epoch):
        while len(self.epochs) <= epoch:
            self._walk(len(self.epochs))

    def _walk(self, e):
        case, cell = self._cell.case, self._cell
        stick = case.stick or cell.shuffle == "shuffle_after_epoch"
        number, streams = dataclasses.replace(case, stick=stick).epochs(e + 1)[e]
        plain, saved = self._iterators
        batches = []
        for step, want in enumerate(streams[cell.stream]):
            self.states[e, step] = json.dumps(saved.get_state())
            batch = next(plain)
            assert batch["mask"].tolist() == case.mask(want, number)
            if cell.shuffle == "none":
                assert batch["x"].ravel().tolist() == [s[0] for s in want]
            batches.append(frozen(batch))
            assert frozen(next(saved)) == batches[-1]
        self.states[e, len(batches)] = json.dumps(saved.get_state())
        for iterator in self._iterators:
            with pytest.raises(StopIteration):
                next(iterator)
            if not cell.auto_reset:
                iterator.reset()
        self.epochs.append(batches)
        self.numbers.append(number)


class IteratorMachine(RuleBasedStateMachine):
    """Calls in any order; the test sets `files`."""

    files: list[str] = []

    @staticmethod
    @functools.cache
    def reference(setup):
        return Reference(setup, IteratorMachine.files)

    @initialize(setup=setups(), watched=st.booleans(), steps=st.integers(0, 9))
    def begin(self, setup, watched, steps):
        self.setup, self.ref = setup, self.reference(setup)
        self.auto = setup.cell.auto_reset
        # len() builds the pipelines: asking after each call would hide lazy restores.
        self.watched = watched
        self.saved: list[tuple[str, list[bytes], int, int]] = []
        self.held: list[tuple[dict, dict]] = []
        self.start_over()
        # A first walk, so that most runs have states of a few epochs to return to.
        for _ in range(steps):
            self.the_state_is_the_position()
            self.reset() if self.at_end() and not self.auto else self.next()

    def start_over(self):
        self.iterator = self.setup.make(self.files)
        self.stand_at(0, 0)

    def stand_at(self, epoch, step, restored=False):
        """Moves the model; ``restored`` and ``stopped`` determine iter() at an end."""
        self.ref.reach(epoch)
        self.epoch, self.step = epoch, step
        self.restored, self.stopped = restored, False

    def batches(self):
        return self.ref.epochs[self.epoch]

    def at_end(self):
        return self.step == len(self.batches())

    # Calls that move

    @rule(times=st.integers(1, 3))
    def take(self, times):
        for _ in range(times):
            self.next()

    def next(self):
        self.restored = False
        if not self.at_end():
            batch = next(self.iterator)
            want = self.batches()[self.step]
            assert frozen(batch) == want
            self.held.append((batch, want))
            self.step += 1
            return
        with pytest.raises(StopIteration):
            next(self.iterator)
        self.stopped = True
        if self.auto:
            self.stand_at(self.epoch + 1, 0)

    @rule()
    def rest_of_the_epoch(self):
        self.iter()
        rest = self.batches()[self.step :]
        assert [frozen(batch) for batch in self.iterator_once()] == rest
        self.restored, self.stopped, self.step = False, True, len(self.batches())
        if self.auto:
            self.stand_at(self.epoch + 1, 0)

    def iterator_once(self):
        """Yields the rest of the epoch, without the iter() of a for statement."""
        while True:
            try:
                yield self.iterator.next()
            except StopIteration:
                return

    @rule()
    def iter(self):
        assert iter(self.iterator) is self.iterator
        delivered = self.at_end() and (self.step > 0 or self.stopped)
        if delivered and not self.auto and not self.restored:
            self.stand_at(self.epoch + 1, 0)

    @rule()
    def reset(self):
        self.iterator.reset()
        self.stand_at(self.epoch + self.at_end(), 0)

    # Calls that don't move

    @rule()
    def peek(self):
        if self.at_end():
            with pytest.raises(StopIteration):
                self.iterator.peek()
        else:
            assert frozen(self.iterator.peek()) == self.batches()[self.step]

    @rule()
    def element_spec(self):
        size = self.setup.cell.case.batch
        spec = {k: (v.shape, v.dtype) for k, v in self.iterator.element_spec.items()}
        assert spec == {
            "x": ((size, 1), np.int32),
            "u": ((size,), np.float32),
            "mask": ((size,), np.bool_),
        }

    @rule()
    def start_prefetch(self):
        self.iterator.start_prefetch()

    @rule()
    def length(self):
        assert len(self.iterator) == len(self.batches())
        assert bool(self.iterator)
        assert self.iterator.batch_size == self.setup.cell.case.batch

    # States

    @rule()
    def save(self):
        text, pieces = json.dumps(self.iterator.get_state()), self.iterator.checkpoints()
        # It may exist already: a second state of a position is as good as the first.
        self.saved.append((text, pieces, self.epoch, self.step))

    @rule()
    def set_the_own_state(self):
        self.iterator.set_state(self.iterator.get_state())
        self.restored = True

    @rule(data=st.data(), how=st.sampled_from(("in place", "new", "checkpoints")))
    def restore(self, data, how):
        saved = data.draw(st.sampled_from(self.saved[::-1]), label="state")
        if how != "in place":
            self.iterator.close()
        self.go_on(saved, how)

    def go_on(self, saved, how):
        text, pieces, epoch, step = saved
        if how == "checkpoints":
            self.iterator = self.setup.make(self.files, checkpoints=pieces)
        elif how != "in place":
            self.start_over()
            self.iterator.set_state(json.loads(text))
        else:
            self.iterator.set_state(json.loads(text))
        self.stand_at(epoch, step, restored=True)

    @rule(back=st.booleans())
    def close(self, back):
        iterator = self.iterator
        iterator.close()
        for use in (
            lambda: next(iterator),
            lambda: iter(iterator),
            lambda: len(iterator),
            lambda: iterator.element_spec,
            iterator.peek,
            iterator.reset,
            iterator.get_state,
            iterator.start_prefetch,
        ):
            with pytest.raises(ValueError, match="closed"):
                use()
        iterator.close()
        if back:
            self.go_on(self.saved[-1], "new")
        else:
            self.start_over()

    # Invariants after each call

    @invariant()
    def the_state_is_the_position(self):
        state = self.iterator.get_state()
        assert (state["epoch"], state["step"]) == (self.ref.numbers[self.epoch], self.step)
        assert state["errors"] == 0
        assert json.dumps(state) == self.ref.states[self.epoch, self.step]
        if (self.epoch, self.step) not in [saved[2:] for saved in self.saved]:
            self.save()
        if self.watched:
            assert len(self.iterator) == len(self.batches())

    def teardown(self):
        if not hasattr(self, "iterator"):
            return
        self.iterator.close()
        for batch, want in self.held:  # no later run overwrote delivered batches
            assert frozen(batch) == want


@pytest.fixture
def machine(jpegs_many):
    IteratorMachine.files = jpegs_many
    yield IteratorMachine
    IteratorMachine.reference.cache_clear()  # and its iterators with it


def test_any_path(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1000 if FULL else 25,
            stateful_step_count=25,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("stick", (False, True))
def test_an_epoch_without_a_batch_is_an_empty_loop(jpegs_many, stick):
    # PARTIAL over unequal shards: stream 0 of 3 files has no sample in some epochs.
    case = Case(3, 2, 2, "PARTIAL", False, stick)
    iterator = Setup(Cell(case), given=False).make(jpegs_many)
    epochs = case.epochs(9)
    assert [] in [streams[0] for _, streams in epochs]
    for number, streams in epochs:
        got = [batch["x"].ravel().tolist() for batch in iterator]
        assert got == [[s[0] for s in own] for own in streams[0]]
        assert iterator.get_state()["epoch"] == number
