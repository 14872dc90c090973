"""The docstrings of exceptions quote messages of the code: texts of three words or more."""

import ast
import re

import pytest

from dalijax import errors
from pages import ROOT


def strings(node):
    """Yields the text of each string constant and f-string of a module."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            parts = (v.value for v in child.values if isinstance(v, ast.Constant))
            yield "{}".join(map(str, parts))


def without_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [x for x in body if not is_text(x)]
    return tree


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.fixture(scope="module")
def code():
    files = [*(ROOT / "core").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    trees = (without_docstrings(ast.parse(file.read_text())) for file in files)
    return "\n".join(text for tree in trees for text in strings(tree))


@pytest.mark.parametrize("name", errors.__all__)
def test_they_quote_messages(name, code):
    docstring = " ".join(getattr(errors, name).__doc__.split())
    quotes = [
        q for q in re.findall("``(.*?)``", docstring) if re.fullmatch(r"[^(>]* [^(>]* [^>]*", q)
    ]
    assert quotes, "no message"
    assert [quote for quote in quotes if quote not in code] == []
