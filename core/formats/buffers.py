"""Allocates buffers for bytes of files, and reuses their memory when no array refers to it.

The C library would return a freed buffer of some MB to the kernel, which would have to map and
clear the pages of the next buffer.
"""

from __future__ import annotations

import collections

import numpy as np
from numpy.typing import NDArray

_Memory = NDArray[np.uint8]

_SMALLEST = 1 << 17  # bytes; the C library itself keeps smaller buffers
_MOST = 1 << 28  # bytes; the largest amount of unused memory that a process keeps
# No lock, because a fork could copy it locked, and because any thread may free an array.
_unused: collections.deque[_Memory] = collections.deque()  # the last was used most recently


class _Loan:
    """The owner of the memory of a buffer.

    The buffer, and all arrays and tensors that share its memory, keep this object alive. So the
    memory is reused only after all of them were freed.

    Args:
        memory: The memory.
        size: Size of the buffer in bytes, which may be less than that of the memory.
    """

    def __init__(self, memory: _Memory, size: int):
        self.__array_interface__ = memory[:size].__array_interface__
        self._memory = memory

    # The defaults are needed, because the names of a module may be deleted at exit.
    def __del__(self, unused: collections.deque[_Memory] = _unused, most: int = _MOST) -> None:
        unused.append(self._memory)
        try:
            while sum(memory.size for memory in list(unused)) > most:
                unused.popleft()
        except IndexError:  # another thread has removed the last item
            pass


def new_buffer(size: int) -> NDArray[np.uint8]:
    """Returns an uninitialized array of ``size`` bytes, uint8, whose memory no other array uses."""
    if size < _SMALLEST:
        return np.empty(size, np.uint8)
    return np.asarray(_Loan(_memory(size), size))


def _memory(size: int) -> _Memory:
    """Returns at least ``size`` bytes of memory: unused memory of a similar size, or new memory."""
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
