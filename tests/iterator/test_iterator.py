"""The protocol: StopIteration, reset, iter, peek, close, and sources that raise StopIteration."""

import textwrap

import flax.jax_utils
import jax
import numpy as np
import pytest
from forks import run_fork
from nvidia.dali import fn, pipeline_def

from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from numbered import numbers, read_files

BATCH = 5  # for 12 files: 5, 5 and 2


def graph(jpegs, pad_last_batch=False):
    label = read_files(jpegs, pad_last_batch=pad_last_batch)[1]
    return label, fn.random.uniform()


def make(jpegs, batch_size=BATCH, pad_last_batch=True, **config):
    iterator_fn = data_iterator(graph, ["x", "u"], reader_name="reader", mask="mask", **config)
    return iterator_fn(jpegs, batch_size=batch_size, pad_last_batch=pad_last_batch)


EPOCH = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 11, 11, 11]]


def test_stop_iteration_is_sticky_until_reset(jpegs):
    iterator = make(jpegs)
    assert [numbers(b) for b in iterator] == EPOCH
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(StopIteration):
            iterator.peek()
    iterator.reset()
    assert [numbers(b) for b in iterator] == EPOCH


def test_auto_reset_stops_once(jpegs):
    iterator = make(jpegs, auto_reset=True)
    for _ in range(3):
        assert [numbers(b) for b in iterator] == EPOCH
    first = next(iterator)
    assert numbers(first) == EPOCH[0]


def test_iter_continues_in_mid_epoch(jpegs):
    iterator = make(jpegs)
    assert [numbers(b) for _, b in zip(range(1), iterator)] == EPOCH[:1]
    assert [numbers(b) for _, b in zip(range(1), iterator)] == EPOCH[1:2]
    for batch in iterator:
        assert numbers(batch) == EPOCH[2]
        break
    # All delivered, StopIteration not raised yet: iter() starts the next epoch.
    assert [numbers(b) for b in iterator] == EPOCH
    assert [numbers(b) for b in iterator] == EPOCH


def test_iter_does_not_lose_a_peeked_batch(jpegs):
    iterator = make(jpegs)
    next(iterator), next(iterator)
    assert numbers(iterator.peek()) == EPOCH[2]
    assert [numbers(b) for b in iterator] == EPOCH[2:]


def test_peek_equals_next(jpegs):
    iterator = make(jpegs)
    for expected in EPOCH:
        for _ in range(2):
            peeked = iterator.peek()
        got = next(iterator)
        assert numbers(got) == numbers(peeked) == expected
        assert all(np.array_equal(got[k], peeked[k]) for k in got)
    with pytest.raises(StopIteration):
        iterator.peek()
    assert numbers(next(iter(iterator))) == EPOCH[0]


@pytest.mark.parametrize("policy", LastBatchPolicy)
def test_reset_in_mid_epoch_restarts_the_epoch(jpegs, policy):
    iterator = make(jpegs, last_batch_policy=policy, as_numpy=True)
    reference = make(jpegs, last_batch_policy=policy, as_numpy=True)
    for _ in range(3):
        epoch = [(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in reference]
        reference.reset()
        for steps in range(len(epoch)):
            for expected, batch in zip(epoch[:steps], iterator):
                assert (numbers(batch), batch["u"].tolist(), batch["mask"].tolist()) == expected
            iterator.reset()
            iterator.peek()
            iterator.reset()  # has no effect at the start
        got = [(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in iterator]
        assert got == epoch
        iterator.reset()


def test_prepare_first_batch_changes_no_batch(jpegs):
    both = [make(jpegs, prepare_first_batch=prepare) for prepare in (True, False)]
    for _ in range(2):
        for a, b in zip(*both, strict=True):
            assert all(np.array_equal(a[k], b[k]) for k in a)


def test_close(jpegs):
    with make(jpegs) as iterator:
        held = next(iterator)
    iterator.close()
    for use in (lambda: next(iterator), iterator.peek, iterator.reset, lambda: len(iterator)):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert numbers(held) == EPOCH[0]  # arrays outlive the pipelines


def test_iterators_of_one_function_are_independent_and_equal(jpegs):
    first, second = make(jpegs), make(jpegs)
    next(first)
    third = make(jpegs)
    a, b = next(second), next(third)
    assert all(np.array_equal(a[k], b[k]) for k in a)


# Sources that raise StopIteration


def source(kind, batches=3):
    def rows(k):
        return np.full((2, 1), k, np.int32)

    def generator():
        yield from (rows(k) for k in range(batches))

    def by_batch(info):
        if info.iteration >= batches:
            raise StopIteration
        return rows(info.iteration)

    count = iter(range(10**6))

    def no_argument():
        k = next(count) % (batches + 1)
        if k == batches:
            raise StopIteration
        return rows(k)

    return {
        "list": dict(source=[rows(k) for k in range(batches)]),
        "generator": dict(source=generator),
        "cycling list": dict(source=[rows(k) for k in range(batches)], cycle="raise"),
        "batch info": dict(source=by_batch, batch_info=True),
        "no argument": dict(source=no_argument),
    }[kind]


KINDS = ("list", "generator", "cycling list", "batch info", "no argument")


@pytest.mark.parametrize("auto_reset", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_ends_delivers_every_epoch(kind, auto_reset):
    def pipe():
        return fn.external_source(**source(kind)), fn.random.uniform()

    iterator = data_iterator(pipe, ["x", "u"], auto_reset=auto_reset)(batch_size=2)
    reference = pipeline_def(pipe)(batch_size=2, num_threads=1, device_id=None, seed=0)
    drawn = []
    for _ in range(3):
        epoch = list(iterator)
        assert [numbers(b) for b in epoch] == [[0, 0], [1, 1], [2, 2]]
        drawn += [np.asarray(b["u"]) for b in epoch]
    assert len({u.tobytes() for u in drawn}) == 9  # random numbers continue over epochs
    first = reference.run()[1].as_array()
    assert np.array_equal(drawn[0], first)


def test_an_exhausted_source_is_an_error_not_an_empty_epoch():
    once = iter([np.zeros((2, 1), np.int32)])
    iterator = data_iterator(lambda: fn.external_source(source=once), ["x"])(batch_size=2)
    assert len(list(iterator)) == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exhausted in epoch 1.*cycle='raise'"):
            next(iter(iterator))


def test_smaller_batches_of_a_source_are_delivered_if_the_size_is_unknown():
    sizes = [3, 2, 1]
    data = [np.zeros((n, 1), np.int32) for n in sizes]
    iterator_fn = data_iterator(lambda: fn.external_source(source=data), ["x"], mask="mask")
    assert [len(b["mask"]) for b in iterator_fn(batch_size=3)] == sizes
    sized = data_iterator(lambda: fn.external_source(source=data), ["x"], size=6)(batch_size=3)
    next(sized)
    with pytest.raises(ValueError, match=r"batches of \[2\] samples instead of 3"):
        next(sized)


def test_a_source_that_ends_before_its_size_is_an_error():
    iterator = data_iterator(lambda: fn.external_source(**source("batch info")), ["x"], size=8)(
        batch_size=2
    )
    for _ in range(3):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended after 3 of 4 batches of epoch 0"):
            next(iterator)
    iterator.reset()
    assert numbers(next(iterator)) == [0, 0]


def test_a_source_that_ends_with_its_size_starts_again():
    iterator = data_iterator(lambda: fn.external_source(**source("batch info")), ["x"], size=6)(
        batch_size=2
    )
    for _ in range(3):
        assert [numbers(b) for b in iterator] == [[0, 0], [1, 1], [2, 2]]
        iterator.reset()


def test_reset_in_mid_epoch_of_a_source_that_cannot_rewind():
    def pipe():
        return fn.external_source(**source("generator"))

    iterator = data_iterator(pipe, ["x"], auto_reset=True)(batch_size=2)
    next(iterator)
    iterator.reset()  # epoch 0 starts at the pipelines' position
    assert [numbers(b) for b in iterator] == [[0, 0], [1, 1], [2, 2]]
    next(iterator)
    with pytest.raises(RuntimeError, match=r"reset\(\) at batch 1 of epoch 1 can't return"):
        iterator.reset()
    assert numbers(next(iterator)) == [1, 1]  # the refused reset had no effect


def test_hand_made_pipelines(jpegs):
    pipeline = pipeline_def(graph)(
        jpegs, pad_last_batch=True, batch_size=BATCH, num_threads=2, device_id=None, seed=0
    )
    iterator = DALIGenericIterator(pipeline, ["x", "u"], reader_name="reader", auto_reset="yes")
    for _ in range(2):
        assert [numbers(b) for b in iterator] == EPOCH


# With JAX and Python around it


def test_flax_prefetch_to_device(jpegs):
    # It calls iter() for each batch: over an iterator it continues from epoch to epoch
    # endlessly; over a generator it ends with the epoch.
    devices = jax.local_devices()[:1]

    def prefetched(batches):
        return (numbers(b) for b in flax.jax_utils.prefetch_to_device(batches, 2, devices))

    iterator = make(jpegs, devices=devices)
    assert list(prefetched(b for b in iterator)) == EPOCH
    assert [b for _, b in zip(range(7), prefetched(iterator))] == [*EPOCH, *EPOCH, EPOCH[0]]


@pytest.mark.parametrize(
    "ending,code",
    [("pass", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGINT)", -2)],
)
def test_interpreter_exit_with_running_pipelines(tmp_path, ending, code):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        import jax, numpy as np
        jax.config.update("jax_platforms", "cpu")
        from nvidia.dali import fn
        from dalijax import data_iterator
        source = lambda info: np.zeros((64, 64), np.float32)
        def pipe():
            return fn.external_source(source, batch=False), fn.random.uniform()
        iterator = data_iterator(pipe, ["x", "u"])(batch_size=8)
        held = [next(iterator) for _ in range(3)]
        try:
            {ending}
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            next(iterator)
            os.kill(os.getpid(), signal.SIGINT)
        """)
    )
    done = run_fork(script, code=code, warn="default", frees=True)
    assert "Traceback" not in done.stderr


def test_an_interrupt_loses_no_batch(jpegs):
    class Stop(BaseException):
        pass

    iterator, reference = make(jpegs, as_numpy=True), make(jpegs, as_numpy=True)
    next(iterator), next(reference)
    placed = iterator._engine.make_batch

    def interrupted(*args):
        raise Stop

    iterator._engine.make_batch = interrupted
    with pytest.raises(Stop):
        next(iterator)
    iterator._engine.make_batch = placed
    for a, b in zip(iterator, reference, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_states_of_epochs_without_a_batch(jpegs):
    def pipe():
        return fn.readers.file(files=jpegs[:1], name="reader")[1]

    made = data_iterator(
        pipe, ["x"], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )
    iterator, other = made(batch_size=2), made(batch_size=2)
    for _ in range(30):
        assert list(iterator) == []
    state = iterator.get_state()
    other.set_state(state)
    iterator.set_state(state)
    assert other.epoch == iterator.epoch == 30 and list(other) == []
