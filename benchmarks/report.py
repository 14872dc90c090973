"""What the benchmarks have in common: the machine's name, medians, tables, and a JSON of a run.

A run writes ``<date>-<machine>-<name>.json`` into benchmarks/results, from which benchmarks/page.py
makes docs/benchmarks.md: the tables as they were printed, and the values of a plot.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import nvidia.dali
import psutil
from nvidia.dali import backend

import dalijax  # noqa: F401  # sets CUDA's queues, before GPU below starts CUDA

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
# Grain's worker processes need not know; asking starts CUDA in each of them.
GPU = multiprocessing.parent_process() is None and backend.GetCUDADeviceCount() > 0


def parser(about: str | None) -> argparse.ArgumentParser:
    """Arguments of a benchmark, by its module's docstring; ``out`` is where its results go."""
    arguments = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--out", type=pathlib.Path, default=RESULTS, help="folder of the results"
    )
    return arguments


def machine() -> dict[str, Any]:
    """The machine, the versions and the date."""
    cores = len(os.sched_getaffinity(0))
    model = next(
        (
            line.split(":")[1].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{cores} cores, {model}",
        "gpus": [str(d.device_kind) for d in jax.devices() if d.platform == "gpu"],
        "queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "") if GPU else "",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dali": nvidia.dali.__version__,
        "numpy": np.__version__,
        **{
            name: sys.modules[name].__version__
            for name in ("grain", "cv2", "tensorflow", "librosa", "soundfile", "av", "scipy")
            if hasattr(sys.modules.get(name), "__version__")
        },
    }


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started."""
    process, total = psutil.Process(), 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def kind_of(gpus: Sequence[str]) -> str:
    """A name for files of machines with such GPUs: "cpu", "h200", "h100x2"."""
    if not gpus:
        return "cpu"
    model = re.search(r"\b[A-Z]+\d+\b", gpus[0])  # of "NVIDIA H100 80GB HBM3"
    name = model[0] if model else "-".join(gpus[0].split())
    return name.lower() + (f"x{len(gpus)}" if len(gpus) > 1 else "")


def heading() -> None:
    """Prints the machine."""
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value), flush=True)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the range where there are several values."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) < 2:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table, and keeps it for `write`."""
    cells = [[str(cell) for cell in row] for row in rows]
    _tables.append({"columns": list(columns), "rows": cells})
    print()
    for row in (columns, ["---"] * len(columns), *cells):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


_tables: list[dict[str, Any]] = []


def write(
    out: pathlib.Path,
    name: str,
    results: Any,
    groups: Mapping[str, Mapping[str, float]],
    label: str,
) -> None:
    """Writes a run as JSON: the machine, the command, the tables, all results, and a plot's values.

    Args:
        out: The folder.
        name: The benchmark's.
        results: Whatever it measured, as JSON has it.
        groups: The bars of a plot, by their names, and by the panels' titles.
        label: What the bars show, with its unit.
    """
    where = machine()
    arguments = sys.argv[1:]
    for option in {"--out", "--folder"} & set(arguments):  # folders of that machine
        at = arguments.index(option)
        del arguments[at : at + 2]
    kind = kind_of(where["gpus"])
    program = pathlib.Path(sys.argv[0]).name
    record = {
        "name": name,
        "machine": where,
        "command": shlex.join(["python", f"benchmarks/{program}", *arguments]),
        "tables": _tables,
        "plot": {"label": label, "groups": groups},
        "results": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{where['date']}-{kind}-{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
