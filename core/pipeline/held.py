"""What functions of a graph gave DALI on a GPU, held until DALI has read it.

DALI drops a DLPack tensor as soon as what reads it waits in its stream, and the library whose it is
gives the memory to the next array that somebody makes.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from nvidia.dali import Pipeline

_holders: weakref.WeakKeyDictionary[Pipeline, list[deque[Any]]] = weakref.WeakKeyDictionary()


def holder(pipeline: Pipeline, most: int | None = None) -> deque[Any]:
    """A place for what a function of a pipeline returns.

    Args:
        pipeline: The one that is being defined.
        most: Number of things that it holds, the last ones; None: any number.
    """
    made: deque[Any] = deque(maxlen=most)
    _holders.setdefault(pipeline, []).append(made)
    return made


def release(pipeline: Pipeline) -> None:
    """Frees what is held for a pipeline that delivers nothing more, which is in cycles itself."""
    for own in _holders.pop(pipeline, ()):
        own.clear()
