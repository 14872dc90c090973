"""Plans of requests, compared with the ranges that they must contain."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dalijax.core.remote.ranges import Limits, byte_count, num_bytes, plan

RANGES = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 200_000), st.integers(1, 60_000), st.integers(0, 4)
    ),
    min_size=1,
    max_size=60,
)
LIMITS = (Limits(), Limits(0, 1000, 3), Limits(most_bytes=100_000, several_files=True))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@hypothesis.given(ranges=RANGES)
def test_requests_contain_all_ranges_within_the_limits(limits, ranges):
    columns = np.array(ranges).T
    planned = plan(*columns, limits)
    requests = planned.request_of
    files, offsets, sizes, _ = columns
    assert (planned.files[requests] == files).all()
    assert (planned.starts[requests] <= offsets).all()
    assert (planned.ends[requests] >= offsets + sizes).all()
    assert set(requests) == set(range(len(planned.files)))
    total = (planned.ends - planned.starts).sum()
    assert num_bytes(files, offsets, sizes, limits) == total
    wanted = collections.defaultdict(lambda: np.zeros(300_000, bool))
    for file, offset, size, _ in ranges:
        wanted[file][offset : offset + size] = True
    longest = max(size for _, _, size, _ in ranges)
    for first, last in zip(planned.bounds, planned.bounds[1:]):
        assert 0 < last - first <= limits.most_requests
        assert limits.several_files or len(set(planned.files[first:last])) == 1
    for file, start, end in zip(planned.files, planned.starts, planned.ends, strict=True):
        assert end - start <= max(limits.most_bytes, longest)
        read = wanted[file][start:end]
        assert read[0] and read[-1]
        ends = np.flatnonzero(np.diff(np.r_[True, read, True].astype(int)))
        gaps = ends[1::2] - ends[::2]
        assert not len(gaps) or gaps.max() <= limits.gap


@pytest.mark.parametrize("most_requests", (1, 3))
@hypothesis.given(ranges=RANGES)
def test_calls_are_in_the_order_in_which_they_are_needed(most_requests, ranges):
    columns = np.array(ranges).T
    planned = plan(*columns, Limits(0, most_requests=most_requests))
    calls = np.searchsorted(planned.bounds, planned.request_of, side="right")
    first = [columns[3][calls == call].min() for call in range(1, len(planned.bounds))]
    assert first == sorted(first)


def planned_of(offsets, size):
    turns = np.zeros(25, np.int64)
    return plan(turns, np.array(offsets), np.full(25, size), turns, Limits())


def test_neighbors_are_merged_and_calls_are_filled():
    offsets = [k * 100_000 for k in range(25)]
    assert np.diff(planned_of(offsets, 50_000).bounds).tolist() == [10, 10, 5]
    merged = planned_of(offsets, 84_000)
    assert (merged.ends - merged.starts).tolist() == [24 * 100_000 + 84_000]


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("128MB", 128_000_000),
        ("128 MiB", 128 << 20),
        ("1.5G", 1_500_000_000),
        ("64k", 64_000),
        ("12", 12),
        (0, 0),
        (1 << 30, 1 << 30),
    ],
)
def test_numbers_of_bytes(value, count):
    assert byte_count(value, "read_ahead") == count


@pytest.mark.parametrize("value", ["", "MB", "-1MB", "1XB", -1, True, None, 1.5])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="read_ahead must be a number of bytes, such as '128MB'"):
        byte_count(value, "read_ahead")
