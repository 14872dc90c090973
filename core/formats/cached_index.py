"""Indexes of files, which are stored until a file changes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..messages.printable import printable
from ..remote.storage import Storage
from .byte_files import ByteFiles, Stamp, is_remote, stamps_of
from .index import Index, load_or_build
from .spread import spread

_log = logging.getLogger("dalijax")

_MOST_RECORDS = 64  # in the digest of the content
_TICK = 20_000_000  # nanoseconds; file timestamps of a kernel have a resolution of up to 10 ms


def cached_index(
    folder: str | None,
    kind: str,
    paths: Sequence[str],
    fields: Any,
    build: Callable[[], Index],
    is_valid: Callable[[Index], bool],
    storage: Storage,
) -> Index:
    """Loads the stored index of files, or builds and stores it.

    An index belongs to files with the same paths, sizes, times and inodes (or ETags). Files that
    were copied, moved or changed are indexed again, since no other check is both cheap and certain.

    Args:
        folder: Directory of stored indexes; None: the default.
        kind: The kind of index, with a version number.
        paths: The files, as `path_list` returns them.
        fields: Everything else that the index depends on; its repr is part of the key.
        build: Builds the index.
        is_valid: Checks the content of a loaded index.
        storage: Access to remote files.

    Raises:
        OSError: If a file can't be read, or changes while it is indexed.
    """
    stamps = _stamps(paths, storage)
    if None in stamps:
        _log.warning(
            "%s has neither an ETag nor an older date, so that it is indexed each time",
            printable(paths[stamps.index(None)]),
        )
    about = [kind, repr(fields), *paths, repr(stamps)]
    digest = hashlib.sha256("\0".join(about).encode(errors="surrogateescape"))
    key = None if None in stamps else digest.hexdigest()[:32]

    def stamped() -> Index:
        index = build()
        samples = _samples_digest(paths, index, storage)
        for path, before, after in zip(paths, stamps, _stamps(paths, storage)):
            if before is not None and before != after:
                raise OSError(
                    f"{printable(path)} changed while it was indexed. Create the source when the "
                    "file is complete"
                )
        about = {**index.about, "stamps": stamps, "samples": samples}
        return Index(about, index.arrays)

    return load_or_build(
        folder, key, stamped, lambda index: index.about.get("stamps") == stamps and is_valid(index)
    )


def _samples_digest(paths: Sequence[str], index: Index, storage: Storage) -> str:
    """Computes a digest of the bytes of 64 records, to detect later changes of the content."""
    arrays, first = index.arrays, index.about["first"]
    digest = hashlib.blake2b(digest_size=16)
    records = spread(first[-1], _MOST_RECORDS)
    numbers = np.searchsorted(first, records, side="right") - 1
    files = ByteFiles(paths, index.about["sizes"], storage=storage)
    for name in sorted(arrays):
        if name.endswith(".offset"):
            sizes = arrays[name.removesuffix("offset") + "size"][records]
            pieces = files.read(
                numbers, arrays[name][records], sizes, lambda row: f"record {records[row]}"
            )
            for piece in pieces:
                digest.update(b"%d " % len(piece) + piece.tobytes())
    return digest.hexdigest()


def _stamps(paths: Sequence[str], storage: Storage) -> list[Stamp | None]:
    """Returns stamps of files; later changes of a file change its stamp."""
    if any(map(is_remote, paths)):
        return stamps_of(paths, storage)
    stamps = list(map(_local_stamp, paths))
    age = time.time_ns() - max(max(stamp[1:3]) for stamp in stamps)
    if 0 <= age < _TICK:  # wait, as a change within the same tick would not change the timestamp
        time.sleep((_TICK - age) / 1e9)
    return list(stamps)


def _local_stamp(path: str) -> Any:
    if not os.path.isfile(path):
        if os.path.isdir(path):
            raise IsADirectoryError(
                f"{printable(path)} is a directory. Pass its files, e.g. "
                f"{printable(os.path.join(path, '*'))}"
            )
        raise FileNotFoundError(
            f"{printable(path)} {'is not a file' if os.path.exists(path) else 'does not exist'}"
        )
    return stamps_of([path], Storage())[0]
