"""Runs the tests with other versions: `make test-matrix`.

For each row of ROWS it makes a virtual environment, .venv-matrix-<row>, installs what the row says,
runs tests in it, and writes the versions and how the tests ended into docs/versions.md. A row whose
Python is not there is left out, and said. Arguments go to pytest, in place of TESTS; the table is
then printed, and the page stays.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = ".[test,grain,clu,tf,numba,prometheus,examples]"
# The oldest that the tests and examples can have; pyproject.toml has what users need at the least.
OLDEST = ["jax==0.8.0", "flax==0.12.0", "orbax-checkpoint==0.11.28", "grain==0.2.18"]
ROWS = {
    "3.11-oldest": ("3.11", OLDEST),
    "3.11-newest": ("3.11", []),
    "3.12-newest": ("3.12", []),
    "3.13-newest": ("3.13", []),
}
TESTS = ["tests/rules", "tests/pipeline", "tests/iterator", "tests/records", "tests/sources"]
TESTS += ["tests/functions", "tests/adapters"]
PACKAGES = {
    "DALI": "nvidia-dali-cuda120",
    "JAX": "jax",
    "Grain": "grain",
    "Orbax": "orbax-checkpoint",
}
PAGE = ROOT / "docs" / "versions.md"
HEAD = """# Versions

`make test-matrix` runs most tests with the oldest and the newest libraries, on each Python that is
there, and writes this page. It takes half an hour on two CPU cores. Skipped tests belong to
`make test-full`, or need what `make test` builds.

"""
FOOT = """
An older DALI than 2.4 was not run, and the extras do not install one. JAX 0.8 ran without the tests
of its traces, which leave TensorFlow unusable in their process.
Pax needs Python 3.10 with jax 0.4.26: `make test-pax` runs its tests there.
What runs on GPUs is in [Benchmarks](benchmarks.md); DALI's CUDA 13 build ran there.
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def versions(python: str) -> dict[str, str]:
    """The versions of an environment's packages."""
    code = f"import importlib.metadata as m; print(*map(m.version, {list(PACKAGES.values())}))"
    return dict(zip(PACKAGES, run(python, "-c", code).stdout.split()))


def row(name: str, version: str, pins: list[str], tests: list[str]) -> dict[str, str]:
    """Runs a row, and gives its cells."""
    base = run(".ci/python", version)
    if base.returncode:
        return {"row": name, "Python": version, "tests": "no such Python here"}
    environment = ROOT / f".venv-matrix-{name}"
    python = str(environment / "bin" / "python")
    run(base.stdout.strip(), "-m", "venv", str(environment))
    installed = run(python, "-m", "pip", "install", "-q", "-e", EXTRAS, *pins)
    if installed.returncode:
        print(installed.stderr, file=sys.stderr)
        return {"row": name, "Python": version, "tests": "pip could not install it"}
    command = [python, "-m", "pytest", "-q", "-n", "auto"]
    if pins:
        # They warn of each other. And a trace of JAX 0.8 leaves TensorFlow 2.21 unusable in its
        # process: tensorflow.python.profiler.trace.enabled is then False, and no function.
        command = ["env", "PYTHONWARNINGS=default", *command, "-W", "default"]
        command.append("--ignore=tests/iterator/test_traces.py")
    ended = run(*command, *tests)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (ROOT / ".cache" / f"matrix-{name}.log").write_text(ended.stdout + ended.stderr)
    last = re.findall(r"(?m)^(?:=+ )?(.*\d+ (?:passed|failed|error).*?) in [\d.]+s", ended.stdout)
    outcome = last[-1] if last else f"pytest ended with {ended.returncode}"
    outcome = re.sub(r", \d+ warnings?", "", outcome)
    return {"row": name, "Python": version, **versions(python), "tests": outcome}


def table_of(rows: list[dict[str, str]]) -> str:
    """The rows in Markdown."""
    columns = ["Python", *PACKAGES, "tests"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(one.get(key, "") for key in columns) + " |" for one in rows]
    return "\n".join(lines) + "\n"


def main(tests: list[str]) -> int:
    rows = []
    for name, (version, pins) in ROWS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(row(name, version, pins, tests or TESTS))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table = table_of(rows)
    print(table)
    if not tests:
        PAGE.write_text(f"{HEAD}{table}\nRun on {datetime.date.today()}.\n{FOOT}")
    return any("passed" not in cells["tests"] or "failed" in cells["tests"] for cells in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
