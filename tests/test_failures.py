"""Runs that fail: raised each time, counted, and nothing else is lost or changed."""

import contextlib

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from conftest import NUM_FILES, corrupt, write_jpegs
from dalijax import DALIGenericIterator, data_iterator

BATCH = 3
STEPS = NUM_FILES // BATCH


@pytest.fixture
def broken(tmp_path, request):
    paths = write_jpegs(tmp_path / "class", NUM_FILES)
    for i in request.param:
        corrupt(paths[i])
    return paths, sorted({i // BATCH for i in request.param})


def decode(paths, shard_id=0, num_shards=1):
    data, label = fn.readers.file(
        files=paths,
        labels=list(range(len(paths))),
        name="reader",
        shard_id=shard_id,
        num_shards=num_shards,
        stick_to_shard=True,
    )
    image = fn.decoders.image(data)
    return fn.noise.gaussian(image, stddev=5.0), label, fn.random.uniform()


NAMES = ["image", "x", "u"]


def observed(iterator, steps):
    out = []
    for _ in range(steps):
        try:
            batch = next(iterator)
            out.append({k: np.asarray(v) for k, v in batch.items()})
        except RuntimeError as error:
            out.append(str(error))
        except StopIteration:
            out.append("stop")
            iterator.reset()
    return out


@pytest.mark.parametrize("broken", [(0,), (4,), (11,), (0, 3, 6, 9), (4, 7), ()], indirect=True)
@pytest.mark.parametrize("depth", (1, 2, 3))
def test_every_failure_is_raised_and_counts(broken, depth):
    paths, bad = broken
    iterator = data_iterator(decode, NAMES, reader_name="reader")(
        paths, batch_size=BATCH, prefetch_queue_depth=depth
    )
    for epoch in range(4):  # more failures than the queue is deep
        assert len(iterator) == STEPS
        for step, got in enumerate(observed(iterator, STEPS)):
            if step in bad:
                assert f"batch {step} of epoch {epoch} failed" in got
                assert "fn.decoders.image" in got or "decoders.image" in got
            else:
                expected = [BATCH * step + k for k in range(BATCH)]
                assert got["x"].ravel().tolist() == expected
        assert observed(iterator, 1) == ["stop"]


@pytest.mark.parametrize("broken", [(4, 7)], indirect=True)
def test_peek_raises_it_and_next_again(broken):
    paths, _ = broken
    iterator = data_iterator(decode, NAMES, reader_name="reader")(paths, batch_size=BATCH)
    next(iterator)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="batch 1 of epoch 0"):
            iterator.peek()
    with pytest.raises(RuntimeError, match="batch 1 of epoch 0"):
        next(iterator)
    with pytest.raises(RuntimeError, match="batch 2 of epoch 0"):
        next(iterator)
    assert np.asarray(next(iterator)["x"]).ravel().tolist() == [9, 10, 11]


@pytest.mark.parametrize("broken", [(0, 4)], indirect=True)
def test_reset_after_a_failure(broken):
    paths, _ = broken
    make = data_iterator(decode, NAMES, reader_name="reader")
    iterator, reference = make(paths, batch_size=BATCH), make(paths, batch_size=BATCH)
    expected = observed(reference, STEPS)
    for steps in range(1, STEPS):
        observed(iterator, steps)
        iterator.reset()
    for a, b in zip(observed(iterator, STEPS), expected, strict=True):
        assert type(a) is type(b)
        assert isinstance(a, str) or all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("broken", [(4,)], indirect=True)
def test_several_pipelines_stay_in_step(broken):
    paths, _ = broken
    pipelines = [
        pipeline_def(decode)(
            paths,
            shard_id=s,
            num_shards=2,
            batch_size=2,
            num_threads=1,
            device_id=None,
        )
        for s in (0, 1)
    ]
    iterator = DALIGenericIterator(pipelines, NAMES, reader_name="reader")
    got = observed(iterator, 4)
    assert got[0]["x"].ravel().tolist() == [0, 1, 6, 7]
    assert got[1]["x"].ravel().tolist() == [2, 3, 8, 9]
    assert "batch 2 of epoch 0 failed" in got[2]
    assert got[3] == "stop"


class Flaky:
    """A source whose third batch fails the first ``times`` times."""

    def __init__(self, times):
        self.left = times

    def __call__(self, info):
        if info.iteration >= 4:
            raise StopIteration
        if info.iteration == 2 and self.left:
            self.left -= 1
            raise KeyError(f"row of batch {info.iteration}")
        return np.full((2, 1), info.iteration, np.int32)


@pytest.mark.parametrize("depth", (1, 2, 3))
@pytest.mark.parametrize("times", (1, 3))
def test_an_error_of_the_source_is_its_own_and_loses_nothing(depth, times):
    source = Flaky(times)

    def pipe():
        return fn.external_source(source, batch_info=True), fn.random.uniform()

    make = data_iterator(pipe, ["x", "u"])
    iterator = make(batch_size=2, prefetch_queue_depth=depth)
    got, errors = [], 0
    while len(got) < 4:
        try:
            got.append(next(iterator))
        except KeyError as error:
            assert "row of batch 2" in str(error)
            assert len(got) == 2
            errors += 1
    assert errors == times
    with pytest.raises(StopIteration):
        next(iterator)
    whole = list(make(batch_size=2))
    for a, b in zip(got, whole, strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_ragged_outputs_name_the_output_and_two_shapes():
    def pipe():
        rows = fn.external_source(
            lambda info: np.zeros(1 + info.idx_in_epoch // 3, np.float32), batch=False
        )
        return rows, rows[:1]

    iterator = data_iterator(pipe, ["rows", "first"], size=8)(batch_size=4)
    with pytest.raises(ValueError, match=r"'rows' is ragged.*\(1,\) and \(2,\).*fn.pad"):
        next(iterator)
    assert len(iterator) == 2


@pytest.mark.parametrize("dtype", ("INT64", "UINT64", "FLOAT64"))
def test_64_bit_outputs_are_not_narrowed(dtype):
    import jax
    from nvidia.dali import types

    def pipe():
        big = fn.external_source(lambda: [np.array([2**40 + 3], np.int64)] * 2)
        return fn.cast(big, dtype=getattr(types, dtype))

    make = data_iterator(pipe, ["wide"])
    with pytest.raises(TypeError, match="'wide' is .*64, .*fn.cast.*jax_enable_x64"):
        next(make(batch_size=2))
    numpy_fn = data_iterator(pipe, ["wide"], as_numpy=True)
    batch = next(numpy_fn(batch_size=2))
    assert batch["wide"].tolist() == [[2**40 + 3]] * 2
    with jax.enable_x64(True):
        assert next(make(batch_size=2))["wide"].tolist() == [[2**40 + 3]] * 2


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


@pytest.mark.parametrize("look", (False, True))
@pytest.mark.parametrize("where", ("_take", "_make_batch", "_next", "_look"))
def test_after_an_interruption_the_batch_comes_again(jpegs, where, look):
    def build():
        def pipe():
            label = fn.readers.file(
                files=jpegs, labels=list(range(len(jpegs))), name="reader", pad_last_batch=True
            )[1]
            return label, fn.random.uniform()

        return data_iterator(pipe, ["x", "u"], reader_name="reader", mask="mask")(batch_size=2)

    reference, iterator = build(), build()
    taken = [next(iterator)]
    for after in (False, True):
        real, state = getattr(iterator, where), iterator.get_state()

        def broken(*args, real=real, after=after):
            if after:
                real(*args)
            raise Interrupt

        setattr(iterator, where, broken)
        called = where not in ("_next", "_look") or look == (where == "_look")
        with pytest.raises(Interrupt) if called else contextlib.nullcontext():
            iterator.peek() if look else taken.append(next(iterator))
        if where == "_make_batch":
            iterator._make_batch = real
        else:
            delattr(iterator, where)
        if called:
            assert iterator.get_state() == state
    taken += list(iterator)
    for got, want in zip(taken, reference, strict=True):
        assert all(np.array_equal(got[k], want[k]) for k in want)
