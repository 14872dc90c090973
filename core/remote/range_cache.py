"""`RangeCache`: byte ranges of remote files that were announced, are requested, or were received.

The cache never changes the result of a read: ranges are immutable, and a read requests what it does
not find. It only holds ranges that a `Lease` holds. Dropping the last lease frees the memory, and
cancels requests that have not begun or not ended.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..workers import Result, Workers
from . import fsspec_client
from .event_loop import EventLoop, Job, event_loop, settle
from .fsspec_client import FsspecFile
from .locations import Place
from .object_client import ObjectClient
from .ranges import Call, Limits, plan
from .versions import Version

FSSPEC_THREADS = 16  # they wait for a network
_OBJECTS = Limits()
# fsspec sends the requests of all files of a call concurrently.
_FSSPEC = Limits(most_requests=1024, several_files=True)
_Key = tuple[int, int, int]  # file, offset and size of a range


class Fetch:
    """A call that was sent, and its received bytes.

    Args:
        num_bytes: Number of requested bytes.
        freed: Collects the number of bytes of each freed fetch, if given.
    """

    def __init__(self, num_bytes: int, freed: collections.deque[int] | None):
        self.num_bytes = num_bytes
        self.result = Result[list[memoryview]]()
        self.stop: Callable[[], None] | None = None  # cancels the requests
        self._freed = freed

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed.append(self.num_bytes)
        if self.stop is not None and not self.result.is_set:
            self.stop()


class Lease:
    """Ranges that are kept, or requested, until this object is freed.

    Attributes:
        fetches: The fetch of each range; None for an empty range.
        num_bytes: Number of bytes of the fetches that this lease has started.
    """

    def __init__(
        self,
        fetches: list[Fetch | None],
        requests: list[int],
        starts: list[int],
        sizes: list[int],
        num_bytes: int,
    ):
        self.fetches, self.num_bytes = fetches, num_bytes
        self._requests, self._starts, self._sizes = requests, starts, sizes

    def copy_into(self, buffer: NDArray[np.uint8], places: Sequence[int]) -> None:
        """Waits for the ranges, and copies each to its place in a buffer.

        Raises:
            OSError: If a range can't be read.
        """
        view = memoryview(buffer)
        for fetch, request, start, size, place in zip(
            self.fetches, self._requests, self._starts, self._sizes, places, strict=True
        ):
            if fetch is not None:
                try:
                    data = fetch.result.get()[request]
                except OSError as error:
                    raise copy.copy(error) from None  # several threads may raise it
                view[place : place + size] = data[start : start + size]

    def parts(self, turns: Sequence[int]) -> dict[int, set[Fetch]]:
        """Returns the fetches that the ranges of each turn need."""
        parts: dict[int, set[Fetch]] = {}
        for fetch, turn in zip(self.fetches, turns, strict=True):
            if fetch is not None:
                parts.setdefault(turn, set()).add(fetch)
        return parts


class RangeCache:
    """Byte ranges of numbered remote files.

    Threads do not lock it, because a fork could copy a lock that is held. In a race, a range is
    requested twice.

    Args:
        urls: The URLs.
        places: The place of each object; None for a file of fsspec.
        versions: The version of each object that must be read.
        client: Reads objects.
    """

    def __init__(
        self,
        urls: Sequence[str],
        places: Sequence[Place | None],
        versions: Sequence[Version],
        client: ObjectClient,
    ):
        self._urls, self._places, self._versions = urls, places, versions
        self._client = client
        self._are_objects = np.array([place is not None for place in places], bool)
        self._process = os.getpid()
        # By range: a fetch, its request with the range, and the offset of the range in it.
        self._ranges: dict[_Key, tuple[weakref.ref[Fetch], int, int]] = {}
        self._threads: Workers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranges": {}, "_threads": None}

    def lease(
        self,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        open_file: Callable[[int], FsspecFile],
        turns: Sequence[int] | None = None,
        freed: collections.deque[int] | None = None,
    ) -> Lease:
        """Requests ranges, except those that are in the cache.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            sizes: The size of each range.
            open_file: Opens a file of fsspec, given its number.
            turns: When each range is needed, if it is only announced. None: now, so that the
                requests are sent before those of announced ranges.
            freed: Collects the number of bytes of each freed fetch.
        """
        if self._process != os.getpid():  # the parent's requests never end in a forked child
            self._ranges, self._threads, self._process = {}, None, os.getpid()
        keys = list(zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True))
        fetches: list[Fetch | None] = [None] * len(keys)
        requests, starts = [0] * len(keys), [0] * len(keys)
        missing = []
        for row, key in enumerate(keys):
            entry = self._ranges.get(key)
            fetch = None if entry is None else entry[0]()
            if entry is not None and fetch is not None and fetch.result.error is None:
                fetches[row], requests[row], starts[row] = fetch, entry[1], entry[2]
            elif key[2]:
                missing.append(row)
        num_bytes = 0
        are_objects = self._are_objects[files]
        for limits, rows in (
            (_OBJECTS, [row for row in missing if are_objects[row]]),
            (_FSSPEC, [row for row in missing if not are_objects[row]]),
        ):
            if not rows:
                continue
            chosen = [keys[row] for row in rows]
            row_turns = [0] * len(rows) if turns is None else [turns[row] for row in rows]
            chosen_files, chosen_offsets, chosen_sizes = map(list, zip(*chosen))
            planned = plan(chosen_files, chosen_offsets, chosen_sizes, row_turns, limits)
            started = [Fetch(call.num_bytes, freed) for call in planned.calls]
            keys_of: list[list[_Key]] = [[] for _ in started]
            for key, (number, _, _) in zip(chosen, planned.places, strict=True):
                keys_of[number].append(key)
            refs = [
                weakref.ref(fetch, functools.partial(_forget, self._ranges, fetch_keys))
                for fetch, fetch_keys in zip(started, keys_of, strict=True)
            ]
            for row, key, (number, request, start) in zip(rows, chosen, planned.places):
                fetches[row], requests[row], starts[row] = started[number], request, start
                self._ranges[key] = (refs[number], request, start)
            num_bytes += sum(fetch.num_bytes for fetch in started)
            if limits is _OBJECTS:
                self._send_objects(planned.calls, started, urgent=turns is None)
            else:
                self._send_files(planned.calls, started, open_file)
        return Lease(fetches, requests, starts, [key[2] for key in keys], num_bytes)

    def _send_objects(self, calls: Sequence[Call], fetches: Sequence[Fetch], urgent: bool) -> None:
        loop = event_loop()
        jobs = []
        for call, fetch in zip(calls, fetches, strict=True):
            number = call.files[0]
            place = self._places[number]
            if place is not None:
                url, version = self._urls[number], self._versions[number]
                read = functools.partial(
                    self._client.read, place, url, call.starts, call.ends, version
                )
                # The job does not refer to the fetch, so that dropping the fetch cancels it.
                job = Job(functools.partial(settle, fetch.result, read), len(call.starts))
                fetch.stop = functools.partial(EventLoop.drop, loop, job)
                jobs.append(job)
        loop.add(jobs, urgent)

    def _send_files(
        self,
        calls: Sequence[Call],
        fetches: Sequence[Fetch],
        open_file: Callable[[int], FsspecFile],
    ) -> None:
        if self._threads is None:
            self._threads = Workers(FSSPEC_THREADS, "dalijax-remote")
        for call, fetch in zip(calls, fetches, strict=True):
            is_wanted = functools.partial(_is_alive, weakref.ref(fetch))
            self._threads.submit(_read_files, fetch.result, is_wanted, open_file, call)


def _forget(
    ranges: dict[_Key, tuple[weakref.ref[Fetch], int, int]],
    keys: Sequence[_Key],
    ref: weakref.ref[Fetch],
) -> None:
    """Removes the ranges of a freed fetch from a cache, unless another fetch has replaced it."""
    for key in keys:
        entry = ranges.get(key)
        if entry is not None and entry[0] is ref:
            ranges.pop(key, None)


def _is_alive(ref: weakref.ref[Fetch]) -> bool:
    return ref() is not None


def _read_files(
    result: Result[list[memoryview]],
    is_wanted: Callable[[], bool],
    open_file: Callable[[int], FsspecFile],
    call: Call,
) -> None:
    """Reads the ranges of a call, in a thread."""
    try:
        if is_wanted():
            files = [open_file(number) for number in call.files]
            result.set(fsspec_client.read(files, call.starts, call.ends))
    except BaseException as error:
        result.fail(error)
