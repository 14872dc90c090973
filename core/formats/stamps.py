"""Reads stamps of files (see `byte_files.Stamp`) that change with every later change of a file."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..messages.printable import printable
from ..remote.storage import Storage
from ..remote.versions import plain
from .byte_files import Stamp, is_remote, local_stamp, stamps_of

_OF_TFDS = re.compile(r".+-(\w+)\.tfrecord-\d+-of-\d+")
_MOST_NAMES = 10_000  # files of a folder that are considered for a suggestion
_TICK = 20_000_000  # nanoseconds; file timestamps of a kernel have a resolution of up to 10 ms


def settled_stamps(paths: Sequence[str], storage: Storage) -> list[Stamp]:
    """Returns the stamps of files; waits up to 20 ms if a local file was changed just before.

    Every later change of a file changes its stamp, unless a server reports no version.

    Raises:
        OSError: If a file can't be found.
    """
    if any(map(is_remote, paths)):
        return stamps_of(paths, storage)
    stamps = list(map(_local_stamp, paths))
    _settle(max(max(stamp[1:3]) for stamp in stamps))
    return stamps


def check_unchanged(paths: Sequence[str], stamps: Sequence[Stamp], storage: Storage) -> None:
    """Raises OSError if a file was changed while it was indexed.

    Args:
        paths: The files.
        stamps: The stamps of the files before they were indexed.
        storage: Access to remote files.
    """
    for path, before, after in zip(paths, stamps, settled_stamps(paths, storage), strict=True):
        if plain(before) != plain(after)[: len(before)]:
            raise OSError(
                f"{printable(path)} changed while it was indexed. Create the source when the file "
                "is complete"
            )


def digest_of_stamps(paths: Iterable[str]) -> str:
    """Returns a digest of the stamps of local files, which may be missing.

    Waits up to 20 ms if a file was changed just before; see `settled_stamps`.
    """
    digest = hashlib.sha256()
    newest = 0
    for path in paths:
        stamp: Stamp = []
        with contextlib.suppress(OSError, ValueError):
            stamp = local_stamp(os.stat(path))
            newest = max(newest, *stamp[1:3])
        digest.update(repr(stamp).encode())
    _settle(newest)
    return digest.hexdigest()


def _settle(newest: int) -> None:
    """Waits until a later change of files has another time.

    Args:
        newest: The newest time of the files, in nanoseconds since 1970.
    """
    age = time.time_ns() - newest
    if 0 <= age < _TICK:  # a change within the same tick would not change the timestamp
        time.sleep((_TICK - age) / 1e9)


def _pattern(folder: str) -> str:
    """Returns a pattern that matches the data files in a folder, to suggest it in an error.

    TFDS stores features.json, and files such as ``robot-train.tfrecord-00000-of-00009``, in a
    subfolder for each version.
    """
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder)[:_MOST_NAMES] if name[0] != ".")
        splits = [match[1] for name in names if (match := _OF_TFDS.fullmatch(name))]
        if splits:
            split = "train" if "train" in splits else splits[0]
            return os.path.join(folder, f"*-{split}.tfrecord*")
        kinds = collections.Counter(os.path.splitext(name)[1] for name in names)
        for kind in (".tar", ".tfrecord", ".parquet"):
            if kinds[kind]:
                return os.path.join(folder, f"*{kind}")
        for name in reversed(names):
            if os.path.exists(os.path.join(folder, name, "features.json")):
                return _pattern(os.path.join(folder, name))
    return os.path.join(folder, "*")


def _local_stamp(path: str) -> Any:
    """Returns the stamp of a regular file; raises OSError for other paths, with the remedy."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{printable(path)} does not exist") from None
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(
                f"{printable(path)} is a directory. Pass its files, e.g. "
                f"{printable(_pattern(path))}"
            )
        raise FileNotFoundError(f"{printable(path)} is not a file")
    return local_stamp(status)
