"""Fixtures of the tests of the whole package."""

import types

import pytest

from conftest import write_jpegs
from tars import samples, write_tar


@pytest.fixture(scope="session")
def eight_images(tmp_path_factory):
    """Eight JPEGs: the folder of their class folder, their paths, a tar, and a missing folder."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = write_jpegs(folder / "images" / "class", 8)
    return types.SimpleNamespace(
        folder=str(folder / "images"),
        files=files,
        tar=write_tar(folder / "a.tar", samples(0, 8)),
        missing=str(folder / "missing"),
    )
