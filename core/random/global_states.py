"""Detects calls that draw from the global random generators of NumPy or Python."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np

_REPETITIONS = 2


def drawn_by(call: Callable[[], object]) -> set[str]:
    """Returns the names of the global generators from which a call draws.

    If the states of generators differ after the call, it is repeated twice. It is a false alarm if
    another thread draws during all three calls.

    Args:
        call: The call; errors that it raises are not handled.
    """
    drawn = changed_by(call)
    for _ in range(_REPETITIONS):
        if drawn:
            drawn &= changed_by(call)
    return drawn


def changed_by(call: Callable[[], object]) -> set[str]:
    """Returns the names of the global generators whose states change during a call."""
    before = _states()
    call()
    after = _states()
    return {name for name, state in before.items() if state != after[name]}


def _states() -> dict[str, object]:
    # Bytes, since `==` can't compare tuples with arrays.
    return {
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }
