"""The number of records of a Grain dataset, if it is known before they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

__all__: list[str] = []

_ENDLESS = 1 << 53  # Grain gives repeat() without an end the largest length
# Names of datasets, since they are not public. These have no end if all their parents have none.
_AS_LONG = (
    *("MapIterDataset", "RandomMapIterDataset", "MapWithIndexIterDataset", "FilterIterDataset"),
    *("PrefetchIterDataset", "ThreadPrefetchIterDataset", "ProcessPrefetchIterDataset"),
    *("InterleaveIterDataset", "MixedIterDataset", "ZipIterDataset", "BatchIterDataset"),
    *("WindowShuffleIterDataset", "RebatchIterDataset", "WithOptionsIterDataset"),
    *("_WithSeedIterDataset", "_MpContextIterDataset", "_LazyWorkerSliceIterDataset"),
)
# The length of these counts places, some of which may hold no record.
_WITH_HOLES = ("FilterMapDataset", "FlatMapMapDataset")


def parents_of(ds: Any) -> Sequence[Any]:
    """The datasets that a dataset is made of.

    Grain hides those of an interleaving, and so the dataset before ``mp_prefetch``.
    """
    parents: Sequence[Any] = getattr(ds, "parents", ())
    hidden = getattr(ds, "_datasets", ())  # not public
    if isinstance(hidden, grain.MapDataset):
        hidden = [hidden]
    return parents or (hidden if isinstance(hidden, (list, tuple)) else ())


def is_endless(ds: Any) -> bool:
    """Whether a dataset certainly has no end, as after ``repeat()``."""
    if isinstance(ds, grain.MapDataset):
        return len(ds) >= _ENDLESS
    kind, parents = type(ds).__name__, parents_of(ds)
    if kind == "RepeatIterDataset" and getattr(ds, "_num_epochs", 0) is None:
        return True
    return kind in _AS_LONG and bool(parents) and all(map(is_endless, parents))


def number_of_records(ds: grain.MapDataset | grain.IterDataset) -> int | None:
    """The number of records of a dataset; None if only reading tells.

    A ``map`` that returns None makes it smaller.
    """
    if is_endless(ds):
        return _ENDLESS
    known = isinstance(ds, grain.MapDataset) and not _has_holes(ds)
    return len(ds) if known else None


def _has_holes(ds: Any) -> bool:
    """Whether a filter is among the transformations of a dataset."""
    return type(ds).__name__ in _WITH_HOLES or any(map(_has_holes, parents_of(ds)))
