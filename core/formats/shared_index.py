"""Reads and writes shared indexes. All users of a data set read the index next to its shards.

``python -m dalijax.sources index`` writes the index, which contains the stamp of each shard. A
shard that now has another stamp is indexed again. Sources read a shared index if their user has no
stored index of the files; see `dalijax.core.formats.cached_index`.

The file has the format of `dalijax.core.formats.index.save`: a magic number with the version, a
JSON object, arrays, and a digest. `dalijax.core.formats.file_columns.packed` compresses the arrays.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ..messages.printable import printable, printable_text
from ..remote.storage import Storage
from ..remote.versions import has_version, without_weakness
from ..threads.workers import call_each
from .atomic_file import atomic_file
from .byte_files import WAITING_THREADS, Stamp, is_remote, within
from .file_columns import FileColumns, Layout, concat_tables, of_files, packed, unpacked
from .file_kinds import pointer_fault
from .index import DamagedIndexError, Index, from_bytes, to_bytes
from .stamps import check_unchanged, settled_stamps

_log = logging.getLogger("dalijax")

_VERSION = "shared 3"
_NAMED = 3  # files named in a warning
LAYOUTS = {"tar": Layout(512, 512), "tfrecord": Layout(0, 1), "rlds": Layout(0, 1)}
_LEAST_BYTES = {"tar": 512, "tfrecord": 16, "rlds": 16}  # smallest size of a record in a file


@dataclasses.dataclass
class SharedIndex:
    """A shared index of the files in a folder.

    Attributes:
        path: The path or URL of the index.
        names: Names of the indexed files, which are in the folder of the index.
        stamps: The stamp of each file when it was indexed.
        table: The columns of the files.
    """

    path: str
    names: list[str]
    stamps: list[Stamp]
    table: FileColumns


def file_name(kind: str) -> str:
    """Returns the file name of shared indexes of a kind in `LAYOUTS`.

    The pattern ``*`` does not match the name, because the name begins with a dot.
    """
    return f".dalijax-{kind}.index"


def folder_of(path: str) -> str | None:
    """Returns the folder of a path or URL, with the final slash.

    Returns None for a URL that is chained or has a query, because it does not name a folder.
    """
    if is_remote(path) and ("::" in path or "?" in path):
        return None
    return path[: path.rfind("/") + 1]


def is_same(stored: Stamp, stamp: Stamp) -> bool:
    """Returns whether two stamps certainly belong to the same version of a file.

    Compares only the size and the ETag if the stamps differ, because obstore and fsspec may
    describe an ETag differently: with other names, as weak, or without quotes.
    """
    if stored == stamp:
        return has_version(stamp)
    tags = []
    for values in (stored, stamp):
        pairs = dict(pair for pair in values[1:] if isinstance(pair, list) and len(pair) == 2)
        tag = next((v for k, v in pairs.items() if k.replace("-", "").lower() == "etag"), None)
        tags.append(None if tag is None else without_weakness(tag).strip('"'))
    return tags[0] is not None and tags[0] == tags[1] and stored[0] == stamp[0]


def load(
    folder: str, kind: str, storage: Storage, names: Collection[str] | None = None
) -> SharedIndex | Exception | None:
    """Returns the shared index of a folder, if there is a usable index.

    Args:
        folder: The folder, with a slash.
        kind: A kind in `LAYOUTS`.
        storage: Access to remote files.
        names: Names of the wanted columns; None: all.

    Returns:
        The index; the error if the index can't be read; None if the folder has no index, or, after
        a warning, if the index is damaged or its owner is not trusted.
    """
    path = folder + file_name(kind)
    try:
        content = _content(path, folder, storage)
    except FileNotFoundError:
        return None
    except DamagedIndexError as error:
        _log.warning("the shared index %s is not used: %s", printable(path), error)
        return None
    except Exception as error:
        return error
    try:
        return _parsed(path, kind, content, names)
    except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        _log.warning(
            "the shared index %s can't be used: %s. Write it again: "
            "python -m dalijax.sources index, followed by the files",
            printable(path),
            printable_text(str(error)),
        )
        return None


def _content(path: str, folder: str, storage: Storage) -> bytes:
    """Returns the content of the file of a shared index.

    Args:
        path: The path or URL of the index.
        folder: The folder of the index.
        storage: Access to remote files.

    Raises:
        OSError: If the file can't be read.
        DamagedIndexError: If the file is local and must not be used; see `_local_content`.
    """
    if is_remote(path):
        return bytes(storage.contents([path], opens=True)[0])
    return _local_content(path, folder)


def _local_content(path: str, folder: str) -> bytes:
    """Returns the content of the local file of a shared index.

    Raises:
        OSError: If the file can't be read.
        DamagedIndexError: If it is not a regular file; or if its owner, who could change labels in
            it, is not this user, root or the owner of the folder.
    """
    # Does not block on a FIFO.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DamagedIndexError("it is not a regular file")
        if status.st_uid not in (os.geteuid(), 0, os.stat(folder).st_uid):
            raise DamagedIndexError(f"it belongs to user {status.st_uid}, unlike its folder")
        return file.read()


def _parsed(path: str, kind: str, content: bytes, names: Collection[str] | None) -> SharedIndex:
    """Returns the shared index in the content of its file.

    Args:
        path: The path or URL of the index.
        kind: A kind in `LAYOUTS`.
        content: The content.
        names: Names of the wanted columns; None: all.

    Raises:
        ValueError, TypeError, LookupError, OverflowError, MemoryError: If the content is damaged.
    """
    if fault := pointer_fault(content):
        raise DamagedIndexError(fault)
    index = from_bytes(content, printable(path))
    about = index.about
    if about.get("kind") != f"{_VERSION} {kind}":
        raise DamagedIndexError(f"it is of another version, {about.get('kind')!r:.60}")
    files, stamps, first = about["files"], about["stamps"], about["first"]
    if not len(files) == len(stamps) == len(first) - 1 or first[0] != 0:
        raise DamagedIndexError("its numbers of files differ")
    for name, stamp, begin, end in zip(files, stamps, first, first[1:]):
        most = int(stamp[0]) // _LEAST_BYTES[kind]
        if not isinstance(name, str) or not 0 <= end - begin <= most:
            raise DamagedIndexError(f"{name!r:.80} would have {end - begin:,} records")
    table = unpacked(about, index.arrays, LAYOUTS[kind], names)
    sizes = np.array([stamp[0] for stamp in stamps], np.int64)
    limits = np.repeat(sizes, np.diff(table.first_rows))
    for name, column in table.columns.items():
        if not within(column.offsets, column.sizes, limits).all():
            raise DamagedIndexError(f"a place of {name!r:.80} is not in its file")
    return SharedIndex(path, files, stamps, table)


def save(index: SharedIndex, kind: str, storage: Storage) -> int:
    """Writes a shared index to its path or URL; returns the size of the file in bytes.

    Raises:
        OSError: If the file can't be written.
    """
    about, arrays = packed(index.table, LAYOUTS[kind])
    about |= {"kind": f"{_VERSION} {kind}", "files": index.names, "stamps": index.stamps}
    content = to_bytes(Index(about, arrays))
    if is_remote(index.path):
        storage.write(index.path, content)
    else:
        with atomic_file(index.path) as file:
            file.write(content)
    return len(content)


def shared_columns(
    kind: str,
    paths: Sequence[str],
    stamps: Sequence[Stamp],
    names: Collection[str] | None,
    storage: Storage,
    scan: Callable[[Sequence[str]], FileColumns],
) -> FileColumns | None:
    """Returns the columns of files from the shared indexes of their folders, in the files' order.

    Files that are not in an index with their present stamp are read. Returns None if this is true
    of all files.

    Args:
        kind: A kind in `LAYOUTS`.
        paths: The files.
        stamps: The present stamps of the files.
        names: Names of the wanted columns; None: all.
        storage: Access to remote files.
        scan: Reads files, and returns their columns.
    """
    folders = [folder_of(path) for path in paths]
    indexes = _loaded(
        kind,
        [
            folder
            for folder, stamp in zip(folders, stamps, strict=True)
            if folder is not None and has_version(stamp)
        ],
        names,
        storage,
    )
    tables: list[FileColumns] = []
    row_of: dict[tuple[str, str], int] = {}  # number of each file in the joined tables
    stamp_of: dict[tuple[str, str], Stamp] = {}
    num_files = 0
    for folder, index in indexes.items():
        tables.append(index.table)
        for row, (name, stamp) in enumerate(zip(index.names, index.stamps, strict=True)):
            row_of[folder, name], stamp_of[folder, name] = num_files + row, stamp
        num_files += len(index.names)
    keys = [(folder or "", path[len(folder or "") :]) for folder, path in zip(folders, paths)]
    fits = [is_same(stamp_of.get(key, []), stamp) for key, stamp in zip(keys, stamps, strict=True)]
    others = [number for number, is_fit in enumerate(fits) if not is_fit]
    if any(key in row_of for key in keys) and others:
        _warn(paths, keys, stamps, others, row_of)
    if not any(fits):
        return None
    rows = [row_of.get(key, 0) for key in keys]
    if others:
        other_paths = [paths[number] for number in others]
        tables.append(scan(other_paths))
        check_unchanged(other_paths, [stamps[number] for number in others], storage)
        for turn, number in enumerate(others):
            rows[number] = num_files + turn
    return of_files(concat_tables(tables), np.array(rows, np.int64))


def _loaded(
    kind: str, folders: Sequence[str], names: Collection[str] | None, storage: Storage
) -> dict[str, SharedIndex]:
    """Returns the usable shared indexes of folders, by folder; warns about unusable indexes.

    Args:
        kind: A kind in `LAYOUTS`.
        folders: The folders, each with a slash; may be repeated.
        names: Names of the wanted columns; None: all.
        storage: Access to remote files.
    """
    wanted = list(dict.fromkeys(folders))
    if not wanted:
        return {}
    found = call_each(
        lambda folder: load(folder, kind, storage, names), wanted, WAITING_THREADS, "dalijax-index"
    )
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        _log.warning(
            "the shared index of %s of %s folders can't be read, so that the files are read "
            "instead. If there is no index, S3 may answer 403. %s",
            f"{len(errors):,}",
            f"{len(wanted):,}",
            printable_text(str(errors[0])),
        )
    return {
        folder: index
        for folder, index in zip(wanted, found, strict=True)
        if isinstance(index, SharedIndex)
    }


def _warn(
    paths: Sequence[str],
    keys: Sequence[tuple[str, str]],
    stamps: Sequence[Stamp],
    others: Sequence[int],
    row_of: dict[tuple[str, str], int],
) -> None:
    """Logs a warning that shared indexes lack the present versions of some files.

    Args:
        paths: The files.
        keys: The folder and the name of each file.
        stamps: The present stamp of each file.
        others: The numbers of the files that are indexed again.
        row_of: A dict whose keys are those of all files in the indexes.
    """
    unnamed = [number for number in others if not has_version(stamps[number])]
    changed = [number for number in others if keys[number] in row_of and number not in unnamed]
    reason = "changed since it was written" if changed else "is not in it"
    if unnamed and not changed:
        reason = "has neither an ETag nor an older date"
    named = (changed or unnamed or list(others))[:_NAMED]
    num_bytes = sum(stamps[number][0] for number in others)
    _log.warning(
        "the shared index does not fit %s of %s files, which are indexed again (%s bytes): %s %s. "
        "Write it again: python -m dalijax.sources index, followed by the files",
        f"{len(others):,}",
        f"{len(paths):,}",
        f"{num_bytes:,}",
        ", ".join(printable(paths[number]) for number in named),
        reason,
    )


def write_shared(
    kind: str,
    paths: Sequence[str],
    storage: Storage,
    scan: Callable[[Sequence[str]], FileColumns],
    output: str | None = None,
) -> list[tuple[SharedIndex, int]]:
    """Writes a shared index into each folder of some files; returns the indexes and their sizes.

    An existing index is extended: files that it contains with their present stamps are not read
    again, and files of the folder that are not in ``paths`` stay in it.

    Args:
        kind: A kind in `LAYOUTS`.
        paths: The files.
        storage: Access to remote files.
        scan: Reads files, and returns their columns.
        output: The path of a local file to write instead of an index in the folder. All files must
            then be in the same folder.

    Returns:
        For each folder, the index, and the size of its file in bytes.

    Raises:
        OSError: If a file can't be read, has no version, or changes while it is indexed.
        ValueError: If a file is damaged or has no folder, or ``output`` is given for files of
            several folders.
    """
    stamps = settled_stamps(paths, storage)
    groups: dict[str, dict[str, Stamp]] = {}
    for path, stamp in zip(paths, stamps, strict=True):
        folder = folder_of(path)
        if folder is None:
            raise ValueError(f"{printable(path)} has no folder for an index: it is chained")
        if not has_version(stamp):
            raise OSError(
                f"{printable(path)} has neither an ETag nor an older date, so that an index could "
                "not tell its versions apart. Use another server, or wait some seconds"
            )
        groups.setdefault(folder, {})[path[len(folder) :]] = stamp
    if output is not None and len(groups) > 1:
        raise ValueError(f"--output takes files of one folder, not of {len(groups):,}")
    written = []
    for folder, stamp_of in groups.items():
        old = load(folder, kind, storage)
        if isinstance(old, Exception):  # it may be valid, so that a new index must not replace it
            raise old
        entries: dict[str, tuple[Stamp, int]] = {}
        if old is not None:
            stored = zip(old.names, old.stamps, strict=True)
            entries = {name: (stamp, row) for row, (name, stamp) in enumerate(stored)}
        num_old = len(entries)
        fresh = [
            name
            for name, stamp in stamp_of.items()
            if name not in entries or not is_same(entries[name][0], stamp)
        ]
        tables = [] if old is None else [old.table]
        if fresh:
            tables.append(scan([folder + name for name in fresh]))
            check_unchanged(
                [folder + name for name in fresh], [stamp_of[name] for name in fresh], storage
            )
        for row, name in enumerate(fresh):
            entries[name] = (stamp_of[name], num_old + row)
        names = sorted(entries)
        rows = np.array([entries[name][1] for name in names], np.int64)
        table = of_files(concat_tables(tables), rows)
        path = folder + file_name(kind) if output is None else os.path.abspath(output)
        index = SharedIndex(path, names, [entries[name][0] for name in names], table)
        written.append((index, save(index, kind, storage)))
    return written
