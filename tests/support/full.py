"""Selects the cases that only `make test-full` runs."""

import os

import pytest

FULL = os.environ.get("DALIJAX_FULL") == "1"


def in_full(*values):
    """Marks a case of a parametrized test that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.skipif(not FULL, reason="make test-full"))
