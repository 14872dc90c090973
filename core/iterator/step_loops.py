"""Detects loops that count steps over an iterator of epochs: ``zip(range(steps), iterator)``.

Such a loop ends without an error when an epoch ends, although it asked for more steps. The
iterator can't tell it from a loop over one epoch by its calls; the zip, which refers to it, can.
"""

from __future__ import annotations

import gc
import operator
import warnings

_RANGES = (type(iter(range(0))), type(iter(range(1 << 70))))


def steps_left(iterator: object) -> int:
    """The number of steps that a zip with a range still asks an iterator for, as it ends.

    It takes as long as a garbage collection, so it is called once for an iterator.

    Args:
        iterator: The iterator, within its ``__next__``.

    Returns:
        The number of steps; 0 if the iterator is not in a zip with a range.
    """
    for items in gc.get_referrers(iterator):
        if type(items) is not tuple or not any(type(item) in _RANGES for item in items):
            continue
        if not any(type(owner) is zip for owner in gc.get_referrers(items)):
            continue
        own = next(place for place, item in enumerate(items) if item is iterator)
        left = [
            operator.length_hint(item) + (place < own)  # it has given the number of this step
            for place, item in enumerate(items)
            if type(item) in _RANGES
        ]
        return min(left)
    return 0


def warn_of_early_end(name: str, epoch: int, left: int) -> None:
    """Warns of a loop that an epoch ended, and after which the iterator was not used again."""
    warnings.warn(
        f"zip(range(...), iterator) over an iterator of {name} stopped at the end of epoch "
        f"{epoch}, {left} steps early: also with auto_reset=True the end of an epoch raises "
        "StopIteration. For a loop that counts steps use a stream, iterator_fn.stream(...), which "
        "goes from epoch to epoch",
        RuntimeWarning,
        stacklevel=2,
    )
