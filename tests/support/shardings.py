"""Shardings of a batch's rows over the first devices."""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def rows_over(*shape: int, turn: int = 1) -> NamedSharding:
    """Returns rows over the first axis of a mesh of the first devices; a second axis has replicas.

    Args:
        *shape: The mesh's shape.
        turn: 1, or -1 for reversed devices.
    """
    devices = np.array(jax.devices()[: math.prod(shape)][::turn]).reshape(shape)
    return NamedSharding(Mesh(devices, ("data", "model")[: len(shape)]), PartitionSpec("data"))
