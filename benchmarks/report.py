"""What the benchmarks have in common: the machine's name, medians, and a table, JSON and a plot."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import nvidia.dali
from matplotlib.figure import Figure
from nvidia.dali import backend

OUT = pathlib.Path(__file__).resolve().parent / "out"
# Grain's worker processes need not know; asking starts CUDA in each of them.
GPU = multiprocessing.parent_process() is None and backend.GetCUDADeviceCount() > 0


def parser(about: str | None) -> argparse.ArgumentParser:
    """Arguments of a benchmark, by its module's docstring; ``out`` is where its results go."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=pathlib.Path, default=OUT, help="folder of the results")
    return made


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
        "gpus": [str(d.device_kind) for d in jax.local_devices() if d.platform == "gpu"],
        "queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "") if GPU else "",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dali": nvidia.dali.__version__,
        "numpy": np.__version__,
    }


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
    """Prints a Markdown table."""
    print()
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


def write(out: pathlib.Path, name: str, arguments: Any, results: Any, figure: Figure) -> None:
    """Writes NAME.json and NAME.png."""
    out.mkdir(parents=True, exist_ok=True)
    told = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
    record = {"machine": machine(), "arguments": told, "results": results}
    (out / f"{name}.json").write_text(json.dumps(record, indent=1))
    figure.savefig(out / f"{name}.png", dpi=110)
    print(f"{out / name}.json, .png")


def bars(groups: Mapping[str, Mapping[str, float]], label: str) -> Figure:
    """A picture of horizontal bars, one panel for each group."""
    rows = max(len(one) for one in groups.values())
    figure = Figure(figsize=(5.2 * len(groups), 1.2 + 0.34 * rows))
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for ax, (title, values) in zip(axes, groups.items()):
        names = list(values)[::-1]
        made = ax.barh(names, [values[name] for name in names])
        ax.bar_label(made, fmt="{:,.0f}", padding=2, fontsize=8)
        ax.margins(x=0.15)
        ax.tick_params(axis="y", labelsize=8)
        ax.set(title=title, xlabel=label)
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
