"""Runs the notebooks in docs/notebooks, and converts them to pages of the site.

    python docs/make_notebooks.py                      # runs all notebooks and stores their outputs
    python docs/make_notebooks.py --check FILE.ipynb   # fails if the output has changed

Cells run as in Jupyter: in order, in one namespace, and the value of the last line is displayed.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and returns its outputs in the format of notebooks."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102 - the notebook's own code
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if shown is not None:
        data: dict[str, Any] = {"text/plain": [repr(shown)]}
        if hasattr(shown, "_repr_png_"):
            png = base64.b64encode(shown._repr_png_()).decode()
            data = {"image/png": png, "text/plain": ["<picture>"]}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Runs a notebook and returns the outputs of each code cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [run_cell("".join(cell["source"]), names) for cell in code]


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """Returns the text of outputs. Pixels of images depend on library versions, and are ignored."""
    return ["".join(o.get("text") or o["data"]["text/plain"]) for o in outputs]


def markdown(path: Path) -> str:
    """Returns a notebook as Markdown: its cells and their outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output, text in zip(cell["outputs"], texts(cell["outputs"])):
            png = output.get("data", {}).get("image/png")
            picture = f"![Output of the cell](data:image/png;base64,{png})"
            parts.append(picture if png else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs one notebook in this process, or all notebooks in separate processes and folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    path = arguments.store or arguments.check
    if path is None:
        for notebook_path in sorted(NOTEBOOKS.glob("*.ipynb")):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, os.path.abspath(__file__), "--store", str(notebook_path)]
                subprocess.run(command, cwd=folder, check=True)
        return
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(code, run(notebook)):
        if arguments.check and texts(cell["outputs"]) != texts(outputs):
            source, stored = "".join(cell["source"]), cell["outputs"]
            sys.exit(f"{source}\nprinted {texts(outputs)}, but the notebook contains {stored}")
        cell["outputs"] = outputs
    if arguments.store:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
