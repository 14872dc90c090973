"""Computes the number of records of a Grain dataset, if it is known without reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

__all__: list[str] = []

_ENDLESS = 1 << 53  # longer datasets count as endless; Grain gives repeat() a length of sys.maxsize
# Names of Grain's classes, because the classes are private. A dataset of one of these classes is
# endless if all its parents are endless.
_LENGTH_PRESERVING = (
    *("MapIterDataset", "RandomMapIterDataset", "MapWithIndexIterDataset", "FilterIterDataset"),
    *("PrefetchIterDataset", "ThreadPrefetchIterDataset", "ProcessPrefetchIterDataset"),
    *("InterleaveIterDataset", "MixedIterDataset", "ZipIterDataset", "BatchIterDataset"),
    *("WindowShuffleIterDataset", "RebatchIterDataset", "WithOptionsIterDataset"),
    *("_WithSeedIterDataset", "_MpContextIterDataset", "_LazyWorkerSliceIterDataset"),
)
# Names of the classes whose length includes positions that may have no record.
_WITH_HOLES = ("FilterMapDataset", "FlatMapMapDataset")


def parents_of(ds: Any) -> Sequence[Any]:
    """Returns the parents of a dataset, including parents that Grain does not list.

    Grain does not list the parents of an interleaving, such as the dataset before ``mp_prefetch``.
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
    """Returns the number of records of a dataset; None if the number is unknown before reading.

    The number is 1 << 53 for an endless dataset. It is an upper bound if a ``map`` returns None for
    some records.
    """
    if is_endless(ds):
        return _ENDLESS
    return len(ds) if isinstance(ds, grain.MapDataset) and not _has_holes(ds) else None


def _has_holes(ds: Any) -> bool:
    """Returns whether a dataset, or one of its parents, may have positions without a record."""
    return type(ds).__name__ in _WITH_HOLES or any(map(_has_holes, parents_of(ds)))
