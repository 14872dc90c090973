"""Writes the pages of benchmarks/pages and their plots from benchmarks/results.

The texts of the pages are in benchmarks/pages. This program replaces each comment
``<!-- run: MACHINE-NAME; columns: A / B; rows: REGEX -->`` by the newest run with this name on this
kind of machine: its table, its plot, its date and machine, and its command. Without ``columns`` or
``rows``, the table has all of them; the JSON file always does. ``without: REGEX`` leaves out rows
with a matching cell. A run with several tables has ``tables: 2 3`` for these tables alone, and
``tables: none`` for the rest::

    python benchmarks/page.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
PAGES, RESULTS = HERE / "pages", HERE / "results"
DOCS = HERE.parent / "docs"
sys.path.append(str(DOCS / "drawings"))
from legible import save  # noqa: E402 - a module of the documentation

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


def newest(name: str) -> pathlib.Path:
    """Returns the file of the newest run with a name."""
    return max(RESULTS.glob(f"????-??-??-{name}.json"))


def describe(machine: Mapping[str, Any]) -> str:
    """Returns the date, the GPUs and the number of cores of a run."""
    gpus = machine["gpus"]
    cores = machine["cpu"].partition(",")[0].replace(" CPU", "")
    parts = [machine["date"], f"{len(gpus)} x {gpus[0]}"] if gpus else [machine["date"]]
    return ", ".join([*parts, cores])


def plot(run: Mapping[str, Any], path: pathlib.Path, rows: str = "") -> None:
    """Draws the bars of some rows of a run in panels, in colors for light and dark pages."""
    groups = {
        title: {
            name: value for name, value in values.items() if re.search(rows, f"{title}, {name}")
        }
        for title, values in run["plot"]["groups"].items()
    }
    groups = {title: values for title, values in groups.items() if values}
    counts = [len(values) for values in groups.values()]
    figure = Figure(figsize=(7.5, 0.7 + 0.27 * sum(counts) + 0.55 * len(counts)))
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=counts)[:, 0]
    for ax, (title, values) in zip(axes, groups.items()):
        names = list(values)[::-1]
        bars = ax.barh(names, [values[name] for name in names], color="#76b900")
        largest = max(map(abs, values.values()))
        digits = 0 if largest >= 100 else 1 if largest >= 10 else 2
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
        save(figure, path, transparent=True, metadata={"Date": None})


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(cell: str) -> str:
    """Returns a cell of a printed table as a page shows it."""
    cell = re.sub(r"^1\.0+ \(1\.0+ to 1\.0+\)$", "1", cell)
    return re.sub(r"(?<=\d) to (?=-?\d)", "\N{EN DASH}", cell)


def select(printed: Mapping[str, Any], columns: Sequence[str], rows: str, without: str = "") -> str:
    """Returns columns of a printed table, after the columns of names, and the rows that match."""
    labels = [LABELS.get(name, name) for name in printed["columns"]]
    missing = set(columns) - set(labels)
    if missing:
        raise ValueError(f"there are no columns {sorted(missing)}, but {labels}")
    numbers = [k for k, label in enumerate(labels) if not k or not label or label in columns]
    if not columns:
        numbers = list(range(len(labels)))
    matching = [
        list(map(shown, row))
        for row in printed["rows"]
        if re.search(rows, row[0])
        and not (without and any(re.search(without, cell) for cell in row))
    ]
    if not matching:
        raise ValueError(f"no row matches {rows!r}")
    return table([labels[k] for k in numbers], [[row[k] for k in numbers] for row in matching])


def text_of(
    name: str, columns: Sequence[str] = (), rows: str = "", tables: str = "", without: str = ""
) -> str:
    """Returns the newest run of a name as Markdown, and draws its plot.

    Args:
        name: The machine and the name of the run.
        columns: Columns of the tables; empty: all.
        rows: Pattern of the rows.
        tables: Numbers of the tables that are returned without the plot, counted from 1; "none":
            the plot without a table; empty: everything.
        without: Pattern of cells whose rows are left out; empty: none.
    """
    path = newest(name)
    run = json.loads(path.read_text())
    numbers = map(int, tables.replace("none", "").split())
    chosen = [run["tables"][number - 1] for number in numbers] if tables else run["tables"]
    printed = [select(part, columns, rows, without) for part in chosen]
    if chosen and tables:
        return "\n\n".join(printed)
    picture = f"pictures/benchmark-{name}.svg"
    plot(run, DOCS / picture, rows)
    label = run["plot"]["label"]
    program = next(word for word in run["command"].split() if word.endswith(".py"))
    origin = f"{describe(run['machine'])}. `{program}`, run `{path.stem}`."
    return "\n\n".join(
        [
            *printed,
            f"![{LABELS.get(label, label)}]({picture})",
            textwrap.fill(origin, 98, break_long_words=False, break_on_hyphens=False),
        ]
    )


def replace(match: re.Match[str]) -> str:
    """Returns the text of a comment of a page."""
    options = dict(part.strip().split(": ", 1) for part in match[1].split(";"))
    columns = [name.strip() for name in options.get("columns", "").split(" / ")]
    chosen = [options.get(name, "") for name in ("rows", "tables", "without")]
    return text_of(options["run"], list(filter(None, columns)), *chosen)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "pictures").mkdir(parents=True, exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        text = re.sub(r"<!-- (run: .+?) -->", replace, page.read_text(), flags=re.DOTALL)
        (DOCS / page.name).write_text(re.sub(r"[ \t]+\n", "\n", text))


if __name__ == "__main__":
    main()
