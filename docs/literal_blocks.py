"""Docstrings end a sentence with `::` before a block of code, as Python's own do."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Turns `::` into a colon: the indented lines below are code in Markdown, too."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
