"""Helpers of the benchmarks: machine, medians, tables, and results as JSON.

A run writes ``<date>-<machine>-<name>.json`` to benchmarks/results, with its printed tables and the
values of a plot. benchmarks/page.py writes docs/benchmarks.md from these files.
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

import dalijax  # noqa: F401  # sets CUDA's queues before GPU starts CUDA

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
# False in Grain's workers, since the call would start CUDA in each worker.
GPU = multiprocessing.parent_process() is None and backend.GetCUDADeviceCount() > 0


def parser(about: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser with ``--out``; ``about`` is the module's docstring."""
    arguments = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--out", type=pathlib.Path, default=RESULTS, help="directory of the results"
    )
    return arguments


def machine() -> dict[str, Any]:
    """Returns the machine, the versions and the date."""
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
            for name in (
                "grain",
                "datasets",
                "cv2",
                "tensorflow",
                "torch",
                "torchvision",
                "librosa",
                "soundfile",
                "av",
                "scipy",
            )
            if hasattr(sys.modules.get(name), "__version__")
        },
    }


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its children."""
    process, total = psutil.Process(), 0.0
    for running in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = running.cpu_times()
            total += times.user + times.system
    return total


def kind_of(gpus: Sequence[str]) -> str:
    """Returns the kind of machine, for file names: "cpu", "h200" or "h100x2"."""
    if not gpus:
        return "cpu"
    model = re.search(r"\b[A-Z]+\d+\b", gpus[0])  # of "NVIDIA H100 80GB HBM3"
    name = model[0] if model else "-".join(gpus[0].split())
    return name.lower() + (f"x{len(gpus)}" if len(gpus) > 1 else "")


def heading() -> None:
    """Prints the machine."""
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value), flush=True)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Formats the median, and the range if there are several values."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) < 2:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table, and stores it for `write`."""
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
    """Writes a run as JSON: the machine, the command, the tables, all results, and a plot.

    Args:
        out: The directory.
        name: The name of the benchmark.
        results: All measured values, as JSON.
        groups: The bars of the plot by name, for each panel by title.
        label: The quantity of the bars, with its unit.
    """
    host = machine()
    arguments = sys.argv[1:]
    for option in {"--out", "--folder", "--data"} & set(arguments):  # directories of this machine
        at = arguments.index(option)
        del arguments[at : at + 2]
    kind = kind_of(host["gpus"])
    program = pathlib.Path(sys.argv[0]).name
    variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("DALI"))
    record = {
        "name": name,
        "machine": host,
        "command": shlex.join([*variables, "python", f"benchmarks/{program}", *arguments]),
        "tables": _tables,
        "plot": {"label": label, "groups": groups},
        "results": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{host['date']}-{kind}-{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
