"""`RecordGenerators`: NumPy's random generators for records, for `Source.random_map`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .hashing import Bits


class RecordGenerators:
    """Random generators of records, whose numbers depend only on a record's key and a place.

    The numbers are those of a new Philox whose key is the array [key, place] of uint64. All records
    have the same object, because a new Philox takes 14 us, since it reads random numbers of
    the operating system. Setting its state takes 2 us.

    Args:
        keys: The hash of the seed, the epoch and the record of each row, uint64 [rows].
        place: The number of random maps before this one, so that they draw different numbers.
    """

    def __init__(self, keys: Bits, place: int):
        self._keys, self._place = keys, place
        self._bits = np.random.Philox(key=0)
        self._state: Any = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def of_row(self, row: int) -> np.random.Generator:
        """Returns the generator of a row, at its start. It is valid until the next call."""
        self._state["state"]["key"][:] = self._keys[row], self._place
        self._bits.state = self._state
        return self._generator
