"""Plans requests: merges neighboring byte ranges, and groups requests into calls of a client."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a plan.

    Attributes:
        gap: Largest number of unwanted bytes between two ranges that one request reads.
        most_bytes: Largest size of a request that several ranges share.
        most_requests: Largest number of requests of a call.
        several_files: Whether a call may read several files.
    """

    gap: int = 16 << 10
    most_bytes: int = 8 << 20
    most_requests: int = 10
    several_files: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """Requests that a client sends together.

    Attributes:
        files: The file of each request.
        starts: The first byte of each request.
        ends: The byte after the last byte of each request.
    """

    files: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the number of requested bytes."""
        return sum(self.ends) - sum(self.starts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Calls in the order in which they are needed, and the places of the ranges in them.

    Attributes:
        calls: The calls.
        places: For each range: its call, its request in the call, and its offset in the request.
    """

    calls: list[Call]
    places: list[tuple[int, int, int]]


def plan(
    files: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    turns: Sequence[int],
    limits: Limits,
) -> Plan:
    """Plans the requests of some ranges, which must not be empty.

    Args:
        files: The file of each range.
        offsets: The first byte of each range.
        sizes: The size of each range.
        turns: When each range is needed; ranges with smaller numbers are needed earlier.
        limits: The limits.
    """
    requests: list[list[int]] = []  # file, start, end, turn
    request_of = [0] * len(files)
    for row in np.lexsort((np.asarray(offsets), np.asarray(files))).tolist():
        file, start, end, turn = files[row], offsets[row], offsets[row] + sizes[row], turns[row]
        last = requests[-1] if requests else None
        if (
            last is not None
            and last[0] == file
            and start - last[2] <= limits.gap
            and max(end, last[2]) - last[1] <= limits.most_bytes
        ):
            last[2], last[3] = max(end, last[2]), min(turn, last[3])
        else:
            requests.append([file, start, end, turn])
        request_of[row] = len(requests) - 1
    # Requests that are needed early share calls, so that these calls can be sent first.
    order = sorted(range(len(requests)), key=lambda k: (requests[k][3], k))
    groups: list[list[int]] = []
    current: dict[int, list[int]] = {}  # the last group of each file
    for k in order:
        file = 0 if limits.several_files else requests[k][0]
        group = current.get(file)
        if group is None or len(group) >= limits.most_requests:
            group = current[file] = []
            groups.append(group)
        group.append(k)
    place_of = {k: (n, i) for n, group in enumerate(groups) for i, k in enumerate(group)}
    calls = []
    for group in groups:  # already in the order of their first requests
        members = [requests[k] for k in group]
        of, starts, ends, _ = zip(*members)
        calls.append(Call(of, starts, ends))
    places = [(*place_of[k], offsets[row] - requests[k][1]) for row, k in enumerate(request_of)]
    return Plan(calls, places)


def byte_count(value: int | float | str, name: str) -> int:
    """Returns a number of bytes that is written as ``"128MB"``, or as a whole number.

    Raises:
        ValueError: If it is neither.
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
    raise ValueError(f"{name} must be a number of bytes, such as '128MB', not {value!r:.60}")
