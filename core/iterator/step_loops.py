"""Detects loops that count steps over an iterator of epochs: ``zip(range(steps), iterator)``.

Such a loop ends silently at the end of an epoch, although more steps were requested. It calls the
iterator in the same way as a loop over one epoch. Therefore the zip is searched among the objects
that refer to the iterator.
"""

from __future__ import annotations

import gc
import operator

from ..messages.user_warnings import warn_user

_RANGES = (type(iter(range(0))), type(iter(range(1 << 70))))


def steps_left(iterator: object) -> int:
    """Returns how many steps a zip with a range still requests from an ending iterator.

    The search takes as long as a garbage collection. Callers call it once for each iterator.

    Args:
        iterator: The iterator, whose ``__next__`` is running.

    Returns:
        The number of steps; 0 if the iterator is not in a zip with a range.
    """
    for items in gc.get_referrers(iterator):
        if type(items) is not tuple or not any(type(item) in _RANGES for item in items):
            continue
        if not any(type(owner) is zip for owner in gc.get_referrers(items)):
            continue
        own_place = next(place for place, item in enumerate(items) if item is iterator)
        remaining = [
            operator.length_hint(item) + (place < own_place)  # the range has returned this step
            for place, item in enumerate(items)
            if type(item) in _RANGES
        ]
        return min(remaining)
    return 0


def warn_of_early_end(name: str, epoch: int, remaining: int) -> None:
    """Warns that a loop of steps ended early, at the end of an epoch; see `steps_left`."""
    warn_user(
        f"zip(range(...), iterator) over an iterator of {name} stopped at the end of epoch "
        f"{epoch}, {remaining} steps early: even with auto_reset=True the end of an epoch raises "
        "StopIteration. For a loop that counts steps use a stream, iterator_fn.stream(...), which "
        "continues across epochs"
    )
