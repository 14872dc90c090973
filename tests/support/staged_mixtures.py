"""Mixtures whose weights change: their order in Python's integers, sources and streams."""

import itertools
import math

import numpy as np
from python_numbers import folded, listed_order, splitmix

from dalijax import data_iterator
from dalijax.sources import Arrays, Mixture

SIZES = (50, 37, 23)
FIRSTS = (0, 50, 87)  # numbers of the sources' first records
SEED = 5
TOTAL = 1680
WEIGHTS = (3, [(0, 1), (401, 4), (1003, 0)], [(401, 2)])


def stages_of(weights):
    """Returns pairs of a start and the numbers of samples in a period, for integer weights."""
    schedules = [weight if isinstance(weight, list) else [(0, weight)] for weight in weights]
    stages = []
    for start in sorted({0, *(first for pairs in schedules for first, _ in pairs)}):
        values = [([0] + [w for first, w in pairs if first <= start])[-1] for pairs in schedules]
        divisor = math.gcd(*values)
        if not divisor:
            raise ValueError("all weights are 0")
        counts = [value // divisor for value in values]
        if not stages or stages[-1][1] != counts:
            stages.append((start, counts))
    return stages


def reference(sizes, weights, total, shuffle=True, seed=SEED):
    """Returns the records, their sources and their epochs, one sample after the other."""
    stages = stages_of(weights)
    taken = [0] * len(sizes)
    starts = [0, *itertools.accumulate(sizes)]
    orders, samples = {}, []
    for (start, counts), (end, _) in itertools.zip_longest(
        stages, stages[1:], fillvalue=(total, 0)
    ):
        slots = [k for k, count in enumerate(counts) for _ in range(count)]
        for period in range(-(-max(0, min(end, total) - start) // len(slots))):
            key = folded(seed, start, period) if start else folded(seed, period)
            order = sorted(range(len(slots)), key=lambda n: splitmix(key ^ splitmix(n)))
            for slot in order[: min(end, total) - start - period * len(slots)]:
                k = slots[slot]
                epoch, position = divmod(taken[k], sizes[k])
                if shuffle:
                    if (k, epoch) not in orders:
                        orders[k, epoch] = listed_order(sizes[k], folded(seed, k), epoch)
                    position = orders[k, epoch][position]
                taken[k] += 1
                samples.append((starts[k] + position, k, epoch))
    return np.array(samples, np.int64).reshape(-1, 3).T


def parts():
    """Returns sources whose values are the numbers of their records in a mixture of all."""
    return [
        Arrays({"x": np.arange(size, dtype=np.int32) + first}) for size, first in zip(SIZES, FIRSTS)
    ]


def stream(mixture, batch_size=24, **kwargs):
    """Returns a stream of the records' numbers."""
    make = data_iterator(lambda x: {"x": x}, source=mixture)
    return make.stream(None, batch_size=batch_size, num_threads=1, **kwargs)


def taken(iterator, batches):
    """Returns the next records' numbers, of batches that this process holds completely."""
    return np.concatenate([np.asarray(next(iterator)["x"]).ravel() for _ in range(batches)])


def mixed(*weights):
    """Returns a mixture of all parts."""
    return Mixture([*zip(parts(), weights)])


def saved(mixture, batches, batch_size=24, **kwargs):
    """Returns the state after some batches."""
    iterator = stream(mixture, batch_size, seed=SEED, **kwargs)
    taken(iterator, batches)
    state = iterator.get_state()
    iterator.close()
    return state


def restored(mixture, state, batch_size=24, allow=()):
    """Returns a stream at the position of a state."""
    iterator = stream(mixture, batch_size)
    iterator.set_state(state, allow=allow)
    return iterator
