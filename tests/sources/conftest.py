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
    read = read_ranges.read_in_python
    if request.param == "C":
        read = read_ranges.reader_in_c(request.getfixturevalue("library"))
    monkeypatch.setattr(read_ranges, "_read", read)
    return request.param
