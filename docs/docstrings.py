"""Converts docstrings to Markdown: code blocks and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).resolve().parent / "api"


class Docstrings(griffe.Extension):
    """Replaces `::` by a colon, and links public names in backticks to their entries."""

    def __init__(self) -> None:
        pages = "".join(page.read_text() for page in API.glob("*.md"))
        self._entries = set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of an object."""
        if not obj.docstring:
            return

        def link(match: re.Match[str]) -> str:
            for entry in (match[1], f"{obj.path}.{match[1]}"):
                if ("." in match[1] or obj.is_module) and entry in self._entries:
                    return f"[`{match[1]}`][{entry}]"
            return match[0]

        # Markdown formats the indented lines that follow as code.
        text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, text)
