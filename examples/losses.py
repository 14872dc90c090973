"""Stores and plots the losses of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


class Losses:
    """Writes a line of JSON for each step. A resumed run appends to the file."""

    def __init__(self, path: Path):
        self._path = path

    def add(self, step: int, loss: float, kind: str = "training", **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "loss": loss, **values}) + "\n")

    def save_picture(self, path: Path) -> None:
        """Plots the loss of each step to a PNG; of a repeated step, the last loss."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        figure = Figure(figsize=(7, 4), layout="constrained")
        ax = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log")
        for kind, style in (("training", "-"), ("evaluation", "o")):
            points = {line["step"]: line["loss"] for line in lines if line["kind"] == kind}
            if points:
                steps = sorted(points)
                ax.plot(steps, [points[step] for step in steps], style, label=kind)
        ax.legend()
        figure.savefig(path)
        print(f"Losses: {path}")
