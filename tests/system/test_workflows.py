"""The workflows of GitHub call targets, files and rows that exist."""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

from programs import run_python

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
yaml = pytest.importorskip("yaml", reason="PyYAML comes with Flax and Orbax")


def jobs(path):
    """The jobs of a workflow by name."""
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_exist(path):
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    commands = [s["run"] for job in jobs(path).values() for s in job["steps"] if "run" in s]
    called = [name for line in commands for name in re.findall(r"\bmake ([a-z-]+)", line)]
    assert set(called) <= set(targets)
    for script in re.findall(r"bash (\S+)", " ".join(commands)):
        assert (ROOT / script).is_file()


def test_the_full_tests_are_divided_into_all_folders():
    parts = jobs(ROOT / ".github" / "workflows" / "full.yml")["full"]["strategy"]["matrix"]["part"]
    folders = sorted(" ".join(parts).split())
    elsewhere = {"gpu", "parity", "pax", "support"}
    having_tests = {file.parent.name for file in (ROOT / "tests").glob("*/*.py")}
    assert folders == sorted(having_tests - elsewhere)


def git(folder, *arguments):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    command = ["git", *who, "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_long_subjects_of_commits_are_refused(tmp_path):
    script = ROOT / ".ci" / "subjects.py"
    whole = str(tmp_path / "whole")
    subprocess.run(["git", "init", "-q", whole], check=True)
    commits = {}
    for subject in ("x" * 100, "é" * 72, "y" * 73):
        git(whole, "commit", "-q", "--allow-empty", "-m", subject, "-m", "z" * 100)
        commits[subject[0]] = git(whole, "rev-parse", "HEAD")
    git(whole, "checkout", "-q", commits["é"])
    assert run_python(script, commits["x"], cwd=whole).stdout == ""
    git(whole, "checkout", "-q", commits["y"])
    printed = run_python(script, commits["x"], cwd=whole, code=1).stdout
    assert printed.count("\n") == 1 and "from 73 to 72 characters: yyy" in printed
    shallow = str(tmp_path / "shallow")
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{whole}", shallow], check=True)
    assert "were not checked" in run_python(script, commits["x"], cwd=shallow).stdout


def test_the_versions_of_ci():
    """CI tests each supported Python, with the newest releases, and the oldest ones."""
    found = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    pythons = found["tests"]["strategy"]["matrix"]["python"]
    assert set(pythons) == {python for python, _ in matrix.ROWS.values()}
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert all(f'"Programming Language :: Python :: {python}"' in classifiers for python in pythons)
    rows = found["versions"]["strategy"]["matrix"]["include"]
    assert all(matrix.ROWS[row["row"]][0] == row["python"] for row in rows)
    assert {row["row"].partition("-")[2] for row in rows} == {"oldest", "newest"}
    steps = [step.get("run", "") for step in found["versions"]["steps"]]
    assert any("make test-matrix" in step and "--row" in step for step in steps)


def test_pyright_is_installed_as_documented():
    """Other versions find other errors, so contributors and CI use the same version."""
    steps = jobs(ROOT / ".github" / "workflows" / "ci.yml")["lint"]["steps"]
    (command,) = [s["run"] for s in steps if "pip install" in s.get("run", "")]
    assert "pyright[nodejs]==" in command
    assert f"`{command}`" in (ROOT / "CONTRIBUTING.md").read_text()
