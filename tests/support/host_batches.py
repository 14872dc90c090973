"""Batches as NumPy arrays, and meshes, for tests of sources that plan their batches."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def on_devices(count):
    """Returns the argument ``sharding`` for a mesh of some devices; no argument for 0."""
    if not count:
        return {}
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    return {"sharding": NamedSharding(mesh, PartitionSpec("data"))}


def on_host(batch):
    return {name: np.asarray(array) for name, array in batch.items()}


def epochs_of(loop, count=2):
    """Returns the batches of some epochs."""
    return [on_host(batch) for _ in range(count) for batch in loop]


def equal(first, second):
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)
