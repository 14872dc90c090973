"""Indexes of records: where they lie in their files, kept on disk and mapped into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .identity import spread

_log = logging.getLogger("dalijax")

_MAGIC = b"dalijax index 1\n"
_ALIGNMENT = 64
_DIGEST = 32  # bytes, at the end
_WHOLE = 1 << 28  # bytes up to which the digest is of all of them
_BLOCK, _BLOCKS = 1 << 16, 64  # of larger ones

Arrays = Mapping[str, NDArray[Any]]


class Index:
    """Arrays by name with one row for each record, and what JSON has to say about them.

    Attributes:
        about: Of JSON's types.
        arrays: The arrays, read-only where they are mapped.
    """

    def __init__(self, about: Mapping[str, Any], arrays: Arrays, path: str | None = None):
        self.about = about
        self.arrays = arrays
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None and os.path.exists(self._path):
            return _load_again, (self._path,)  # as mapped arrays, not their content
        return Index, (self.about, {k: np.array(v) for k, v in self.arrays.items()})


def _load_again(path: str) -> Index:
    """The index of a source that was pickled."""
    try:
        return load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}, the index of a source that was pickled, is not there any more: open the "
            "source anew where it is used, or keep indexes in a folder that stays, by cache_dir="
        ) from error


class DamagedIndexError(ValueError):
    """A file that is no index, or is not as it was written."""


def save(path: str, index: Index) -> None:
    """Writes an index to a file that is there whole or not at all.

    Raises:
        OSError: If it can't be written.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=folder, prefix=".part-")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            shapes = {name: (a.dtype.str, a.shape) for name, a in index.arrays.items()}
            write_head(file, index.about, shapes)
            for array in index.arrays.values():
                file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
                file.write(bytes(-file.tell() % _ALIGNMENT))
            seal(file)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_head(file: BinaryIO, about: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Writes what goes before the arrays, which begin at multiples of 64 bytes."""
    head = json.dumps({"about": about, "arrays": shapes}).encode()
    file.write(_MAGIC + len(head).to_bytes(8, "little") + head)
    file.write(bytes(-file.tell() % _ALIGNMENT))


def seal(file: BinaryIO) -> None:
    """Writes the digest behind the arrays."""
    file.flush()
    size = file.seek(0, os.SEEK_END)
    file.write(_digest(file, size))


def _digest(file: BinaryIO, size: int) -> bytes:
    """The digest of a file's first bytes: of all, or of evenly spread blocks of very many."""
    digest = hashlib.blake2b(b"%d" % size, digest_size=_DIGEST)
    step = min(size, _BLOCK)
    starts = range(0, size, _BLOCK) if size <= _WHOLE else spread(size - step + 1, _BLOCKS).tolist()
    for start in starts:
        digest.update(os.pread(file.fileno(), min(_BLOCK, size - start), start))
    return digest.digest()


def load(path: str) -> Index:
    """An index that was saved, mapped into memory.

    Raises:
        OSError: If it can't be read.
        DamagedIndexError: If it is not as it was written. Of more than 256 MB evenly spread parts
            are looked at.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - _DIGEST
        head = file.read(len(_MAGIC) + 8)
        if size < len(head) or not head.startswith(_MAGIC):
            raise DamagedIndexError(f"{path} is no index of this version")
        if _digest(file, size) != os.pread(file.fileno(), _DIGEST, size):
            raise DamagedIndexError(f"{path} is not as it was written")
        length = int.from_bytes(head[-8:], "little")
        parts = json.loads(file.read(length))
        pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)  # what is read ahead would fill the memory
    mapped = np.frombuffer(pages, np.uint8)
    at = len(head) + length
    arrays = {}
    for name, (dtype, shape) in parts["arrays"].items():
        at += -at % _ALIGNMENT
        stop = at + int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = mapped[at:stop].view(dtype).reshape(shape)
        at = stop
    return Index(parts["about"], arrays, path)


def kept(
    folder: str | None, key: str, build: Callable[[], Index], fits: Callable[[Index], bool]
) -> Index:
    """An index from the cache, or a new one that is kept there.

    Args:
        folder: The cache's folder; None: ``dalijax`` in XDG_CACHE_HOME or ~/.cache.
        key: A digest of what the index is of.
        build: Makes it.
        fits: Whether an index of the cache agrees with the files; else it is made again.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(folder or os.path.join(cache, "dalijax"), f"{key}.index")
    try:
        index = load(path)
        if fits(index):
            return index
        _log.warning("%s is not of these files: it is made again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("the kept index can't be used (%s): it is made again", error)
    index = build()
    try:
        save(path, index)
        return load(path)
    except OSError as error:
        _log.warning("the index can't be kept (%s): the next time it is made again", error)
        return index
