"""Generates docs/errors.md from the messages in the code, without running the code::

python docs/make_errors.py
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dalijax"
PAGE = ROOT / "docs" / "errors.md"
HEAD = """# Errors, A to Z

This page lists every error message of dalijax, with its class and a page about its topic. It is
generated from the code. `{name}` is a placeholder for a value.

The list is sorted by the first word that is not a value. Entries that begin with "has" or "is"
follow the name of a record.

## Classes

Wrong arguments raise `ValueError` or `TypeError`. Import the other classes from `dalijax.errors`:

| class | base classes | raised if |
| --- | --- | --- |
| `StateError` | `ValueError` | a state is rejected; the position does not change |
| `ProcessError` | `RuntimeError` | processes differ, or a process is absent |
| `BatchError` | `RuntimeError` | a batch can't be read or decoded; it counts as delivered |
| `RecordError` | `RuntimeError` | the same, for records of Grain |
| `UnfitRecordError` | `RecordError`, `ValueError` | records do not match the first record |
| `GraphError` | `BatchError`, `RecordError` | the graph fails for every record |
| `RaggedError` | `ValueError` | the samples of an output differ in shape |
| `BatchMapError` | `RuntimeError` | a function of `batch_map` failed; the batch is not lost |
| `EpochError` | `RuntimeError` | `on_error="skip"` skipped every batch of an epoch |
"""
# The page about each part of the package; the longest matching prefix applies.
PAGES = {
    "adapters/clu": ("CLU", "clu.md"),
    "adapters/grain": ("Grain", "grain.md"),
    "adapters/pax": ("Pax", "pax.md"),
    "adapters/prometheus": ("Inspecting and profiling", "seeing.md"),
    "adapters/process_files": ("Elastic runs", "elastic.md"),
    "adapters/t5x": ("T5X", "t5x.md"),
    "adapters/tfdata": ("tf.data", "tfdata.md"),
    "core/augment": ("Randomness and augmentation", "randomness.md"),
    "core/order/epochs": ("Epochs", "epochs.md"),
    "core/batch_map": ("Functions", "functions.md"),
    "core/functions": ("Functions", "functions.md"),
    "core/random/draw": ("Randomness and augmentation", "randomness.md"),
    "core/placement": ("Meshes and processes", "sharding.md"),
    "core/formats/riff": ("Sources", "sources.md"),
    "core/feeding": ("Sources", "sources.md"),
    "core/feeding/record_": ("Grain", "grain.md"),
    "core/feeding/stream_": ("Grain", "grain.md"),
    "core/tools/show": ("Inspecting and profiling", "seeing.md"),
    "core/sources": ("Sources", "sources.md"),
    "core/state": ("States and resuming", "states.md"),
    "core/tools/tune": ("Performance", "performance.md"),
    "fn": ("Functions", "functions.md"),
    "": ("The iterator", "api/dalijax.md"),
}


class Message(NamedTuple):
    """A message with {} around its values, its exception, and its file."""

    text: str
    error: str
    file: str


Names = dict[str, list[ast.expr]]  # the possible values of each name


def _assigned(body: ast.AST) -> Names:
    """Returns the values assigned to names, and the values that functions return."""
    names: Names = {}
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            names.setdefault(node.name, []).extend(returns)
    return names


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_text(left) and _is_text(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_text(body) and _is_text(orelse)
    return isinstance(node, ast.JoinedStr)


def _texts(node: ast.expr, names: Names) -> list[str]:
    """Returns the possible texts of an expression, with unknown values in braces."""
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.JoinedStr(values=values):
            combinations = itertools.product(*(_texts(value, names) for value in values))
            return ["".join(combination) for combination in combinations]
        case ast.FormattedValue(value=value):
            return _texts(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pairs = itertools.product(_texts(left, names), _texts(right, names))
            return ["".join(pair) for pair in pairs]
        case ast.IfExp(body=body, orelse=orelse) if _is_text(node):
            return _texts(body, names) + _texts(orelse, names)
    name = node.func if isinstance(node, ast.Call) else node
    key = getattr(name, "id", getattr(name, "attr", ""))
    values = names.get(key, [])
    if 0 < len(values) <= 3 and all(map(_is_text, values)):
        rest = {k: v for k, v in names.items() if k != key}
        return [text for value in values for text in _texts(value, rest)]
    return ["{" + _short(node) + "}"]


def _short(node: ast.expr) -> str:
    """Returns the name of a value, or of the first value in an expression."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    inner = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
    skipped = {"self", "printable", *vars(builtins)}  # printable() returns its argument
    inner = [name.strip("_") for name in inner if name not in skipped]
    return inner[0] if inner else "..."


def _errors(tree: ast.AST, outer: Names) -> Iterator[tuple[ast.expr, str, Names]]:
    """Yields the first argument, the class and the names in scope of each created exception."""
    for node in ast.iter_child_nodes(tree):
        names = outer
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = outer | _assigned(node) | {parameter.arg: [] for parameter in parameters}
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            names = outer | {"<class>": [ast.Constant(node.name)]}
        if isinstance(node, ast.Call) and node.args:
            error = ast.unparse(node.func).split(".")[-1].strip("_")
            if error == "cls" and "<class>" in names:
                error = _texts(names["<class>"][0], {})[0]
            if error.endswith("Error") or error == "SystemExit":
                yield node.args[0], error, names
        yield from _errors(node, names)


def messages() -> Iterator[Message]:
    """Yields the messages of all modules, in the order of the files."""
    folders = ("*.py", "core/**/*.py", "adapters/**/*.py")
    files = sorted(path for folder in folders for path in PACKAGE.glob(folder))
    trees = {path: ast.parse(path.read_text()) for path in files}
    constants: Names = {}
    for tree in trees.values():
        module = _assigned(ast.Module([n for n in tree.body if isinstance(n, ast.Assign)], []))
        constants |= {name: values for name, values in module.items() if name.isupper()}
    for path, tree in trees.items():
        assigned = {k: v for k, v in _assigned(tree).items() if k.isupper() or k.startswith("_")}
        for argument, error, names in _errors(tree, constants | assigned):
            for text in _texts(argument, names):
                if len(re.findall(r"[a-z]{2,}", re.sub(r"\{[^}]*\}", "", text))) >= 3:
                    file = path.relative_to(PACKAGE).as_posix()
                    yield Message(" ".join(text.split()), error, file)


def _see(file: str) -> str:
    part = max((part for part in PAGES if file.startswith(part)), key=len)
    title, page = PAGES[part]
    return f"[{title}]({page})"


def _key(text: str) -> str:
    """Returns the sort key of a message: its words without the values."""
    return re.sub(r"[^a-z ]", "", re.sub(r"\{[^}]*\}", "", text).lower()).strip()


def entry(text: str, group: list[Message]) -> str:
    """Returns an item of the list."""
    fence = "``" if "`" in text else "`"
    code = f"{fence} {text} {fence}" if fence == "``" else f"`{text}`"
    code = textwrap.fill(code, 94, subsequent_indent="  ", break_long_words=False)
    errors = ", ".join(f"`{name}`" for name in sorted({message.error for message in group}))
    see = " and ".join(sorted({_see(message.file) for message in group}))
    return f"- {code}<br>\n  {errors}; see {see}."


def page() -> str:
    """Returns the page."""
    groups: dict[str, list[Message]] = {}
    for message in messages():
        groups.setdefault(message.text, []).append(message)
    parts, letter = [HEAD], ""
    for text in sorted(groups, key=lambda text: (_key(text), text)):
        first = _key(text)[0].upper()
        if first != letter:
            letter = first
            parts.append(f"\n## {letter}\n\n")
        parts.append(entry(text, groups[text]) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
