"""Failed batches: at every position, under every policy, before and after a resume."""

import contextlib
import functools
import json
import os
import pathlib

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types

from conformance import Expected, check, frozen
from conftest import corrupt, write_jpegs
from dalijax import DALIGenericIterator, LastBatchPolicy, data_iterator
from dalijax.errors import EpochError
from full import FULL, in_full
from numbered import numbers, read_case
from oracle import Case

NAMES = ["image", "x", "u"]
EPOCHS = 3 if FULL else 2
N = 7


def label_reader(paths, case, stream=0, shuffle=False, mapped=False):
    options = {"random_shuffle": shuffle, "initial_fill": 4, "seed": 7}
    options |= {} if mapped else {"dont_use_mmap": True}
    return read_case(paths, case, stream, case.shards, **options)


def decode(paths, case, stream=0, shuffle=False, mapped=False):
    """Draws random numbers before, in and next to the decoder that fails."""
    data, label = label_reader(paths, case, stream, shuffle, mapped)
    image = fn.decoders.image(data)
    image = fn.noise.gaussian(image, stddev=5.0)
    flip = fn.cast(fn.random.coin_flip(), dtype=types.FLOAT)
    return image, label, fn.random.uniform() + flip


def maker(paths, case, depth=2, stream=0, shuffle=False, mapped=False, **config):
    iterator_fn = data_iterator(
        decode,
        NAMES,
        reader_name="reader",
        last_batch_policy=LastBatchPolicy[case.policy],
        mask="mask",
        as_numpy=True,
        **config,
    )
    # One thread: it would be random which of two corrupt files in a batch DALI names.
    build = {"batch_size": case.batch, "num_threads": 1, "prefetch_queue_depth": depth}
    return functools.partial(iterator_fn, paths, case, stream, shuffle, mapped, **build)


def failing(case, bad, stream=0, epochs=EPOCHS):
    """Returns the expected batches; None if a sample of the batch is corrupt."""
    whole = Case(case.n, case.shards, case.batch, "FILL", case.padded, case.stick)
    if case.policy == "DROP":
        whole = case
    out = []
    for (number, cut), (_, read) in zip(case.epochs(epochs), whole.epochs(epochs), strict=True):
        out.append([])
        for kept, batch in zip(cut[stream], read[stream]):
            values = {
                "x": np.array([[s[0]] for s in kept], np.int32),
                "mask": np.array(case.mask(kept, number)),
            }
            out[-1].append(None if bad & {s[0] for s in batch} else values)
    return out


@pytest.fixture
def write_images(tmp_path):
    """Creates a folder of JPEGs, some of which are corrupt."""

    def make(bad, count=N):
        folder = tmp_path / "-".join(map(str, ["bad", *sorted(bad)]))
        if folder.exists():  # DALI may have mapped its files: overwriting them is a SIGBUS
            return [str(folder / f"{i:05d}.jpg") for i in range(count)]
        paths = write_jpegs(folder, count)
        for i in bad:
            corrupt(paths[i])
        return paths

    return make


POLICIES = [(p, padded) for p in ("FILL", "DROP", "PARTIAL") for padded in (False, True)]
# Every policy, and every depth with two policies.
every_policy_and_depth = pytest.mark.parametrize(
    "policy,padded,depth",
    [
        (*p, depth) if depth == 1 + k % 3 else in_full(*p, depth)
        for k, p in enumerate(POLICIES)
        for depth in (1, 2, 3)
    ],
)
three_policies = pytest.mark.parametrize(
    "policy,padded",
    [
        p if p in (("FILL", True), ("DROP", False), ("PARTIAL", True)) else in_full(*p)
        for p in POLICIES
    ],
)
# A few sets of several files take the same path for every policy.
two_policies = pytest.mark.parametrize(
    "policy,padded",
    [p if p in (("FILL", True), ("PARTIAL", False)) else in_full(*p) for p in POLICIES],
)


@pytest.mark.slow
@three_policies
def test_a_corrupt_file_at_every_position(write_images, policy, padded):
    case = Case(N, 1, 2, policy, padded, False)
    # Both rows of a batch, and with FILL every batch.
    some = {"FILL": (0, 3, 4, 6), "PARTIAL": (3, 6), "DROP": (0, 6)}
    positions = range(N) if FULL else some[policy]
    for position in positions:
        for depth in (1, 2, 3) if FULL else (1 + (position + len(policy)) % 3,):
            expected = failing(case, {position}, epochs=2)
            failures = sum(batch is None for epoch in expected for batch in epoch)
            # DROP never delivers the last file if it is padded, as it is not in epoch 0.
            assert failures > 0 or (policy == "DROP" and position == N - 1)
            tail = None if FULL or position == 0 else 5
            check(maker(write_images({position}), case, depth), Expected(expected), tail=tail)


@two_policies
@pytest.mark.parametrize("bad", [in_full({1, 2, 3, 4, 5}), {0, 1, 2}, set(range(N))], ids=str)
def test_many_corrupt_files_in_a_row(write_images, policy, padded, bad):
    # The three shards are 0-1, 2-3 and 4-6: with {0, 1, 2}, a whole epoch of a shard fails.
    depth = 1 + len(bad) % 3
    for shards in (1, 3) if FULL else (1 if (len(bad) > 3) == padded else 3,):
        case, stream = Case(N, shards, 2, policy, padded, False), shards - 1
        for auto_reset in (False, True) if FULL else (case.shards > 1,):
            expected = Expected(failing(case, bad, stream), auto_reset)
            make = maker(write_images(bad), case, depth, stream, auto_reset=auto_reset)
            check(make, expected, tail=4)
    whole = failing(Case(N, 3, 2, policy, padded, False), bad, 2)
    assert bad == {1, 2, 3, 4, 5} or any(set(map(type, epoch)) == {type(None)} for epoch in whole)


@pytest.mark.parametrize("depth", (1, 2, 3))
def test_pipelines_made_by_hand_with_corrupt_files(write_images, depth):
    case, bad = Case(N, 1, 2, "FILL", True, False), {0, 4, 5}
    paths = write_images(bad)

    def make():
        pipeline = pipeline_def(decode)(
            paths,
            case,
            batch_size=case.batch,
            num_threads=1,
            device_id=None,
            prefetch_queue_depth=depth,
        )
        return DALIGenericIterator(
            pipeline, NAMES, reader_name="reader", mask="mask", as_numpy=True
        )

    check(make, Expected(failing(case, bad)), tail=5)


def shuffled(paths, case):
    """Returns the batches of a shuffled reader from DALI alone: the numbers, undecoded."""

    def labels():
        return label_reader(paths, case, shuffle=True)[1]

    build = {"batch_size": case.batch, "num_threads": 1, "device_id": None, "seed": 0}
    pipeline = pipeline_def(labels)(**build)
    while True:
        yield pipeline.run()[0].as_array()


SHUFFLED = [({3}, 1), ({0, 6}, 3), ({1, 2, 5}, 1)]
SHUFFLED += [in_full({3}, 3), in_full({0, 6}, 1), in_full({1, 2, 5}, 3)]


@pytest.mark.parametrize("bad,depth", SHUFFLED)
def test_corrupt_files_in_a_shuffled_reader(write_images, bad, depth):
    case = Case(N, 1, 2, "FILL", True, False)
    paths = write_images(bad)
    numbers = shuffled(paths, case)
    epochs = []
    for epoch, streams in case.epochs(EPOCHS):
        masks = [np.array(case.mask(own, epoch)) for own in streams[0]]
        batches = [{"x": next(numbers), "mask": mask} for mask in masks]
        counted = [i for b in batches for i in b["x"][b["mask"]].ravel()]
        assert sorted(counted) == list(range(N))  # each sample exactly once
        epochs.append([None if bad & set(b["x"].ravel()) else b for b in batches])
    check(maker(paths, case, depth, shuffle=True), Expected(epochs), tail=5)


def test_failures_are_counted_in_the_state(write_images):
    case, bad = Case(N, 1, 2, "FILL", False, False), {2, 4, 5}
    iterator = maker(write_images(bad), case)()
    failed = 0
    for epoch in failing(case, bad, epochs=3):
        for want in epoch:
            failed += want is None
            with pytest.raises(RuntimeError) if want is None else contextlib.nullcontext():
                next(iterator)
            assert iterator.get_state()["errors"] == failed
        iterator.reset()
    assert failed == 7
    assert iterator.errors == ()  # raised failures are not listed


# on_error="skip"


def walk(iterator, calls):
    """Returns the result of each call, and the state and the length after it."""
    out = []
    for call in calls:
        try:
            result = frozen(next(iterator)) if call == "next" else iterator.reset()
        except StopIteration:
            result = "stop"
        except EpochError as error:
            assert f"every batch of epoch {iterator.errors[-1].epoch} failed" in str(error)
            result = "all failed"
        out.append((result, len(iterator), json.dumps(iterator.get_state())))
    return out


def readable(iterator):
    return [(one.epoch, one.step) for one in iterator.errors]


# Every policy, and every set of files with three policies.
SKIPPED = [
    (*policy, bad) if (k // 2 + k + number) % 2 == 0 else in_full(*policy, bad)
    for k, policy in enumerate(POLICIES)
    for number, bad in enumerate([{0}, {6}, {2, 3, 4, 5}, set(range(N))])
]


@pytest.mark.parametrize("policy,padded,bad", SKIPPED)
def test_skipped_batches(write_images, caplog, policy, padded, bad):
    case = Case(N, 1, 2, policy, padded, False)
    auto_reset, depth = bool(bad & {0}), 1 + len(bad) % 3
    make = maker(write_images(bad), case, depth, on_error="skip", auto_reset=auto_reset)
    expected = failing(case, bad)
    numbers = [number for number, _ in case.epochs(EPOCHS)]
    # The calls, their expected result, and the failures after them.
    calls, ends, behind, failures = [], [], [], []
    for number, epoch in zip(numbers, expected, strict=True):
        before = len(failures)
        for step, want in enumerate(epoch):
            if want is None:
                failures.append((number, step))
            else:
                calls.append("next")
                ends.append((number, step + 1, want))
                behind.append(len(failures))
        for call in ["next"] if auto_reset else ["next", "next", "reset"]:
            calls.append(call)
            ends.append((number, len(epoch), "stop" if call == "next" else None))
            behind.append(len(failures))
        if epoch and all(want is None for want in epoch):  # the end of the epoch reports it once
            first = len(ends) - (1 if auto_reset else 3)
            ends[first] = (number, len(epoch), "all failed")
        assert len(failures) - before == sum(want is None for want in epoch)
    iterator = make()
    first = json.dumps(iterator.get_state())
    results = walk(iterator, calls)

    logged = [r.getMessage() for r in caplog.records if r.name == "dalijax"]
    assert readable(iterator) == failures
    assert logged == [f"skipped: {one.message}" for one in iterator.errors]
    for one in iterator.errors:
        assert f"batch {one.step} of epoch {one.epoch} failed" in one.message
        assert "decoders.image" in one.message
    lengths = {number: len(epoch) for number, epoch in zip(numbers, expected)}
    for (number, step, want), count, (got, length, text) in zip(ends, behind, results):
        state = json.loads(text)
        assert state["errors"] == count
        if isinstance(want, dict):
            assert (state["epoch"], state["step"], length) == (number, step, lengths[number])
            for name, values in want.items():
                dtype, shape, data = got[name]
                np.testing.assert_array_equal(np.frombuffer(data, dtype).reshape(shape), values)
        else:
            assert got == want

    # From each state, the same iterator or a new iterator continues and skips in the same way.
    states = [first, *(text for _, _, text in results)]
    for at, text in enumerate(states):
        if FULL or at % 2:
            iterator.set_state(json.loads(text))
            assert walk(iterator, calls[at : at + 4]) == results[at : at + 4], at
            if not FULL:
                continue
        new = make()
        new.set_state(json.loads(text))
        to = len(calls) if FULL or at % 8 == 0 else at + 4
        assert walk(new, calls[at:to]) == results[at:to], at
        if to == len(calls):
            assert readable(new) == failures[json.loads(text)["errors"] :]
        new.close()


def test_a_skipped_batch_is_logged_once_despite_repeated_peeks(write_images, caplog):
    case = Case(N, 1, 2, "FILL", True, False)
    iterator = maker(write_images({2}), case, on_error="skip")()
    next(iterator)
    before = iterator.get_state()
    for _ in range(3):
        assert iterator.peek()["x"].ravel().tolist() == [4, 5]
        assert iterator.get_state() == before
        _ = iterator.element_spec
        iterator.start_prefetch()
    assert next(iterator)["x"].ravel().tolist() == [4, 5]
    assert len(caplog.records) == len(iterator.errors) == 1
    assert iterator.get_state()["errors"] == 1


@pytest.mark.parametrize("call", ("reset", "iter"))
def test_peek_past_a_skipped_last_batch_moves_nothing(write_images, call):
    # The last batch is corrupt: only peek() finds out that the epoch has no more batches.
    case = Case(N, 1, 2, "FILL", True, False)
    after = []
    for looks in (0, 1):
        iterator = maker(write_images({6}), case, on_error="skip")()
        for _ in range(3):
            next(iterator)
        for _ in range(looks):
            with pytest.raises(StopIteration):
                iterator.peek()
        iterator.reset() if call == "reset" else iter(iterator)
        after.append(iterator.get_state())
    assert after[0] == after[1]


# Empty files, which can't be mapped: DALI's reader then ends


@pytest.fixture
def emptied(tmp_path):
    """Creates a folder of JPEGs, some of which are empty."""

    def make(empty, count=N):
        paths = write_jpegs(tmp_path / "-".join(map(str, ["empty", *sorted(empty)])), count)
        for i in empty:
            pathlib.Path(paths[i]).write_bytes(b"")
        return paths

    return make


# Every set of files with a policy, and a few with another.
EMPTIED = [
    (*policy, empty) if empty in chosen else in_full(*policy, empty)
    for policy, chosen in {
        ("FILL", True): [{0}, {2, 3, 4}, {*range(N)}],
        ("PARTIAL", False): [{3}, {6}],
        **{policy: [] for policy in POLICIES if policy not in (("FILL", True), ("PARTIAL", False))},
    }.items()
    for empty in [{0}, {3}, {6}, {2, 3, 4}, {*range(N)}]
]


@pytest.mark.slow
@pytest.mark.parametrize("policy,padded,empty", EMPTIED, ids=str)
def test_empty_files_fail_like_corrupt_files(emptied, policy, padded, empty):
    paths = emptied(empty)
    for depth in (1, 2, 3) if FULL else (1 + (len(policy) + min(empty)) % 3,):
        for shards in (1, 3) if FULL else (1 if (min(empty) + len(empty)) % 2 == padded else 3,):
            case, stream = Case(N, shards, 2, policy, padded, False), shards - 1
            make = maker(paths, case, depth, stream, mapped=True)
            tail = None if FULL else 4
            check(make, Expected(failing(case, empty, stream, epochs=2)), tail=tail)


@pytest.mark.parametrize("depth", (1, 2, 3))
def test_batches_of_empty_files_are_skipped_until_the_files_are_repaired(emptied, depth):
    case, paths = Case(12, 1, 3, "FILL", True, False), emptied({4, 5}, 12)
    iterator = maker(paths, case, depth, mapped=True, on_error="skip")()
    assert [numbers(batch) for batch in iterator] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert [(error.epoch, error.step) for error in iterator.errors] == [(0, 1)]
    whole = pathlib.Path(paths[0]).read_bytes()
    for path in paths[4:6]:
        pathlib.Path(path).write_bytes(whole)
    iterator.reset()
    read_ahead = [numbers(batch) for batch in iterator]  # partly read before the repair
    assert len(read_ahead) in (3, 4)
    iterator.reset()
    assert [numbers(batch) for batch in iterator] == np.arange(12).reshape(4, 3).tolist()


@pytest.mark.parametrize("depth", (1, 2, 3))
@pytest.mark.parametrize("bad,empty", [((3, 4), 5), ((0, 1), 2), ((9, 10), 11), ((4, 6), 5)])
def test_an_empty_file_after_skipped_batches(emptied, depth, bad, empty):
    """All are skipped in one call: new pipelines start at the failure, not where the call began."""
    case, paths = Case(24, 1, 2, "FILL", True, False), emptied({2 * empty}, 24)
    for batch in bad:
        corrupt(paths[2 * batch])
    iterator = maker(paths, case, depth, mapped=True, on_error="skip")()
    failed = sorted({*bad, empty})
    for epoch in range(2):
        delivered = [[2 * k, 2 * k + 1] for k in range(12) if k not in failed]
        assert [numbers(batch) for batch in iterator] == delivered
        assert readable(iterator)[epoch * len(failed) :] == [(epoch, k) for k in failed]


def test_an_empty_file_after_an_earlier_state(emptied):
    # The same state, whether the files are mapped or read.
    case, paths = Case(12, 1, 3, "FILL", True, False), emptied({7}, 12)
    iterator = maker(paths, case, mapped=True)()
    states = []
    with contextlib.suppress(StopIteration):
        while True:
            states.append(iterator.get_state())
            with contextlib.suppress(RuntimeError):
                next(iterator)
    for at, state in enumerate(states):
        for mapped in (False, True):
            again = maker(paths, case, mapped=mapped)()
            again.set_state(state)
            later = []
            for _ in range(at, 4):
                try:
                    later.append(numbers(next(again)))
                except RuntimeError:
                    later.append(None)
            assert later == [[0, 1, 2], [3, 4, 5], None, [9, 10, 11]][at:]
            assert again.get_state() == states[-1]
    assert len(states) == 5


@pytest.mark.parametrize("by_hand", (True, False))
def test_an_empty_file_if_the_user_enabled_mapping(emptied, by_hand):
    paths = emptied({2}, 4)

    def pipe():
        data, label = fn.readers.file(files=paths, name="reader", dont_use_mmap=False)
        return data, label

    if by_hand:
        pipeline = pipeline_def(pipe)(batch_size=2, num_threads=1, device_id=None)
        iterator = DALIGenericIterator(pipeline, ["data", "x"], reader_name="reader")
    else:
        iterator_fn = data_iterator(pipe, ["data", "x"], reader_name="reader")
        iterator = iterator_fn(batch_size=2, device_id=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="(?s)Pass dont_use_mmap=True.*" + paths[2]):
            while True:
                iterator.skip(1)


# Temporary failures


@contextlib.contextmanager
def away(path):
    pathlib.Path(path).rename(path + ".away")
    try:
        yield
    finally:
        pathlib.Path(path + ".away").rename(path)


@pytest.mark.parametrize("depth", (1, 2, 3))
def test_a_missing_file(write_images, depth):
    case = Case(12, 1, 3, "FILL", True, False)
    paths = write_images(set(), 12)
    make = maker(paths, case, depth, prepare_first_batch=False)
    reference = make()
    epochs = [[frozen(batch) for batch in reference] for _ in range(3)]
    iterator = make()
    states = [iterator.get_state()]
    with away(paths[7]):
        for want in epochs[0][:2]:
            assert frozen(next(iterator)) == want
            states.append(iterator.get_state())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="(?s)batch 2 of epoch 0.*" + paths[7]):
                iterator.peek()
        with pytest.raises(RuntimeError, match="batch 2 of epoch 0"):
            next(iterator)
        assert len(iterator) == 4
    # It is back: no batch is missing after any earlier state, or from the start of the epoch.
    for at, state in enumerate(states):
        iterator.set_state(state)
        assert [frozen(batch) for batch in iterator] == epochs[0][at:]
        assert [frozen(batch) for batch in iterator] == epochs[1]
    iterator.set_state(states[0])
    with away(paths[11]):
        for want in epochs[0][:3]:
            assert frozen(next(iterator)) == want
        with pytest.raises(RuntimeError, match="(?s)batch 3 of epoch 0.*" + paths[11]):
            next(iterator)
        # The same failure, from a state before it.
        again = make()
        with pytest.raises(ValueError, match=r"allow=\['reader.files'\]"):
            again.set_state(states[2])
        again.set_state(states[2], allow=["reader.files"])
        assert frozen(next(again)) == epochs[0][2]
        with pytest.raises(RuntimeError, match="(?s)batch 3 of epoch 0.*" + paths[11]):
            next(again)


@pytest.mark.parametrize("on_error", ("raise", "skip"))
def test_a_file_that_comes_back_is_read_again(write_images, on_error):
    # DALI's readers never run again after an error: new readers start before the same batch.
    case = Case(12, 1, 3, "FILL", True, False)
    paths = write_images(set(), 12)
    make = maker(paths, case, prepare_first_batch=False, on_error=on_error)
    reference, iterator = make(), make()
    whole, second = ([frozen(batch) for batch in reference] for _ in range(2))
    with away(paths[4]):
        assert frozen(next(iterator)) == whole[0]
        for _ in range(4):
            with pytest.raises(RuntimeError, match="(?s)batch 1 of epoch 0.*" + paths[4]):
                next(iterator)
    assert [frozen(batch) for batch in iterator] == whole[1:]
    assert iterator.get_state()["errors"] == 0 and iterator.errors == ()
    assert [frozen(batch) for batch in iterator] == second


@pytest.mark.parametrize("depth", (1, 3))
def test_an_unreadable_array_is_retried_until_it_is_repaired(tmp_path, depth):
    for i in range(12):
        np.save(tmp_path / f"{i:02d}.npy", np.array([i], np.int32))
    good = (tmp_path / "07.npy").read_bytes()

    def pipe():
        x = fn.readers.numpy(
            file_root=str(tmp_path), file_filter="*.npy", name="reader", dont_use_mmap=True
        )
        return x, fn.random.uniform()

    make = functools.partial(
        data_iterator(pipe, ["x", "u"], reader_name="reader", as_numpy=True),
        batch_size=2,
        prefetch_queue_depth=depth,
    )
    reference = make()
    epochs = [[frozen(batch) for batch in reference] for _ in range(2)]
    reference.close()
    (tmp_path / "07.npy").write_bytes(b"no array at all")
    iterator = make()
    for want in epochs[0][:3]:
        assert frozen(next(iterator)) == want
    state = iterator.get_state()
    for _ in range(4):
        for use in (iterator.peek, iterator.__next__):
            with pytest.raises(RuntimeError, match="batch 3 of epoch 0 can't be read"):
                use()
        assert iterator.get_state() == state
        iterator.set_state(state)
    resumed = make()
    resumed.set_state(state)
    with pytest.raises(RuntimeError, match="batch 3 of epoch 0 can't be read"):
        next(resumed)
    (tmp_path / "07.npy").write_bytes(good)
    for one in (iterator, resumed):
        for epoch in (epochs[0][3:], epochs[1]):
            assert [frozen(batch) for batch in one] == epoch


def test_a_corrupt_file_that_is_repaired(write_images):
    # Long epochs, so that the file of the next epoch is not read before the repair.
    case = Case(24, 1, 2, "FILL", True, False)
    paths = write_images({2}, 24)
    good = write_jpegs(pathlib.Path(paths[0]).parent / "good", 24)
    make = maker(paths, case)
    reference = maker(good, case)()
    whole = [[(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in reference]]
    whole += [[(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in reference]]
    iterator = make()
    next(iterator)
    with pytest.raises(RuntimeError, match="batch 1 of epoch 0"):
        next(iterator)
    state = iterator.get_state()
    os.replace(good[2], paths[2])
    resumed = make()
    with pytest.raises(ValueError, match=r"allow=\['reader.files'\]"):  # it has another size
        resumed.set_state(state)
    resumed.set_state(state, allow=["reader.files"])
    for one in (iterator, resumed):
        rest = [(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in one]
        assert rest == whole[0][2:]
        again = [(numbers(b), b["u"].tolist(), b["mask"].tolist()) for b in one]
        assert again == whole[1]
        assert one.get_state()["errors"] == 1


def test_a_python_function_that_fails_sometimes(arrays_dir):
    fails = {4, 5, 13}

    def pipe(mended):
        x = fn.readers.numpy(file_root=arrays_dir, file_filter="*.npy", name="reader")

        def function(value):
            if int(value[0]) in fails and not mended:
                raise KeyError(f"no row {value[0]}")
            return value

        return fn.python_function(x, function=function), fn.random.uniform()

    make = data_iterator(pipe, ["x", "u"], reader_name="reader", as_numpy=True)
    whole = [frozen(batch) for batch in make(True, batch_size=3)]
    iterator = make(False, batch_size=3)
    for want in whole:
        if fails & set(np.frombuffer(want["x"][2], np.int32)):
            with pytest.raises(
                RuntimeError, match="(?s)batch 1 of epoch 0 failed.*KeyError: 'no row"
            ):
                next(iterator)
        else:
            assert frozen(next(iterator)) == want
    with pytest.raises(StopIteration):
        next(iterator)
    assert iterator.get_state()["errors"] == 1


# No restore replays batches


def until_delivered(iterator):
    """Returns the next batch, also after the end of an epoch."""
    for batch in iterator:
        return batch
    iterator.reset()
    return until_delivered(iterator)


def by_number(calls, bad=()):
    """A graph over a source that is called once for each run, before DALI runs it."""

    def source(info):
        calls.append(info.iteration)
        return np.full((2, 1), info.iteration, np.int32)

    def checked(x):
        if int(x[0]) in bad:
            raise KeyError("bad row")
        return x

    def pipe():
        x = fn.external_source(source, batch_info=True)
        return (fn.python_function(x, function=checked) if bad else x), fn.random.uniform()

    return pipe


@every_policy_and_depth
def test_no_restore_replays_a_source(policy, padded, depth):
    for n in (4, 5, 7) if FULL else (4, 5):
        calls = []
        iterator_fn = data_iterator(
            by_number(calls),
            ["x", "u"],
            size=n,
            last_batch_padded=padded,
            last_batch_policy=LastBatchPolicy[policy],
            as_numpy=True,
            prepare_first_batch=False,
        )

        def make():
            return iterator_fn(batch_size=2, prefetch_queue_depth=depth)

        iterator = make()
        delivered, states = [-1], [(iterator.get_state(), -1)]
        for _ in range(3):
            for _ in range(len(iterator)):
                delivered.append(int(next(iterator)["x"][0, 0]))
                states.append((iterator.get_state(), delivered[-1]))
            with pytest.raises(StopIteration):
                next(iterator)
            states.append((iterator.get_state(), delivered[-1]))
            iterator.reset()
            states.append((iterator.get_state(), delivered[-1]))
        delivered.append(int(next(iterator)["x"][0, 0]))
        for state, before in states:
            for other in (iterator, make()):
                calls.clear()
                other.set_state(state)
                assert other.get_state() == state
                got = int(until_delivered(other)["x"][0, 0])
                # Only the batches after the last delivered batch, in order. A reused iterator may
                # already be there, with a full queue.
                first = before + 1 if other is not iterator else max(calls[0], before + 1)
                assert calls == list(range(first, first + len(calls)))
                assert got == delivered[delivered.index(before) + 1]
                assert len(calls) <= depth + 1, (n, state["epoch"], state["step"])


@pytest.mark.parametrize("depth", (1, 2, 3))
@pytest.mark.parametrize("failures", (1, 2, 3, 4, 6))
def test_a_restore_repeats_only_the_failures(depth, failures):
    # DALI has no complete checkpoint of a failed batch, so a state stores the checkpoint before it.
    calls = []
    bad = [*range(3, 3 + failures), 20]
    iterator_fn = data_iterator(
        by_number(calls, bad),
        ["x", "u"],
        size=100,
        as_numpy=True,
        prepare_first_batch=False,
    )
    iterator = iterator_fn(batch_size=2, prefetch_queue_depth=depth)

    def ran(first, failed):
        state = iterator.get_state()
        want = frozen(next(iterator))
        calls.clear()
        resumed = iterator_fn(batch_size=2, prefetch_queue_depth=depth)
        resumed.set_state(state)
        assert frozen(next(resumed)) == want
        assert calls == list(range(first, first + max(depth, failed) + 1))

    expected = {2 + failures: (3, failures), 12: (13, 0), 20: (20, 1)}
    while (step := iterator.step) <= 20:
        with pytest.raises(RuntimeError) if step in bad else contextlib.nullcontext():
            next(iterator)
        if step in expected:
            ran(*expected.pop(step))
    assert not expected


@every_policy_and_depth
def test_no_restore_replays_a_reader(jpegs_many, policy, padded, depth):
    calls = []

    def count(label):
        calls.append(int(label[0]))
        return label

    def pipe(case, stream):
        return fn.python_function(label_reader(jpegs_many, case, stream)[1], function=count)

    for shards, stream in ((1, 0), (3, 2)):
        case = Case(N, shards, 2, policy, padded, False)
        make = functools.partial(
            data_iterator(
                pipe,
                ["x"],
                reader_name="reader",
                last_batch_policy=LastBatchPolicy[policy],
                as_numpy=True,
                prepare_first_batch=False,
            ),
            case,
            stream,
            batch_size=2,
            num_threads=1,
            prefetch_queue_depth=depth,
        )
        iterator = make()
        states, batches = [], []
        for _ in range(3):
            states.append((iterator.get_state(), len(batches)))
            for _ in range(len(iterator)):
                batches.append(numbers(next(iterator)))
                states.append((iterator.get_state(), len(batches)))
            iterator.reset()
        batches.append(numbers(until_delivered(iterator)))
        iterator.close()
        for state, behind in states:
            resumed = make()
            calls.clear()
            resumed.set_state(state)
            assert numbers(until_delivered(resumed)) == batches[behind]
            resumed.close()  # joins DALI's threads: no call follows
            assert len(calls) <= 2 * (depth + 1), (state["epoch"], state["step"])
