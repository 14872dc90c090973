"""Failed runs: raised each time and counted, and no other batch is lost or changed."""

import contextlib
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from nvidia.dali import fn, pipeline_def, types

from conftest import NUM_FILES, corrupt, write_jpegs
from dalijax import DALIGenericIterator, data_iterator
from dalijax.errors import EpochError
from full import combinations
from numbered import read_files

BATCH = 3
STEPS = NUM_FILES // BATCH


@pytest.fixture
def broken(tmp_path, request):
    paths = write_jpegs(tmp_path / "class", NUM_FILES)
    for i in request.param:
        corrupt(paths[i])
    return paths, sorted({i // BATCH for i in request.param})


def decode(paths, shard_id=0, num_shards=1):
    data, label = read_files(paths, shard_id=shard_id, num_shards=num_shards, stick_to_shard=True)
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


@pytest.mark.parametrize(
    ("broken", "depth"),
    combinations(3, [(0,), (4,), (11,), (0, 3, 6, 9), (4, 7), ()], (1, 2, 3)),
    indirect=["broken"],
)
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


def over_files(paths, random=False, shard_id=0, num_shards=1, pad=False):
    data, label = read_files(
        paths,
        random_shuffle=random,
        initial_fill=5,
        shard_id=shard_id,
        num_shards=num_shards,
        pad_last_batch=pad,
    )
    return fn.noise.gaussian(fn.decoders.image(data), stddev=5.0), label, fn.random.uniform()


@pytest.mark.parametrize(
    ("broken", "depth", "random_and_size"),
    combinations(2, [(4,), (0, 5, 11)], (1, 3), [(False, 3), (True, 3), (True, 5)]),
    indirect=["broken"],
)
def test_the_files_that_fail_are_named(broken, depth, random_and_size, caplog):
    random, size = random_and_size
    paths, _ = broken
    end = b"\xff\xd9"  # of a whole JPEG
    bad = {path for path in paths if not pathlib.Path(path).read_bytes().endswith(end)}
    make = data_iterator(over_files, NAMES, reader_name="reader")
    call = dict(random=random, pad=True, batch_size=size, prefetch_queue_depth=depth)
    raising, skipping = make(paths, **call), make(paths, on_error="skip", **call)
    reference = make(paths, **call)
    reference._engine._failures_to_name = 0
    for epoch in range(2):
        named, position = [], 0
        while position < len(raising):
            state = raising.get_state()
            try:
                next(raising)
            except RuntimeError as error:
                assert error.files and str(error).endswith(", ".join(error.files))
                assert not str(error.__cause__).endswith(error.files[-1])
                named += [error.files]
                again = make(paths, **call)  # a resumed iterator names it, too
                again.set_state(state)
                with pytest.raises(RuntimeError) as caught:
                    next(again)
                assert caught.value.files == error.files
            position += 1
        assert set().union(*named) == bad
        batches = list(skipping)
        new = [one for one in skipping.errors if one.epoch == epoch]
        assert [one.files for one in new] == named
        assert all(one.files[0] in one.message for one in new)
        # The batches are the same whether files were searched or not.
        expected = [one for one in observed(reference, len(reference)) if isinstance(one, dict)]
        for got, want in zip(batches, expected, strict=True):
            assert all(np.array_equal(got[name], want[name]) for name in want)
        for iterator in (raising, reference):
            iterator.reset()
    assert len(caplog.messages) == len(skipping.errors)


@pytest.mark.parametrize("broken", [(1, 3, 8)], indirect=True)
def test_the_files_of_several_shards_are_named(broken):
    paths, _ = broken
    mesh = jax.make_mesh((2,), ("data",))
    make = data_iterator(
        over_files,
        NAMES,
        reader_name="reader",
        on_error="skip",
        sharding=NamedSharding(mesh, PartitionSpec("data")),
    )
    iterator = make(paths, batch_size=4)
    assert len(list(iterator)) == 1
    assert [one.files for one in iterator.errors] == [(paths[1],), (paths[3], paths[8])]


@pytest.mark.parametrize("broken", [tuple(range(12))], indirect=True)
def test_the_search_for_files_is_limited(broken):
    paths, _ = broken

    def pipe(paths):  # no reader_name: it is the only reader
        return fn.decoders.image(fn.readers.file(files=paths)[0])

    make = data_iterator(pipe, ["image"], size=12, on_error="skip")
    whole, single = make(paths, batch_size=12), make(paths, batch_size=1)
    for iterator in (whole, single):  # the end of an epoch without a batch is an error, once
        with pytest.raises(EpochError, match="every batch of epoch 0 failed"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
    assert [one.files for one in whole.errors] == [tuple(paths[:5])]
    assert "and perhaps more" in whole.errors[0].message
    assert [one.files for one in single.errors] == [(p,) for p in paths[:8]] + [()] * 4


@pytest.mark.parametrize("broken", [()], indirect=True)
def test_files_of_the_batch_are_named_if_they_cannot_be_distinguished(broken):
    paths, _ = broken

    def pipe(paths):
        _, label = read_files(paths)
        return fn.slice(label, start=fn.cast(label, dtype=types.INT32), shape=[1], axes=[0])

    iterator = data_iterator(pipe, ["x"], reader_name="reader")(paths, batch_size=6)
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert caught.value.files == ()
    assert str(caught.value).endswith(f"The batch contains {', '.join(paths[:5])} and 1 more")


@pytest.mark.parametrize("broken", [(1,)], indirect=True)
def test_the_error_is_dalis_without_checkpoints_or_a_reader(broken):
    paths, _ = broken
    make = data_iterator(over_files, NAMES, reader_name="reader")
    made = make(paths, batch_size=2, enable_checkpointing=False)
    pipeline = pipeline_def(over_files)(paths, batch_size=2, num_threads=1, device_id=None)
    for iterator in (made, DALIGenericIterator(pipeline, NAMES, reader_name="reader")):
        with pytest.raises(RuntimeError, match="batch 0 of epoch 0 failed") as caught:
            next(iterator)
        assert caught.value.files == ()


@pytest.mark.parametrize("broken", [tuple(range(NUM_FILES))], indirect=True)
def test_an_endless_stream_does_not_search_for_a_good_batch_forever(broken):
    train = data_iterator(decode, NAMES, reader_name="reader", on_error="skip")
    stream = train.stream(None, broken[0], batch_size=BATCH)
    for call in (stream.peek, stream.__next__, lambda: stream.skip(1), lambda: stream.skip(1)):
        with pytest.raises(RuntimeError, match=r"every batch of epoch \d+ failed.*\n"):
            call()
    two_epochs = train.stream(2, broken[0], batch_size=BATCH)
    with pytest.raises(EpochError, match="every batch of epoch 1 failed"):
        next(two_epochs)
    assert list(two_epochs) == []
    with pytest.raises(ValueError, match="only 0 batches are left in the 2 epochs"):
        train.stream(2, broken[0], batch_size=BATCH).skip(1)


@pytest.mark.parametrize("broken", [(11,)], indirect=True)
def test_a_stream_continues_after_a_skipped_and_peeked_end(broken):
    train = data_iterator(decode, NAMES, reader_name="reader", on_error="skip")
    stream, taken = train.stream(2, broken[0], batch_size=BATCH), []
    with contextlib.suppress(StopIteration):
        while True:
            stream.peek()
            taken.append(np.asarray(next(stream)["x"]).ravel().tolist()[0])
    assert taken == [0, 3, 6, 0, 3, 6]


@pytest.mark.parametrize("broken", [(4,)], indirect=True)
@pytest.mark.parametrize("on_error", ("raise", "skip"))
def test_no_good_batch_counts_as_failed_if_the_executor_stops_at_a_failure(broken, on_error):
    train = data_iterator(decode, NAMES, reader_name="reader", on_error=on_error, auto_reset=True)
    call = {"batch_size": BATCH, "prefetch_queue_depth": 1}
    with train(broken[0], exec_dynamic=False, **call) as iterator:
        assert np.asarray(next(iterator)["x"]).ravel().tolist() == [0, 1, 2]
        for _ in range(3):
            with pytest.raises(RuntimeError, match="batch 1 of epoch 0 .* Omit exec_dyn"):
                next(iterator)
        assert (iterator.step, iterator.errors) == (1, ())
        state = iterator.get_state()
    with train(broken[0], **call) as iterator:
        iterator.set_state(state)
        if on_error == "raise":
            with pytest.raises(RuntimeError, match="batch 1 of epoch 0 failed"):
                next(iterator)
        assert np.asarray(next(iterator)["x"]).ravel().tolist() == [6, 7, 8]


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
def test_an_error_of_the_source_is_unchanged_and_loses_nothing(depth, times):
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
    """Like KeyboardInterrupt, which would end pytest."""


@pytest.mark.parametrize("look", (False, True))
@pytest.mark.parametrize("where", ("peek", "make_batch", "advance", "checkpoint"))
def test_an_interrupted_batch_is_delivered_later(jpegs, where, look):
    def build():
        def pipe():
            label = read_files(jpegs, pad_last_batch=True)[1]
            return label, fn.random.uniform()

        return data_iterator(pipe, ["x", "u"], reader_name="reader", mask="mask")(batch_size=2)

    reference, iterator = build(), build()
    taken = [next(iterator)]
    for after in (False, True):
        engine, state = iterator._engine, iterator.get_state()
        real = getattr(engine, where)

        def broken(*args, real=real, after=after):
            if after:
                real(*args)
            raise Interrupt

        setattr(engine, where, broken)
        called = {"advance": not look, "checkpoint": look}.get(where, True)
        with pytest.raises(Interrupt) if called else contextlib.nullcontext():
            iterator.peek() if look else taken.append(next(iterator))
        setattr(engine, where, real)
        if called:
            assert iterator.get_state() == state
    taken += list(iterator)
    for got, want in zip(taken, reference, strict=True):
        assert all(np.array_equal(got[k], want[k]) for k in want)
