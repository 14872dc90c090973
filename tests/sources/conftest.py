"""Fixtures of the tests of sources."""

import pytest

from dalijax.core.formats import checksums, read_ranges
from local_reads import helper


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The helper in C that reads local files."""
    return str(helper(tmp_path_factory.mktemp("helper")))


@pytest.fixture(params=("C", "Python"))
def language(request, monkeypatch):
    """The language of the code that reads local files."""
    read, helper = read_ranges.read_in_python, checksums.InPython()
    if request.param == "C":
        library = request.getfixturevalue("library")
        read, helper = read_ranges.reader_in_c(library), checksums.InC(library)
    monkeypatch.setattr(read_ranges, "_read", read)
    monkeypatch.setattr(checksums, "_helper", helper)
    return request.param
