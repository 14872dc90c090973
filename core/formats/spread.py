"""Chooses evenly spread numbers, such as those of the records in a digest."""

from __future__ import annotations

import numpy as np

from ..order.shuffle import Indices


def spread(count: int, most: int) -> Indices:
    """Returns ``min(count, most)`` evenly spread integers from 0 to ``count - 1``, int64."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.int64) * (count - 1) // max(1, chosen - 1)
