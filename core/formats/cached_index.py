"""Loads the stored indexes of files, which are built again if a file changes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..messages.printable import printable
from ..remote.storage import Storage
from ..remote.versions import has_version
from .byte_files import ByteFiles, Stamp, is_remote
from .index import Index, load_or_build
from .paths import Path, home_expanded, path_text
from .progress import report_remote
from .spread import spread
from .stamps import check_unchanged, settled_stamps

_log = logging.getLogger("dalijax")

_MOST_RECORDS = 64  # records whose bytes are in the digest of the content


def cached_index(
    cache_dir: Path | None,
    kind: str,
    paths: Sequence[str],
    fields: Any,
    build: Callable[[], Index],
    is_valid: Callable[[Index], bool],
    storage: Storage,
    shared: Callable[[Sequence[Stamp]], Index | None] | None = None,
) -> Index:
    """Returns the stored index of files, or builds and stores it.

    A stored index is used for files with the same paths, sizes, times and inodes (or ETags). Files
    that were copied, moved or changed are indexed again, since no other check is both cheap and
    certain.

    Args:
        cache_dir: Directory of stored indexes; None: the default.
        kind: The kind of index, with a version number.
        paths: The files, as `path_list` returns them.
        fields: Everything else that the index depends on; its repr is part of the key.
        build: Reads the files and returns the index.
        is_valid: Returns whether the content of a loaded index is valid.
        storage: Access to remote files.
        shared: Returns the index without a scan of the files, e.g. from shared indexes, given the
            stamps of the files; returns None if there is no shared index. ``shared=None``: the
            kind of files has no shared indexes.

    Raises:
        OSError: If a file can't be read, or changes while it is indexed.
    """
    folder = None if cache_dir is None else home_expanded(path_text(cache_dir))
    stamps = settled_stamps(paths, storage)
    unnamed = [path for path, stamp in zip(paths, stamps, strict=True) if not has_version(stamp)]
    if unnamed:
        _log.warning(
            "%s has neither an ETag nor an older date, so that it is indexed each time",
            printable(unnamed[0]),
        )
    about = [kind, repr(fields), *paths, repr(stamps)]
    digest = hashlib.sha256("\0".join(about).encode(errors="surrogateescape"))
    key = None if unnamed else digest.hexdigest()[:32]

    def stamped() -> Index:
        """Returns the index from shared indexes, or builds it; see `_stamped`."""
        index = shared(stamps) if shared else None
        if index is not None:
            if is_valid(Index({**index.about, "stamps": stamps, "samples": ""}, index.arrays)):
                return _stamped(paths, stamps, index, storage)
            _log.warning("the shared index is damaged, so that the files are indexed again")
        if any(map(is_remote, paths)):
            num_bytes = sum(int(stamp[0]) for stamp in stamps)
            report_remote(paths, num_bytes, shared is not None)
        index = _stamped(paths, stamps, build(), storage)
        check_unchanged(paths, stamps, storage)
        return index

    return load_or_build(
        folder, key, stamped, lambda index: index.about.get("stamps") == stamps and is_valid(index)
    )


def _stamped(
    paths: Sequence[str], stamps: Sequence[Stamp], index: Index, storage: Storage
) -> Index:
    """Returns a copy of an index, with the files' stamps and a digest of records in ``about``."""
    samples = _samples_digest(paths, index, storage)
    return Index({**index.about, "stamps": stamps, "samples": samples}, index.arrays)


def _samples_digest(paths: Sequence[str], index: Index, storage: Storage) -> str:
    """Returns a digest of the bytes of at most 64 records, to detect later changes of the files."""
    arrays, first = index.arrays, index.about["first"]
    digest = hashlib.blake2b(digest_size=16)
    records = spread(first[-1], _MOST_RECORDS)
    numbers = np.searchsorted(first, records, side="right") - 1
    files = ByteFiles(paths, index.about["sizes"], storage=storage)
    for name in sorted(arrays):
        if name.endswith(".offset"):
            sizes = arrays[name.removesuffix("offset") + "size"][records].astype(np.int64)
            pieces = files.read(
                numbers, arrays[name][records], sizes, lambda row: f"record {records[row]}"
            )
            for piece in pieces:
                digest.update(b"%d " % len(piece) + piece.tobytes())
    return digest.hexdigest()
