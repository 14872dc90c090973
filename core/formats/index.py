"""Stores indexes of records on disk, and maps their arrays into memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable, printable_text
from .atomic_file import atomic_file
from .spread import spread

_log = logging.getLogger("dalijax")

_MAGIC = b"dalijax index 2\n"
_ALIGNMENT = 64
_DIGEST = 32  # bytes of the digest at the end of a file
_WHOLE = 1 << 28  # bytes; the digest of a larger file covers only evenly spread blocks
_BLOCK, _BLOCKS = 1 << 16, 64
_DTYPE = re.compile(r"[<|][iuf][1248]|\|b1")
_NAME = re.compile(r"[0-9a-f]{32}\.index")
_DAY = 86_400.0  # seconds
_UNUSED_DAYS = 90  # age at which unused indexes are removed

Arrays = Mapping[str, NDArray[Any]]


class Index:
    """The index of the records of files: named arrays, and a JSON object about the files.

    Args:
        about: A JSON object; see `dalijax.core.formats.index_checks`.
        arrays: The arrays, most of which have a row for each record.
        path: The file from which the arrays are mapped into memory, if there is one.

    Attributes:
        about: As above.
        arrays: The arrays; read-only if they are mapped.
    """

    def __init__(self, about: Mapping[str, Any], arrays: Arrays, path: str | None = None):
        self.about = about
        self.arrays = arrays
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None and os.path.exists(self._path):
            return _load_again, (self._path,)  # pickles the path, not the content
        return Index, (self.about, {k: np.array(v) for k, v in self.arrays.items()})


def _load_again(path: str) -> Index:
    """Returns the index of a pickled source, loaded from the index file.

    Raises:
        FileNotFoundError: If the file does not exist any more.
    """
    try:
        return load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{printable(path)}, the index of a pickled source, does not exist any more. Create "
            "the source where it is used, or store indexes in a permanent directory by cache_dir="
        ) from error


class DamagedIndexError(ValueError):
    """Error about a file that is not an index, or was changed after it was written."""


def save(path: str, index: Index) -> None:
    """Writes an index to a file, atomically; creates the directory if it does not exist.

    Raises:
        OSError: If the file can't be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with atomic_file(path) as file:
        _write(file, index)
        seal(file)


def to_bytes(index: Index) -> bytes:
    """Returns the bytes of the file that `save` writes for an index."""
    file = io.BytesIO()
    _write(file, index)
    content = file.getvalue()
    return content + _digest(_reader(content), len(content))


def from_bytes(content: bytes, shown: str) -> Index:
    """Returns the index in the content of a file that `save` has written.

    Args:
        content: The content.
        shown: The name of the file, for errors.

    Raises:
        DamagedIndexError: If the content is damaged.
    """
    about, layout = _checked_head(_reader(content), len(content) - _DIGEST, shown)
    return Index(about, _views(np.frombuffer(content, np.uint8), layout))


def _write(file: BinaryIO, index: Index) -> None:
    """Writes the header and the arrays of an index, without the digest."""
    shapes = {name: (a.dtype.str, a.shape) for name, a in index.arrays.items()}
    write_head(file, index.about, shapes)
    for array in index.arrays.values():
        file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        file.write(bytes(-file.tell() % _ALIGNMENT))


def write_head(file: BinaryIO, about: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Writes the header of an index, up to the first array, which begins at a multiple of 64 bytes.

    Args:
        file: The file.
        about: The JSON object of the index.
        shapes: The dtype, such as "<i8", and the shape of each array.
    """
    head = json.dumps({"about": about, "arrays": shapes}).encode()
    file.write(_MAGIC + len(head).to_bytes(8, "little") + head)
    file.write(bytes(-file.tell() % _ALIGNMENT))


def seal(file: BinaryIO) -> None:
    """Appends a digest of the content of a file to the file; `load` verifies the digest."""
    file.flush()
    size = file.seek(0, os.SEEK_END)
    file.write(_digest(functools.partial(os.pread, file.fileno()), size))


def _reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda count, at: content[at : at + count]


def _digest(read: Callable[[int, int], bytes], size: int) -> bytes:
    """Returns a digest of the start of a file; above 256 MiB, of 64 evenly spread blocks of it.

    Args:
        read: ``read(count, offset)`` returns bytes of the file.
        size: Number of bytes to digest.
    """
    digest = hashlib.blake2b(b"%d" % size, digest_size=_DIGEST)
    step = min(size, _BLOCK)
    starts = range(0, size, _BLOCK) if size <= _WHOLE else spread(size - step + 1, _BLOCKS).tolist()
    for start in starts:
        digest.update(read(min(_BLOCK, size - start), start))
    return digest.digest()


def load(path: str, is_new: bool = False) -> Index:
    """Returns a stored index, whose arrays are mapped into memory.

    Args:
        path: The path of the file.
        is_new: Whether this process has just written the file, so that its digest is not checked.

    Raises:
        OSError: If the file can't be read.
        DamagedIndexError: If the file is damaged, a link, or not a regular file. For a file above
            256 MiB, the digest covers only 64 evenly spread blocks.
    """
    # Does not follow links, and does not block on a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if os.path.islink(path):
        raise DamagedIndexError(f"{printable(path)} is a link")
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size - _DIGEST
        if not stat.S_ISREG(status.st_mode):
            raise DamagedIndexError(f"{printable(path)} is not a regular file")
        read = functools.partial(os.pread, file.fileno())
        about, layout = _checked_head(read, size, printable(path), is_new)
        pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)  # readahead would fill the memory
    return Index(about, _views(np.frombuffer(pages, np.uint8), layout), path)


# Start and end offset, dtype and shape of each array in a file.
_Layout = dict[str, tuple[int, int, np.dtype[Any], list[int]]]


def _checked_head(
    read: Callable[[int, int], bytes], size: int, shown: str, is_new: bool = False
) -> tuple[dict[str, Any], _Layout]:
    """Returns the JSON object of an index and the layout of its arrays; see `_parsed`.

    Args:
        read: ``read(count, offset)`` returns bytes of the file.
        size: Total size of the header and the arrays in bytes.
        shown: The name of the file, for errors.
        is_new: Whether the digest is not checked.

    Raises:
        DamagedIndexError: If the content is damaged.
    """
    start = len(_MAGIC) + 8
    head = read(start, 0)
    if size < start or not head.startswith(_MAGIC):
        raise DamagedIndexError(f"{shown} is not an index of this version")
    if not is_new and _digest(read, size) != read(_DIGEST, size):
        raise DamagedIndexError(f"{shown} is damaged: its digest differs")
    length = int.from_bytes(head[-8:], "little")
    text = read(min(length, size), start)
    try:
        return _parsed(text, start + length, size)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedIndexError(f"{shown} is damaged: {printable_text(str(error))}") from error


def _views(content: NDArray[np.uint8], layout: _Layout) -> dict[str, NDArray[Any]]:
    """Returns the arrays in the content of a file, by name, as views."""
    return {
        name: content[start:stop].view(dtype).reshape(shape)
        for name, (start, stop, dtype, shape) in layout.items()
    }


def _parsed(text: bytes, at: int, size: int) -> tuple[dict[str, Any], _Layout]:
    """Returns the JSON object of an index and the layout of its arrays, given the header.

    Args:
        text: The header.
        at: Offset of the end of the header.
        size: Total size of the header and the arrays in bytes.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: If the header is damaged.
    """
    parts = json.loads(text)
    about, shapes = parts["about"], parts["arrays"]
    if not isinstance(about, dict) or not isinstance(shapes, dict):
        raise ValueError("its header is not an object")
    layout: _Layout = {}
    for name, (dtype, shape) in shapes.items():
        sizes_fit = all(type(length) is int and 0 <= length <= size for length in shape)
        if not _DTYPE.fullmatch(dtype) or not sizes_fit:
            raise ValueError(f"its array {name!r} has dtype {dtype!r:.40} and shape {shape!r:.80}")
        at += -at % _ALIGNMENT
        stop = at + math.prod(shape) * np.dtype(dtype).itemsize
        if stop > size:
            raise ValueError(f"its array {name!r} exceeds the file")
        layout[name] = at, stop, np.dtype(dtype), shape
        at = stop
    return about, layout


def load_or_build(
    folder: str | None, key: str | None, build: Callable[[], Index], fits: Callable[[Index], bool]
) -> Index:
    """Returns a stored index, or builds and stores it.

    Args:
        folder: The directory; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        key: A digest of the files and of the index's settings, which names the stored file; None:
            the index is not stored.
        build: Reads the files and returns the index.
        fits: Returns whether a loaded index belongs to the files; if not, the index is rebuilt.
    """
    cache = folder or _default_folder()
    if key is None or (folder is None and not _is_own(cache)):
        return build()
    path = os.path.join(cache, f"{key}.index")
    replace = False
    try:
        index = load(path)
        if fits(index):
            _note_use(path)
            return index
        replace = True
        _log.warning("%s belongs to other files and is rebuilt", printable(path))
    except DamagedIndexError as error:
        replace = True
        _log.warning("the stored index can't be used and is rebuilt. %s", error)
    except OSError:
        pass  # writing or reading the new index reports the error
    index = build()
    try:
        # Another process may have stored the index: one file is mapped by all of them.
        is_new = replace or not os.path.lexists(path)
        if is_new:
            save(path, index)
        _remove_unused(cache)
        return load(path, is_new)
    except (OSError, DamagedIndexError) as error:
        _log.warning(
            "the index can't be stored, so that it is rebuilt each time. Pass cache_dir=, a "
            "directory that you can read and write. %s",
            printable_text(str(error)),
        )
        return index


def _default_folder() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "dalijax")


@functools.lru_cache(maxsize=64)  # one warning for each folder
def _is_own(folder: str) -> bool:
    """Returns whether only trusted users can write to the default directory, which may be in /tmp.

    Trusted users are this user, root and the owner of the parent directory. Logs a warning if other
    users can write to the directory.
    """
    try:
        status, above = os.stat(folder), os.stat(os.path.dirname(folder)).st_uid
    except OSError:  # the directory is created later, which reports errors
        return True
    if status.st_mode & stat.S_IWOTH:
        owner = "can be written by all users"
    # The owner of the parent is accepted: in a container, a mounted home may have another owner.
    elif status.st_uid not in (os.geteuid(), 0, above):
        owner = f"belongs to user {status.st_uid}"
    else:
        return True
    _log.warning(
        "%s %s, who could change labels in it, so that indexes are not stored. Set XDG_CACHE_HOME "
        "to your own directory, or pass cache_dir=",
        printable(folder),
        owner,
    )
    return False


def _note_use(path: str) -> None:
    """Updates the mtime of an index file at most once a day, so that `_remove_unused` keeps it."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > _DAY:
            os.utime(path)


def _remove_unused(folder: str) -> None:
    """Removes the index files of a directory that were not loaded for 90 days."""
    oldest = time.time() - _UNUSED_DAYS * _DAY
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
