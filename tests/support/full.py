"""Selects the cases that only `make test-full` or `make test-slow` runs."""

import itertools
import os

import pytest

FULL = os.environ.get("DALIJAX_FULL") == "1"


def in_full(*values):
    """Marks a case of a parametrized test that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.skipif(not FULL, reason="make test-full"))


def in_slow(*values):
    """Marks a case of a parametrized test that `make test-slow` runs instead of `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def combinations(share, *axes):
    """Returns all combinations of the values of some axes.

    `make test` runs one of every `share` combinations, in which each value occurs.
    """
    axes = [list(axis) for axis in axes]
    assert sorted(map(len, axes))[-2] >= share, "values of the longest axis would be missing"
    return [
        values if sum(numbers) % share == 0 else in_full(*values)
        for numbers, values in zip(
            itertools.product(*(range(len(axis)) for axis in axes)), itertools.product(*axes)
        )
    ]
