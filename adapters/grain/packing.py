"""Batches of records from Grain's worker processes, in shared memory if they fit."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

from .packed_records import PackedRecords, packed

__all__ = ["PackedRecords", "pack_records"]

_FOLDER = "/dev/shm"  # where Linux has shared memory
_BATCHES = 32  # under way at once: two of each of sixteen workers, say


def pack_records(records: Sequence[Any]) -> PackedRecords | list[Any]:
    """Packs the records of a batch: ``ds.batch(B, batch_fn=pack_records)`` before ``mp_prefetch``.

    Grain then hands them over in shared memory instead of pickled through a pipe. They stay a list
    if shared memory is so small that writing to it might end the process (64 MB in a container by
    default).

    Args:
        records: Bytes, text, numbers, arrays, or (nested) dicts of these; others stay as they
            are.
    """
    batch = packed(records)
    if isinstance(batch.data, bytes) or has_room(batch.data.nbytes, _free()):
        return batch
    _say_once()
    return list(records)


def unpacked(element: Any) -> Any:
    """Packed records as a list; anything else as it is."""
    return element.records() if isinstance(element, PackedRecords) else element


def has_room(size: int, free: int) -> bool:
    """Whether shared memory with so many free bytes has room for batches of a size."""
    return free >= _BATCHES * size


def _free() -> int:
    try:
        memory = os.statvfs(_FOLDER)
    except OSError:
        return 0
    return memory.f_bavail * memory.f_frsize


@functools.cache
def _say_once() -> None:
    logging.getLogger("dalijax").warning(
        "%s is too small for batches to be handed over in it, so that they are pickled, which is "
        "slower: give a container more, e.g. by docker run --shm-size=8g",
        _FOLDER,
    )
