"""Makes docs/errors.md of the messages in the code, which it reads and never runs::

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

Every message that the library raises, generated from its code. Look here for what an error means,
and for the page that says more. A message carries the value and the cure; `{name}` stands for a
value of yours. Messages that begin with a value are listed by their first word. Those that begin
with "has" or "is" are the ends of longer ones, which name the record first.

## Classes

Wrong arguments raise `ValueError` or `TypeError`. Import the other classes from `dalijax.errors`:

| class | base classes | raised if |
| --- | --- | --- |
| `StateError` | `ValueError` | a state is refused; the position has not changed |
| `ProcessError` | `RuntimeError` | processes differ, or one of them is absent |
| `BatchError` | `RuntimeError` | a batch can't be read or decoded; it counts as delivered |
| `RecordError` | `RuntimeError` | records of Grain can't be decoded; the batch counts |
| `UnfitRecordError` | `RecordError`, `ValueError` | records are unlike the first one |
| `GraphError` | `BatchError`, `RecordError` | the graph fails for every record |
| `RaggedError` | `ValueError` | the samples of an output differ in shape |
| `EpochError` | `RuntimeError` | `on_error="skip"` left out every batch of an epoch |
"""
# The part of the package that raises it, the longest prefix first, and the page on it.
PAGES = {
    "adapters/clu": ("CLU", "clu.md"),
    "adapters/grain": ("Grain", "grain.md"),
    "adapters/pax": ("Pax", "pax.md"),
    "adapters/prometheus": ("Seeing and profiling", "seeing.md"),
    "adapters/process_files": ("Elastic runs", "elastic.md"),
    "adapters/t5x": ("T5X", "t5x.md"),
    "adapters/tfdata": ("tf.data", "tfdata.md"),
    "core/augment": ("Randomness and augmentation", "randomness.md"),
    "core/order/epochs": ("Epochs", "epochs.md"),
    "core/functions": ("Functions in the graph", "functions.md"),
    "core/random/draw": ("Randomness and augmentation", "randomness.md"),
    "core/placement": ("Devices and processes", "sharding.md"),
    "core/formats/riff": ("Sources", "sources.md"),
    "core/pipeline/shards": ("Devices and processes", "sharding.md"),
    "core/feeding": ("Sources", "sources.md"),
    "core/feeding/record_": ("Grain", "grain.md"),
    "core/feeding/stream_": ("Grain", "grain.md"),
    "core/tools/show": ("Seeing and profiling", "seeing.md"),
    "core/sources": ("Sources", "sources.md"),
    "core/state": ("States and resuming", "states.md"),
    "core/tools/tune": ("Performance", "performance.md"),
    "fn": ("Functions in the graph", "functions.md"),
    "": ("The iterator", "api/dalijax.md"),
}


class Message(NamedTuple):
    """One message: its text, with {} around values, the exception and the file."""

    text: str
    error: str
    file: str


Names = dict[str, list[ast.expr]]  # the values that a name may have


def _assigned(body: ast.AST) -> Names:
    """The values that are assigned to names in a function or module, and what functions return."""
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
    """The texts that an expression may have; in braces, what a run alone can say."""
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
    """A name for a value: its own, or that of the first value in it."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    inner = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
    skipped = {"self", "printable", *vars(builtins)}  # printable() gives its argument
    inner = [name.strip("_") for name in inner if name not in skipped]
    return inner[0] if inner else "..."


def _errors(tree: ast.AST, outer: Names) -> Iterator[tuple[ast.expr, str, Names]]:
    """The first argument of each call that makes an exception, its class, and the names there."""
    for node in ast.iter_child_nodes(tree):
        names = outer
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = outer | _assigned(node) | {one.arg: [] for one in parameters}
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
    """The messages of all modules, in the order of the files."""
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
    """What a message is listed under: its words, without the values."""
    return re.sub(r"[^a-z ]", "", re.sub(r"\{[^}]*\}", "", text).lower()).strip()


def entry(text: str, group: list[Message]) -> str:
    """One item of the list."""
    fence = "``" if "`" in text else "`"
    code = f"{fence} {text} {fence}" if fence == "``" else f"`{text}`"
    code = textwrap.fill(code, 94, subsequent_indent="  ", break_long_words=False)
    errors = ", ".join(f"`{name}`" for name in sorted({message.error for message in group}))
    see = " and ".join(sorted({_see(message.file) for message in group}))
    return f"- {code}<br>\n  {errors}; see {see}."


def page() -> str:
    """The page."""
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
