"""What `make test` leaves to `make test-full`."""

import os

import pytest

FULL = os.environ.get("DALIJAX_FULL") == "1"


def in_full(*values):
    """A case of a parametrized test that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.skipif(not FULL, reason="make test-full"))
