"""Plans requests: merges neighboring byte ranges, and groups requests into calls of a client."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from ..messages.printable import printable_repr
from ..order.shuffle import Indices

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the requests and calls of a plan.

    Attributes:
        gap: Largest number of unwanted bytes between two ranges that one request reads.
        most_bytes: Largest size in bytes of a request that reads several ranges.
        most_requests: Largest number of requests of a call.
        several_files: Whether a call may read several files.
    """

    gap: int = 16 << 10
    most_bytes: int = 8 << 20
    most_requests: int = 10
    several_files: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Requests, grouped into calls in the order in which they are needed.

    Attributes:
        files: The file of each request.
        starts: The first byte of each request.
        ends: The byte after the last byte of each request.
        bounds: The index of the first request of each call, then the number of all requests,
            [calls + 1].
        request_of: The index of the request that reads each range.
    """

    files: Indices
    starts: Indices
    ends: Indices
    bounds: Indices
    request_of: Indices


def plan(files: Indices, offsets: Indices, sizes: Indices, turns: Indices, limits: Limits) -> Plan:
    """Returns the requests that read some ranges, grouped into calls.

    Args:
        files: The file of each range.
        offsets: The first byte of each range.
        sizes: The size of each range in bytes, at least 1.
        turns: When each range is needed; ranges with smaller numbers are needed earlier.
        limits: The limits of the requests and calls.
    """
    rows = np.lexsort((offsets, files))
    firsts, starts, ends = _merged(files[rows], offsets[rows], sizes[rows], limits)
    request_of = np.empty(len(rows), np.int64)
    request_of[rows] = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(rows)))
    turns = np.minimum.reduceat(turns[rows], firsts)
    files = files[rows][firsts]
    # Requests that are needed early share calls, so that these calls can be sent first.
    owners = np.zeros_like(files) if limits.several_files else files
    order = np.lexsort((turns, owners))
    first_of_owner = np.searchsorted(owners[order], owners[order])
    begins = (np.arange(len(order)) - first_of_owner) % limits.most_requests == 0
    calls = np.flatnonzero(begins)
    turn_of_call = np.repeat(turns[order][calls], np.diff(calls, append=len(order)))
    ranks = np.lexsort((np.cumsum(begins), turn_of_call))
    order, begins = order[ranks], begins[ranks]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    bounds = np.append(np.flatnonzero(begins), len(order))
    return Plan(files[order], starts[order], ends[order], bounds, place[request_of])


def num_bytes(files: Indices, offsets: Indices, sizes: Indices, limits: Limits) -> int:
    """Returns how many bytes the requests for some ranges read, with the gaps between ranges."""
    rows = np.lexsort((offsets, files))
    rows = rows[sizes[rows] > 0]
    _, starts, ends = _merged(files[rows], offsets[rows], sizes[rows], limits)
    return int((ends - starts).sum())


def _merged(
    files: Indices, offsets: Indices, sizes: Indices, limits: Limits
) -> tuple[Indices, Indices, Indices]:
    """Merges ranges, sorted by file and offset, into requests.

    Returns:
        For each request, the index of its first range, its first byte, and the byte after its last
        byte.
    """
    ends = offsets + sizes
    if not len(files):
        return ends, ends, ends
    # Files follow each other in one address space, farther apart than any gap.
    step = int(np.max(ends)) + limits.gap + 1
    shift = np.cumsum(np.diff(files, prepend=files[0]) != 0) * step
    addresses, reached = offsets + shift, np.maximum.accumulate(ends + shift)
    begins = np.r_[True, addresses[1:] - reached[:-1] > limits.gap]
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(files)) - 1
    too_long = reached[lasts] - addresses[firsts] > limits.most_bytes
    for first, last in zip(firsts[too_long].tolist(), lasts[too_long].tolist()):
        while first <= last:
            begins[first] = True
            end = addresses[first] + limits.most_bytes
            first = max(first + 1, int(np.searchsorted(reached[: last + 1], end, side="right")))
    firsts = np.flatnonzero(begins)
    request_ends = np.maximum.reduceat(ends, firsts)
    return firsts, offsets[firsts], request_ends


def byte_count(value: int | float | str, name: str) -> int:
    """Returns a number of bytes from an argument such as ``"128MB"``, ``"1GiB"`` or ``10**9``.

    Args:
        value: The argument.
        name: The name of the argument in errors.

    Raises:
        ValueError: If it is not a number of bytes.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        unit = (match[2] or "").lower()
        base = 1024 if unit.endswith("i") else 1000
        power = " kmgt".index(unit[0]) if unit else 0
        return int(float(match[1]) * base**power)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if is_whole and not isinstance(value, (bool, str)) and value >= 0:
        return int(value)
    raise ValueError(
        f"{name} must be a number of bytes, such as '128MB', not {printable_repr(value, 60)}"
    )
