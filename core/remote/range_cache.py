"""`RangeCache`: byte ranges of remote files that were announced, are requested, or were received.

The cache never changes the result of a read: ranges are immutable, and a read requests what it does
not find. It only holds ranges that a `Lease` holds. Dropping the last lease frees the memory, and
drops requests that have not begun.
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
from ..workers import Result, set_result
from . import fsspec_client
from .fsspec_client import FsspecFile
from .locations import Place
from .object_client import AT_ONCE, ObjectClient
from .ranges import Call, Limits, plan
from .request_threads import Job, request_threads
from .versions import Version

_OBJECTS = Limits(most_requests=2 * AT_ONCE)
ALIGNMENT = 8  # bytes, of each range in memory, so that it can be viewed as any dtype
# fsspec sends the requests of all files of a call concurrently.
_FSSPEC = Limits(most_requests=256, several_files=True)
_Key = tuple[int, int, int]  # file, offset and size of a range


class Fetch:
    """A call of a client, and its received bytes.

    Args:
        num_bytes: Number of requested bytes.
        freed: Collects the number of bytes of each freed fetch, if given.
    """

    def __init__(self, num_bytes: int, freed: collections.deque[int] | None):
        self.num_bytes = num_bytes
        self.result = Result[list[memoryview]]()
        self._freed = freed

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed.append(self.num_bytes)


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

    def arrays(self) -> list[NDArray[np.uint8]]:
        """Waits for the ranges, and returns them, aligned, mostly without a copy.

        They can't be written to, because several reads may return the same memory.

        Raises:
            OSError: If a range can't be read.
        """
        arrays = []
        for fetch, request, start, size in zip(
            self.fetches, self._requests, self._starts, self._sizes, strict=True
        ):
            if fetch is None:
                arrays.append(np.empty(0, np.uint8))
                continue
            try:
                data = fetch.result.get()[request]
            except OSError as error:
                raise copy.copy(error) from None  # several threads may raise it
            array = np.frombuffer(data, np.uint8, size, start)
            if array.__array_interface__["data"][0] % ALIGNMENT:
                array = array.copy()
                array.flags.writeable = False
            arrays.append(array)
        return arrays

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranges": {}}

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
            self._ranges, self._process = {}, os.getpid()
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
            jobs = [
                self._job(call, fetch, open_file)
                for call, fetch in zip(planned.calls, started, strict=True)
            ]
            request_threads().add(jobs, urgent=turns is None)
        return Lease(fetches, requests, starts, [key[2] for key in keys], num_bytes)

    def _job(self, call: Call, fetch: Fetch, open_file: Callable[[int], FsspecFile]) -> Job:
        """Returns the job of a call, which does not keep its fetch alive."""
        ref, result = weakref.ref(fetch), fetch.result
        place = self._places[call.files[0]]

        def is_wanted() -> bool:
            return ref() is not None

        def read(has_one: Callable[[], None]) -> list[memoryview]:
            if place is None:
                files = [open_file(number) for number in call.files]
                return fsspec_client.read(files, call.starts, call.ends, is_wanted)
            url, version = self._urls[call.files[0]], self._versions[call.files[0]]
            return self._client.read(
                place, url, call.starts, call.ends, version, is_wanted, has_one
            )

        return Job(
            lambda has_one: set_result(result, read, has_one),
            min(len(call.starts), AT_ONCE) if place is not None else len(call.starts),
            is_wanted,
        )


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
