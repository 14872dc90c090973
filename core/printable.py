"""Names and messages without characters that control a terminal or hide text."""

from __future__ import annotations

import os
import unicodedata

_LOWEST, _HIGHEST = 0xDC80, 0xDCFF  # how Python decodes bytes that are not UTF-8


def printable(name: str | bytes | os.PathLike[str]) -> str:
    """A name for errors, logs and pages, on one line.

    Control characters, line breaks, characters that change the direction of text, and bytes that
    are not UTF-8 are escaped as in Python's literals: a file name may come from a stranger.
    """
    text = os.fsdecode(name)
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    """A message of several lines, in which all other control characters are escaped."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # spaces
        return character
    code = ord(character)
    if _LOWEST <= code <= _HIGHEST:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
