"""Finds the failing records of a batch by halving."""

import itertools

import pytest

from dalijax.core.pipeline.failing_rows import failing_rows


def subsets(count):
    every = range(count)
    return itertools.chain.from_iterable(
        itertools.combinations(every, size) for size in range(count + 1)
    )


@pytest.mark.parametrize("most_together", (None, 1, 3))
@pytest.mark.parametrize("count", range(9))
def test_failing_records_are_found_in_order(count, most_together):
    for bad in subsets(count):
        asked = []

        def succeed(rows, bad=bad, asked=asked):
            asked.append(list(rows))
            return not {*rows} & {*bad}

        assert failing_rows(count, succeed, most_together) == list(bad)
        assert all(rows and len(rows) <= (most_together or count) for rows in asked)
        assert len(asked) == len({tuple(rows) for rows in asked})


def test_the_search_ends_at_the_limit():
    for bad in subsets(7):
        found = failing_rows(7, lambda rows, bad=bad: not {*rows} & {*bad}, most=2)
        assert found == list(bad)[:2]
