"""Fixtures of the tests of sources."""

import pytest

from dalijax.core.formats import read_ranges
from local_reads import helper


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The helper in C that reads local files."""
    return str(helper(tmp_path_factory.mktemp("helper")))


@pytest.fixture(params=("C", "Python"))
def language(request, monkeypatch):
    """The language of the code that reads local files."""
    helper = read_ranges.InPython()
    if request.param == "C":
        helper = read_ranges.InC(request.getfixturevalue("library"))
    monkeypatch.setattr(read_ranges, "_helper", helper)
    return request.param
