"""Iterators over DALI's readers deliver exactly the simulated batches."""

import itertools

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from full import FULL
from numbered import read_case
from oracle import Case

EPOCHS = 5


def cases(max_n, shards=(1, 2, 3), batches=(1, 2, 3, 4)):
    for n, s, b in itertools.product(range(1, max_n + 1), shards, batches):
        if n >= s:
            yield n, s, b


def numpy_reader(folder, case, shard_id):
    return fn.readers.numpy(
        file_root=folder,
        files=[f"{i:05d}.npy" for i in range(case.n)],
        name="reader",
        shard_id=shard_id,
        num_shards=case.shards,
        stick_to_shard=case.stick,
        pad_last_batch=case.padded,
    )


def check_stream(iterator, case, stream, axis=()):
    """Checks five epochs of a stream (an index into the pmap axis, if there is one)."""
    for epoch, expected in case.epochs(EPOCHS):
        assert len(iterator) == len(expected[stream]), (case, epoch)
        got = [(b["x"][axis].ravel().tolist(), b["mask"][axis].tolist()) for b in iterator]
        want = [([s[0] for s in batch], case.mask(batch, epoch)) for batch in expected[stream]]
        assert got == want, (case, epoch)
        iterator.reset()


@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
@pytest.mark.parametrize(
    "stick,padded", [(False, False), (False, True), (True, False), (True, True)]
)
def test_file_reader(jpegs, policy, stick, padded):
    seen, number = 0, ("FILL", "DROP", "PARTIAL").index(policy) + stick + 2 * padded
    for n, shards, batch in cases(10):
        if not FULL and (n + batch + number) % 5:  # each size with several policies
            continue
        case = Case(n, shards, batch, policy, padded, stick)
        for stream in range(shards):
            iterator_fn = data_iterator(
                lambda case=case, stream=stream: read_case(jpegs, case, stream, case.shards)[1],
                ["x"],
                reader_name="reader",
                last_batch_policy=LastBatchPolicy[policy],
                mask="mask",
                as_numpy=True,
            )
            with iterator_fn(batch_size=batch, num_threads=1) as iterator:
                check_stream(iterator, case, stream)
            seen += 1
    assert seen == 4 * (10 + 2 * 9 + 3 * 8) or (not FULL and seen > 30)


@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
@pytest.mark.parametrize("padded", (False, True))
def test_numpy_reader(arrays_dir, policy, padded):
    for n, shards, batch in cases(10, shards=(1, 3), batches=(2, 3)):
        if not FULL and (n + batch + len(policy) + padded) % 2:  # each size with several policies
            continue
        case = Case(n, shards, batch, policy, padded, False)
        for stream in range(shards):
            iterator_fn = data_iterator(
                lambda case=case, stream=stream: numpy_reader(arrays_dir, case, stream),
                ["x"],
                reader_name="reader",
                last_batch_policy=LastBatchPolicy[policy],
                mask="mask",
                as_numpy=True,
            )
            with iterator_fn(batch_size=batch, num_threads=1) as iterator:
                check_stream(iterator, case, stream)


@pytest.mark.parametrize("policy", ("FILL", "DROP"))
@pytest.mark.parametrize(
    "stick,padded", [(False, False), (False, True), (True, False), (True, True)]
)
def test_pipelines_of_several_shards_stay_in_step(jpegs, policy, stick, padded):
    for n, shards, batch in cases(8, shards=(2, 3), batches=(2, 3)):
        if not FULL and (n + batch + (policy == "DROP") + stick) % 2:
            continue
        case = Case(n, shards, batch, policy, padded, stick)
        pipelines = [
            pipeline_def(lambda s=s: read_case(jpegs, case, s, shards)[1])(
                batch_size=batch, num_threads=1, device_id=None, seed=0
            )
            for s in range(shards)
        ]
        iterator = DALIGenericIterator(
            pipelines,
            ["x"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy[policy],
            pmap_compatible=True,
            mask="mask",
            as_numpy=True,
        )
        for epoch, expected in case.epochs(EPOCHS):
            got = [(b["x"][..., 0].tolist(), b["mask"].tolist()) for b in iterator]
            want = [
                (
                    [[s[0] for s in own] for own in batches],
                    [case.mask(own, epoch) for own in batches],
                )
                for batches in zip(*expected)
            ]
            assert got == want, (case, epoch)
            iterator.reset()


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
def test_size_without_a_reader(policy, padded):
    # size=N is like a reader of N samples; the graph is an endless counter.
    for n, batch in itertools.product(range(1, 9), (1, 2, 3)):
        case = Case(n, 1, batch, policy, padded, False)

        def counter(info):
            return np.array([info.idx_in_epoch], np.int32)

        iterator = data_iterator(
            lambda counter=counter: fn.external_source(counter, batch=False),
            ["x"],
            size=n,
            last_batch_padded=padded,
            last_batch_policy=LastBatchPolicy[policy],
            mask="mask",
            as_numpy=True,
        )(batch_size=batch, num_threads=1)
        for epoch, expected in case.epochs(EPOCHS):
            assert len(iterator) == len(expected[0])
            got = [b["mask"].tolist() for b in iterator]
            assert got == [case.mask(own, epoch) for own in expected[0]], (case, epoch)
            iterator.reset()


@pytest.mark.parametrize("policy", ("FILL", "DROP", "PARTIAL"))
@pytest.mark.parametrize("n,batch", ((3, 8), (3, 7), (5, 8), (2, 5), (8, 3), (1, 4)))
def test_streams_deliver_the_announced_number_of_batches(jpegs, policy, n, batch):
    case = Case(n, 1, batch, policy, False, False)
    made = data_iterator(
        lambda: read_case(jpegs, case, 0, case.shards)[1],
        ["x"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy[policy],
        mask="mask",
        as_numpy=True,
    )
    expected = case.epochs(9)
    for epochs in range(1, 9):
        stream = made.stream(epochs, batch_size=batch, num_threads=1)
        got = [(b["x"].ravel().tolist(), b["mask"].tolist()) for b in stream]
        assert got == [
            ([s[0] for s in own], case.mask(own, number))
            for number, streams in expected
            for own in streams[0]
            if number < epochs
        ]
        assert len(stream) == len(got)
        # A skip does not go beyond the last epoch either.
        assert made.stream(epochs, batch_size=batch, num_threads=1).skip(len(got)) == len(got)
