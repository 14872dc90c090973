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

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Lists the fields that a function takes as ``**arguments: Unpack[...]``."""
        last = list(func.parameters)[-1:]
        if not last or not str(last[0].annotation).startswith("Unpack["):
            return
        types = _types(func, str(last[0].annotation)[len("Unpack[") : -1])
        fields = func.modules_collection["dalijax.core.config.IteratorConfig"].members
        for parameter in list(func.parameters):
            if parameter.kind.name in ("var_positional", "var_keyword"):
                del func.parameters[parameter.name]
        by_position = True
        for name, field in fields.items():
            if name == "_":  # dataclasses.KW_ONLY
                by_position = False
            elif name in types:
                kind = "positional_or_keyword" if by_position else "keyword_only"
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=types[name],
                        kind=griffe.ParameterKind[kind],
                        default=field.value,
                    )
                )

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


def _types(func: griffe.Function, name: str) -> dict[str, Any]:
    """The types of the fields that a TypedDict has, with those of its bases."""
    found = func.modules_collection["dalijax.core.config." + name]
    types: dict[str, Any] = {}
    for base in found.bases:
        if "dalijax.core.config." + str(base) in func.modules_collection:
            types |= _types(func, str(base))
    return types | {key: member.annotation for key, member in found.attributes.items()}
