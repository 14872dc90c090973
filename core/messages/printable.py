"""Escaping of characters that control a terminal or hide text, in names and messages."""

from __future__ import annotations

import os
import unicodedata

from .redaction import redacted, redacted_url

_LOWEST, _HIGHEST = 0xDC80, 0xDCFF  # code points to which Python decodes bytes that are not UTF-8


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """Returns a path, URL or name on one line, with escapes, for errors, logs and pages.

    Control characters, line breaks, bidirectional control characters and bytes that are not UTF-8
    are escaped as in Python literals, because a file name may be untrusted. Secrets in URLs are
    replaced by dots; see `redacted_url`.
    """
    return _with_escapes(redacted_url(os.fsdecode(path)))


def printable_text(text: str) -> str:
    """Returns a text on one line, with escapes, and without the secrets of the URLs in it.

    The name of a record, such as a URL followed by a key, is also a text.
    """
    return _with_escapes(redacted(text))


def printable_lines(text: str) -> str:
    """Returns the same as `printable_text`, but keeps line breaks."""
    return "\n".join(map(_with_escapes, redacted(text).split("\n")))


def printable_repr(value: object, most: int = 80) -> str:
    """Returns the first characters of a value's ``repr``; the value may be or contain a URL."""
    return printable_text(repr(value))[:most]


def _with_escapes(text: str) -> str:
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # spaces
        return character
    code = ord(character)
    if _LOWEST <= code <= _HIGHEST:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
