"""`epochs(N)` is a correct training loop, wherever an iterator starts and stops."""

import itertools
import json

import numpy as np
import pytest
from numbers_source import Numbers
from nvidia.dali import fn
from python_sources import ends_after

from dalijax import LastBatchPolicy, data_iterator
from dalijax.errors import BatchError
from full import combinations
from numbered import numbers, read_files

BATCH, EPOCHS = 4, 3


def over_source(policy, auto_reset, **more):
    made = data_iterator(
        lambda number, *, draw: (number + 0, draw.uniform()), ["x", "u"], auto_reset=auto_reset
    )
    chosen = {"last_batch_policy": policy, "as_numpy": True, "num_threads": 1, "device_id": None}
    return made(source=Numbers(11), batch_size=BATCH, **chosen, **more)


def over_reader(files, policy, auto_reset, padded=True, **more):
    def graph():
        _, label = read_files(files, random_shuffle=True, pad_last_batch=padded)
        return label, fn.random.uniform()

    made = data_iterator(graph, ["x", "u"], reader_name="reader", auto_reset=auto_reset)
    chosen = {"last_batch_policy": policy, "as_numpy": True, "num_threads": 1, "device_id": None}
    return made(batch_size=BATCH, **chosen, **more)


MAKES = ("source", "reader", "unpadded reader")


@pytest.fixture(params=MAKES)
def make(request, jpegs_many):
    files = jpegs_many[:11]
    return {
        "source": over_source,
        "reader": lambda *args: over_reader(files, *args),
        "unpadded reader": lambda *args: over_reader(files, *args, padded=False),
    }[request.param]


def passes(iterator, epochs=EPOCHS, stop=None):
    """Returns the batches of each pass by epoch, up to a total number of batches."""
    left, got = itertools.count() if stop is None else iter(range(stop)), []
    for epoch, batches in iterator.epochs(epochs):
        got.append((epoch, []))
        for batch in batches:
            got[-1][1].append((numbers(batch), np.asarray(batch["u"]).tolist()))
            if next(left, None) is None or (stop and sum(len(p) for _, p in got) == stop):
                return got
    return got


@pytest.mark.parametrize(
    ("make", "policy", "auto_reset"),
    combinations(3, MAKES, LastBatchPolicy, (False, True)),
    indirect=["make"],
    ids=str,
)
def test_a_run_that_stops_anywhere_equals_the_uninterrupted_run(make, policy, auto_reset):
    plain = make(policy, False)
    whole = []
    for epoch in range(EPOCHS):
        whole.append((epoch, [(numbers(b), np.asarray(b["u"]).tolist()) for b in plain]))
    assert passes(make(policy, auto_reset)) == whole
    ends = list(itertools.accumulate(len(batches) for _, batches in whole))
    stops = [(stop, False) for stop in range(1, ends[-1] + 1)] + [(stop, True) for stop in ends]
    for stop, ended in stops:
        iterator = make(policy, auto_reset)
        before = passes(iterator, stop=stop)
        assert (iterator.step == len(iterator)) == (stop in ends)
        if ended:  # the state after StopIteration
            with pytest.raises(StopIteration):
                next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        other = make(policy, auto_reset)
        other.set_state(state)
        after = passes(other)
        assert all(batches for _, batches in after)  # no pass is empty
        if after and after[0][0] == before[-1][0]:
            before[-1][1].extend(after.pop(0)[1])
        assert before + after == whole
        assert passes(other) == passes(other, 1) == []  # all are finished
        assert next(other.epochs(EPOCHS + 1))[0] == EPOCHS  # and more epochs may follow
        other.close()


@pytest.mark.parametrize("auto_reset", (False, True))
def test_a_loop_that_is_left_early(make, auto_reset):
    policy = LastBatchPolicy.FILL
    whole = passes(make(policy, False))
    iterator, got = make(policy, auto_reset), []
    for epoch, batches in iterator.epochs(EPOCHS):
        got.append((epoch, [numbers(next(batches))]))
        for batch in batches:
            got[-1][1].append(numbers(batch))
            break
    assert got == [(epoch, [x for x, _ in batches[:2]]) for epoch, batches in whole]
    assert list(iterator.epochs(EPOCHS)) == []
    # Both loops are left: the epoch continues.
    iterator = make(policy, auto_reset)
    first = passes(iterator, stop=4)
    rest = passes(iterator)
    assert rest[0][0] == first[-1][0] == 1 and first[-1][1] + rest[0][1] == whole[1][1]
    # A finished pass has no more batches.
    iterator = make(policy, auto_reset)
    stale = [batches for _, batches in iterator.epochs(2)]
    assert [list(batches) for batches in stale] == [[], []]


def test_other_calls_within_an_epoch(make):
    policy = LastBatchPolicy.FILL
    whole = passes(make(policy, False))
    iterator, got = make(policy, False), []
    for epoch, batches in iterator.epochs(EPOCHS):
        iterator.peek(), len(iterator), iterator.element_spec
        got.append((epoch, []))
        for batch in batches:
            got[-1][1].append((numbers(batch), np.asarray(batch["u"]).tolist()))
            iterator.get_state()
    assert got == whole
    assert [e for e, _ in itertools.islice(make(policy, True).epochs(), 5)] == [0, 1, 2, 3, 4]


def test_after_a_step_alone():
    for auto_reset, step in itertools.product((False, True), range(10)):
        iterator = over_source(LastBatchPolicy.FILL, auto_reset, mask="mask")
        iterator.seek_step(step)
        epochs = [(epoch, len([*batches])) for epoch, batches in iterator.epochs(EPOCHS)]
        lengths = [(epoch, 3) for epoch in range(EPOCHS)][step // 3 :]
        if lengths:
            lengths[0] = lengths[0][0], 3 - step % 3
        assert epochs == lengths


def test_a_skipped_last_batch_makes_no_empty_pass():
    for unreadable, padded in itertools.product(([8, 9, 10], [4]), (False, True)):
        made = data_iterator(lambda number: number + 0, ["x"], on_error="skip", shuffle=False)
        source = Numbers(12, unreadable)

        def new(made=made, source=source, padded=padded):
            call = {"batch_size": 4, "num_threads": 1, "last_batch_padded": padded}
            return made(source=source, device_id=None, **call)

        def walk(iterator):
            return [(e, [numbers(b)[0] for b in bs]) for e, bs in iterator.epochs(2)]

        whole = walk(new())
        assert [[*b] for _, b in whole] == [[0, 4] if 8 in unreadable else [0, 8]] * 2
        iterator = new()
        next(iterator), next(iterator)
        other = new()
        other.set_state(iterator.get_state())
        assert walk(other) == walk(iterator) == whole[1:]


@pytest.mark.parametrize("auto_reset", (False, True))
def test_the_batches_of_an_epoch_continue_after_an_error(auto_reset):
    made = data_iterator(lambda number: number, ["x"], auto_reset=auto_reset, shuffle=False)
    iterator = made(source=Numbers(12, unreadable=[4]), batch_size=3, num_threads=1)
    got = []
    for epoch, batches in iterator.epochs(2):
        while True:
            try:
                got.append((epoch, numbers(next(batches))))
            except BatchError:
                continue
            except StopIteration:
                break
    rows = [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert got == [(epoch, row) for epoch in range(2) for row in rows]
    iterator.close()


def test_a_source_of_unknown_length():
    iterator = data_iterator(ends_after(3), ["x"])(batch_size=2, num_threads=1)
    got = [(epoch, [numbers(b) for b in batches]) for epoch, batches in iterator.epochs(2)]
    assert got == [(epoch, [[0, 1], [2, 3], [4, 5]]) for epoch in range(2)]


def test_the_number_of_epochs_is_checked_at_once():
    iterator = over_source(LastBatchPolicy.FILL, False)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="num_epochs must be a whole number of epochs"):
            iterator.epochs(wrong)
    with pytest.raises(TypeError, match="num_epochs"):
        iterator.epochs("3")
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator.epochs(3))
