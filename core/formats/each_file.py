"""Reads the headers of many files in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..remote.storage import Storage
from ..threads.workers import call_each
from .buffered_reader import BufferedReader
from .byte_files import ByteFile, is_remote, open_files
from .progress import progress

T = TypeVar("T")

_THREADS = 8  # files that are read at once, since reading waits for the disk
_REMOTE_THREADS = 32
_AHEAD = 32  # buffers that are requested ahead, in total for all remote files


def each_file(
    paths: Sequence[str],
    kind: str,
    storage: Storage,
    read: Callable[[BufferedReader, Any], T],
    collect: Callable[[int, T], object] | None = None,
) -> tuple[list[int], list[T]]:
    """Reads files in several threads; returns their sizes, and the result of each file.

    Args:
        paths: The files.
        kind: The kind of files, for the progress bar.
        storage: Access to remote files.
        read: Returns the result of a file. It gets a reader of the file, and a function to call
            with the number of bytes processed since the last call.
        collect: Is called with the number of a file and its result, in the thread that has read the
            file. If it is given, no results are returned, so that they need not stay in memory
            until all files are read.

    Returns:
        The sizes of the files in bytes; and the result of each file, or no results if ``collect``
        is given.
    """

    def read_file(number: int, advance: Any) -> list[T]:
        file = files[number] or open_files([paths[number]], storage)[0]
        result = read(BufferedReader(file, ahead=ahead), advance)
        if collect is None:
            return [result]
        collect(number, result)
        return []

    are_remote = any(map(is_remote, paths))
    ahead = max(1, _AHEAD // len(paths))
    if are_remote:
        files: Sequence[ByteFile | None] = open_files(paths, storage)
        sizes = [file.size for file in files if file is not None]
    else:
        files = [None] * len(paths)  # opened later, since there may be too many
        sizes = [os.stat(path).st_size for path in paths]
    with progress(f"Indexing {len(paths)} {kind}", sum(sizes)) as advance:
        results = in_threads(lambda number: read_file(number, advance), len(paths), are_remote)
    return sizes, [result for found in results for result in found]


def in_threads(function: Callable[[int], T], count: int, are_remote: bool) -> list[T]:
    """Calls a function with 0 to ``count - 1``, in threads; returns the results in this order.

    Args:
        function: Is called with the number of a file.
        count: The number of files.
        are_remote: Whether some files are remote, so that more threads are used.
    """
    threads = _REMOTE_THREADS if are_remote else _THREADS
    return call_each(function, range(count), threads, "dalijax-index")
