"""Runs the tests with other versions: `make test-matrix`.

For each row of ROWS, creates a virtual environment .venv-matrix-<row>, installs the pinned
versions, runs the tests, and writes versions and results to docs/versions.md. A row whose Python is
not installed reports this. If there are arguments, they replace TESTS as arguments of pytest, and
the table is printed instead of written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = ".[test,grain,clu,tf,numba,prometheus,examples]"
# The oldest versions for tests and examples; pyproject.toml has the minimum for users.
OLDEST = ["jax==0.8.0", "flax==0.12.0", "orbax-checkpoint==0.11.28", "grain==0.2.18"]
ROWS = {
    "3.11-oldest": ("3.11", OLDEST),
    "3.11-newest": ("3.11", []),
    "3.12-newest": ("3.12", []),
    "3.13-newest": ("3.13", []),
}
TESTS = ["tests/rules", "tests/pipeline", "tests/iterator", "tests/records", "tests/sources"]
TESTS += ["tests/robots", "tests/functions", "tests/adapters", "tests/system/test_canaries.py"]
PACKAGES = {
    "DALI": "nvidia-dali-cuda120",
    "JAX": "jax",
    "Grain": "grain",
    "Orbax": "orbax-checkpoint",
}
PAGE = ROOT / "docs" / "versions.md"
HEAD = """# Versions

`make test-matrix` runs most tests with the oldest and the newest libraries, on each installed
Python, and writes this page. Skipped tests belong to `make test-full`, or need packages that
`make test` builds.

"""
FOOT = """
- DALI: versions before 2.4 were not tested, and the extras do not install them. The CUDA 13 build
  was tested on GPUs.
- JAX 0.8: tests of profiler traces were skipped, since JAX's profiler then leaves TensorFlow
  unusable in the process.
- Pax: `make test-pax` tests the Pax adapter with Python 3.10 and jax 0.4.26.
- openpi's versions (Python 3.11, jax 0.5.3, numpy 1.26.4, flax 0.10.2): the program of the README
  runs, and the tests of placement, epochs and arguments that need no Grain pass. `fn.jax_function`
  raises an error, since DALI's plugin requires JAX 0.6.
- Python 3.14 and aarch64: wheels of DALI, jaxlib and Grain exist, but were not tested.
- GPUs: see [Benchmarks](benchmarks.md).
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def versions(python: str) -> dict[str, str]:
    """Returns the versions of the packages of an environment."""
    code = f"import importlib.metadata as m; print(*map(m.version, {list(PACKAGES.values())}))"
    return dict(zip(PACKAGES, run(python, "-c", code).stdout.split()))


def row(name: str, version: str, pins: list[str], tests: list[str]) -> dict[str, str]:
    """Runs the tests of a row and returns its cells."""
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
        # Old versions warn about each other. A trace of JAX 0.8 leaves TensorFlow 2.21 unusable in
        # its process: it replaces the function tensorflow.python.profiler.trace.enabled by False.
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
    """Returns the rows as a Markdown table."""
    columns = ["Python", *PACKAGES, "tests"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row.get(key, "") for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs the tests with other versions.")
    parser.add_argument("--row", choices=ROWS, help="run this row, and do not write the page")
    options, tests = parser.parse_known_args(arguments)
    rows = []
    for name in [options.row] if options.row else ROWS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(row(name, *ROWS[name], tests or TESTS))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table = table_of(rows)
    print(table)
    if not (tests or options.row):
        PAGE.write_text(f"{HEAD}{table}\nRun on {datetime.date.today()}.\n{FOOT}")
    return any("passed" not in cells["tests"] or "failed" in cells["tests"] for cells in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
