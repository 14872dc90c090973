"""`RangeCache`: byte ranges of remote files in memory, which are requested or were received.

The cache never changes the result of a read: ranges are immutable, and a read requests the ranges
that it does not find. A range is in the cache only while a `Lease` has it. When its last lease is
freed, its memory is freed, too, and a request that has not begun is dropped.
"""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..order.shuffle import Indices
from ..threads.per_process import PerProcess
from ..threads.workers import Result, set_result
from . import fsspec_client
from .fsspec_client import FsspecFile
from .locations import Location
from .object_client import AT_ONCE, ObjectClient
from .ranges import Limits, Plan, num_bytes, plan
from .request_threads import Job, request_threads
from .retries import Unneeded
from .versions import Version

_OBJECTS = Limits(most_requests=2 * AT_ONCE)
# fsspec sends the requests of all files of a call concurrently.
_FSSPEC = Limits(most_requests=256, several_files=True)
_HTTP = Limits(most_requests=1)  # `ObjectClient` sends the requests of a call in turn
_LIMITS = (_OBJECTS, _HTTP, _FSSPEC)
OpenFiles = Callable[[Sequence[int]], list[FsspecFile]]


class _Memory:
    """Reports when the memory of a `Fetch` is freed: after the fetch and its running call are gone.

    Args:
        num_bytes: Number of bytes of the fetch.
        freed: The deque to which this number is appended when the memory is freed, if given.
    """

    def __init__(self, num_bytes: int, freed: collections.deque[int] | None):
        self.num_bytes, self._freed = num_bytes, freed

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed.append(self.num_bytes)


class Fetch:
    """A call of a client that reads ranges, and the received bytes.

    Args:
        block: The ranges that this call and other calls read.
        memory: Reports when the received bytes are freed.

    Attributes:
        result: The future result of the call: the bytes of each of its requests.
        memory: As above.
    """

    def __init__(self, block: _Block, memory: _Memory):
        self.result = Result[list[memoryview]]()
        self.memory = memory
        self._block = block  # a block exists while it has a fetch

    def pieces(self) -> list[memoryview]:
        """Waits for the bytes of each request of the call, and returns them.

        Raises:
            OSError: If a range can't be read.
        """
        try:
            return self.result.get()
        except OSError as error:
            raise copy.copy(error) from None  # several threads may raise it


class _Block:
    """Ranges that were requested together, sorted by their addresses.

    An address is an offset in the concatenation of all files.

    Args:
        addresses: The address of each range.
        offsets: The offset of each range in its file.
        sizes: The size of each range in bytes.
        planned: The requests of the ranges.

    Attributes:
        addresses: As above.
        sizes: As above.
        calls: The number of the call that reads each range.
        requests: The number of the request that reads each range, within its call.
        starts: The offset of each range in the bytes of its request.
        fetches: A weak reference to the fetch of each call.
    """

    def __init__(self, addresses: Indices, offsets: Indices, sizes: Indices, planned: Plan):
        self.addresses, self.sizes = addresses, sizes
        self.calls = np.searchsorted(planned.bounds, planned.request_of, side="right") - 1
        self.requests = planned.request_of - planned.bounds[self.calls]
        self.starts = offsets - planned.starts[planned.request_of]
        self.fetches: list[weakref.ref[Fetch]] = []


class Lease:
    """Ranges that are requested, and kept in memory, until this object is freed.

    Args:
        addresses: The address of each range; see `_Block`.
        sizes: The size of each range in bytes.

    Attributes:
        num_bytes: Number of bytes of the fetches that this lease has started.
        missing: The numbers of the nonempty ranges that have no fetch yet.
    """

    def __init__(self, addresses: Indices, sizes: Indices):
        self.num_bytes = 0
        self.missing = np.flatnonzero(sizes)
        self._addresses, self._sizes = addresses, sizes
        self._fetches: list[Fetch] = []
        self._fetch_of, self._requests, self._starts = np.full((3, len(sizes)), -1)

    def take(self, block: _Block, are_new: bool) -> None:
        """Adds the fetches of a block that read missing ranges to this lease.

        Args:
            block: The block.
            are_new: Whether the block was made for this lease. Failed fetches of other blocks are
                not added.
        """
        addresses, sizes = self._addresses[self.missing], self._sizes[self.missing]
        at = np.searchsorted(block.addresses, addresses)
        at = np.minimum(at, len(block.addresses) - 1)
        has = (block.addresses[at] == addresses) & (block.sizes[at] >= sizes)
        numbers = np.full(len(block.fetches), -1)
        for call in np.unique(block.calls[at[has]]).tolist():
            fetch = block.fetches[call]()
            if fetch is not None and (are_new or fetch.result.error is None):
                numbers[call] = len(self._fetches)
                self._fetches.append(fetch)
        has &= numbers[block.calls[at]] >= 0
        rows, at = self.missing[has], at[has]
        self._fetch_of[rows] = numbers[block.calls[at]]
        self._requests[rows], self._starts[rows] = block.requests[at], block.starts[at]
        self.missing = self.missing[~has]

    def arrays(self) -> list[NDArray[np.uint8]]:
        """Waits for the ranges, and returns the bytes of each range as a uint8 array.

        The arrays are views of the received bytes, and may be unaligned. They are read-only,
        because several reads may return the same memory.

        Raises:
            OSError: If a range can't be read.
        """
        pieces = [fetch.pieces() for fetch in self._fetches]
        return [
            np.frombuffer(pieces[fetch][request], np.uint8, size, start)
            if size
            else np.empty(0, np.uint8)
            for fetch, request, start, size in zip(
                self._fetch_of.tolist(),
                self._requests.tolist(),
                self._starts.tolist(),
                self._sizes.tolist(),
                strict=True,
            )
        ]

    def parts(self, turns: Indices) -> dict[int, set[Fetch]]:
        """Returns, for each turn, the fetches that read its ranges.

        Args:
            turns: The turn of each range; see `RangeCache.lease`.
        """
        count = len(self._fetches)
        has = self._fetch_of >= 0
        parts: dict[int, set[Fetch]] = {}
        for pair in np.unique(turns[has] * count + self._fetch_of[has]).tolist():
            turn, fetch = divmod(pair, count)
            parts.setdefault(turn, set()).add(self._fetches[fetch])
        return parts


class RangeCache:
    """Requests byte ranges of numbered remote files, and shares them between reads.

    There is no lock, because a fork could copy a lock that is held. In a race, a range is requested
    twice.

    Args:
        urls: The URL of each file.
        locations: The location of each file; None for a file that fsspec reads.
        versions: The version that each file must have.
        client: Reads the files that have a location.
    """

    def __init__(
        self,
        urls: Sequence[str],
        locations: Sequence[Location | None],
        versions: Sequence[Version],
        client: ObjectClient,
    ):
        self._urls, self._locations, self._versions = urls, locations, versions
        self._client = client
        self._limits = np.array(  # index of each file's limits in `_LIMITS`
            [2 if location is None else int(location.kind == "http") for location in locations], int
        )
        sizes = np.array([version.size for version in versions], np.int64)
        self._addresses = np.cumsum(sizes) - sizes  # of the first byte of each file
        # The requests of a parent never end in a forked child.
        self._blocks = PerProcess[set[weakref.ref[_Block]]](set)

    def num_bytes(self, files: Indices, offsets: Indices, sizes: Indices) -> int:
        """Returns how many bytes the requests for ranges read if no range is in the cache."""
        return num_bytes(files, offsets, sizes, _OBJECTS)

    def lease(
        self,
        files: Indices,
        offsets: Indices,
        sizes: Indices,
        open_files: OpenFiles,
        turns: Indices | None = None,
        freed: collections.deque[int] | None = None,
    ) -> Lease:
        """Requests the ranges that are not in the cache, and returns a lease of all ranges.

        Args:
            files: The file of each range.
            offsets: The first byte of each range.
            sizes: The size of each range in bytes.
            open_files: Opens files that fsspec reads, given their numbers.
            turns: When each range is needed, if the ranges are announced; ranges with smaller
                numbers are needed earlier. None: the ranges are needed now, so that their requests
                are sent before those of announced ranges.
            freed: The deque to which the number of bytes of each fetch is appended when its memory
                is freed.

        Returns:
            The lease, which keeps the ranges in the cache while it exists.
        """
        blocks = self._blocks.get()
        addresses = self._addresses[files] + offsets
        lease = Lease(addresses, sizes)
        for ref in list(blocks):
            if (block := ref()) is not None and len(lease.missing):
                lease.take(block, are_new=False)
        for number, limits in enumerate(_LIMITS):
            rows = lease.missing[self._limits[files[lease.missing]] == number]
            if not len(rows):
                continue
            # Of several ranges with the same address, only the largest is requested.
            rows = rows[np.lexsort((-sizes[rows], addresses[rows]))]
            unique, firsts = np.unique(addresses[rows], return_index=True)
            first_turns = 0 * firsts if turns is None else np.minimum.reduceat(turns[rows], firsts)
            rows = rows[firsts]
            planned = plan(files[rows], offsets[rows], sizes[rows], first_turns, limits)
            block = _Block(unique, offsets[rows], sizes[rows], planned)
            counts = np.add.reduceat(planned.ends - planned.starts, planned.bounds[:-1])
            fetches = [Fetch(block, _Memory(count, freed)) for count in counts.tolist()]
            block.fetches.extend(map(weakref.ref, fetches))
            blocks.add(weakref.ref(block, blocks.discard))
            lease.take(block, are_new=True)
            lease.num_bytes += int(counts.sum())
            bounds = planned.bounds.tolist()
            jobs = [
                self._job(planned, slice(first, last), fetch, open_files)
                for first, last, fetch in zip(bounds, bounds[1:], fetches)
            ]
            request_threads().add(jobs, urgent=turns is None)
        return lease

    def _job(self, planned: Plan, call: slice, fetch: Fetch, open_files: OpenFiles) -> Job:
        """Returns the job that runs a call; the job does not keep the call's fetch alive.

        Args:
            planned: The requests of all calls.
            call: The slice of the requests that belong to the call.
            fetch: The fetch of the call, whose result is set.
            open_files: Opens files that fsspec reads.
        """
        columns = planned.files, planned.starts, planned.ends
        files, starts, ends = (column[call].tolist() for column in columns)
        ref, result = weakref.ref(fetch), fetch.result
        location = self._locations[files[0]]
        url, version = self._urls[files[0]], self._versions[files[0]]

        def is_wanted() -> bool:
            return ref() is not None

        def read(has_one: Callable[[], None]) -> list[memoryview]:
            """Reads and returns the bytes of each request; see `ObjectClient.read`."""
            running = ref()
            if running is None:
                raise Unneeded
            memory = running.memory  # counts until the call ends, even if its fetch is dropped
            del running
            try:
                if location is None:
                    return fsspec_client.read(open_files(files), starts, ends, is_wanted)
                return self._client.read(location, url, starts, ends, version, is_wanted, has_one)
            finally:
                del memory  # an error refers to this frame

        most = len(files) if location is None else AT_ONCE
        return Job(
            lambda has_one: set_result(result, read, has_one), min(len(files), most), is_wanted
        )
