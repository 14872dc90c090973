"""Plans listings of a bucket, from which the versions of many objects are read.

A page of a listing has up to 1,000 objects, so that it replaces up to 1,000 requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, AnyStr

from .versions import Version

PAGE = 1000  # objects
KINDS = frozenset(("s3", "gs", "az"))  # stores that list their objects
SORTED = frozenset(("s3", "gs"))  # stores that list objects in the order of their keys
_HAS_OFFSETS = frozenset(("s3",))  # stores whose listings begin after a key at no cost
_SPARE_PAGES = 2


@dataclasses.dataclass(frozen=True)
class Listing:
    """A planned listing of a bucket, to read the versions of some of its objects.

    Attributes:
        keys: The keys of the objects whose versions are wanted.
        prefix: The folder of the objects; None: the whole bucket.
        offset: Keys up to this key are not listed; None: all keys are listed.
        last: The listing may end after this key; None: the store does not sort its listings.
        most_pages: The listing ends after this number of pages, because the folder then has far
            more objects than are wanted.
    """

    keys: frozenset[str]
    prefix: str | None
    offset: str | None
    last: str | None
    most_pages: int


def listings_of(kind: str, keys: Collection[str]) -> list[Listing]:
    """Returns the listings that have to be requested to read the versions of some objects.

    If a store can begin a listing at any key, there is a listing for each 1,000 objects, so that
    the listings can be requested concurrently.

    Args:
        kind: The kind of the store.
        keys: The keys of the objects.

    Returns:
        The listings; empty for a single object, or if the store can't list its objects.
    """
    if kind not in KINDS or len(keys) < 2:
        return []
    ordered = sorted(keys)
    start = ordered[0][: common_start(ordered[0], ordered[-1])]
    prefix = start[: start.rfind("/") + 1] or None
    offset = start if kind in SORTED and start and start != prefix else None
    size = PAGE if kind in _HAS_OFFSETS else len(ordered)
    return [
        Listing(
            keys=frozenset(part := ordered[first : first + size]),
            prefix=prefix,
            offset=ordered[first - 1] if first else offset,
            last=part[-1] if kind in SORTED else None,
            most_pages=2 * -(-len(part) // PAGE) + _SPARE_PAGES,
        )
        for first in range(0, len(ordered), size)
    ]


def common_start(first: AnyStr, second: AnyStr) -> int:
    """Returns the length of the longest common prefix of two texts."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def versions_of_page(
    page: Sequence[Mapping[str, Any]], keys: Collection[str] | None = None
) -> dict[str, Version]:
    """Returns the versions of the wanted objects on a page of a listing, by key.

    Args:
        page: obstore's metadata of each object on the page.
        keys: The keys of the wanted objects; None: all objects are wanted.
    """
    return {
        entry["path"]: _version(entry) for entry in page if keys is None or entry["path"] in keys
    }


def _version(entry: Mapping[str, Any]) -> Version:
    tag = entry.get("e_tag")
    if tag and not tag.endswith('"'):  # Azure's listing has ETags without quotes
        entry = {**entry, "e_tag": f'"{tag}"'}
    return Version.of(entry)
