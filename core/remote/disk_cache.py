"""`DiskCache`: stores ranges of remote files in a local folder, for all epochs and runs.

Each version of a remote file has an object: a sparse local file with the stored ranges at their
offsets in the remote file, so that they are read like ranges of local files. Journals contain the
checksum of each stored range.

A stored range is used only if its bytes have this checksum. After a crash, a loss of power or
damage, the checksum differs, and the range is requested and stored again. Files therefore need
neither locks nor syncs, and processes may share a folder.

Ranges are never evicted. An epoch reads each range once, in random order, so evicting the least
recently used ranges would lower the hit rate.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..messages.log_once import warn_once
from ..messages.printable import printable
from ..order.shuffle import Indices
from ..random.hashing import fold
from .cache_folder import CacheFolder, Space, is_full, version_of
from .cache_users import register
from .journals import Bits, Journals
from .owned_files import OpenFile

_PAGE = 4096  # bytes; a range of a sparse file takes whole pages
_PAUSE = 300.0  # seconds without storing after a failure, which may be temporary


class DiskCache:
    """Finds and stores ranges of numbered remote files in a cache, for one process.

    Args:
        folder: The cache.
        names: The name of each file's object, see `object_name`; None for a file that is not
            cached.
    """

    def __init__(self, folder: CacheFolder, names: Sequence[str | None]):
        self._folder, self._names = folder, tuple(names)
        self._objects_folder = folder.objects
        versions = [0 if name is None else version_of(name) for name in names]
        self._objects = np.array(versions, np.uint64)
        self._is_named = np.array([name is not None for name in names], bool)
        self._journals = Journals(self._folder.journals, np.unique(self._objects[self._is_named]))
        self._space = Space(self._folder)
        self._user = register(folder, [name for name in self._names if name])
        self._have_objects = np.zeros(len(self._names), bool)  # objects that are known to exist
        self._refuted = np.empty(0, np.uint64)  # hashes of damaged ranges
        self._resumes = 0.0  # the time.monotonic() when ranges are stored again

    @property
    def stores(self) -> bool:
        """Returns whether ranges are stored; False for some minutes after a failure."""
        return time.monotonic() >= self._resumes

    def path(self, number: int) -> str:
        """Returns the path of the local file with the stored ranges of a remote file."""
        return f"{self._objects_folder}/{self._names[number]}"

    def find(self, files: Indices, offsets: Indices, sizes: Indices) -> Indices:
        """Returns the indices of the given ranges that are stored and undamaged.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            sizes: The size of each range in bytes.
        """
        rows = np.flatnonzero(self._is_named[files] & (sizes > 0))
        found = self._journals.have(self._objects[files[rows]], offsets[rows], sizes[rows])
        rows = rows[found]
        unseen = ~self._have_objects[files[rows]]
        if unseen.any():  # the journals may have entries of objects that were removed
            for number in np.unique(files[rows[unseen]]).tolist():
                self._have_objects[number] = os.path.exists(self.path(number))
            rows = rows[self._have_objects[files[rows]]]
        if len(self._refuted):
            hashes = self._hashes(files[rows], offsets[rows], sizes[rows])
            rows = rows[~np.isin(hashes, self._refuted)]
        return rows

    def _hashes(self, files: Indices, offsets: Indices, sizes: Indices) -> Bits:
        """Returns hashes that identify the ranges, uint64 [ranges]."""
        return fold(self._objects[files], offsets, sizes)

    def are_right(
        self,
        files: Indices,
        offsets: Indices,
        arrays: Sequence[NDArray[np.uint8]],
        counts: Indices,
    ) -> NDArray[np.bool_]:
        """Returns whether each range was read completely and has the stored checksum.

        If ranges are damaged, a warning is logged, and `find` omits these ranges until they are
        stored again.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            arrays: For each range, an array of its size, uint8, with the bytes that were read.
            counts: The number of bytes that were read of each range.

        Returns:
            bool [ranges].
        """
        sizes = np.array([array.size for array in arrays], np.int64)
        are_right = self._journals.agree(self._objects[files], offsets, sizes, _checksums(arrays))
        are_right &= counts == sizes
        if not are_right.all():
            hashes = self._hashes(files[~are_right], offsets[~are_right], sizes[~are_right])
            self._refuted = np.union1d(self._refuted, hashes)
            warn_once(
                f"ranges of the cache {printable(self._folder.path)} are damaged or missing. They "
                "are read remotely, and stored again"
            )
        return are_right

    def store(self, files: Indices, offsets: Indices, arrays: Sequence[NDArray[np.uint8]]) -> None:
        """Stores as many of the ranges as the cache has space for.

        If the space is used up, or storing fails, a warning is logged, and no ranges are stored for
        some minutes.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            arrays: The bytes of each range, as a uint8 array.
        """
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
                sums = _checksums([arrays[row] for row in rows.tolist()])
                self._journals.append(self._objects[files[rows]], offsets[rows], sizes[rows], sums)
                if len(self._refuted):
                    stored = self._hashes(files[rows], offsets[rows], sizes[rows])
                    self._refuted = np.setdiff1d(self._refuted, stored)
        except OSError as error:
            path = printable(self._folder.path)
            if is_full(error):
                self._stop(
                    f"the disk of the cache {path} is full, so that the other ranges are read "
                    "remotely in each epoch"
                )
            else:
                self._stop(
                    f"nothing is added to the cache {path} for some minutes: "
                    f"{error.strerror or error}. Other ranges are read remotely"
                )

    def _stop(self, message: str) -> None:
        """Logs a warning, and stops storing ranges for some minutes."""
        self._resumes = time.monotonic() + _PAUSE
        warn_once(message)

    def _write(
        self,
        rows: Indices,
        files: Indices,
        offsets: Indices,
        arrays: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Writes the ranges with the indices ``rows`` into the files of their objects."""
        order = rows[np.argsort(files[rows], kind="stable")]
        number, file = -1, None
        for row in order.tolist():
            if files[row] != number or file is None:
                number = int(files[row])
                file = _writable(self.path(number))
            data, offset = memoryview(arrays[row]), int(offsets[row])
            while data:
                count = os.pwrite(file.fd, data, offset)
                data, offset = data[count:], offset + count


def _checksums(arrays: Sequence[NDArray[np.uint8]]) -> Bits:
    """Returns the checksum of each array, XXH3 of 64 bits, as uint64 [arrays].

    A checksum detects damage, such as flipped bits, zeros, and bytes from another place. It does
    not detect forgery. Journals contain checksums, so a new algorithm requires a new `MARK`.
    """
    from xxhash import xxh3_64_intdigest  # not needed for local files

    return np.fromiter(map(xxh3_64_intdigest, arrays), np.uint64, len(arrays))


def _writable(path: str) -> OpenFile:
    """Opens the file of an object for writing.

    Replaces links, special files such as FIFOs, and files that their owner, this user, can't read.

    Raises:
        OSError: If the file can't be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        is_unreadable = status.st_uid == os.geteuid() and not os.access(path, os.R_OK)
        if is_unreadable or not stat.S_ISREG(status.st_mode):
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return OpenFile(os.open(path, flags, 0o666))
