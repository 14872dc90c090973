"""Fixtures of the tests of sources."""

import pytest

from dalijax.core.formats import read_ranges
from local_reads import reader_library


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library in C that reads local files."""
    return str(reader_library(tmp_path_factory.mktemp("library")))


@pytest.fixture(params=("C", "Python"))
def language(request, monkeypatch):
    """The language of the code that reads local files."""
    reader = read_ranges.read_in_python
    if request.param == "C":
        reader = read_ranges.read_in_c(request.getfixturevalue("library"))
    monkeypatch.setattr(read_ranges, "_read", reader)
    return request.param
