"""Plans of requests, compared with the ranges that they must contain."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dalijax.core.remote.ranges import Limits, byte_count, plan

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
    planned = plan(*map(list, zip(*ranges)), limits)
    for (file, offset, size, _), (call, request, start) in zip(ranges, planned.places, strict=True):
        call = planned.calls[call]
        assert call.files[request] == file
        assert call.starts[request] + start == offset
        assert offset + size <= call.ends[request]
    wanted = collections.defaultdict(lambda: np.zeros(300_000, bool))
    for file, offset, size, _ in ranges:
        wanted[file][offset : offset + size] = True
    longest = max(size for _, _, size, _ in ranges)
    for call in planned.calls:
        assert len(call.starts) <= limits.most_requests
        assert limits.several_files or len(set(call.files)) == 1
        for file, start, end in zip(call.files, call.starts, call.ends, strict=True):
            assert end - start <= max(limits.most_bytes, longest)
            read = wanted[file][start:end]
            assert read[0] and read[-1]
            ends = np.flatnonzero(np.diff(np.r_[True, read, True].astype(int)))
            gaps = ends[1::2] - ends[::2]
            assert not len(gaps) or gaps.max() <= limits.gap


@hypothesis.given(ranges=RANGES)
def test_calls_are_in_the_order_in_which_they_are_needed(ranges):
    planned = plan(*map(list, zip(*ranges)), Limits(0, 1))
    turns = collections.defaultdict(list)
    for (*_, turn), (call, _, _) in zip(ranges, planned.places, strict=True):
        turns[call].append(turn)
    first = [min(turns[call]) for call in range(len(planned.calls))]
    assert first == sorted(first)


def test_neighbors_are_merged_and_calls_are_filled():
    offsets = [k * 100_000 for k in range(25)]
    planned = plan([0] * 25, offsets, [50_000] * 25, [0] * 25, Limits())
    assert [len(call.starts) for call in planned.calls] == [10, 10, 5]
    planned = plan([0] * 25, offsets, [84_000] * 25, [0] * 25, Limits())
    assert [call.num_bytes for call in planned.calls] == [24 * 100_000 + 84_000]


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
