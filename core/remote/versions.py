"""Versions of remote files: their size, and an ETag or a date.

The stamp of a file is its version as lists: [size, [name, value], ...].
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

_RECENT = 5.0  # seconds; Last-Modified has a resolution of 1 s
# The name of a recent date in stamps. If the file changes within seconds, the date may stay equal.
_RECENT_DATE = "Last-Modified just now"


def is_settled(date: str, now: float) -> bool:
    """Returns whether a date is so old that a later change of the file has another date.

    Args:
        date: A date in ISO format.
        now: The time in seconds since 1970.
    """
    try:
        moment = datetime.datetime.fromisoformat(date)
    except ValueError:
        return False
    return abs(now - moment.timestamp()) >= _RECENT


def date_pair(date: str, now: float) -> list[str]:
    """Returns the entry [name, date] of a stamp; the name tells whether the date `is_settled`."""
    return ["Last-Modified", date] if is_settled(date, now) else unsettled_pair(date)


def unsettled_pair(date: str) -> list[str]:
    """Returns the stamp entry [name, value] of a value that may stay equal when a file changes."""
    return [_RECENT_DATE, date]


def has_version(stamp: list[Any]) -> bool:
    """Returns whether every later change of the file changes its stamp."""
    return len(stamp) > 1 and plain(stamp) == stamp


def plain(stamp: list[Any]) -> list[Any]:
    """Returns a stamp to compare with others: even a recent date is named "Last-Modified"."""
    is_recent = len(stamp) > 1 and isinstance(stamp[1], list) and stamp[1][0] == _RECENT_DATE
    return [stamp[0], ["Last-Modified", stamp[1][1]]] if is_recent else stamp


class Version(NamedTuple):  # created faster than a dataclass; a data set has thousands
    """The version of an object.

    Attributes:
        size: The size in bytes.
        etag: The ETag, if the server has one.
        date: The date of the last change in ISO format, if the server has no ETag.
    """

    size: int
    etag: str | None = None
    date: str | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Version:
        """Returns the version of an object from obstore's metadata."""
        date: datetime.datetime | None = meta.get("last_modified")
        if meta.get("e_tag"):
            return cls(meta["size"], str(meta["e_tag"]))
        has_date = date is not None and date.timestamp() > 0  # 1970 if the server has no date
        return cls(meta["size"], None, date.isoformat() if date and has_date else None)

    @classmethod
    def from_stamp(cls, stamp: list[Any]) -> Version:
        """Returns the version with a `stamp`; of the stamp [size], only the size is known."""
        names = dict(plain(stamp)[1:])
        return cls(stamp[0], names.get("ETag"), names.get("Last-Modified"))

    def stamp(self, now: float) -> list[Any]:
        """Returns the stamp: [size], [size, ["ETag", value]] or [size, `date_pair`].

        Args:
            now: The time in seconds since 1970.
        """
        if self.etag is not None:
            return [self.size, ["ETag", self.etag]]
        return [self.size] if self.date is None else [self.size, date_pair(self.date, now)]

    @property
    def match(self) -> str | None:
        """Returns the ETag for the header If-Match; None if it is missing, or weak.

        A weak ETag never matches.
        """
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def difference(self, other: Version) -> str:
        """Returns a description of how another version differs; "" if it is equal."""
        if self == other:
            return ""
        if self.size != other.size:
            return f"{self.size:,} -> {other.size:,} bytes"
        # Dates are compared only if an ETag is missing, because the servers of a site may have
        # different dates.
        dates = "Last-Modified", self.date, other.date
        for name, before, now in (("ETag", self.etag, other.etag), dates):
            if before is not None and now is not None:
                is_equal = without_weakness(before) == without_weakness(now)
                return "" if is_equal else f"{name} {before!r:.80} -> {now!r:.80}"
        return "" if self.etag is None else f"ETag {self.etag!r:.80} -> none"


def without_weakness(etag: Any) -> str:
    """Returns an ETag without the mark W/, which servers add to ETags of compressed responses."""
    return str(etag).removeprefix("W/")
