"""Many names in little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class Names:
    """Names by number, in one buffer: a million str objects would take 100 MB.

    Args:
        names: The names, as bytes.

    Attributes:
        joined: All names, one behind the other.
        ends: Where each ends, int64.
    """

    def __init__(self, names: Iterable[bytes]):
        lengths: list[int] = []

        def counted() -> Iterator[bytes]:
            for name in names:
                lengths.append(len(name))
                yield name

        self.joined = b"".join(counted())
        self.ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        return self.joined[self.ends[index - 1] if index else 0 : self.ends[index]]
