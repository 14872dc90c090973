"""The number of records of a Grain dataset, if it is known without reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

__all__: list[str] = []

_ENDLESS = 1 << 53  # Grain gives an endless repeat() the largest length
# Class names, because the classes are private. A dataset of these classes is endless if all its
# parents are.
_LENGTH_PRESERVING = (
    *("MapIterDataset", "RandomMapIterDataset", "MapWithIndexIterDataset", "FilterIterDataset"),
    *("PrefetchIterDataset", "ThreadPrefetchIterDataset", "ProcessPrefetchIterDataset"),
    *("InterleaveIterDataset", "MixedIterDataset", "ZipIterDataset", "BatchIterDataset"),
    *("WindowShuffleIterDataset", "RebatchIterDataset", "WithOptionsIterDataset"),
    *("_WithSeedIterDataset", "_MpContextIterDataset", "_LazyWorkerSliceIterDataset"),
)
# The length of these datasets counts positions that may have no record.
_WITH_HOLES = ("FilterMapDataset", "FlatMapMapDataset")


def parents_of(ds: Any) -> Sequence[Any]:
    """Returns the parents of a dataset.

    Grain hides the parents of an interleaving, and therefore the dataset before ``mp_prefetch``.
    """
    parents: Sequence[Any] = getattr(ds, "parents", ())
    hidden = getattr(ds, "_datasets", ())  # private in Grain: the parents of an interleaving
    if isinstance(hidden, grain.MapDataset):
        hidden = [hidden]
    return parents or (hidden if isinstance(hidden, (list, tuple)) else ())


def is_endless(ds: Any) -> bool:
    """Returns whether a dataset certainly has no end, as after ``repeat()``."""
    if isinstance(ds, grain.MapDataset):
        return len(ds) >= _ENDLESS
    kind, parents = type(ds).__name__, parents_of(ds)
    if kind == "RepeatIterDataset" and getattr(ds, "_num_epochs", 0) is None:
        return True
    return kind in _LENGTH_PRESERVING and bool(parents) and all(map(is_endless, parents))


def number_of_records(ds: grain.MapDataset | grain.IterDataset) -> int | None:
    """Returns the number of records of a dataset; None if it is unknown before reading.

    The number is 1 << 53 for an endless dataset, and an upper bound if a ``map`` returns None for
    some records.
    """
    if is_endless(ds):
        return _ENDLESS
    return len(ds) if isinstance(ds, grain.MapDataset) and not _has_holes(ds) else None


def _has_holes(ds: Any) -> bool:
    """Returns whether a dataset includes a filter."""
    return type(ds).__name__ in _WITH_HOLES or any(map(_has_holes, parents_of(ds)))
