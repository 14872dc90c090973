"""Graphs over Python sources of batches of two numbers."""

import numpy as np
from nvidia.dali import fn, types


def ends_after(batches):
    """Defines a graph whose source raises StopIteration and has no state."""
    return lambda: fn.external_source(
        iter(np.arange(2 * batches, dtype=np.int32).reshape(-1, 2, 1))
    )


def fails_at(iterations):
    """Defines a graph of endless batches whose source raises at some iterations.

    Args:
        iterations: The iterations that raise. Each is removed when it fails, so that it
            succeeds the next time.
    """

    def source(info):
        if info.iteration in iterations:
            iterations.remove(info.iteration)
            raise OSError("for now")
        return np.full((2, 1), info.iteration, np.int32)

    def graph():
        return fn.external_source(source, batch_info=True, dtype=types.INT32), fn.random.uniform()

    return graph
