"""Writes docs/benchmarks.md, docs/benchmarks-more.md and their plots from benchmarks/results.

The texts of the pages are in benchmarks/pages. This program replaces each line
``<!-- run: MACHINE-NAME -->`` by the newest run with this name on this kind of machine: its tables,
its plot, its date and machine, and its command::

    python benchmarks/page.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
PAGES, RESULTS = HERE / "pages", HERE / "results"
DOCS = HERE.parent / "docs"
# Labels of recorded runs, and the labels of the pages.
LABELS = {
    "a second": "per second",
    "cores busy": "CPU cores in use",
    "cores": "CPU cores in use",
    "in": "threads or processes",
    "in next(), % of it": "time in next(), %",
    "ms a step": "ms per step",
    "ms of a batch": "ms per batch",
    "ms of a batch of 16": "ms per batch of 16",
    "ms of a batch of 64": "ms per batch of 64",
    "ms of a core, an image": "CPU ms per image",
    "of raw DALI loop": "ratio to the raw DALI loop",
    "of the raw loop of the round": "ratio to the raw loop of the round",
    "over one without": "ratio of the added time",
    "over the model, %": "longer than the model alone, %",
    "share of DALI's": "ratio to DALI's",
    "share of dalijax's time": "ratio to dalijax's time",
    "us of a batch": "us per batch",
    "us of a batch over a raw loop": "us per batch, more than a raw loop",
    "us of a batch over one without": "us per batch, more than without the function",
}
STYLE = {  # text in the SVG has the font of the page
    "svg.fonttype": "none",
    "svg.hashsalt": "dalijax",
    "font.family": "sans-serif",
}


def newest(name: str) -> dict[str, Any]:
    """Returns the newest run with a name."""
    return json.loads(max(RESULTS.glob(f"????-??-??-{name}.json")).read_text())


def describe(machine: Mapping[str, Any]) -> str:
    """Returns the machine and its versions as a line."""
    gpus = machine["gpus"]
    parts = [f"{len(gpus)} x {gpus[0]}"] if gpus else []
    parts.append(machine["cpu"])
    versions = {k: v for k, v in machine.items() if k not in ("date", "cpu", "gpus", "queues")}
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join(parts)


def plot(run: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the bars of a run in panels, in colors for light and dark pages."""
    groups = {k: v for k, v in run["plot"]["groups"].items() if v}
    counts = [len(values) for values in groups.values()]
    figure = Figure(figsize=(7.5, 0.7 + 0.27 * sum(counts) + 0.55 * len(counts)))
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=counts)[:, 0]
    for ax, (title, values) in zip(axes, groups.items()):
        names = list(values)[::-1]
        bars = ax.barh(names, [values[name] for name in names], color="#76b900")
        digits = 0 if max(map(abs, values.values())) >= 100 else 1
        labels = ax.bar_label(bars, fmt=f"{{:,.{digits}f}}", padding=3, fontsize=8)
        ax.margins(x=0.14)
        ax.tick_params(labelsize=8, colors="#808080")
        ax.set_title(title, fontsize=9, color="#808080")
        ax.spines[["top", "right"]].set_visible(False)
        for part in (*ax.spines.values(), *labels):
            part.set_color("#808080")
    label = run["plot"]["label"]
    axes[-1].set_xlabel(LABELS.get(label, label), fontsize=8, color="#808080")
    figure.tight_layout()
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [[LABELS.get(name, name) for name in columns], ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def text_of(name: str) -> str:
    """Returns the newest run of a name as Markdown, and draws its plot."""
    run = newest(name)
    picture = f"pictures/benchmark-{name}.svg"
    plot(run, DOCS / picture)
    label = run["plot"]["label"]
    origin = f"{run['machine']['date']}, {describe(run['machine'])}. Command: `{run['command']}`."
    return "\n\n".join(
        [
            *(table(printed["columns"], printed["rows"]) for printed in run["tables"]),
            f"![{LABELS.get(label, label)}]({picture})",
            textwrap.fill(origin, 98, break_long_words=False, break_on_hyphens=False),
        ]
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "pictures").mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        text = re.sub(r"<!-- run: (\S+) -->", lambda match: text_of(match[1]), page.read_text())
        (DOCS / page.name).write_text(re.sub(r"[ \t]+\n", "\n", text))


if __name__ == "__main__":
    main()
