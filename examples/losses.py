"""The losses of a training run, kept beside its checkpoints, and a picture of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


class Losses:
    """A line of JSON for each step; a run that goes on adds to those of the run before it."""

    def __init__(self, path: Path):
        self._path = path

    def add(self, step: int, loss: float, kind: str = "training", **more: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "loss": loss, **more}) + "\n")

    def save_picture(self, path: Path) -> None:
        """Writes a PNG of the loss over the steps; of a step that was repeated, the last one."""
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
        print(f"The loss of every step: {path}")
