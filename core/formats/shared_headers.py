"""`SharedHeaders`: results about images that have the same header, such as frames of a camera."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 256  # results that are kept
_MOST_LENGTHS = 4  # lengths of headers, each of which a lookup tries
_LONGEST = 4096  # bytes; longer headers have thumbnails, which differ


class SharedHeaders(Generic[T]):
    """A cache of results that depend only on the header of an image.

    Looking up a header takes a tenth of the time of parsing it. Images of a camera differ only in
    their pixels. A header must contain a mark of its end. Otherwise, it could be the start of a
    longer header of another image.
    """

    def __init__(self) -> None:
        # No lock, because a fork could copy it locked: a race costs at most an entry.
        self._results: dict[tuple[bytes, Hashable], T] = {}
        self._lengths: tuple[int, ...] = ()  # the last was added most recently

    def get(self, image: memoryview, use: Hashable) -> T | None:
        """Returns the result for an image; None if its header is unknown.

        Args:
            image: The encoded image, as bytes.
            use: Whatever the result depends on in addition to the header.
        """
        for length in self._lengths:
            result = self._results.get((bytes(image[:length]), use))
            if result is not None:
                return result
        return None

    def put(self, header: memoryview, use: Hashable, result: T) -> None:
        """Stores the result for images with a header, unless the header is long.

        Drops the other results if there are too many. `get` describes ``use``.
        """
        length = len(header)
        if length > _LONGEST:
            return
        if length not in self._lengths:
            self._lengths = (*self._lengths, length)[-_MOST_LENGTHS:]
        if len(self._results) >= _MOST:
            self._results.clear()  # dropping only the oldest could fail in two threads
        self._results[bytes(header), use] = result
