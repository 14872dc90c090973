"""Long runs with saves and restores, and many iterators: memory and threads do not grow."""

import gc
import json
import threading

import numpy as np
import psutil
import pytest
from fork_context import fork_context
from nvidia.dali import fn, types

from conftest import NUM_FILES
from dalijax import LastBatchPolicy, data_iterator
from full import FULL, in_full
from numbered import read_files

pytestmark = pytest.mark.slow

BATCHES = 20_000 if FULL else 400
BATCH = 5
SAVE_EVERY = 40
MEGABYTE = 2**20
SLACK = 4  # native threads of JAX's pool; iterators and restores would add more


def graph(paths):
    data, label = read_files(paths, random_shuffle=True, initial_fill=6, pad_last_batch=True)
    # 240 KiB in a batch: keeping every second batch of 400 would be visible.
    image = fn.resize(fn.decoders.image(data), size=(64, 64))
    image = fn.cast(fn.noise.gaussian(image, stddev=3.0), dtype=types.FLOAT)
    return image, label, fn.random.uniform()


def maker(paths, **config):
    iterator_fn = data_iterator(
        graph, ["image", "x", "u"], reader_name="reader", mask="mask", **config
    )
    return lambda: iterator_fn(paths, batch_size=BATCH, num_threads=2)


class Figures:
    """The resources that the process uses."""

    def __init__(self):
        process = psutil.Process()
        self.memory = process.memory_info().rss / MEGABYTE
        self.threads = threading.active_count(), process.num_threads()
        self.handles = process.num_fds()

    def check_no_more_than(self, before):
        assert self.threads[0] == before.threads[0]
        assert self.threads[1] <= before.threads[1] + SLACK
        assert self.handles <= before.handles

    def __str__(self):
        python, native = self.threads
        return (
            f"{self.memory:.0f} MB, {python} Python threads, {native} threads, "
            f"{self.handles} handles"
        )


@pytest.mark.parametrize("as_numpy,policy", [in_full(True, "FILL"), (False, "PARTIAL")])
def test_a_long_run_uses_as_much_as_a_short_run(jpegs, as_numpy, policy):
    # In a new process: the heap of other tests makes the size jump.
    child = fork_context().Process(target=long_run, args=(jpegs, as_numpy, policy))
    child.start()
    child.join()
    assert child.exitcode == 0


def long_run(jpegs, as_numpy, policy):
    make = maker(jpegs, as_numpy=as_numpy, last_batch_policy=LastBatchPolicy[policy])
    with make() as iterator:
        for batch in iterator:
            np.asarray(batch["image"])
    del batch
    gc.collect()
    before = Figures()
    iterator = make()
    taken, counts, sizes = 0, np.zeros(NUM_FILES, int), set()
    running = Figures()
    # Both figures are taken 10 batches after a restore, since threads start when needed.
    while taken < BATCHES + 10:
        batch = next(iterator, None)
        if batch is None:
            iterator.reset()
            continue
        counts[np.asarray(batch["x"])[np.asarray(batch["mask"])]] += 1
        assert batch["image"].shape[1:] == (64, 64, 3)
        taken += 1
        if taken % SAVE_EVERY == 0:
            text = json.dumps(iterator.get_state())
            sizes.add(len(text))
            if taken % (2 * SAVE_EVERY) == 0:  # resumes in another iterator
                iterator.close()
                iterator = make()
                iterator.set_state(json.loads(text))
        if taken == BATCHES // 5 + 10:
            gc.collect()
            warm = Figures()
    del batch
    gc.collect()
    end = Figures()
    iterator.close()
    after = Figures()
    print(f"{taken} batches, states of {min(sizes)} to {max(sizes)} characters")  # noqa: T201
    for name in ("before", "running", "warm", "end", "after"):
        print(f"{name:8} {locals()[name]}")  # noqa: T201
    # Each epoch has each sample once, and the last epoch is incomplete.
    assert counts.max() - counts.min() <= 1
    assert counts.max() == -(-taken // 3)
    assert end.memory - warm.memory < 30
    end.check_no_more_than(warm)
    after.check_no_more_than(before)
    assert max(sizes) - min(sizes) < 100


@pytest.mark.parametrize("as_numpy", (True, False))
def test_many_iterators_leak_nothing(jpegs, as_numpy):
    make = maker(jpegs, as_numpy=as_numpy)

    def use():
        with make() as iterator:
            held = [next(iterator) for _ in range(2)]
            iterator.set_state(iterator.get_state())
            iterator.peek()
            iterator.reset()
            next(iterator)
        return held

    for _ in range(5):
        use()
    gc.collect()
    before = Figures()
    gc.disable()  # close() itself must free the pipelines, not a garbage collection
    try:
        for _ in range(50 if FULL else 20):
            use()
        after = Figures()
    finally:
        gc.enable()
    gc.collect()  # Python's own garbage
    end = Figures()
    print(f"before {before}\nafter  {after}\nend    {end}")  # noqa: T201
    after.check_no_more_than(before)
    assert end.memory - before.memory < 30


def test_a_dropped_iterator_is_freed(jpegs):
    make = maker(jpegs)
    next(make())
    gc.collect()
    before = Figures()
    for _ in range(10):
        next(make())  # never closed
    gc.collect()
    after = Figures()
    after.check_no_more_than(before)
