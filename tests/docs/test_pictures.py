"""The programs of docs/drawings refuse text that is cut off or overlaps, and draw the pictures."""

import importlib
import pathlib
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folders(monkeypatch):
    """The folders of the programs, which import each other."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs" / "drawings")


def axes():
    return Figure(figsize=(3, 2), layout="constrained").subplots()


def test_text_that_can_not_be_read_is_an_error(tmp_path):
    save = importlib.import_module("legible").save
    ax = axes()
    ax.bar(["a", "b"], [1, 2])
    ax.set_title("a title", loc="left")
    ax.set(xlim=(0, 0.5), ylabel="values")  # the name "b" is outside, and not drawn
    save(ax.figure, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0

    ax.set_title("a title that is much too long for this figure", loc="left")
    with pytest.raises(ValueError, match="'a title that is much.* is cut off"):
        save(ax.figure, tmp_path / "cut.png")
    assert not (tmp_path / "cut.png").exists()

    ax = axes()
    ax.set_xticks([0.4, 0.5], ["one name", "another name"])
    with pytest.raises(ValueError, match="'one name' and 'another name' overlap"):
        save(ax.figure, tmp_path / "cut.png")


def test_the_text_of_the_readmes_picture_can_be_read():
    drawing, legible = map(importlib.import_module, ("readme", "legible"))
    figure = drawing.draw(np.zeros((20, 8, 8, 3), np.uint8))
    legible.check(figure)
    panels = figure.subfigs[1].subfigs
    bars = [label.get_text() for panel in panels for label in panel.axes[0].texts]
    readme = (ROOT / "README.md").read_text()
    cores = re.findall(r"^\| [^|]+ \| ([\d.]+) cores[,;] .*\|$", readme, re.M)
    assert len(cores) == 5 and set(cores) < set(bars)  # the first model of the table


def test_the_diagrams_are_those_of_the_pages(tmp_path, monkeypatch):
    diagrams = importlib.import_module("diagrams")
    monkeypatch.setattr(diagrams, "PICTURES", tmp_path)
    for draw in (diagrams.decision, diagrams.layers, diagrams.batch, diagrams.state):
        draw()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / "pictures" / path.name).read_text()
    assert len([*tmp_path.iterdir()]) == 4
    with pytest.raises(ValueError, match="'a name that is too long' is .* pixels wide"):
        diagrams.Diagram(300, 100, "").box(0, 0, 100, 60, "ask", "a name that is too long")


@pytest.mark.slow
def test_the_page_of_benchmarks_is_that_of_the_runs(tmp_path, monkeypatch):
    page = importlib.import_module("page")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr("sys.argv", ["page.py"])
    page.main()
    for path in tmp_path.glob("*.md"):
        assert path.read_text() == (ROOT / "docs" / path.name).read_text()
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {path.name for path in ROOT.glob("docs/pictures/benchmark-*")}
