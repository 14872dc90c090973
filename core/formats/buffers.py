"""Memory for bytes that are read, which is used again when no array refers to it.

The C library returns a buffer of some MB to the kernel when it is freed, and the kernel has to map
and clear its pages the next time.
"""

from __future__ import annotations

import collections

import numpy as np
from numpy.typing import NDArray

_Memory = NDArray[np.uint8]

_SMALLEST = 1 << 17  # bytes; the C library itself keeps smaller buffers
_MOST = 1 << 28  # bytes of unused memory in a process
# No lock, because a fork could copy it locked, and because any thread may free an array.
_unused: collections.deque[_Memory] = collections.deque()  # the last was used most recently


class _Loan:
    """The owner of the memory of an array, and of all arrays and tensors that are parts of it.

    They keep it alive, so that its memory is used again exactly when it would be freed otherwise.
    """

    def __init__(self, memory: _Memory, size: int):
        self.__array_interface__ = memory[:size].__array_interface__
        self._memory = memory

    # The defaults are there, because a module's names may be gone at exit.
    def __del__(self, unused: collections.deque[_Memory] = _unused, most: int = _MOST) -> None:
        unused.append(self._memory)
        try:
            while sum(memory.size for memory in list(unused)) > most:
                unused.popleft()
        except IndexError:  # another thread has dropped the last one
            pass


def new_buffer(size: int) -> NDArray[np.uint8]:
    """Returns uninitialized memory, uint8 [size], that no other array uses."""
    if size < _SMALLEST:
        return np.empty(size, np.uint8)
    return np.asarray(_Loan(_memory(size), size))


def _memory(size: int) -> _Memory:
    """Returns unused memory of at least some bytes, or new memory."""
    for _ in range(len(_unused)):
        try:
            memory = _unused.pop()
        except IndexError:  # other threads have taken all
            break
        if size <= memory.size <= 2 * size:
            return memory
        _unused.appendleft(memory)
    step = 1 << (size.bit_length() - 3)  # so that buffers of similar sizes can replace one another
    return np.empty(-(-size // step) * step, np.uint8)
