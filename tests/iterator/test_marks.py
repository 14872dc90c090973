"""Checkpoints that are taken when a state is requested, and their limits on cost."""

import contextlib
import pathlib

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from python_sources import ends_after

from conformance import frozen
from conftest import corrupt
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from dalijax.core.state import reader_state
from numbered import numbers, read_files


def to_drop(state):
    """The number of batches that a state runs again."""
    checkpoints = reader_state.decode(state).position.checkpoints
    return 0 if checkpoints is None else checkpoints.to_drop  # none before the first batch


@pytest.mark.parametrize("peeked", (False, True))
@pytest.mark.parametrize("asked", ("never", "at each", "at the last"))
def test_states_have_separate_checkpoints(jpegs_many, peeked, asked):
    # Checkpoints are taken when a state is requested; none may be missing before a failure.
    def pipe():
        label = read_files(
            [jpegs_many[k % len(jpegs_many)] for k in range(20)],
            random_shuffle=True,
            pad_last_batch=True,
        )[1]
        return label, fn.random.uniform()

    iterator_fn = data_iterator(pipe, ["x", "u"], reader_name="reader", as_numpy=True)
    call = {"batch_size": 1, "num_threads": 2}
    for taken in range(0, 2 * len(iterator_fn(**call)), 3):
        stream, other = iterator_fn.stream(None, **call), iterator_fn.stream(None, **call)
        for step in range(taken):
            next(stream)
            if asked == "at each" or (asked == "at the last" and step == taken - 1):
                assert to_drop(stream.get_state()) == 0
        if peeked:
            stream.peek()
        state = stream.get_state()
        assert to_drop(state) == 0
        other.set_state(state)
        assert other.get_state() == state
        assert frozen(next(stream)) == frozen(next(other))


def counted(last, bad=()):
    """A graph over a source of batches [10 i, 10 i + 1] that ends before batch `last`."""

    def source(number):
        if number >= last:
            raise StopIteration
        rows = [np.full((1,), 10 * number + k, np.int32) for k in range(2)]
        return [rows[0], np.zeros((2,), np.int32)] if number in bad else rows  # ragged

    return lambda: fn.external_source(source=source, batch=True, dtype=types.INT32, ndim=1)


class Interrupted(BaseException):
    pass


def interrupt(iterator, name):
    """Interrupts next() after it has called a method."""
    engine = iterator._engine
    method = getattr(engine, name)

    def broken(*arguments):
        method(*arguments)
        raise Interrupted

    setattr(engine, name, broken)
    with pytest.raises(Interrupted):
        next(iterator)
    setattr(engine, name, method)


@pytest.mark.parametrize("taken", (1, 2, 4))
def test_no_state_includes_a_batch_that_hand_made_pipelines_lost(taken):
    # They can't be rebuilt, so they have run ahead when next() is interrupted.
    def source(number):
        return [np.full((1,), 2 * number + k, np.int32) for k in range(2)]

    @pipeline_def(batch_size=2, num_threads=1, device_id=None, enable_checkpointing=True, seed=3)
    def graph():
        return fn.external_source(source, dtype=types.INT32, ndim=1), fn.random.uniform()

    def made(**more):
        return DALIGenericIterator(graph(**more), ["x", "u"], size=40)

    unbroken = made()
    expected = [frozen(next(unbroken)) for _ in range(taken + 2)]
    iterator = made()
    for _ in range(taken):
        next(iterator)
    interrupt(iterator, "make_batch")
    resumed = made(checkpoint=iterator.checkpoints()[0])
    assert [frozen(next(resumed)) for _ in range(2)] == expected[taken:]


@pytest.mark.parametrize("failed", (False, True))
def test_a_known_end_survives_a_lagging_checkpoint(failed):
    iterator_fn = data_iterator(counted(6, {5} if failed else ()), ["x"], as_numpy=True)
    iterator, resumed = iterator_fn(batch_size=2), iterator_fn(batch_size=2)
    for step in range(6):
        with pytest.raises(ValueError) if failed and step == 5 else contextlib.nullcontext():
            next(iterator)
    if not failed:
        interrupt(iterator, "peek")
    resumed.set_state(iterator.get_state())
    for one in (iterator, resumed):
        one.reset()
        assert (one.epoch, one.step) == (1, 0)
        assert numbers(next(one)) == [0, 1]


def test_a_peeked_last_batch_is_not_delivered():
    iterator = data_iterator(counted(3), ["x"], as_numpy=True)(batch_size=2)
    next(iterator), next(iterator), iterator.peek()
    iterator.reset()
    assert (iterator.epoch, iterator.step) == (0, 0)
    assert [numbers(batch)[0] for batch in iterator] == [0, 10, 20]


def test_a_stream_that_can_not_go_back_to_a_mark_does_not_change():
    stream = data_iterator(ends_after(4), ["x"], as_numpy=True).stream(2, batch_size=2)
    next(stream)
    mark = stream._mark()
    next(stream)
    assert not stream._go_back(mark._replace(first_epoch=1))
    assert stream._first_epoch == 0 and numbers(next(stream)) == [4, 5]


def test_a_source_that_restarts_with_a_lagging_checkpoint():
    iterator_fn = data_iterator(counted(6, {0}), ["x"], size=12, as_numpy=True)
    iterator, resumed = iterator_fn(batch_size=2), iterator_fn(batch_size=2)
    for epoch in range(2):
        with pytest.raises(ValueError, match="ragged"):
            next(iterator)
        resumed.set_state(iterator.get_state())
        rest = [numbers(batch) for batch in iterator]
        assert rest == [[10 * k, 10 * k + 1] for k in range(1, 6)], epoch
        assert [numbers(batch) for batch in resumed] == rest
        iterator.reset()


@pytest.mark.parametrize("before", (0, 1, 5))
def test_skipping_in_an_epoch_that_a_source_restarts(before):
    iterator = data_iterator(counted(6), ["x"], size=12, as_numpy=True)(batch_size=2)
    assert iterator.skip(before) == before
    rest = [numbers(batch)[0] for batch in iterator]
    assert rest == [10 * k for k in range(before, 6)]
    iterator.reset()
    assert iterator.skip(5) == 5
    assert numbers(next(iterator)) == [50, 51]


def test_a_first_failure_costs_a_reader_few_batches(jpegs, tmp_path):
    # Checkpoints of readers are taken at every eighth batch, until a batch fails.
    good = [jpegs[k % len(jpegs)] for k in range(30)]
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(pathlib.Path(jpegs[0]).read_bytes())
    corrupt(bad)
    for first in range(1, 20, 3):
        files = [str(bad if k in (first, 25) else path) for k, path in enumerate(good)]

        def graph(files=files):
            encoded, label = read_files(files, pad_last_batch=True)
            return fn.resize(fn.decoders.image(encoded), size=(8, 8)), label

        iterator_fn = data_iterator(graph, ["x", "y"], reader_name="reader", as_numpy=True)
        iterator, resumed = iterator_fn(batch_size=1), iterator_fn(batch_size=1)
        for step in range(29):
            with pytest.raises(RuntimeError) if step in (first, 25) else contextlib.nullcontext():
                next(iterator)
            if step in (first, 25):
                state = iterator.get_state()
                assert 1 <= to_drop(state) <= (8 if step == first else 1)
                resumed.set_state(state)
                assert frozen(next(resumed)) == frozen(next(after(iterator_fn, step + 1)))


def after(iterator_fn, step):
    """Returns a new iterator that was stepped to the same position."""
    iterator = iterator_fn(batch_size=1)
    for _ in range(step):
        with contextlib.suppress(RuntimeError):
            next(iterator)
    return iterator


@pytest.mark.parametrize("bad", ((), (0,), (1,)))
@pytest.mark.parametrize("last", (2, 3))
def test_a_source_that_drops_the_rest_itself(last, bad):
    # Five samples, dropped to two batches by the iterator, or also by the source.
    def made():
        graph = counted(last, bad)
        policy = LastBatchPolicy.DROP
        config = {"size": 5, "last_batch_policy": policy, "as_numpy": True}
        return data_iterator(graph, ["x"], **config)(batch_size=2)

    def taken(iterator):
        try:
            return numbers(next(iterator))
        except ValueError:
            return "failed"

    iterator = made()
    for epoch in range(3):
        for step in range(2):
            resumed = made()
            resumed.set_state(iterator.get_state())
            want = "failed" if step in bad else [10 * step, 10 * step + 1]
            assert taken(iterator) == taken(resumed) == want, (epoch, step)
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.reset()


def test_a_stream_has_the_specs_of_the_data_after_a_reset(tmp_path):
    files = [tmp_path / f"{number}.bin" for number in range(4)]

    def graph():
        data, label = fn.readers.file(files=[*map(str, files)], labels=[0, 1, 2, 3], name="reader")
        return data, label

    for size in (4, 9):
        for file in files:  # replaced, because DALI may have mapped the old files to memory
            file.with_suffix(".new").write_bytes(bytes(size))
            file.with_suffix(".new").replace(file)
        if size == 4:
            make = data_iterator(graph, ["x", "label"], reader_name="reader", as_numpy=True)
            stream = make.stream(batch_size=2, num_threads=1, device_id=None)
        else:
            stream.reset()
        assert stream.element_spec["x"].shape == (2, size) == next(stream)["x"].shape
    stream.close()
