"""skip(n) has the same effect as n calls of next()."""

import itertools
import json
import os
import random

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, types
from python_sources import ends_after, fails_at

from conformance import frozen
from dalijax import LastBatchPolicy, data_iterator
from dalijax.core.formats import protobuf
from dalijax.core.order.epochs import EpochPlan
from full import FULL
from numbered import numbers, read_files

# Some graphs have independent readers.
pytestmark = pytest.mark.filterwarnings("ignore:the readers .* differ in:UserWarning")
N, BATCH = 59, 3


def graph(
    files, shard_id=0, num_shards=1, shuffle="", padded=True, stick=True, readers=1, fill=1024
):
    image, label = read_files(
        files[:N],
        shard_id=shard_id,
        num_shards=num_shards,
        random_shuffle=shuffle == "buffer",
        shuffle_after_epoch=shuffle == "epoch",
        initial_fill=fill,
        pad_last_batch=padded,
        stick_to_shard=stick,
    )
    crop = fn.random_resized_crop(fn.decoders.image(image), size=(2, 2))
    others = [fn.readers.file(files=files[:5], name=f"other{k}")[1] for k in range(1, readers)]
    return label, fn.random.uniform(), fn.random.normal(shape=[2]), crop, *others


def stream_of(jpegs, policy="FILL", epochs=3, **options):
    names = ["x", "u", "n", "crop", *(f"o{k}" for k in range(1, options.get("readers", 1)))]
    iterator_fn = data_iterator(
        graph, names, reader_name="reader", mask="mask", last_batch_policy=LastBatchPolicy[policy]
    )
    call = {"files": jpegs, "batch_size": BATCH, "num_threads": 1, "as_numpy": True, "seed": 5}
    return iterator_fn.stream(epochs, **call, **options)


@pytest.fixture(scope="module")
def image_paths(jpegs):
    """Returns paths of valid images, repeated."""
    return list(itertools.islice(itertools.cycle(jpegs), N))


@pytest.fixture
def runs(monkeypatch):
    """Records the runs of DALI pipelines, an entry for each run whose outputs were taken."""
    seen, share = [], Pipeline.share_outputs
    monkeypatch.setattr(Pipeline, "share_outputs", lambda own: (seen.append(1), share(own))[1])
    return seen


OPTIONS = [
    {},
    {"shuffle": "buffer"},
    {"shuffle": "epoch", "stick": False},
    {"shuffle": "buffer", "fill": 4},
    {"padded": False, "stick": False},
    {"padded": False, "stick": False, "shuffle": "buffer"},
    {"policy": "DROP", "shuffle": "epoch", "stick": False},
    {"policy": "DROP", "padded": False, "stick": False},
    {"policy": "PARTIAL", "shuffle": "buffer"},
    {"policy": "PARTIAL", "padded": False},
    {"num_shards": 2, "shard_id": 1, "stick": False},
    {"num_shards": 2, "shard_id": 0, "stick": False, "padded": False, "shuffle": "buffer"},
    {"num_shards": 2, "shard_id": 1, "stick": True, "padded": False, "shuffle": "buffer"},
    {"readers": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_skip_moves_like_next(image_paths, options, request):
    seed = 0 if os.environ.get("CI") else random.SystemRandom().randrange(2**31)
    request.node.add_report_section("setup", "seed", str(seed))  # shown if it fails
    chance = random.Random(seed)
    with_all = stream_of(image_paths, **options)
    batches = [frozen(batch) for batch in with_all]
    assert len(batches) == len(with_all) > 20
    for _ in range(6 if FULL else 2):
        stream, at = stream_of(image_paths, **options), 0
        while at < len(batches):
            for _ in range(chance.choice([0, 1, 2, 5])):
                if at < len(batches):
                    assert frozen(next(stream)) == batches[at]
                    at += 1
            if at < len(batches) and chance.random() < 0.3:
                assert frozen(stream.peek()) == batches[at]
            count = chance.choice([0, 1, 3, 8, 9, 10, 20, 25])
            if at + count > len(batches):  # refused, and the position is unchanged
                left = len(batches) - at
                with pytest.raises(ValueError, match=rf"skip\({count}\): only {left} batches"):
                    stream.skip(count)
                count = left
            assert stream.skip(count) == count
            at += count
            if chance.random() < 0.5:
                state = json.loads(json.dumps(stream.get_state()))
                stream.close()
                stream = stream_of(image_paths, **options)
                stream.set_state(state)
            if at < len(batches) and chance.random() < 0.5:
                assert frozen(next(stream)) == batches[at]
                at += 1
        with pytest.raises(StopIteration):
            next(stream)
        stream.close()


def test_skip_within_an_epoch_and_past_its_end(jpegs):
    def many(files):
        return read_files(files, random_shuffle=True)[1]

    files = jpegs * 100
    made = data_iterator(many, ["x"], reader_name="reader")
    iterator = made(files, batch_size=2, num_threads=1)
    expected = [np.asarray(batch["x"]).tolist() for batch in itertools.islice(iterator, 503)][-1]
    other = made(files, batch_size=2, num_threads=1)
    assert other.skip(502) == 502 and other.step == 502
    assert np.asarray(next(other)["x"]).tolist() == expected
    left = len(other) - 503
    for count in (left + 1, 10_000):
        with pytest.raises(ValueError, match=rf"only {left} batches are left in epoch 0, .*stream"):
            other.skip(count)
    assert other.step == 503 and other.skip(left) == left
    with pytest.raises(ValueError, match=r"skip\(1\): only 0 batches are left in epoch 0"):
        other.skip(1)
    with pytest.raises(StopIteration):
        next(other)


def test_a_state_after_the_end_does_not_move_the_iterator(jpegs_many):
    def labels():
        return fn.readers.file(files=jpegs_many[:6], name="reader")[1]

    for go_on in (lambda it: it.reset(), iter):
        with data_iterator(labels, ["x"], reader_name="reader")(batch_size=2) as iterator:
            next(iterator)
            assert iterator.skip(2) == 2
            iterator.get_state()
            go_on(iterator)
            assert (iterator.epoch, iterator.step) == (1, 0)


def test_skip_over_python_sources():
    def source(info):
        return np.array([info.iteration, info.epoch_idx], np.int32)[None].repeat(BATCH, 0)

    def pipe():
        return fn.external_source(source, batch_info=True, dtype=types.INT32), fn.random.uniform()

    made = data_iterator(pipe, ["x", "u"], size=40 * BATCH)
    expected = [frozen(b) for b in made(batch_size=BATCH, num_threads=1)]
    iterator = made(batch_size=BATCH, num_threads=1)
    assert iterator.skip(30) == 30
    assert [frozen(b) for b in iterator] == expected[30:]


def test_skip_if_only_the_source_knows_its_end():
    iterator = data_iterator(ends_after(6), ["x"])(batch_size=2, num_threads=1)
    assert iterator.skip(4) == 4
    assert numbers(next(iterator)) == [8, 9]
    with pytest.raises(ValueError, match=r"only 1 batch is left in epoch 0.* at the end of the"):
        iterator.skip(9)  # the source can't rewind
    with pytest.raises(ValueError, match=r"only 0 batches are left"):
        iterator.skip(1)
    with pytest.raises(StopIteration):
        next(iterator)


def test_skip_counts_a_batch_that_fails(jpegs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    files = [*jpegs[:2], str(broken), *jpegs[3:]] * 3
    made = data_iterator(
        lambda: fn.decoders.image(fn.readers.file(files=files, name="reader")[0]),
        ["x"],
        reader_name="reader",
    )
    whole = made(batch_size=1, num_threads=1, device_id=None)
    for count in (3, 5, 20):
        iterator = made(batch_size=1, num_threads=1, device_id=None)
        assert iterator.skip(count) == count
        assert next(iterator)["x"][0][0][0].tolist() == [8 * (count % len(jpegs))] * 3
    whole.close()


def test_protobuf_messages_are_parsed():
    fields = [(1, b"text"), (2, 0), (3, 127), (3, 128), (15, 1 << 40), (16, b""), (200, b"x" * 300)]
    assert list(protobuf.fields(protobuf.message(fields))) == fields


def test_a_failed_skip_can_be_retried(runs):
    for fails in ([0], [1], [2], [0, 0], [1, 2], [3]):
        left = list(fails)
        made = data_iterator(fails_at(left), ["x", "u"], size=80, prepare_first_batch=False)
        call = {"batch_size": 2, "num_threads": 1, "prefetch_queue_depth": 1}
        iterator, done = made(**call), 0
        while done < 30:
            try:
                done += iterator.skip(30 - done)
            except OSError:
                done = iterator.step
        got = frozen(next(iterator))
        assert not left or fails == [3]  # batch 3 is not produced
        left.clear()
        assert got == [frozen(b) for b in made(**call)][30], fails


def test_skip_with_skipped_batches(jpegs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    files = [*jpegs[:3], str(broken), *jpegs[4:]] * 3

    def pipe():
        image, label = read_files(files)
        return fn.decoders.image(image)[0, 0, 0], label

    made = data_iterator(pipe, ["p", "x"], reader_name="reader", on_error="skip")
    good = len(files) - 3
    for count in (1, 3, 10, good, good + 1, 50):
        one, other = (made(batch_size=1, num_threads=1) for _ in range(2))
        if count > good:  # only a run detects failing batches
            next(one), next(other)
            with pytest.raises(ValueError, match=rf"skip\({count}\): only 3[25] batches"):
                one.skip(count)
            assert (one.epoch, one.step) == (other.epoch, other.step) == (0, 1)
            assert [frozen(b) for b in one] == [frozen(b) for b in other]
            continue
        assert one.skip(count) == sum(1 for _ in itertools.islice(other, count)) == count
        assert one.get_state() == other.get_state() and one.errors == other.errors


def test_skip_takes_integers(jpegs):
    iterator = data_iterator(graph, ["x", "u", "n", "crop"], reader_name="reader")(
        jpegs * 5, batch_size=BATCH, num_threads=1
    )
    assert iterator.skip(np.int64(9)) == 9
    for own in (iterator, stream_of(jpegs * 5)):
        for wrong in (2.5, "3"):
            with pytest.raises(TypeError, match="must be a whole number of batches"):
                own.skip(wrong)
        with pytest.raises(ValueError, match=r"0 or more.*set_state\(\) go back\), not -1"):
            own.skip(-1)
        assert own.skip(0) == 0


def test_total_is_the_sum_of_all_epochs():
    for n, shards, batch in itertools.product((1, 3, 7, 11), (1, 2, 3), (1, 2, 4)):
        options = itertools.product(LastBatchPolicy, *[(False, True)] * 3)
        for policy, padded, stick, alone in options if n >= shards else ():
            plan = EpochPlan(n, shards, batch, policy, padded, stick, alone)
            for stream in range(shards):
                lengths = [plan.delivered(epoch, stream) for epoch in range(60)]
                for epochs in (0, 1, 2, 5, 12, 37, 60):
                    assert plan.total(epochs, stream) == sum(lengths[:epochs]), (plan, epochs)
