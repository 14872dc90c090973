"""The notebooks run, and print what they have stored."""

import os

import pytest

from pages import DOCS
from programs import run_python

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_prints_what_it_has_stored(path, tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)  # the notebook says how many devices there are
    run_python(DOCS / "make_notebooks.py", "--check", path, cwd=tmp_path, env=env)


def test_there_are_some():
    assert [path.stem for path in NOTEBOOKS] == ["elastic_resume", "getting_started"]
