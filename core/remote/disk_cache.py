"""`DiskCache`: a local folder that keeps ranges of remote files, for all epochs and runs.

Each version of an object has a sparse file with its ranges, at their own offsets, so that they are
read like ranges of local files. Journals contain the checksum of each stored range.

A stored range is used only if its bytes have this checksum. This is the only guarantee that a read
needs: after a crash, a loss of power or damage, the checksum differs, and the range is requested
and stored again. So files need neither locks nor syncs, and processes may share a folder.

Ranges are never evicted. An epoch is a permutation, in which the least recently used ranges are the
next to be used. So an LRU cache that is too small would have no hits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages.printable import printable
from ..order.shuffle import Indices
from .cache_folder import CacheFolder, Space, is_full, version_of, warn_once
from .cache_users import register
from .journals import Bits, Journals
from .owned_files import OwnedFile

_PAGE = 4096  # bytes; a range of a sparse file takes whole pages


class DiskCache:
    """Ranges of numbered files in the folder of a cache.

    Args:
        folder: The folder.
        names: The name of each file's object; None if it is not cached. See `object_name`.

    Attributes:
        stores: Whether ranges are stored; False after the first failure.
    """

    def __init__(self, folder: CacheFolder, names: Sequence[str | None]):
        self._folder, self._names = folder, tuple(names)
        self._objects_folder = folder.objects
        versions = [0 if name is None else version_of(name) for name in names]
        self._objects = np.array(versions, np.uint64)
        self._is_named = np.array([name is not None for name in names], bool)
        self._begin()
        self._process = 0  # so that the first call registers the objects

    def __reduce__(self) -> Any:
        return DiskCache, (self._folder, self._names)

    def _begin(self) -> None:
        """Begins the use of the folder in this process."""
        self._process = os.getpid()
        self._journals = Journals(self._folder.journals, np.unique(self._objects[self._is_named]))
        self._space = Space(self._folder)
        self._user: OwnedFile | None = None
        self.stores = True

    def _check_process(self) -> None:
        """Begins the use of the folder in each process."""
        if self._process != os.getpid():
            self._begin()
            self._user = register(self._folder, [name for name in self._names if name])

    def path(self, number: int) -> str:
        """Returns the path of the object of a file."""
        return f"{self._objects_folder}/{self._names[number]}"

    def find(self, files: Indices, offsets: Indices, sizes: Indices) -> Indices:
        """Returns the rows of the ranges that were stored.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            sizes: The size of each range.
        """
        self._check_process()
        rows = np.flatnonzero(self._is_named[files] & (sizes > 0))
        found = self._journals.have(self._objects[files[rows]], offsets[rows], sizes[rows])
        return rows[found]

    def are_right(
        self, files: Indices, offsets: Indices, sizes: Indices, checksums: Bits
    ) -> NDArray[np.bool_]:
        """Returns which ranges had the given checksums when they were stored. Warns of others.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            sizes: The size of each range.
            checksums: The checksums of the bytes that were read.
        """
        are_right = self._journals.agree(self._objects[files], offsets, sizes, checksums)
        if not are_right.all():
            warn_once(
                f"ranges of the cache {printable(self._folder.path)} are damaged or missing. They "
                "are read remotely, and stored again"
            )
        return are_right

    def store(
        self,
        files: Indices,
        offsets: Indices,
        arrays: Sequence[NDArray[np.uint8]],
        checksums: Bits,
    ) -> None:
        """Stores ranges, while there is space. Failures are reported once, by a warning.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            arrays: The bytes of each range.
            checksums: Their checksums.
        """
        self._check_process()
        if not self.stores:
            return
        sizes = np.array([array.size for array in arrays], np.int64)
        rows = np.flatnonzero(self._is_named[files] & (sizes > 0))
        taken = np.cumsum((sizes[rows] + 2 * (_PAGE - 1)) // _PAGE * _PAGE)
        try:
            room = self._space.room(int(taken[-1])) if len(rows) else 0
            num_fitting = int(np.searchsorted(taken, room, side="right"))
            if num_fitting < len(rows):
                self._stop(
                    f"the cache {printable(self._folder.path)} is full, so that the other ranges "
                    "are read remotely in each epoch. Raise cache_bytes= if its disk is larger"
                )
            rows = rows[:num_fitting]
            if len(rows):
                self._space.take(int(taken[num_fitting - 1]))
                self._write(rows, files, offsets, arrays)
                self._journals.append(
                    self._objects[files[rows]], offsets[rows], sizes[rows], checksums[rows]
                )
        except OSError as error:
            path = printable(self._folder.path)
            if is_full(error):
                self._stop(
                    f"the disk of the cache {path} is full, so that the other ranges are read "
                    "remotely in each epoch"
                )
            else:
                self._stop(
                    f"nothing is added to the cache {path}: {error.strerror or error}. Other "
                    "ranges are read remotely in each epoch"
                )

    def _stop(self, message: str) -> None:
        self.stores = False
        warn_once(message)

    def _write(
        self,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        arrays: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Writes ranges into the files of their objects."""
        order = rows[np.argsort(files[rows], kind="stable")]
        number, file = -1, None
        for row in order.tolist():
            if files[row] != number or file is None:
                number = int(files[row])
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                file = OwnedFile(os.open(self.path(number), flags, 0o666))
            data, offset = memoryview(arrays[row]), int(offsets[row])
            while data:
                count = os.pwrite(file.fd, data, offset)
                data, offset = data[count:], offset + count
