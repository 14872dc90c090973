"""Runs the tests with other versions: `make test-matrix`.

For each row of ROWS it makes a virtual environment, .venv-matrix-<row>, installs what the row says,
runs tests in it, and prints a table of the versions and of how the tests ended. A row whose Python
is not there is left out, and said. Arguments go to pytest, in place of TESTS.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = ".[test,grain,clu,numba,prometheus]"
# What DALI's jax_function and Grain 0.2.18 can have at the least.
OLDEST = ["jax==0.6.0", "flax==0.10.7", "orbax-checkpoint==0.11.14", "grain==0.2.18"]
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
    "Flax": "flax",
    "NumPy": "numpy",
}


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
    ended = run(python, "-m", "pytest", "-q", "-n", "auto", *tests)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (ROOT / ".cache" / f"matrix-{name}.log").write_text(ended.stdout + ended.stderr)
    last = re.findall(r"(?m)^(?:=+ )?(.*\d+ (?:passed|failed|error).*?) in [\d.]+s", ended.stdout)
    outcome = last[-1] if last else f"pytest ended with {ended.returncode}"
    return {"row": name, "Python": version, **versions(python), "tests": outcome}


def main(tests: list[str]) -> int:
    rows = []
    for name, (version, pins) in ROWS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(row(name, version, pins, tests or TESTS))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    columns = ["Python", *PACKAGES, "tests"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for cells in rows:
        print("| " + " | ".join(cells.get(column, "") for column in columns) + " |")
    return any("passed" not in cells["tests"] or "failed" in cells["tests"] for cells in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
