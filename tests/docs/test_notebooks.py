"""The notebooks run, and print their stored output."""

import importlib.util
import os

import pytest
from forks import run_fork

from pages import DOCS, Page

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_prints_its_stored_output(path, tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)  # the notebook prints the number of devices
    run_fork(DOCS / "make_notebooks.py", "--check", path, cwd=tmp_path, env=env)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_page_is_short(path, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
    make_notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_notebooks)
    monkeypatch.setattr("pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(make_notebooks.markdown(path))
    assert list(Page(page).too_long()) == []


def test_there_are_some():
    assert [path.stem for path in NOTEBOOKS] == ["elastic_resume", "getting_started"]
