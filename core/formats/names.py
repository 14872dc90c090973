"""Memory-efficient lists of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Names:
    """A sequence of names in one bytes object; a million str objects would take 100 MB.

    Args:
        groups: Pairs of a prefix and names, all bytes. The prefix is prepended to each name.

    Attributes:
        data: All names with their prefixes, concatenated.
        ends: End offset of each name in ``data``, int64 [names].
    """

    def __init__(self, groups: Iterable[tuple[bytes, Sequence[bytes]]]):
        pieces, lengths = [], []
        for prefix, names in groups:
            if names:
                pieces.append(prefix + prefix.join(names))
                lengths.append(np.fromiter(map(len, names), np.int64, len(names)) + len(prefix))
        self.data = b"".join(pieces)
        self.ends = np.cumsum(np.concatenate(lengths)) if lengths else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.ends[index - 1] if index else 0 : self.ends[index]]
