"""seek_step(n) has the same effect as n calls of next() of a new stream, for every policy."""

import itertools
import json

import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import Pipeline, fn
from python_sources import ends_after

from conformance import frozen
from dalijax import LastBatchPolicy, data_iterator, sources
from full import FULL
from numbered import numbers, read_files

KINDS = [
    *itertools.product(LastBatchPolicy, (False, True), (None, "mask")),
]


def graph(number, *, draw):
    return number + 0, draw.uniform()


def over_source(n, b, policy=LastBatchPolicy.FILL, padded=None, mask=None, **more):
    made = data_iterator(graph, ["x", "u"], last_batch_policy=policy, mask=mask, as_numpy=True)
    call = {"source": Numbers(n), "batch_size": b, "num_threads": 1, "seed": 3, "device_id": None}
    return made.stream(**{**call, "last_batch_padded": padded, **more})


@pytest.mark.parametrize(("policy", "padded", "mask"), KINDS, ids=str)
def test_seek_over_a_source_for_each_policy(policy, padded, mask):
    sizes, first = ((7, 3), (4, 4), (3, 5), (11, 2)), KINDS.index((policy, padded, mask))
    if not FULL:  # each size with every policy, with each padding and with each mask
        first += first // 4
        sizes = (sizes[first % 4], sizes[(first + 1) % 4])
    for n, b in sizes:
        if policy is LastBatchPolicy.DROP and n < b:
            continue
        call = (n, b, policy, padded, mask)
        fresh = over_source(*call)
        whole = [frozen(batch) for batch in itertools.islice(fresh, 19)]
        stream = over_source(*call)
        for step in (0, 1, 17, 5, 2, 3, 4, 9, 16):
            stream.seek_step(step)
            state = json.loads(json.dumps(stream.get_state()))
            assert frozen(stream.peek()) == frozen(next(stream)) == whole[step], (call, step)
            assert frozen(next(stream)) == whole[step + 1]
            other = over_source(*call)
            other.set_state(state)
            assert frozen(next(other)) == whole[step]
            other.close()
        for own in (fresh, stream):
            own.close()


def test_steps_are_counted_in_the_current_batch_size():
    small, large = over_source(23, 3), over_source(23, 4)
    for _ in range(5):
        next(small)
    whole = [frozen(batch) for batch in itertools.islice(over_source(23, 4), 12)]
    for step in (11, 0, 6):
        large.set_state(small.get_state())
        large.seek_step(step)
        assert frozen(next(large)) == whole[step]


@pytest.mark.parametrize("padded", (False, True))
def test_a_seek_over_a_source_takes_constant_time(padded):
    source = Numbers(1000)
    stream = over_source(1000, 8, padded=padded, source=source, shuffle=False)
    step = 10**9 + 3
    stream.seek_step(step)
    assert source.reads == []
    epoch, place = divmod(step, 125)
    np.testing.assert_array_equal(next(stream)["x"], np.arange(8) + 8 * place)
    assert stream.epoch == epoch and len(source.reads) < 10


def test_a_finite_stream_has_an_end():
    for policy, padded in itertools.product(LastBatchPolicy, (False, True)):
        stream = over_source(7, 3, policy, padded, num_epochs=2)
        whole = [frozen(batch) for batch in over_source(7, 3, policy, padded, num_epochs=2)]
        assert len(stream) == len(whole)
        for step in range(len(whole) + 1):
            stream.seek_step(step)
            assert [frozen(batch) for batch in stream] == whole[step:]
            with pytest.raises(StopIteration):
                next(stream)
        stream.seek_step(1)
        with pytest.raises(ValueError, match=rf"num_epochs=2 .* has only {len(whole)} batches"):
            stream.seek_step(len(whole) + 1)
        assert frozen(next(stream)) == whole[1]


def test_the_step_after_skipped_batches_is_unknown():
    source = Numbers(12, unreadable=[4])
    call = {"policy": LastBatchPolicy.DROP, "source": source, "shuffle": False}
    stream = over_source(12, 3, **call, on_error="skip")
    with pytest.raises(ValueError, match=r"seek_step\(5\) with on_error='skip'.*on_error='mask'"):
        stream.seek_step(5)
    next(stream)
    stream.seek_step(0)
    assert next(stream)["x"].tolist() == [0, 1, 2]
    masked = over_source(12, 3, **call, mask="mask", on_error="mask")
    whole = [frozen(batch) for batch in itertools.islice(masked, 6)]
    masked.seek_step(5)
    assert frozen(next(masked)) == whole[5]
    raising = over_source(12, 3, **call)
    raising.seek_step(2)  # a failing batch counts, as for next()
    assert next(raising)["x"].tolist() == [6, 7, 8]


def test_random_operators_of_dali_refuse_a_seek_over_a_source():
    made = data_iterator(lambda number: (number + 0, fn.random.uniform()), ["x", "u"])
    stream = made.stream(source=Numbers(12), batch_size=3, num_threads=1, device_id=None)
    first = frozen(next(stream))
    with pytest.raises(ValueError, match=r"draw\.uniform\(\)"):
        stream.seek_step(3)
    stream.seek_step(0)
    assert frozen(next(stream)) == first


# Over DALI's readers


def reading(files, policy="FILL", padded=False, shuffle=False, shards=(0, 1), stick=False):
    label = read_files(
        files,
        shard_id=shards[0],
        num_shards=shards[1],
        random_shuffle=shuffle,
        pad_last_batch=padded,
        stick_to_shard=stick,
    )[1]
    return label, fn.random.uniform()


@pytest.fixture
def runs(monkeypatch):
    """Records the runs of DALI pipelines, an entry for each run whose outputs were taken."""
    seen, share = [], Pipeline.share_outputs
    monkeypatch.setattr(Pipeline, "share_outputs", lambda own: (seen.append(1), share(own))[1])
    return seen


def over_reader(files, policy="FILL", batch=3, on_error="raise", epochs=None, **options):
    made = data_iterator(reading, ["x", "u"], reader_name="reader", on_error=on_error)
    chosen = {"last_batch_policy": LastBatchPolicy[policy], "mask": "mask", "as_numpy": True}
    call = {"files": files, "batch_size": batch, "num_threads": 1, "seed": 5, "device_id": None}
    return made.stream(epochs, **call, **chosen, **options)


@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
@pytest.mark.parametrize(
    "options",
    [
        {"padded": False},
        {"padded": True, "shuffle": True},
        {"padded": True, "shards": (1, 2), "stick": True},
        {"padded": False, "shuffle": True, "shards": (1, 3)},
    ],
    ids=str,
)
def test_a_seek_over_a_reader_runs_the_batches(jpegs_many, policy, options, runs):
    files = jpegs_many[:11]
    whole = [frozen(b) for b in itertools.islice(over_reader(files, policy, **options), 14)]
    stream = over_reader(files, policy, **options)
    runs.clear()
    for step in (7, 8, 0, 13, 2):  # forwards from the position, backwards from the start
        stream.seek_step(step)
        assert frozen(next(stream)) == whole[step]
    if options["padded"] and policy != "DROP":
        plan = stream._plan
        dropped = plan.consumed(0) - min(plan.delivered(0, s) for s in range(plan.num_shards))
        assert len(runs) == 8 + 1 + 14 + 3 + dropped


def test_a_reader_that_ends_and_failing_batches(jpegs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    files = [*jpegs[:3], str(broken), *jpegs[4:6]]

    def decoded():
        image, label = read_files(files, random_shuffle=True)
        return label, fn.decoders.image(image)[0, 0, 0]

    for on_error, epochs in itertools.product(("raise", "skip"), (2, None)):
        made = data_iterator(decoded, ["x", "p"], reader_name="reader", on_error=on_error)
        call = {"batch_size": 1, "num_threads": 1, "device_id": None}

        def step_of(stream):
            try:
                return numbers(next(stream))
            except RuntimeError:
                return "failed"

        fresh, stream = made.stream(epochs, **call), made.stream(epochs, **call)
        total = 12 if on_error == "raise" else 10
        whole = [step_of(fresh) for _ in range(total)]
        for step in (8, 1, 9, 0):
            stream.seek_step(step)
            assert step_of(stream) == whole[step]
        if epochs:
            stream.seek_step(2)
            with pytest.raises(ValueError, match=r"seek_step\(13\): with num_epochs=2 the stream"):
                stream.seek_step(13)
            assert step_of(stream) == whole[2]  # it did not move
            stream.seek_step(total)
            with pytest.raises(StopIteration):
                next(stream)


def test_a_source_of_unknown_length():
    made = data_iterator(ends_after(3), ["x"])
    stream = made.stream(2, batch_size=2, num_threads=1)
    for step, wanted in ((4, [2, 3]), (1, [2, 3]), (0, [0, 1]), (5, [4, 5])):
        stream.seek_step(step)
        assert numbers(next(stream)) == wanted
    with pytest.raises(ValueError, match="has only 6 batches"):
        stream.seek_step(7)


def test_ctrl_c_within_a_seek_moves_nothing(jpegs_many, monkeypatch):
    stream = over_reader(jpegs_many[:11], shuffle=True)
    whole = [
        frozen(batch) for batch in itertools.islice(over_reader(jpegs_many[:11], shuffle=True), 9)
    ]
    next(stream)
    share, left = Pipeline.share_outputs, []

    def interrupted(own):
        if left and not left.pop():
            raise KeyboardInterrupt
        return share(own)

    monkeypatch.setattr(Pipeline, "share_outputs", interrupted)
    for target, taken in ((8, 4), (7, 1), (8, 5)):
        left[:] = [False, *[True] * taken]
        with pytest.raises(KeyboardInterrupt):
            stream.seek_step(target)
        left.clear()
        assert frozen(stream.peek()) == whole[1]
    for target in (5, 3):
        stream.seek_step(target)
        assert frozen(next(stream)) == whole[target]


# Epoch iterators, and refused calls


def test_iterators_of_epochs_over_a_source():
    made = data_iterator(graph, ["x", "u"], mask="mask", as_numpy=True)
    call = {"source": Numbers(11), "batch_size": 4, "num_threads": 1, "seed": 3, "device_id": None}
    whole = [frozen(batch) for batch in itertools.islice(made.stream(**call), 12)]
    for auto_reset in (False, True):
        iterator = made(**call, auto_reset=auto_reset)
        for step in (5, 3, 0, 8):
            iterator.seek_step(step)
            assert (iterator.epoch, iterator.step) == divmod(step, 3)
            passed = [frozen(batch) for batch in iterator]
            assert passed == whole[step : step + 3 - step % 3]


def test_iterators_of_epochs_over_a_reader_name_the_stream(jpegs):
    made = data_iterator(reading, ["x", "u"], reader_name="reader")
    iterator = made(jpegs, batch_size=2, num_threads=1)
    with pytest.raises(
        ValueError, match=r"seek_step\(3\): DALI's readers read sequentially.*stream"
    ):
        iterator.seek_step(3)


def test_a_stream_shows_its_position_and_is_closed(jpegs):
    with over_source(7, 3) as stream:
        assert repr(stream).startswith("<BatchStream of no end over graph: epoch 0")
        stream.seek_step(4)
        next(stream)
        assert (stream.epoch, stream.step, stream.errors, stream.closed) == (1, 2, (), False)
    assert stream.closed
    made = data_iterator(reading, ["x", "u"], reader_name="reader")
    with pytest.raises(TypeError, match="arguments of the graph function after it, or by keyword"):
        made.stream("train", batch_size=2)


def test_steps_are_integers(jpegs):
    epochs = data_iterator(graph, ["x", "u"], source=Numbers(7))(batch_size=3, num_threads=1)
    iterators = [over_source(7, 3), epochs, over_reader(jpegs)]
    for iterator in iterators:
        iterator.seek_step(np.int64(0))
        for wrong in (2.5, "3", None):
            with pytest.raises(TypeError, match="step must be a whole number of batches"):
                iterator.seek_step(wrong)
        with pytest.raises(ValueError, match="0 or more, not -1"):
            iterator.seek_step(-1)
        iterator.close()
        with pytest.raises(ValueError, match="closed"):
            iterator.seek_step(0)


def test_only_a_streams_skip_crosses_epochs():
    whole = [frozen(batch) for batch in itertools.islice(over_source(7, 3), 9)]
    stream = over_source(7, 3)
    assert stream.skip(7) == 7 and frozen(next(stream)) == whole[7]
    finite = over_source(7, 3, mask="mask", num_epochs=2)
    next(finite)
    with pytest.raises(ValueError, match=r"skip\(6\): only 5 batches are left in the 2 epochs"):
        finite.skip(6)
    assert finite.skip(5) == 5
    for auto_reset in (False, True):
        made = data_iterator(graph, ["x", "u"], mask="mask", auto_reset=auto_reset)
        iterator = made(source=sources.Arrays({"number": np.arange(7)}), batch_size=3)
        next(iterator)
        with pytest.raises(ValueError, match=r"skip\(3\): only 2 batches are left in epoch 0"):
            iterator.skip(3)
        assert iterator.step == 1 and iterator.skip(2) == 2
        with pytest.raises(StopIteration):  # as if they had been delivered
            next(iterator)
        assert (iterator.epoch, iterator.step) == ((1, 0) if auto_reset else (0, 3))
