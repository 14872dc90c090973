"""Packs records in Grain's worker processes, if shared memory has room for the batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...core.messages.log_once import warn_once
from .packed_records import PackedRecords, packed

__all__ = ["PackedRecords", "pack_records"]

_FOLDER = "/dev/shm"  # shared memory in Linux
_BATCHES = 32  # assumed number of batches in shared memory, e.g. two for each of sixteen workers


def pack_records(records: Sequence[Any]) -> PackedRecords | list[Any]:
    """Returns the records of a batch in packed form, which shared memory can transfer.

    Write ``ds.batch(B, batch_fn=pack_records)`` before ``mp_prefetch``. Grain then transfers the
    records in shared memory instead of pickling the records through a pipe. If shared memory is so
    small that writing to it might kill the process (Docker's default is 64 MB), the records are
    returned as a list.

    Args:
        records: Bytes, text, numbers, arrays, or (nested) dicts of these. Other values are pickled.
    """
    batch = packed(records)
    if isinstance(batch.data, bytes) or has_room(batch.data.nbytes, _free()):
        return batch
    warn_once(
        f"{_FOLDER} is too small to transfer batches, so they are pickled, which is slower. Give "
        "the container more shared memory, e.g. by docker run --shm-size=8g"
    )
    return list(records)


def unpacked(element: Any) -> Any:
    """Returns the list of the records in a `PackedRecords`; returns other elements unchanged."""
    return element.records() if isinstance(element, PackedRecords) else element


def has_room(size: int, free: int) -> bool:
    """Returns whether ``free`` bytes are enough for 32 batches of ``size`` bytes each."""
    return free >= _BATCHES * size


def _free() -> int:
    try:
        memory = os.statvfs(_FOLDER)
    except OSError:
        return 0
    return memory.f_bavail * memory.f_frsize
