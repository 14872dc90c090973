"""Runs the notebooks in docs/notebooks, and makes pages of them for the site.

    python docs/make_notebooks.py                      # runs each, and stores what it prints
    python docs/make_notebooks.py --check FILE.ipynb   # runs one; fails where it prints otherwise

Cells run as Jupyter runs them: in order, in one namespace, and what the last line gives is shown.
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
    """The outputs of a cell, as a notebook has them."""
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
    """The outputs of each cell of code."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [run_cell("".join(cell["source"]), names) for cell in code]


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """What outputs say; pictures depend on the versions of what draws them."""
    return ["".join(o.get("text") or o["data"]["text/plain"]) for o in outputs]


def markdown(path: Path) -> str:
    """The page of a notebook: its cells, and what they printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output, text in zip(cell["outputs"], texts(cell["outputs"])):
            png = output.get("data", {}).get("image/png")
            picture = f"![What the cell shows](data:image/png;base64,{png})"
            parts.append(picture if png else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs one notebook in this process, or each in a process and a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    path = arguments.store or arguments.check
    if path is None:
        for each in sorted(NOTEBOOKS.glob("*.ipynb")):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, os.path.abspath(__file__), "--store", str(each)]
                subprocess.run(command, cwd=folder, check=True)
        return
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(code, run(notebook)):
        if arguments.check and texts(cell["outputs"]) != texts(outputs):
            sys.exit(
                f"{''.join(cell['source'])}\ngives {texts(outputs)}, and has {cell['outputs']}"
            )
        cell["outputs"] = outputs
    if arguments.store:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
