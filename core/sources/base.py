"""What the sources of this package share: identities, and the sizes of pictures."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .identity import identity_of
from .order import Indices
from .picture_size import file_picture_size, picture_size
from .source import Field, Values

_UNKNOWN = -1


class BaseSource:
    """A source whose identity is a digest, and whose pictures' sizes are looked up once.

    Args:
        fields: The names and kinds of the fields.
        identity: The identity, where the user says it.
    """

    def __init__(self, fields: Mapping[str, Field], identity: str | None):
        if identity is not None and not isinstance(identity, str):
            raise TypeError(f"identity must be text, not {identity!r}")
        self.fields = fields
        self._identity = identity
        # By field, int32 [records, 2], 0 where nobody looked; threads may write a size twice.
        self._sizes: dict[str, NDArray[np.int32]] = {}

    def bind(self, *args: Any) -> Any:
        """What an iterator over it is made of; see `dalijax.core.sources.binding.bind`."""
        from .binding import bind

        return bind(self, *args)

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: Indices, names: Any) -> Mapping[str, Values]:
        """See `dalijax.sources.Source`."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """See `dalijax.sources.Source`."""
        raise NotImplementedError

    def identity(self) -> str:
        """See `dalijax.sources.Source`."""
        if self._identity is None:
            self._identity = identity_of(self, *self._content())
        return self._identity

    def _content(self) -> tuple[Any, ...]:
        """What the records depend on beside the values of some: names, sizes, labels."""
        return ()

    def sizes(self, indices: Indices, name: str, data: Values) -> NDArray[np.int32]:
        """See `dalijax.sources.Source`; a picture's header is looked at once in a process."""
        table = self._sizes.get(name)
        if table is None:
            table = self._sizes.setdefault(name, _zeros(len(self)))
        size_of = _of_path if self.fields[name].is_path else picture_size
        for row in np.flatnonzero(table[indices, 0] == 0).tolist():
            table[indices[row]] = size_of(data[row]) or (_UNKNOWN, _UNKNOWN)
        return table[indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sizes": {}}


def _zeros(count: int) -> NDArray[np.int32]:
    """A table of shape [count, 2], of which the small pages that are written take memory alone."""
    pages = mmap.mmap(-1, count * 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32).reshape(count, 2)


def _of_path(path: NDArray[np.uint8]) -> tuple[int, int] | None:
    try:
        return file_picture_size(path.tobytes())
    except OSError:  # whoever reads the file says it
        return None
